"""One routing site done by others, to time beside ours: eager PyTorch, torch.compile, and packages that are installed.

Each is a differentiable function of (sources, query [H, K], key_weight [d]). The packages know H = 1 only.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from mhar_compile.ops import reference

EPS = 1e-6
Site = Callable[[Sequence[Tensor], Tensor, Tensor], Tensor]


def eager(sources: Sequence[Tensor], query: Tensor, key_weight: Tensor) -> Tensor:
    """The reference: stack, norm, dot, softmax, weighted sum."""
    return reference(sources, query, key_weight=key_weight, eps=EPS)[0]


def compiled() -> Site:
    """torch.compile of the reference, one graph for each number of sources."""
    return torch.compile(eager, dynamic=False, fullgraph=True)


def installed(heads: int) -> dict[str, Site]:
    """The packages at hand, by name; none of them for more than one head."""
    found: dict[str, Site] = {}
    if heads != 1:
        return found
    for name, module, build in (
        ("fla-core fused_attnres", "fla.ops.attnres", fla),
        ("fast-attnres", "attnres", fast),
        ("liger-kernel", "liger_kernel.ops.attn_res", liger),
    ):
        try:
            found[name] = build(importlib.import_module(module))
        except Exception as error:  # absent, or not made for this Triton
            print(f"{name} is left out: {type(error).__name__}: {error}")
    return found


def fla(module: Any) -> Site:
    return lambda sources, query, key_weight: module.fused_attnres(
        query.flatten().to(sources[0].dtype),
        list(sources),
        key_weight.to(sources[0].dtype),
        rms_eps=EPS,
        checkpoint_level=0,
    )


def fast(module: Any) -> Site:
    """It knows no key weight, so the weight is folded into its query."""
    return lambda sources, query, key_weight: module.attnres(
        list(sources), (query.flatten() * key_weight).to(sources[0].dtype), eps=EPS
    )


def liger(module: Any) -> Site:
    """It wants the sources stacked; the stack is part of the call."""
    return lambda sources, query, key_weight: module.LigerAttnResFunction.apply(
        torch.stack(list(sources)), query.flatten().to(sources[0].dtype), key_weight.to(sources[0].dtype), EPS
    )
