"""CPU benchmarks: one routing site beside the compiled reference, a compiled decoder step beside pre-norm, and the step
with the compiler passes beside the step without.

Times on a shared CPU are only good for ratios within one run. `make perf` prints them.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch
from torch.nn import functional as F

import mhar_compile
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


def decoder_step(residual: str, dtype: torch.dtype, rewrite: str) -> Callable[[], None]:
    """A compiled training step, warmed up."""
    torch.manual_seed(0)
    model = Decoder.from_preset("tiny", residual=residual, layers=4).to(dtype)
    compiled = torch.compile(model, fullgraph=True, options=mhar_compile.inductor_options(rewrite=rewrite))
    tokens = torch.randint(256, (4, 128))

    def step() -> None:
        F.cross_entropy(compiled(tokens).float().flatten(0, 1), tokens.flatten()).backward()

    for _ in range(2):
        step()
    return step


def least_seconds(steps: dict[str, Callable[[], None]], rounds: int) -> dict[str, float]:
    """The least processor time of each step, the steps taking turns: whoever else is at work only ever adds to it."""
    least = dict.fromkeys(steps, float("inf"))
    for _ in range(rounds):
        for name, step in steps.items():
            start = time.process_time()
            step()
            least[name] = min(least[name], time.process_time() - start)
    return least


@pytest.mark.parametrize(
    ("residual", "dtype"),
    [("mhar", torch.float32), ("mhar", torch.bfloat16), ("block", torch.float32), ("delta", torch.float32)],
    ids=str,
)
def test_the_passes_make_no_step_slower(benchmark, residual, dtype):
    """The step without the passes is timed twice, as two models: they differ by the noise, which the passes may use."""
    torch._dynamo.reset()
    settings = {"passes": "auto", "without": "never", "again": "never"}
    steps = {name: decoder_step(residual, dtype, rewrite) for name, rewrite in settings.items()}
    least = least_seconds(steps, 20)
    without, again = sorted((least["without"], least["again"]))
    ratio, noise = least["passes"] / without, again / without - 1
    benchmark.extra_info.update(ratio=ratio, noise=noise)
    benchmark.pedantic(steps["passes"], rounds=3)
    assert ratio <= 1.02 + 2 * noise, f"with the passes {ratio:.3f} of the time without, noise {noise:.3f}"
