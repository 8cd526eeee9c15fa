"""The operators as torch.library sees them: opcheck, autograd's edges, and what is refused instead of silently zero."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

from mhar_compile import route

OPTIONS = list(itertools.product((False, True), repeat=4))


def arguments(dtype: torch.dtype, key: bool, null: bool, residual: bool, gate: bool, count: int = 3) -> tuple:
    """The operator's arguments at [2, 3, 12] and 4 heads, parameters in float32, all requiring grad."""

    def tensor(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(*shape, dtype=dtype).requires_grad_()

    return (
        [tensor(2, 3, 12, dtype=dtype) for _ in range(count)],
        tensor(4, 3),
        tensor(12) if key else None,
        tensor(12) if null else None,
        tensor(2, 3, 12, dtype=dtype) if residual else None,
        tensor(1) if gate else None,
        1e-6,
    )


def detached(values):
    return [v.detach() if isinstance(v, Tensor) else detached(v) if isinstance(v, list) else v for v in values]


@pytest.mark.parametrize("options", OPTIONS)
def test_opcheck_route(options):
    torch.library.opcheck(torch.ops.mhar.route.default, arguments(torch.float32, *options))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_opcheck_route_dtypes(dtype):
    torch.library.opcheck(torch.ops.mhar.route.default, arguments(dtype, True, True, True, True))


@pytest.mark.parametrize("options", OPTIONS)
def test_opcheck_backward(options):
    sources, query, key, null, residual, gate, eps = detached(arguments(torch.float32, *options))
    _, logits, lse, rstd = torch.ops.mhar.route(sources, query, key, null, residual, gate, eps)
    inputs = (torch.randn(2, 3, 12), sources, query, key, null, gate, logits, lse, rstd)
    torch.library.opcheck(torch.ops.mhar.route_backward.default, inputs)


def test_opcheck_null_source_alone():
    torch.library.opcheck(torch.ops.mhar.route.default, arguments(torch.float32, True, True, True, True, count=0))


def test_no_output_aliases_an_input():
    sources, query, key, null, residual, gate, eps = detached(arguments(torch.float32, True, True, True, True))
    outputs = torch.ops.mhar.route(sources[:1], query, None, None, None, None, eps)
    grads = torch.ops.mhar.route_backward(outputs[0], sources[:1], query, None, None, None, *outputs[1:])
    pointers = {tensor.data_ptr() for tensor in [*sources, query, key, null, residual, gate]}
    assert pointers.isdisjoint(tensor.data_ptr() for tensor in [*outputs, *grads[0], grads[1]])


def test_only_the_output_is_differentiable():
    out, logits, lse, rstd = torch.ops.mhar.route(*arguments(torch.float32, True, True, True, True))
    assert out.requires_grad
    assert not any(saved.requires_grad for saved in (logits, lse, rstd))


def test_gradients_where_only_some_arguments_need_one():
    sources, query, key, null, residual, gate, _ = arguments(torch.float64, True, True, True, True)
    everything = [*sources, query, key, null, residual, gate]
    keywords = {"key_weight": key, "null_source": null, "residual": residual, "gate": gate}
    full = torch.autograd.grad(route(sources, query, **keywords).square().sum(), everything)
    for wanted, expected in zip(everything, full, strict=True):
        for tensor in everything:
            tensor.requires_grad_(tensor is wanted)
        (got,) = torch.autograd.grad(route(sources, query, **keywords).square().sum(), [wanted])
        torch.testing.assert_close(got, expected, rtol=0, atol=0)


def test_two_backwards_give_twice_the_gradient():
    sources, query, *_ = arguments(torch.float64, False, False, False, False)
    out = route(sources, query).sum()
    out.backward(retain_graph=True)
    once = query.grad.clone()
    out.backward()
    torch.testing.assert_close(query.grad, 2 * once, rtol=0, atol=0)


def test_one_tensor_listed_twice_gets_both_gradients():
    source, query = torch.randn(2, 12, dtype=torch.float64, requires_grad=True), torch.randn(4, 3, dtype=torch.float64)
    route([source, 3 * source, source], query).square().sum().backward()
    parts = [source.detach().clone().requires_grad_() for _ in range(3)]
    route([parts[0], 3 * parts[1], parts[2]], query).square().sum().backward()
    torch.testing.assert_close(source.grad, sum(part.grad for part in parts))


def test_double_backward_is_refused():
    sources, query, *_ = arguments(torch.float32, False, False, False, False)
    (grad,) = torch.autograd.grad(route(sources, query).square().sum(), [query], create_graph=True)
    with pytest.raises(RuntimeError, match="double backward is not supported"):
        grad.sum().backward()


def test_double_backward_is_refused_compiled():
    sources, query, *_ = arguments(torch.float32, False, False, False, False)
    out = torch.compile(route, backend="aot_eager")(sources, query).square().sum()
    (grad,) = torch.autograd.grad(out, [query], create_graph=True)
    with pytest.raises(RuntimeError, match="double backward"):
        grad.sum().backward()


def dual_tangent(function, query):
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(function(forward_ad.make_dual(query, torch.ones_like(query)))).tangent


TRANSFORMS = {
    "grad": lambda f, q: torch.func.grad(f)(q),
    "vjp": lambda f, q: torch.func.vjp(f, q),
    "jvp": lambda f, q: torch.func.jvp(f, (q,), (q,)),
    "jacfwd": lambda f, q: torch.func.jacfwd(f)(q),
    "jacrev": lambda f, q: torch.func.jacrev(f)(q),
    "hessian": lambda f, q: torch.func.hessian(f)(q),
    "vmap": lambda f, q: torch.func.vmap(f)(torch.stack([q, q])),
    "dual": dual_tangent,
}


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("needs_grad", [False, True])
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.filterwarnings(
    "ignore::UserWarning", "ignore::DeprecationWarning"
)  # torch's own, when it traces a transform
def test_transforms_are_refused_not_zero(transform, needs_grad, compiled):
    torch._dynamo.reset()
    sources, query = [torch.randn(2, 12) for _ in range(3)], torch.randn(4, 3, requires_grad=needs_grad)

    def run(query):
        return TRANSFORMS[transform](lambda q: route(sources, q).sum(), query)

    with pytest.raises(Exception, match=r"is not supported|must implement the jvp"):
        (torch.compile(run, backend="aot_eager") if compiled else run)(query)


def test_batched_gradients_are_refused():
    sources, query, *_ = arguments(torch.float32, False, False, False, False)
    with pytest.raises(RuntimeError, match=r"not supported|[Bb]atching rule not implemented"):
        torch.autograd.grad(route(sources, query), [query], torch.ones(2, 2, 3, 12), is_grads_batched=True)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients(mode):
    sources, query, *_ = arguments(torch.float32, False, False, False, False)
    expected = route(sources, query).detach()
    with mode():
        out, weights = route(sources, query, return_weights=True)
    assert not out.requires_grad
    torch.testing.assert_close(out, expected, rtol=0, atol=0)
    torch.testing.assert_close(weights.sum(0), torch.ones(2, 3, 4))


def test_wrong_last_stride_is_copied_and_the_gradient_comes_back():
    base = torch.randn(12, 2, dtype=torch.float64, requires_grad=True)
    query = torch.randn(4, 3, dtype=torch.float64)
    turned = route([base.t(), base.t() * 2], query)
    straight = route([base.t().contiguous(), base.t().contiguous() * 2], query)
    torch.testing.assert_close(turned, straight, rtol=0, atol=0)
    (a,) = torch.autograd.grad(turned.square().sum(), base)
    (b,) = torch.autograd.grad(straight.square().sum(), base)
    torch.testing.assert_close(a, b)
