"""What tests/test_kernels.py runs of score, mix, pull and query_gradient, and of the GPU script, interpreted."""

import json
import sys

import pytest
import torch

from mhar_compile.lowering.rules import RECTANGLE
from mhar_compile.testing import Recipe
from mhar_compile.testing.problems import LAYOUTS
from perf import checks, gpu

from . import interpreted  # noqa: F401  the kernels become the CPU implementation

pytestmark = pytest.mark.filterwarnings("ignore:.*:RuntimeWarning")  # numpy, of padded rows
CASES = [  # dtype, H, K, sources, sites
    (torch.float32, 2, 8, 3, 2),
    (torch.bfloat16, 2, 8, 3, 2),
    (torch.float16, 3, 24, 2, 3),
    (torch.bfloat16, 4, 20, 2, 1),
    (torch.float32, 1, 40, 2, 2),
    (torch.float32, 2, 4, RECTANGLE + 2, 1),
    (torch.bfloat16, 2, 72, RECTANGLE + 1, 2),  # programs of five units share what one launch hands to the next
]


@pytest.mark.parametrize(("dtype", "heads", "head_width", "count", "sites"), CASES)
def test_tile_then_site(dtype, heads, head_width, count, sites):
    checks.check_mix("cpu", 5, heads * head_width, heads, count, sites, dtype)


@pytest.mark.parametrize(
    ("dtype", "heads", "head_width", "count", "sites"), [*CASES[:5], (torch.float32, 2, 4, 1, RECTANGLE + 2)]
)
def test_pull(dtype, heads, head_width, count, sites):
    checks.check_pull("cpu", 3, heads * head_width, heads, count, sites, dtype)


def test_gpu_script(tmp_path, monkeypatch):
    """The whole script at tiny sizes: every section runs, every result is recorded."""
    monkeypatch.setattr(sys, "argv", ["gpu"])
    assert gpu.main(["--self-check", "--out", str(tmp_path), "--name", "tiny", "--commit", "abc"]) == 0
    results = json.loads((tmp_path / "tiny.json").read_text())
    assert set(results["sections"]) == set(gpu.SECTIONS)
    assert all(section["passed"] for section in results["sections"].values()), results["sections"]
    assert all(row["us"] > 0 for row in results["times"])
    assert {"device", "driver", "torch", "triton"} <= set(results["origin"])
    assert results["origin"]["commit"] == "abc"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_problem_keeps_its_layout_on_a_device(layout):
    problem = Recipe(tokens=(3, 2), layouts=(layout,)).problem(0)
    moved = checks.on_device(problem, "meta")
    for here, there in zip([*problem.sources, problem.grad_out], [*moved.sources, moved.grad_out], strict=True):
        assert (here.shape, here.stride(), here.storage_offset()) == (
            there.shape,
            there.stride(),
            there.storage_offset(),
        )
