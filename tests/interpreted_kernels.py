"""What tests/test_kernels.py runs in processes of its own, with Triton's interpreter in the place of a GPU."""

import contextlib
from dataclasses import replace

import pytest
import torch

from mhar_compile import route
from mhar_compile.lowering import launch
from mhar_compile.lowering.rows import rows_of
from mhar_compile.lowering.rules import RECTANGLE
from mhar_compile.testing import Recipe, assert_within_budget

from . import interpreted  # noqa: F401  the kernels become the CPU implementation

pytestmark = pytest.mark.filterwarnings("ignore:.*:RuntimeWarning")  # numpy, of what is meant to be infinite
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
UNEVEN = {  # a tensor [B, T, d] whose rows take two strides, with the values of x or with some of them
    "later tokens of a buffer": lambda x: torch.cat([x[:, :1], x], 1)[:, 1:],
    "first tokens of a buffer": lambda x: torch.cat([x, x], 1)[:, : x.shape[1]],
    "time first": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    "expanded over the batch": lambda x: x[:1].expand_as(x),
    "expanded over time": lambda x: x[:, :1].expand_as(x),
    "expanded over all tokens": lambda x: x[:1, :1].expand_as(x),
    "columns of a buffer": lambda x: torch.cat([x, x], 2)[..., x.shape[2] :],
}


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


@pytest.mark.parametrize(("heads", "head_width"), [(9, 64), (1, 7168), (31, 33), (1, 1001), (7, 3)])
def test_uneven_widths(heads, head_width):
    recipe = Recipe(tokens=(1,), count=2, heads=heads, head_width=head_width, dtype=torch.bfloat16)
    check(recipe)
    check(replace(recipe, null_source=True, gate=1))


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


@pytest.fixture
def memory_read(monkeypatch):
    """The addresses of all memory that launches read as sources, residual and gradient of the output."""
    read, run = set(), launch.Launch.run

    def recorded(self):
        for name in {"sources", "residual", "grad_out"} & self.arguments.keys():
            value = self.arguments[name]
            read.update(x.untyped_storage().data_ptr() for x in (value if isinstance(value, tuple) else [value]))
        run(self)

    monkeypatch.setattr(launch.Launch, "run", recorded)
    return read


def memory_of(problem):
    return {x.untyped_storage().data_ptr() for x in (*problem.sources, problem.residual, problem.grad_out)}


def uneven_problem(tokens, dtype, layouts, seed):
    """A problem whose sources, residual and gradient have these layouts, in turn."""
    recipe = Recipe(tokens, len(layouts), 2, 8, dtype, residual=True, gate=1)
    problem = recipe.problem(seed)
    laid = [layout(x) for layout, x in zip(layouts, problem.sources, strict=True)]
    return replace(problem, sources=laid, residual=layouts[0](problem.residual), grad_out=layouts[-1](problem.grad_out))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("layout", UNEVEN)
def test_rows_with_two_strides_are_read_where_they_lie(layout, dtype, memory_read):
    problem = uneven_problem((2, 3), dtype, [UNEVEN[layout], torch.clone], 5)
    with poisoned():
        assert_within_budget(problem, problem.run())
    assert memory_read == memory_of(problem)


def test_rows_of_all_layouts_at_one_site(memory_read):
    problem = uneven_problem((3, 2), torch.bfloat16, [*UNEVEN.values()] * 3, 6)
    assert len(problem.sources) > RECTANGLE
    problem = replace(problem, null_source=torch.randn(16).bfloat16())
    with poisoned():
        assert_within_budget(problem, problem.run())
    assert memory_read == memory_of(problem) | {problem.null_source.untyped_storage().data_ptr()}


def test_what_does_not_fit_the_others_is_copied(memory_read):
    """Three leading dimensions: most tensors take their second stride after the first of them, one after the second."""
    inside, across = (lambda x: torch.cat([x, x], 2)[:, :, : x.shape[2]]), UNEVEN["later tokens of a buffer"]
    problem = uneven_problem((2, 3, 2), torch.float32, [across, across, inside, across], 7)
    assert_within_budget(problem, problem.run())
    copied = memory_of(problem) - memory_read
    assert copied == {problem.sources[2].untyped_storage().data_ptr()}
    assert len(memory_read - memory_of(problem)) > 0


def test_offsets_beyond_two_to_the_31():
    """Two tokens whose distance in memory is more than 2^31 elements; untouched pages cost nothing."""
    width, stride = 16, 2**31 + 64
    memory = torch.empty(stride + width, dtype=torch.bfloat16)
    far = memory.as_strided((2, width), (stride, 1))
    near = torch.randn(2, width).bfloat16()
    far.copy_(near)
    query = torch.randn(2, 8)
    (row,), _ = rows_of([far])
    assert row.stride == stride, "the source must be read where it lies"
    other = torch.randn(2, width).bfloat16()
    results = []
    for source in (far, near):
        x, y = source.detach().requires_grad_(), other.clone().requires_grad_()
        out = route([x, y], query, residual=source)
        results.append([out.detach(), *torch.autograd.grad(out, [x, y], other)])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("inner", [1, 2])
def test_jumps_beyond_two_to_the_31(inner):
    """The same for the distance between runs of tokens."""
    width, jump = 16, 2**31 + 64
    memory = torch.empty(jump + inner * width, dtype=torch.bfloat16)
    far = memory.as_strided((2, inner, width), (jump, width, 1))
    near = torch.randn(2, inner, width).bfloat16()
    far.copy_(near)
    query, other = torch.randn(2, 8), torch.randn(2, inner, width).bfloat16()
    assert torch.equal(*(route([source, other], query, residual=source) for source in (far, near)))
