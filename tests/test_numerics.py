"""The error budgets catch planted faults, and chains of sites have the gradients that perf/numerics.py measures."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from mhar_compile.compiler import joint_pass
from mhar_compile.lowering.tracing import Trace, tracer
from mhar_compile.ops.reference import compute_dtype
from mhar_compile.testing import Problem, Recipe, assert_within_budget, ratios
from perf import numerics

TYPICAL = Recipe(tokens=(6,), count=9, heads=2, head_width=16)
ALIKE = Recipe(tokens=(4,), count=9, heads=2, head_width=16, shared=True, query_scale=0.3)


def site(problem: Problem, fault: str) -> dict[str, Tensor]:
    """The results of a problem without null source, residual and gate, written out with one fault planted."""
    dtype, (heads, head_width) = problem.grad_out.dtype, problem.query.shape
    wide = compute_dtype(dtype)

    def by_head(x: Tensor) -> Tensor:
        return x.to(wide).unflatten(-1, (heads, head_width))

    x, dout = by_head(torch.stack(problem.sources)), by_head(problem.grad_out)
    query, key_weight = problem.query.to(wide), by_head(problem.key_weight)
    folded = query if fault == "no key weight" else query * key_weight

    over = -1 if fault == "norm per head" else (-2, -1)
    rstd = (x.square().mean(over, keepdim=True) + problem.eps).rsqrt()
    key = (x * rstd).to(dtype).to(wide)
    terms = truncated(key) * truncated(folded) if fault == "logits in tf32" else key * folded
    logits = terms.sum(-1)
    weights = logits.softmax(0)
    values = x.roll(1, 0) if fault == "another source's weight" else x
    mix = (weights.unsqueeze(-1) * values).sum(0)

    dots = (dout * values).sum(-1)
    formed_from = mix.to(dtype).to(wide) if fault == "S from the rounded output" else mix
    dlogits = weights * (dots - (dout * formed_from).sum(-1))
    through_norm = rstd * (dlogits * logits).sum(-1)[..., None, None] / (heads * head_width)
    if fault == "no gradient through the norm":
        through_norm = torch.zeros_like(through_norm)
    dx = weights.unsqueeze(-1) * dout + rstd * (dlogits.unsqueeze(-1) * folded - x * through_norm)
    dfolded = (dlogits.unsqueeze(-1) * key).sum((0, 1))
    return {
        "out": mix.flatten(-2).to(dtype),
        "weights": weights,
        "sources": dx.flatten(-2).to(dtype),
        "query": (dfolded * key_weight).to(problem.query.dtype),
        "key_weight": (dfolded * query).flatten().to(problem.key_weight.dtype),
    }


def truncated(x: Tensor) -> Tensor:
    """float32 with the ten bits of mantissa that tf32 keeps."""
    return (x.view(torch.int32) & ~0x1FFF).view(torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("fault", "recipe"),
    [
        ("norm per head", TYPICAL),
        ("no key weight", TYPICAL),
        ("another source's weight", TYPICAL),
        ("no gradient through the norm", TYPICAL),
        ("logits in tf32", TYPICAL),
        ("S from the rounded output", ALIKE),
    ],
)
def test_budgets_catch_a_planted_fault(fault, recipe, dtype):
    shows = {"logits in tf32": [torch.float32], "S from the rounded output": [torch.bfloat16, torch.float16]}
    recipe = replace(recipe, dtype=dtype, parameter_dtype=dtype)
    for seed in range(10):
        problem = recipe.problem(seed)
        assert_within_budget(problem, site(problem, "none"))
        caught = max(ratios(problem, site(problem, fault)).values()) > 1
        assert caught == (dtype in shows.get(fault, [dtype]))  # elsewhere the dtype itself rounds as much


def test_budgets_catch_nan_and_missing_results():
    problem = TYPICAL.problem(0)
    results = problem.run()
    with pytest.raises(AssertionError, match="query inf"):
        assert_within_budget(problem, results | {"query": results["query"] * torch.nan})
    del results["query"]
    with pytest.raises(AssertionError, match="were given, expected"):
        assert_within_budget(problem, results)


@pytest.mark.parametrize("seed", range(3))
def test_float32_chain_is_as_close_to_float64_as_the_reference(seed):
    largest_error, ratio_to_reference = numerics.float32_chain(seed)
    assert largest_error <= 2.5e-6
    assert ratio_to_reference <= 1.5


def test_float32_chain_of_alike_sources_is_as_close_through_the_passes():
    """What S errs by does not cancel there: formed from the outputs in float32 it is beyond this."""
    run = torch.compile(numerics.last_output, backend=tracer(Trace(), joint_pass(rewrite="always")), fullgraph=True)
    ratios = []
    for seed in range(3):
        case = numerics.chain("alike", seed, sites=9).to(torch.float32)
        found, others = case.gradients(numerics.ours, run), case.gradients(numerics.plain)
        ratios.append(numerics.error_ratio(found, others, case.truth()))
    assert numerics.geometric_mean(ratios) <= 1.5


@pytest.mark.parametrize("recipe", numerics.SHAPES.values(), ids=numerics.SHAPES.keys())
def test_float32_site_is_as_close_to_float64_as_the_reference(recipe):
    assert numerics.geometric_mean(numerics.float32_site(recipe, seed) for seed in numerics.SEEDS) <= 1.5


@pytest.mark.parametrize(("kind", "limit"), [("alike", 0.5), ("unlike", 1.0)])
def test_bfloat16_chain_is_closer_to_float64_than_figure_3(kind, limit):
    assert numerics.geometric_mean(numerics.bfloat16_chain(kind, seed) for seed in numerics.SEEDS) <= limit


GATED = replace(TYPICAL, null_source=True, residual=True, gate=1)
SCALED = {  # what each result would be multiplied by, given the gate and the number of tokens
    "gate": lambda gate, tokens: gate,
    "null_source": lambda gate, tokens: 1 / tokens,
    "residual": lambda gate, tokens: gate,
    "sources": lambda gate, tokens: 1 / gate,
    "query": lambda gate, tokens: 1 / gate,
    "key_weight": lambda gate, tokens: 1 / gate,
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", SCALED)
def test_budgets_catch_a_gradient_on_the_wrong_side_of_the_gate_or_not_summed(name, dtype):
    for seed in range(10):
        problem = replace(GATED, dtype=dtype).problem(seed)
        problem = replace(problem, gate=torch.tensor([8.0]))
        results = problem.run()
        assert_within_budget(problem, results)
        factor = SCALED[name](float(problem.gate), math.prod(GATED.tokens))
        assert ratios(problem, results | {name: results[name] * factor})[name] > 1
