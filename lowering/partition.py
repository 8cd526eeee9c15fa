"""Splits a joint graph into forward and backward as Inductor will, to see what the backward is going to hold."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import cached_property
from itertools import pairwise
from typing import Any

from torch.fx import Graph, GraphModule, Node
from torch.fx.graph import PythonCode

from .liveness import Buffer, levels, lifetimes
from .reading import is_tangent


def split(module: GraphModule, joint_inputs: Sequence[Any], **options: Any) -> tuple[GraphModule, GraphModule]:
    """Inductor's partition of a joint graph, which it uses up."""
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    parts: tuple[GraphModule, GraphModule] = min_cut_rematerialization_partition(
        module, joint_inputs, compiler="inductor", **options
    )
    return parts


class Uncompiled(GraphModule):
    """A module of which only the graph is of interest: its code, a fourth of the time of a split, is not written."""

    def recompile(self) -> PythonCode:
        return PythonCode("", {}, None)


def copied(module: GraphModule, graph: Graph, kind: type[GraphModule] = GraphModule) -> GraphModule:
    """A module with a copy of the graph: a deep copy would copy fake tensors too."""
    copy = Graph()
    result = copy.graph_copy(graph, {})
    copy.output(result).meta.update(next(iter(reversed(graph.nodes))).meta)
    return kind(module, copy)


class Backward:
    """The backward that a joint graph is going to be split into.

    Every input is taken for a parameter, which is free to save: a pass of the joint graph is not told which are.
    """

    def __init__(self, joint: Graph) -> None:
        self.joint = joint

    @cached_property
    def graph(self) -> Graph:
        module, inputs = self.joint.owning_module, len(self.joint.find_nodes(op="placeholder"))
        assert module is not None
        parts = split(
            copied(module, self.joint, Uncompiled),
            [],
            num_fwd_outputs=forward_outputs(self.joint),
            static_lifetime_input_indices=list(range(inputs)),
        )
        return parts[1].graph

    @cached_property
    def peak(self) -> int:
        """The most bytes it holds."""
        return max(levels(list(self.graph.nodes)))

    def beside(self, arrivals: Sequence[Node], without: Collection[Buffer]) -> list[int]:
        """The most bytes held before these nodes of the joint graph, then at each and after each.

        ``without`` are tensors of the joint graph that are counted elsewhere, or none.
        """
        nodes = list(self.graph.nodes)
        origins = {node.name: node for node in self.joint.nodes}
        memory, _ = lifetimes(list(self.joint.nodes))

        def behind(node: Node, path: tuple[int, ...]) -> Buffer:
            maker, part = memory[node]
            return maker, (*part, *path)

        elsewhere = {behind(*buffer) for buffer in without}

        def counts(buffer: Buffer) -> bool:
            node, path = buffer
            return node.name not in origins or behind(origins[node.name], path) not in elsewhere

        level = levels(nodes, counts)
        place = {node.name: at for at, node in enumerate(nodes)}
        at_sites = [place.get(node.name, 0) for node in arrivals]  # 0: a gradient of constants, which the forward forms
        spans = [max(level[a : max(b, a + 1)]) for a, b in pairwise([0, *at_sites, len(nodes)])]
        return [spans[0], *(part for at, span in zip(at_sites, spans[1:], strict=True) for part in (level[at], span))]


def forward_outputs(joint: Graph) -> int:
    """How many of a joint graph's results are the forward's; those of the backward follow."""
    results = next(iter(reversed(joint.nodes))).args[0]
    assert isinstance(results, (list, tuple))
    count = 0
    for result in results:
        if not isinstance(result, Node) or result.meta.get("partitioner_tag") == "is_backward":
            break
        if is_tangent(result):
            break
        count += 1
    return count
