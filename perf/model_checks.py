"""Whole decoders, compiled against eager: logits and gradients beside those in float64.

Nothing here needs a GPU: the tests run the cases through interpreted kernels.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, get_args

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from mhar_compile import Decoder, Router
from mhar_compile.config import Residual

TOPOLOGIES = tuple(residual for residual in get_args(Residual) if residual != "prenorm")
WORSE = 1.5  # how much further from float64 than eager a compiled model may be
DRAWS = 16  # of tokens: in float32 one alone makes 0.3 to 3.9 of eager's error
VOCABULARY = 64


@dataclass(frozen=True)
class Case:
    """A decoder and how it is compiled and called; graphs: CUDA graphs, mode="reduce-overhead"."""

    residual: Any
    dtype: torch.dtype = torch.float32
    checkpointed: bool = False
    inference: bool = False
    dynamic: bool = False
    graphs: bool = False

    def __str__(self) -> str:
        flags = [name for name in ("checkpointed", "inference", "dynamic", "graphs") if getattr(self, name)]
        return "-".join([self.residual, str(self.dtype).removeprefix("torch."), *flags])


def cases() -> Iterator[Case]:
    """Every topology twice, so that each two of dtype, checkpointing, inference and CUDA graphs meet; and two more."""
    for n, residual in enumerate(TOPOLOGIES):
        for m in range(2):
            low, high = n % 2, n // 2
            dtype = (torch.float32, torch.bfloat16)[m]
            yield Case(residual, dtype, checkpointed=m != low, inference=m != high, graphs=(m + low + high) % 2 == 1)
    yield Case("mhar", torch.bfloat16, checkpointed=True, graphs=True)  # the two matter together in training alone
    yield Case("delta", torch.bfloat16, graphs=True)


def decoder(case: Case, device: str, seed: int = 0, **overrides: Any) -> Decoder:
    """Three layers, every routing parameter away from where it starts."""
    torch.manual_seed(seed)
    sizes = {"layers": 3, "vocabulary": VOCABULARY, **overrides}
    model = Decoder.from_preset("tiny", residual=case.residual, **sizes)
    for module in model.modules():
        if isinstance(module, Router):
            for parameter in module.parameters():
                nn.init.normal_(parameter, mean=float(parameter is module.key_weight), std=0.5)
    if case.checkpointed:
        for block in model.blocks:
            block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)  # type: ignore[method-assign]
    return model.to(device, case.dtype)


def results(function: Callable[..., Tensor], model: nn.Module, tokens: Tensor, inference: bool) -> dict[str, Tensor]:
    """Logits, and every gradient unless inference, in float64."""
    if inference:
        with torch.no_grad():
            return {"logits": function(tokens).double()}
    logits = function(tokens)
    loss = nn.functional.cross_entropy(logits.double().flatten(0, 1), tokens.flatten())
    names, parameters = zip(*model.named_parameters(), strict=True)
    grads = torch.autograd.grad(loss, parameters)
    return {"logits": logits.detach().double(), **{n: grad.double() for n, grad in zip(names, grads, strict=True)}}


def error(found: dict[str, Tensor], truth: dict[str, Tensor]) -> float:
    """The root mean square over all tensors of the error's norm over the truth's.

    Left out are gradients that are zero, of queries that read one source, and single numbers, whose error is luck.
    """
    assert all(value.isfinite().all() for value in found.values()), "not everything is finite"
    some = [name for name in truth if truth[name].norm() > 0 and truth[name].numel() > 1]
    ratios = [((found[name] - truth[name]).norm() / truth[name].norm()).square() for name in some]
    return float(torch.stack(ratios).mean().sqrt())


def check(
    case: Case,
    device: str,
    compile_with: Callable[[Decoder, Case], Any],
    shape: tuple[int, int],
    draws: int = DRAWS,
    **overrides: Any,
) -> float:
    """A compiled decoder's error over that of eager, both in the mean square over draws of tokens, and over as many
    draws in another shape where shapes are dynamic."""
    model = decoder(case, device, **overrides)
    exact = decoder(case, device, **overrides).double()
    compiled = compile_with(model, case)
    ours, eager = [], []
    batch, length = shape
    for size in [shape] * draws + [(batch + 1, length - 1)] * (draws * case.dynamic):
        tokens = torch.randint(VOCABULARY, size, device=device)
        truth = results(exact, exact, tokens, case.inference)
        ours.append(error(results(compiled, model, tokens, case.inference), truth))
        eager.append(error(results(model, model, tokens, case.inference), truth))
    ratio = math.hypot(*ours) / math.hypot(*eager)
    assert ratio <= WORSE, f"{case}: {ratio:.3g} times eager's error against float64"
    return ratio
