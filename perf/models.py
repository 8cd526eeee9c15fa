"""Sections of perf/gpu.py on whole models: compiled decoders and packages are right; times of chains."""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import mhar_compile
from mhar_compile import Decoder, route

from .clock import Row, Setup
from .model_checks import VOCABULARY, Case, cases, check, results
from .rivals import EPS

CHAINS = (("100M", 25, 16384, 512, 4), ("350M", 49, 4096, 1024, 8), ("1B", 73, 2048, 1280, 8))


def compiled(setup: Setup) -> Iterator[Row]:
    """Whole decoders through backend="mhar": within eager's budgets, no operator left, results kept over steps."""
    some = [Case("block", inference=True)] if setup.tiny else cases()
    failed = 0
    for case in some:
        try:
            yield {"name": str(case), **compiled_case(setup, case)}
        except Exception as error:
            failed += 1
            yield {"name": str(case), "error": f"{type(error).__name__}: {error}"[:2000]}
    assert not failed, f"{failed} compiled decoders are wrong"


def compiled_case(setup: Setup, case: Case) -> Row:
    """The error over that of eager, and how many modules Inductor generated."""
    import torch._functorch.config as functorch
    import torch._inductor.config as inductor
    from torch._dynamo.utils import counters
    from torch._inductor.utils import run_and_get_code

    shape, sizes = ((2, 5), {"layers": 1, "draws": 2}) if setup.tiny else ((3, 37), {})
    made: list[tuple[Decoder, Callable[[Tensor], Tensor]]] = []

    def remembered(model: Decoder, case: Case) -> Callable[[Tensor], Tensor]:
        made.append((model, compile_with(model, case)))
        return made[-1][1]

    counters.clear()
    with inductor.patch(fx_graph_cache=False), functorch.patch(enable_autograd_cache=False), warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*CUDAGraphs")
        ratio, codes = run_and_get_code(partial(check, case, setup.device, remembered, shape, **sizes))
        check_kept(*made[0], case, shape)
    assert codes, "Inductor generated no code"
    if setup.device == "cuda":
        lines = [line.split("#")[0] for code in codes for line in code.splitlines()]
        assert not [line for line in lines if "torch.ops.mhar" in line], "an operator is called and not its kernels"
        assert any("_named" in code for code in codes), "no kernel of ours is launched"
    assert not counters["inductor"]["cudagraph_skips"], "Inductor left a CUDA graph out"
    return {"ratio": ratio, "modules": len(codes)}


def check_kept(model: Decoder, compiled: Callable[[Tensor], Tensor], case: Case, shape: tuple[int, int]) -> None:
    """What is kept of one step is unharmed by the next, in which a CUDA graph writes where it wrote before."""
    device = next(model.parameters()).device
    first, second = (torch.randint(VOCABULARY, shape, device=device) for _ in range(2))
    kept = results(compiled, model, first, case.inference)  # copies, on the device
    on_host = {name: value.cpu().clone() for name, value in kept.items()}
    results(compiled, model, second, case.inference)
    again = results(compiled, model, first, case.inference)
    assert all(torch.equal(kept[name].cpu(), value) for name, value in on_host.items()), "a later step wrote into it"
    assert torch.equal(again["logits"], kept["logits"]), "the same step has another result"


def compile_with(model: Decoder, case: Case) -> Callable[[Tensor], Tensor]:
    """The compiled decoder: every site rewritten; one topology under CUDA graphs takes ``mode`` as users do."""
    settings: dict[str, Any] = {"options": mhar_compile.inductor_options(rewrite="always")}
    if case.graphs and case.residual == "mhar":
        settings = {"mode": "reduce-overhead"}
    elif case.graphs:
        settings = {"options": mhar_compile.inductor_options({"triton.cudagraphs": True}, rewrite="always")}
    function = torch.compile(
        model, backend=mhar_compile.backend, fullgraph=True, dynamic=True if case.dynamic else None, **settings
    )
    return partial(stepped, function)


def stepped(function: Callable[..., Any], *inputs: Any) -> Any:
    """Call a function whose earlier results may be overwritten: CUDA graphs reuse their memory."""
    torch.compiler.cudagraph_mark_step_begin()
    return function(*inputs)


def packages(setup: Setup) -> Iterator[Row]:
    """AOTInductor packages of small decoders, loaded and called: within the budget of eager."""
    package: Any = getattr(mhar_compile, "package", None)
    if package is None:
        yield {"name": "package", "skipped": "mhar_compile.package is not there"}
        return
    if setup.tiny:
        yield {"name": "package", "skipped": "the tests of mhar_compile.package cover the CPU"}
        return
    for residual, dtype in (("mhar", torch.bfloat16), ("block", torch.float32), ("delta", torch.bfloat16)):
        case = Case(residual, dtype, inference=True)
        yield {"name": str(case), "ratio": check(case, setup.device, partial(packaged, package), (3, 37))}


def packaged(package: Callable[..., str], model: Decoder, case: Case) -> Callable[[Tensor], Tensor]:
    """The decoder as it is loaded from a file."""
    example = torch.zeros(3, 37, dtype=torch.long, device="cuda")
    with torch.no_grad(), tempfile.TemporaryDirectory() as folder:
        program = torch.export.export(model.eval(), (example,))
        path = package(program, Path(folder) / "decoder.pt2")
        loaded: Callable[[Tensor], Tensor] = torch._inductor.aoti_load_package(path)
    return loaded


class Chain(nn.Module):
    """Sites one after another, each followed by a cheap function, each reading all outputs before it."""

    def __init__(self, sites: int, width: int, heads: int) -> None:
        super().__init__()
        self.queries = nn.ParameterList(torch.randn(heads, width // heads) / 8 for _ in range(sites))
        self.key_weights = nn.ParameterList(torch.ones(width) for _ in range(sites))

    def forward(self, x: Tensor) -> Tensor:
        """Rows [tokens, d], the last site's."""
        sources = [x]
        for query, key_weight in zip(self.queries, self.key_weights, strict=True):
            sources.append(torch.tanh(route(sources, query, key_weight=key_weight, eps=EPS)))
        return sources[-1]


def compilers(setup: Setup) -> dict[str, Callable[[Any], Any]]:
    """Ways to run a function, by name; on the CPU without the minute that Inductor takes."""
    plain, ours = ("aot_eager", "aot_eager") if setup.tiny else ("inductor", mhar_compile.backend)
    overhead = {} if setup.tiny else {"mode": "reduce-overhead"}
    return {
        "eager": lambda function: function,
        "torch.compile": partial(torch.compile, backend=plain, fullgraph=True),
        "mhar": partial(torch.compile, backend=ours, fullgraph=True),
        "mhar, reduce-overhead": partial(torch.compile, backend=ours, fullgraph=True, **overhead),
    }


def attempts(name: str, attempt: Callable[[], Iterator[Row]]) -> Iterator[Row]:
    """Rows of one way, or the error that ended them, which costs no other way."""
    torch._dynamo.reset()
    try:
        yield from attempt()
    except Exception as error:
        yield {"name": name, "error": f"{type(error).__name__}: {error}"[:1000]}


def chains(setup: Setup) -> Iterator[Row]:
    """Whole chains of sites, one call each: eager, torch.compile without passes, with them, and as CUDA graphs."""
    for name, sites, tokens, width, heads in [("tiny", 3, 2, 8, 2)] if setup.tiny else CHAINS:
        for way, compile_by in compilers(setup).items():
            title = f"chain of {sites} sites, {way}"
            yield from attempts(
                title, partial(chain_times, setup, compile_by, title, name, sites, tokens, width, heads)
            )


def chain_times(
    setup: Setup,
    compile_by: Callable[[Any], Any],
    title: str,
    shape: str,
    sites: int,
    tokens: int,
    width: int,
    heads: int,
) -> Iterator[Row]:
    torch.manual_seed(0)
    model = Chain(sites, width, heads).to(setup.device)
    x = torch.randn(tokens, width, device=setup.device).bfloat16().requires_grad_()
    leaves, run = [x, *model.parameters()], compile_by(model)

    def forward() -> None:
        with torch.no_grad():
            stepped(run, x)

    def both() -> None:
        out = stepped(run, x)
        torch.autograd.grad(out, leaves, torch.ones_like(out))

    for part, function in (("forward", forward), ("forward + backward", both)):
        yield {"name": title, "shape": shape, "pass": part, "us": setup.time(function)}
