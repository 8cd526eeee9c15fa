"""A compiled training step of a decoder: with the passes, without them, and with plain pre-norm residuals.

The step without the passes is timed twice, as two models: they differ by the noise, which a comparison may use.
"""

from __future__ import annotations

import functools

import pytest
import torch
from torch.nn import functional as F

import mhar_compile
from mhar_compile import Decoder
from perf import bench

ON_GPU = bench.DEVICE == "cuda"
PRESET, LAYERS, TOKENS = ("100m", 12, (8, 2048)) if ON_GPU else ("tiny", 3, (4, 128))
CASES = [("mhar", torch.bfloat16), ("block", torch.bfloat16), ("delta", torch.bfloat16)]
if not ON_GPU:
    CASES = [("mhar", torch.float32), ("mhar", torch.bfloat16), ("block", torch.float32), ("delta", torch.float32)]
IDS = [f"{residual}-{dtype}".replace("torch.", "") for residual, dtype in CASES]


def decoder_step(residual, dtype, rewrite):
    """A compiled training step, warmed up."""
    torch.manual_seed(0)
    model = Decoder.from_preset(PRESET, residual=residual, layers=LAYERS).to(bench.DEVICE, dtype)
    compiled = torch.compile(model, fullgraph=True, options=mhar_compile.inductor_options(rewrite=rewrite))
    tokens = torch.randint(model.config.vocabulary, TOKENS, device=bench.DEVICE)

    def step():
        loss = F.cross_entropy(compiled(tokens).float().flatten(0, 1), tokens.flatten())
        loss.backward()
        return loss.detach()

    for _ in range(2):
        step()
    return step


@functools.cache
def prenorm_step(dtype):
    return decoder_step("prenorm", dtype, "never")


@functools.cache
def timed(residual, dtype):
    """The least time of each step of a topology, and the step with the passes."""
    settings = {"passes": "auto", "yardstick": "never", "again": "never"}
    steps = {name: decoder_step(residual, dtype, rewrite) for name, rewrite in settings.items()}
    torch.testing.assert_close(
        steps["passes"](), steps["yardstick"](), rtol=0.01, atol=0
    )  # wrong results are not timed
    steps["prenorm"] = prenorm_step(dtype)
    return bench.least_seconds(steps), steps["passes"]


def reported(benchmark, residual, dtype, own, other):
    least, step = timed(residual, dtype)
    ratio, noise = bench.ratio(least, own, other), bench.noise(least)
    benchmark.extra_info.update(
        ratio=ratio, noise=noise, milliseconds=least[own] * 1e3, tokens=TOKENS[0] * TOKENS[1], layers=LAYERS
    )
    benchmark.pedantic(step, rounds=1)
    return ratio, noise


@pytest.mark.parametrize(("residual", "dtype"), CASES, ids=IDS)
def test_step_to_prenorm(benchmark, residual, dtype):
    reported(benchmark, residual, dtype, "passes", "prenorm")


@pytest.mark.parametrize(("residual", "dtype"), CASES, ids=IDS)
def test_step_without_passes_to_prenorm(benchmark, residual, dtype):
    reported(benchmark, residual, dtype, "yardstick", "prenorm")


@pytest.mark.parametrize(("residual", "dtype"), CASES, ids=IDS)
def test_the_passes_make_no_step_slower(benchmark, residual, dtype):
    ratio, noise = reported(benchmark, residual, dtype, "passes", "yardstick")
    assert ratio <= 1.05 + 2 * noise, f"with the passes {ratio:.3f} of the time without, noise {noise:.3f}"
