"""The code that Inductor would run on CUDA, generated without a GPU: launches, binaries, copies, buffers."""

import re

import pytest
import torch

pytest.importorskip("triton", reason="the kernels are written in Triton")

from mhar_compile import Decoder, route
from perf.codegen import modules

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
