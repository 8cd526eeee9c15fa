"""Starts several processes that form a process group on this machine, for a limited time."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

ROOT = Path(__file__).parents[2]


def run(module: str, *arguments: object, timeout: float) -> str:
    """The output of ``python -m module arguments``, with its exit status. Nothing that it started outlives it."""
    environment = os.environ | {
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-m", module, *map(str, arguments)],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    late = ""
    try:
        output, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        late = f", stopped after {timeout} s"
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    return f"{output}\nexit status {process.returncode}{late}"


def once(root: Path, name: str, make: Callable[[Path], str]) -> Path:
    """A folder that ``make`` filled, once for all of pytest's workers; ``output`` holds what it returned."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        root = root.parent
    folder = root / name
    folder.mkdir(exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "output").exists():
            (folder / "output").write_text(make(folder))
    return folder


def fork(worker: Callable[..., None], world: int, folder: Path, *arguments: Any) -> None:
    """Call worker(rank, *arguments) in ``world`` forked processes of one gloo group; torch is imported only once."""
    store = folder / "store"
    store.unlink(missing_ok=True)
    mp.start_processes(member, (worker, world, store, *arguments), nprocs=world, start_method="fork")


def member(rank: int, worker: Callable[..., None], world: int, store: Path, *arguments: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=world, timeout=timedelta(seconds=180)
    )
    worker(rank, *arguments)
    dist.destroy_process_group()


def run_cases(rank: int, folder: Path, cases: dict[str, Callable[[], Any]]) -> None:
    """Write what each case returns to a file of this rank; after an error the group is of no more use."""
    results: dict[str, Any] = {}
    for name, case in cases.items():
        started = time.perf_counter()
        try:
            results[name] = case() | {"seconds": time.perf_counter() - started}
        except Exception:
            results[name] = {"failed": traceback.format_exc()}
        (folder / f"rank{rank}.json").write_text(json.dumps(results))
        if "failed" in results[name]:
            raise SystemExit(1)


class Results:
    """What every process wrote into a folder by :func:`run_cases`."""

    def __init__(self, folder: Path, world: int) -> None:
        files = [folder / f"rank{rank}.json" for rank in range(world)]
        self.ranks = [json.loads(file.read_text()) if file.exists() else {} for file in files]
        self.output = (folder / "output").read_text()

    def __getitem__(self, name: str) -> list[dict[str, Any]]:
        """A case's results, one for each process; an AssertionError with the reason where there are none."""
        found = [rank.get(name) for rank in self.ranks]
        for result in found:
            assert result is None or "failed" not in result, result["failed"]
        assert None not in found, f"{name} did not run to its end\n{self.output[-6000:]}"
        return found  # type: ignore[return-value]
