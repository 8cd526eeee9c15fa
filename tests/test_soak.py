"""A decoder trained in two processes: killed while it saves and resumed, it ends where the uninterrupted run does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.launch import run

EVERY, PROCESSES, MEBIBYTE = 10, 2, 2**20


def soak(folder: Path, *arguments: int) -> tuple[str, list[list[dict[str, Any]]]]:
    """The output, and what each process recorded step by step in this folder, in this call and before."""
    output = run("tests.distributed.soak", folder, *arguments, timeout=600)
    files = [folder / f"rank{rank}.jsonl" for rank in range(PROCESSES)]
    return output, [[json.loads(line) for line in file.read_text().splitlines()] for file in files]


def curve(records: list[dict[str, Any]]) -> list[tuple[int, float, float]]:
    return [(record["step"], record["loss"], record["norm"]) for record in records]


@pytest.mark.parametrize("steps", [60, pytest.param(300, marks=pytest.mark.long)])
def test_killed_and_resumed(tmp_path: Path, steps: int) -> None:
    for name in ("whole", "killed"):
        (tmp_path / name).mkdir()
    output, whole = soak(tmp_path / "whole", steps, EVERY)
    assert output.endswith("exit status 0"), output[-6000:]
    for records in whole:
        assert [record["step"] for record in records] == list(range(steps))
        check_training(records)
        check_memory(records)

    killed = steps // 2 // EVERY * EVERY
    output, _ = soak(tmp_path / "killed", steps, EVERY, killed)
    assert "SIGKILL" in output, output[-6000:]
    names = {path.name for path in (tmp_path / "killed" / "checkpoints").iterdir()}
    assert f"step-{killed:09}" not in names
    assert {f".step-{killed:09}.partial", f"step-{killed - EVERY:09}"} <= names

    output, resumed = soak(tmp_path / "killed", steps, EVERY)
    assert output.endswith("exit status 0"), output[-6000:]
    for records, expected in zip(resumed, whole, strict=True):
        assert curve(records[:killed]) == curve(expected[:killed])
        assert curve(records[killed:]) == curve(expected[killed - EVERY :])


def check_training(records: list[dict[str, Any]]) -> None:
    """Many shapes, and a loss that falls."""
    assert len({tuple(record["shape"]) for record in records}) > 20
    losses = [record["loss"] for record in records]
    assert sum(losses[-10:]) < 0.9 * sum(losses[:10])


def check_memory(records: list[dict[str, Any]]) -> None:
    """After the first third, as many tensors as ever and at most a few mebibytes more."""
    measured = [record for record in records if "bytes" in record]
    later = measured[len(measured) // 3 :]
    assert len({record["tensors"] for record in later}) == 1
    assert max(record["bytes"] for record in later) - later[0]["bytes"] <= 8 * MEBIBYTE
