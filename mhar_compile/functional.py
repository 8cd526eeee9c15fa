"""``route``: one routing site as a function, with every argument checked before the operator sees it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, overload

import torch
from torch import Tensor

from .sharded import any_sharded, route_sharded

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@overload
def route(
    sources: Sequence[Tensor] | Tensor,
    query: Tensor,
    *,
    heads: int | None = None,
    key_weight: Tensor | None = None,
    null_source: Tensor | None = None,
    residual: Tensor | None = None,
    gate: Tensor | None = None,
    eps: float = 1e-6,
    return_weights: Literal[False] = False,
) -> Tensor: ...


@overload
def route(
    sources: Sequence[Tensor] | Tensor,
    query: Tensor,
    *,
    heads: int | None = None,
    key_weight: Tensor | None = None,
    null_source: Tensor | None = None,
    residual: Tensor | None = None,
    gate: Tensor | None = None,
    eps: float = 1e-6,
    return_weights: Literal[True],
) -> tuple[Tensor, Tensor]: ...


def route(
    sources: Sequence[Tensor] | Tensor,
    query: Tensor,
    *,
    heads: int | None = None,
    key_weight: Tensor | None = None,
    null_source: Tensor | None = None,
    residual: Tensor | None = None,
    gate: Tensor | None = None,
    eps: float = 1e-6,
    return_weights: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Mix sources by a softmax over depth, each of H heads of the width on its own (Eq. 3 of arXiv 2607.27230).

        w_n,h    = softmax_n <q_h, (RMSNorm(x_n) * key_weight)_[h]>
        out_[h]  = residual_[h] + gate * sum_n w_n,h x_n,[h]

    The norm is over the full width; scores, softmax and sums are float32 (float64 for float64 sources); the normalised
    key is rounded to the sources' dtype once, and so is the output.

    Args:
        sources: N >= 1 tensors [..., d] of one shape, dtype (float32, bfloat16, float16 or float64) and device, or one
            tensor [N, ..., d]. N may be 0 where both null_source and residual are given. A source whose last dimension
            is contiguous (on CUDA: and whose tokens take at most two strides) is read where it lies, others are copied.
            The sum of squares of a token must be representable in float32.
        query: [H, d/H]; or [d] together with heads.
        heads: H, needed only where query is [d].
        key_weight: [d], weight of the key's RMSNorm; ones where absent.
        null_source: [d], one more source, the same for every token; it comes first and counts in N of the weights.
        residual: [..., d] in the sources' dtype, added to the mixture.
        gate: [1], multiplies the mixture.
        eps: added to the mean square; positive, a normal float32 number.
        return_weights: return the weights too.

    Parameters (query, key_weight, null_source, gate) may have another float dtype than the sources; their gradients
    take the parameter's dtype. Every tensor argument has a first-order gradient.

    All tensors may be DTensors: sources and residual of the same placements, Replicate or Shard of any dimension but
    the last, parameters of any. Each process routes the tokens that it holds; the results are placed like the sources.

    Returns:
        The output [..., d] in the sources' dtype; with return_weights also the weights [N, ..., H] in float32 (float64
        for float64 sources). The weights carry no gradient.

    Raises:
        TypeError: an argument is not a tensor (or a sequence of them), a dtype is not a supported float, or eps or
            heads is not a number; DTensors and plain tensors are mixed.
        ValueError: no sources, shapes, dtypes or devices that do not fit, d not divisible by H, eps out of range;
            DTensors whose placements differ or shard the width.
        RuntimeError: double backward, forward mode or a torch.func transform, none of which is supported.
    """
    rows = list(sources.unbind(0)) if isinstance(sources, Tensor) and sources.dim() > 1 else sources
    like = check_sources(rows, null_source, residual)
    rows = list(rows)
    if any_sharded((*rows, query, key_weight, null_source, residual, gate)):
        parameters = {"query": query, "key_weight": key_weight, "null_source": null_source, "gate": gate}
        options = {"heads": heads, "eps": eps, "return_weights": return_weights}
        result: Tensor | tuple[Tensor, Tensor] = route_sharded(route, rows, residual, parameters, **options)
        return result
    query = query_by_head(query, heads, like)
    check_parameters(like, key_weight, null_source, gate)
    check_eps(eps)
    rows = [contiguous_width(row) for row in rows]
    residual = None if residual is None else contiguous_width(residual)
    out, logits, _, _ = torch.ops.mhar.route(rows, query, key_weight, null_source, residual, gate, float(eps))
    return (out, logits.softmax(0)) if return_weights else out


def check_sources(sources: object, null_source: object, residual: object) -> Tensor:
    """The tensor that all others must be like, the first source; raise unless sources and residual are."""
    if not isinstance(sources, Sequence) or isinstance(sources, str):
        raise TypeError(
            f"route: sources must be a sequence of tensors [..., d] or one tensor [N, ..., d], got {described(sources)}"
        )
    if not sources and (null_source is None or residual is None):
        raise ValueError("route: no sources; pass at least one tensor [..., d], or both null_source and residual")
    first, name = (sources[0], "sources[0]") if sources else (residual, "residual")
    check_float_tensor(first, name)
    assert isinstance(first, Tensor)
    if first.dim() == 0 or first.shape[-1] == 0:
        raise ValueError(f"route: {name} has shape {list(first.shape)}, expected [..., d] with d >= 1")
    for n, source in enumerate(sources[1:], 1):
        check_like(source, f"sources[{n}]", first, name)
    if residual is not None:
        check_like(residual, "residual", first, name)
    return first


def check_like(tensor: object, name: str, first: Tensor, first_name: str) -> None:
    """Raise unless tensor has the shape, dtype and device of the first source."""
    check_float_tensor(tensor, name)
    assert isinstance(tensor, Tensor)
    if tensor.shape != first.shape:
        raise ValueError(
            f"route: {name} has shape {list(tensor.shape)}, expected {list(first.shape)}, the shape of {first_name}"
        )
    if tensor.dtype != first.dtype:
        raise ValueError(
            f"route: {name} has dtype {tensor.dtype}, expected {first.dtype}, the dtype of {first_name}; "
            "cast it before routing"
        )
    if tensor.device != first.device:
        raise ValueError(f"route: {name} is on {tensor.device}, expected {first.device}, the device of {first_name}")


def query_by_head(query: object, heads: object, like: Tensor) -> Tensor:
    """The query as [H, d/H]."""
    check_float_tensor(query, "query")
    assert isinstance(query, Tensor)
    width = like.shape[-1]
    if heads is not None and (not isinstance(heads, int) or isinstance(heads, bool)):
        raise TypeError(f"route: heads must be an int, got {described(heads)}")
    count = heads if heads is not None else query.shape[0] if query.dim() == 2 else None
    if count is None:
        raise ValueError(
            f"route: query has shape {list(query.shape)}; pass it as [H, d/H], or as [d] together with heads="
        )
    if count < 1 or width % count:
        raise ValueError(f"route: width {width} is not divisible by {count} heads")
    if query.shape == (count, width // count):
        on_device(query, "query", like)
        return query
    if query.shape != (width,):
        raise ValueError(
            f"route: query has shape {list(query.shape)}, expected {[count, width // count]} "
            f"({count} heads of width {width}) or [{width}]"
        )
    on_device(query, "query", like)
    return query.view(count, width // count)


def check_parameters(like: Tensor, key_weight: object, null_source: object, gate: object) -> None:
    """Raise unless the optional parameters have their shapes and the sources' device."""
    width = like.shape[-1]
    for tensor, name, size in (
        (key_weight, "key_weight", width),
        (null_source, "null_source", width),
        (gate, "gate", 1),
    ):
        if tensor is None:
            continue
        check_float_tensor(tensor, name)
        assert isinstance(tensor, Tensor)
        if tensor.shape != (size,):
            raise ValueError(f"route: {name} has shape {list(tensor.shape)}, expected [{size}]")
        on_device(tensor, name, like)


def check_eps(eps: object) -> None:
    """Raise unless eps is a positive number that float32 holds."""
    if not isinstance(eps, (int, float, torch.SymFloat)) or isinstance(eps, bool):
        raise TypeError(f"route: eps must be a number, got {described(eps)}")
    # The limits of float32 in digits: a float that has a name would become a symbol under dynamic=True.
    if not 1.1754944e-38 <= eps <= 3.4028234e38:
        got = "" if torch.compiler.is_compiling() else f", got {eps}"  # a symbol, under a compiler, has no text
        raise ValueError(f"route: eps must be positive and finite, a normal number of float32{got}")


def check_float_tensor(tensor: object, name: str) -> None:
    """Raise unless tensor is a tensor of a supported dtype."""
    if not isinstance(tensor, Tensor):
        raise TypeError(f"route: {name} must be a tensor, got {described(tensor)}")
    if tensor.layout != torch.strided:
        raise TypeError(f"route: {name} has layout {tensor.layout}, expected a dense tensor; convert it by .to_dense()")
    if tensor.dtype not in FLOATS:
        raise TypeError(f"route: {name} has dtype {tensor.dtype}, expected float32, bfloat16, float16 or float64")


def on_device(tensor: Tensor, name: str, like: Tensor) -> None:
    """Raise unless a parameter is where the sources are."""
    if tensor.device != like.device:
        raise ValueError(f"route: {name} is on {tensor.device}, expected {like.device}, the sources' device")


def contiguous_width(tensor: Tensor) -> Tensor:
    """The tensor itself where its last dimension is contiguous, else a copy."""
    return tensor if tensor.shape[-1] == 1 or tensor.stride(-1) == 1 else tensor.contiguous()


def described(value: object) -> str:
    """An argument in an error message."""
    return f"a tensor of shape {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
