"""CPU benchmarks: one routing site beside the compiled reference, and a compiled decoder step beside pre-norm.

Times on a shared CPU are only good for ratios within one run. `make perf` prints them.
"""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from mhar_compile import Decoder, route
from mhar_compile.ops import reference

TOKENS, WIDTH, HEADS, COUNT = 1024, 512, 8, 9


def reference_route(sources, query, key_weight):
    return reference(sources, query, key_weight=key_weight)[0]


def own_route(sources, query, key_weight):
    return route(sources, query, key_weight=key_weight)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["operator", "compiled-reference", "eager-reference"])
def test_site_forward_and_backward(benchmark, name, dtype):
    function = {
        "operator": own_route,
        "compiled-reference": torch.compile(reference_route, fullgraph=True),
        "eager-reference": reference_route,
    }[name]
    sources = [torch.randn(TOKENS, WIDTH, dtype=dtype, requires_grad=True) for _ in range(COUNT)]
    query = torch.randn(HEADS, WIDTH // HEADS, dtype=dtype, requires_grad=True)
    key_weight = torch.ones(WIDTH, dtype=dtype, requires_grad=True)
    out_grad = torch.randn(TOKENS, WIDTH, dtype=dtype)
    inputs = [*sources, query, key_weight]

    def step():
        return torch.autograd.grad(function(sources, query, key_weight), inputs, out_grad)

    step()
    row = TOKENS * WIDTH * dtype.itemsize
    benchmark.extra_info.update(device="cpu", threads=torch.get_num_threads(), least_bytes=(3 * COUNT + 3) * row)
    benchmark(step)


@pytest.mark.parametrize("residual", ["prenorm", "attnres", "mhar", "block", "delta"])
def test_compiled_decoder_step(benchmark, residual):
    model = Decoder.from_preset("tiny", residual=residual)
    compiled = torch.compile(model, fullgraph=True)
    tokens = torch.randint(256, (8, 128))

    def step():
        model.zero_grad()
        F.cross_entropy(compiled(tokens).flatten(0, 1), tokens.flatten()).backward()

    step()
    benchmark.extra_info.update(device="cpu", threads=torch.get_num_threads())
    benchmark(step)
