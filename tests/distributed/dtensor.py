"""Routes whose tensors are DTensors, against plain ones; run by ``ddp`` in its two processes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from mhar_compile import route

TOKENS = (3, 5, 8)  # batch and length that two processes share unevenly
ROWS = {"sources[0]": TOKENS, "sources[1]": TOKENS, "residual": TOKENS}
PARAMETERS = {"query": (4, 2), "key_weight": (8,), "null_source": (8,), "gate": (1,)}


def compared(tokens: Any, parameter: Any, compiled: bool) -> dict[str, Any]:
    """The largest difference to plain tensors in outputs and gradients; where outputs and gradients lie."""
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    torch._dynamo.reset()
    plain = {name: torch.randn(shape, dtype=torch.float64) for name, shape in (ROWS | PARAMETERS).items()}
    sharded = {
        name: distribute_tensor(tensor, mesh, [tokens if name in ROWS else parameter]) for name, tensor in plain.items()
    }
    function = torch.compile(route, backend="aot_eager", fullgraph=True) if compiled else route
    results = [call(route, plain), call(function, sharded)]
    pairs = zip(*results, strict=True)
    return {
        "difference": max(float((a - b.full_tensor()).abs().max()) for a, b in pairs),  # type: ignore[attr-defined]
        "placements": [str(tensor.placements[0]) for tensor in results[1]],  # type: ignore[attr-defined]
        "expected": [str(tokens), str(tokens if tokens.is_replicate() else Shard(tokens.dim + 1))]
        + [str(tokens if name in ROWS else parameter) for name in plain],
    }


def call(function: Callable[..., Any], tensors: dict[str, Tensor]) -> list[Tensor]:
    """Output, weights and the gradient of every argument."""
    leaves = {name: tensor.detach().requires_grad_() for name, tensor in tensors.items()}
    sources = [leaves["sources[0]"], leaves["sources[1]"]]
    others = {name: leaf for name, leaf in leaves.items() if not name.startswith("sources")}
    out, weights = function(sources, **others, return_weights=True)
    return [out.detach(), weights, *torch.autograd.grad((out * out.detach().cos()).sum(), list(leaves.values()))]


def refused(kind: str) -> dict[str, Any]:
    """The error for a mistake."""
    mesh = init_device_mesh("cpu", (2,))
    place: Callable[..., Tensor] = lambda tensor, placement: distribute_tensor(tensor, mesh, [placement])  # noqa: E731
    x, query = torch.randn(TOKENS), torch.randn(4, 2)
    whole = place(query, Replicate())
    sources, query = {
        "plain sources": ([x, x], whole),
        "plain query": ([place(x, Replicate())] * 2, query),
        "width": ([place(x, Shard(2))] * 2, whole),
        "placements": ([place(x, Shard(0)), place(x, Shard(1))], whole),
    }[kind]
    try:
        route(sources, query)
    except Exception as raised:
        return {"raised": type(raised).__name__, "text": str(raised)}
    return {"raised": None}


CASES: dict[str, Callable[[], dict[str, Any]]] = {
    **{
        f"dtensor-{tokens}-{parameter}-{compiled}": functools.partial(compared, tokens, parameter, compiled)
        for tokens, parameter, compiled in [
            (Replicate(), Replicate(), False),
            (Shard(0), Replicate(), False),
            (Shard(1), Shard(0), False),
            (Shard(0), Replicate(), True),
            (Shard(1), Shard(0), True),
        ]
    },
    **{
        f"refused-{kind}": functools.partial(refused, kind)
        for kind in ("plain sources", "plain query", "width", "placements")
    },
}
