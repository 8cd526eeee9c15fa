"""How benchmarks are timed: steps take turns, the least time of each counts, and two equal steps tell the noise.

On the CPU it is processor time on one thread: whoever else is at work only ever adds to it, and freed memory stays the
process's own. On a GPU it is the time between two events, the L2 cache overwritten before each.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from typing import Any

import torch

from . import clock

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
QUIET = 0.02  # noise at which measuring ends
BATCHES = 4

MMAP_MAX, TRIM_THRESHOLD = -4, -1  # of glibc's malloc.h

Step = Callable[[], Any]


def keep_freed_memory() -> None:
    """Have glibc hand freed memory out again, which it else may return to the system after every step.

    A site's tensors then cost page faults in some processes and not in others: ratios of 0.6 and of 1.2 were measured.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(MMAP_MAX, 0)
        mallopt(TRIM_THRESHOLD, 2**31 - 1)


def seconds(step: Step, device: str = DEVICE) -> float:
    """The time of one call."""
    if device != "cpu":
        return clock.microseconds(step, device, repeats=1, warmup=0) * 1e-6
    start = time.process_time()
    step()
    return time.process_time() - start


def least_seconds(steps: dict[str, Step], rounds: int = 12, device: str = DEVICE) -> dict[str, float]:
    """The least time of each of the steps, which take turns; ``yardstick`` and ``again`` are equal ones.

    Where these two differ by more than QUIET there are more rounds, BATCHES times as many at most.
    """
    least = dict.fromkeys(steps, float("inf"))
    for _ in range(BATCHES):
        for _ in range(rounds):
            for name, step in steps.items():
                step()  # the memory and the caches that it finds are then its own, not those of the step before
                least[name] = min(least[name], seconds(step, device))
        if noise(least) <= QUIET:
            break
    return least


def noise(least: dict[str, float]) -> float:
    """By how much two equal steps differ."""
    a, b = sorted((least["yardstick"], least["again"]))
    return b / a - 1


def ratio(least: dict[str, float], own: str, other: str = "yardstick") -> float:
    """The time of a step over that of another; of the yardstick both copies count."""
    yardstick = min(least["yardstick"], least["again"]) if other == "yardstick" else least[other]
    return least[own] / yardstick


def information() -> dict[str, Any]:
    """What a time depends on, for ``extra_info``."""
    return {**clock.origin(DEVICE), "cpu": cpu(), "threads": torch.get_num_threads()}


def cpu() -> str:
    """The processor's model."""
    try:
        with open("/proc/cpuinfo") as file:
            return next(line.split(":")[1].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        return "unknown"
