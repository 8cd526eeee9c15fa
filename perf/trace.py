"""A trace of a compiled training step in which routing can be found by name.

    python -m perf.trace                                a tiny decoder, into runs/trace
    python -m perf.trace --residual delta --layers 8 --rewrite never --out runs/delta

Open the folder in TensorBoard (``tensorboard --logdir runs/trace``, with torch-tb-profiler) or the file in Perfetto
(ui.perfetto.dev). Each operator or kernel of ours stands in a range such as ``forward: mix, site 3``.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile, record_function, tensorboard_trace_handler

import mhar_compile
from mhar_compile import Decoder

OURS = re.compile(r"torch\.ops\.mhar\.(\w+)\.default\(|\b(\w+)_named_\d+\.run\(")
RANGE = re.compile(r"(forward|backward): \w+")


@contextmanager
def named_calls() -> Iterator[None]:
    """Let the programs that Inductor writes meanwhile run each call of ours in a range of its own name.

    Its caches are off: a program that was written before has no names. ``record_function`` in the model would not do:
    Inductor removes such ranges, and a pass that moves work would leave it outside them.
    """
    from torch._inductor import codecache
    from torch._inductor import config as inductor

    write = codecache.PyCodeCache.write

    def named_write(source: str, *args: Any, **keywords: Any) -> Any:
        return write(with_names(source), *args, **keywords)

    with (
        mock.patch.object(codecache.PyCodeCache, "write", named_write),
        inductor.patch(fx_graph_cache=False),
        torch._functorch.config.patch(enable_autograd_cache=False),
    ):
        yield


def with_names(source: str) -> str:
    """A program of Inductor's with a range around each call of ours."""
    phase = "backward" if "tangents_" in source else "forward"
    seen: Counter[str] = Counter()
    lines = []
    for line in source.splitlines():
        found = OURS.search(line)
        if found and line.startswith("    "):
            name = found[1] or found[2]
            indent = line[: len(line) - len(line.lstrip())]
            lines.append(
                f"{indent}with torch.profiler.record_function({f'{phase}: {name}{place(name, line, seen)}'!r}):"
            )
            line = "    " + line
        lines.append(line)
    return "\n".join(lines) + "\n"


def place(name: str, line: str, seen: Counter[str]) -> str:
    """Which site or sites a call is for, where its arguments say; else which call of its kind it is, from 0."""
    seen[name] += 1
    packet = getattr(torch.ops.mhar, name, None)
    if packet is not None and ".run(" not in line:
        call = next(node for node in ast.walk(ast.parse(line.strip())) if isinstance(node, ast.Call))
        names = [argument.name for argument in packet.default._schema.arguments]
        given = dict(zip(names, call.args, strict=False))
        if "site" in given:
            return f", site {ast.literal_eval(given['site'])}"
        if "sites" in given:
            sites = ast.literal_eval(given["sites"])
            return f", sites {min(sites)} to {max(sites)}" if len(sites) > 1 else f", site {sites[0]}"
    kind = {"route": "site", "score": "source"}.get(name, "call")
    return f", {kind} {seen[name] - 1}"


def training_step(residual: str, layers: int, rewrite: str, device: str) -> Callable[[], None]:
    """A compiled step of the tiny decoder, with its names; compiled and warmed up."""
    torch._dynamo.reset()
    model = Decoder.from_preset("tiny", residual=residual, layers=layers).to(device)
    compiled = torch.compile(model, fullgraph=True, options=mhar_compile.inductor_options(rewrite=rewrite))
    tokens = torch.randint(model.config.vocabulary, (4, 128), device=device)

    def step() -> None:
        with record_function("forward"):
            loss = F.cross_entropy(compiled(tokens).flatten(0, 1), tokens.flatten())
        with record_function("backward"):
            loss.backward()

    with named_calls():
        for _ in range(2):
            step()
    return step


def traced(step: Callable[[], None], folder: Path, steps: int = 3) -> profile:
    """Profile some steps and leave the trace in a folder."""
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
    handler = tensorboard_trace_handler(str(folder))
    with profile(activities=activities, on_trace_ready=handler, acc_events=True) as profiler:
        for _ in range(steps):
            with record_function("step"):
                step()
            profiler.step()
    return profiler


def summary(profiler: profile) -> dict[str, float]:
    """Microseconds by range of ours, and of whole steps under 'step'; of all the steps together."""
    found: dict[str, float] = {}
    for event in profiler.key_averages():
        if event.device_type != torch.autograd.DeviceType.CPU:
            continue  # a GPU's copy of the same range
        time = event.device_time_total or event.cpu_time_total
        if event.key == "step" or RANGE.match(event.key):
            found[event.key] = time
    return found


def printed(times: dict[str, float]) -> None:
    """Routing's share of a step, by kind of call, the largest first."""
    step, kinds = times["step"], Counter[str]()
    for name, time in times.items():
        if name != "step":
            kinds[name.split(",")[0]] += time  # type: ignore[assignment]
    print(f"routing takes {sum(kinds.values()) / step:.1%} of a step")
    for kind, time in kinds.most_common():
        print(f"  {kind:<34} {time / step:6.1%}")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m perf.trace", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--residual", default="mhar", choices=["attnres", "mhar", "block", "delta"])
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rewrite", default="auto", choices=["auto", "always", "never"], help="of the passes")
    parser.add_argument("--out", type=Path, default=Path("runs/trace"))
    options = parser.parse_args(arguments)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    step = training_step(options.residual, options.layers, options.rewrite, device)
    printed(summary(traced(step, options.out)))
    print(f"the trace is in {options.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
