"""The backward of an RMSNorm is found whatever it is written like, and nothing else is taken for one."""

import pytest
import torch
from torch._inductor.decomposition import select_decomp_table
from torch.fx.experimental.proxy_tensor import make_fx

from mhar_compile.lowering.norm_gradients import norm_gradient_of

TOKENS, WIDTH = (2, 3), 8


def dot(a, b):
    return (a * b).sum(-1, keepdim=True)


def by_formula(dy, x, r, w):
    return r * (dy * w - x * r.square() * dot(dy * w, x) / WIDTH)


FORMS = {
    "formula": by_formula,
    "normalised first": lambda dy, x, r, w: r * (dy * w - (x * r) / WIDTH * dot(x * r, dy * w)),
    "as autograd has it": lambda dy, x, r, w: dy * w * r + (dot(dy * w, x) * -0.5 * r**3).expand_as(x) / WIDTH * 2 * x,
    "mean": lambda dy, x, r, w: dy * r * w - r.pow(3) * x * (x * dy * w).mean(-1, keepdim=True),
    "weight last": lambda dy, x, r, w: (w * dy - (x * r) * (r * x * dy * w).mean(-1, keepdim=True)) * r,
}
OTHERS = {
    "a power less": lambda dy, x, r, w: r * (dy * w - x * r * dot(dy * w, x) / WIDTH),
    "another width": lambda dy, x, r, w: r * (dy * w - x * r.square() * dot(dy * w, x) / (WIDTH + 1)),
    "another sign": lambda dy, x, r, w: r * (dy * w + x * r.square() * dot(dy * w, x) / WIDTH),
    "without the mean": lambda dy, x, r, w: r * dy * w + x * 0,
    "centred": lambda dy, x, r, w: by_formula(dy, x, r, w) - dy.mean(-1, keepdim=True),
    "of two factors": lambda dy, x, r, w: r * (dy * w - x * (r * w[:1]).square() * dot(dy * w, x) / WIDTH),
    "something added": lambda dy, x, r, w: by_formula(dy, x, r, w) + x,
    "a row too many": lambda dy, x, r, w: by_formula(dy, x, r, w) + dy.flip(-1),
    "clamped far out": lambda dy, x, r, w: by_formula(dy.clamp(-1e3, 1e3), x, r, w),
    "in whole numbers": lambda dy, x, r, w: by_formula(dy.int().float(), x, r, w),
    "in float8": lambda dy, x, r, w: by_formula(dy.to(torch.float8_e4m3fn).float(), x, r, w),
}


def graph_of(function, terms=1, dtype=torch.float32):
    """A graph of products, their sum dy, x, inverse and weight: the placeholders of those three, and the results."""
    rows = [torch.randn(*TOKENS, WIDTH, dtype=dtype) for _ in range(terms)]

    def traced(x, inverse, weight, *rows):
        products = [row @ row.mT @ row for row in rows]
        return function(sum(products[1:], products[0]), x, inverse, weight)

    x, inverse, weight = torch.randn(*TOKENS, WIDTH), torch.rand(*TOKENS, 1) + 1, torch.randn(WIDTH)
    graph = make_fx(traced, decomposition_table=select_decomp_table())(
        x.to(dtype), inverse, weight.to(dtype), *rows
    ).graph
    return list(graph.find_nodes(op="placeholder"))[:3], graph.output_node().args[0]


@pytest.mark.parametrize("name", FORMS)
def test_found(name):
    (x, inverse, weight), (grad,) = graph_of(lambda *given: (FORMS[name](*given),), terms=3)
    found = norm_gradient_of(grad)
    assert (found.x, found.inverse, found.weight, found.result) == (x, inverse, weight, grad)
    assert len(found.terms) == 3
    assert all("view" in term.name for term in found.terms)
    assert found.weight_sum is None


def test_without_weight():
    (x, inverse, _), (grad,) = graph_of(lambda dy, x, r, w: (by_formula(dy, x, r, 1.0),))
    found = norm_gradient_of(grad)
    assert (found.x, found.inverse, found.weight, len(found.terms)) == (x, inverse, None, 1)


def test_a_sum_that_is_read_elsewhere_is_in_memory_anyhow():
    _, (grad, _) = graph_of(lambda dy, *rest: (by_formula(dy, *rest), dy), terms=3)
    assert norm_gradient_of(grad) is None, "the kernel would read what Inductor need not have written"
    _, (grad, _) = graph_of(lambda dy, *rest: (by_formula(dy, *rest), dy @ dy.mT), terms=3)
    assert norm_gradient_of(grad) is None


@pytest.mark.parametrize("keepdim", [False, True])
def test_the_weights_gradient(keepdim):
    _, (grad, total) = graph_of(
        lambda dy, x, r, w: (by_formula(dy, x, r, w), (dy * x * r).sum([0, 1], keepdim).view(WIDTH).bfloat16()), terms=2
    )
    found = norm_gradient_of(grad)
    assert len(found.terms) == 2
    assert found.weight_sum is total, "as it is wanted: of its shape and dtype"


def test_another_sum_over_tokens_is_not_the_weights():
    _, (grad, total) = graph_of(lambda dy, x, r, w: (by_formula(dy, x, r, w), (dy * r).sum([0, 1])), terms=1)
    found = norm_gradient_of(grad)
    assert found is not None
    assert found.weight_sum is not total
    assert found.weight_sum is None


def test_terms_of_two_dtypes_are_no_pointers_of_one_kernel():
    def added(dy, x, r, w):
        return (by_formula(dy + dy.float() @ dy.float().mT @ dy.float(), x, r, w).bfloat16(),)

    _, (grad,) = graph_of(added, dtype=torch.bfloat16)
    assert norm_gradient_of(grad) is None


def test_a_narrow_factor_is_left_alone():
    """Sums are stored in the factor's dtype."""
    _, (grad,) = graph_of(lambda dy, x, r, w: (by_formula(dy, x, r.bfloat16().flip(0), w),))
    assert norm_gradient_of(grad) is None


@pytest.mark.parametrize("name", OTHERS)
def test_not_taken(name):
    _, (grad,) = graph_of(lambda *given: (OTHERS[name](*given),), terms=2)
    assert norm_gradient_of(grad) is None
