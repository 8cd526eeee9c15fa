"""Keeps sources out of recomputation where they leave a checkpointed region."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import Graph, Node

from .partition import Backward
from .reading import is_tangent, shares_memory
from .versions import MUST_SAVE, is_recomputed


def pin(graph: Graph) -> tuple[int, Backward]:
    """Save what recomputed sites read from other checkpointed regions; returns how many tensors, and the backward then.

    A region that ends in a view (a linear layer on 3-D input does) saves nothing by itself: the partitioner always
    recomputes views, and with it what they are views of. So the tensor behind the view is saved. If the backward then
    held more, nothing is saved: its peak may be where it begins, with all that is saved. In a graph of inference, which
    keeps the tags of checkpointing on torch 2.11, there is nothing to save.
    """
    pinned = set()
    for site in graph.find_nodes(op="call_function", target=torch.ops.mhar.route.default):
        for source in map(behind_views, site.all_input_nodes):
            if is_recomputed(site) and is_recomputed(source) and region(source) != region(site):
                pinned.add(source)
    plain = Backward(graph)
    if not pinned or not any(is_tangent(node) for node in graph.find_nodes(op="placeholder")):
        return 0, plain
    tags = {node: node.meta["recompute"] for node in graph.nodes if "recompute" in node.meta}
    most = plain.peak
    for source in pinned:
        save(source)
    backward = Backward(graph)
    if backward.peak <= most:
        return len(pinned), backward
    for node, tag in tags.items():
        node.meta["recompute"] = tag
    return 0, plain


def behind_views(node: Node) -> Node:
    """What a view outside of all regions is a view of."""
    while shares_memory(node) and not is_recomputed(node) and isinstance(node.args[0], Node):
        node = node.args[0]
    return node


def region(node: Node) -> object:
    return node.meta.get("ac_graph_id")


def save(node: Node) -> None:
    """Save a node and what it is a view of; of a node with parts all of them: none could be computed again.

    Of such a node itself nothing is said: a partitioner with a memory budget would save the tuple.
    """
    while True:
        base: Any = node.args[0] if node.args else None
        is_part = node.target is operator.getitem
        for tensor in base.users if is_part else [node]:
            tensor.meta["recompute"] = MUST_SAVE
        if is_part and shares_memory(base):
            base = base.args[0]
        elif not shares_memory(node):
            return
        if not isinstance(base, Node) or not is_recomputed(base):
            return
        node = base
