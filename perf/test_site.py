"""One routing site, forward and backward, beside the compiled reference; on a GPU at all shapes of perf/gpu.py."""

from __future__ import annotations

import functools

import pytest
import torch

from mhar_compile import route
from mhar_compile.ops import reference
from perf import bench, clock

CASES = [(1024, 512, 8, 9, torch.float32), (1024, 512, 8, 9, torch.bfloat16)]  # tokens, d, H, N
if bench.DEVICE == "cuda":
    from perf.gpu import SHAPES

    CASES = [(s.tokens, s.width, s.heads, s.count, torch.bfloat16) for s in SHAPES if not s.delta]


def reference_route(sources, query, key_weight):
    return reference(sources, query, key_weight=key_weight)[0]


def own_route(sources, query, key_weight):
    return route(sources, query, key_weight=key_weight)


@functools.cache
def copy_bandwidth():
    return clock.copy_bandwidth(bench.DEVICE, 2**30 if bench.DEVICE == "cuda" else 2**26)


def named(case):
    *sizes, dtype = case
    return "-".join(
        (*(f"{n} {size}" for n, size in zip(("tokens", "d", "H", "N"), sizes, strict=True)), str(dtype)[6:])
    )


@pytest.mark.parametrize(("tokens", "width", "heads", "count", "dtype"), CASES, ids=map(named, CASES))
def test_site(benchmark, tokens, width, heads, count, dtype):
    def normal(*size):
        return torch.randn(size, dtype=dtype, device=bench.DEVICE, requires_grad=True)

    sources = [normal(tokens, width) for _ in range(count)]
    query, key_weight = normal(heads, width // heads), normal(width)
    dout = torch.randn_like(sources[0])
    compiled = torch.compile(reference_route, fullgraph=True, dynamic=False)

    def step(function):
        return torch.autograd.grad(function(sources, query, key_weight), [*sources, query, key_weight], dout)

    functions = {"ours": own_route, "yardstick": compiled, "again": compiled, "eager": reference_route}
    for ours, theirs in zip(step(own_route), step(compiled), strict=True):
        assert (ours - theirs).norm() < 0.05 * theirs.norm() + 1e-3, "wrong results are not timed"
    least = bench.least_seconds({name: functools.partial(step, function) for name, function in functions.items()})
    moved = (3 * count + 3) * tokens * width * dtype.itemsize / least["ours"]
    benchmark.extra_info.update(
        ratio=bench.ratio(least, "ours"),
        noise=bench.noise(least),
        eager=bench.ratio(least, "eager"),
        gb_s=moved / 1e9,
        of_copy=moved / copy_bandwidth(),
    )
    benchmark.pedantic(step, (own_route,), rounds=3)
