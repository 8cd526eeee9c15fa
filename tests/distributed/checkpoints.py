"""Saves and loads in two processes: ``python -m tests.distributed.checkpoints FOLDER``."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch._dynamo  # before the processes fork, so that it is loaded once
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from mhar_compile import checkpoints, compile_blocks
from mhar_compile.checkpoints import load_checkpoint, save_checkpoint
from tests.distributed.launch import fork, run_cases
from tests.distributed.matrix import batch, decoder, loss_of, whole


def built(kind: str) -> nn.Module:
    model = decoder("delta", 1)
    if kind == "ddp":
        return DistributedDataParallel(model)
    for n, block in enumerate(model.blocks):
        model.blocks[n] = checkpoint_wrapper(block)
    compile_blocks(model, backend="eager")
    for block in model.blocks:
        fully_shard(block)
    return fully_shard(model)


def plain(model: nn.Module) -> dict[str, Any]:
    """The whole state under the plain model's names."""
    prefixes = ("module.", "_checkpoint_wrapped_module.")
    state = {name: whole(value.detach()).clone() for name, value in model.state_dict().items()}
    return {functools.reduce(lambda n, prefix: n.replace(prefix, ""), prefixes, name): t for name, t in state.items()}


def round_trip(folder: Path, kind: str) -> dict[str, Any]:
    """Go on from a checkpoint of one process, train a step, save, spoil the model, and load it again."""
    rank, model = dist.get_rank(), built(kind)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    found = load_checkpoint(folder / "single", model, optimizer)
    assert found is not None
    tokens = batch(2)[rank]
    loss_of(model(tokens), tokens).backward()
    optimizer.step()
    save_checkpoint(folder / kind, 4, model, optimizer, rank=rank)
    expected = plain(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    load_checkpoint(folder / kind, model, optimizer)
    same = all(torch.equal(value, expected[name]) for name, value in plain(model).items())
    if rank == 0:
        torch.save(expected, folder / f"{kind}.pt")
    return {
        "loaded": [found.step, found.extra],
        "same": same,
        "folder": str(folder / kind),
        "whole": str(folder / f"{kind}.pt"),
    }


def failing(folder: Path, where: str) -> dict[str, Any]:
    """One process fails, in writing its part or in naming the whole; the others must not wait for it."""

    def full(*_: Any) -> None:
        raise OSError("no space left")

    model, folder = built("fully sharded"), folder / where
    save_checkpoint(folder, 3, model, None)
    rank, target = {"disk full": (1, (FileSystemWriter, "write_data")), "no name": (0, (checkpoints, "sync"))}[where]
    raised: BaseException | None = None
    with mock.patch.object(*target, full if dist.get_rank() == rank else getattr(*target)):
        try:
            save_checkpoint(folder, 4, model, None)
        except Exception as error:
            raised = error
    loaded = load_checkpoint(folder, model, None)
    assert loaded is not None
    return {"raised": type(raised).__name__, "text": str(raised), "newest": loaded.step}


def main(folder: Path) -> None:
    cases: dict[str, Callable[[], dict[str, Any]]] = {
        **{kind: functools.partial(round_trip, folder, kind) for kind in ("fully sharded", "ddp")},
        **{where: functools.partial(failing, folder, where) for where in ("disk full", "no name")},
    }
    fork(run_cases, 2, folder, folder, cases)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
