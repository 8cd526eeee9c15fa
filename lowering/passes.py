"""The pass that Inductor runs on the joint graph: pin, then score, pull and tile, family by family."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch._guards import detect_fake_mode
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from . import planning, schedule
from .families import Family, families
from .model import Costs
from .partition import Backward
from .pinning import pin
from .planning import Plan, Settings
from .reading import Names, UnknownFormError, read
from .report import Report
from .rewriting import Rewrite, Writer
from .versions import (
    CustomGraphPass,
    InferenceAwarePass,
    combined,
    graph_passes,
    reorders_graphs,
    stable_topological_sort,
    symbol,
    takes_inference,
)

ATTEMPTS = 4  # plans that are carried out and measured before a graph is left alone

log = logging.getLogger(__name__)


class JointPass(CustomGraphPass):
    """Inductor's ``joint_custom_pre_pass``: the user's own pass first, then ours.

    Args:
        settings: what the user overrides.
        sources: files besides this folder's that decide what a graph computes; they enter the cache key.
        before: the user's own pass, or passes.
        reports: is called with the report of each graph that has routes.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        sources: Iterable[Path] = (),
        before: Any = None,
        reports: Callable[[Report], None] | None = None,
    ) -> None:
        self.settings = settings
        self.before = graph_passes(before)
        self.reports = reports
        self.key = self.hashed(sources)

    def __call__(self, graph: Graph) -> None:
        for step in self.before:
            step(graph)
        report = Report()
        if graph.find_nodes(op="call_function", target=torch.ops.mhar.route.default):
            improve(graph, self.settings, report)
            if self.reports is not None:
                self.reports(report)

    def uuid(self) -> Any:
        """Changes with passes, operators, settings, torch and the user's own pass; None switches caching off."""
        return combined(self.key, self.before)

    def hashed(self, sources: Iterable[Path]) -> str:
        digest = hashlib.sha256(f"{torch.__version__} {self.settings}".encode())
        for path in sorted([*Path(__file__).parent.glob("*.py"), *sources]):
            digest.update(path.read_bytes())
        return digest.hexdigest()


class LoweringPass(InferenceAwarePass):  # type: ignore[misc]
    """Inductor's ``post_grad_custom_pre_pass``: the user's own passes first, then kernels in the place of operators.

    Triton is imported for graphs that have operators on CUDA alone. Where an option lets Inductor reorder graphs
    afterwards the operators stay: what a launch writes is not seen as its result.

    Args:
        key: changes with everything that decides what this pass makes of a graph.
        expansions: plain PyTorch for the operators that are too small for a kernel, which Inductor then fuses.
        before: the user's own pass, or passes.
    """

    def __init__(self, key: str, expansions: Mapping[Any, Callable[..., Any]], before: Any = None) -> None:
        self.key = key
        self.expansions = dict(expansions)
        self.before = graph_passes(before)

    def __call__(self, graph: Graph, is_inference: bool = False) -> None:
        step: Any
        for step in self.before:
            if takes_inference(step):
                step(graph, is_inference)
            else:
                step(graph)
        if not reorders_graphs() and any(is_on_cuda(node) for node in graph.nodes):
            from .lowered import Lowering

            Lowering(graph, self.expansions).run()

    def uuid(self) -> Any:
        """Changes with this package, torch and the user's own passes; None switches caching off."""
        return combined(self.key, self.before)


def is_on_cuda(node: Node) -> bool:
    """Whether a node is one of our operators, on CUDA."""
    if getattr(node.target, "namespace", None) != "mhar":
        return False
    values = [other.meta.get("val") for other in node.all_input_nodes]
    return any(isinstance(value, torch.Tensor) and value.device.type == "cuda" for value in values)


def improve(graph: Graph, settings: Settings, report: Report) -> None:
    """Rewrite what can be rewritten; whatever goes wrong, the graph stays correct and the report says why."""
    names = Names()
    routes = graph.find_nodes(op="call_function", target=torch.ops.mhar.route.default)
    report.graphs += 1
    report.sites += len(routes)
    backup = None
    try:
        report.sources += len({source for node in routes for source in names.of_all(node.args[0])})
        report.pinned, backward = pin(graph)
        backup = Backup(graph)
        choice = rewritten(graph, settings, backward, backup)
    except Exception as error:  # the compile must go on
        log.warning("mhar_compile leaves a graph as it is: %s", error, exc_info=True)
        if backup is not None:
            backup.restore(graph)
        kind = "" if isinstance(error, UnknownFormError) else f"{type(error).__name__}: "
        report.left_alone.append(f"every site of the graph: {kind}{error}")
        return
    report.left_alone += choice.left_alone
    for family in choice.unchanged:
        launches = [*schedule.forward_before(family), *schedule.backward_before(family)]
        report.count(launches, launches)
    for plan in choice.plans:
        report.add(plan)


@dataclass
class Choice:
    """What is done with a graph's families, and why some sites are left alone."""

    plans: list[Plan]
    unchanged: list[Family]
    left_alone: list[str]


def rewritten(graph: Graph, settings: Settings, backward: Backward, backup: Backup) -> Choice:
    """Plan and carry out. A plan is an estimate: one whose backward then holds too much gives way to a tighter one."""
    most = aim = 1 + settings.slack
    for _ in range(ATTEMPTS):
        choice = plan_all(graph, settings, backward, aim)
        carry_out(graph, choice.plans)
        if settings.rewrite == "always" or not any(plan.family.order for plan in choice.plans):
            return choice
        rise = Backward(graph).peak / (most * backward.peak)
        if rise <= 1:
            return choice
        aim = max(plan.held for plan in choice.plans) / backward.peak / rise
        log.info("the plan's backward holds %.3f of what it may", rise)
        backup.restore(graph)
    return plan_all(graph, settings, backward, 0)


def carry_out(graph: Graph, plans: list[Plan]) -> None:
    if plans:
        mode = detect_fake_mode([node.meta.get("val") for node in graph.nodes])
        assert mode is not None
        write = Writer(graph, mode)
        for plan in plans:
            Rewrite(plan.family, write).run()
        write.finish()
        share_sizes(graph)
        sort(graph)
        graph.lint()


def share_sizes(graph: Graph) -> None:
    """Read equal sizes off one tensor: one that the backward reads off a recomputed tensor has it computed again."""
    first: dict[object, Node] = {}
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.sym_size.int):
        node.replace_all_uses_with(first.setdefault(symbol(node.meta["val"]), node))


def sort(graph: Graph) -> None:
    """Move what reads a query's gradient behind the last pull."""
    try:
        stable_topological_sort(graph)
    except AssertionError as error:
        raise UnknownFormError("the gradient of a query or key weight is part of a source's or an output's") from error


def plan_all(graph: Graph, settings: Settings, backward: Backward, aim: float) -> Choice:
    """A plan for each family that is worth it."""
    reading = read(graph)
    choice = Choice([], [], list(reading.left_alone))
    for family in families(reading.sites):
        found: Plan | str | None = refusal(family, settings)
        if found is None:
            found = planning.plan(family, settings, Costs(), backward, aim)
        if isinstance(found, Plan):
            choice.plans.append(found)
        else:
            choice.unchanged.append(family)
            choice.left_alone += [f"{site.node.name}: {found}" for site in family.sites]
    return choice


def refusal(family: Family, settings: Settings) -> str | None:
    """Why a family is left alone before it is planned, if it is."""
    if settings.rewrite == "never":
        return "rewriting is switched off"
    value = family.sites[0].value
    if family.shape.row == 0:
        return "its sources have no tokens"
    if value.device.type == "cuda" and value.dtype == torch.float64:
        return "the steps of a route have no CUDA kernels for float64"
    return None


class Backup:
    """A copy of a graph, to go back to."""

    def __init__(self, graph: Graph) -> None:
        self.copy = Graph()
        self.nodes: dict[Node, Node] = {}
        self.result = self.copy.graph_copy(graph, self.nodes)

    def restore(self, graph: Graph) -> None:
        """Give the graph its nodes back; its inputs are the same nodes as before."""
        inputs = {copy: node for node, copy in self.nodes.items() if node.op == "placeholder"}
        *others, output = [node for node in graph.nodes if node.op != "placeholder"]
        for node in (*others, output):
            node.args, node.kwargs = (), {}
        for node in others:
            graph.erase_node(node)
        with graph.inserting_before(output):
            graph.graph_copy(self.copy, inputs)
        for copy, node in inputs.items():
            node.name = copy.name  # the names of erased nodes are taken
        output.args = (map_arg(self.result, inputs.__getitem__),)
