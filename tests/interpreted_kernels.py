"""What tests/test_kernels.py runs in processes of its own, with Triton's interpreter in the place of a GPU."""

import contextlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mhar_compile import route
from mhar_compile.lowering import launch
from mhar_compile.lowering.rules import RECTANGLE
from mhar_compile.testing import Recipe, assert_within_budget
from mhar_compile.testing.problems import LAYOUTS

from . import interpreted  # noqa: F401  the kernels become the CPU implementation

pytestmark = pytest.mark.filterwarnings("ignore:.*:RuntimeWarning")  # numpy, of what is meant to be infinite
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
CUTS = ((1, 1), (1, 24), (2, 5), (8, 8), (3, 16), (2, 72), (4, 40), (9, 8), (1, 100))  # (H, K)


@contextlib.contextmanager
def poisoned():
    """Uninitialised memory is NaN."""
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.empty(2).isnan().all()
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def check(recipe, seed=0):
    problem = recipe.problem(seed)
    with poisoned():
        assert_within_budget(problem, problem.run())


@st.composite
def small_recipes(draw, dtype):
    heads, head_width = draw(st.sampled_from(CUTS))
    null, residual = draw(st.booleans()), draw(st.booleans())
    return Recipe(
        tokens=draw(st.sampled_from([(1,), (3,), (2, 2), (5,)])),
        count=draw(st.integers(0 if null and residual else 1, 4)),
        heads=heads,
        head_width=head_width,
        dtype=dtype,
        parameter_dtype=draw(st.sampled_from([dtype, torch.float32])),
        key_weight=draw(st.booleans()),
        null_source=null,
        residual=residual,
        gate=draw(st.sampled_from([None, 0, 1])),
        query_scale=draw(st.sampled_from([1.0, 3.0, 0.0])),
        shared=draw(st.booleans()),
        decades=draw(st.booleans()) if dtype != torch.float16 else False,
        layouts=tuple(draw(st.lists(st.sampled_from(LAYOUTS), min_size=1, max_size=3))),
    )


def property_of(dtype):
    @settings(max_examples=8, deadline=None)
    @given(recipe=small_recipes(dtype), seed=st.integers(0, 2**32 - 1))
    def within_budget(recipe, seed):
        check(recipe, seed)

    return within_budget


test_float32 = property_of(torch.float32)
test_bfloat16 = property_of(torch.bfloat16)
test_float16 = property_of(torch.float16)


@pytest.mark.parametrize("count", [1, 2, 9, RECTANGLE, RECTANGLE + 1, 33, 129])
def test_any_number_of_sources(count):
    dtype = torch.bfloat16 if count % 2 else torch.float32
    recipe = Recipe(tokens=(2,), count=count - 1, heads=2, head_width=4, dtype=dtype, null_source=True, residual=True)
    check(recipe)


@pytest.mark.parametrize(("heads", "head_width"), [(8, 64), (8, 72), (8, 80), (8, 128), (8, 160), (4, 256), (2, 512)])
def test_head_widths(heads, head_width):
    check(
        Recipe(tokens=(2,), count=2, heads=heads, head_width=head_width, dtype=torch.bfloat16, null_source=True, gate=1)
    )


@pytest.mark.parametrize(("heads", "head_width"), [(9, 64), (1, 7168), (31, 33), (1, 1001)])
def test_uneven_widths(heads, head_width):
    check(Recipe(tokens=(1,), count=2, heads=heads, head_width=head_width, dtype=torch.bfloat16))


def test_no_tokens():
    for tokens in ((0,), (2, 0)):
        check(Recipe(tokens=tokens, count=3, null_source=True, residual=True, gate=1))


def test_no_gradient_into_unused_parameters():
    check(Recipe(tokens=(3,), count=2, key_weight=False))


def test_saved_tensors_of_any_layout():
    sources, query, dout = list(torch.randn(3, 4, 16)), torch.randn(2, 8), torch.randn(4, 16)
    _, *saved = torch.ops.mhar.route(sources, query, None, None, None, None, 1e-6)
    strided = [x.mT.contiguous().mT for x in saved]
    assert not any(x.is_contiguous() for x in strided)
    expected, given = (
        torch.ops.mhar.route_backward(dout, sources, query, None, None, None, *tensors) for tensors in (saved, strided)
    )
    assert all(torch.equal(a, b) for a, b in zip([*expected[0], expected[1]], [*given[0], given[1]], strict=True))


@pytest.mark.parametrize("dtype", FLOATS)
def test_bitwise_repeatable_whatever_the_batch(dtype):
    recipe = Recipe(tokens=(5,), count=3, heads=2, head_width=12, dtype=dtype, null_source=True, residual=True, gate=1)
    problem = recipe.problem(3)
    first, again = problem.run(), problem.run()
    assert all(torch.equal(first[name], again[name]) for name in first)
    for token in range(5):
        alone = recipe.problem(3)
        alone.sources[:] = [x[token : token + 1] for x in alone.sources]
        object.__setattr__(alone, "residual", alone.residual[token : token + 1])
        object.__setattr__(alone, "grad_out", alone.grad_out[token : token + 1])
        single = alone.run()
        assert torch.equal(single["out"][0], first["out"][token])
        assert torch.equal(single["weights"][:, 0], first["weights"][:, token])
        assert torch.equal(single["sources"][:, 0], first["sources"][:, token])


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_stays_in_its_token(bad):
    recipe = Recipe(tokens=(5,), count=3, heads=2, head_width=4, residual=True, gate=1)
    clean, spoilt = recipe.problem(4), recipe.problem(4)
    spoilt.sources[1][2, 3] = bad
    before, after = clean.run(), spoilt.run()
    others = [0, 1, 3, 4]
    assert after["out"][2].isnan().any()
    assert torch.equal(before["out"][others], after["out"][others])
    assert torch.equal(before["sources"][:, others], after["sources"][:, others])


def test_offsets_beyond_two_to_the_31():
    """Two tokens whose distance in memory is more than 2^31 elements; untouched pages cost nothing."""
    width, stride = 16, 2**31 + 64
    memory = torch.empty(stride + width, dtype=torch.bfloat16)
    far = memory.as_strided((2, width), (stride, 1))
    near = torch.randn(2, width).bfloat16()
    far.copy_(near)
    query = torch.randn(2, 8)
    launched = list(launch.rows_of([far], None, near))
    assert launched[0].stride(0) == stride, "the source must be read where it lies"
    other = torch.randn(2, width).bfloat16()
    results = []
    for source in (far, near):
        x, y = source.detach().requires_grad_(), other.clone().requires_grad_()
        out = route([x, y], query, residual=source)
        results.append([out.detach(), *torch.autograd.grad(out, [x, y], other)])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
