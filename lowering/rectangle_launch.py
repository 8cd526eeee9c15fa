"""Launches of the kernels of a rectangle of sources x sites, on tensors that the caller allocates.

Shapes as in rectangles.py; sources and gradients are rows [tokens, d], see ``launch.row_of``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from .launch import SUM_CONSTANTS, Launch, padded, site_constants, site_options
from .rectangles import mix, pull, query_gradient, score
from .rules import RECTANGLE, block_rule, ceil_div, site_rule
from .site import site_sums

State = tuple[Tensor, Tensor, Tensor]  # (max, sum, mixture), float32 [sites, tokens, H] twice and [sites, tokens, d]
MIX_GROUP = 4  # 16-byte loads of a thread in flight before the first is used; 1 beside the sums of several sites


def score_launch(source: Tensor, queries: Tensor, eps: float, logits: Tensor, rstd: Tensor) -> Launch:
    """One source's rstd [tokens] and logits [sites, tokens, H] against queries [sites, d]."""
    (tokens, width), heads = source.shape, logits.shape[-1]
    rule = block_rule(width // heads)
    arguments = dict(
        source=source,
        stride=source.stride(0),
        queries=queries,
        logits=logits,
        rstd=rstd,
        sites=len(queries),
        tokens=tokens,
        eps=eps,
    )
    constants = {"H": heads, "K": width // heads, "TOKENS": rule.tokens, "COLUMNS": rule.columns, "SITES": rule.sites}
    return Launch(score, (ceil_div(tokens, rule.tokens),), arguments, constants, {"num_warps": rule.warps})


def mix_launches(
    rows: Sequence[Tensor],
    logits: Sequence[Tensor],
    sites: int,
    before: State | None = None,
    after: State | None = None,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    residual: Tensor | None = None,
    gate: Tensor | None = None,
) -> Iterator[Launch]:
    """Mixtures of the rows at one or more sites, one launch for every RECTANGLE rows.

    before is what earlier sources left, absent where these are the first. after is written, unless out and lse, of a
    single site, are given; its max and sum are other memory than before's.
    """
    (tokens, width), heads = rows[0].shape, logits[0].shape[-1]
    rule = site_rule(heads, width // heads, rows[0].element_size())
    constants = site_constants(heads, width // heads, rows[0]) | {
        "GROUP": MIX_GROUP if sites == 1 else 1,
        "SITES": sites,
    }
    units = ceil_div(heads, rule.heads) * ceil_div(width // heads, rule.columns)
    unused = (logits[0],) * 3  # in the place of a state that is not read, or not written
    read = before
    for first in range(0, len(rows), RECTANGLE):
        final = first + RECTANGLE >= len(rows)
        written = after or unused
        if not final:
            written = state_like(rows[0], sites, heads)
        carry = read or unused
        part = list(rows[first : first + RECTANGLE])
        arguments = dict(
            sources=padded(part),
            strides=padded([row.stride(0) for row in part]),
            logits=padded(list(logits[first : first + RECTANGLE])),
            count=len(part),
            residual=residual,
            residual_stride=None if residual is None else residual.stride(0),
            gate=gate,
            lse=unused[0] if lse is None else lse,
            out=rows[0] if out is None else out,
            carry_max=carry[0],
            carry_sum=carry[1],
            carry_mix=carry[2],
            next_max=written[0],
            next_sum=written[1],
            next_mix=written[2],
            carried=int(read is not None),
            last=int(out is not None and final),
            tokens=tokens,
        )
        grid = (ceil_div(tokens, rule.tokens), units)
        registers = min(128 if sites == 1 else 240, 2048 // rule.warps)  # a program must fit a multiprocessor
        options = {"num_warps": rule.warps, "num_stages": 1, "maxnreg": registers}
        yield Launch(mix, grid, arguments, constants, options)
        read = written


def state_like(row: Tensor, sites: int, heads: int) -> State:
    """An uninitialised state of `sites` sites on the device of a row [tokens, d]."""
    tokens, width = row.shape
    maximum, total, mixture = (
        row.new_empty((sites, tokens, size), dtype=torch.float32) for size in (heads, heads, width)
    )
    return maximum, total, mixture


def pull_launches(
    source: Tensor,
    rstd: Tensor,
    douts: Sequence[Tensor],
    scales: Tensor,
    queries: Tensor,
    logits: Tensor,
    lses: Sequence[Tensor],
    couplings: Sequence[Tensor],
    dlogits: Tensor,
    carry: Tensor,
    grad: Tensor,
) -> Iterator[Launch]:
    """The gradient of a source [tokens, d] from all sites that read it, one launch for every RECTANGLE sites.

    scales [sites] float32 are the gates, 1 where there is none. carry [tokens, d] float32 is the sum between windows.
    """
    (tokens, width), heads = source.shape, logits.shape[-1]
    rule = site_rule(heads, width // heads, source.element_size())
    constants = site_constants(heads, width // heads, source)
    del constants["GROUP"]
    for first in range(0, len(douts), RECTANGLE):
        window = slice(first, first + RECTANGLE)
        last = first + RECTANGLE >= len(douts)
        arguments = dict(
            source=source,
            stride=source.stride(0),
            rstd=rstd,
            douts=padded(list(douts[window])),
            dout_strides=padded([dout.stride(0) for dout in douts[window]]),
            scales=scales[window],
            queries=queries[window],
            logits=logits[window],
            lses=padded(list(lses[window])),
            couplings=padded(list(couplings[window])),
            dlogits=dlogits[window],
            carry=carry,
            grad=grad if last else carry,
            count=len(douts[window]),
            carried=int(first > 0),
            tokens=tokens,
        )
        yield Launch(pull, (ceil_div(tokens, rule.tokens),), arguments, constants, site_options(rule))


def query_gradient_launches(
    source: Tensor, rstd: Tensor, dlogits: Tensor, shares: Tensor, grad_queries: Tensor
) -> Iterator[Launch]:
    """grad_queries [sites, d] = sum over tokens of dl key, in two stages; shares [programs, sites, d]; all float32."""
    (tokens, width), (sites, _, heads) = source.shape, dlogits.shape
    rule = block_rule(width // heads)
    arguments = dict(
        source=source,
        stride=source.stride(0),
        rstd=rstd,
        dlogits=dlogits,
        shares=shares,
        sites=sites,
        tokens=tokens,
    )
    constants = {"H": heads, "K": width // heads, "TOKENS": rule.tokens, "COLUMNS": rule.columns, "SITES": rule.sites}
    grid = (len(shares), heads * ceil_div(width // heads, rule.columns), ceil_div(sites, rule.sites))
    yield Launch(query_gradient, grid, arguments, constants, {"num_warps": rule.warps})
    absent = dict.fromkeys(("null_sums", "gate_sums", "key_weight", "grad_key_weight", "grad_null", "grad_gate"))
    arguments = absent | dict(
        query_sums=shares, query=shares, grad_query=grad_queries, programs=len(shares), width=sites * width
    )
    yield Launch(
        site_sums, (ceil_div(sites * width, SUM_CONSTANTS["COLUMNS"]),), arguments, SUM_CONSTANTS, {"num_warps": 4}
    )
