"""What the plots show, measured on this machine: a site against sources and tokens, and steps by model size.

    python -m perf.sweep                    into perf/results/cpu-sweep.json, or gpu-sweep.json
    python -m perf.sweep sources tokens     some of it

On the CPU all times are processor times on one thread, the least of several, the roof included.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

import mhar_compile
from mhar_compile import Decoder, route
from mhar_compile.ops import reference

from . import bench, clock

Row = dict[str, Any]
ON_GPU = bench.DEVICE == "cuda"
WIDTH, HEADS, DTYPE = (4096, 8, torch.bfloat16) if ON_GPU else (512, 8, torch.float32)
SOURCES = (2, 4, 8, 16, 32)
COUNT = 9
TOKENS = (1024, 2048, 4096, 8192, 16384) if ON_GPU else (128, 256, 512, 1024)
SITE_TOKENS = 8192 if ON_GPU else 512
SIZES = ("100m", "350m") if ON_GPU else ((128, 2), (256, 2), (512, 2))  # width and layers on the CPU
RESIDUALS = ("prenorm", "mhar", "block", "delta")


def own(sources: Any, query: Any, key_weight: Any) -> Any:
    return route(sources, query, key_weight=key_weight)


def eager(sources: Any, query: Any, key_weight: Any) -> Any:
    return reference(sources, query, key_weight=key_weight)[0]


def least_us(steps: dict[str, bench.Step], rounds: int) -> dict[str, float]:
    """Microseconds of each step, the least of several, the steps taking turns."""
    for step in steps.values():
        step()
    found = dict.fromkeys(steps, float("inf"))
    for _ in range(rounds):
        for name, step in steps.items():
            found[name] = min(found[name], bench.seconds(step) * 1e6)
    return found


def site(count: int, tokens: int) -> Iterator[Row]:
    """Forward, and forward and backward, of one site: ours, the reference, and a copy of as many bytes (the roof)."""
    torch._dynamo.reset()
    make = partial(torch.randn, dtype=DTYPE, device=bench.DEVICE, requires_grad=True)
    sources = [make(tokens, WIDTH) for _ in range(count)]
    query, key_weight = make(HEADS, WIDTH // HEADS), make(WIDTH)
    dout, leaves = torch.randn_like(sources[0]), [*sources, query, key_weight]
    functions = {"ours": own, "compiled reference": torch.compile(eager, dynamic=False, fullgraph=True)}

    def forward(function: Callable[..., Any]) -> None:
        with torch.no_grad():
            function(sources, query, key_weight)

    def both(function: Callable[..., Any]) -> None:
        torch.autograd.grad(function(sources, query, key_weight), leaves, dout)

    for name, run, rows in (("forward", forward, count + 1), ("forward + backward", both, 3 * count + 3)):
        moved = rows * tokens * WIDTH * DTYPE.itemsize
        source = torch.ones(moved // 2, dtype=torch.uint8, device=bench.DEVICE)
        steps: dict[str, bench.Step] = {key: partial(run, function) for key, function in functions.items()}
        steps["copy"] = partial(torch.empty_like(source).copy_, source)
        for key, us in least_us(steps, rounds=7).items():
            yield {"name": key, "pass": name, "sources": count, "tokens": tokens, "us": us, "gb_s": moved / us / 1e3}


def sources() -> Iterator[Row]:
    """Against the number of sources."""
    for count in SOURCES:
        yield from site(count, SITE_TOKENS)


def tokens() -> Iterator[Row]:
    """Against the number of tokens."""
    for number in TOKENS:
        yield from site(COUNT, number)


def steps() -> Iterator[Row]:
    """A compiled training step with the passes, beside pre-norm, by model size."""
    for size in SIZES:
        made = {residual: step(size, residual) for residual in RESIDUALS}
        times = least_us({residual: run for residual, (_, run) in made.items()}, rounds=10)
        for residual, us in times.items():
            model = made[residual][0]
            yield {
                "name": residual,
                "layers": model.config.layers,
                "width": model.config.width,
                "parameters": sum(p.numel() for p in model.parameters()),
                "us": us,
                "ratio": us / times["prenorm"],
            }


def step(size: Any, residual: str) -> tuple[Decoder, bench.Step]:
    """A decoder and its compiled step."""
    torch._dynamo.reset()
    if isinstance(size, str):
        model, dtype, shape = Decoder.from_preset(size, residual=residual), torch.bfloat16, (4, 1024)
    else:
        width, layers = size
        changes: dict[str, Any] = {"width": width, "layers": layers, "ffn_width": 3 * width, "residual": residual}
        model, dtype, shape = Decoder.from_preset("tiny", **changes), torch.float32, (4, 128)
    model = model.to(bench.DEVICE, dtype)
    compiled = torch.compile(model, fullgraph=True, options=mhar_compile.inductor_options())
    words = torch.randint(model.config.vocabulary, shape, device=bench.DEVICE)

    def run() -> None:
        F.cross_entropy(compiled(words).float().flatten(0, 1), words.flatten()).backward()

    run()
    return model, run


SECTIONS = {section.__name__: section for section in (sources, tokens, steps)}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m perf.sweep", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("sections", nargs="*", metavar="SECTION", help=f"{', '.join(SECTIONS)}; all by default")
    parser.add_argument("--out", type=Path, default=Path("perf/results"), help="folder of the JSON file")
    options = parser.parse_args(arguments)
    if unknown := set(options.sections) - set(SECTIONS):
        parser.error(f"unknown section {', '.join(sorted(unknown))}; choose from {', '.join(SECTIONS)}")
    torch.set_num_threads(1)
    setting = {"width": WIDTH, "heads": HEADS, "dtype": str(DTYPE).removeprefix("torch.")}
    results: dict[str, Any] = {"origin": bench.information(), "site": setting, "sections": {}}
    for name in options.sections or SECTIONS:
        rows = list(SECTIONS[name]())
        results["sections"][name] = {"rows": rows}
        path = clock.write(options.out, f"{'gpu' if ON_GPU else 'cpu'}-sweep", results)
        print(f"{name}: {len(rows)} rows in {path}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
