"""Which combinations of sharding, precision, checkpointing and compiler are run, and on which decoder."""

from __future__ import annotations

import copy
import itertools
from dataclasses import astuple, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mhar_compile import Decoder, DecoderConfig, Router

VOCABULARY, BATCH, LENGTH = 32, 2, 9
RATE, MOMENTUM, LARGEST_NORM = (
    30.0,
    0.9,
    0.5,
)  # a rate at which a change is as large as a parameter, and its rounding small


@dataclass(frozen=True)
class Case:
    """One decoder, sharded and trained for a step.

    Attributes:
        residual: the topology.
        unit: what is sharded together: a block, a group of two blocks, or the whole model at its root.
        precision: "float32"; or the parameters cast to bfloat16, and the blocks' inputs with them ("bfloat16") or not
            ("bfloat16 uncast").
        reshard: parameters are dropped after the forward and gathered again for the backward.
        checkpointing: of each block; None, "full", or "selective", which saves matrix products.
        compiler: None; "passes", the graphs that our passes leave, node by node; or "inductor", "mhar" with code.
    """

    residual: str
    unit: str
    precision: str
    reshard: bool
    checkpointing: str | None
    compiler: str | None

    @property
    def layers(self) -> int:
        return {None: 4, "passes": 3, "inductor": 2}[self.compiler]

    def __str__(self) -> str:
        return "-".join(str(value).replace(" ", "-") for value in astuple(self))


FACTORS: list[list[Any]] = [
    ["mhar", "attnres", "block", "delta", "prenorm"],
    ["block", "group", "root"],
    ["float32", "bfloat16", "bfloat16 uncast"],
    [True, False],
    [None, "full", "selective"],
]


def pairwise(factors: list[list[Any]]) -> list[tuple[Any, ...]]:
    """Few rows in which every two values of two factors meet."""

    def pairs(row: tuple[Any, ...]) -> set[Any]:
        return set(itertools.combinations(enumerate(row), 2))

    rows, every = [], list(itertools.product(*factors))
    missing = set().union(*map(pairs, every))
    while missing:
        rows.append(max(every, key=lambda row: len(pairs(row) & missing)))
        missing -= pairs(rows[-1])
    return rows


TWO = [
    *(Case(*row, None) for row in pairwise(FACTORS)),
    Case("mhar", "block", "float32", True, "full", "passes"),
    Case("mhar", "group", "bfloat16", False, "selective", "passes"),
    Case("attnres", "root", "bfloat16 uncast", True, "full", "passes"),
    Case("block", "block", "bfloat16", True, "full", "passes"),
    Case("delta", "group", "float32", True, "full", "passes"),
    Case("delta", "block", "bfloat16 uncast", False, "selective", "passes"),
    Case("prenorm", "block", "bfloat16", True, "full", "passes"),
    Case("block", "root", "float32", False, None, "passes"),
    Case("mhar", "block", "bfloat16", True, "full", "inductor"),
]
FOUR = [
    Case("delta", "block", "float32", True, None, None),
    Case("mhar", "group", "bfloat16", True, "selective", None),
    Case("block", "root", "bfloat16 uncast", False, "full", None),
    Case("mhar", "block", "float32", False, "full", "passes"),
]


def decoder(residual: str, layers: int) -> Decoder:
    """The same on every process; routing parameters away from their initial values, where some gradients vanish."""
    torch.manual_seed(layers)
    config = DecoderConfig(VOCABULARY, 32, layers, 2, 1, 48, 64, residual=residual, routing_heads=4, blocks=2)  # type: ignore[arg-type]
    model = Decoder(config)
    for module in model.modules():
        if isinstance(module, Router):
            for parameter in module.parameters():
                nn.init.normal_(parameter, mean=float(parameter is module.key_weight), std=0.5)
    return model


def batch(world: int) -> Tensor:
    """Tokens [world, BATCH, LENGTH]: a part for each process."""
    return torch.randint(VOCABULARY, (world, BATCH, LENGTH), generator=torch.Generator().manual_seed(world))


def loss_of(logits: Tensor, tokens: Tensor) -> Tensor:
    return F.cross_entropy(logits.double().flatten(0, 1), tokens.flatten())


def single(model: nn.Module, parts: Tensor, dtype: torch.dtype, forward: Any = None) -> list[Tensor]:
    """What one process finds in eager: mean loss over the parts, gradients, their norm, and the parameters' change.

    The forward and backward run in dtype; gradients are added and the step is made in the model's own.
    """
    narrow = copy.deepcopy(model).to(dtype)
    losses = torch.stack([loss_of((forward or narrow)(tokens), tokens) for tokens in parts])
    losses.mean().backward()
    for parameter, cast in zip(model.parameters(), narrow.parameters(), strict=True):
        parameter.grad = None if cast.grad is None else cast.grad.to(parameter.dtype)
    return [losses.mean().detach(), *step(model)]


def step(model: nn.Module) -> list[Tensor]:
    """Gradients, the norm they are clipped by, and the parameters' change in one step of the optimizer."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    before = [whole(p.detach()).clone() for p in parameters]
    grads = [whole(p.grad).clone() for p in parameters]
    norm = whole(nn.utils.clip_grad_norm_(parameters, LARGEST_NORM))
    torch.optim.SGD(parameters, lr=RATE, momentum=MOMENTUM).step()
    return [*grads, norm, *(whole(p.detach()) - old for p, old in zip(parameters, before, strict=True))]


def whole(tensor: Any) -> Tensor:
    """A sharded tensor in one piece."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def error(values: list[Tensor], truth: list[Tensor]) -> float:
    """The error of all tensors together, each relative to its norm, in the mean square.

    The gradient of a query that has one source to choose from is zero: no norm counts as less than a thousandth of the
    largest.
    """
    norms = torch.stack([b.double().norm() for b in truth])
    errors = torch.stack([(a.double() - b.double()).norm() for a, b in zip(values, truth, strict=True)])
    return float((errors / norms.clamp(min=1e-3 * norms.max().item())).square().mean().sqrt())
