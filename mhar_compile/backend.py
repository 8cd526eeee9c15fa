"""The compiler backend ``mhar``: Inductor with the passes of ``lowering``, and ``explain``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from . import ops
from .lowering.passes import JointPass
from .lowering.planning import Settings
from .lowering.report import Report

HOOK = "joint_custom_pre_pass"


def inductor_options(options: dict[str, Any] | None = None, **settings: Any) -> dict[str, Any]:
    """Inductor's options with our passes, for ``torch.compile(model, options=...)``.

    Args:
        options: your own options. Your ``joint_custom_pre_pass``, here or in ``torch._inductor.config``, runs before ours.
        settings: overrides of the passes' own decisions:
            rewrite: "auto" (where the model predicts a gain), "always" or "never".
            window: sites that one chain of gradients takes in at once.
            tile: sources and sites that share a read; 1 switches tiling off.

    Raises:
        TypeError: an unknown setting.
        ValueError: a setting out of its range.
    """
    options = dict(options or {})
    mine = options.get(HOOK, getattr(torch._inductor.config, HOOK))
    if not isinstance(mine, JointPass):
        options[HOOK] = JointPass(Settings(**settings), sources=Path(ops.__file__).parent.glob("*.py"), before=mine)
    return options


def backend(
    model: torch.fx.GraphModule,
    inputs: list[torch.Tensor],
    *,
    mode: str | None = None,
    options: dict[str, Any] | None = None,
) -> Callable[..., Any]:
    """Compile a graph as Inductor does, with our passes: ``torch.compile(model, backend="mhar")``.

    ``mode`` and ``options`` are those of ``torch.compile`` and mean what they mean for Inductor.
    """
    dynamic = any(isinstance(value, torch.SymInt) for value in inputs)
    inductor = torch._TorchCompileInductorWrapper(mode, inductor_options(options), dynamic)
    compiled: Callable[..., Any] = inductor(model, inputs)
    return compiled
