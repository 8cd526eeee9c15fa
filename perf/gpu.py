"""The kernels on a GPU: correctness first, then times beside the card's copy bandwidth and beside what others do.

    python -m perf.gpu                          everything but training steps, meant for 15 minutes on an H200
    python -m perf.gpu step_1b slice_8b         training steps, each some minutes of compilation
    python -m perf.gpu widths large repeats     some sections
    python -m perf.gpu --dry-run                what would run
    TRITON_INTERPRET=1 python -m perf.gpu --self-check      all of it at tiny sizes on the CPU

Needs torch and Triton, no network. Every section has a process and a time limit of its own, so that one that fails,
crashes or hangs costs no other; those of correctness run side by side, then those of times one after the other, without
those that time what was found to be wrong. Results are in perf/results/<name>.json as soon as a section ends, with the
rows it had got to.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mhar_compile import route
from mhar_compile.lowering import steps
from mhar_compile.lowering.launch import Launch
from mhar_compile.lowering.rules import RECTANGLE, TERMS, norm_rule
from mhar_compile.ops import eager_steps

from . import checks, clock, models, rivals, step_checks, training
from .clock import Row, Setup
from .step_checks import Sizes

SANITIZER_SECONDS = 110  # of each tool; the kernels are compiled once, for both
SECTION_SECONDS = 240  # most of a section's time is Triton's, which compiles a kernel in 1 to 3 s
LONGER = {"rectangles": 420, "compiled": 420, "chains": 420} | dict.fromkeys(
    training.STEPS, 560
)  # Inductor's compilation of whole models


@dataclass(frozen=True)
class Shape:
    """A routing site to time."""

    name: str
    tokens: int
    width: int
    heads: int
    count: int
    delta: bool = False  # null source first, residual and gate

    def rows(self, backward: bool) -> int:
        """The least rows of [tokens, d] to move: the sources and the output; in the backward dout and gradients too."""
        sources = self.count - self.delta
        forward = sources + 1 + self.delta
        return forward + (2 * sources + 1 if backward else 0)


SHAPES = (
    Shape("8B", 8192, 4096, 8, 9),
    Shape("8B delta", 8192, 4096, 8, 9, delta=True),
    Shape("8B, one head", 8192, 4096, 1, 9),
    Shape("1B", 2048, 1280, 8, 16),
    Shape("1B, late site", 2048, 1280, 8, 60),
    Shape("350M", 4096, 1024, 8, 16),
    Shape("100M", 16384, 512, 4, 16),
    Shape("K3", 8192, 7168, 1, 9),
    Shape("SmolLM", 8192, 576, 9, 9),
)


def shapes(setup: Setup) -> list[Shape]:
    if not setup.tiny:
        return list(SHAPES)
    return [Shape("tiny", 3, 8, 2, 3), Shape("tiny delta", 2, 8, 1, 3, delta=True)]


def budgets(setup: Setup) -> Iterator[Row]:
    """Random sites of all kinds within the error budgets derived from float64."""
    number, most = setup.size(32, 2), setup.size(129, 3)
    yield from within_budgets(setup, checks.random_recipes(0, number, most, setup.size(37, 2)))


def widths(setup: Setup) -> Iterator[Row]:
    """The sites that are timed, with few tokens, within the same budgets."""

    def recipes() -> Iterator[checks.Recipe]:
        for shape in shapes(setup):
            for dtype in checks.DTYPES if shape.name in ("8B", "1B") else (torch.bfloat16,):
                sizes = {"tokens": (3, 11), "count": shape.count - shape.delta, "heads": shape.heads, "dtype": dtype}
                extra = {"null_source": shape.delta, "residual": shape.delta, "gate": 1 if shape.delta else None}
                yield checks.Recipe(head_width=shape.width // shape.heads, **sizes, **extra)

    yield from within_budgets(setup, recipes())


def within_budgets(setup: Setup, recipes: Iterator[checks.Recipe]) -> Iterator[Row]:
    """Error / budget of every recipe, or what is wrong with it."""
    failed = 0
    for seed, recipe in enumerate(recipes):
        name = f"{seed}: {recipe.count} sources, {recipe.heads} x {recipe.head_width}, {recipe.dtype}"
        try:
            yield {"name": name, "ratio": checks.check_budget(setup.device, recipe, seed)}
        except AssertionError as error:
            failed += 1
            yield {"name": name, "error": str(error)[:1000]}
    assert not failed, f"{failed} sites are out of their budgets"


def batches(setup: Setup) -> Iterator[Row]:
    """Bitwise the same whatever the batch around a token and however its sources lie in memory."""
    cases = [(8, 2, 2)] if setup.tiny else [(4096, 8, 8), (1280, 8, 20), (576, 9, 9), (7168, 1, 5)]
    for dtype in checks.DTYPES[: setup.size(3, 1)]:
        for width, heads, count in cases:
            checks.check_batch(setup.device, setup.size(301, 3), width, heads, count, dtype)
            checks.check_layouts(setup.device, (setup.size(4, 2), setup.size(75, 3)), width, heads, count, dtype)
    yield {"name": "batches and layouts", "sites": len(cases), "bitwise": True}


def rectangles(setup: Setup) -> Iterator[Row]:
    """Every step that the passes launch against float64, with rows that lie evenly and unevenly."""
    for sizes in rectangle_sizes(setup):
        row: Row = {"name": f"{sizes.heads} x {sizes.head_width}, {sizes.dtype}", "uneven": sizes.uneven}
        for name, check in step_cases(sizes):
            try:
                check()
            except AssertionError as error:
                yield row | {"step": name, "error": str(error)[:1000]}
                raise
        yield row


def rectangle_sizes(setup: Setup) -> Iterator[Sizes]:
    """The kernels are compiled anew for each of these, 20 s of one core."""
    tokens = setup.size(4, 2), setup.size(33, 2)
    if setup.tiny:
        yield Sizes(setup.device, torch.float32, 2, 4, tokens, uneven=True)  # the interpreter rounds no bfloat16
        return
    for width, heads in ((4096, 8), (1280, 8), (512, 4), (576, 8), (7168, 1)):
        yield Sizes(setup.device, torch.bfloat16, heads, width // heads, tokens, uneven=heads == 4)
    for dtype, uneven in ((torch.bfloat16, True), (torch.float32, False), (torch.float16, True)):
        yield Sizes(setup.device, dtype, 8, 160, tokens, uneven)


def step_cases(sizes: Sizes) -> Iterator[tuple[str, Callable[[], None]]]:
    """Every step with and without each of its optional arguments, and beyond RECTANGLE sources or sites."""
    many = RECTANGLE + 2
    yield "score", partial(step_checks.check_score, sizes, 19)
    for count, options in (
        (3, {}),
        (4, {"null": True, "residual": True, "gate": True}),
        (many, {"null": True, "carried": True}),
        (0, {"residual": True, "gate": True, "carried": True}),
    ):
        yield f"mix {count} {options}", partial(step_checks.check_mix, sizes, count, **options)
    for count, options in (
        (3, {"round_first": True}),
        (4, {"null": True, "residual": True, "gate": True}),
        (many, {"carried": True, "keep_out": False}),
        (0, {"residual": True, "carried": True, "weight": sizes.dtype}),
    ):
        yield f"mix_norm {count} {options}", partial(step_checks.check_mix_norm, sizes, count, **options)
    for count, options in ((3, {}), (TERMS, {"coupled": False}), (2, {"weight": sizes.dtype, "summed": False})):
        yield f"norm_backward {count} {options}", partial(step_checks.check_norm_backward, sizes, count, **options)
    for count, number in ((3, 8), (many, 2)):
        yield f"mix_tile {count} x {number}", partial(step_checks.check_mix_tile, sizes, count, number)
    for count, options in ((3, {"null": True, "gate": True}), (many, {})):
        yield f"coupling {count}", partial(step_checks.check_coupling_from_sources, sizes, count, **options)
    for count, sites, options in (
        (1, [2, 1], {}),
        (3, [5, 2, 1], {"gated": True, "carried": True, "wide": True}),
        (2, list(range(1, many + 1)), {}),
    ):
        yield f"pull {count} from {sites} {options}", partial(step_checks.check_pull, sizes, count, sites, **options)
    yield "pull_null", partial(step_checks.check_pull_null, sizes, gated=True)
    yield "unfold", partial(step_checks.check_unfold, sizes, single=(3, 1))


def large(setup: Setup) -> Iterator[Row]:
    """More than 2^31 elements in one source, and in the logits."""
    checks.check_large(setup.device, setup.size(2**31 // 4096 + 1000, 3), setup.size(4096, 8), setup.size(8, 2), 2)
    checks.check_large(setup.device, setup.size(2**24, 3), 8, 8, setup.size(17, 2))
    yield {"name": "large", "sites": 2}


def repeats(setup: Setup) -> Iterator[Row]:
    """A thousand repetitions, bitwise equal."""
    number = setup.size(1000, 1)
    for width, heads, count in [(8, 2, 2)] if setup.tiny else [(4096, 8, 9), (1280, 8, 20)]:
        checks.check_repeats(setup.device, setup.size(1024, 2), width, heads, count, number)
        yield {"name": f"d {width}, {count} sources", "repetitions": number}


def sanitizer(setup: Setup) -> Iterator[Row]:
    """compute-sanitizer's memcheck and racecheck over small sites, in processes of their own."""
    tool = shutil.which("compute-sanitizer")
    if setup.tiny or tool is None:
        yield {"name": "compute-sanitizer", "skipped": "not on PATH" if tool is None else "no GPU"}
        return
    for check in ("memcheck", "racecheck"):
        command = [tool, "--tool", check, "--error-exitcode", "9", sys.executable, "-m", "perf.gpu", "--smoke"]
        environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
        try:
            result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=SANITIZER_SECONDS)
        except subprocess.TimeoutExpired:
            yield {"name": check, "skipped": f"not done in {SANITIZER_SECONDS} s"}
            continue
        if "Device not supported" in result.stdout + result.stderr:  # some virtual machines let no tool at the GPU
            yield {"name": check, "skipped": "the sanitizer does not support this device"}
            continue
        assert result.returncode == 0, f"{check}: {result.stdout[-3000:]}{result.stderr[-1000:]}"
        yield {"name": check, "report": result.stdout.strip().splitlines()[-1:]}


def smoke(device: str) -> None:
    """Small sites through every kernel, for the sanitizer."""
    for width, heads, count in ((512, 8, 3), (576, 9, 18), (1280, 8, 2), (1024, 1, 2)):
        checks.check_batch(device, 9, width, heads, count, torch.bfloat16)
        checks.check_layouts(device, (2, 3), width, heads, count, torch.bfloat16)
        sizes = Sizes(device, torch.bfloat16, heads, width // heads, (3, 3), uneven=True)
        step_checks.check_score(sizes)
        step_checks.check_mix(sizes, 3, null=True, carried=True)
        step_checks.check_pull(sizes, 2, [3, 1])
    checks.check_repeats(device, 9, 1280, 8, 3, 1)


def inputs(setup: Setup, shape: Shape) -> tuple[list[Tensor], Tensor, Tensor, dict[str, Tensor]]:
    """Sources, query, key weight and the delta mode's arguments, all requiring gradients."""
    generator = torch.Generator(device=setup.device).manual_seed(0)

    def normal(*size: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(size, generator=generator, device=setup.device).to(dtype).requires_grad_()

    sources = [normal(shape.tokens, shape.width, dtype=torch.bfloat16) for _ in range(shape.count - shape.delta)]
    query, key_weight = normal(shape.heads, shape.width // shape.heads), normal(shape.width)
    extra: dict[str, Tensor] = {}
    if shape.delta:
        extra = {"null_source": normal(shape.width), "gate": normal(1)}
        extra["residual"] = normal(shape.tokens, shape.width, dtype=torch.bfloat16)
    return sources, query, key_weight, extra


def timed_site(setup: Setup, shape: Shape, name: str, function: rivals.Site, backward: bool, copy: float) -> Row:
    """One row of the table: a function's time on a site, forward or forward and backward."""
    sources, query, key_weight, extra = inputs(setup, shape)
    leaves = [*sources, query, key_weight, *extra.values()]
    dout = torch.randn_like(sources[0])

    def forward() -> None:
        with torch.no_grad():
            function(sources, query, key_weight, **extra)

    def both() -> None:
        torch.autograd.grad(function(sources, query, key_weight, **extra), leaves, dout, allow_unused=True)

    us = setup.time(both if backward else forward)
    least = shape.rows(backward) * shape.tokens * shape.width * 2
    return {
        "name": name,
        "shape": shape.name,
        "pass": "forward + backward" if backward else "forward",
        "us": us,
        "bytes": least,
        "of_copy": least / (us * 1e-6) / copy,
    }


def ours(sources: Any, query: Tensor, key_weight: Tensor, **extra: Tensor) -> Tensor:
    return route(sources, query, key_weight=key_weight, eps=rivals.EPS, **extra)


def sites(setup: Setup) -> Iterator[Row]:
    """One site, forward and with backward."""
    size = setup.size(2**30, 2**16)
    copy = clock.copy_bandwidth(setup.device, size)
    yield {"name": "copy", "us": 2 * size / copy * 1e6, "tb_s": copy / 1e12}
    for shape in shapes(setup):
        for backward in (False, True):
            yield timed_site(setup, shape, "ours", ours, backward, copy)


def others(setup: Setup) -> Iterator[Row]:
    """The same sites done by others: eager, torch.compile, installed packages."""
    copy = clock.copy_bandwidth(setup.device, setup.size(2**30, 2**16))
    for shape in shapes(setup):
        entrants: dict[str, Any] = {} if shape.delta else {"eager": rivals.eager, **rivals.installed(shape.heads)}
        if shape.name in ("8B", "8B, one head"):  # half a minute of compilation each
            entrants["torch.compile"] = rivals.compiled()
        for name, function in entrants.items():
            for backward in (False, True):
                try:
                    yield timed_site(setup, shape, name, function, backward, copy)
                except Exception as error:
                    yield {"name": name, "shape": shape.name, "error": f"{type(error).__name__}: {error}"[:300]}


def parts(setup: Setup) -> Iterator[Row]:
    """The steps' launches, each alone: 16 sources, 8 sites."""
    copy = clock.copy_bandwidth(setup.device, setup.size(2**30, 2**16))
    for shape in shapes(setup):
        if not shape.delta:
            count, number = setup.size(16, 2), setup.size(8, 2)
            for name, moved, launches in captured(setup, shape, count, number):
                us = setup.time(partial(run_all, launches))
                least = moved * shape.tokens * shape.width * 2
                yield {"name": name, "shape": shape.name, "us": us, "of_copy": least / (us * 1e-6) / copy}


def norms(setup: Setup) -> Iterator[Row]:
    """A site and the RMSNorm behind it: mix and Inductor's kernel, beside mix_norm. It decides rules.norm_rule."""
    copy = clock.copy_bandwidth(setup.device, setup.size(2**30, 2**16))
    for shape in shapes(setup):
        apart, along, alone = normalised(setup, shape)
        torch.testing.assert_close(along()[3], apart(), rtol=2**-6, atol=2**-6)
        rows = shape.rows(backward=False)
        for name, moved, function in (
            ("mix, then the norm", rows + 2, apart),
            ("mix_norm", rows + 1, along),
            ("mix_norm, output not kept", rows, alone),
        ):
            us = setup.time(function)
            least = moved * shape.tokens * shape.width * 2
            yield {"name": name, "shape": shape.name, "us": us, "of_copy": least / (us * 1e-6) / copy}
        for terms in (2, 3):
            apart, along = normalised_backward(setup, shape, terms)
            for found, expected in zip(along()[::2], apart()[::2], strict=True):  # couplings are sums that cancel
                torch.testing.assert_close(found, expected, rtol=2**-6, atol=2**-6 * float(expected.abs().max()))
            for name, read, function in (
                (f"norm backward of {terms} terms, then coupling", 2 * terms + 5.5, apart),
                (f"norm_backward of {terms} terms", terms + 2.5, along),
            ):
                us = setup.time(function)
                least = read * shape.tokens * shape.width * 2
                yield {"name": name, "shape": shape.name, "us": us, "of_copy": least / (us * 1e-6) / copy}


def normalised_backward(setup: Setup, shape: Shape, count: int) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """The backward of a norm and the coupling of its site, as kernels of Inductor's and as one of ours."""
    heads, width = shape.heads, shape.width
    out, *terms = (torch.randn(shape.tokens, width, device=setup.device).bfloat16() for _ in range(1 + count))
    residue = torch.zeros(out.shape, dtype=torch.int8, device=setup.device)
    weight, rule = torch.ones(width, device=setup.device).bfloat16(), norm_rule(heads, width // heads, 2)
    inverse = (out.float().square().mean(-1, keepdim=True) + rivals.EPS).rsqrt()
    assert rule is not None

    def apart(terms: list[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        dy, normal = sum(terms[1:], terms[0]).float(), out.float() * inverse
        through = dy * weight.float()
        grad = (inverse * (through - normal * (through * normal).mean(-1, keepdim=True))).bfloat16()
        coupled = (grad.float() * eager_steps.restored(out, residue)).unflatten(-1, (heads, -1)).sum(-1)
        return grad, coupled, (dy * normal).sum(0).bfloat16()

    if not setup.tiny:
        torch._dynamo.reset()
        apart = torch.compile(apart, dynamic=False)
    given: Any = terms, out, residue, inverse, weight, heads, True, torch.bfloat16, rule
    return partial(apart, terms), partial(steps.norm_backward, *given)


def normalised(setup: Setup, shape: Shape) -> tuple[Callable[[], Any], ...]:
    """The norm as a kernel of its own, along with its site, and along with a site whose output nobody reads."""
    tokens, width, heads = shape.tokens, shape.width, shape.heads
    sources = [torch.randn(tokens, width, device=setup.device).bfloat16() for _ in range(shape.count)]
    logits = [torch.zeros(1, tokens, heads, device=setup.device)] * shape.count
    extra = (sources.pop(), torch.ones(1, device=setup.device)) if shape.delta else (None, None)
    mixing: Any = sources, logits[: len(sources)], [0] * len(sources), 0, *extra, None, None, torch.bfloat16, False
    weight, rule = torch.ones(width, device=setup.device).bfloat16(), norm_rule(heads, width // heads, 2)
    assert rule is not None
    norm: Callable[[Tensor], Tensor] = partial(
        torch.nn.functional.rms_norm, normalized_shape=(width,), weight=weight, eps=rivals.EPS
    )
    if not setup.tiny:
        torch._dynamo.reset()  # there are more shapes than it compiles one function for
        norm = torch.compile(norm, dynamic=False)
    along, alone = (steps.Norm(weight, rivals.EPS, torch.bfloat16, False, keep, rule) for keep in (True, False))
    return (
        lambda: norm(steps.mix(*mixing)[0]),
        partial(steps.mix_norm, along, *mixing),
        partial(steps.mix_norm, alone, *mixing),
    )


def run_all(launches: list[Launch]) -> None:
    for launch in launches:
        launch.run()


def captured(setup: Setup, shape: Shape, count: int, number: int) -> Iterator[tuple[str, float, list[Launch]]]:
    """Name, rows moved, and launches of every step between `count` sources and `number` sites."""
    tokens, width, heads = shape.tokens, shape.width, shape.heads

    def row() -> Tensor:
        return torch.randn(tokens, width, device=setup.device).bfloat16()

    def full(*size: int) -> Tensor:
        return torch.zeros(size, device=setup.device)

    sources, douts = [row() for _ in range(count)], [row() for _ in range(number)]
    folded = torch.randn(number, heads, width // heads, device=setup.device)
    logits, firsts, levels = [full(number, tokens, heads)] * count, [0] * count, [full(tokens, heads)] * number
    rstds, every = [torch.ones(tokens, device=setup.device)] * count, list(range(number))
    none: Any = (None, None, None, None, torch.bfloat16)

    def launches(step: Callable[..., Any], *arguments: Any) -> list[Launch]:
        found: list[Launch] = []
        step(*arguments, run=found.append)
        return found

    yield f"score, {number} sites", 1, launches(steps.score, sources[0], folded, 0, number, rivals.EPS)
    yield f"mix, {count} sources", count + 1, launches(steps.mix, sources, logits, firsts, 0, *none, False)
    yield f"mix, {count} sources, residue", count + 1.5, launches(steps.mix, sources, logits, firsts, 0, *none, True)
    tiled = launches(steps.mix_tile, sources, logits, firsts, every)
    yield f"mix, {count} sources x {number} sites", count + 2 * number, tiled
    coupled = launches(steps.coupling_from_sources, douts[0], sources, logits, firsts, 0, levels[0], None)
    yield f"coupling, {count} sources", count + 1, coupled
    shares = steps.new_shares(folded)
    for few in (1, 2):
        one = slice(0, few)
        pulled = launches(
            steps.pull, sources[one], rstds[one], logits[one], firsts[one], every, douts, levels, levels,
            [None] * number, folded, [], [False] * few, shares,
        )  # fmt: skip
        named = {kernel: [x for x in pulled if x.kernel.fn.__name__ == kernel] for kernel in ("pull", "query_gradient")}
        reads = number * len(named["pull"]) + 2 * few
        yield f"pull, {few} sources x {number} sites", reads, named["pull"]
    yield f"query_gradient, {number} sites", 1, named["query_gradient"][:1]
    yield f"sum of shares, {number} sites", 0, launches(steps.folded_gradients, shares, [], [], number)


CORRECTNESS = {
    section.__name__: section
    for section in (budgets, widths, batches, rectangles, large, repeats, sanitizer, models.compiled, models.packages)
}
TIMES = {section.__name__: section for section in (sites, models.chains, parts, norms, others)} | training.STEPS
SECTIONS = CORRECTNESS | TIMES
DEFAULT = [name for name in SECTIONS if name not in training.STEPS]  # which take minutes of compilation each


def needed(name: str) -> set[str]:
    """The sections of correctness without which times mean nothing, where they are run."""
    models_too = {"compiled"} if name in ("chains", *training.STEPS) else set()
    return set(CORRECTNESS) - {"compiled", "packages"} | models_too


def main(arguments: list[str] | None = None) -> int:
    options = parsed(arguments)
    setup = Setup("cpu", tiny=True, repeats=1) if options.self_check else Setup(repeats=options.repeats)
    if options.dry_run:
        for name in options.sections:
            print(f"{name:12} {(SECTIONS[name].__doc__ or '').splitlines()[0]}")
        return 0
    if options.smoke:
        smoke(setup.device)
        return 0
    if options.report:
        return int(not report(SECTIONS[options.sections[0]], setup, options.report)["passed"])
    origin = clock.origin(setup.device)
    origin["commit"] = options.commit or origin["commit"]
    results: dict[str, Any] = {"origin": origin, "sections": {}}

    def done(name: str, found: Row) -> None:
        results["sections"][name] = found
        clock.write(options.out, options.name, results)
        show(name, found)

    checked = [name for name in options.sections if name in CORRECTNESS]
    for name, found in performed(checked, setup, options):
        done(name, found)
    for name in [name for name in options.sections if name in TIMES]:
        wrong = [other for other in checked if other in needed(name) and not results["sections"][other]["passed"]]
        if wrong:
            error = f"left out, what it times is not correct: {', '.join(wrong)}"
            done(name, {"passed": False, "rows": [], "error": error})
        else:
            done(name, perform(name, setup, options))
    return int(not all(found["passed"] for found in results["sections"].values()))


def performed(names: list[str], setup: Setup, options: argparse.Namespace) -> Iterator[tuple[str, Row]]:
    """The reports of sections as they end: on a GPU side by side, else one after another."""
    if options.self_check:  # not in a thread: in torch 2.11 without a card the first one to trace must not end
        yield from ((name, perform(name, setup, options)) for name in names)
        return
    with ThreadPoolExecutor(max(len(names), 1)) as together:
        futures = {together.submit(perform, name, setup, options): name for name in names}
        yield from ((futures[future], future.result()) for future in as_completed(futures))


def perform(name: str, setup: Setup, options: argparse.Namespace) -> Row:
    """A section's report; on a GPU from a process of its own, since one illegal access ends all work in a process."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "report.json"
        if options.self_check:
            return report(SECTIONS[name], setup, path)
        command = [sys.executable, "-m", "perf.gpu", name, "--report", str(path), "--repeats", str(setup.repeats)]
        return reported(command, path, LONGER.get(name, SECTION_SECONDS))


def report(section: Callable[[Setup], Iterator[Row]], setup: Setup, path: Path) -> Row:
    """Run a section here; its report is written anew with every row: passed, rows, seconds and the error if any."""
    start, found = time.perf_counter(), {"passed": False, "rows": [], "error": "not finished"}

    def save() -> None:
        found["seconds"] = time.perf_counter() - start
        path.write_text(json.dumps(found))

    save()
    try:
        for row in section(setup):
            found["rows"].append(row)
            save()
        found |= {"passed": True, "error": None}
    except Exception as error:
        traceback.print_exc()
        found["error"] = f"{type(error).__name__}: {error}"[:2000]
    save()
    return found


def reported(command: list[str], path: Path, seconds: float) -> Row:
    """The report that a command leaves at a path, whether it ends by itself, crashes or has to be ended."""
    result = None
    try:
        result = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=seconds)
        ending = f"ended with {result.returncode}"
    except subprocess.TimeoutExpired:
        ending = f"not done in {seconds:g} s"
    found: Row = json.loads(path.read_text()) if path.exists() else {"passed": False, "rows": [], "error": None}
    if not found["passed"]:
        found["error"] = f"{found['error'] or 'no report'}; {ending}"
        found["output"] = (result.stdout if result else "")[-4000:]
    return found


def show(name: str, found: Row) -> None:
    """A section's report for people."""
    print(f"{name}: {'passed' if found['passed'] else 'FAILED'} in {found.get('seconds', 0):.1f} s")
    if not found["passed"]:
        print("   ", found["error"], found.get("output", ""), sep="\n")
    for row in found["rows"]:
        values = (f"{key} {value:.4g}" if isinstance(value, float) else f"{value}" for key, value in row.items())
        print("   ", ", ".join(values), flush=True)


def parsed(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m perf.gpu", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument(
        "sections",
        nargs="*",
        metavar="SECTION",
        help=f"{', '.join(SECTIONS)}; all but training steps where none is named",
    )
    parser.add_argument("--out", type=Path, default=Path("perf/results"), help="folder of the JSON file")
    parser.add_argument("--name", default=time.strftime("gpu-%Y%m%d-%H%M%S"), help="name of the JSON file")
    parser.add_argument("--commit", help="the checkout's commit, where there is no git to ask")
    parser.add_argument("--repeats", type=int, default=20, help="repetitions of a timed call; the median counts")
    parser.add_argument("--dry-run", action="store_true", help="say what would run")
    parser.add_argument("--self-check", action="store_true", help="run at tiny sizes on the CPU")
    parser.add_argument("--smoke", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--report", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    unknown = set(options.sections) - set(SECTIONS)
    if unknown:
        parser.error(f"unknown section {', '.join(sorted(unknown))}; choose from {', '.join(SECTIONS)}")
    options.sections = options.sections or DEFAULT
    if options.self_check and os.environ.get("TRITON_INTERPRET") != "1":
        parser.error("--self-check needs TRITON_INTERPRET=1 in the environment")
    if not (options.dry_run or options.self_check or torch.cuda.is_available()):
        parser.error("no CUDA device; --dry-run and --self-check need none")
    return options


if __name__ == "__main__":
    sys.exit(main())
