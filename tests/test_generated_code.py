"""The code that Inductor would run on CUDA, generated without a GPU: launches, binaries, copies, buffers."""

import functools
import re

import pytest
import torch
from torch.utils.checkpoint import checkpoint

pytest.importorskip("triton", reason="the kernels are written in Triton")

from mhar_compile import Decoder, route
from mhar_compile.compiler import HOOK, LOWERING
from perf.codegen import generator, modules
from tests.windows import windows_that_free

OURS = ("score", "mix", "coupling", "pull", "query_gradient", "site_sums", "site_forward", "site_backward")
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


@pytest.fixture(scope="module")
def generated():
    """Forward and backward module by topology, and how many bytes of source the plain decoder's have."""
    return {residual: modules(decoder(residual), tokens(), rewrite="always") for residual in ("mhar", "block", "delta")}


@pytest.mark.parametrize("residual", ["mhar", "block", "delta"])
def test_no_operator_remains(generated, residual):
    for module in generated[residual]:
        assert "mhar." not in module.body
        assert "torch.ops." not in module.body.replace("torch.ops.aten", ""), "what is left is aten's, as matmul is"
        assert module.without_graphs is None
        assert module.mutated == ()


@pytest.mark.parametrize("residual", ["mhar", "block", "delta"])
def test_launches(generated, residual):
    forward, backward = (ours(module.launches) for module in generated[residual])
    sources = {"mhar": SITES, "block": SITES, "delta": None}[residual]
    if residual == "delta":  # the first site reads a null source alone
        assert forward["mix"] + forward["site_forward"] == SITES - 1
        assert backward["pull"] == backward["query_gradient"]
    else:
        assert forward == {"score": sources, "mix": SITES}
        assert backward["pull"] <= backward["query_gradient"]
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


def test_buffers_are_reused(generated):
    for module in generated["mhar"]:
        assert module.body.count("# reuse") >= SITES


def test_a_deep_chain_has_few_binaries():
    """As many as 73 sites, since binaries depend on the width, the rectangles' sizes and what is carried, not on N."""
    x = torch.empty(2, 64, 1280, dtype=torch.bfloat16, device="meta", requires_grad=True)
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
    scores = [call.split(", ") for call in re.findall(r"score_named_\d+\.run\((.*), stream=", forward.body)]
    whole = {
        re.findall(r"buf\d+", call)[-2] for call in map(", ".join, scores) if int(call.split(", ")[-3]) > 2 * 2 + 3
    }
    (returned,) = re.findall(r"return \((.*)\)", forward.body)
    assert whole
    assert not whole & set(re.findall(r"buf\d+", returned))
    assert ours(backward.launches)["site_sums"] == (SITES + 1) // 2, "one for each window"


def test_batch_and_length_may_be_symbols():
    forward, backward = modules(decoder("delta"), tokens(), dynamic=True, rewrite="always")
    for module in (forward, backward):
        assert "mhar." not in module.body
        calls = re.findall(r"(?:mix|coupling|pull)_named_\d+\.run\((.*), stream=", module.body)
        assert calls
        assert all(re.search(r"\bs\d+\b", call) for call in calls), "grids and token counts come from the sizes"


def test_inference_graphs_are_lowered():
    with torch.no_grad():
        (module,) = modules(decoder("mhar"), tokens(), rewrite="always")
    assert module.kind == "inference"
    assert ours(module.launches) == {"score": SITES, "mix": SITES}


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
