"""Launches of the kernels of a rectangle of sources x sites, on tensors that the caller allocates.

Shapes as in rectangles.py; sources and gradients are [..., d] of one shape, read where they lie as ``launch.rows_of``
says.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor

from .launch import Launch, jump_of, padded, row_arguments, rows_of, site_constants, site_options, sums_launch
from .rectangles import mix, pull, query_gradient, score
from .rules import RECTANGLE, block_rule, ceil_div, mix_rule, site_rule

State = tuple[Tensor, Tensor, Tensor]  # (max, sum, mixture), float32 [sites, tokens, H] twice and [sites, tokens, d]


def score_launch(source: Tensor, queries: Tensor, eps: float, logits: Tensor, rstd: Tensor) -> Launch:
    """One source's rstd [tokens] and logits [sites, tokens, H] against queries [sites, d]."""
    width, (_, tokens, heads) = source.shape[-1], logits.shape
    rule = block_rule(width // heads)
    arguments = source_arguments(source) | dict(
        queries=queries,
        logits=logits,
        rstd=rstd,
        sites=len(queries),
        tokens=tokens,
        eps=eps,
    )
    constants = {"H": heads, "K": width // heads, "TOKENS": rule.tokens, "COLUMNS": rule.columns, "SITES": rule.sites}
    options = {"num_warps": rule.warps, "num_stages": rule.stages}
    return Launch(score, (ceil_div(tokens, rule.tokens),), arguments, constants, options)


def mix_launches(
    sources: Sequence[Tensor],
    logits: Sequence[Tensor],
    sites: int,
    before: State | None = None,
    after: State | None = None,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    residual: Tensor | None = None,
    gate: Tensor | None = None,
) -> Iterator[Launch]:
    """Mixtures of the sources at one or more sites, one launch for every RECTANGLE of them.

    before is what earlier sources left, absent where these are the first. after is written, unless out and lse, of a
    single site, are given; its max and sum are other memory than before's.
    """
    width, (tokens, heads) = sources[0].shape[-1], logits[0].shape[-2:]
    rule = site_rule(heads, width // heads, sources[0].element_size())
    own = mix_rule(rule, sites)
    rows, extra = rows_of(sources, None, residual)
    constants = site_constants(heads, width // heads, rows[0]) | {"GROUP": own.group, "SITES": sites}
    units = ceil_div(heads, rule.heads) * ceil_div(width // heads, rule.columns)
    unused = (logits[0],) * 3  # in the place of a state that is not read, or not written
    read = before
    for first in range(0, len(rows), RECTANGLE):
        final = first + RECTANGLE >= len(rows)
        written = after or unused
        if not final:
            written = state_like(logits[0], sites, width)
        carry = read or unused
        arguments = row_arguments(rows[first : first + RECTANGLE]) | dict(
            logits=padded(list(logits[first : first + RECTANGLE])),
            residual=extra,
            residual_stride=None if extra is None else extra.stride(1),
            residual_jump=None if extra is None else jump_of(extra),
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
        options = {"num_warps": rule.warps, "num_stages": 1, "maxnreg": own.registers}
        yield Launch(mix, grid, arguments, constants, options)
        read = written


def source_arguments(source: Tensor) -> dict[str, Any]:
    """What the kernels read a single source by."""
    (row,), _ = rows_of([source], None, None)
    jump = jump_of(row)
    return dict(source=row, stride=row.stride(1), jump=jump, inner=None if jump is None else row.shape[1])


def state_like(logits: Tensor, sites: int, width: int) -> State:
    """An uninitialised state of `sites` sites on the device of logits [..., tokens, H]."""
    tokens, heads = logits.shape[-2:]
    maximum, total, mixture = (logits.new_empty((sites, tokens, size)) for size in (heads, heads, width))
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
    """The gradient of a source [..., d] from all sites that read it, one launch for every RECTANGLE sites.

    scales [sites] float32 are the gates, 1 where there is none. carry [tokens, d] float32 is the sum between windows.
    """
    width, (_, tokens, heads) = source.shape[-1], logits.shape
    rule = site_rule(heads, width // heads, source.element_size())
    rows, own = rows_of(douts, None, source)
    assert own is not None
    constants = site_constants(heads, width // heads, source)
    del constants["GROUP"]
    for first in range(0, len(douts), RECTANGLE):
        window = slice(first, first + RECTANGLE)
        last = first + RECTANGLE >= len(douts)
        arguments = row_arguments(rows[window])
        arguments["douts"] = arguments.pop("sources")
        arguments |= dict(
            source=own,
            stride=own.stride(1),
            jump=jump_of(own),
            rstd=rstd,
            scales=scales[window],
            queries=queries[window],
            logits=logits[window],
            lses=padded(list(lses[window])),
            couplings=padded(list(couplings[window])),
            dlogits=dlogits[window],
            carry=carry,
            grad=grad if last else carry,
            carried=int(first > 0),
            tokens=tokens,
        )
        yield Launch(pull, (ceil_div(tokens, rule.tokens),), arguments, constants, site_options(rule))


def query_gradient_launches(
    source: Tensor, rstd: Tensor, dlogits: Tensor, shares: Tensor, grad_queries: Tensor
) -> Iterator[Launch]:
    """grad_queries [sites, d] = sum over tokens of dl key, in two stages; shares [programs, sites, d]; all float32."""
    width, (sites, tokens, heads) = source.shape[-1], dlogits.shape
    rule = block_rule(width // heads)
    arguments = source_arguments(source) | dict(
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
    yield sums_launch(arguments)
