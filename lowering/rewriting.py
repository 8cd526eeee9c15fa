"""Carries out a plan: routes become scores and mixes, their backwards couplings and pulls."""

from __future__ import annotations

import operator
from collections.abc import Callable
from itertools import zip_longest
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from .families import Family, Pull, Run, Sum, Tile
from .reading import Site, cone, only_user, shares_memory, sum_of
from .versions import MUST_SAVE

mhar = torch.ops.mhar
TAGS = ("recompute", "ac_graph_id", "partitioner_tag", "stack_trace", "nn_module_stack", "seq_nr")


class Writer:
    """Adds nodes to a graph, each with the value and the tags that the compiler expects of it."""

    def __init__(self, graph: Graph, mode: FakeTensorMode) -> None:
        self.graph = graph
        self.mode = mode
        self.parted: list[Node] = []  # nodes of several results, which are saved
        self.replaced: dict[Node, Node] = {}  # a plan names nodes of the graph as it was: sources, gradients

    def replace(self, node: Node, other: Node) -> None:
        """Let whatever reads a node read another, what is written later too."""
        node.replace_all_uses_with(other)
        self.replaced[node] = other

    def now(self, node: Node) -> Node:
        """What stands in a node's place."""
        while node in self.replaced:
            node = self.replaced[node]
        return node

    def call(self, target: Callable[..., Any], args: tuple[Any, ...], like: Node, *, saved: bool = False) -> Node:
        """A call at the insertion point, tagged as ``like``; a saved one is kept for the backward."""
        args = map_arg(args, self.now)
        node = self.graph.call_function(target, args)
        with self.mode, torch.no_grad():
            node.meta["val"] = target(*map_arg(args, lambda arg: arg.meta["val"]))
        node.meta.update({tag: like.meta[tag] for tag in TAGS if tag in like.meta})
        if saved:
            node.meta.pop("ac_graph_id", None)  # it belongs to no region
            node.meta["recompute"] = MUST_SAVE
            if isinstance(node.meta["val"], tuple):
                self.parted.append(node)
        return node

    def part(self, node: Node, *path: int) -> Node:
        """One result of a node."""
        for index in path:
            value, tags = node.meta["val"][index], {tag: node.meta[tag] for tag in TAGS if tag in node.meta}
            node = self.graph.call_function(operator.getitem, (node, index))
            node.meta.update(tags, val=value)
        return node

    def finish(self) -> None:
        """Leave what is to be saved to the parts of a node: a partitioner with a memory budget would save the tuple."""
        for node in self.parted:
            del node.meta["recompute"]


class Rewrite:
    """One family being rewritten."""

    def __init__(self, family: Family, write: Writer) -> None:
        self.graph, self.family, self.write = write.graph, family, write
        self.folded: Node | None = None
        self.rstds: dict[Run, Node] = {}
        self.logits: dict[tuple[Run, range], Node] = {}  # by the sites that they are of
        self.folds: dict[range, Node] = {}  # of windows, for the backward
        self.nulls: dict[int, tuple[Node, Node, Node]] = {}  # null source, logits, rstd
        self.tiles: dict[Tile, Node] = {}
        self.mixes: dict[int, tuple[Node, Node, Node | None]] = {}  # output, log-sum-exp, residue
        self.couplings: dict[int, Node] = {}
        self.made: dict[tuple[Pull, Sum], Node] = {}
        self.partials: list[tuple[Node, list[int]]] = []  # gradients of folded queries, and their sites

    def run(self) -> None:
        self.fold()
        for number, site in enumerate(self.family.sites):
            self.forward(number, site)
        pulls = iter([*self.family.pulls, None])
        pull = next(pulls)
        for number, following in zip_longest(self.family.order, self.family.order[1:]):
            self.backward(number, self.family.sites[number])
            while pull is not None and pull.sites[-1] == number:
                self.pull(pull)
                pull = next(pulls)
            window = self.family.window_of(number)
            if following not in window:
                self.unfold(window, number)
        self.erase()

    def fold(self) -> None:
        """All the folded queries, at the top of the graph; what they are computed from moves there too."""
        sites = self.family.sites
        parameters = [p for site in sites for p in (site.query, site.key_weight) if p is not None]
        anchor = next(node for node in self.graph.nodes if node.op not in ("placeholder", "get_attr"))
        for node in sorted({node for parameter in parameters for node in cone(parameter)}):
            if node is anchor:
                anchor = anchor.next
            anchor.prepend(node)
        wide = torch.float64 if sites[0].value.dtype == torch.float64 else torch.float32
        with self.graph.inserting_before(anchor):
            args = ([site.query for site in sites], [site.key_weight for site in sites], wide)
            self.folded = self.write.call(mhar.fold.default, args, sites[0].node, saved=True)
        self.top = self.folded

    def folded_of(self, window: range, like: Node) -> tuple[Node, int]:
        """The folded queries for a window's pulls, and the number of their first site."""
        assert self.folded is not None
        if not self.family.windows:
            return self.folded, 0
        if window not in self.folds:
            sites, dtype = self.family.sites[window.start : window.stop], self.folded.meta["val"].dtype
            args = ([site.query for site in sites], [site.key_weight for site in sites], dtype)
            self.folds[window] = self.write.call(mhar.fold.default, args, like)
        return self.folds[window], window.start

    def score(self, run: Run, site: Site) -> None:
        """Logits and rstd of a source, computed where it is born."""
        source, first, count = self.write.now(run.source), run.first, run.count
        born = self.top if source.op in ("placeholder", "get_attr") or source < self.top else source
        with self.graph.inserting_after(last_part(born)):
            args = (source, self.folded, first, count, site.eps)
            node = self.write.call(mhar.score.default, args, site.node, saved=self.family.saves_logits(run))
            node.meta.pop("ac_graph_id", None)  # several regions may read it
        with self.graph.inserting_after(node):
            self.rstds[run] = self.write.part(node, 1)
            self.logits[run, range(first, first + count)] = self.write.part(node, 0)

    def scored(self, run: Run, site: int) -> tuple[Node, int]:
        """Logits of a source at some sites, this one among them, and the first of those sites."""
        if run not in self.rstds:
            self.score(run, self.family.sites[site])
        part = self.family.part_of(run, site)
        if (run, part) not in self.logits:
            whole = self.logits[run, range(run.first, run.first + run.count)]
            with self.graph.inserting_after(self.rstds[run]):
                args, like = (whole, part.start - run.first, len(part)), self.family.sites[site].node
                node = self.write.call(mhar.part.default, args, like, saved=self.family.saves_logits(run))
                node.meta.pop("ac_graph_id", None)
            self.logits[run, part] = node
        return self.logits[run, part], part.start

    def all_scored(self, site: int, sources: list[Node]) -> tuple[list[Node], list[int]]:
        """Logits of sources at some sites, this one among them, and the first of those sites of each."""
        found = [self.scored(self.family.run_of(source, site), site) for source in sources]
        return [logits for logits, _ in found], [first for _, first in found]

    def forward(self, number: int, site: Site) -> None:
        tile = self.family.tile_of(number)
        sources = [source for source in site.sources if tile is None or source not in tile.sources]
        logits, firsts = self.all_scored(number, sources)
        carried: tuple[Node | None, Node | None] = (None, None)
        if tile is not None:
            carried = self.tile(tile, number, site)
        with self.graph.inserting_before(site.node):
            if site.null_source is not None:
                null = self.null(number, site)
                sources, logits, firsts = [null[0], *sources], [null[1], *logits], [number, *firsts]
            keep = self.family.keeps_residue(number)
            args = (sources, logits, firsts, number, site.residual, site.gate, *carried, site.value.dtype, keep)
            node = self.write.call(mhar.mix.default, args, site.node)
            out, lse = self.write.part(node, 0), self.write.part(node, 1)
            self.mixes[number] = out, lse, self.write.part(node, 2) if keep else None
        if site.out is not None:
            self.write.replace(site.out, out)

    def null(self, number: int, site: Site) -> tuple[Node, Node, Node]:
        """The null source in the sources' dtype, its logits and its rstd."""
        null, dtype = site.null_source, site.value.dtype
        assert null is not None
        if null.meta["val"].dtype != dtype:
            null = self.write.call(torch.ops.prims.convert_element_type.default, (null, dtype), site.node)
        node = self.write.call(mhar.score.default, (null, self.folded, number, 1, site.eps), site.node, saved=True)
        self.nulls[number] = null, self.write.part(node, 0), self.write.part(node, 1)
        return self.nulls[number]

    def tile(self, tile: Tile, number: int, site: Site) -> tuple[Node, Node]:
        """The mixture of a site over the older sources of its tile, and its log-sum-exp."""
        if tile not in self.tiles:
            scored = self.all_scored(tile.sites[-1], tile.sources)  # early sites' may be a part of the last one's
            args = (tile.sources, *scored, tile.sites)
            with self.graph.inserting_before(site.node):
                self.tiles[tile] = self.write.call(mhar.mix_tile.default, args, site.node)
        at = tile.sites.index(number)
        with self.graph.inserting_before(site.node):
            return self.write.part(self.tiles[tile], 0, at), self.write.part(self.tiles[tile], 1, at)

    def backward(self, number: int, site: Site) -> None:
        """S of a site as its gradient arrives, with the gradients of its gate and null source."""
        assert site.backward is not None
        out, lse, residue = self.mixes[number]
        with self.graph.inserting_before(site.backward):
            if number in self.family.from_output:
                args: tuple[Any, ...] = (site.grad_out, out, residue, site.heads)
                self.couplings[number] = self.write.call(mhar.coupling.default, args, site.backward)
            else:
                sources, (logits, firsts) = site.sources, self.all_scored(number, site.sources)
                if number in self.nulls:
                    null, null_logits, _ = self.nulls[number]
                    sources, logits, firsts = [null, *sources], [null_logits, *logits], [number, *firsts]
                args = (site.grad_out, sources, logits, firsts, number, lse, site.gate)
                node = self.write.call(mhar.coupling_from_sources.default, args, site.backward)
                self.couplings[number] = self.write.part(node, 0)
                if "gate" in site.parameter_grads:
                    self.write.replace(site.parameter_grads["gate"], self.write.part(node, 1))
            if number in self.nulls and {"query", "key_weight", "null_source"} & site.parameter_grads.keys():
                self.pull_null(number, site)

    def pull_null(self, number: int, site: Site) -> None:
        null, logits, rstd = self.nulls[number]
        assert site.backward is not None
        folded, base = self.folded_of(self.family.window_of(number), site.backward)
        args = ([null], [rstd], [logits], [number - base], *self.arrived([number], base), folded, [], [True])
        node = self.write.call(mhar.pull.default, args, site.backward)
        self.partials.append((self.write.part(node, 1), [number]))
        if "null_source" in site.parameter_grads:
            grad, wanted = self.write.part(node, 0, 0), site.parameter_grads["null_source"]
            dtype = wanted.meta["val"].dtype
            if grad.meta["val"].dtype != dtype:
                grad = self.write.call(torch.ops.prims.convert_element_type.default, (grad, dtype), site.backward)
            self.write.replace(wanted, grad)

    def arrived(self, sites: list[int], base: int) -> tuple[Any, ...]:
        """What pulls read of their sites: numbers from a window's first on, gradients, log-sum-exps, S and gates."""
        of = self.family.sites
        return (
            [site - base for site in sites],
            [of[site].grad_out for site in sites],
            [self.mixes[site][1] for site in sites],
            [self.couplings[site] for site in sites],
            [of[site].gate for site in sites],
        )

    def pull(self, pull: Pull) -> None:
        runs = [total.run for total in pull.sums]
        scored = [] if self.family.scored_twice else [self.scored(run, pull.sites[0]) for run in runs]
        carried = [self.made[before, total] for total, before in zip(pull.sums, pull.carried, strict=False)]
        anchor = self.family.sites[pull.sites[-1]].backward
        assert anchor is not None
        with self.graph.inserting_before(anchor):
            folded, base = self.folded_of(self.family.window_of(pull.sites[0]), anchor)
            rstds = [self.rstds[run] for run in runs]
            if self.family.scored_twice:
                scored, rstds = self.score_again(runs, pull, anchor)
            args = (
                [run.source for run in runs],
                rstds,
                [logits for logits, _ in scored],
                [first - base for _, first in scored],
                *self.arrived(pull.sites, base),
                folded,
                carried,
                pull.wide,
            )
            node = self.write.call(mhar.pull.default, args, anchor)
            self.partials.append((self.write.part(node, 1), pull.sites))
            for n, (total, last) in enumerate(zip(pull.sums, pull.last, strict=True)):
                grads = [grad for _, grad in total.entries if grad is not None]
                if not grads:
                    if not last:
                        self.made[pull, total] = self.write.part(node, 0, n)
                    continue
                self.made[pull, total] = self.write.part(node, 0, n)
                if last:
                    self.take_place(grads, self.made[pull, total])

    def score_again(self, runs: list[Run], pull: Pull, anchor: Node) -> tuple[list[tuple[Node, int]], list[Node]]:
        """Logits at a pull's sites and rstds, as the forward had them, from when the last site's gradient is there."""
        last, span = self.family.sites[pull.sites[-1]], pull.span
        nodes = [
            self.write.call(
                mhar.score.default,
                (run.source, self.folded, span.start, len(span), last.eps, last.grad_out),
                anchor,
            )
            for run in runs
        ]
        return [(self.write.part(node, 0), span.start) for node in nodes], [self.write.part(node, 1) for node in nodes]

    def take_place(self, grads: list[Node], pulled: Node) -> None:
        """Put the pulled gradient where the last of the gradients stood, and take the others out of their additions."""
        *others, last = grads
        for grad in others:
            _, entry = sum_of(grad)
            total = only_user(entry)
            assert total is not None
            one, other = total.args
            self.write.replace(total, other if one is entry else one)  # type: ignore[arg-type]
            self.graph.erase_node(total)
        self.write.replace(last, pulled)

    def unfold(self, window: range, last: int) -> None:
        """The gradients of a window's queries and key weights, once its pulls have been made; last: its last site."""
        of, sites = self.family.sites, self.family.sites[window.start : window.stop]
        names = ("query", "key_weight")
        wanted = [
            (n, name) for n in self.family.order if n in window for name in names if name in of[n].parameter_grads
        ]
        partials, self.partials = self.partials, []
        anchor = of[last].backward
        if not wanted or not partials or anchor is None:
            return
        args = (
            [partial for partial, _ in partials],
            [site - window.start for _, rows in partials for site in rows],
            [site.query for site in sites],
            [site.key_weight for site in sites],
        )
        with self.graph.inserting_before(anchor):
            node = self.write.call(mhar.unfold.default, args, anchor)
            for number, name in wanted:
                grad = self.write.part(node, name == "key_weight", number - window.start)
                self.write.replace(of[number].parameter_grads[name], grad)

    def erase(self) -> None:
        """Remove the routes and their backwards, of which nothing is read any more."""
        for site in reversed(self.family.sites):
            for node in (site.backward, site.node):
                if node is not None:
                    erase_with_users(self.graph, node)


def last_part(node: Node) -> Node:
    """The node after which new ones may stand: the last of the getitems that follow a node at once."""
    while node.next.target is operator.getitem and node.next.args[0] is node:
        return node.next
    return node


def erase_with_users(graph: Graph, node: Node) -> None:
    """Erase a node and the parts and views taken from it, none of which anything else may read."""
    for user in list(node.users):
        if user.target is not operator.getitem and not shares_memory(user):
            raise RuntimeError(f"{user.name} still reads {node.name}")
        erase_with_users(graph, user)
    graph.erase_node(node)
