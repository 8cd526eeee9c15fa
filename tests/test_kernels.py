"""The Triton kernels without a GPU: the tests of tests/interpreted_*.py, in processes with the interpreter on.

Each test has a process of its own, but for those that a module imports: they are short, and share one.
"""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def names():
    """The tests of the inner modules, with their marks, read without importing them: that needs the interpreter."""
    yield "interpreted_properties.py"
    for path in sorted((ROOT / "tests").glob("interpreted_*.py")):
        for node in ast.parse(path.read_text()).body:
            targets = [node.name] if isinstance(node, ast.FunctionDef) else []
            if isinstance(node, ast.Assign):
                targets = [target.id for target in node.targets if isinstance(target, ast.Name)]
            marks = [pytest.mark.long for mark in getattr(node, "decorator_list", ()) if "long" in ast.unparse(mark)]
            tests = [f"{path.name}::{name}" for name in targets if name.startswith("test_")]
            yield from (pytest.param(name, marks=marks, id=name) for name in tests)


@pytest.mark.parametrize("name", list(names()))
def test_interpreted(name):
    pytest.importorskip("triton", reason="the kernels are written in Triton")
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)}
    environment.pop("PYTEST_XDIST_WORKER", None)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", "-p", "no:cacheprovider", f"tests/{name}"]
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout[-6000:] + result.stderr[-2000:]
