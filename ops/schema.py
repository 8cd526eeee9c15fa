"""Registration of ``mhar::route`` and ``mhar::route_backward``: schemas, fakes, autograd and what is refused."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch._library.autograd import Info, make_autograd_impl
from torch.autograd import forward_ad
from torch.utils._pytree import tree_leaves

from . import cuda, eager, steps
from .reference import compute_dtype

ROUTE = (
    "(Tensor[] sources, Tensor query, Tensor? key_weight, Tensor? null_source, Tensor? residual, Tensor? gate,"
    " float eps)"
    " -> (Tensor out, Tensor logits, Tensor lse, Tensor rstd)"
)
ROUTE_BACKWARD = (
    "(Tensor grad_out, Tensor[] sources, Tensor query, Tensor? key_weight, Tensor? null_source, Tensor? gate,"
    " Tensor logits, Tensor lse, Tensor rstd)"
    " -> (Tensor[] grad_sources, Tensor grad_query, Tensor grad_key_weight, Tensor grad_null_source, Tensor grad_gate)"
)
LIBRARY = torch.library.Library("mhar", "DEF")
FIRST_ORDER = "mhar_compile routes have first-order gradients in reverse mode only; {} is not supported"


def register() -> None:
    """Define the operator, its backward and its steps; called once, when the package is imported."""
    for name, schema, fake, backward, setup_context in (
        ("route", ROUTE, fake_route, route_gradient, save_for_backward),
        ("route_backward", ROUTE_BACKWARD, fake_route_backward, refuse_double_backward, None),
    ):
        LIBRARY.define(name + schema, tags=torch.Tag.pt2_compliant_tag)
        LIBRARY.impl(name, getattr(eager, name), "CompositeExplicitAutograd")  # CPU, and every device without kernels
        LIBRARY.impl(name, getattr(cuda, name), "CUDA")
        LIBRARY.impl(name, differentiable(name, backward, setup_context), "Autograd", with_keyset=True)
        torch.library.register_fake(f"mhar::{name}", fake, lib=LIBRARY)
        torch.library.register_vmap(f"mhar::{name}", refuse_vmap, lib=LIBRARY)
    steps.register(LIBRARY, refuse_vmap)


def differentiable(
    name: str, backward: Callable[..., Any], setup_context: Callable[..., None] | None
) -> Callable[..., Any]:
    """The autograd kernel of torch.library.register_autograd, behind a check for what would become silent zeros."""
    kernel = make_autograd_impl(getattr(torch.ops.mhar, name).default, Info(backward, setup_context))

    def checked(keyset: torch._C.DispatchKeySet, *args: Any) -> Any:
        refuse_transforms(args)
        return kernel(keyset, *args)

    return checked


def fake_route(
    sources: Sequence[Tensor],
    query: Tensor,
    key_weight: Tensor | None,
    null_source: Tensor | None,
    residual: Tensor | None,
    gate: Tensor | None,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    like = sources[0] if sources else residual
    assert like is not None
    count, tokens, wide = len(sources) + (null_source is not None), like.shape[:-1], compute_dtype(like.dtype)
    return (
        like.new_empty(like.shape),
        like.new_empty((count, *tokens, query.shape[0]), dtype=wide),
        like.new_empty((*tokens, query.shape[0]), dtype=wide),
        like.new_empty((count, *tokens), dtype=wide),
    )


def fake_route_backward(
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
    def like(parameter: Tensor | None) -> Tensor:
        return grad_out.new_empty(0) if parameter is None else parameter.new_empty(parameter.shape)

    grads = [grad_out.new_empty(source.shape) for source in sources]
    return grads, like(query), like(key_weight), like(null_source), like(gate)


def save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    sources, query, key_weight, null_source, residual, gate, _ = inputs
    _, logits, lse, rstd = output
    ctx.mark_non_differentiable(logits, lse, rstd)
    ctx.set_materialize_grads(False)
    ctx.has_residual = residual is not None
    ctx.save_for_backward(query, key_weight, null_source, gate, logits, lse, rstd, *sources)


def route_gradient(ctx: Any, grad_out: Tensor | None, *_: Tensor | None) -> tuple[Any, ...]:
    query, key_weight, null_source, gate, logits, lse, rstd, *sources = ctx.saved_tensors
    if grad_out is None:
        return [None] * len(sources), None, None, None, None, None, None
    grads, dquery, dkey, dnull, dgate = torch.ops.mhar.route_backward(
        grad_out, sources, query, key_weight, null_source, gate, logits, lse, rstd
    )
    return (
        grads,
        dquery,
        None if key_weight is None else dkey,
        None if null_source is None else dnull,
        grad_out if ctx.has_residual else None,
        None if gate is None else dgate,
        None,
    )


def refuse_transforms(args: tuple[Any, ...]) -> None:
    if torch._C._are_functorch_transforms_active():
        raise RuntimeError(FIRST_ORDER.format("a torch.func transform (grad, vjp, jvp, vmap, ...)"))
    if forward_ad._current_level < 0:
        return
    for tensor in tree_leaves(args):
        if isinstance(tensor, Tensor) and forward_ad.unpack_dual(tensor).tangent is not None:
            raise RuntimeError(FIRST_ORDER.format("forward-mode differentiation"))


def refuse_double_backward(ctx: Any, *_: Any) -> NoReturn:
    raise RuntimeError(FIRST_ORDER.format("double backward"))


def refuse_vmap(*_: Any) -> NoReturn:
    raise RuntimeError(FIRST_ORDER.format("torch.vmap"))
