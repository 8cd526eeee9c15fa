"""The README's quickstart runs, and is as short as it says."""

from __future__ import annotations

import re
from pathlib import Path

import torch

README = (Path(__file__).parents[1] / "README.md").read_text()


def test_quickstart_runs():
    (code,) = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    names: dict[str, object] = {}
    exec(compile(code, "README.md", "exec"), names)
    assert names["mixed"].shape == (2, 16, 64)
    assert names["weights"].shape == (5, 2, 16, 8)
    assert names["logits"].shape == (2, 32, 256)
    assert torch.isfinite(names["logits"]).all()
    assert len(code.strip().splitlines()) <= 12


def test_every_make_target_it_names_exists():
    targets = set(re.findall(r"^([a-z-]+):", (Path(__file__).parents[1] / "Makefile").read_text(), flags=re.MULTILINE))
    named = set(re.findall(r"make ([a-z-]+)", README))
    assert named
    assert named <= targets
