"""Compiled decoders under DistributedDataParallel, and ``dtensor``: ``python -m tests.distributed.ddp FOLDER``."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch._inductor.compile_fx  # before the processes fork, so that it is loaded once
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import mhar_compile
from mhar_compile.compiler import joint_pass
from mhar_compile.lowering.tracing import Trace, tracer
from tests.distributed import dtensor
from tests.distributed.launch import fork, run_cases
from tests.distributed.matrix import batch, decoder, error, loss_of, single, step

BUCKET = 0.02  # megabytes: several buckets even for a decoder as small as this
dist._DEFAULT_FIRST_BUCKET_BYTES = int(BUCKET * 2**20)


def compared(residual: str, layers: int, compiler: str | None, bucketed: bool) -> dict[str, Any]:
    """Errors against float64, in parallel and in one process; what the passes saw."""
    torch._dynamo.reset()
    found, parts = Trace(), batch(dist.get_world_size())
    passes = tracer(found, joint_pass(reports=found.reports.append, rewrite="always"))
    model: Any = DistributedDataParallel(decoder(residual, layers), bucket_cap_mb=BUCKET)
    function = model
    if compiler is not None:
        function = torch.compile(model, backend=passes if compiler == "passes" else mhar_compile.backend)
    tokens = parts[dist.get_rank()]
    with torch._dynamo.config.patch(optimize_ddp=bucketed):
        loss = loss_of(function(tokens), tokens)
        loss.backward()
    mean = loss.detach().clone()
    dist.all_reduce(mean)
    values = [mean / dist.get_world_size(), *step(model.module)]
    truth = single(decoder(residual, layers).double(), parts, torch.float64)
    return {
        "error": error(values, truth),
        "single": error(single(decoder(residual, layers), parts, torch.float32), truth),
        "graphs": found.report.graphs,
        "sites": found.report.sites,
        "scored": found.report.scored,
    }


def explained() -> dict[str, Any]:
    """What ``explain`` says of a model under DDP."""
    report = mhar_compile.explain(DistributedDataParallel(decoder("mhar", 2), bucket_cap_mb=BUCKET), batch(1)[0])
    return {"graphs": report.graphs, "sites": report.sites, "text": str(report)}


CASES: dict[str, Callable[[], dict[str, Any]]] = {
    "eager": functools.partial(compared, "mhar", 3, None, True),
    "whole": functools.partial(compared, "mhar", 3, "passes", False),
    "bucketed": functools.partial(compared, "mhar", 3, "passes", True),
    "bucketed delta": functools.partial(compared, "delta", 2, "passes", True),
    "bucketed with code": functools.partial(compared, "mhar", 1, "inductor", True),
    "explain": explained,
}


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    fork(run_cases, 2, folder, folder, CASES | dtensor.CASES)
