"""Reads the routing sites of a joint graph: their sources, their backward, and where gradients are summed."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Graph, Node

from .versions import symbol

aten = torch.ops.aten
ALIASES = {aten.alias.default, aten.detach.default}
VIEWS = {aten.view.default, aten._unsafe_view.default, aten.reshape.default}
CONE_LIMIT = 64  # nodes between a site's query and the graph's inputs


@dataclass
class Site:
    """One ``mhar::route`` of the graph, and the ``mhar::route_backward`` that belongs to it."""

    node: Node
    sources: list[Node]  # up to aliases; the null source is not among them
    query: Node
    key_weight: Node | None
    null_source: Node | None
    residual: Node | None
    gate: Node | None
    eps: float | Node
    out: Node | None
    backward: Node | None = None
    grad_out: Node | None = None
    grads: list[Node | None] = field(default_factory=list)  # of the sources, where something reads them
    parameter_grads: dict[str, Node] = field(default_factory=dict)  # of query, key_weight, null_source, gate

    @property
    def heads(self) -> int:
        return int(self.query.meta["val"].shape[0])

    @property
    def value(self) -> torch.Tensor:
        """A tensor of the output's shape and dtype."""
        value: torch.Tensor = self.node.meta["val"][0]
        return value

    @property
    def plain(self) -> bool:
        """Whether the output is the mixture itself."""
        return self.residual is None and self.gate is None


@dataclass
class Reading:
    """The sites that the passes may rewrite, in the order of the graph, and why others are left alone."""

    sites: list[Site]
    left_alone: list[str]


class UnknownFormError(Exception):
    """A site is not of the form that the passes know; the text says why."""


def read(graph: Graph) -> Reading:
    """Find the sites of a joint or an inference graph."""
    routes = graph.find_nodes(op="call_function", target=torch.ops.mhar.route.default)
    names = Names()
    found: list[Site] = []
    left_alone: list[str] = []
    for node in routes:
        try:
            found.append(read_site(node, names))
        except UnknownFormError as reason:
            left_alone.append(f"{node.name}: {reason}")
    sources = {source for node in routes for source in names.of_all(node.args[0])}
    sites = []
    for site in found:
        reasons = [binding(node, sources) for node in (site.query, site.key_weight) if node is not None]
        if any(reasons):
            left_alone.append(f"{site.node.name}: its query or key weight {next(filter(None, reasons))}")
        else:
            sites.append(site)
    return Reading(sites, left_alone)


class Names:
    """One node for each source, however many aliases and views of it the sites read."""

    def __init__(self) -> None:
        self.views: dict[tuple[Node, Any], Node] = {}

    def of(self, node: Node) -> Node:
        node = behind_aliases(node)
        if node.target not in VIEWS or not isinstance(node.args[0], Node):
            return node
        shape = tuple(symbol(size) for size in node.meta["val"].shape)
        return self.views.setdefault((behind_aliases(node.args[0]), shape), node)

    def of_all(self, nodes: Any) -> list[Node]:
        return [self.of(node) for node in nodes if isinstance(node, Node)] if isinstance(nodes, (list, tuple)) else []


def behind_aliases(node: Node) -> Node:
    """The tensor itself, where node is an alias, a detached copy or a view of the same shape."""
    while isinstance(node.args[0] if node.args else None, Node):
        base = node.args[0]
        assert isinstance(base, Node)
        if node.target not in ALIASES and not (node.target in VIEWS and same_shape(node, base)):
            return node
        node = base
    return node


def same_shape(one: Node, other: Node) -> bool:
    a, b = one.meta["val"].shape, other.meta["val"].shape
    return len(a) == len(b) and all(symbol(x) == symbol(y) for x, y in zip(a, b, strict=True))


def read_site(node: Node, names: Names) -> Site:
    """One site and its backward; raises UnknownFormError."""
    sources, query, key_weight, null_source, residual, gate, eps = arguments(node)
    if not isinstance(sources, (list, tuple)) or not all(isinstance(source, Node) for source in sources):
        raise UnknownFormError("its sources are not a list")
    if not sources:
        raise UnknownFormError("it has no sources but the null source")
    outputs = getitems(node)
    site = Site(
        node, names.of_all(sources), query, key_weight, null_source, residual, gate, eps, outputs.pop(0, [None])[0]
    )
    readers = [user for items in outputs.values() for item in items for user in readers_of(item)]
    backwards = {user for user in readers if user.target is torch.ops.mhar.route_backward.default}
    if any(user not in backwards for user in readers):
        raise UnknownFormError("its weights are read")
    if len(backwards) > 1:
        raise UnknownFormError("it has more than one backward")
    if backwards:
        read_backward(site, backwards.pop(), names)
    return site


def read_backward(site: Site, node: Node, names: Names) -> None:
    """The gradients that a site's backward sends out."""
    grad_out, sources, *_ = arguments(node)
    if names.of_all(sources) != site.sources:
        raise UnknownFormError("its backward has other sources")
    outputs = getitems(node)
    site.backward, site.grad_out = node, grad_out
    site.grads = [None] * len(site.sources)
    for items in outputs.pop(0, []):
        for n, (grad, *more) in getitems(items).items():
            if more or site.grads[n] is not None:
                raise UnknownFormError("a gradient is taken twice")
            site.grads[n] = grad if grad.users else None
    for index, name in enumerate(("query", "key_weight", "null_source", "gate"), 1):
        if len(outputs.get(index, ())) > 1:
            raise UnknownFormError("a gradient is taken twice")
        if index in outputs and outputs[index][0].users:
            site.parameter_grads[name] = outputs[index][0]


def arguments(node: Node) -> list[Any]:
    """The arguments of an operator by position."""
    assert isinstance(node.target, torch._ops.OpOverload)
    names = [argument.name for argument in node.target._schema.arguments]
    if len(node.args) + len(node.kwargs) != len(names):
        raise UnknownFormError("its arguments are not those of the operator")
    return [*node.args, *(node.kwargs[name] for name in names[len(node.args) :])]


def getitems(nodes: Node | None) -> dict[int, list[Node]]:
    """The parts that are taken from a node, by index."""
    items: dict[int, list[Node]] = {}
    for user in () if nodes is None else nodes.users:
        if user.target is not operator.getitem or not isinstance(user.args[1], int):
            raise UnknownFormError("its results are not taken apart by index")
        items.setdefault(user.args[1], []).append(user)
    return items


def shares_memory(node: Node) -> bool:
    """Whether a node's result, or every part of it, stands in the memory of the node's first argument."""
    return getattr(node.target, "is_view", False) or node.target is aten._unsafe_view.default


def readers_of(node: Node) -> Iterable[Node]:
    """What reads a node, looking through aliases."""
    for user in node.users:
        if user.target in ALIASES:
            yield from readers_of(user)
        else:
            yield user


def cone(node: Node) -> list[Node]:
    """What a node is computed from, itself included and the graph's inputs left out, in the order of the graph."""
    seen: set[Node] = set()
    stack = [node]
    while stack:
        at = stack.pop()
        if at in seen or at.op in ("placeholder", "get_attr"):
            continue
        seen.add(at)
        stack.extend(at.all_input_nodes)
        if len(seen) > CONE_LIMIT:
            break
    return sorted(seen)


def binding(node: Node, sources: set[Node]) -> str | None:
    """Why a node cannot be computed before every site, if it cannot."""
    nodes = cone(node)
    if any(is_tangent(given) for at in nodes for given in at.all_input_nodes) or is_tangent(node):
        return "depends on a gradient"
    if any(at in sources or is_route(at) for at in nodes):
        return "depends on an activation"
    if any(is_fixed(at) for at in nodes):
        return "depends on randomness, or on an operation that the passes do not move"
    return f"takes more than {CONE_LIMIT} operations to compute" if len(nodes) > CONE_LIMIT else None


def is_tangent(node: Node) -> bool:
    """Whether a node is an input of the backward: the gradient of a result."""
    return node.op == "placeholder" and "tangents" in node.name


def is_route(node: Node) -> bool:
    return getattr(node.target, "namespace", None) == "mhar"


def is_fixed(node: Node) -> bool:
    """Whether a node must stay where it is: randomness, or no plain operator."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return target is not operator.getitem and not getattr(target, "__module__", "").startswith("_operator")
    return torch.Tag.nondeterministic_seeded in target.tags


def sum_of(grad: Node) -> tuple[Node, Node]:
    """Where the chain of additions that a gradient enters ends, and the node through which it enters the chain."""
    entry = grad
    while (user := only_user(entry)) is not None and user.target in ALIASES | VIEWS:
        entry = user
    top = entry
    while (user := only_user(top)) is not None and is_sum(user):
        top = user
    return top, entry


def only_user(node: Node) -> Node | None:
    return next(iter(node.users)) if len(node.users) == 1 else None


def is_sum(node: Node) -> bool:
    """Whether a node adds two tensors of its own shape and dtype."""
    if node.target is not aten.add.Tensor or node.kwargs or len(node.args) != 2 or node.args[0] is node.args[1]:
        return False
    return all(
        isinstance(x, Node) and same_shape(x, node) and x.meta["val"].dtype == node.meta["val"].dtype for x in node.args
    )
