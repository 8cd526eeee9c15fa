"""``route`` under torch.compile: the same budgets, on few shapes and many values, and no recompilation."""

import inspect
import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._dynamo.testing import CompileCounterWithBackend

from mhar_compile.testing import Problem, Recipe, assert_within_budget, routed
from tests import test_properties as eager

DELTA = {"null_source": True, "residual": True, "gate": 1}
RECIPES = {
    "full": Recipe(tokens=(5, 3), count=3, heads=2, head_width=12, layouts=("contiguous", "slice")),
    "delta": Recipe(tokens=(7,), count=9, heads=4, head_width=5, layouts=("transposed", "width first"), **DELTA),
    "null source alone": Recipe(tokens=(2, 1, 3), count=0, heads=3, head_width=1, key_weight=False, **DELTA),
}
seeds = st.integers(0, 2**32 - 1)
by_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@by_dtype
@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES.keys())
def test_compiled_results_are_within_their_budgets(recipe, dtype):
    recipe = replace(recipe, dtype=dtype)  # with parameters in float32
    compiled = torch.compile(routed, fullgraph=True)
    recipe.problem(0).run(compiled)

    @given(seeds, st.booleans(), st.sampled_from([0.0, 1.0, 3.0]))
    @settings(max_examples=40)
    def check(seed, shared, query_scale):
        problem = replace(recipe, shared=shared, query_scale=query_scale).problem(seed)
        with torch.compiler.set_stance("fail_on_recompile"):
            assert_within_budget(problem, problem.run(compiled))

    check()


@by_dtype
def test_dynamic_batch_and_length_compile_once(dtype):
    recipe = replace(RECIPES["delta"], dtype=dtype, layouts=("contiguous",))
    counter = CompileCounterWithBackend("inductor")
    compiled = torch.compile(routed, fullgraph=True, dynamic=True, backend=counter)
    replace(recipe, tokens=(11, 13)).problem(0).run(compiled)
    first = counter.frame_count  # 2 where eps is a symbol at first: AOTAutograd then asks Dynamo for a number

    @given(seeds, st.integers(2, 6), st.integers(2, 9))
    @settings(max_examples=40)
    def check(seed, batch, length):
        problem = replace(recipe, tokens=(batch, length)).problem(seed)
        with torch.compiler.set_stance("fail_on_recompile"):
            assert_within_budget(problem, problem.run(compiled))

    check()
    assert counter.frame_count == first


FULL = Recipe(tokens=(6,), count=3, heads=2, head_width=12)
PROPERTIES = {
    eager.test_one_source_is_the_identity: replace(FULL, count=1),
    eager.test_weights_sum_to_one: FULL,
    eager.test_zero_query_gives_the_mean: replace(FULL, query_scale=0.0),
    eager.test_output_is_within_the_range_of_its_sources: FULL,
    eager.test_permuted_sources_permute_weights_and_gradients: FULL,
    eager.test_scaling_a_source_leaves_its_weight: replace(FULL, eps=1e-30),
    eager.test_one_head_equals_the_single_head_formula: replace(FULL, heads=1),
    eager.test_zero_gate_returns_the_residual_and_moves_only_the_gate: replace(FULL, residual=True, gate=0),
    eager.test_null_source_is_a_source_that_all_tokens_share: replace(FULL, null_source=True),
    eager.test_nan_or_inf_stays_in_its_token: FULL,
}


@by_dtype
@pytest.mark.parametrize("test", PROPERTIES, ids=[test.__name__.removeprefix("test_") for test in PROPERTIES])
def test_properties_hold_compiled(test, dtype, monkeypatch):
    """The bodies of the eager properties, with a compiled ``route`` under them, on one shape each."""
    recipe, run = replace(PROPERTIES[test], dtype=dtype, parameter_dtype=dtype), Problem.run
    compiled, body = torch.compile(routed, fullgraph=True), test.hypothesis.inner_test
    monkeypatch.setattr(Problem, "run", lambda problem, function=compiled: run(problem, function))
    drawn = {
        "random": st.randoms(),
        "exponent": st.integers(0, 10),
        "value": st.sampled_from([math.nan, math.inf, -math.inf]),
        "data": st.data(),
    }

    @given(
        seeds,
        st.fixed_dictionaries({name: drawn[name] for name in inspect.signature(body).parameters if name in drawn}),
    )
    @settings(max_examples=25)
    def check(seed, others):
        body(recipe.problem(seed), **others)

    check()
