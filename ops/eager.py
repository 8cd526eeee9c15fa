"""The operator and its backward in plain PyTorch, a source at a time: nothing is stacked, nothing is differentiated.

Arithmetic is float32 (float64 for float64 sources). Shapes: N sources, the null source counted and first; H heads of
width K = d/H; "..." are the tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .reference import compute_dtype


def route(
    sources: Sequence[Tensor],
    query: Tensor,
    key_weight: Tensor | None,
    null_source: Tensor | None,
    residual: Tensor | None,
    gate: Tensor | None,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Output [..., d], logits [N, ..., H], log-sum-exp [..., H] and reciprocal RMS [N, ...] of one site."""
    like = sources[0] if sources else residual
    assert like is not None
    heads, wide, tokens = query.shape[0], compute_dtype(like.dtype), like.shape[:-1]
    folded = fold(query, key_weight, wide)
    rows = with_null(sources, null_source, like)

    logits = like.new_empty((len(rows), *tokens, heads), dtype=wide)
    rstd = like.new_empty((len(rows), *tokens), dtype=wide)
    for n, row in enumerate(rows):
        x = row.to(wide)
        rstd[n] = torch.rsqrt(x.square().mean(-1) + eps)
        logits[n] = (rounded_key(x, rstd[n], like.dtype, heads) * folded).sum(-1)

    weights = logits.softmax(0)
    mix = torch.zeros((*tokens, *query.shape), dtype=wide, device=like.device)
    for weight, row in zip(weights, rows, strict=True):
        mix.addcmul_(weight.unsqueeze(-1), split(row.to(wide), heads))
    out = mix.flatten(-2)
    if gate is not None:
        out = out * gate.to(wide)
    if residual is not None:
        out = out + residual.to(wide)
    return out.to(like.dtype), logits, logits.logsumexp(0), rstd


def route_backward(
    grad_out: Tensor,
    sources: Sequence[Tensor],
    query: Tensor,
    key_weight: Tensor | None,
    null_source: Tensor | None,
    gate: Tensor | None,
    logits: Tensor,
    lse: Tensor,
    rstd: Tensor,
) -> tuple[list[Tensor], Tensor, Tensor, Tensor, Tensor]:
    """Gradients of the sources, query, key weight, null source and gate; empty where the argument is absent."""
    heads, wide, width = query.shape[0], logits.dtype, grad_out.shape[-1]
    folded = fold(query, key_weight, wide)
    rows = with_null(sources, null_source, grad_out)
    dout = split(grad_out.to(wide), heads)  # [..., H, K]
    scale = torch.ones((), dtype=wide, device=grad_out.device) if gate is None else gate.to(wide)
    dmix = dout * scale
    # Not exp(logits - lse): the rounding of lse moves all weights together, and what sources share no longer cancels.
    weights = logits.softmax(0)

    # <dout, mix> is summed from the sources: formed from the rounded output it costs most of a bf16 gradient's digits.
    dots = torch.stack([(dout * split(row.to(wide), heads)).sum(-1) for row in rows])  # [N, ..., H]
    coupling = (weights * dots).sum(0)  # [..., H]
    dlogits = scale * weights * (dots - coupling)
    through_norm = rstd * (dlogits * logits).sum(-1) / width  # [N, ...]

    grads, dfolded = [], torch.zeros_like(folded)
    for n, row in enumerate(rows):
        x = row.to(wide)
        dfolded += (
            (dlogits[n].unsqueeze(-1) * rounded_key(x, rstd[n], grad_out.dtype, heads)).reshape(-1, *query.shape).sum(0)
        )
        through_key = dlogits[n].unsqueeze(-1) * folded - split(x * through_norm[n].unsqueeze(-1), heads)
        grads.append((weights[n].unsqueeze(-1) * dmix).addcmul_(through_key, rstd[n][..., None, None]).flatten(-2))

    def absent() -> Tensor:  # a new one each time: an operator's outputs may not alias
        return grad_out.new_empty(0)

    dquery = dfolded if key_weight is None else dfolded * key_weight.to(wide).view_as(query)
    dkey = absent() if key_weight is None else (dfolded * query.to(wide)).flatten().to(key_weight.dtype)
    dnull = absent() if null_source is None else grads.pop(0).reshape(-1, width).sum(0).to(null_source.dtype)
    dgate = absent() if gate is None else coupling.sum().reshape(1).to(gate.dtype)
    return [grad.to(grad_out.dtype) for grad in grads], dquery.to(query.dtype), dkey, dnull, dgate


def split(x: Tensor, heads: int) -> Tensor:
    """[..., d] as [..., H, K]."""
    return torch.unflatten(x, -1, (heads, x.shape[-1] // heads))


def fold(query: Tensor, key_weight: Tensor | None, wide: torch.dtype) -> Tensor:
    """The query times the key weight, [H, K]."""
    folded = query.to(wide)
    return folded if key_weight is None else folded * key_weight.to(wide).view_as(query)


def rounded_key(x: Tensor, rstd: Tensor, narrow: torch.dtype, heads: int) -> Tensor:
    """The key before its weight, [..., H, K], rounded to the sources' dtype."""
    return split((x * rstd.unsqueeze(-1)).to(narrow).to(x.dtype), heads)


def with_null(sources: Sequence[Tensor], null_source: Tensor | None, like: Tensor) -> list[Tensor]:
    """The sources, the null source first as a view that repeats it for every token."""
    if null_source is None:
        return list(sources)
    return [null_source.to(like.dtype).expand_as(like), *sources]
