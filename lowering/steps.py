"""The steps of a route on a GPU: the operators of ``ops.steps`` as launches, on the shapes that are told there.

``run`` launches at once or records the launch in a graph that is being traced.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import Any

import torch
from torch import Tensor

from .launch import Launch, Run, at_once, site_constants, sums_launch
from .normed import mix_norm as mix_norm_kernel
from .normed import norm_backward as norm_backward_kernel
from .pulls import coupling as coupling_kernel
from .pulls import pull as pull_kernel
from .pulls import query_gradient
from .rectangles import mix as mix_kernel
from .rectangles import score as score_kernel
from .rows import padded, row_arguments, rows_of
from .rules import RECTANGLE, TERMS, BlockRule, NormRule, block_rule, ceil_div, mix_rule, pull_sources, site_rule

State = tuple[Tensor, Tensor | None, Tensor]  # (max, sum or 1, mixture), float32 [sites, T, H] twice and [sites, T, d]


@dataclass(frozen=True)
class Norm:
    """How a site's output is normalised.

    Attributes:
        weight: [d], or None.
        eps: what is added to the mean of squares.
        dtype: of the result.
        round_first: whether the normalised row is rounded to dtype before it meets the weight, too.
        keep_out: whether the output itself is written; it must be where the result has another dtype.
        rule: of the kernel.
    """

    weight: Tensor | None
    eps: float
    dtype: torch.dtype
    round_first: bool
    keep_out: bool
    rule: NormRule


def score(
    source: Tensor,
    folded: Tensor,
    first: int,
    count: int,
    eps: float,
    after: Tensor | None = None,
    run: Run = at_once,
) -> tuple[Tensor, Tensor]:
    """Logits [count, ..., H] of a source [..., d] at the sites first..first+count-1, and its reciprocal RMS [...].

    ``after`` is not read: a gradient, where the scoring belongs to the backward and not to the forward.
    """
    tokens, (heads, width) = source.shape[:-1], sizes(folded.shape[1], source)
    logits = folded.new_empty((count, *tokens, heads))
    rstd = folded.new_empty((1, *tokens)).select(0, 0)  # Inductor fills what has no dimension, a null source's
    rule = block_rule(width // heads)
    arguments = one_row(source) | dict(
        queries=folded.narrow(0, first, count),
        logits=logits,
        rstd=rstd,
        sites=count,
        tokens=prod(tokens),
        eps=eps,
    )
    grid = (ceil_div(prod(tokens), rule.tokens),)
    run(Launch(score_kernel, grid, arguments, block_constants(heads, width), block_options(rule)))
    return logits, rstd


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
    run: Run = at_once,
) -> tuple[Tensor, Tensor, Tensor]:
    """Output [..., d] and log-sum-exp [..., H] of one site, and the int8 residue of its rounding."""
    like = shape_of([*sources, residual, carried])
    heads = (logits[0] if carried_lse is None else carried_lse).shape[-1]
    out = like.new_empty(like.shape, dtype=dtype)
    lse = like.new_empty((*like.shape[:-1], heads), dtype=torch.float32)
    residue = like.new_empty(like.shape if keep else (0,), dtype=torch.int8)
    known = [row_at(row, site - first, lse) for row, first in zip(logits, firsts, strict=True)]
    before = None if carried is None or carried_lse is None else (carried_lse, None, carried)
    kept = residue if keep else None
    tokens = prod(like.shape[:-1])
    for launch in mix_launches(
        sources, known, 1, before, residual, gate, out=out, lse=lse, residue=kept, tokens=tokens
    ):
        run(launch)
    return out, lse, residue


def mix_norm(norm: Norm, *mixing: Any, run: Run = at_once) -> tuple[Tensor, ...]:
    """What mix gives of its arguments, then the RMSNorm of the output [..., d] and its reciprocal RMS [..., 1]."""
    launches: list[Launch] = []
    step: Callable[..., Any] = mix
    out, lse, residue = step(*mixing, run=launches.append)
    normed = out.new_empty(out.shape, dtype=norm.dtype)
    inverse = lse.new_empty((*out.shape[:-1], 1))
    for launch in launches[:-1]:
        run(launch)
    run(norm_launch(launches[-1], norm, normed, inverse))
    return out, lse, residue, normed, inverse


def norm_backward(
    terms: Sequence[Tensor],
    out: Tensor,
    residue: Tensor | None,
    inverse: Tensor,
    weight: Tensor | None,
    heads: int,
    coupled: bool,
    summed: torch.dtype | None,
    norm: NormRule,
    run: Run = at_once,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Backward of the RMSNorm of a site's output [..., d], whose result has the sum of the terms as its gradient.

    Returns the gradient of the output; the site's coupling [..., H], where asked for, the output being its mixture,
    restored by the residue; and the gradient of the weight [d] in this dtype, where asked for.
    """
    *leading, width = out.shape
    tokens = prod(leading)
    rule = site_rule(heads, int(width) // heads, out.element_size())
    rows, inner = rows_of(terms)
    rows += rows[-1:] * (TERMS - len(rows))
    programs = torch.sym_min(rule.programs, ceil_div(tokens, rule.tokens))
    if not isinstance(programs, int):
        programs = torch.sym_max(2, programs)  # whether it is 1 would be a guard on a dynamic size
    grad_out = out.new_empty(out.shape)
    coupling = inverse.new_empty((*leading, heads)) if coupled else None
    shares = None if summed is None else inverse.new_empty((programs, width))
    arguments = dict(
        terms=tuple(row.tensor for row in rows),
        strides=tuple(row.stride for row in rows),
        jumps=None if inner is None else tuple(row.jump for row in rows),
        inner=inner,
        count=len(terms),
        out=out,
        residue=residue,
        inverse=inverse,
        norm_weight=None if weight is None else weight.contiguous(),
        grad_out=grad_out,
        coupled=coupling,
        weight_sums=shares,
        tokens=tokens,
    )
    constants = site_constants(heads, int(width) // heads, out) | {"GROUP": norm.group}
    run(Launch(norm_backward_kernel, (programs,), arguments, constants, step_options(rule.warps)))
    return grad_out, coupling, None if shares is None else shares.sum(0).to(summed)


def mix_tile(
    sources: Sequence[Tensor],
    logits: Sequence[Tensor],
    firsts: Sequence[int],
    sites: Sequence[int],
    run: Run = at_once,
) -> tuple[list[Tensor], list[Tensor]]:
    """For each of consecutive sites the mixture over these sources alone, float32 [..., d], and its log-sum-exp."""
    like, count = sources[0], len(sites)
    assert list(sites) == list(range(sites[0], sites[0] + count)), "a tile's sites follow each other"
    out = like.new_empty((count, *like.shape), dtype=torch.float32)
    lse = like.new_empty((count, *like.shape[:-1], logits[0].shape[-1]), dtype=torch.float32)
    known = [row.narrow(0, sites[0] - first, count) for row, first in zip(logits, firsts, strict=True)]
    tokens = prod(like.shape[:-1])
    for launch in mix_launches(sources, known, count, None, None, None, out=out, lse=lse, residue=None, tokens=tokens):
        run(launch)
    return list(out.unbind()), list(lse.unbind())


def coupling_from_sources(
    grad_out: Tensor,
    sources: Sequence[Tensor],
    logits: Sequence[Tensor],
    firsts: Sequence[int],
    site: int,
    lse: Tensor,
    gate: Tensor | None,
    run: Run = at_once,
) -> tuple[Tensor, Tensor]:
    """S = gate * <grad_out, mixture> a head, [..., H], and the gradient of the gate [1] (empty where absent)."""
    (heads, width), tokens = sizes(lse.shape[-1], grad_out), prod(lse.shape[:-1])
    total, mass = torch.empty_like(lse), torch.empty_like(lse)
    (dout, *rows), inner = rows_of([grad_out, *sources])
    known = [row_at(row, site - first, lse) for row, first in zip(logits, firsts, strict=True)]
    rule = site_rule(heads, width // heads, grad_out.element_size())
    constants = site_constants(heads, width // heads, grad_out)
    for first in range(0, len(rows), RECTANGLE):
        arguments = row_arguments(rows[first : first + RECTANGLE], inner) | dict(
            grad_out=dout.tensor,
            grad_stride=dout.stride,
            grad_jump=dout.jump,
            logits=padded(known[first : first + RECTANGLE]),
            lse=lse,
            coupled=total,
            mass=mass,
            carried=int(first > 0),
            last=int(first + RECTANGLE >= len(rows)),
            tokens=tokens,
        )
        run(Launch(coupling_kernel, (ceil_div(tokens, rule.tokens),), arguments, constants, step_options(rule.warps)))
    if gate is None:
        return total, grad_out.new_empty(0)
    return total * gate.to(total.dtype), total.sum().reshape(1).to(gate.dtype)


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
    shares: Tensor | None,
    run: Run = at_once,
) -> list[Tensor]:
    """Gradient of each source [..., d] from all of the sites; the folded queries' gradients go into shares.

    Several sources share one read of the gradients of up to RECTANGLE sites; between launches a gradient is float32.
    """
    heads, head_width = map(int, folded.shape[1:])
    grads = [
        source.new_empty(source.shape, dtype=torch.float32 if keep else source.dtype)
        for source, keep in zip(sources, wide, strict=True)
    ]
    runs = runs_of(sites)
    between = grads if len(runs) == 1 else [folded.new_empty(grad.shape) for grad in grads]
    at = 0
    while at < len(sources):
        few = slice(at, at + pull_sources(heads, head_width, sources[0].element_size(), len(sources) - at))
        before = list(carried[few])
        for places in runs:
            lowest, count = sites[places[0]], len(places)
            after = (grads if places is runs[-1] else between)[few]
            known = [row.narrow(0, lowest - first, count) for row, first in zip(logits[few], firsts[few], strict=True)]
            dlogits = [torch.empty_like(row) for row in known]
            douts, levels, coupled = ([x[place] for place in places] for x in (grad_outs, lses, couplings))
            scales = [gates[place] for place in places]
            queries = folded.narrow(0, lowest, count)
            run(
                pull_launch(
                    sources[few], rstds[few], known, dlogits, before, after, douts, levels, coupled, scales, queries
                )
            )
            if shares is not None:
                for source, rstd, dlogit in zip(sources[few], rstds[few], dlogits, strict=True):
                    run(query_gradient_launch(source, rstd, dlogit, shares, lowest))
            before = after
        at = few.stop
    return grads


def pull_null(
    source: Tensor, rstd: Tensor, logits: Tensor, grad_out: Tensor, lse: Tensor, coupling: Tensor, gate: Tensor | None,
    folded: Tensor,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Gradient [d] of a null source, whose logits [1, H] are the same for every token, and that [1, H, K] of its query.

    folded [H, K]. Only sums over tokens are needed, and none of the tokens' rows is written.
    """
    heads, head_width = folded.shape
    dmix = as_stored(grad_out).reshape(-1, heads, head_width).float()
    if gate is not None:
        dmix = dmix * gate.float()
    x = source.float().view(heads, head_width)
    weight = (logits - lse.view(-1, heads)).exp()  # [T, H]
    dlogit = weight * ((dmix * x).sum(-1) - coupling.view(-1, heads))
    total = dlogit.sum(0)  # [H]
    normal = x * rstd
    through_norm = (total * logits.view(heads)).sum() / source.numel()
    grad = (weight.unsqueeze(-1) * dmix).sum(0) + rstd * (total.unsqueeze(-1) * folded - through_norm * normal)
    return grad.flatten(), (total.unsqueeze(-1) * rounded_through(normal, source.dtype)).unsqueeze(0)


def rounded_through(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x rounded to dtype and back."""
    return as_stored(x.to(dtype)).float()


def as_stored(x: Tensor) -> Tensor:
    """x as kernels read it: where Inductor computes x it would go on with what x is rounded from.

    By way of an integer operation, since Inductor drops a cast that another undoes.
    """
    return x if x.dtype == torch.float32 else (x.view(torch.int16) & -1).view(x.dtype)


Products = Callable[[list[Tensor], list[Tensor]], list[Tensor]]


def one_launch(some: list[Tensor], others: list[Tensor]) -> list[Tensor]:
    """Products of pairs, which Inductor computes in one launch, each by threads of its own.

    It may compute an argument along with one product and let the others read it in the same launch, before it is there:
    to be called with what the graph is given, and with what has another size than the products.
    """
    return list(torch._foreach_mul(some, others))


def apart(some: list[Tensor], others: list[Tensor]) -> list[Tensor]:
    """Products of pairs, each on its own."""
    return [one * other for one, other in zip(some, others, strict=True)]


def folded_gradients(
    shares: Tensor | None, grads: Sequence[Tensor], sites: Sequence[int], count: int, run: Run = at_once
) -> Tensor:
    """Gradients [count, H, K] of a family's folded queries, from what pulls left in shares and from grads.

    ``sites`` names the site of every row of grads [J, H, K] in turn.
    """
    totals: list[Tensor] = []
    if shares is not None:
        summed = shares.new_empty((count, *shares.shape[2:]))
        run(sum_launch(shares, summed))
        totals.append(summed)
    if grads:
        absent = torch.zeros_like(grads[0].narrow(0, 0, 1))
        at: dict[int, Tensor] = {}
        for site, row in zip(sites, (row for grad in grads for row in grad.split(1)), strict=True):
            at[site] = at[site] + row if site in at else row
        totals.append(torch.cat([at.get(site, absent) for site in range(count)]))
    return sum(totals[1:], totals[0])


def unfold(
    total: Tensor, queries: Sequence[Tensor], key_weights: Sequence[Tensor | None], multiply: Products = one_launch
) -> tuple[list[Tensor], list[Tensor]]:
    """Gradients of the queries and key weights (empty where absent) from those of the folded queries."""
    weighted = [(n, weight) for n, weight in enumerate(key_weights) if weight is not None]
    dqueries, dkeys = list(total.unbind()), [query.new_empty(0) for query in queries]
    if weighted:
        mine = [dqueries[n] for n, _ in weighted]
        scaled = multiply(mine, [weight.float().view(mine[0].shape) for _, weight in weighted])
        keys = multiply(mine, [queries[n].float() for n, _ in weighted])
        for (n, weight), grad, key in zip(weighted, scaled, keys, strict=True):
            dqueries[n], dkeys[n] = grad, key.flatten().to(weight.dtype)
    return [grad.to(query.dtype) for grad, query in zip(dqueries, queries, strict=True)], dkeys


def runs_of(sites: Sequence[int]) -> list[list[int]]:
    """Places in ``sites`` of runs of consecutive sites, at most RECTANGLE long, each in ascending order."""
    order = sorted(range(len(sites)), key=sites.__getitem__)
    breaks = [0, *(n + 1 for n, (a, b) in enumerate(pairwise(order)) if sites[b] != sites[a] + 1), len(order)]
    return [
        order[first : min(first + RECTANGLE, end)]
        for start, end in pairwise(breaks)
        for first in range(start, end, RECTANGLE)
    ]


def mix_launches(
    sources: Sequence[Tensor],
    logits: Sequence[Tensor],
    sites: int,
    before: State | None,
    residual: Tensor | None,
    gate: Tensor | None,
    *,
    out: Tensor,
    lse: Tensor,
    residue: Tensor | None,
    tokens: int,
) -> Iterator[Launch]:
    """Mixtures of the sources at one or more sites, one launch for every RECTANGLE of them.

    before is what other sources left, absent where these are all.
    """
    heads, width = sizes(lse.shape[-1], out)
    rows, inner = rows_of([*(sources or [out]), *([] if residual is None else [residual])])
    extra = None if residual is None else rows.pop()
    rule = site_rule(heads, width // heads, rows[0].tensor.element_size())
    constants = site_constants(heads, width // heads, rows[0].tensor) | {
        "GROUP": mix_rule(sites).group,
        "SITES": sites,
    }
    units = ceil_div(heads, rule.heads) * ceil_div(width // heads, rule.columns)
    unused: State = (lse,) * 3  # in the place of a state that is not read, or not written
    read = before
    for first in range(0, len(rows), RECTANGLE):
        last = first + RECTANGLE >= len(rows)
        written = unused if last else state_like(lse, sites, tokens, width)
        carry = read or unused
        arguments = row_arguments(rows[first : first + RECTANGLE], inner) | dict(
            count=len(sources[first : first + RECTANGLE]),
            logits=padded(list(logits[first : first + RECTANGLE]) or [lse]),
            residual=None if extra is None else extra.tensor,
            residual_stride=None if extra is None else extra.stride,
            residual_jump=None if extra is None else extra.jump,
            gate=gate,
            lse=lse,
            out=out,
            residue=residue,
            carry_max=carry[0],
            carry_sum=carry[1],
            carry_mix=carry[2],
            next_max=written[0],
            next_sum=written[1],
            next_mix=written[2],
            carried=int(read is not None),
            last=int(last),
            tokens=tokens,
        )
        grid = (ceil_div(tokens, rule.tokens), units)
        yield Launch(mix_kernel, grid, arguments, constants, step_options(rule.warps))
        read = written


def norm_launch(last: Launch, norm: Norm, normed: Tensor, inverse: Tensor) -> Launch:
    """The last launch of a site's mixture as one that normalises the output too."""
    arguments = last.arguments | dict(
        norm_weight=None if norm.weight is None else norm.weight.contiguous(),
        out=last.arguments["out"] if norm.keep_out else None,
        normed=normed,
        inverse=inverse,
        eps=norm.eps,
    )
    for name in ("next_max", "next_sum", "next_mix", "last"):
        del arguments[name]
    constants = {name: last.constants[name] for name in ("H", "K", "TOKENS", "HEADS", "COLUMNS")}
    constants |= {"GROUP": norm.rule.group, "ROUND_FIRST": int(norm.round_first)}
    return Launch(mix_norm_kernel, last.grid[:1], arguments, constants, last.options)


def pull_launch(
    sources: Sequence[Tensor],
    rstds: Sequence[Tensor],
    logits: Sequence[Tensor],
    dlogits: Sequence[Tensor],
    carries: Sequence[Tensor],
    grads: Sequence[Tensor],
    douts: Sequence[Tensor],
    lses: Sequence[Tensor],
    couplings: Sequence[Tensor],
    gates: Sequence[Tensor | None],
    queries: Tensor,
) -> Launch:
    """The gradients of a few sources from at most RECTANGLE consecutive sites."""
    (heads, head_width), tokens = queries.shape[1:], prod(lses[0].shape[:-1])
    rule = site_rule(heads, head_width, sources[0].element_size())
    placed, inner = rows_of([*sources, *douts])
    own, placed = placed[: len(sources)], placed[len(sources) :]
    arguments = row_arguments(placed, inner)
    arguments["douts"] = arguments.pop("sources")
    dtypes = {gate.dtype for gate in gates if gate is not None}
    one = queries.new_ones(1, dtype=dtypes.pop() if len(dtypes) == 1 else None)  # pointers of one kind are picked from
    scales = [one if gate is None else gate.to(one.dtype) for gate in gates]
    arguments |= dict(
        sources=tuple(row.tensor for row in own),
        source_strides=tuple(row.stride for row in own),
        source_jumps=None if inner is None else tuple(row.jump for row in own),
        rstds=tuple(rstds),
        logits=tuple(logits),
        dlogits=tuple(dlogits),
        carries=tuple(carries) or tuple(rstds),  # of float32, and not read
        grads=tuple(grads),
        lses=padded(list(lses)),
        couplings=padded(list(couplings)),
        gates=padded(scales) if any(gate is not None for gate in gates) else None,
        queries=queries,
        carried=int(bool(carries)),
        tokens=tokens,
    )
    constants = site_constants(heads, head_width, sources[0])
    del constants["GROUP"]
    return Launch(pull_kernel, (ceil_div(tokens, rule.tokens),), arguments, constants, step_options(rule.warps))


def query_gradient_launch(source: Tensor, rstd: Tensor, dlogits: Tensor, shares: Tensor, first: int) -> Launch:
    """Add the sum over tokens of dl key to shares [programs, all sites, H, K], from site first on."""
    sites, *leading, last = dlogits.shape
    (heads, width), tokens = sizes(last, source), prod(leading)
    rule = block_rule(width // heads)
    arguments = one_row(source) | dict(
        rstd=rstd,
        dlogits=dlogits,
        shares=shares,
        first_site=first,
        sites=sites,
        pitch=shares.shape[1],
        tokens=tokens,
    )
    grid = (shares.shape[0], heads * ceil_div(width // heads, rule.columns), ceil_div(sites, rule.sites))
    return Launch(query_gradient, grid, arguments, block_constants(heads, width), block_options(rule))


def sum_launch(shares: Tensor, total: Tensor) -> Launch:
    """total = the sum of shares [programs, ...], in a fixed order."""
    absent = dict.fromkeys(("null_sums", "gate_sums", "key_weight", "grad_key_weight", "grad_null", "grad_gate"))
    width = prod(total.shape)
    arguments = absent | dict(query_sums=shares, query=total, grad_query=total, programs=shares.shape[0], width=width)
    return sums_launch(arguments)


def new_shares(folded: Tensor) -> Tensor:
    """What the pulls of a family [sites, H, K] add the gradients of its folded queries to."""
    sites, heads, head_width = map(int, folded.shape)
    return folded.new_zeros((block_rule(head_width).shares, sites, heads, head_width))


def block_constants(heads: int, width: int) -> dict[str, int]:
    rule = block_rule(width // heads)
    return {"H": heads, "K": width // heads, "TOKENS": rule.tokens, "COLUMNS": rule.columns, "SITES": rule.sites}


def block_options(rule: BlockRule) -> dict[str, int]:
    return {"num_warps": rule.warps, "num_stages": rule.stages}


def step_options(warps: int) -> dict[str, int]:
    """The compiler's options; no limit of registers, since Inductor hands none on."""
    return {"num_warps": warps, "num_stages": 1}


def sizes(heads: int, source: Tensor) -> tuple[int, int]:
    """Heads and width as numbers; a trace with dynamic shapes may hold them as symbols of known value."""
    return int(heads), int(source.shape[-1])


def one_row(source: Tensor) -> dict[str, Any]:
    """What the kernels read a single source [..., d] by."""
    (row,), inner = rows_of([source])
    return dict(source=row.tensor, stride=row.stride, jump=row.jump, inner=inner)


def state_like(like: Tensor, sites: int, tokens: int, width: int) -> State:
    """An uninitialised state of `sites` sites."""
    heads = like.shape[-1]
    maximum, total, mixture = (like.new_empty((sites, tokens, size)) for size in (heads, heads, width))
    return maximum, total, mixture


def row_at(logits: Tensor, place: int, like: Tensor) -> Tensor:
    """A row of logits [count, ..., H], or of a null source's [count, H], as [..., H] in memory of its own shape."""
    row = logits.select(0, place)
    return row if row.dim() == like.dim() else row.expand(like.shape).clone(memory_format=torch.contiguous_format)


def shape_of(tensors: Sequence[Tensor | None]) -> Tensor:
    """A tensor of the shape of the output: any but a null source among them."""
    return max((tensor for tensor in tensors if tensor is not None), key=Tensor.dim)
