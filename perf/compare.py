"""Compare two records of benchmarks: ``python -m perf.compare OLD NEW``, for your own CI against your own baseline.

OLD and NEW are JSON of pytest-benchmark (``--benchmark-json``) or of ``perf/results``. Compared is a benchmark's ratio
to its yardstick, timed in turns with it in the same run, where ``extra_info`` has one (``ratio``; and ``noise``, by
how much two equal yardsticks differed), and otherwise its median time. Slower is what exceeds

    old * (1 + tolerance + 2 (noise of old + noise of new), at most 1 + limit)

With ``--same-device`` records of two kinds of processors or cards are shown but not judged: ratios depend on it. With
``--record REASON`` OLD becomes what NEW is, and keeps the reason.

Ends with 0 where nothing is slower, 1 where something is slower or missing, 2 where the files cannot be compared.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

TOLERANCE = 0.10
LIMIT = 0.25  # however noisy, what is 30% slower is slower
TIMES = ("us", "ms", "seconds")


@dataclass(frozen=True)
class Result:
    """A benchmark's figure, less is better: a ratio to its yardstick or a time; and its noise, relative."""

    value: float
    noise: float = 0.0


@dataclass(frozen=True)
class Row:
    """A benchmark before and after, and by how much it may be slower."""

    name: str
    old: Result | None
    new: Result | None
    tolerance: float = TOLERANCE

    @property
    def allowed(self) -> float:
        noise = sum(result.noise for result in (self.old, self.new) if result is not None)
        return self.tolerance + max(min(2 * noise, LIMIT - self.tolerance), 0)

    @property
    def change(self) -> float:
        assert self.old is not None
        assert self.new is not None
        return self.new.value / self.old.value - 1

    @property
    def verdict(self) -> str:
        if self.old is None:
            return "new"
        if self.new is None:
            return "MISSING"
        if self.change > self.allowed:
            return "SLOWER"
        return "faster" if self.change < -self.allowed else "same"

    def __str__(self) -> str:
        old, new = ("-" if result is None else f"{result.value:.4g}" for result in (self.old, self.new))
        change = "" if self.old is None or self.new is None else f"{self.change:+.1%}"
        return f"{self.verdict:<8} {self.name:<64} {old:>10} {new:>10} {change:>8} {self.allowed:>8.0%}"


def read(path: Path) -> dict[str, Result]:
    """The benchmarks of a file, by name.

    Raises:
        ValueError: the file is not JSON of a known form, or holds no benchmark.
    """
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: {error}; expected JSON of pytest-benchmark or of perf/results") from None
    results = from_pytest(content) if "benchmarks" in content else from_sections(content.get("sections", {}))
    if not results:
        raise ValueError(f"{path} holds no benchmark; expected 'benchmarks' or 'sections' with rows that have a time")
    return results


def from_pytest(content: dict[str, Any]) -> dict[str, Result]:
    """Results of pytest-benchmark."""
    found = {}
    for benchmark in content["benchmarks"]:
        info = benchmark.get("extra_info", {})
        value = info.get("ratio", benchmark["stats"]["median"])
        found[benchmark["name"]] = Result(float(value), float(info.get("noise", 0)))
    return found


def from_sections(sections: dict[str, Any]) -> dict[str, Result]:
    """Results of perf/gpu.py and perf/sweep.py: each row that has a time."""
    found = {}
    for name, section in sections.items():
        for row in section["rows"]:
            duration = next((row[key] for key in TIMES if key in row), None)
            value = row.get("ratio", duration) if duration is not None else None
            if value is not None:
                words = [
                    name,
                    *(f"{v}" for k, v in row.items() if isinstance(v, str | int) and k not in ("bytes", *TIMES)),
                ]
                found[", ".join(words)] = Result(float(value), float(row.get("noise", 0)))
    return found


def device(path: Path) -> str | None:
    """Where a file's benchmarks ran: the card, or the kind of processor."""
    content = json.loads(path.read_text())
    origin = content.get("origin") or content.get("machine_info", {}).get("origin", {})
    return origin.get("device") if origin.get("driver") else origin.get("cpu")


def recorded(old: Path, new: Path, reason: str) -> int:
    """Make the benchmarks of NEW those of OLD, without what changes from run to run; the reasons so far are kept."""
    if not reason.strip():
        print("--record needs a reason, which is kept in the file")
        return 2
    try:
        read(new)
    except ValueError as error:
        print(error)
        return 2
    content = json.loads(new.read_text())
    history = json.loads(old.read_text()).get("history", []) if old.exists() else []
    entry = {"reason": reason, "date": time.strftime("%Y-%m-%d", time.gmtime())}
    kept = {key: content[key] for key in ("origin", "sections") if key in content}
    if "benchmarks" in content:
        kept = {"machine_info": {"origin": content.get("machine_info", {}).get("origin", {})}}
        kept["benchmarks"] = [
            {"name": b["name"], "stats": {"median": b["stats"]["median"]}, "extra_info": b.get("extra_info", {})}
            for b in content["benchmarks"]
        ]
    old.parent.mkdir(parents=True, exist_ok=True)
    old.write_text(json.dumps({"history": [*history, entry], **kept}, indent=1) + "\n")
    print(f"{len(read(old))} benchmarks recorded in {old}")
    return 0


def compared(old: dict[str, Result], new: dict[str, Result], tolerances: dict[str, float]) -> list[Row]:
    """A row for each benchmark of either; ``tolerances`` by pattern of its name, the last that fits counts."""

    def tolerance(name: str) -> float:
        return next((value for key, value in reversed(tolerances.items()) if fnmatchcase(name, key)), TOLERANCE)

    return [Row(name, old.get(name), new.get(name), tolerance(name)) for name in sorted(old.keys() | new.keys())]


def fraction(text: str) -> float:
    """15% or 0.15 as 0.15."""
    return float(text[:-1]) / 100 if text.endswith("%") else float(text)


def parsed_tolerances(texts: list[str]) -> dict[str, float]:
    """'15%' for all, 'pattern=15%' for some."""
    found = {}
    for text in texts:
        pattern, _, value = text.rpartition("=")
        try:
            found[pattern or "*"] = fraction(value)
        except ValueError:
            raise ValueError(f"tolerance {text!r}: expected 15%, 0.15 or PATTERN=15%") from None
    return found


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m perf.compare", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument(
        "--tolerance", action="append", default=[], metavar="[PATTERN=]15%%", help="may be slower by; 10%% by default"
    )
    parser.add_argument("--same-device", action="store_true", help="judge only what ran on the same kind of device")
    parser.add_argument("--record", metavar="REASON", help="make OLD what NEW is, with the reason")
    options = parser.parse_args(arguments)
    if options.record is not None:
        return recorded(options.old, options.new, options.record)
    try:
        rows = compared(read(options.old), read(options.new), parsed_tolerances(options.tolerance))
    except ValueError as error:
        print(error)
        return 2
    print(f"{'':<8} {'benchmark':<64} {'old':>10} {'new':>10} {'change':>8} {'allowed':>8}")
    print(*rows, sep="\n")
    devices = device(options.old), device(options.new)
    if options.same_device and devices[0] != devices[1]:
        print(f"not judged: {devices[0]} and {devices[1]} are not the same; record a baseline of your own by --record")
        return 0
    return int(any(row.verdict in ("SLOWER", "MISSING") for row in rows))


if __name__ == "__main__":
    sys.exit(main())
