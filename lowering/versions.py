"""What differs between the versions of torch, and which of its private names the passes use."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.pattern_matcher import stable_topological_sort
from torch.fx import Graph, Node
from torch.utils.checkpoint import CheckpointPolicy

__all__ = [
    "MUST_SAVE",
    "CustomGraphPass",
    "combined",
    "graph_passes",
    "is_recomputed",
    "size_of",
    "stable_topological_sort",
    "symbol",
]

MUST_SAVE = CheckpointPolicy.MUST_SAVE
RECOMPUTED = (CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE)


def is_recomputed(node: Node) -> bool:
    """Whether activation checkpointing recomputes the node in the backward."""
    return node.meta.get("recompute") in RECOMPUTED


def graph_passes(given: Any) -> tuple[Callable[[Graph], Any], ...]:
    """A user's setting of ``joint_custom_pre_pass`` as a tuple; torch takes lists of passes from 2.13 on."""
    if given is None:
        return ()
    return tuple(given) if isinstance(given, (list, tuple)) else (given,)


def combined(key: str, before: tuple[Any, ...]) -> Any:
    """The uuid of a pass that runs a user's own passes first: None, which switches caching off, if one has none."""
    keys = [step.uuid() if isinstance(step, CustomGraphPass) else None for step in before]
    return None if None in keys else (key, *keys)


def symbol(size: Any) -> Any:
    """What two sizes are compared by: comparing symbolic sizes themselves would add a guard."""
    return size.node.expr if isinstance(size, (torch.SymInt, torch.SymFloat)) else size


def size_of(size: int | torch.SymInt, unknown: int = 4096) -> int:
    """The size that a symbolic size had when it was traced."""
    if isinstance(size, int):
        return size
    hint = size.node.hint if size.node.has_hint() else None
    return int(hint) if hint is not None else unknown
