"""Trains a small decoder, compiled, checkpointed and sharded, on batches of random shape, in two processes.

``python -m tests.distributed.soak FOLDER STEPS EVERY [KILLED]`` goes on from the newest checkpoint in FOLDER, saves
one at EVERY so many steps, and appends to ``rank*.jsonl``. At step KILLED the second process kills itself as it saves.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch._inductor.compile_fx  # before the processes fork, so that it is loaded once
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.fsdp import fully_shard

from mhar_compile import Decoder, DecoderConfig, compile_blocks, parameter_groups
from mhar_compile.checkpoints import load_checkpoint, save_checkpoint
from tests.distributed.launch import fork
from tests.distributed.matrix import loss_of

PROCESSES, SEED = 2, 17
VOCABULARY, LONGEST = 16, 24


def model_of() -> Decoder:
    torch.manual_seed(SEED)
    model = Decoder(DecoderConfig(VOCABULARY, 16, 2, 2, 1, 32, LONGEST, residual="mhar", routing_heads=2))
    for n, block in enumerate(model.blocks):
        model.blocks[n] = checkpoint_wrapper(block)
    compile_blocks(model, dynamic=True)
    # In float32: for bfloat16 on a CPU, oneDNN keeps code for every shape, and memory grows without any leak of ours.
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    return model


def batch(step: int, rank: int) -> Tensor:
    """Tokens [B, T] that count, of a shape that all processes share: a function of seed, step and rank alone."""
    shape = torch.Generator().manual_seed(SEED * 1_000_003 + step)
    size, length = (int(torch.randint(low, high, (), generator=shape)) for low, high in ((2, 6), (4, LONGEST + 1)))
    own = torch.Generator().manual_seed((SEED * 1_000_003 + step) * PROCESSES + rank)
    start, stride = torch.randint(VOCABULARY, (2, size, 1), generator=own)
    return (start + stride * torch.arange(length)) % VOCABULARY


def train(rank: int, folder: Path, steps: int, every: int, killed: int = 0) -> None:
    model = model_of()
    optimizer = torch.optim.AdamW(parameter_groups(model, lr=1e-2, weight_decay=0.1, routing_lr=3e-2))
    loaded = load_checkpoint(folder / "checkpoints", model, optimizer)
    first = 0 if loaded is None else loaded.step
    with (folder / f"rank{rank}.jsonl").open("a") as log:
        for step in range(first, steps):
            tokens = batch(step, rank)
            loss = loss_of(model(tokens)[:, :-1], tokens[:, 1:])
            loss.backward()
            norm: Any = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            dist.all_reduce(loss := loss.detach())
            saves = (step + 1) % every == 0
            found = record(step, tokens, loss.item(), norm.full_tensor().item()) | (memory() if saves else {})
            print(json.dumps(found), file=log, flush=True)
            if saves:
                with killing(rank == 1 and step + 1 == killed):
                    save_checkpoint(folder / "checkpoints", step + 1, model, optimizer, keep=2, seed=SEED)


def record(step: int, tokens: Tensor, loss: float, norm: float) -> dict[str, Any]:
    """What is compared between runs."""
    return {"step": step, "shape": list(tokens.shape), "loss": loss / PROCESSES, "norm": norm}


def memory() -> dict[str, int]:
    """What must not grow: resident memory, and the tensors that Python knows of."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    tensors = sum(issubclass(type(found), Tensor) for found in gc.get_objects())
    return {"bytes": pages * os.sysconf("SC_PAGE_SIZE"), "tensors": tensors}


def killing(now: bool) -> Any:
    """A context in which, if now, the process kills itself when its own file of a checkpoint is written."""

    def finish(*arguments: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    original = FileSystemWriter.write_data
    return mock.patch.object(FileSystemWriter, "write_data", (lambda *a: finish(original(*a))) if now else original)


if __name__ == "__main__":
    folder, *numbers = sys.argv[1:]
    fork(train, PROCESSES, Path(folder), Path(folder), *map(int, numbers))
