"""Routing of DTensors: each process routes the tokens that it holds, and the width stays in one piece."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

MIXED = (
    "route: {sharded} is a DTensor and {plain} a plain tensor; pass all as DTensors or none. A parameter that "
    "fully_shard sharded is whole only in the forward of the module that it was sharded with: let the block that "
    "routes hold it, or pass it to the block as an argument. Elsewhere .full_tensor() makes a DTensor plain"
)


def any_sharded(tensors: Iterable[object]) -> bool:
    """Whether a DTensor is among them; there is none before torch.distributed.tensor is imported."""
    module = getattr(torch.distributed, "tensor", None)
    return module is not None and any(isinstance(tensor, module.DTensor) for tensor in tensors)


def route_sharded(
    function: Callable[..., Any],
    rows: Sequence[Tensor],
    residual: Tensor | None,
    parameters: Mapping[str, Tensor | None],
    **options: Any,
) -> Any:
    """``function(rows, residual=residual, **parameters, **options)`` for DTensors, by way of plain tensors.

    Args:
        function: routes plain tensors to an output [..., d], or to that and weights [N, ..., H].
        rows: sources [..., d] on one mesh with the same placements: Replicate, or Shard of any dimension but d.
        residual: placed like the sources.
        parameters: by name; gathered where sharded. Their gradients are summed over the processes and placed alike.
        options: passed on.

    Raises:
        TypeError: DTensors and plain tensors are mixed.
        ValueError: sources and residual are placed differently, a width is sharded, or a placement is Partial.
    """
    from torch.distributed.tensor import Partial, Replicate

    tokens = {**{f"sources[{n}]": row for n, row in enumerate(rows)}, "residual": residual}
    check_mixture({**tokens, **parameters})
    like: Any = rows[0] if rows else residual
    for name, tensor in tokens.items():
        if tensor is not None:
            check_placements(name, tensor, like)
    summed = [Replicate() if placement.is_replicate() else Partial() for placement in like.placements]

    def local(parameter: Any) -> Tensor | None:
        if parameter is None:
            return None
        whole: Tensor = parameter.redistribute(like.device_mesh, [Replicate()] * len(summed)).to_local(
            grad_placements=summed
        )
        return whole

    every: list[Any] = list(tokens.values())
    plain = [None if tensor is None else tensor.to_local() for tensor in every]
    result = function(plain[:-1], residual=plain[-1], **{n: local(p) for n, p in parameters.items()}, **options)
    if isinstance(result, Tensor):
        return placed(result, like)
    out, weights = result
    return placed(out, like), placed(weights.movedim(0, -1), like).movedim(-1, 0)


def placed(part: Tensor, like: Any) -> Tensor:
    """This process's part [..., k] as a DTensor whose tokens are those of another [..., d]."""
    from torch.distributed.tensor import DTensor

    shape = torch.Size((*like.shape[:-1], *part.shape[like.dim() - 1 :]))
    strides = torch.empty(shape, device="meta").stride()  # torch cannot infer shape and strides of uneven parts
    return DTensor.from_local(part, like.device_mesh, like.placements, run_check=False, shape=shape, stride=strides)


def check_mixture(tensors: Mapping[str, Tensor | None]) -> None:
    """Raise unless all are DTensors."""
    given = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    sharded = [name for name, tensor in given.items() if any_sharded([tensor])]
    if len(sharded) < len(given):
        raise TypeError(MIXED.format(sharded=sharded[0], plain=next(name for name in given if name not in sharded)))


def check_placements(name: str, tensor: Any, first: Any) -> None:
    """Raise unless a tensor of tokens is placed like the first, with its width in one piece."""
    if tensor.device_mesh != first.device_mesh or tensor.placements != first.placements:
        raise ValueError(
            f"route: {name} has placements {tensor.placements}, expected {first.placements} on the same mesh, as the "
            "first source has; move it by .redistribute()"
        )
    for placement in tensor.placements:
        if placement.is_partial() or placement.is_shard(-1) or placement.is_shard(tensor.dim() - 1):
            raise ValueError(
                f"route: {name} has placements {tensor.placements}, expected Replicate, or Shard of any dimension but "
                "the last, since a key's norm is over the full width; move it by .redistribute()"
            )
