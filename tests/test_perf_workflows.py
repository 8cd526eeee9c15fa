"""The workflows are YAML, have a time limit, and run make targets that exist."""

import re
from pathlib import Path

import pytest

yaml = pytest.importorskip("yaml", reason="workflows are parsed with PyYAML")

ROOT = Path(__file__).parents[1]
WORKFLOWS = {path.stem: yaml.safe_load(path.read_text()) for path in (ROOT / ".github/workflows").glob("*.yml")}
TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))


def commands(workflow):
    return [step["run"] for job in workflow["jobs"].values() for step in job["steps"] if "run" in step]


def made(workflow):
    return {target for command in commands(workflow) if command.startswith("make ") for target in command.split()[1:]}


def triggers(workflow):
    return workflow[True]  # YAML 1.1 reads the key `on` as true


@pytest.mark.parametrize("name", WORKFLOWS)
def test_jobs(name):
    workflow = WORKFLOWS[name]
    assert workflow["permissions"]
    for job in workflow["jobs"].values():
        assert job["timeout-minutes"] <= 90
        assert job["runs-on"]
        assert any("actions/checkout" in step.get("uses", "") for step in job["steps"])
    assert made(workflow)
    assert made(workflow) <= TARGETS


def test_when_they_run():
    assert "push" in triggers(WORKFLOWS["ci"])
    assert list(triggers(WORKFLOWS["gpu"])) == ["workflow_dispatch"]
    assert triggers(WORKFLOWS["release"])["release"]["types"] == ["published"]


def test_what_they_run():
    assert made(WORKFLOWS["ci"]) == {"lint", "types", "test", "perf"}
    assert made(WORKFLOWS["gpu"]) == {"perf-gpu"}
    assert {"wheel", "test"} <= made(WORKFLOWS["release"])


def test_the_local_check_runs_the_same():
    decisive = set(re.findall(r"^make ([a-z-]+)", (ROOT / ".ci/run").read_text(), flags=re.MULTILINE))
    assert made(WORKFLOWS["ci"]) <= decisive
