"""The gate that needs no GPU: what the compilers make of us, against what was recorded.

    python -m perf.gate                       all of it; ends with 1 where a figure is worse
    python -m perf.gate kernels               one section: kernels, code or traffic
    python -m perf.gate --record "reason"     record what is found now, with the reason

Figures are exact for one version of torch and Triton. Recorded with others, they are not compared: it ends with 2.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import clock

Figures = dict[str, dict[str, int]]
BASELINE = Path(__file__).parent / "baseline"
SECTIONS = ("kernels", "code", "traffic")
EITHER_WAY = ("16-byte loads", "16-byte stores")  # fewer are narrower ones, more are rows that are read again
ALLOWED = {"source bytes": 0.01}  # names of other lengths


@dataclass(frozen=True)
class Change:
    """A figure that is not what was recorded; None where it is missing."""

    name: str
    figure: str
    old: int | None
    new: int | None

    @property
    def worse(self) -> bool:
        if self.old is None or self.new is None:
            return True
        return self.figure in EITHER_WAY or self.new > self.old

    def __str__(self) -> str:
        old, new = ("-" if value is None else f"{value:,}" for value in (self.old, self.new))
        return f"{'WORSE ' if self.worse else 'better'}  {self.name:<44}  {self.figure:<24} {old:>14} -> {new:>14}"


def changes(old: Figures, new: Figures) -> list[Change]:
    """Every figure that differs by more than is allowed; one that is only in one of both counts as worse."""
    found = []
    for name in sorted(old.keys() | new.keys()):
        before, after = old.get(name, {}), new.get(name, {})
        for figure in sorted(before.keys() | after.keys()):
            a, b = before.get(figure), after.get(figure)
            if a is None or b is None or abs(b - a) > ALLOWED.get(figure, 0) * a:
                found.append(Change(name, figure, a, b))
    return found


def judged(section: str, figures: Figures, folder: Path = BASELINE) -> int:
    """Print what changed in a section; 0 where nothing is worse, 1 where something is, 2 where nothing can be said."""
    path = folder / f"{section}.json"
    if not path.exists():
        print(f'{section}: no baseline in {path}; record one by: python -m perf.gate {section} --record "reason"')
        return 2
    recorded = json.loads(path.read_text())
    if recorded["versions"] != versions():
        print(f"{section}: recorded with {recorded['versions']}, here are {versions()}: nothing to compare")
        return 2
    found = changes(recorded["figures"], figures)
    for change in found:
        print(change)
    worse = sum(change.worse for change in found)
    print(f"{section}: {sum(map(len, figures.values()))} figures, {worse} worse, {len(found) - worse} better")
    if found:
        print(f'  where this is intended, record it: python -m perf.gate {section} --record "reason"')
    return int(worse > 0)


def record(section: str, figures: Figures, reason: str, folder: Path = BASELINE) -> None:
    """Write a section's figures with the reason, the day and the versions; earlier reasons are kept."""
    path = folder / f"{section}.json"
    history = json.loads(path.read_text())["history"] if path.exists() else []
    entry = {"reason": reason, "date": time.strftime("%Y-%m-%d", time.gmtime()), **versions()}
    content = {"versions": versions(), "history": [*history, entry], "figures": figures}
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n")
    print(f"{section}: {sum(map(len, figures.values()))} figures recorded in {path}")


def versions() -> dict[str, str | None]:
    """What the figures depend on beside our own code."""
    return {"torch": (clock.version_of("torch") or "").split("+")[0], "triton": clock.version_of("triton")}


def measured(sections: Iterable[str]) -> dict[str, Figures]:
    """The figures by section, found by as many processes as there are cores, the longest work first."""
    tasks = [(section, number) for section in sections for number in range(task_count(section))]
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(os.cpu_count() or 1, len(tasks)), context) as pool:
        parts = list(pool.map(task, tasks))
    found: dict[str, Figures] = {section: {} for section in sections}
    for (section, _), part in zip(tasks, parts, strict=True):
        found[section] |= part
    return found


def task_count(section: str) -> int:
    from . import static

    return len(static.SECTIONS[section])


def task(which: tuple[str, int]) -> Figures:
    """One part of a section, in a process of its own."""
    import torch

    from . import static

    torch.set_num_threads(1)
    section, number = which
    make: Callable[[], Figures] = static.SECTIONS[section][number]
    return make()


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m perf.gate", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument(
        "sections", nargs="*", metavar="SECTION", help=f"{', '.join(SECTIONS)}; all where none is named"
    )
    parser.add_argument("--record", metavar="REASON", help="record what is found now, and why it changed")
    options = parser.parse_args(arguments)
    if unknown := set(options.sections) - set(SECTIONS):
        parser.error(f"unknown section {', '.join(sorted(unknown))}; choose from {', '.join(SECTIONS)}")
    if options.record is not None and not options.record.strip():
        parser.error("--record needs a reason, which is kept in the baseline")
    start = time.perf_counter()
    found: dict[str, Any] = measured(options.sections or SECTIONS)
    status = 0
    for section, figures in found.items():
        if options.record is None:
            status = max(status, judged(section, figures))
        else:
            record(section, figures, options.record)
    print(f"{time.perf_counter() - start:.0f} s")
    return status


if __name__ == "__main__":
    sys.exit(main())
