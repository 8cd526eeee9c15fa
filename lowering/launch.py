"""``mhar::route`` and ``mhar::route_backward`` on a GPU: which kernels are launched, on what.

A launch is a value: the same one is run eagerly, compiled ahead of time and counted. Sources, residual and gradient are
read where they lie, with one stride from token to token or with two (see rows_of); what is more irregular is copied.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from .rows import padded, row_arguments, rows_of
from .rules import RECTANGLE, SiteRule, SumRule, ceil_div, site_rule
from .site import site_backward, site_coupling, site_forward, site_sums


@dataclass(frozen=True)
class Launch:
    """A kernel, its grid, and by name its run-time arguments, its constants and the compiler's options."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: dict[str, Any]
    constants: dict[str, int]
    options: dict[str, int]

    def run(self) -> None:
        if all(self.grid):  # a tensor without tokens has nothing to run
            self.kernel[self.grid](**self.arguments, **self.constants, **self.options)


Run = Callable[[Launch], None]


def at_once(launch: Launch) -> None:
    """Run a launch now; the alternative is to record it in a graph."""
    launch.run()


def route(
    sources: Sequence[Tensor],
    query: Tensor,
    key_weight: Tensor | None,
    null_source: Tensor | None,
    residual: Tensor | None,
    gate: Tensor | None,
    eps: float,
    run: Run = at_once,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Output [..., d], logits [N, ..., H], log-sum-exp [..., H] and reciprocal RMS [N, ...] of one site."""
    like = sources[0] if sources else residual
    assert like is not None
    tokens, heads = like.shape[:-1], query.shape[0]
    count = len(sources) + (null_source is not None)
    out = like.new_empty(like.shape)
    logits = like.new_empty((count, *tokens, heads), dtype=torch.float32)
    lse = like.new_empty((*tokens, heads), dtype=torch.float32)
    rstd = like.new_empty((count, *tokens), dtype=torch.float32)
    arguments = sources, query, key_weight, null_source, residual, gate, eps
    for launch in forward_launches(*arguments, out, logits, lse, rstd):
        run(launch)
    return out, logits, lse, rstd


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
    run: Run = at_once,
) -> tuple[list[Tensor], Tensor, Tensor, Tensor, Tensor]:
    """Gradients of the sources, query, key weight, null source and gate; empty where the argument is absent."""

    def like(parameter: Tensor | None) -> Tensor:
        return grad_out.new_empty(0) if parameter is None else parameter.new_empty(parameter.shape)

    grads = [grad_out.new_empty(source.shape) for source in sources]
    parameters = like(query), like(key_weight), like(null_source), like(gate)
    known = logits.contiguous(), lse.contiguous(), rstd.contiguous()
    arguments = grad_out, sources, query, key_weight, null_source, gate, *known
    for launch in backward_launches(*arguments, grads, *parameters):
        run(launch)
    return grads, *parameters


def forward_launches(
    sources: Sequence[Tensor],
    query: Tensor,
    key_weight: Tensor | None,
    null_source: Tensor | None,
    residual: Tensor | None,
    gate: Tensor | None,
    eps: float,
    out: Tensor,
    logits: Tensor,
    lse: Tensor,
    rstd: Tensor,
) -> Iterator[Launch]:
    """One launch for every RECTANGLE sources; from one to the next the float32 (max, sum, mixture) is carried."""
    heads, head_width = map(int, query.shape)
    width = heads * head_width
    tokens = prod(out.shape[:-1])
    rule = site_rule(heads, head_width, out.element_size())
    placed, inner = rows_of(with_null(sources, null_source, out) + ([] if residual is None else [residual]))
    extra = None if residual is None else placed.pop()
    carry = [logits] * 3  # read and written by nobody where one launch is enough
    if len(placed) > RECTANGLE:
        carry = [lse.new_empty(shape) for shape in ((tokens, heads), (tokens, heads), (tokens, width))]
    for first in range(0, len(placed), RECTANGLE):
        arguments = row_arguments(placed[first : first + RECTANGLE], inner) | dict(
            query=query.contiguous(),
            key_weight=None if key_weight is None else key_weight.contiguous(),
            residual=None if extra is None else extra.tensor,
            residual_stride=None if extra is None else extra.stride,
            residual_jump=None if extra is None else extra.jump,
            gate=gate,
            logits=below(logits, first),
            rstd=below(rstd, first),
            lse=lse,
            out=out,
            carry_max=carry[0],
            carry_sum=carry[1],
            carry_mix=carry[2],
            carried=int(first > 0),
            last=int(first + RECTANGLE >= len(placed)),
            tokens=tokens,
            eps=eps,
        )
        constants = site_constants(heads, head_width, out)
        yield Launch(site_forward, (ceil_div(tokens, rule.tokens),), arguments, constants, site_options(rule))


def backward_launches(
    grad_out: Tensor,
    sources: Sequence[Tensor],
    query: Tensor,
    key_weight: Tensor | None,
    null_source: Tensor | None,
    gate: Tensor | None,
    logits: Tensor,
    lse: Tensor,
    rstd: Tensor,
    grads: list[Tensor],
    grad_query: Tensor,
    grad_key_weight: Tensor,
    grad_null: Tensor,
    grad_gate: Tensor,
) -> Iterator[Launch]:
    """Gradients in one launch for at most RECTANGLE sources, else all dots first; then the sums over tokens."""
    heads, head_width = map(int, query.shape)
    width = heads * head_width
    tokens = prod(grad_out.shape[:-1])
    rule = site_rule(heads, head_width, grad_out.element_size())
    (dout, *rows), inner = rows_of([grad_out, *with_null(sources, null_source, grad_out)])
    programs = torch.sym_min(rule.programs, ceil_div(tokens, rule.tokens))
    nulls = int(null_source is not None)
    targets = [*grads[:1], grad_out.new_empty(width)][:1] * nulls + grads  # the null source's slot is never written
    dots = torch.empty_like(logits)
    query_sums = lse.new_empty((programs, width))
    null_sums = None if null_source is None else torch.empty_like(query_sums)
    gate_sums = None if gate is None else lse.new_empty(programs)
    query, key_weight = query.contiguous(), None if key_weight is None else key_weight.contiguous()
    constants = site_constants(heads, head_width, grad_out)

    def shared(first: int) -> dict[str, Any]:
        return row_arguments(rows[first : first + RECTANGLE], inner) | dict(
            grad_out=dout.tensor,
            grad_stride=dout.stride,
            grad_jump=dout.jump,
            logits=below(logits, first),
            lse=lse,
            dots=below(dots, first),
            coupling=coupling,
            tokens=tokens,
        )

    coupling = None
    if len(rows) > RECTANGLE:
        coupling = lse.new_zeros((2, tokens, heads))
        for first in range(0, len(rows), RECTANGLE):
            yield Launch(site_coupling, (ceil_div(tokens, rule.tokens),), shared(first), constants, site_options(rule))
    for first in range(0, len(rows), RECTANGLE):
        arguments = shared(first) | dict(
            grads=padded(targets[first : first + RECTANGLE]),
            nulls=nulls if first == 0 else 0,
            query=query,
            key_weight=key_weight,
            gate=gate,
            rstd=below(rstd, first),
            query_sums=query_sums,
            null_sums=null_sums,
            gate_sums=gate_sums,
            carried=int(first > 0),
        )
        yield Launch(site_backward, (programs,), arguments, constants, site_options(rule))
    arguments = dict(
        query_sums=query_sums,
        null_sums=null_sums,
        gate_sums=gate_sums,
        query=query,
        key_weight=key_weight,
        grad_query=grad_query,
        grad_key_weight=None if key_weight is None else grad_key_weight,
        grad_null=None if null_source is None else grad_null,
        grad_gate=None if gate is None else grad_gate,
        programs=programs,
        width=width,
    )
    yield sums_launch(arguments)


def sums_launch(arguments: dict[str, Any]) -> Launch:
    """The second stage of the sums over tokens, over the columns of all shares."""
    rule = SumRule()
    constants = {"PROGRAMS": rule.programs, "COLUMNS": rule.columns}
    return Launch(
        site_sums, (ceil_div(arguments["width"], rule.columns),), arguments, constants, {"num_warps": rule.warps}
    )


def site_constants(heads: int, head_width: int, like: Tensor) -> dict[str, int]:
    rule = site_rule(heads, head_width, like.element_size())
    return {
        "H": heads,
        "K": head_width,
        "TOKENS": rule.tokens,
        "HEADS": rule.heads,
        "COLUMNS": rule.columns,
        "GROUP": rule.group,
    }


def site_options(rule: SiteRule) -> dict[str, int]:
    return {"num_warps": rule.warps, "num_stages": 1, "maxnreg": rule.registers}


def with_null(sources: Sequence[Tensor], null_source: Tensor | None, like: Tensor) -> list[Tensor]:
    """The sources, the null source [d] first, in their dtype."""
    return [*sources] if null_source is None else [null_source.to(like.dtype), *sources]


def below(x: Tensor, first: int) -> Tensor:
    """x from row ``first`` on."""
    return x.narrow(0, first, x.shape[0] - first) if first else x
