"""What a graph holds at once, run node by node as it is written."""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch.fx import Graph, Node

from .reading import ALIASES, VIEWS
from .versions import is_recomputed, size_of

aten = torch.ops.aten
Buffer = tuple[Node, tuple[int, ...]]  # the node that makes a tensor, and where among its results
SHARED = ALIASES | VIEWS | {aten.permute.default, aten.t.default, aten.transpose.int, aten.expand.default}
SHARED |= {aten.slice.Tensor, aten.select.int, aten.unsqueeze.default, aten.squeeze.default, aten.squeeze.dim}
REDUCTIONS = {aten.mean.dim, aten.sum.dim_IntList, aten.amax.default, aten.pow.Tensor_Scalar, aten.var_mean.correction}


def peak_bytes(graph: Graph) -> int:
    """A tensor lives from the node that makes it to the last that reads it or a view of it; results to the end."""
    nodes = list(graph.nodes)
    buffers, last = lifetimes(nodes)
    change = [0] * (len(nodes) + 1)
    for at, node in enumerate(nodes):
        for buffer, size in made_by(node, buffers):
            change[0 if node.op == "placeholder" else at] += size
            change[last.get(buffer, at) + 1] -= size
    return max(accumulate(change))


def held_beside(graph: Graph, arrivals: Sequence[Node], without: Collection[Buffer]) -> list[int]:
    """The most bytes of a joint graph's backward before the sites' gradients arrive, then at each and after each.

    ``without`` are tensors counted elsewhere. What the forward saves is not known before the graph is split. Taken as
    saved is what the backward reads, directly or through what it can recompute: views, pointwise operators, reductions
    and whatever checkpointing recomputes. A checkpointed region is there from the backward's first read of it.
    """
    nodes = list(graph.nodes)
    buffers, last = lifetimes(nodes)
    backward = {node for node in nodes if node.meta.get("partitioner_tag") == "is_backward"}
    start = next((at for at, node in enumerate(nodes) if node in backward and node.op != "placeholder"), len(nodes))
    regions = region_starts(nodes, start, buffers)
    needed = dict(last)  # read by the backward, or by what is computed again for it
    for at, node in reversed(list(enumerate(nodes[:start]))):
        if is_cheap(node):
            end = needed.get(buffers[node], at)
            for read in node.all_input_nodes:
                needed[buffers[read]] = max(needed.get(buffers[read], 0), end)
    change = [0] * (len(nodes) + 1)
    for at, node in enumerate(nodes):
        born, ends = max(at, start), needed
        if at < start and is_recomputed(node):
            born, ends = regions.get(node.meta.get("ac_graph_id"), len(nodes)), last
        elif node.op == "placeholder" or (at < start and is_cheap(node)):
            continue
        for buffer, size in made_by(node, buffers):
            if buffer not in without and born <= ends.get(buffer, at):
                change[born] += size
                change[ends.get(buffer, at) + 1] -= size
    level = list(accumulate(change))
    place = {node: at for at, node in enumerate(nodes)}
    bounds = [start, *(place[node] for node in arrivals), len(nodes)]
    spans = [max(level[a : max(b, a + 1)]) for a, b in pairwise(bounds)]
    at_sites = [level[place[node]] for node in arrivals]
    return [spans[0], *(part for pair in zip(at_sites, spans[1:], strict=True) for part in pair)]


def region_starts(nodes: Sequence[Node], start: int, buffers: dict[Node, Buffer]) -> dict[object, int]:
    """Where the backward first reads each checkpointed region."""
    starts: dict[object, int] = {}
    for at, node in enumerate(nodes[start:], start):
        for read in node.all_input_nodes:
            maker = buffers[read][0]
            if is_recomputed(maker):
                starts.setdefault(maker.meta.get("ac_graph_id"), at)
    return starts


def is_cheap(node: Node) -> bool:
    """Whether the partitioner would rather compute a forward node again than save it."""
    if is_recomputed(node) or node.target in SHARED:
        return True
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return target is not operator.getitem
    return torch.Tag.pointwise in target.tags or target in REDUCTIONS or target.namespace == "prims"


def lifetimes(nodes: Sequence[Node]) -> tuple[dict[Node, Buffer], dict[Buffer, int]]:
    """The memory of each node's result, and where each is read last."""
    buffers: dict[Node, Buffer] = {}
    last: dict[Buffer, int] = {}
    for at, node in enumerate(nodes):
        buffers[node] = buffer_of(node, buffers)
        if node.target is not operator.getitem:
            last.update((buffers[read], at) for read in node.all_input_nodes)
    return buffers, last


def made_by(node: Node, buffers: dict[Node, Buffer]) -> Iterator[tuple[Buffer, int]]:
    """The tensors that a node allocates, and their bytes."""
    if buffers[node] == (node, ()):
        for path, size in sizes(node.meta.get("val")):
            yield (node, path), size


def buffer_of(node: Node, buffers: dict[Node, Buffer]) -> Buffer:
    """The memory that a node's result stands in."""
    base = node.args[0] if node.args else None
    if not isinstance(base, Node):
        return node, ()
    if node.target is operator.getitem and isinstance(node.args[1], int):
        maker, path = buffers[base]
        return maker, (*path, node.args[1])
    return buffers[base] if node.target in SHARED else (node, ())


def sizes(value: Any, path: tuple[int, ...] = ()) -> Iterator[tuple[tuple[int, ...], int]]:
    """Every tensor among a node's results and its bytes."""
    if isinstance(value, torch.Tensor):
        count = value.element_size()
        for size in value.shape:
            count *= size_of(size)
        yield path, count
    elif isinstance(value, (list, tuple)):
        for n, part in enumerate(value):
            yield from sizes(part, (*path, n))
