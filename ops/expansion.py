"""The operator as a few operations that any PyTorch has, however many its sources: for programs that leave Python.

The mathematics of ``eager.route``, with nothing written in place and a number of operations that does not grow with N.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .eager import fold, split, with_null
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
    heads, wide = query.shape[0], compute_dtype(like.dtype)
    rows = with_null(sources, null_source, like)
    x = torch.cat(rows).view(len(rows), *like.shape).to(wide)  # Inductor makes N operations more of a stack
    rstd = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    key = rounded(x * rstd, like.dtype)
    logits = (split(key, heads) * fold(query, key_weight, wide)).sum(-1)
    out = (logits.softmax(0).unsqueeze(-1) * split(x, heads)).sum(0).flatten(-2)
    if gate is not None:
        out = out * gate.to(wide)
    if residual is not None:
        out = out + residual.to(wide)
    return out.to(like.dtype), logits, logits.logsumexp(0), rstd.squeeze(-1)


def rounded(x: Tensor, narrow: torch.dtype) -> Tensor:
    """x rounded to a narrower dtype and back, its gradient passing as through a cast."""
    if x.dtype == narrow:
        return x
    # Inductor drops a cast, or a change of view, that another undoes; all bits of an integer it keeps.
    bits = x.detach().to(narrow).view(torch.int16) & -1
    return x + (bits.view(narrow).to(x.dtype) - x.detach())  # exact: x's dtype holds the difference
