"""The compiler backend ``mhar``: Inductor with the passes of ``lowering``, and ``explain``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from . import ops
from .lowering.passes import JointPass, LoweringPass
from .lowering.planning import Settings
from .lowering.report import Report
from .ops import eager_steps

HOOK = "joint_custom_pre_pass"
LOWERING = "post_grad_custom_pre_pass"
EXPANSIONS: dict[Any, Callable[..., Any]] = {
    torch.ops.mhar.fold.default: eager_steps.fold,
    torch.ops.mhar.part.default: eager_steps.part,
    torch.ops.mhar.coupling.default: eager_steps.coupling,
}


def joint_pass(before: Any = None, reports: Callable[[Report], None] | None = None, **settings: Any) -> JointPass:
    """The passes, with this package's operators in their cache key."""
    sources = [Path(__file__), *Path(ops.__file__).parent.glob("*.py")]
    return JointPass(Settings(**settings), sources=sources, before=before, reports=reports)


def inductor_options(options: dict[str, Any] | None = None, **settings: Any) -> dict[str, Any]:
    """Inductor's options with our passes, for ``torch.compile(model, options=...)``.

    Args:
        options: your own. Your ``joint_custom_pre_pass``, here or in ``torch._inductor.config``, runs before ours.
        settings: overrides of the passes' own decisions:
            rewrite: "auto" (where the model predicts a gain), "always" or "never".
            window: sites that one chain of gradients takes in at once.
            tile: sources and sites that share a read; 1 switches tiling off.
            slack: by what fraction the backward's peak memory may rise where that saves traffic; 0 by default.

    Raises:
        TypeError: an unknown setting.
        ValueError: a setting out of its range.
    """
    import torch._inductor.config as inductor

    options = dict(options or {})
    mine = options.get(HOOK, getattr(inductor, HOOK))
    if not isinstance(mine, JointPass):
        options[HOOK] = joint_pass(mine, **settings)
    mine = options.get(LOWERING, getattr(inductor, LOWERING))
    if not isinstance(mine, LoweringPass):
        options[LOWERING] = LoweringPass(options[HOOK].key, EXPANSIONS, mine)
    return options


def backend(
    model: torch.fx.GraphModule,
    inputs: list[torch.Tensor],
    *,
    mode: str | None = None,
    options: dict[str, Any] | None = None,
) -> Callable[..., Any]:
    """Compile a graph as Inductor does, with our passes: ``torch.compile(model, backend="mhar")``.

    ``mode`` and ``options`` are those of ``torch.compile`` and mean what they mean for Inductor. Under a memory budget
    (``torch._functorch.config.activation_memory_budget``) a custom operator counts as work that is not free to redo.
    """
    import torch._functorch.config as functorch

    dynamic = any(isinstance(value, torch.SymInt) for value in inputs)
    inductor = torch._TorchCompileInductorWrapper(mode, inductor_options(options), dynamic)
    with functorch.patch(is_non_builtin_to_include=True):
        compiled: Callable[..., Any] = inductor(model, inputs)
    return compiled


def explain(model: Callable[..., Any], *inputs: Any, **settings: Any) -> Report:
    """What the passes do to a model called with these inputs: ``print(mhar_compile.explain(model, tokens))``.

    The model is traced and its graphs are rewritten, but no code is generated. It is called once, under the caller's
    grad mode; compiled code that the process holds already is dropped (``torch._dynamo.reset``).

    Args:
        model: a module or a function.
        inputs: its arguments.
        settings: as in :func:`inductor_options`.
    """
    from .lowering.tracing import trace

    return trace(model, inputs, lambda reports: joint_pass(reports=reports, **settings)).report
