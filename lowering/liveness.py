"""What a graph holds at once, run node by node as it is written."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch.fx import Graph, Node

from .reading import shares_memory
from .versions import size_of

Buffer = tuple[Node, tuple[int, ...]]  # the node that makes a tensor, and where among its results


def peak_bytes(graph: Graph) -> int:
    """The most bytes that a graph holds."""
    return max(levels(list(graph.nodes)))


def levels(nodes: Sequence[Node], counts: Callable[[Buffer], bool] = lambda _: True) -> list[int]:
    """Bytes held during each node, of the tensors that count.

    A tensor lives from the node that makes it to the last that reads it or a view of it. Results live to the end, and
    so do the inputs of the forward (parameters among them), since it is the caller who holds them.
    """
    buffers, last = lifetimes(nodes)
    change = [0] * (len(nodes) + 1)
    for at, node in enumerate(nodes):
        given = node.op == "placeholder"
        for buffer, size in made_by(node, buffers):
            if counts(buffer):
                end = len(nodes) - 1 if given and node.name.startswith("primals") else last.get(buffer, at)
                change[0 if given else at] += size
                change[end + 1] -= size
    return list(accumulate(change))[:-1]


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
    is_part = node.target is operator.getitem
    if shares_memory(node) or (is_part and shares_memory(base)):
        return buffers[base]
    if is_part and isinstance(node.args[1], int):
        maker, path = buffers[base]
        return maker, (*path, node.args[1])
    return node, ()


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
