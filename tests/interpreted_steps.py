"""What tests/test_kernels.py runs of the steps' launches, interpreted: every step against the plain one in float64."""

from dataclasses import replace

import pytest
import torch

from mhar_compile.lowering import rules
from mhar_compile.lowering.rules import RECTANGLE, TERMS
from perf import step_checks as checks
from perf.step_checks import Sizes

from . import interpreted  # noqa: F401  rounds as the hardware does

pytestmark = pytest.mark.filterwarnings("ignore:.*:RuntimeWarning")  # numpy, of padded rows
NARROW, CHUNKED = Sizes("cpu", torch.bfloat16, 2, 8), Sizes("cpu", torch.bfloat16, 4, 20)
WIDE, HALF = Sizes("cpu", torch.float32, 2, 8), Sizes("cpu", torch.float16, 3, 24)
UNEVEN = Sizes("cpu", torch.bfloat16, 2, 8, uneven=True)
UNEVEN_WIDE = Sizes("cpu", torch.float32, 3, 12, tokens=(3, 2), uneven=True)
LONG = Sizes("cpu", torch.bfloat16, 7, 3)  # 7 units, that a loop keeps as they were stored
MASKED_HEAD, MASKED_COLUMNS = Sizes("cpu", torch.bfloat16, 9, 64, (1, 3)), Sizes("cpu", torch.bfloat16, 8, 72, (3,))
ALL = [NARROW, CHUNKED, WIDE, HALF, UNEVEN, UNEVEN_WIDE]


@pytest.mark.parametrize("sizes", ALL)
def test_score(sizes):
    checks.check_score(sizes)


@pytest.mark.parametrize(
    ("sizes", "count", "options"),
    [
        (WIDE, 3, {}),
        (NARROW, 3, {}),
        (CHUNKED, 1, {"carried": True}),
        (HALF, 2, {"null": True}),
        (UNEVEN, 3, {"null": True, "residual": True, "gate": True}),
        (UNEVEN_WIDE, 4, {"residual": True}),
        (CHUNKED, 0, {"residual": True, "gate": True, "carried": True}),
        (UNEVEN, RECTANGLE + 2, {"null": True, "carried": True}),
        (WIDE, RECTANGLE + 1, {"gate": True}),
    ],
)
def test_mix(sizes, count, options):
    checks.check_mix(sizes, count, **options)


@pytest.mark.parametrize(
    ("sizes", "count", "options"),
    [
        (WIDE, 3, {"weight": None}),
        (NARROW, 3, {"weight": torch.bfloat16, "round_first": True}),
        (CHUNKED, 1, {"carried": True, "keep_out": False}),
        (HALF, 2, {"null": True, "weight": torch.float16}),
        (UNEVEN, 3, {"null": True, "residual": True, "gate": True}),
        (UNEVEN_WIDE, 4, {"residual": True, "result": torch.bfloat16, "round_first": True}),
        (CHUNKED, 0, {"residual": True, "gate": True, "carried": True}),
        (UNEVEN, RECTANGLE + 2, {"null": True, "carried": True, "keep_out": False, "weight": None}),
        (WIDE, RECTANGLE + 1, {"gate": True}),
        (MASKED_HEAD, 2, {}),
        (MASKED_HEAD, 0, {"residual": True, "carried": True, "weight": torch.bfloat16, "round_first": True}),
        (MASKED_COLUMNS, 5, {"null": True, "round_first": True}),
    ],
)
def test_mix_norm(sizes, count, options):
    checks.check_mix_norm(sizes, count, **options)


@pytest.mark.parametrize(
    ("sizes", "count", "options"),
    [
        (WIDE, 3, {"weight": None}),
        (NARROW, 3, {"weight": torch.bfloat16}),
        (CHUNKED, 1, {"coupled": False}),
        (HALF, 2, {"weight": torch.float16, "gradient": torch.float32}),
        (UNEVEN, TERMS, {"summed": False}),
        (UNEVEN_WIDE, 2, {"gradient": torch.bfloat16, "weight": torch.bfloat16}),
        (MASKED_HEAD, 3, {}),
        (MASKED_COLUMNS, 2, {}),
    ],
)
def test_norm_backward(sizes, count, options):
    checks.check_norm_backward(sizes, count, **options)


@pytest.mark.parametrize("sizes", [NARROW, UNEVEN_WIDE])
def test_norm_backward_of_more_tokens_than_are_resident(sizes, monkeypatch):
    monkeypatch.setattr(rules, "MULTIPROCESSORS", 1)
    rule = rules.site_rule(sizes.heads, sizes.head_width, sizes.dtype.itemsize)
    checks.check_norm_backward(replace(sizes, tokens=(3, rule.programs * rule.tokens)), 3)


@pytest.mark.parametrize(
    ("sizes", "count", "sites"),
    [
        (WIDE, 2, 2),
        (CHUNKED, 2, 3),
        (HALF, 3, 1),
        (UNEVEN, 3, 2),
        (Sizes("cpu", torch.bfloat16, 2, 72), RECTANGLE + 1, 2),
    ],
)
def test_mix_tile(sizes, count, sites):
    checks.check_mix_tile(sizes, count, sites)


@pytest.mark.parametrize(
    ("sizes", "count", "options"),
    [
        (WIDE, 3, {}),
        (CHUNKED, 2, {"null": True, "gate": True}),
        (HALF, 1, {"gate": True}),
        (UNEVEN, RECTANGLE + 2, {"null": True}),
        (LONG, 2, {"gate": True}),
    ],
)
def test_coupling_from_sources(sizes, count, options):
    checks.check_coupling_from_sources(sizes, count, **options)


@pytest.mark.parametrize(
    ("sizes", "count", "sites", "options"),
    [
        (WIDE, 1, [3, 2, 1], {}),
        (NARROW, 3, [4, 2, 1], {"gated": True, "carried": True, "wide": True}),
        (CHUNKED, 2, [3, 1], {"carried": True, "shared": False}),
        (HALF, 2, [2], {"gated": True}),
        (UNEVEN, 3, [1, 3, 4], {"gated": True, "wide": True}),
        (UNEVEN_WIDE, 2, [5, 3, 2], {"carried": True}),
        (LONG, 2, [3, 1], {"gated": True, "carried": True}),
        (WIDE, 1, [*range(RECTANGLE + 2, 0, -1)], {"gated": True}),
    ],
)
def test_pull(sizes, count, sites, options):
    checks.check_pull(sizes, count, sites, **options)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("sizes", ALL)
def test_pull_null(sizes, gated):
    checks.check_pull_null(sizes, gated=gated)


@pytest.mark.parametrize("sizes", [NARROW, WIDE, HALF])
@pytest.mark.parametrize(
    "options",
    [{}, {"single": (3, 1)}, {"shared": False, "single": (2,), "weighted": (0, 1, 2, 3)}, {"weighted": ()}],
    ids=str,
)
def test_unfold(sizes, options):
    checks.check_unfold(sizes, **options)
