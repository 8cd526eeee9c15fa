"""What differs between the versions of torch, and which of its private names the passes use."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch._inductor.config as inductor
from torch._inductor import custom_graph_pass
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.pattern_matcher import stable_topological_sort
from torch.fx import Graph, Node
from torch.utils.checkpoint import CheckpointPolicy

__all__ = [
    "LAUNCH_ATTRIBUTES",
    "MUST_SAVE",
    "CustomGraphPass",
    "InferenceAwarePass",
    "combined",
    "graph_passes",
    "is_recomputed",
    "reorders_graphs",
    "size_of",
    "stable_topological_sort",
    "symbol",
    "takes_inference",
]

# From 2.13 on a pass may be told whether its graph is one of inference; before that nothing is.
InferenceAwarePass: Any = getattr(custom_graph_pass, "CustomInferenceAwareGraphPass", CustomGraphPass)
# What Inductor reads of a launch's node from 2.14 on: arguments that are options of the compiler.
LAUNCH_ATTRIBUTES: dict[str, Any] = {"launch_kwargs": ()}
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


def takes_inference(step: Any) -> bool:
    """Whether a user's pass is called with ``is_inference``."""
    return InferenceAwarePass is not CustomGraphPass and isinstance(step, InferenceAwarePass)


def reorders_graphs() -> bool:
    """Whether an option, off by default, lets Inductor move collectives, and all else with them, in its graphs."""
    buckets = ("bucket_all_gathers_fx", "bucket_reduce_scatters_fx", "bucket_all_reduces_fx")
    overlap = getattr(getattr(inductor, "aten_distributed_optimizations", None), "enable_overlap_scheduling", False)
    return bool(overlap) or any(getattr(inductor, name, "none") != "none" for name in buckets)


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
