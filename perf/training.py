"""Sections of perf/gpu.py that time training steps, routing beside pre-norm: forward and backward, no optimizer."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import mhar_compile
from mhar_compile import Decoder, DecoderConfig, Router
from mhar_compile.decoder import Block

from .clock import Row, Setup
from .models import stepped

Make = Callable[[Any], tuple[nn.Module, list[Tensor]]]  # a residual to a model that returns a loss, and its inputs
Step = Callable[[], None]
TURNS = 3  # the steps are timed one after the other, as often as this
EARLIER_DELTAS = 3  # of the blocks before the slice: all but its first site read the null source and four deltas


def step_100m(setup: Setup) -> Iterator[Row]:
    """A step of the 100M decoder, batch 8 x 2048 as in the paper, beside pre-norm; minutes of compilation."""
    yield from decoder_steps(setup, "100m", 8, 2048)


def step_350m(setup: Setup) -> Iterator[Row]:
    """A step of the 350M decoder, batch 4 x 1024, beside pre-norm; minutes of compilation."""
    yield from decoder_steps(setup, "350m", 4, 1024)


def step_1b(setup: Setup) -> Iterator[Row]:
    """A step of the 1B decoder, batch 2 x 1024, beside pre-norm; minutes of compilation."""
    yield from decoder_steps(setup, "1b", 2, 1024)


def decoder_steps(setup: Setup, preset: str, batch: int, length: int) -> Iterator[Row]:
    """Steps of a preset with the paper's microbatch, in bfloat16."""
    sizes = {"layers": 1, "vocabulary": 16, "width": 8, "heads": 2, "kv_heads": 1, "ffn_width": 8, "routing_heads": 2}
    if setup.tiny:
        batch, length = 2, 4

    def make(residual: Any) -> tuple[nn.Module, list[Tensor]]:
        model = Decoder.from_preset(preset, residual=residual, **(sizes if setup.tiny else {}))
        return Loss(model), [torch.randint(model.config.vocabulary, (batch, length + 1))]

    yield from times(setup, preset, make, "mhar", tokens=batch * length)


def slice_8b(setup: Setup) -> Iterator[Row]:
    """A step of four layers from the 8B delta decoder, each checkpointed, 8192 tokens, beside pre-norm."""
    sizes: dict[str, Any] = {"layers": 4, "blocks": 1}
    if setup.tiny:
        sizes = {"layers": 1, "width": 8, "heads": 2, "kv_heads": 1, "ffn_width": 8, "routing_heads": 2}
    config, tokens = DecoderConfig.from_preset("8b", **sizes), setup.size(8192, 3)

    def make(residual: Any) -> tuple[nn.Module, list[Tensor]]:
        rows = 1 + EARLIER_DELTAS * (residual == "delta")
        stream = [torch.randn(1, tokens, config.width).bfloat16().requires_grad_() for _ in range(rows)]
        return Slice(replace(config, residual=residual)), stream

    yield from times(setup, "8B slice", make, "delta", tokens=tokens)


STEPS = {section.__name__: section for section in (step_100m, step_350m, step_1b, slice_8b)}


class Loss(nn.Module):
    """A decoder's mean cross-entropy of the next token; tokens [B, T + 1]."""

    def __init__(self, decoder: Decoder) -> None:
        super().__init__()
        self.decoder = decoder

    def forward(self, tokens: Tensor) -> Tensor:
        logits = self.decoder(tokens[:, :-1])
        return nn.functional.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())


class Slice(nn.Module):
    """Layers from the middle of a decoder, the gates open; the mean square of the running sum after them."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(config, layer) for layer in range(config.layers))
        for module in self.modules():
            if isinstance(module, Router):
                nn.init.constant_(module.gate, 0.5)

    def forward(self, *stream: Tensor) -> Tensor:
        for block in self.blocks:
            stream = checkpoint(block, stream, use_reentrant=False)
        return stream[0].float().square().mean()


def ways(setup: Setup, routed: str) -> dict[str, tuple[str, dict[str, Any]]]:
    """How the steps are compiled, by name: a residual, and torch.compile's arguments."""
    plain, ours = ("aot_eager", "aot_eager") if setup.tiny else ("inductor", mhar_compile.backend)
    graphs = {} if setup.tiny else {"mode": "reduce-overhead"}
    return {
        "prenorm": ("prenorm", {"backend": plain}),
        routed: (routed, {"backend": ours}),
        f"{routed}, reduce-overhead": (routed, {"backend": ours, **graphs}),
        "prenorm, reduce-overhead": ("prenorm", {"backend": plain, **graphs}),
    }


def times(setup: Setup, title: str, make: Make, routed: str, tokens: int) -> Iterator[Row]:
    """Each way's first time and its memory as soon as it is compiled, then all ways in turns."""
    steps: dict[str, Step] = {}
    for way, (residual, options) in ways(setup, routed).items():
        name = f"{title} {way}"
        try:
            steps[way], gb = prepared(setup, make, residual, options)
            yield {"name": name, "us": setup.time(steps[way]), **gb}
        except Exception as error:
            yield {"name": name, "error": f"{type(error).__name__}: {error}"[:1000]}
    taken = {way: [] for way in steps}
    for _ in range(TURNS):
        for way, step in steps.items():
            taken[way].append(setup.time(step))
    medians = {way: statistics.median(each) for way, each in taken.items()}
    for way, us in medians.items():
        row: Row = {"name": f"{title} {way}, in turns", "us": us, "tokens_s": tokens / (us * 1e-6)}
        yield row | ({"of_prenorm": medians["prenorm"] / us} if "prenorm" in medians else {})


def prepared(setup: Setup, make: Make, residual: str, options: dict[str, Any]) -> tuple[Step, Row]:
    """A compiled forward and backward, and on a GPU its peak in gigabytes: parameters, gradients, activations."""
    cuda = setup.device == "cuda"
    before = torch.cuda.memory_allocated() if cuda else 0
    torch.manual_seed(0)
    with torch.device(setup.device):
        model, inputs = make(residual)
    model = model.bfloat16()
    run = torch.compile(model, fullgraph=True, **options)
    leaves = [*model.parameters(), *inputs]

    def step() -> None:
        for leaf in leaves:
            leaf.grad = None
        stepped(run, *inputs).backward()

    step()
    if not cuda:
        return step, {}
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    step()
    return step, {"gb": (torch.cuda.max_memory_allocated() - before) / 1e9}
