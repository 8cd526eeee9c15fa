"""Properties of ``route`` in eager mode, on any problem that mhar_compile.testing can draw."""

import importlib
import itertools
import math
import sys
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils import deterministic

from mhar_compile import route
from mhar_compile.ops.reference import compute_dtype
from mhar_compile.testing import Recipe, assert_within_budget, budgets, problems, routed
from mhar_compile.testing.budget import Site, gamma, unit_roundoff

TRAINED = (torch.float32, torch.bfloat16, torch.float16)
by_dtype = pytest.mark.parametrize("dtype", TRAINED, ids=lambda dtype: str(dtype).removeprefix("torch."))
plain = {"null_source": False, "residual": False, "gate": None}  # the output is the mixture of the sources


def has_sources(problem):
    return len(problem.sources) > 0


@by_dtype
def test_results_and_gradients_are_within_their_budgets(dtype):
    @given(problems(dtype=dtype))
    @settings(max_examples=300)
    def check(problem):
        assert_within_budget(problem, problem.run())

    check()


@given(problems(dtype=torch.float64))
def test_float64_is_within_its_budget(problem):
    assert_within_budget(problem, problem.run())


@by_dtype
@pytest.mark.parametrize("count", [33, 65, 129])
def test_many_sources_are_within_their_budgets(count, dtype):
    recipe = Recipe(
        (3,), count, 4, 12, dtype, null_source=True, residual=True, gate=1, parameter_dtype=dtype, decades=count == 65
    )
    problem = recipe.problem(count)
    assert_within_budget(problem, problem.run())


@given(problems())
def test_dtypes_shapes_and_gradients_of_the_results(problem):
    results, arguments = problem.run(), problem.arguments()
    like = problem.grad_out
    rows = len(problem.sources) + (problem.null_source is not None)
    assert (results["out"].dtype, results["out"].shape) == (like.dtype, like.shape)
    assert results["weights"].dtype == compute_dtype(like.dtype)
    assert results["weights"].shape == (rows, *like.shape[:-1], problem.query.shape[0])
    for name, argument in arguments.items():
        if argument is not None:
            assert (results[name].dtype, results[name].shape) == (argument.dtype, argument.shape), name
    if problem.sources:
        assert (results["sources"].dtype, results["sources"].shape[1:]) == (like.dtype, like.shape)
    if problem.residual is not None:
        assert torch.equal(results["residual"], like)  # the gradient of the output itself


@given(problems())
def test_weights_never_require_grad(problem):
    def checked(*args, **options):
        out, weights = routed(*args, **options)
        assert out.requires_grad
        assert not weights.requires_grad
        return out, weights

    problem.run(checked)


@given(problems(count=1, **plain))
def test_one_source_is_the_identity(problem):
    results = problem.run()
    assert torch.equal(results["out"], problem.sources[0])
    assert torch.equal(results["sources"][0], problem.grad_out)
    assert not results["query"].any()


@given(problems())
def test_weights_sum_to_one(problem):
    off = (problem.run()["weights"].double().sum(0) - 1).abs()
    assert (off <= Site(problem).softmax.rho.view(off.shape)).all()


@given(problems(query_scale=0.0, **plain))
def test_zero_query_gives_the_mean(problem):
    results = problem.run()
    mean = torch.stack(problem.exact().sources).mean(0)
    weights = torch.full_like(results["weights"], 1 / len(problem.sources))
    assert ((results["out"].double() - mean).abs() <= budgets(problem)["out"]).all()
    assert ((results["weights"] - weights).abs() <= budgets(problem)["weights"]).all()


@given(problems(**plain))
def test_output_is_within_the_range_of_its_sources(problem):
    out, sources = problem.run()["out"].double(), torch.stack(problem.exact().sources)
    site = Site(problem)
    normalisation = site.softmax.rho.repeat_interleave(problem.query.shape[1], -1).view(out.shape)
    rounding = gamma(len(sources) + 1, site.x.unit) + unit_roundoff(problem.grad_out.dtype)
    info = torch.finfo(problem.grad_out.dtype)
    slack = (normalisation + rounding) * sources.abs().amax(0) + info.tiny * info.eps
    assert (out <= sources.amax(0) + slack).all()
    assert (out >= sources.amin(0) - slack).all()


@given(problems(null_source=False), st.randoms())
def test_permuted_sources_permute_weights_and_gradients(problem, random):
    order = random.sample(range(len(problem.sources)), len(problem.sources))
    results = problem.run()
    permuted = replace(problem, sources=[problem.sources[n] for n in order]).run()
    for name, budget in budgets(problem).items():
        expected = results[name][order] if name in ("weights", "sources") else results[name]
        both = 2 * (budget[order] if name in ("weights", "sources") else budget)
        assert ((permuted[name].double() - expected.double()).abs() <= both).all(), name


@given(problems(decades=False, eps=1e-30).filter(has_sources), st.integers(0, 10), st.data())
def test_scaling_a_source_leaves_its_weight(problem, exponent, data):
    n = data.draw(st.integers(0, len(problem.sources) - 1))
    scaled = [*problem.sources]
    scaled[n] = scaled[n] * 2**exponent
    assert torch.equal(replace(problem, sources=scaled).run()["weights"], problem.run()["weights"])


@given(problems(heads=1, **plain))
def test_one_head_equals_the_single_head_formula(problem):
    exact, results, limits = problem.exact(), problem.run(), budgets(problem)
    query = exact.query[0] if exact.key_weight is None else exact.query[0] * exact.key_weight
    scores = [x @ query / (x.pow(2).sum(-1) / x.shape[-1] + exact.eps).sqrt() for x in exact.sources]
    shares = [score.exp() / sum(other.exp() for other in scores) for score in scores]
    mixture = sum(share[..., None] * x for share, x in zip(shares, exact.sources, strict=True))
    assert ((results["out"].double() - mixture).abs() <= limits["out"]).all()
    assert ((results["weights"][..., 0].double() - torch.stack(shares)).abs() <= limits["weights"][..., 0]).all()


@given(problems(residual=True, gate=0))
def test_zero_gate_returns_the_residual_and_moves_only_the_gate(problem):
    results = problem.run()
    assert torch.equal(results["out"], problem.residual)
    for name in results.keys() & {"sources", "query", "key_weight", "null_source"}:
        assert not results[name].any(), name
    limit, truth = budgets(problem)["gate"], problem.truth()["gate"]
    if truth.abs() > 2 * limit:
        assert results["gate"].abs() > limit


@given(problems(null_source=True))
def test_null_source_is_a_source_that_all_tokens_share(problem):
    null = problem.null_source.to(problem.grad_out.dtype).expand_as(problem.grad_out)
    explicit = replace(problem, sources=[null, *problem.sources], null_source=None).run()
    results = problem.run()
    assert torch.equal(results["out"], explicit["out"])
    assert torch.equal(results["weights"], explicit["weights"])
    if problem.sources:
        assert torch.equal(results["sources"], explicit["sources"][1:])


@given(problems(tokens=(6,)).filter(has_sources), st.sampled_from([math.nan, math.inf, -math.inf]), st.data())
def test_nan_or_inf_stays_in_its_token(problem, value, data):
    clean = replace(problem, sources=[source.clone() for source in problem.sources])
    n, token = data.draw(st.integers(0, len(problem.sources) - 1)), data.draw(st.integers(0, 5))
    dirty = replace(clean, sources=[source.clone() for source in problem.sources])
    dirty.sources[n][token, data.draw(st.integers(0, problem.query.numel() - 1))] = value
    others = [t for t in range(6) if t != token]
    before, after = clean.run(), dirty.run()
    assert not after["out"][token].isfinite().all()
    assert torch.equal(after["out"][others], before["out"][others])
    for name in ("weights", "sources"):
        assert torch.equal(after[name][:, others], before[name][:, others]), name


@given(problems())
def test_results_are_the_same_at_every_run(problem):
    first, second = problem.run(), problem.run()
    for name, result in first.items():
        assert torch.equal(second[name], result), name


@pytest.fixture
def poisoned_memory(monkeypatch):
    """Memory that was only allocated reads as NaN."""
    monkeypatch.setattr(deterministic, "fill_uninitialized_memory", True)
    torch.use_deterministic_algorithms(True)
    assert torch.empty(8).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


def test_no_uninitialised_memory_is_read(poisoned_memory):
    @given(problems())
    @settings(max_examples=50)
    def check(problem):
        assert_within_budget(problem, problem.run())

    check()


@given(problems().filter(has_sources))
def test_one_stacked_tensor_equals_the_list(problem):
    results, stacked = (
        problem.run(),
        problem.run(lambda sources, *args, **kwargs: routed(torch.stack(sources), **kwargs)),
    )
    for name, result in results.items():
        assert torch.equal(stacked[name], result), name


@given(problems())
def test_flat_query_with_heads_equals_a_query_by_head(problem):
    heads = problem.query.shape[0]

    def flat(sources, query, **options):
        return routed(sources, query.flatten(), heads=heads, **options)

    results = problem.run(flat)
    for name, result in problem.run().items():
        assert torch.equal(results[name], result), name


def test_without_hypothesis_the_import_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "hypothesis", None)
    monkeypatch.delitem(sys.modules, "mhar_compile.testing")
    with pytest.raises(ImportError, match=r"mhar-compile\[test\]"):
        importlib.import_module("mhar_compile.testing")


def differentiable_sites():
    """Small float64 problems: every combination of arguments with three, one and no sources, and no tokens."""
    for tokens, count in (((2,), 3), ((), 1), ((2,), 0), ((0,), 2)):
        for key_weight, null_source, residual in itertools.product((False, True), repeat=3):
            if count or (null_source and residual):
                for gate in (None, 0, 1):
                    flags = (key_weight, null_source, residual, gate)
                    yield Recipe(tokens, count, 2, 3, torch.float64, torch.float64, *flags, layouts=("slice",))


@pytest.mark.parametrize("recipe", list(differentiable_sites()))
def test_gradcheck(recipe):
    problem = recipe.problem(0)
    names = [name for name, argument in problem.arguments().items() if argument is not None]
    inputs = [*problem.sources, *(problem.arguments()[name] for name in names)]

    def function(*tensors):
        arguments = dict(zip(names, tensors[recipe.count :], strict=True))
        return route(tensors[: recipe.count], **arguments, eps=problem.eps)

    assert torch.autograd.gradcheck(function, [tensor.detach().requires_grad_() for tensor in inputs])
