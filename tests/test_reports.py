"""The list of public reports in tests/README.md: every number once, every test it names is there."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

HERE = Path(__file__).parent


def test_every_report_stands_once_with_a_test_that_exists_or_a_reason():
    rows = re.findall(r"^\| ((?:\S+ )?\d+) \| (.+) \| (.+) \|$", (HERE / "README.md").read_text(), re.MULTILINE)
    assert len(rows) == (HERE / "README.md").read_text().count("\n| ") - 1  # all but the head
    assert max(Counter(number for number, _, _ in rows).values()) == 1
    tests = {name for file in HERE.glob("test_*.py") for name in re.findall(r"def (test_\w+)", file.read_text())}
    for number, _, answer in rows:
        named = set(re.findall(r"`(test_\w+)`", answer))
        assert named or answer.startswith("none: "), number
        assert named <= tests, number
