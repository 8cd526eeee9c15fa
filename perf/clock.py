"""Timing on a GPU, the card's own copy bandwidth, and what a result must say about where it came from."""

from __future__ import annotations

import json
import platform
import statistics
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

LEAD = 4_000_000  # clock cycles, 2 ms, by which the host's launches run ahead: the GPU's time is what is wanted
Row = dict[str, Any]
FLUSH = 256 * 2**20  # bytes written between two repetitions; the L2 cache of an H200 has 50 MiB


@dataclass(frozen=True)
class Setup:
    """Where to run, how much, and how often."""

    device: str = "cuda"
    tiny: bool = False
    repeats: int = 20

    def size(self, full: int, tiny: int) -> int:
        return tiny if self.tiny else full

    def time(self, function: Callable[[], Any]) -> float:
        return microseconds(function, self.device, self.repeats, warmup=1 if self.tiny else 3)


def microseconds(function: Callable[[], Any], device: str, repeats: int = 20, warmup: int = 3) -> float:
    """Median time of one call with cold caches: CUDA events on a GPU, the wall clock elsewhere.

    Where the host needs more than LEAD to launch a call, as for a whole chain, the host's time is in it too.
    """
    for _ in range(warmup):
        function()
    if device == "cpu":
        times = []
        for _ in range(repeats):
            start = time.perf_counter()
            function()
            times.append((time.perf_counter() - start) * 1e6)
        return statistics.median(times)
    flush = torch.empty(FLUSH, dtype=torch.uint8, device=device)
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
    for start, end in events:
        torch.cuda._sleep(LEAD)
        flush.zero_()
        start.record()
        function()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) * 1e3 for start, end in events)


def copy_bandwidth(device: str, size: int = 2**30) -> float:
    """Bytes read and written a second by a device-to-device copy of `size` bytes."""
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * size / (microseconds(lambda: target.copy_(source), device) * 1e-6)


def origin(device: str) -> dict[str, Any]:
    """Card, driver, versions and commit."""
    cuda = device != "cpu"
    return {
        "device": torch.cuda.get_device_name() if cuda else platform.processor() or platform.machine(),
        "driver": shell("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader") if cuda else None,
        "torch": torch.__version__,
        "triton": version_of("triton"),
        "python": platform.python_version(),
        "commit": shell("git", "rev-parse", "HEAD"),
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def version_of(package: str) -> str | None:
    """The version of an installed package, None where it is missing."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(package)
    except PackageNotFoundError:
        return None


def shell(*command: str) -> str | None:
    """The first line that a command prints, None where it fails."""
    try:
        result = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return None
    return result.stdout.strip().splitlines()[0] if result.stdout.strip() else None


def write(folder: Path, name: str, results: dict[str, Any]) -> Path:
    """Write results as JSON, rewriting the file of an earlier section of the same run."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    path.write_text(json.dumps(results, indent=1) + "\n")
    return path
