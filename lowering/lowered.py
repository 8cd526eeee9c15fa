"""The pass that Inductor runs on each graph after the split: operators on CUDA become launches of their kernels."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._guards import detect_fake_mode
from torch.fx import Graph, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.node import map_arg
from torch.utils._pytree import tree_flatten, tree_unflatten

from . import launch
from .generated import emit
from .versions import CustomGraphPass, combined, graph_passes

mhar = torch.ops.mhar
IMPLEMENTATIONS: dict[Any, Callable[..., Any]] = {
    mhar.route.default: launch.route,
    mhar.route_backward.default: launch.route_backward,
}


class LoweringPass(CustomGraphPass):
    """Inductor's ``post_grad_custom_pre_pass``: the user's own passes first, then ours."""

    def __init__(self, key: str, before: Any = None) -> None:
        self.key = key
        self.before = graph_passes(before)

    def __call__(self, graph: Graph) -> None:
        for step in self.before:
            step(graph)
        lower(graph)

    def uuid(self) -> Any:
        """Changes with this package, torch and the user's own passes; None switches caching off."""
        return combined(self.key, self.before)


def lower(graph: Graph) -> int:
    """Replace what has kernels by its launches; return how many operators were."""
    nodes = [node for node in graph.nodes if node.op == "call_function" and has_kernels(node)]
    for node in nodes:
        expand(graph, node, IMPLEMENTATIONS[node.target])
    return len(nodes)


def has_kernels(node: Node) -> bool:
    if node.target not in IMPLEMENTATIONS:
        return False
    value = next(value for value in tree_flatten(node.meta["val"])[0] if isinstance(value, Tensor))
    return value.device.type == "cuda" and value.dtype != torch.float64


def expand(graph: Graph, node: Node, implementation: Callable[..., Any]) -> None:
    """Put the launches and allocations of an operator in its place."""
    from torch._inductor.decomposition import select_decomp_table

    leaves, spec = tree_flatten(list(node.args))
    inputs = [leaf for leaf in leaves if isinstance(leaf, Node)]

    def body(values: Sequence[Any]) -> Any:
        given = iter(values)
        args = tree_unflatten([next(given) if isinstance(leaf, Node) else leaf for leaf in leaves], spec)
        return implementation(*args, run=emit)

    for leaf in inputs:
        leaf.meta["inductor_realize_to_strides"] = True  # else each view of it would be computed anew
    values = [leaf.meta["val"] for leaf in inputs]
    mode = detect_fake_mode(values)
    assert mode is not None
    with mode:
        traced = make_fx(body, decomposition_table=select_decomp_table())(values)
    with graph.inserting_before(node):
        places = dict(zip(traced.graph.find_nodes(op="placeholder"), inputs, strict=True))
        results = graph.graph_copy(traced.graph, places)
    replace(node, tree_unflatten(results, tree_flatten(node.meta["val"])[1]))


def replace(node: Node, result: Any) -> None:
    """Let the users of a node, and of its parts, read the results instead; erase the node."""
    if isinstance(result, Node):
        node.replace_all_uses_with(result)
    for user in list(node.users):
        assert user.target is operator.getitem, f"{user.name} reads {node.name} as a whole"
        replace(user, result[user.args[1]])
    node.graph.erase_node(node)
