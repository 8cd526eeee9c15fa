"""Importing: cheap, from every kind of installation, and only under the package's own name."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = {"mhar_compile": "mhar_compile", "ops": "mhar_compile.ops", "lowering": "mhar_compile.lowering"}


def python(code: str, cwd: Path = ROOT, *flags: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *flags, "-c", code], cwd=cwd, capture_output=True, text=True, timeout=120)


def test_import_is_cold():
    """Nothing of Dynamo, Inductor or triton is loaded beyond what `import torch` loads by itself."""
    result = python(
        "import sys, torch; before = set(sys.modules)\n"
        "import mhar_compile\n"
        "new = set(sys.modules) - before\n"
        "print(sorted(m for m in new if m.startswith(('triton', 'torch._dynamo', 'torch._inductor'))))"
    )
    assert result.stdout.strip() == "[]", result.stdout + result.stderr


def test_operators_exist_without_triton():
    result = python(
        "import sys; sys.modules['triton'] = None\n"
        "import torch, mhar_compile\n"
        "print(mhar_compile.route([torch.ones(2, 4)] * 2, torch.zeros(2, 2)).sum().item())"
    )
    assert result.stdout.strip() == "8.0", result.stderr


def test_bare_checkout_without_site_packages_of_ours(tmp_path):
    code = (
        f"import sys; sys.path.insert(0, {str(ROOT)!r})\nimport mhar_compile.ops, mhar_compile.lowering\nprint('fine')"
    )
    assert python(code, tmp_path).stdout.strip() == "fine"


@pytest.mark.parametrize("folder", ["ops", "lowering"])
def test_a_second_copy_is_refused(folder):
    result = python(f"import {folder}")
    assert result.returncode != 0
    assert f"this folder is the package mhar_compile.{folder}, but it was imported as '{folder}'" in result.stderr


def test_every_package_is_declared():
    tomllib = pytest.importorskip("tomllib", reason="tomllib is in the standard library from Python 3.11")
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    found = {}
    for folder, package in FOLDERS.items():
        for init in (ROOT / folder).rglob("__init__.py"):
            parts = init.parent.relative_to(ROOT / folder).parts
            found[".".join((package, *parts))] = "/".join((folder, *parts))
    assert set(settings["packages"]) == set(found)
    assert settings["package-dir"] == found
