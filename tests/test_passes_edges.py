"""Graphs of every kind that the passes may meet: rewritten or left alone, the numbers stay those of eager float64."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import Graph
from torch.utils.checkpoint import CheckpointPolicy, checkpoint

from mhar_compile import Router, route
from mhar_compile.compiler import joint_pass
from mhar_compile.lowering import planning
from mhar_compile.lowering.report import Report
from mhar_compile.lowering.tracing import Trace, tracer

WIDTH, HEADS, SITES = 8, 2, 4
Net = Callable[["Chain", Tensor], Any]


class Chain(nn.Module):
    """Parameters for a few sites and sublayers; ``net`` says how they are put together."""

    def __init__(self, net: Net, **router: Any) -> None:
        super().__init__()
        self.net = net
        self.routers = nn.ModuleList(Router(WIDTH, HEADS, **router) for _ in range(SITES))
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(SITES))
        for parameter in self.parameters():
            nn.init.normal_(parameter)
        self.double()

    def forward(self, x: Tensor) -> Any:
        return self.net(self, x)


def call(model: Callable[..., Any], leaves: list[Tensor], x: Tensor) -> list[Tensor]:
    """Outputs, and the gradients of the leaves that need one; a leaf without a gradient counts as zero."""
    outputs = model(x)
    outputs = list(outputs) if isinstance(outputs, (tuple, list)) else [outputs]
    needed = [leaf for leaf in leaves if leaf.requires_grad]
    if not torch.is_grad_enabled():
        return outputs
    loss = sum((out * out.detach().cos()).sum() for out in outputs if out.requires_grad)
    grads = torch.autograd.grad(loss, needed, allow_unused=True)
    return outputs + [torch.zeros_like(p) if g is None else g for p, g in zip(needed, grads, strict=True)]


def check(model: Chain, *, x: Tensor | None = None, **settings: Any) -> tuple[Report, Trace]:
    """Passed = eager, in float64, and twice the same bits; returns what the passes say and the graphs."""
    x = torch.randn(2, 3, WIDTH, dtype=torch.float64) if x is None else x
    leaves = [*model.parameters(), x]
    expected = call(model, leaves, x)
    found = Trace()
    torch._dynamo.reset()
    passes = joint_pass(reports=found.reports.append, **{"rewrite": "always", **settings})
    compiled = torch.compile(model, backend=tracer(found, passes), fullgraph=True)
    got = call(compiled, leaves, x)
    for actual, wanted in zip(got, expected, strict=True):
        torch.testing.assert_close(actual, wanted, rtol=1e-9, atol=1e-9)
    assert all(torch.equal(a, b) for a, b in zip(got, call(compiled, leaves, x), strict=True))
    return found.report, found


def count(graphs: list[Graph]) -> Counter[str]:
    return Counter(str(node.target) for graph in graphs for node in graph.nodes if node.op == "call_function")


def sublayers(self: Chain, x: Tensor, read: Callable[[int, list[Tensor]], Tensor]) -> list[Tensor]:
    sources = [x]
    for n, layer in enumerate(self.layers):
        sources.append(layer(read(n, sources)).tanh())
    return sources


def full(self: Chain, x: Tensor) -> Tensor:
    return sublayers(self, x, lambda n, sources: self.routers[n](sources))[-1]


@pytest.mark.parametrize("tile", [1, 2, 8])
@pytest.mark.parametrize("window", [None, 1, 2])
@pytest.mark.parametrize("options", [{}, {"null_source": True}], ids=str)
def test_full(tile: int, window: int | None, options: dict[str, bool]) -> None:
    report, found = check(Chain(full, **options), tile=tile, window=window)
    nodes = count([graph for pair in found.after for graph in pair])
    assert report.sites == report.sources == report.scored == report.pulled == SITES
    assert report.adds_removed == 3
    assert not report.left_alone
    assert not nodes["mhar.route.default"]
    assert not nodes["mhar.route_backward.default"]
    assert not nodes["aten.add.Tensor"]
    assert count([graph for pair in found.before for graph in pair])["aten.add.Tensor"] == 3


def delta(self: Chain, x: Tensor) -> Tensor:
    hidden, blocks = x, [x]
    for n, layer in enumerate(self.layers):
        out = layer(self.routers[n](blocks, residual=hidden)).tanh()
        hidden = hidden + out
        blocks = [*blocks[:-1], blocks[-1] + out] if n % 2 else [*blocks, out]
    return hidden


@pytest.mark.parametrize("options", [{}, {"gate": True}, {"null_source": True, "gate": True}], ids=str)
@pytest.mark.parametrize("window", [None, 2])
def test_delta(options: dict[str, bool], window: int | None) -> None:
    report, found = check(Chain(delta, **options), window=window)
    assert report.sites == 4
    assert not report.left_alone
    assert not count([found.after[0][1]])["mhar.route_backward.default"]


def used_elsewhere(self: Chain, x: Tensor) -> Tensor:
    sources = sublayers(self, x, lambda n, sources: self.routers[n](sources) + sources[0].sin())
    return sources[-1] + sources[1].exp()


def test_a_source_used_elsewhere_keeps_one_add_for_each_use() -> None:
    report, found = check(Chain(used_elsewhere), x=torch.randn(2, 3, WIDTH, dtype=torch.float64, requires_grad=True))
    # x: four sines, which autograd adds up among themselves, and the pull; sources 1: exp and the pull
    assert report.pulled == 4
    assert report.adds_removed == 6
    before, after = (count([graph])["aten.add.Tensor"] for graph in (found.before[0][1], found.after[0][1]))
    assert before - after == 6
    assert after == 5


def returned(self: Chain, x: Tensor) -> tuple[Tensor, ...]:
    return tuple(sublayers(self, x, lambda n, sources: self.routers[n](sources)))


def same_shape_views(self: Chain, x: Tensor) -> Tensor:
    return sublayers(self, x, lambda n, sources: self.routers[n]([s.view(s.shape) for s in sources]))[-1]


def flattened(self: Chain, x: Tensor) -> Tensor:
    def read(n: int, sources: list[Tensor]) -> Tensor:
        return self.routers[n]([s.flatten(0, 1) for s in sources]).view(x.shape)

    return sublayers(self, x, read)[-1]


def listed_twice(self: Chain, x: Tensor) -> Tensor:
    return sublayers(self, x, lambda n, sources: self.routers[n]([*sources, sources[0]]))[-1]


def shared_query(self: Chain, x: Tensor) -> Tensor:
    return sublayers(self, x, lambda n, sources: self.routers[0](sources))[-1]


def two_readers(self: Chain, x: Tensor) -> Tensor:
    """Every sublayer reads two sites over the same sources, as grouped queries, keys and values do."""

    def read(n: int, sources: list[Tensor]) -> Tensor:
        return self.routers[n](sources) * route(sources, self.routers[n].query.flip(0), eps=1e-6)

    return sublayers(self, x, read)[-1]


def families(self: Chain, x: Tensor) -> Tensor:
    """Sites of several head counts and eps over the same sources."""

    def read(n: int, sources: list[Tensor]) -> Tensor:
        wide = route(sources, self.routers[n].query.view(1, WIDTH), eps=1e-5)
        return self.routers[n](sources) + wide

    return sublayers(self, x, read)[-1]


def towers(self: Chain, x: Tensor) -> Tensor:
    left, right = [x], [x.cos()]
    for n in range(0, SITES, 2):
        left.append(self.layers[n](self.routers[n](left)))
        right.append(self.layers[n + 1](self.routers[n + 1](right)))
    return left[-1] * right[-1]


def skips(self: Chain, x: Tensor) -> Tensor:
    """Each site reads the first source and the last: the first is read by all, the others by one."""
    return sublayers(self, x, lambda n, s: self.routers[n](s if len(s) == 1 else [s[0], s[-1]]))[-1]


def slices(self: Chain, x: Tensor) -> Tensor:
    """Sources that are slices of a wider tensor, strided rows."""
    wide = torch.cat([x, x.sin(), x.cos()], -1)
    return sublayers(self, x, lambda n, s: self.routers[n]([*s, wide[..., WIDTH : 2 * WIDTH]]))[-1]


def chained(self: Chain, x: Tensor, region: Callable[..., Tensor]) -> Tensor:
    sources = [x]
    for n, router in enumerate(self.routers):
        heads, residual = 1 + n % 2, sources[-1] if n == 3 else None
        site = functools.partial(route, query=router.query.flatten(), heads=heads, residual=residual)
        sources.append(region(site, list(sources)))
    return sources[-1].sin()


@pytest.mark.parametrize("rewrite", ["always", "never"])
@pytest.mark.parametrize("checkpointed", [False, True])
def test_outputs_that_are_sources_as_they_are(checkpointed: bool, rewrite: str) -> None:
    """Of sites of the same family and of another, in the same checkpointed region and in another."""
    region = functools.partial(checkpoint, use_reentrant=False) if checkpointed else lambda site, x: site(x)
    model = Chain(lambda self, x: chained(self, x, region))
    x = torch.randn(2, 3, WIDTH, dtype=torch.float64, requires_grad=True)
    report, found = check(model, x=x, rewrite=rewrite)
    nodes = count([graph for pair in found.after for graph in pair])
    assert report.left_alone == ([] if rewrite == "always" else report.left_alone)
    assert bool(nodes["mhar.route.default"]) == (rewrite == "never")


def test_a_result_may_be_written_into() -> None:
    """The backward holds no output for S that is the caller's."""
    model = Chain(lambda self, x: self.routers[1]([x, *sublayers(self, x, lambda n, s: self.routers[0](s))]))
    leaves, found = list(model.parameters()), Trace()
    torch._dynamo.reset()
    compiled = torch.compile(model, backend=tracer(found, joint_pass(rewrite="always")), fullgraph=True)
    x = torch.randn(2, 3, WIDTH, dtype=torch.float64)
    expected, got = (call(lambda x, f=function: f(x).mul_(2), leaves, x) for function in (model, compiled))
    torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-9)


def twice(y: Tensor) -> Tensor:
    return torch.cat([y, y], 1).chunk(2, 1)[0]


@pytest.mark.parametrize(
    ("within", "outside"),
    [(torch.t, torch.t), (twice, torch.clone), (torch.clone, torch.t), (torch.clone, torch.neg)],
    ids=["transposes", "chunk", "transposed outside", "negated outside"],
)
def test_no_region_is_computed_again_for_what_sites_read(
    within: Callable[[Tensor], Tensor], outside: Callable[[Tensor], Tensor]
) -> None:
    """Through whatever views the sources come from checkpointed regions."""

    def net(self: Chain, x: Tensor) -> Tensor:
        def region(n: int, *sources: Tensor) -> Tensor:
            return within(self.layers[n](self.routers[n](sources)))

        sources = [x]
        for n in range(SITES):
            sources.append(outside(checkpoint(region, n, *sources, use_reentrant=False)))
        return route(sources, self.routers[0].query)

    _, found = check(Chain(net), x=torch.randn(WIDTH, WIDTH, dtype=torch.float64))
    backward = count([found.after[0][1]])
    assert backward["aten.addmm.default"] <= 1  # the last region's
    assert backward["aten.mm.default"] == 2 * SITES


def test_sizes_of_recomputed_tensors_have_nothing_computed_again() -> None:
    """Here views of the same shape are the last that read these sizes in the forward, and sites look through them."""

    def net(self: Chain, x: Tensor) -> Tensor:
        def region(n: int, *sources: Tensor) -> Tensor:
            return self.layers[n](self.routers[n]([s.view(s.shape) for s in sources])).tanh()

        sources = [torch.cat([x, x.cos()], 1)]
        for n in range(SITES):
            sources.append(checkpoint(region, n, *sources, use_reentrant=False))
        return sources[-1]

    x = torch.randn(2, 3, WIDTH, dtype=torch.float64, requires_grad=True)
    for dim in (0, 1):
        torch._dynamo.mark_dynamic(x, dim)
    report, found = check(Chain(net), x=x)
    assert report.pulled == SITES
    plain, passed = (count(list(pair)) for pair in (found.before[0], found.after[0]))
    assert passed["aten.addmm.default"] <= plain["aten.addmm.default"]
    assert passed["aten.mm.default"] <= plain["aten.mm.default"]


@pytest.mark.parametrize("within", [torch.clone, twice, lambda y: y.split(WIDTH, -1)[0]], ids=["", "chunk", "split"])
@pytest.mark.parametrize("budget", [0.2, 0.5])
def test_a_memory_budget_over_checkpointed_regions(budget: float, within: Callable[[Tensor], Tensor]) -> None:
    """What must be saved are tensors: a tuple of several results could not be handed to the backward."""

    def net(self: Chain, x: Tensor) -> Tensor:
        def region(*sources: Tensor) -> tuple[Tensor, ...]:
            new = list(sources)
            for router, layer in zip(self.routers, self.layers, strict=True):
                new.append(within(layer(router(new)).tanh()))
            return tuple(new)

        sources: tuple[Tensor, ...] = (x,)
        for _ in range(3):
            sources = checkpoint(region, *sources, use_reentrant=False)
        return sources[-1]

    with torch._functorch.config.patch(activation_memory_budget=budget, is_non_builtin_to_include=True):
        report, found = check(Chain(net, null_source=True), x=torch.randn(2, 3, WIDTH).double().requires_grad_())
    assert report.pulled == 3 * SITES
    values = [node.meta["val"] for node in found.after[0][1].find_nodes(op="placeholder")]
    assert not any(isinstance(value, (tuple, list)) for value in values)


class Turned(torch.autograd.Function):
    """Its backward routes, with a query taken from the gradient that arrives."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        query = grad[0, 0].view(HEADS, -1)
        return torch.ops.mhar.route([x, x.cos()], query, None, None, None, None, 1e-6)[0]


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # Dynamo does, of a Function
@pytest.mark.parametrize(
    "net", [lambda _, x: Turned.apply(x), lambda self, x: Turned.apply(full(self, x))], ids=["alone", "behind sites"]
)
def test_a_query_taken_from_the_gradient_of_a_result(net: Net) -> None:
    x = torch.randn(2, 3, WIDTH, dtype=torch.float64, requires_grad=True)
    report, _ = check(Chain(net), x=x)
    assert len(report.left_alone) == 1
    assert report.left_alone[0].endswith("its query or key weight depends on a gradient")


class Mixed(torch.autograd.Function):
    """Its backward adds a parameter's gradient to an activation's."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return query.clone(), y.clone()

    @staticmethod
    def backward(ctx: Any, of_query: Tensor, of_y: Tensor) -> tuple[Tensor, Tensor]:
        return of_query, of_y + of_query.sum()


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # Dynamo does, of a Function
def test_a_gradient_of_a_query_that_an_earlier_site_waits_for() -> None:
    def net(self: Chain, x: Tensor) -> Tensor:
        query, y = Mixed.apply(self.routers[1].query, route([x, x.sin()], self.routers[0].query).tanh())
        return route([x, y, route([x, y], query).tanh()], self.routers[2].query)

    report, _ = check(Chain(net))
    assert report.left_alone == [
        "every site of the graph: the gradient of a query or key weight is part of a source's or an output's"
    ]


@pytest.mark.parametrize(("use", "width"), [("null_source", WIDTH), ("key_weight", WIDTH), ("gate", 1)])
def test_outputs_that_are_parameters_of_later_sites(use: str, width: int) -> None:
    """Of sites over vectors: what takes the place of an output has its gradient too."""

    def net(self: Chain, x: Tensor) -> Tensor:
        given: dict[str, Tensor] = {}
        for router in self.routers:
            given = {use: route([x, x.cos()], router.query.flatten()[:width], heads=1, residual=x, **given)}
        return given[use]

    report, _ = check(Chain(net), x=torch.randn(width, dtype=torch.float64, requires_grad=True))
    assert report.pulled


PARTS: dict[str, Callable[[Tensor], Tensor]] = {
    "slice": lambda out: out[:, -1:],
    "select": lambda out: out[:, -1],
    "split": lambda out: out.split(1, dim=1)[1],
    "transpose": lambda out: out.transpose(0, 1),
    "as_strided": lambda out: out.as_strided((2, 2), (1, 2)),
}


@pytest.mark.parametrize("part", PARTS.values(), ids=PARTS.keys())
def test_a_part_of_an_output_may_be_written_into(part: Callable[[Tensor], Tensor]) -> None:
    def net(self: Chain, x: Tensor) -> tuple[Tensor, Tensor]:
        sources = [x]
        for router in self.routers:
            out = router(sources)
            sources.append(out + x.sin())  # whose gradient needs no output
        return sources[-1].pow(3).sum(), part(out)

    model = Chain(net)
    leaves = [parameter for router in model.routers for parameter in router.parameters()]
    x = torch.randn(2, 3, WIDTH, dtype=torch.float64)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend=tracer(Trace(), joint_pass(rewrite="always")), fullgraph=True)
    found = []
    for function in (model, compiled):
        loss, mine = function(x)
        with torch.no_grad():
            mine.mul_(3)
        found.append(torch.autograd.grad(loss, leaves))
    torch.testing.assert_close(found[1], found[0], rtol=1e-9, atol=1e-9)


def test_sites_without_tokens_are_left_alone() -> None:
    report, _ = check(Chain(full), x=torch.randn(0, WIDTH, dtype=torch.float64))
    assert [reason.split(": ")[1] for reason in report.left_alone] == ["its sources have no tokens"] * SITES


def dead_site(self: Chain, x: Tensor) -> Tensor:
    def read(n: int, sources: list[Tensor]) -> Tensor:
        route(sources, self.routers[n].query.cos())
        return self.routers[n](sources)

    return sublayers(self, x, read)[-1]


def undifferentiated_site(self: Chain, x: Tensor) -> tuple[Tensor, Tensor]:
    """One site's output is returned without a gradient."""
    sources = sublayers(self, x, lambda n, sources: self.routers[n](sources))
    return sources[-1], route(sources, self.routers[0].query).detach()


@pytest.mark.parametrize("needs_grad", [False, True], ids=["constant input", "input with gradient"])
@pytest.mark.parametrize(
    "net",
    [
        returned,
        same_shape_views,
        flattened,
        listed_twice,
        shared_query,
        two_readers,
        families,
        towers,
        skips,
        slices,
        dead_site,
        undifferentiated_site,
    ],
    ids=lambda net: net.__name__,
)
def test_right_and_rewritten(net: Net, needs_grad: bool) -> None:
    x = torch.randn(2, 3, WIDTH, dtype=torch.float64, requires_grad=needs_grad)
    report, found = check(Chain(net), x=x)
    assert report.pulled
    assert not report.left_alone
    assert not count([graph for pair in found.after for graph in pair])["mhar.route_backward.default"]


@pytest.mark.parametrize("frozen", ["query", "key_weight", "layers", "routers"])
def test_frozen(frozen: str) -> None:
    model = Chain(full)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(frozen not in name)
    report, found = check(model)
    assert report.pulled
    assert not report.left_alone
    assert not count([found.after[0][1]])["mhar.route_backward.default"]


def activation_query(self: Chain, x: Tensor) -> Tensor:
    def read(n: int, sources: list[Tensor]) -> Tensor:
        query = sources[-1].mean((0, 1)).view(HEADS, -1) if n == 2 else self.routers[n].query
        return route(sources, query, key_weight=self.routers[n].key_weight)

    return sublayers(self, x, read)[-1]


def random_query(self: Chain, x: Tensor) -> Tensor:
    def read(n: int, sources: list[Tensor]) -> Tensor:
        query = self.routers[n].query
        return route(sources, query + torch.rand_like(query).clamp(3, 3) if n == 2 else query)

    return sublayers(self, x, read)[-1]


def weights_read(self: Chain, x: Tensor) -> tuple[Tensor, Tensor]:
    sources = sublayers(self, x, lambda n, sources: self.routers[n](sources))
    out, weights = route(sources, self.routers[0].query, return_weights=True)
    return out, weights


def null_alone(self: Chain, x: Tensor) -> Tensor:
    def read(n: int, s: list[Tensor]) -> Tensor:
        return self.routers[n]([] if n == 0 else s, residual=s[-1])

    return sublayers(self, x, read)[-1]


@pytest.mark.parametrize(
    ("net", "options", "reason"),
    [
        (activation_query, {}, "its query or key weight depends on an activation"),
        (random_query, {}, "depends on randomness, or on an operation that the passes do not move"),
        (weights_read, {}, "its weights are read"),
        (null_alone, {"null_source": True}, "it has no sources but the null source"),
    ],
)
def test_right_and_left_alone(net: Net, options: dict[str, bool], reason: str) -> None:
    report, found = check(Chain(net, **options))
    (line,) = report.left_alone
    assert line.endswith(reason)
    assert report.pulled
    assert count([graph for pair in found.after for graph in pair])["mhar.route.default"] == 1


def query_from_parameters(self: Chain, x: Tensor) -> Tensor:
    """Queries that are computed, but from parameters alone; the computation stands after the first sources."""

    def read(n: int, sources: list[Tensor]) -> Tensor:
        query = (self.routers[n].query @ self.layers[n].weight[:4, :4]).tanh()
        return route(sources, query, key_weight=self.routers[n].key_weight.exp())

    return sublayers(self, x, read)[-1]


def test_a_query_computed_from_parameters_moves_up() -> None:
    report, _ = check(Chain(query_from_parameters))
    assert report.pulled == SITES
    assert not report.left_alone


@pytest.mark.parametrize("net", [full, delta, listed_twice, dead_site], ids=lambda net: net.__name__)
def test_inference(net: Net) -> None:
    with torch.no_grad():
        report, found = check(Chain(net, null_source=True, gate=net is delta), tile=2)
    assert not found.before
    assert not report.left_alone
    assert not count(found.inference)["mhar.route.default"]


def test_tags_of_checkpointing_in_a_graph_of_inference() -> None:
    """Torch 2.11 leaves them there; without a backward nothing is pinned."""

    def tag(graph: Graph) -> None:
        for n, node in enumerate(graph.nodes):
            if node.op == "call_function":
                node.meta.update(recompute=CheckpointPolicy.PREFER_RECOMPUTE, ac_graph_id=n)

    with torch.no_grad():
        report, _ = check(Chain(full), before=tag)
    assert not report.left_alone
    assert report.scored == SITES
    assert report.pinned == 0


def test_never_leaves_the_graph_as_it_is() -> None:
    report, found = check(Chain(full), rewrite="never")
    assert report.bytes_before == report.bytes_after
    assert len(report.left_alone) == SITES
    assert count([found.after[0][1]])["mhar.route_backward.default"] == SITES - 1 + 1


def test_one_block_with_two_sites_is_left_alone_where_nothing_is_gained() -> None:
    model = Chain(lambda self, x: sublayers(self, x, lambda n, s: self.routers[n](s) if n < 2 else s[-1])[-1])
    report, _ = check(model, rewrite="auto")
    assert report.left_alone == [f"{name}: the model predicts no gain" for name in ("route", "route_1")]


def test_tiles_of_sites_that_keep_their_logits_and_of_sites_that_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tile reads logits of all its sites, of which the first ones' are saved in a part."""
    switch_of, outputs_of = planning.switch_of, planning.outputs_of
    monkeypatch.setattr(planning, "switch_of", lambda family: switch_of(family)[-1:])
    monkeypatch.setattr(planning, "outputs_of", lambda family: [set(sorted(outputs_of(family)[0])[3:])])
    torch.manual_seed(0)
    leaves = [torch.randn(3, 4), *torch.randn(10, 2, 2)]
    leaves = [leaf.double().requires_grad_() for leaf in leaves]

    def model(x: Tensor, *queries: Tensor) -> Tensor:
        sources = [x]
        for query in queries:
            sources.append(route(sources, query).sin())
        return sources[-1].exp()

    found = Trace()
    torch._dynamo.reset()
    passes = joint_pass(reports=found.reports.append, rewrite="always", tile=4)
    compiled = torch.compile(model, backend=tracer(found, passes), fullgraph=True)
    grads, expected = (torch.autograd.grad(f(*leaves).sum(), leaves) for f in (compiled, model))
    for one, other in zip(grads, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)
    nodes = [count([graph]) for graph in found.after[0]]
    assert nodes[0]["mhar.mix_tile.default"] == 2
    assert nodes[0]["mhar.part.default"]
    assert nodes[1]["mhar.score.default"] >= 10


def constant_gradient(self: Chain, x: Tensor) -> Tensor:
    return sublayers(self, x, lambda n, sources: self.routers[n](sources).sign() + sources[-1])[-1]


def test_a_gradient_that_does_not_depend_on_the_loss() -> None:
    """Its route_backward is part of the forward."""
    report, _ = check(Chain(constant_gradient))
    assert report.sites == SITES
    assert not report.left_alone
