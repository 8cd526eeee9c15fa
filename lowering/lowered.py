"""The pass that Inductor runs on each graph after the split: operators on CUDA become launches of their kernels."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor
from torch._guards import detect_fake_mode
from torch.fx import Graph, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.utils._pytree import tree_flatten, tree_unflatten

from . import launch, steps
from .generated import emit
from .norm_gradients import NormGradientNodes, norm_gradient_of
from .norms import NormNodes, norm_of
from .reading import behind_aliases
from .rules import NormRule, norm_rule

mhar = torch.ops.mhar
LAUNCHED: dict[Any, Callable[..., Any]] = {
    mhar.route.default: launch.route,
    mhar.route_backward.default: launch.route_backward,
    mhar.score.default: steps.score,
    mhar.mix.default: steps.mix,
    mhar.mix_tile.default: steps.mix_tile,
    mhar.coupling_from_sources.default: steps.coupling_from_sources,
}
HEADS: dict[Any, Callable[[Node], int]] = {  # of the operators whose first argument is the gradient of a site's output
    mhar.coupling.default: lambda node: cast(int, node.args[3]),
    mhar.coupling_from_sources.default: lambda node: int(cast(Node, node.args[5]).meta["val"].shape[-1]),
    mhar.route_backward.default: lambda node: int(cast(Node, node.args[2]).meta["val"].shape[0]),
}
KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class Lowering:
    """A graph whose operators are being replaced."""

    def __init__(self, graph: Graph, expansions: Mapping[Any, Callable[..., Any]], device: str = "cuda") -> None:
        self.graph, self.expansions, self.device = graph, expansions, device
        self.shares: dict[Node, Node] = {}  # by the unfold that reads it: what pulls add the gradients of queries to
        self.pulled: set[Node] = set()  # gradients of queries that are in shares

    def run(self) -> None:
        for node in list(self.graph.nodes):
            if node.op == "call_function" and self.has_kernels(node):
                self.lower(node)

    def has_kernels(self, node: Node) -> bool:
        """Whether a node is one of ours, on the device and of a dtype that the kernels take."""
        if getattr(node.target, "namespace", None) != "mhar":
            return False
        tensors = [arg.meta["val"] for arg in node.all_input_nodes if isinstance(arg.meta["val"], Tensor)]
        return all(
            x.device.type == self.device and x.dtype != torch.float64 and statically_known_true(x.numel() != 0)
            for x in tensors
        )

    def lower(self, node: Node) -> None:
        if node.target in HEADS and (gradient := gradient_behind(node)) is not None:
            self.norm_backward(node, *gradient)
            if node.target is mhar.coupling.default:
                return
        args: list[Any] = list(node.args)
        if node.target is mhar.mix.default and (norm := norm_behind(node)) is not None:
            self.mix_norm(node, args, *norm)
        elif node.target in LAUNCHED:
            self.expand(node, partial(LAUNCHED[node.target], run=emit), args)
        elif node.target is mhar.unfold.default:
            self.unfold(node, *args)
        elif node.target is mhar.coupling.default:
            self.coupling(node, args)
        elif node.target is not mhar.pull.default:
            self.expand(node, self.expansions[node.target], args)
        elif args[0][0].meta["val"].dim() < args[5][0].meta["val"].dim():
            self.pull_null(node, *args)
        else:
            self.pull(node, args)

    def mix_norm(self, node: Node, args: list[Any], norm: NormNodes, rule: NormRule) -> None:
        """A site and the RMSNorm that reads its output are one launch."""
        result = norm.result.meta["val"]
        keep_out = not norm.alone or result.dtype != node.meta["val"][0].dtype

        def body(weight: Any, *mixing: Any) -> Any:
            given = steps.Norm(weight, norm.eps, result.dtype, norm.round_first, keep_out, rule)
            return steps.mix_norm(given, *mixing, run=emit)

        with self.graph.inserting_before(node):
            *mixed, normed, inverse = self.traced(body, [norm.weight, *args])
        replace(node, mixed)
        norm.inverse.replace_all_uses_with(inverse)
        norm.result.replace_all_uses_with(normed)
        for unread in (norm.result, norm.inverse):
            self.erase(unread)

    def norm_backward(self, node: Node, norm: NormGradientNodes, heads: int, rule: NormRule) -> None:
        """The backward of the RMSNorm behind a site is one launch, and the coupling of the site comes along with it."""
        couples = node.target is mhar.coupling.default
        residue = node.args[2] if couples else None
        summed: Any = None if norm.weight_sum is None else norm.weight_sum.meta["val"]

        def body(terms: Any, x: Any, residue: Any, inverse: Any, weight: Any) -> Any:
            dtype = None if summed is None else summed.dtype
            grad, coupling, total = steps.norm_backward(
                terms, x, residue, inverse, weight, heads, couples, dtype, rule, run=emit
            )
            return [grad, coupling, None if total is None else total.view(summed.shape)]

        with self.graph.inserting_before(norm.first):
            grad, coupling, total = self.traced(body, [list(norm.terms), norm.x, residue, norm.inverse, norm.weight])
        if couples:
            replace(node, coupling)
        for old, new in ((norm.result, grad), (norm.weight_sum, total)):
            if old is not None:
                old.replace_all_uses_with(new)
                self.erase(old)

    def coupling(self, node: Node, args: list[Any]) -> None:
        """S, of the gradient as pulls read it: what both have in common cancels."""

        def body(grad_out: Any, *rest: Any) -> Any:
            return self.expansions[node.target](steps.as_stored(grad_out), *rest)

        self.expand(node, body, args)

    def erase(self, node: Node) -> None:
        """Erase a node, and what only it reads."""
        waiting = {node: None}
        while waiting:
            unread, _ = waiting.popitem()
            read = unread.all_input_nodes
            self.graph.erase_node(unread)
            for other in read:
                if other.op == "call_function" and not other.users and not other.is_impure():
                    waiting[other] = None

    def pull(self, node: Node, args: list[Any]) -> None:
        """Pulls of one family add the gradients of its queries to one tensor, which unfold reads in place of theirs."""
        parts = {user.args[1]: user for user in node.users}
        folded, dqueries = args[9], parts.get(1)
        with self.graph.inserting_before(node):
            shares = None
            if dqueries is not None:
                (unfold,) = dqueries.users  # not by the folded queries: families may have the same
                if unfold not in self.shares:
                    self.shares[unfold] = self.traced(steps.new_shares, [folded])
                shares = self.shares[unfold]
            grads = self.traced(partial(steps.pull, run=emit), [*args, shares])
        if 0 in parts:
            replace(parts[0], grads)
        if dqueries is None:
            self.graph.erase_node(node)
        else:
            self.pulled.add(dqueries)

    def pull_null(
        self, node: Node, sources: Any, rstds: Any, logits: Any, firsts: Any, sites: Any, grad_outs: Any, lses: Any,
        couplings: Any, gates: Any, folded: Node, carried: Any, wide: Any,
    ) -> None:  # fmt: skip
        """A null source is read at one site."""

        def body(*args: Any) -> Any:
            source, rstd, known, dout, lse, coupling, gate, queries = args
            query = queries.select(0, sites[0])
            grad, dfolded = steps.pull_null(source, rstd, known, dout, lse, coupling, gate, query)
            return [grad], dfolded

        self.expand(node, body, [x[0] for x in (sources, rstds, logits, grad_outs, lses, couplings, gates)] + [folded])

    def unfold(self, node: Node, grads: Any, sites: Any, queries: Any, key_weights: Any) -> None:
        shared = [grad for grad in grads if grad in self.pulled]
        left, left_sites, at = [], [], 0  # of null sources, and of pulls that no kernel takes
        for grad in grads:
            rows = int(grad.meta["val"].shape[0])
            if grad not in self.pulled:
                left.append(grad)
                left_sites += sites[at : at + rows]
            at += rows
        summing = partial(steps.folded_gradients, run=emit)
        with self.graph.inserting_before(node):
            total = self.traced(summing, [self.shares.get(node), left, left_sites, len(queries)])
        read = [behind_aliases(x) for x in (*queries, *key_weights) if x is not None]
        multiply = steps.one_launch if all(x.op == "placeholder" for x in read) else steps.apart
        self.expand(node, partial(steps.unfold, multiply=multiply), [total, queries, key_weights])
        for grad in shared:
            pulled = grad.all_input_nodes[0]
            self.graph.erase_node(grad)
            self.graph.erase_node(pulled)

    def expand(self, node: Node, body: Callable[..., Any], args: Sequence[Any]) -> None:
        """Put the launches and operations of a body in a node's place."""
        with self.graph.inserting_before(node):
            replace(node, self.traced(body, args))

    def traced(self, body: Callable[..., Any], args: Sequence[Any]) -> Any:
        """What a body does to these arguments, at the insertion point; its results."""
        from torch._inductor.decomposition import select_decomp_table

        leaves, spec = tree_flatten(list(args))
        inputs = [leaf for leaf in leaves if isinstance(leaf, Node)]
        for leaf in inputs:
            if leaf not in self.shares.values():  # whose layout Inductor would then pad
                leaf.meta["inductor_realize_to_strides"] = True  # else each view of it would be computed anew
        structure: list[Any] = []

        def flat(values: Sequence[Any]) -> Any:
            given = iter(values)
            whole = tree_unflatten([next(given) if isinstance(leaf, Node) else leaf for leaf in leaves], spec)
            results, form = tree_flatten(body(*whole))
            structure.append(form)
            return results

        values = [leaf.meta["val"] for leaf in inputs]
        mode = detect_fake_mode(values)
        assert mode is not None
        with mode:
            module = make_fx(flat, decomposition_table=select_decomp_table())(values)
        places = dict(zip(module.graph.find_nodes(op="placeholder"), inputs, strict=True))
        results: Any = self.graph.graph_copy(module.graph, places)
        return tree_unflatten(results, structure[0])


def norm_behind(mix: Node) -> tuple[NormNodes, NormRule] | None:
    """The RMSNorm that is done along with a site, and how; None where there is none, or where Inductor does it."""
    value, lse, _ = mix.meta["val"]
    heads, width = int(lse.shape[-1]), int(value.shape[-1])
    rule = norm_rule(heads, width // heads, value.element_size())
    for out in mix.users:
        norm = norm_of(out) if out.args[1] == 0 else None
        if norm is not None and rule is not None:
            return norm, rule
    return None


def gradient_behind(node: Node) -> tuple[NormGradientNodes, int, NormRule] | None:
    """The backward of the RMSNorm that the gradient of a site's output comes from, the site's heads, and the rule.

    None where there is none, where Inductor does it, or where its place in the graph is before something that it reads.
    """
    gradient, heads = cast(Node, node.args[0]), HEADS[node.target](node)
    value = gradient.meta["val"]
    rule = norm_rule(heads, int(value.shape[-1]) // heads, value.element_size())
    found = norm_gradient_of(gradient) if rule is not None and rule.backward else None
    if rule is None or found is None:
        return None
    read = found.given
    if node.target is mhar.coupling.default:
        if found.x is not node.args[1]:
            return None
        read += [arg for arg in node.args[2:3] if isinstance(arg, Node)]
    return (found, heads, rule) if all(one < found.first for one in read) else None


def replace(node: Node, result: Any) -> None:
    """Let the users of a node, and of its parts, read the results instead; erase the node."""
    if isinstance(result, Node):
        node.replace_all_uses_with(result)
    for user in list(node.users):
        if user.target is not operator.getitem:
            raise RuntimeError(f"{user.name} reads {node.name} as a whole")
        replace(user, result[user.args[1]])
    node.graph.erase_node(node)
