"""Runs the passes on a model's graphs without generating code."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._functorch._aot_autograd.utils import make_boxed_func
from torch.fx import Graph, GraphModule

from .liveness import peak_bytes
from .partition import copied, split
from .passes import JointPass
from .report import Report, summed


@dataclass
class Trace:
    """The graphs of a model: forward and backward as they are split, each without the passes and with them."""

    reports: list[Report] = field(default_factory=list)
    before: list[tuple[Graph, Graph]] = field(default_factory=list)
    after: list[tuple[Graph, Graph]] = field(default_factory=list)
    inference: list[Graph] = field(default_factory=list)

    @property
    def report(self) -> Report:
        return summed(self.reports)


def trace(
    model: Callable[..., Any], inputs: Sequence[Any], passes: Callable[[Callable[[Report], None]], JointPass]
) -> Trace:
    """Call a model once, and trace its graphs."""

    def called(*inputs: Any) -> Any:
        return model(*inputs)  # in a frame of ours: what is compiled already would go past the tracer

    found = Trace()
    torch._dynamo.reset()
    torch.compile(called, backend=tracer(found, passes(found.reports.append)))(*inputs)
    torch._dynamo.reset()
    return found


def tracer(found: Trace, joint: JointPass) -> Callable[..., Any]:
    """A backend that runs the passes, with Inductor's partitioner behind them, and then the graphs node by node."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._inductor.decomposition import select_decomp_table

    def partition(module: GraphModule, joint_inputs: Sequence[Any], **options: Any) -> tuple[GraphModule, GraphModule]:
        seen = len(found.reports)
        plain = split(copied(module, module.graph), joint_inputs, **options)
        joint(module.graph)
        parts = split(module, joint_inputs, **options)
        found.before.append((plain[0].graph, plain[1].graph))
        found.after.append((parts[0].graph, parts[1].graph))
        for report in found.reports[seen:]:
            report.peak_before, report.peak_after = peak_bytes(plain[1].graph), peak_bytes(parts[1].graph)
        return parts

    def keep(module: GraphModule, _: Any) -> Callable[..., Any]:
        return boxed(module)

    def infer(module: GraphModule, _: Any) -> Callable[..., Any]:
        joint(module.graph)
        module.recompile()
        found.inference.append(module.graph)
        return boxed(module)

    backend: Callable[..., Any] = aot_autograd(
        fw_compiler=keep,
        bw_compiler=keep,
        inference_compiler=infer,
        partition_fn=partition,
        decompositions=select_decomp_table,
        keep_inference_input_mutations=True,
    )
    return backend


def boxed(module: GraphModule) -> Callable[..., Any]:
    """A graph as a function of a list of arguments, which is how AOTAutograd calls it."""
    function: Callable[..., Any] = make_boxed_func(module.forward)
    return function
