"""Registration of the steps that the compiler takes a route apart into: schemas and fakes. They carry no gradient.

Shapes and meanings stand in ``eager_steps``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from . import eager_steps
from .reference import compute_dtype

FOLD = "(Tensor[] queries, Tensor?[] key_weights, ScalarType dtype) -> Tensor"
UNFOLD = (
    "(Tensor[] grads, int[] sites, Tensor[] queries, Tensor?[] key_weights)"
    " -> (Tensor[] grad_queries, Tensor[] grad_key_weights)"
)
SCORE = (
    "(Tensor source, Tensor folded, int first, int count, float eps, Tensor? after=None)"
    " -> (Tensor logits, Tensor rstd)"
)
PART = "(Tensor logits, int first, int count) -> Tensor"
MIX = (
    "(Tensor[] sources, Tensor[] logits, int[] firsts, int site, Tensor? residual, Tensor? gate, Tensor? carried,"
    " Tensor? carried_lse, ScalarType dtype, bool keep) -> (Tensor out, Tensor lse, Tensor residue)"
)
MIX_TILE = "(Tensor[] sources, Tensor[] logits, int[] firsts, int[] sites) -> (Tensor[] mixtures, Tensor[] lses)"
COUPLING = "(Tensor grad_out, Tensor out, Tensor? residue, int heads) -> Tensor"
COUPLING_FROM_SOURCES = (
    "(Tensor grad_out, Tensor[] sources, Tensor[] logits, int[] firsts, int site, Tensor lse, Tensor? gate)"
    " -> (Tensor coupling, Tensor grad_gate)"
)
PULL = (
    "(Tensor[] sources, Tensor[] rstds, Tensor[] logits, int[] firsts, int[] sites, Tensor[] grad_outs, Tensor[] lses,"
    " Tensor[] couplings, Tensor?[] gates, Tensor folded, Tensor[] carried, bool[] wide)"
    " -> (Tensor[] grads, Tensor grad_folded)"
)


def register(library: torch.library.Library, refuse_vmap: Callable[..., Any]) -> None:
    """Define the steps in the library of the operator."""
    for name, schema, implementation, fake in (
        ("fold", FOLD, eager_steps.fold, fake_fold),
        ("unfold", UNFOLD, eager_steps.unfold, fake_unfold),
        ("score", SCORE, eager_steps.score, fake_score),
        ("part", PART, eager_steps.part, fake_part),
        ("mix", MIX, eager_steps.mix, fake_mix),
        ("mix_tile", MIX_TILE, eager_steps.mix_tile, fake_mix_tile),
        ("coupling", COUPLING, eager_steps.coupling, fake_coupling),
        ("coupling_from_sources", COUPLING_FROM_SOURCES, eager_steps.coupling_from_sources, fake_coupling_from_sources),
        ("pull", PULL, eager_steps.pull, fake_pull),
    ):
        library.define(name + schema, tags=torch.Tag.pt2_compliant_tag)
        library.impl(name, implementation, "CompositeExplicitAutograd")
        library.impl(name, without_gradient(name), "Autograd", with_keyset=True)
        torch.library.register_fake(f"mhar::{name}", fake, lib=library)
        torch.library.register_vmap(f"mhar::{name}", refuse_vmap, lib=library)


def without_gradient(name: str) -> Callable[..., Any]:
    """The autograd kernel of a step: it raises where a gradient would be lost in silence."""
    step = getattr(torch.ops.mhar, name).default

    def kernel(keyset: torch._C.DispatchKeySet, *args: Any) -> Any:
        if torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in tree_leaves(args)):
            raise RuntimeError(
                f"mhar::{name} is one step of a compiled route and has no gradient; call mhar_compile.route"
            )
        return step.redispatch(keyset & torch._C._after_autograd_keyset, *args)

    return kernel


def fake_fold(queries: Sequence[Tensor], key_weights: Sequence[Tensor | None], dtype: torch.dtype) -> Tensor:
    return queries[0].new_empty((len(queries), *queries[0].shape), dtype=dtype)


def fake_unfold(
    grads: Sequence[Tensor], sites: Sequence[int], queries: Sequence[Tensor], key_weights: Sequence[Tensor | None]
) -> tuple[list[Tensor], list[Tensor]]:
    dkeys = [
        query.new_empty(0) if weight is None else weight.new_empty(weight.shape)
        for query, weight in zip(queries, key_weights, strict=True)
    ]
    return [query.new_empty(query.shape) for query in queries], dkeys


def fake_score(
    source: Tensor, folded: Tensor, first: int, count: int, eps: float, after: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    tokens = source.shape[:-1]
    return folded.new_empty((count, *tokens, folded.shape[1])), folded.new_empty(tokens)


def fake_part(logits: Tensor, first: int, count: int) -> Tensor:
    return logits.new_empty((count, *logits.shape[1:]))


def fake_mix(
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
    like = eager_steps.like_of([*sources, residual, carried])
    scores = carried_lse if carried_lse is not None else logits[0]
    lse = scores.new_empty((*like.shape[:-1], scores.shape[-1]))
    kept = like.new_empty(like.shape if keep else (0,), dtype=torch.int8)
    return like.new_empty(like.shape, dtype=dtype), lse, kept


def fake_mix_tile(
    sources: Sequence[Tensor], logits: Sequence[Tensor], firsts: Sequence[int], sites: Sequence[int]
) -> tuple[list[Tensor], list[Tensor]]:
    like, scores = eager_steps.like_of(sources), logits[0]
    shape = (*like.shape[:-1], scores.shape[-1])
    return [scores.new_empty(like.shape) for _ in sites], [scores.new_empty(shape) for _ in sites]


def fake_coupling(grad_out: Tensor, out: Tensor, residue: Tensor | None, heads: int) -> Tensor:
    return out.new_empty((*out.shape[:-1], heads), dtype=compute_dtype(out.dtype))


def fake_coupling_from_sources(
    grad_out: Tensor,
    sources: Sequence[Tensor],
    logits: Sequence[Tensor],
    firsts: Sequence[int],
    site: int,
    lse: Tensor,
    gate: Tensor | None,
) -> tuple[Tensor, Tensor]:
    return lse.new_empty(lse.shape), grad_out.new_empty(0) if gate is None else gate.new_empty(gate.shape)


def fake_pull(
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
    grads = [
        source.new_empty(source.shape, dtype=folded.dtype if keep else source.dtype)
        for source, keep in zip(sources, wide, strict=True)
    ]
    return grads, folded.new_empty((len(sites), *folded.shape[1:]))
