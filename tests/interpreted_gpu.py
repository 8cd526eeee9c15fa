"""What tests/test_kernels.py runs of the GPU script, interpreted."""

import json
import sys

import pytest

from mhar_compile.testing import Recipe
from mhar_compile.testing.problems import LAYOUTS
from perf import checks, gpu

from . import interpreted  # noqa: F401  the kernels become the CPU implementation

pytestmark = pytest.mark.filterwarnings("ignore:.*:RuntimeWarning")  # numpy, of padded rows


def test_gpu_script(tmp_path, monkeypatch):
    """The whole script at tiny sizes: every section runs, every result is recorded."""
    monkeypatch.setattr(sys, "argv", ["gpu"])
    assert gpu.main([*gpu.SECTIONS, "--self-check", "--out", str(tmp_path), "--name", "tiny", "--commit", "abc"]) == 0
    results = json.loads((tmp_path / "tiny.json").read_text())
    assert set(results["sections"]) == set(gpu.SECTIONS)
    assert all(section["passed"] for section in results["sections"].values()), results["sections"]
    assert all(row["us"] > 0 for name in gpu.TIMES for row in results["sections"][name]["rows"])
    assert all(results["sections"][name]["rows"] for name in gpu.SECTIONS)
    assert {"device", "driver", "torch", "triton"} <= set(results["origin"])
    assert results["origin"]["commit"] == "abc"


def test_a_failing_section_keeps_its_rows_and_the_other_sections(tmp_path, monkeypatch):
    def failing(setup):
        """Fails after a row."""
        yield {"name": "before"}
        raise ValueError("broken")

    monkeypatch.setattr(sys, "argv", ["gpu"])
    monkeypatch.setitem(gpu.SECTIONS, "batches", failing)
    chosen = ["batches", "large", "sites"]
    assert gpu.main([*chosen, "--self-check", "--out", str(tmp_path), "--name", "broken"]) == 1
    sections = json.loads((tmp_path / "broken.json").read_text())["sections"]
    assert [sections[name]["passed"] for name in chosen] == [False, True, False]
    assert sections["batches"]["rows"] == [{"name": "before"}]
    assert "broken" in sections["batches"]["error"]
    assert "left out" in sections["sites"]["error"]


def test_wrong_models_cost_the_times_of_models_alone():
    assert "compiled" in gpu.needed("chains") & gpu.needed("step_1b") & gpu.needed("slice_8b")
    assert not {"compiled", "packages"} & gpu.needed("sites")
    assert {"rectangles", "budgets", "large"} <= gpu.needed("sites") & gpu.needed("chains")


@pytest.mark.parametrize(
    ("ending", "error", "seconds"),
    [
        ("sys.exit(3)", "ended with 3", 60),
        ("os.abort()", "ended with -6", 60),
        ("time.sleep(60)", "not done in 2 s", 2),
    ],
)
def test_a_section_that_crashes_or_hangs_leaves_its_rows(tmp_path, ending, error, seconds):
    path = tmp_path / "report.json"
    text = json.dumps({"passed": False, "rows": [{"name": "before"}], "error": "not finished"})
    program = f"import os, sys, time; open({str(path)!r}, 'w').write({text!r}); print('said', flush=True); {ending}"
    found = gpu.reported([sys.executable, "-c", program], path, seconds)
    assert not found["passed"]
    assert found["rows"] == [{"name": "before"}]
    assert error in found["error"]
    assert "no report" in gpu.reported([sys.executable, "-c", ""], tmp_path / "none.json", 60)["error"]


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
