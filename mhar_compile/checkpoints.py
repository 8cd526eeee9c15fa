"""``save_checkpoint`` and ``load_checkpoint``: training state on disk, of one process or many, never half written.

A checkpoint is a folder ``step-000000042`` in torch.distributed.checkpoint's format, with a ``checkpoint.json`` that
says what belongs to it. It is written under another name, synchronised to the disk and then renamed, so whatever has
its name is whole. Parameters are stored under the plain model's names: a run may go on in another number of processes,
or sharded, checkpointed or compiled differently.
"""

from __future__ import annotations

import json
import os
import shutil
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

DESCRIPTION = "checkpoint.json"
T = TypeVar("T")


class Loaded(NamedTuple):
    """What was loaded: the step, what was saved beside model and optimizer, and the folder it came from."""

    step: int
    extra: dict[str, Any]
    path: Path


def save_checkpoint(
    folder: str | os.PathLike[str],
    step: int,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    *,
    keep: int = 3,
    **extra: Any,
) -> Path:
    """Save model and optimizer as ``folder/step-...``; where a process group exists, every process calls this.

    Killed at any moment, it leaves the earlier checkpoints as they were.

    Args:
        folder: for the checkpoints of one run; all processes must see the same folder.
        step: of the training, >= 0; each is saved once.
        model: plain, or sharded by ``fully_shard``, wrapped by DDP, compiled, checkpointed.
        optimizer: of the model's parameters; None saves the weights alone.
        keep: how many checkpoints to keep, >= 1; older ones are deleted after the new one is in place.
        extra: anything that JSON can hold, as the first process has it (a schedule's state, a seed).

    Returns:
        The checkpoint's folder.

    Raises:
        TypeError: step or keep is not an int, or extra is not made of what JSON holds.
        ValueError: step or keep is out of its range, or there is a whole checkpoint of this step already.
        RuntimeError: a process could not write its part.
    """
    for name, number, least in (("step", step, 0), ("keep", keep, 1)):
        if not isinstance(number, int) or isinstance(number, bool):
            raise TypeError(f"save_checkpoint: {name} must be an int, got {type(number).__name__}")
        if number < least:
            raise ValueError(f"save_checkpoint: {name} is {number}, expected at least {least}")
    check_json(extra)
    root = Path(folder)
    final = root / f"step-{step:09}"
    partial = root / f".{final.name}.partial"
    check_optimizer(model, optimizer)
    state = state_of(model, optimizer)
    description = {"step": step, "extra": extra, "parameters": shapes_of(state["model"])}
    on_first_process(lambda: prepare(final, partial))
    carry_out("write", partial, lambda: state_dict_saver.save(state, checkpoint_id=partial))
    on_first_process(lambda: publish(partial, final, description, keep))
    return final


def load_checkpoint(
    folder: str | os.PathLike[str], model: nn.Module, optimizer: torch.optim.Optimizer | None
) -> Loaded | None:
    """Load the newest whole checkpoint of a folder into model and optimizer; every process calls this.

    A checkpoint whose files are missing or cut short is passed over with a warning. Parts of it are Python pickles:
    load only what you trust.

    Args:
        folder: as given to :func:`save_checkpoint`.
        model: like the saved one in parameters and buffers; the sharding, the number of processes and the compiler may
            differ.
        optimizer: like the saved one; None loads the weights alone.

    Returns:
        Step, extra and path; None where the folder has no checkpoint yet, and nothing was changed.

    Raises:
        ValueError: there are checkpoints but none is whole, or the model's parameters are not the saved ones.
        RuntimeError: a process could not read its part, or nothing was saved for the optimizer.
    """
    found = on_first_process(lambda: newest(Path(folder)))
    if found is None:
        return None
    path, description = found
    check_optimizer(model, optimizer)
    state = state_of(model, optimizer)
    check_parameters(path, description["parameters"], shapes_of(state["model"]))
    carry_out("read", path, lambda: state_dict_loader.load(state, checkpoint_id=path))
    set_model_state_dict(model, state["model"])
    if optimizer is not None:
        set_optimizer_state_dict(model, optimizer, state["optimizer"])
    return Loaded(description["step"], description["extra"], path)


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[str, Any]:
    """The state to save, or to load into, by the plain model's names."""
    state: dict[str, Any] = {"model": get_model_state_dict(model)}
    if optimizer is not None:
        state["optimizer"] = get_optimizer_state_dict(model, optimizer)
    return state


def check_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
    """Raise unless an optimizer's parameters are the model's."""
    own = {id(parameter) for parameter in model.parameters()}
    groups = [] if optimizer is None else optimizer.param_groups
    strangers = sum(id(parameter) not in own for group in groups for parameter in group["params"])
    if strangers:
        raise ValueError(
            f"{strangers} of the optimizer's parameters are not the model's; build the optimizer from "
            "model.parameters(), after fully_shard, which replaces them"
        )


def shapes_of(state: Mapping[str, Any]) -> dict[str, list[int]]:
    return {name: list(value.shape) for name, value in state.items() if isinstance(value, torch.Tensor)}


def check_json(extra: dict[str, Any]) -> None:
    """Raise unless extra comes back from JSON as it was."""
    for name, value in extra.items():
        try:
            same = json.loads(json.dumps(value)) == value
        except (TypeError, ValueError):
            same = False
        if not same:
            raise TypeError(
                f"save_checkpoint: {name} is {value!r}, expected numbers, strings, None, lists of them or dicts with "
                "string keys, which JSON holds; tensors belong into the model or the optimizer"
            )


def check_parameters(path: Path, saved: dict[str, list[int]], given: dict[str, list[int]]) -> None:
    """Raise unless a model's names and shapes are those of a checkpoint."""
    for name in sorted(saved.keys() | given.keys()):
        if saved.get(name) != given.get(name):
            here, there = (f"has shape {s[name]}" if name in s else "does not exist" for s in (given, saved))
            raise ValueError(
                f"load_checkpoint: {name} {here} in the model and {there} in {path}; build the model as it was saved"
            )


def prepare(final: Path, partial: Path) -> None:
    """An empty folder to write into, in place of what interrupted savings left."""
    if final.exists():
        if (fault := fault_of(final)) is None:
            raise ValueError(f"save_checkpoint: {final} exists already; save each step once, or choose another folder")
        warnings.warn(f"save_checkpoint: {final} is replaced, since {fault}", stacklevel=3)
        shutil.rmtree(final)
    for old in final.parent.glob(".step-*.partial"):
        shutil.rmtree(old)
    partial.mkdir(parents=True)


def publish(partial: Path, final: Path, description: dict[str, Any], keep: int) -> None:
    """Describe what was written, give it its name, and delete the checkpoints beyond the newest ``keep``."""
    description = description | {"files": {file.name: file.stat().st_size for file in partial.iterdir()}}
    with (partial / DESCRIPTION).open("w") as file:
        json.dump(description, file)
        file.flush()
        os.fsync(file.fileno())
    sync(partial)
    partial.rename(final)
    sync(final.parent)
    for old in checkpoints(final.parent)[keep:]:
        shutil.rmtree(old)


def sync(folder: Path) -> None:
    """Wait until the names in a folder are on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def checkpoints(folder: Path) -> list[Path]:
    """The checkpoints of a folder, the newest first."""
    return sorted((path for path in folder.glob("step-*") if path.name[5:].isdigit()), reverse=True)


def newest(folder: Path) -> tuple[Path, dict[str, Any]] | None:
    """The newest whole checkpoint and its description; raise where there are only damaged ones."""
    faults = []
    for path in checkpoints(folder):
        if (fault := fault_of(path)) is None:
            return path, json.loads((path / DESCRIPTION).read_text())
        warnings.warn(f"load_checkpoint: {path} is passed over, since {fault}", stacklevel=4)
        faults.append(f"{path.name}: {fault}")
    if faults:
        raise ValueError(
            f"load_checkpoint: no checkpoint in {folder} is whole ({'; '.join(faults)}); restore one from a copy, or "
            "start anew in another folder"
        )
    return None


def fault_of(path: Path) -> str | None:
    """What is missing from a checkpoint, if anything is."""
    try:
        files = json.loads((path / DESCRIPTION).read_text())["files"]
    except FileNotFoundError:
        return f"it has no {DESCRIPTION}"
    except (ValueError, KeyError, TypeError):
        return f"its {DESCRIPTION} is cut short"
    for name, size in files.items():
        file = path / name
        if not file.is_file():
            return f"its file {name} is missing"
        if file.stat().st_size != size:
            return f"its file {name} has {file.stat().st_size} bytes, expected {size}"
    return None


def carry_out(what: str, path: Path, function: Callable[[], object]) -> None:
    """Call torch.distributed.checkpoint, whose exception is none that ``except Exception`` would catch."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized")
        try:
            function()
        except CheckpointException as error:
            reasons = "; ".join(f"process {rank}: {cause}" for rank, (cause, _) in error.failures.items())
            raise RuntimeError(f"could not {what} the checkpoint {path}: {reasons}") from error


def on_first_process(function: Callable[[], T]) -> T:
    """Call a function on process 0 alone; what it returns or raises, every process gets."""
    if not (dist.is_available() and dist.is_initialized()):
        return function()
    outcome: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            outcome[0] = function()
        except Exception as error:
            outcome[1] = error
    dist.broadcast_object_list(outcome)
    if outcome[1] is not None:
        raise outcome[1]
    value: T = outcome[0]
    return value
