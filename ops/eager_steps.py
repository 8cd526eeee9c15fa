"""The steps that the compiler takes a route apart into, in plain PyTorch; the mathematics is that of ``eager.route``.

A *family* of M sites shares H, eps, width and dtype. Its folded queries are one tensor [M, H, K], a row a site. A
source is scored once against a run of rows; row r of its logits belongs to site ``first + r``. A site's null source
is a source of shape [d], scored against that site alone. Arithmetic is float32 (float64 for float64 sources).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .eager import fold as fold_one
from .eager import split
from .reference import compute_dtype

BITS = {torch.bfloat16: 8, torch.float16: 5}  # bits that out lacks of float32, less the 8 kept in the residue


def fold(queries: Sequence[Tensor], key_weights: Sequence[Tensor | None], dtype: torch.dtype) -> Tensor:
    """The queries [H, K] times their key weights [d], stacked: [M, H, K] in dtype."""
    return torch.stack([fold_one(query, weight, dtype) for query, weight in zip(queries, key_weights, strict=True)])


def unfold(
    grads: Sequence[Tensor], sites: Sequence[int], queries: Sequence[Tensor], key_weights: Sequence[Tensor | None]
) -> tuple[list[Tensor], list[Tensor]]:
    """Gradients of the queries and key weights (empty where absent) from those of the folded queries.

    ``grads`` are the [J, H, K] that the pulls returned; ``sites`` names the site of every row of all of them in turn.
    """
    total = grads[0].new_zeros((len(queries), *grads[0].shape[1:]))
    at = 0
    for grad in grads:
        rows, at = sites[at : at + len(grad)], at + len(grad)
        for row, site in zip(grad, rows, strict=True):
            total[site] += row
    dqueries, dkeys = [], []
    for dfolded, query, weight in zip(total, queries, key_weights, strict=True):
        scaled = dfolded if weight is None else dfolded * weight.to(dfolded.dtype).view_as(dfolded)
        dqueries.append(scaled.to(query.dtype, copy=True))
        dkeys.append(
            query.new_empty(0) if weight is None else (dfolded * query.to(dfolded.dtype)).flatten().to(weight.dtype)
        )
    return dqueries, dkeys


def score(
    source: Tensor, folded: Tensor, first: int, count: int, eps: float, after: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Logits [count, ..., H] of a source [..., d] at the sites first..first+count-1, and its reciprocal RMS [...].

    ``after`` is not read: a gradient, where the scoring belongs to the backward and not to the forward.
    """
    x = source.to(folded.dtype)
    rstd = torch.rsqrt(x.square().mean(-1) + eps).contiguous()
    key = by_head(rounded(x, rstd, source.dtype), folded.shape[1])  # [H, tokens, K]
    logits = torch.bmm(key, folded[first : first + count].permute(1, 2, 0))  # [H, tokens, count]
    return logits.permute(2, 1, 0).reshape(count, *rstd.shape, folded.shape[1]).contiguous(), rstd


def part(logits: Tensor, first: int, count: int) -> Tensor:
    """Some sites' rows [count, ..., H] of logits [sites, ..., H], in memory of their own."""
    return logits.narrow(0, first, count) * 1  # no clone, which Inductor would take for the rows where they lie


def mix(
    sources: Sequence[Tensor],
    logits: Sequence[Tensor],
    firsts: Sequence[int],
    site: int,
    residual: Tensor | None,
    gate: Tensor | None,
    carried: Tensor | None,
    carried_lse: Tensor | None,
    dtype: torch.dtype,
    keep: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Output [..., d] in dtype and log-sum-exp [..., H] of one site, and the residue of the output's rounding.

    ``carried`` [..., d] and ``carried_lse`` [..., H] are the mixture over further sources, by ``mix_tile``. The residue
    [..., d] is int8, see ``residue``; empty unless ``keep``.
    """
    rows, values = rows_of(logits, firsts, site), list(sources)
    if carried is not None and carried_lse is not None:
        rows, values = [carried_lse, *rows], [carried, *values]
    mixture, lse = weighted_sum(values, rows, like_of([*values, residual]))
    out = mixture if gate is None else mixture * gate.to(mixture.dtype)
    if residual is not None:
        out = out + residual.to(out.dtype)
    narrow = out.to(dtype)
    return narrow, lse, residue(out, narrow) if keep else out.new_empty(0, dtype=torch.int8)


def mix_tile(
    sources: Sequence[Tensor], logits: Sequence[Tensor], firsts: Sequence[int], sites: Sequence[int]
) -> tuple[list[Tensor], list[Tensor]]:
    """For each site the mixture over these sources alone, [..., d] in float32, and its log-sum-exp [..., H]."""
    like = like_of(sources)
    pairs = [weighted_sum(sources, rows_of(logits, firsts, site), like) for site in sites]
    return [mixture for mixture, _ in pairs], [lse for _, lse in pairs]


def coupling(grad_out: Tensor, out: Tensor, residue: Tensor | None, heads: int) -> Tensor:
    """S = <grad_out, mixture> a head, [..., H], for a site whose output is the mixture; of float32 in float64.

    What S errs by is in every source's dlogit; where sources are alike their gradients of the query cancel, but for it.
    """
    mixture = out.double() if residue is None else restored(out, residue)
    products = split(grad_out.to(mixture.dtype) * mixture, heads)
    return products.sum(-1).to(compute_dtype(out.dtype)).contiguous()


def coupling_from_sources(
    grad_out: Tensor,
    sources: Sequence[Tensor],
    logits: Sequence[Tensor],
    firsts: Sequence[int],
    site: int,
    lse: Tensor,
    gate: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """S = gate * sum_n w_n <grad_out, x_n> a head, [..., H], and the gradient of the gate [1] (empty where absent)."""
    wide = lse.dtype
    dout = grad_out.to(wide)
    total = torch.zeros_like(lse)
    # Not exp(logits - lse), whose common rounding would not cancel against the dots of the pulls.
    weights = torch.stack([row.expand_as(lse) for row in rows_of(logits, firsts, site)]).softmax(0)
    for source, weight in zip(sources, weights, strict=True):
        total.addcmul_(weight, split(dout * source.to(wide), lse.shape[-1]).sum(-1))
    if gate is None:
        return total, grad_out.new_empty(0)
    return total * gate.to(wide), total.sum().reshape(1).to(gate.dtype)


def pull(
    sources: Sequence[Tensor],
    rstds: Sequence[Tensor],
    logits: Sequence[Tensor],
    firsts: Sequence[int],
    sites: Sequence[int],
    grad_outs: Sequence[Tensor],
    lses: Sequence[Tensor],
    couplings: Sequence[Tensor],
    gates: Sequence[Tensor | None],
    folded: Tensor,
    carried: Sequence[Tensor],
    wide: Sequence[bool],
) -> tuple[list[Tensor], Tensor]:
    """Gradient of each source from all of the sites, and the gradient [J, H, K] of their folded queries.

    Args:
        sources: R tensors [..., d], or one null source [d], whose gradient is summed over the tokens.
        sites: J sites; grad_outs, lses, couplings and gates have one entry for each.
        carried: R gradients from earlier pulls of the same sources, added here; or none.
        wide: for each source, whether its gradient stays in float32 for a later pull.
    """
    dmixes = [
        split(grad.to(folded.dtype) * (1.0 if gate is None else gate.to(folded.dtype)), folded.shape[1])
        for grad, gate in zip(grad_outs, gates, strict=True)
    ]
    dfolded = torch.zeros((len(sites), *folded.shape[1:]), dtype=folded.dtype, device=folded.device)
    grads = []
    for n, source in enumerate(sources):
        rows = rows_of_source(logits[n], firsts[n], sites)
        grad, dqueries = pull_one(source, rstds[n], rows, sites, dmixes, lses, couplings, folded)
        dfolded += dqueries
        grad = grad if not carried else grad + carried[n].to(grad.dtype)
        grads.append(grad.to(folded.dtype if wide[n] else source.dtype))
    return grads, dfolded


def pull_one(
    source: Tensor,
    rstd: Tensor,
    rows: Sequence[Tensor],
    sites: Sequence[int],
    dmixes: Sequence[Tensor],
    lses: Sequence[Tensor],
    couplings: Sequence[Tensor],
    folded: Tensor,
) -> tuple[Tensor, Tensor]:
    """The gradient of one source, in float32, and its part [J, H, K] of the folded queries' gradient."""
    heads, width = folded.shape[1], source.shape[-1]
    x = source.to(folded.dtype)
    values = split(x, heads)
    grad = torch.zeros(dmixes[0].shape, dtype=folded.dtype, device=source.device)
    dlogits, norm = [], torch.zeros(grad.shape[:-2], dtype=folded.dtype, device=source.device)
    for row, dmix, lse, s in zip(rows, dmixes, lses, couplings, strict=True):
        weight = (row - lse).exp()
        dlogit = weight * ((dmix * values).sum(-1) - s)
        grad.addcmul_(weight.unsqueeze(-1), dmix)
        norm += (dlogit * row).sum(-1)
        dlogits.append(dlogit)
    dl = by_head(torch.stack(dlogits, -1).flatten(-2), heads)  # [H, tokens, J]
    queries = torch.stack([folded[site] for site in sites], 1)  # [H, J, K]
    key_grad = torch.bmm(dl, queries).transpose(0, 1).reshape(grad.shape)
    grad.addcmul_(key_grad, rstd[..., None, None])
    grad.sub_(values * (rstd.square() * norm / width)[..., None, None])
    key = by_head(rounded(x, rstd, source.dtype).expand(*grad.shape[:-2], width), heads)
    dqueries = torch.bmm(dl.transpose(1, 2), key).transpose(0, 1)
    grad = grad.flatten(-2)
    return grad if source.shape == grad.shape else grad.reshape(-1, width).sum(0), dqueries


def weighted_sum(values: Sequence[Tensor], rows: Sequence[Tensor], like: Tensor) -> tuple[Tensor, Tensor]:
    """The softmax mixture [..., d] of the values by the rows of logits [..., H], and its log-sum-exp, in float32."""
    heads, wide = rows[0].shape[-1], rows[0].dtype
    tokens = like.shape[:-1]
    stacked = torch.stack([row.expand(*tokens, heads) for row in rows])
    mixture = torch.zeros((*tokens, heads, like.shape[-1] // heads), dtype=wide, device=like.device)
    for value, weight in zip(values, stacked.softmax(0), strict=True):
        mixture.addcmul_(weight.unsqueeze(-1), split(value.to(wide), heads))
    return mixture.flatten(-2), stacked.logsumexp(0)


def residue(wide: Tensor, narrow: Tensor) -> Tensor:
    """What rounding lost, in 256ths of the last place of narrow: the distance of the two's bits as integers."""
    shift = BITS[narrow.dtype]
    lost = wide.view(torch.int32) - narrow.float().view(torch.int32)
    return ((lost + (1 << (shift - 1))) >> shift).clamp(-128, 127).to(torch.int8)


def restored(narrow: Tensor, residue: Tensor) -> Tensor:
    """The float32 value before rounding, to 8 more bits."""
    return (narrow.float().view(torch.int32) + (residue.to(torch.int32) << BITS[narrow.dtype])).view(torch.float32)


def rounded(x: Tensor, rstd: Tensor, narrow: torch.dtype) -> Tensor:
    """The normalised source, rounded to the sources' dtype, as x's dtype."""
    return (x * rstd.unsqueeze(-1)).to(narrow).to(x.dtype)


def by_head(x: Tensor, heads: int) -> Tensor:
    """[..., H * K] as [H, tokens, K]."""
    return x.reshape(-1, heads, x.shape[-1] // heads).transpose(0, 1)


def rows_of(logits: Sequence[Tensor], firsts: Sequence[int], site: int) -> list[Tensor]:
    """The logits [..., H] of every source at one site."""
    return [row[site - first] for row, first in zip(logits, firsts, strict=True)]


def rows_of_source(logits: Tensor, first: int, sites: Sequence[int]) -> list[Tensor]:
    """The logits [..., H] of one source at every site."""
    return [logits[site - first] for site in sites]


def like_of(tensors: Sequence[Tensor | None]) -> Tensor:
    """A tensor of the shape of the output: any but a null source among them."""
    return max((tensor for tensor in tensors if tensor is not None), key=Tensor.dim)
