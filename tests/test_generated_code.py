"""The code that Inductor would run on CUDA, generated without a GPU: launches, what they read, binaries, buffers."""

import functools
import itertools
import re
from collections import Counter
from unittest import mock

import pytest
import torch
from torch.utils.checkpoint import checkpoint

pytest.importorskip("triton", reason="the kernels are written in Triton")

from mhar_compile import Decoder, route
from mhar_compile.compiler import HOOK, LOWERING
from mhar_compile.lowering import lowered, model, schedule
from mhar_compile.lowering.report import Report
from mhar_compile.lowering.steps import runs_of
from perf.codegen import generator, modules
from perf.launches import calls, reads
from tests.windows import windows_that_free

OURS = (
    "score",
    "mix",
    "mix_norm",
    "norm_backward",
    "coupling",
    "pull",
    "query_gradient",
    "site_sums",
    "site_forward",
    "site_backward",
)
LAYERS = 3
SITES = 2 * LAYERS + 1


def ours(counted):
    return {name.removesuffix("_named"): times for name, times in counted.items() if name.endswith("_named")}


def decoder(residual, **overrides):
    with torch.device("meta"):
        return Decoder.from_preset("tiny", residual=residual, layers=LAYERS, **overrides).bfloat16()


def tokens(batch=2, length=64):
    return torch.zeros(batch, length, dtype=torch.long, device="meta")


class Chain(torch.nn.Module):
    """Sites one after another, each followed by a cheap function, all outputs read by all later sites."""

    def __init__(self, sites, width, heads):
        super().__init__()
        self.queries = torch.nn.ParameterList(
            torch.empty(heads, width // heads, device="meta") for _ in range(sites)
        )  # fmt: skip

    def forward(self, x):
        sources = [x]
        for query in self.queries:
            sources.append(torch.tanh(route(sources, query)))
        return sources[-1]


def planned(model, *inputs, **settings):
    """The plans that were carried out, and the forward and backward module."""
    plans = []
    with mock.patch.object(Report, "add", lambda _, plan: plans.append(plan)):
        return plans, modules(model, *inputs, **settings)


@pytest.fixture(scope="module")
def plans_and_modules():
    """By topology; and of a chain that is tiled and has more sources than a launch takes."""
    found = {
        residual: planned(decoder(residual), tokens(), rewrite="always") for residual in ("mhar", "block", "delta")
    }
    x = torch.empty(2, 64, 1280, dtype=torch.bfloat16, device="meta", requires_grad=True)
    return found | {"chain": planned(Chain(24, 1280, 8), x, tile=8)}


@pytest.fixture(scope="module")
def generated(plans_and_modules):
    """Forward and backward module by topology."""
    return {name: found for name, (_, found) in plans_and_modules.items()}


def forward_reads(family):
    """By source, how often the plan says that scores and mixes read it: at each site, or once in the site's tile."""
    found = {source: Counter(score=len(runs)) for source, runs in family.runs.items()}
    for number, site in enumerate(family.sites):
        tile = family.tile_of(number)
        for source in site.sources:
            found[source]["mix"] += tile is None or source not in tile.sources
    for tile in family.tiles:
        for source in tile.sources:
            found[source]["mix"] += 1
    return found


def backward_reads(family):
    """By source, how often the plan says that pulls, the queries' gradients and couplings read it."""
    found = {source: Counter() for source in family.runs}
    for pull in family.pulls:
        for total in pull.sums:
            launches = len(runs_of(pull.sites))  # one for every 16 sites that follow each other
            found[total.run.source].update(pull=launches, query_gradient=launches)
    for number in set(family.order) - family.from_output:
        for source in family.sites[number].sources:
            found[source]["coupling"] += 1
    return found


def patterns(by_source):
    """How many sources are read how often by what."""
    return Counter(tuple(sorted((+counts).items())) for counts in by_source.values())


# What makes the host wait for the device, or copies from one to the other: a CUDA graph holds nothing of the kind.
WAITS = re.compile(
    r"\.(cpu|item|tolist|cuda|numpy|pin_memory|synchronize|copy_)\(|empty_strided_cpu|device='?cpu|\.to\(|torch\.tensor\("
)


@pytest.mark.parametrize("residual", ["mhar", "block", "delta"])
def test_no_operator_remains(generated, residual):
    for module in generated[residual]:
        assert "mhar." not in module.body
        assert "torch.ops." not in module.body.replace("torch.ops.aten", ""), "what is left is aten's, as matmul is"
        assert module.mutated == ()


def test_code_can_be_recorded_as_cuda_graphs(generated):
    for module in itertools.chain.from_iterable(generated.values()):
        assert module.without_graphs is None
        assert WAITS.findall(module.body) == []
        assert "Runner(partitions=[])" in module.source, "it is one piece"


def test_reasons_not_to_record_are_found():
    """So that their absence means something."""

    def wait(x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    tags = [torch.Tag.cudagraph_unsafe]
    with torch.library._scoped_library("waiting", "FRAGMENT") as library, torch.no_grad():
        library.define("wait(Tensor x) -> Tensor", tags=tags)
        library.impl("wait", wait, "Meta")
        (module,) = modules(lambda x: torch.ops.waiting.wait(x) + 1, torch.empty(3, 64, device="meta"))
    assert "wait" in module.without_graphs
    assert WAITS.search("buf1 = buf0.item()")
    assert WAITS.search("torch.cuda.synchronize()")


@pytest.mark.parametrize("residual", ["mhar", "block", "delta"])
def test_launches(generated, residual):
    forward, backward = (ours(module.launches) for module in generated[residual])
    sources = {"mhar": SITES, "block": SITES, "delta": None}[residual]
    if residual == "delta":  # the first site reads a null source alone
        assert forward["mix_norm"] + forward["site_forward"] == SITES - 1
        assert backward["pull"] == backward["query_gradient"]
    else:
        assert forward == {"score": sources, "mix_norm": SITES}
        assert backward["pull"] <= backward["query_gradient"]
        assert backward["norm_backward"] == SITES
        assert backward["site_sums"] == 1, "all queries' gradients are summed at once"
    assert set(forward) | set(backward) <= set(OURS)


@pytest.mark.parametrize("residual", ["mhar", "block", "delta"])
def test_nothing_is_copied_for_the_kernels(generated, residual):
    """Every pointer of a launch is a buffer or a view of one, never the result of a copying kernel."""
    for module in generated[residual]:
        copies = [
            name for name in module.launches if re.fullmatch(r"triton_poi_fused_(clone|copy|view|expand|_)*", name)
        ]
        assert copies == []


ONE_NUMBER = r"triton_poi_fused_\d+\.run\(buf\d+, 1, "  # a kernel that writes a single number
NORMS = r"triton_(?:per|red)_fused_\w*rsqrt\w*"  # reductions of Inductor's that end in a reciprocal root


@pytest.mark.parametrize("residual", ["mhar", "block", "delta"])
def test_norms_behind_sites_are_done_along_with_them(generated, residual):
    """Those of queries and keys remain, and in delta mode those behind the first site and of the running sum."""
    forward, backward = generated[residual]
    found = sum(times for name, times in forward.launches.items() if re.fullmatch(NORMS, name))
    assert found == 2 * LAYERS + (2 if residual == "delta" else 0)
    assert sum(ours(forward.binaries).values()) + sum(ours(backward.binaries).values()) <= 12


def test_a_norm_along_with_its_site_saves_a_launch(generated, monkeypatch):
    monkeypatch.setattr(lowered, "norm_behind", lambda mix: None)
    apart, _ = modules(decoder("mhar"), tokens(), rewrite="always")
    assert ours(apart.launches)["mix"] == SITES
    assert apart.launches.total() - generated["mhar"][0].launches.total() == SITES


@pytest.mark.parametrize("residual", ["mhar", "block", "delta"])
def test_the_backward_of_a_norm_along_with_its_site(generated, monkeypatch, residual):
    """A launch and a sum in the place of two reductions, and of the coupling where that comes from the output.

    (In delta mode Inductor fuses the reductions of one norm with the embedding's backward.)
    """
    backward = generated[residual][1]
    monkeypatch.setattr(lowered, "gradient_behind", lambda node: None)
    _, apart = modules(decoder(residual), tokens(), rewrite="always")
    coupled = [call.arguments["coupled"] != -1 for call in calls(backward) if call.kernel == "norm_backward"]
    assert len(coupled) == SITES - (residual == "delta")
    assert {"mhar": SITES - 2, "block": 1, "delta": 0}[residual] <= sum(coupled) <= SITES * (residual != "delta")
    assert apart.launches.total() - backward.launches.total() == sum(coupled) - (residual == "delta")
    reductions = [
        sum(times for name, times in module.launches.items() if re.match("triton_(per|red)_fused__fused_rms", name))
        for module in (apart, backward)
    ]
    assert reductions[0] - reductions[1] == 2 * len(coupled)


def test_gates_are_read_where_they_lie(generated):
    """Gates in bfloat16 are no copies in float32, 16 of one number for each pull."""
    forward, backward = generated["delta"]
    pulls = [call.arguments for call in calls(backward) if call.kernel == "pull"]
    assert all(pull[f"gates_{n}"].startswith("primals") for pull in pulls for n in range(16))
    assert not re.search(ONE_NUMBER, forward.body), "nor is room made for a null source's root by filling it"


class HalfGated(torch.nn.Module):
    """Sites of which every other has a gate."""

    def __init__(self, width, heads):
        super().__init__()
        self.queries = torch.nn.ParameterList(torch.empty(heads, width // heads, device="meta") for _ in range(4))
        self.gates = torch.nn.ParameterList(torch.empty(1, device="meta") for _ in range(2))

    def forward(self, x):
        sources = [x]
        for n, query in enumerate(self.queries):
            sources.append(torch.tanh(route(sources, query, gate=None if n % 2 else self.gates[n // 2])))
        return sources[-1]


def test_what_fills_several_slots_of_a_launch_is_computed_once():
    """Sites without a gate have the gate 1."""
    x = torch.empty(2, 64, 64, device="meta", requires_grad=True)
    _, backward = modules(HalfGated(64, 4), x, rewrite="always")
    assert len(re.findall(ONE_NUMBER, backward.body)) <= ours(backward.launches)["pull"]


def test_buffers_are_reused(generated):
    for module in generated["mhar"]:
        assert module.body.count("# reuse") >= SITES


TOPOLOGIES = ["mhar", "block", "delta", "chain"]


@pytest.mark.parametrize("name", TOPOLOGIES)
def test_each_source_is_read_as_often_as_the_plan_says(plans_and_modules, name):
    """It is scored once, mixed at each site or tile, and pulled once from each site, in as many launches as planned."""
    (plan,), (forward, backward) = plans_and_modules[name]
    assert patterns(reads(forward)) == patterns(forward_reads(plan.family))
    assert patterns(reads(backward)) == patterns(backward_reads(plan.family))
    assert {counts["score"] for counts in reads(forward).values()} == {1}, "no topology leaves gaps between its sites"
    pairs = sum(len(site.sources) for site in plan.family.sites)
    pulled = [len(call.sources) * call.number("count") for call in calls(backward) if call.kernel == "pull"]
    assert sum(pulled) == pairs
    mixed = sum(counts["mix"] for counts in reads(forward).values())
    assert mixed < pairs if name == "chain" else mixed == pairs


@pytest.mark.parametrize("name", TOPOLOGIES)
def test_the_forward_moves_the_bytes_of_the_model(plans_and_modules, name):
    """The launches' bytes, by the model's formulas on what the launches are given, are those that it planned with."""
    (plan,), (forward, _) = plans_and_modules[name]
    shape, found, count, carried = plan.family.shape, [], 0, None
    for call in calls(forward):
        if call.kernel == "score" and call.sources:
            found.append(model.score(shape, call.number("sites")))
        if call.kernel not in ("mix", "mix_norm"):
            continue
        count += len(call.sources)
        carried = bool(call.number("carried")) if carried is None else carried
        if call.kernel == "mix" and not call.number("last"):
            continue  # of several launches for one step; the state between them is not in the model
        sites, extra, keep = (
            call.constants.get("SITES", 1),
            call.arguments["residual"] != -1,
            call.arguments["residue"] != -1,
        )
        tiled = sites > 1
        found.append(model.mix_tile(shape, count, sites) if tiled else model.mix(shape, count, extra, carried, keep))
        count, carried = 0, None
    assert Counter(found) == Counter(schedule.forward_after(plan.family))


@pytest.mark.parametrize("name", TOPOLOGIES)
def test_launchers_are_given_three_sizes_of_a_grid(generated, name):
    """Or the launch would fail: Inductor's launchers have a parameter for each."""
    for module in generated[name]:
        launched = calls(module)
        assert launched
        assert len(launched) == sum(ours(module.launches).values())
        assert all(all(size > 0 for size in call.grid) for call in launched)


def test_a_deep_chain_has_few_binaries():
    """As many as 73 sites, since binaries depend on the width, the rectangles' sizes and what is carried, not on N."""
    x = torch.empty(2, 1024, 1280, dtype=torch.bfloat16, device="meta", requires_grad=True)
    forward, backward = modules(Chain(24, 1280, 8), x)
    assert sum(ours(forward.binaries).values()) + sum(ours(backward.binaries).values()) <= 12
    assert ours(forward.launches)["score"] == 24


@pytest.mark.long
def test_73_sites_have_few_binaries():
    x = torch.empty(2, 1024, 1280, dtype=torch.bfloat16, device="meta", requires_grad=True)
    forward, backward = modules(Chain(73, 1280, 8), x)
    assert sum(ours(forward.binaries).values()) + sum(ours(backward.binaries).values()) <= 12
    assert "mhar." not in forward.body + backward.body


def test_windows_save_parts_of_logits_that_are_memory_of_their_own():
    """Inductor would return the rows where they lie in place of their clone, and so keep all of the logits alive."""
    model = decoder("block")
    for block in model.blocks:
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
    with windows_that_free():
        forward, backward = modules(model, tokens(), rewrite="always", window=2, tile=1)
    scores = [call for call in calls(forward) if call.kernel == "score" and call.number("sites") > 2]
    whole = {call.arguments["logits"] for call in scores}
    (returned,) = re.findall(r"return \((.*)\)", forward.body)
    assert whole
    assert not whole & set(re.findall(r"buf\d+", returned))
    assert ours(backward.launches)["site_sums"] == (SITES + 1) // 2, "one for each window"


@pytest.mark.filterwarnings(r"ignore:\s*Online softmax is disabled:UserWarning")  # torch 2.11, of its own decomposition
def test_batch_and_length_may_be_symbols():
    forward, backward = modules(decoder("delta"), tokens(), dynamic=True, rewrite="always")
    for module in (forward, backward):
        assert "mhar." not in module.body
        calls = re.findall(r"(?:mix_norm|coupling|pull)_named_\d+\.run\((.*), stream=", module.body)
        assert calls
        assert all(re.search(r"\bs\d+\b", call) for call in calls), "grids and token counts come from the sizes"


@pytest.mark.parametrize("residual", ["mhar", "block", "delta"])
def test_inference_graphs_are_lowered(generated, residual):
    """There the norm is all that reads a site's output, which is not written; in training its backward does too."""
    with torch.no_grad():
        (module,) = modules(decoder(residual), tokens(), rewrite="always")
    assert module.kind == "inference"
    assert module.without_graphs is None
    assert WAITS.findall(module.body) == []
    launched = ours(module.launches)
    assert launched["score"] >= launched["mix_norm"] > 0
    if residual == "delta":  # the first site reads a null source alone, the last block's sum has no site
        assert launched["mix_norm"] + launched["site_forward"] == SITES - 1
    else:
        assert launched["score"] == launched["mix_norm"] == SITES
    for found, written in ((module, False), (generated[residual][0], True)):
        assert {call.arguments["out"] != -1 for call in calls(found) if call.kernel == "mix_norm"} == {written}


def test_without_our_options_operators_stay():
    found = []
    torch._dynamo.reset()
    options = {HOOK: lambda graph: None, LOWERING: None}
    with torch.no_grad(), torch._inductor.config.patch(compile_threads=1, fx_graph_cache=False):
        torch.compile(Chain(2, 64, 2), backend=generator(found, options))(torch.empty(3, 64, device="meta"))
    torch._dynamo.reset()
    assert found[0].body.count("torch.ops.mhar.route.default(") == 2
    assert ours(found[0].launches) == {}


class TwoStreams(torch.nn.Module):
    """The same queries on two streams whose norms have different eps: two families with equal folded queries."""

    def __init__(self, width, heads):
        super().__init__()
        self.queries = torch.nn.ParameterList(
            torch.empty(heads, width // heads, device="meta") for _ in range(3)
        )  # fmt: skip

    def forward(self, x):
        ends = []
        for eps in (1e-6, 1e-5):
            sources = [x]
            for query in self.queries:
                sources.append(torch.tanh(route(sources, query, eps=eps)))
            ends.append(sources[-1])
        return ends[0] + ends[1]


@pytest.mark.parametrize("width", [64, 1160])
def test_families_do_not_share_the_gradients_of_queries(width):
    """Nor are these sums, which kernels take for contiguous, padded: at d 1160 Inductor would."""
    x = torch.empty(2, 64, width, device="meta", requires_grad=True)
    _, backward = modules(TwoStreams(width, 8), x, rewrite="always")
    shares = re.findall(r"empty_strided_cuda\(\(32, 3, 8, (\d+)\), \((.*?)\), torch.float32\)", backward.body)
    reused = re.findall(r"(buf\d+) = buf\d+; del buf\d+  # reuse", backward.body)
    sums = re.findall(r"site_sums_named_\d+\.run\((\w+),", backward.body)
    assert len(set(sums)) == 2
    assert len(shares) == len(set(sums) - set(reused))
    head_width = width // 8
    assert all(strides == f"{3 * width}, {width}, {head_width}, 1" for _, strides in shares)
    copies = [name for name in backward.launches if "clone" in name or ("copy" in name and "tanh" not in name)]
    assert copies == []


def test_passes_that_ask_for_inference_are_told(monkeypatch):
    from mhar_compile.lowering.passes import LoweringPass
    from mhar_compile.lowering.versions import CustomGraphPass, InferenceAwarePass

    if InferenceAwarePass is CustomGraphPass:
        pytest.skip("torch has no passes that are told of inference before 2.13")
    told = []

    class Mine(InferenceAwarePass):
        def __call__(self, graph, is_inference):
            told.append(is_inference)

        def uuid(self):
            return "mine"

    LoweringPass("key", {}, Mine())(torch.fx.Graph(), True)
    assert told == [True]
    assert isinstance(LoweringPass("key", {}), InferenceAwarePass)


@pytest.mark.parametrize("option", ["bucket_all_gathers_fx", "bucket_all_reduces_fx"])
def test_operators_stay_where_graphs_are_reordered(option):
    with torch._inductor.config.patch({option: "all"}), torch.no_grad():
        (module,) = modules(Chain(2, 64, 2), torch.empty(3, 64, device="meta"), rewrite="never")
    assert module.body.count("torch.ops.mhar.route.default(") == 2
