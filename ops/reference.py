"""The routing of one site in plain PyTorch: the specification that every other implementation is compared with."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of the arithmetic: float64 for float64 sources, float32 for every other."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def reference(
    sources: Sequence[Tensor],
    query: Tensor,
    *,
    key_weight: Tensor | None = None,
    null_source: Tensor | None = None,
    residual: Tensor | None = None,
    gate: Tensor | None = None,
    eps: float = 1e-6,
) -> tuple[Tensor, Tensor]:
    """Multi-head routing over depth, Eq. 3 of arXiv 2607.27230, differentiated by autograd.

        a_n^(h) = softmax_n(q_h . RMSNorm(s_n)_[h])        mix_[h] = sum_n a_n^(h) s_n[h]

    Args:
        sources: tensors [..., d] of one shape and float dtype. May be empty where null_source and residual are given.
        query: [H, d/H], one query per head.
        key_weight: [d], the weight of the key's RMSNorm.
        null_source: [d], one more source, the first, the same for every token.
        residual: [..., d], what the mixture is added to.
        gate: [1], what the mixture is multiplied by.
        eps: added to the mean square before the root.

    Returns:
        The output [..., d] in the sources' dtype and the weights [N, ..., H] in float32 (float64 for float64 sources).
    """
    heads = query.shape[0]
    rows = list(sources)
    like = rows[0] if rows else residual
    assert like is not None
    if null_source is not None:
        rows.insert(0, null_source.to(like.dtype).expand_as(like))
    wide = compute_dtype(like.dtype)
    x = torch.stack(rows).to(wide)  # [N, ..., d]
    rstd = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)  # over the full width, never per head
    key = (x * rstd).to(like.dtype).to(wide)
    if key_weight is not None:
        key = key * key_weight.to(wide)
    logits = (key.unflatten(-1, (heads, -1)) * query.to(wide)).sum(-1)  # [N, ..., H]
    weights = logits.softmax(0)
    out = (weights.unsqueeze(-1) * x.unflatten(-1, (heads, -1))).sum(0).flatten(-2)
    if gate is not None:
        out = out * gate.to(wide)
    if residual is not None:
        out = out + residual.to(wide)
    return out.to(like.dtype), weights


def figure3(sources: Sequence[Tensor], query: Tensor, key_weight: Tensor, eps: float = 1e-6) -> Tensor:
    """The paper's Figure 3, every step rounded to the sources' dtype; what our numerics are measured against.

    Args:
        sources: N tensors [..., d].
        query: [H, d/H] in the sources' dtype.
        key_weight: [d] in the sources' dtype.
        eps: added to the mean square before the root.

    Returns:
        The mixture [..., d]. The norm is over the full width, as in Eq. 3 and the authors' code; the listing's per-head
        norm is a slip of the paper.
    """
    heads = query.shape[0]
    values = torch.stack(list(sources))  # [N, ..., d]
    wide = values.float()
    keys = key_weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(values.dtype)
    logits = torch.einsum("hk,n...hk->n...h", query, keys.unflatten(-1, (heads, -1)))
    weights = logits.softmax(0)
    return torch.einsum("n...h,n...hk->...hk", weights, values.unflatten(-1, (heads, -1))).flatten(-2)
