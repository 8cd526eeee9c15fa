"""What all tests share: Hypothesis profiles, one thread a process, small decoders and what one step of them gives."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import settings
from torch import Tensor, nn

settings.register_profile("local", deadline=None, print_blob=True)
settings.register_profile("repeatable", deadline=None, print_blob=True, derandomize=True)
settings.load_profile("repeatable" if os.environ.get("CI") else "local")


def pytest_configure(config):
    torch.set_num_threads(1)  # tensors are small, and pytest's workers share the cores


@pytest.fixture
def small_decoder() -> Callable[..., Any]:
    """Builds float64 decoders with random routing parameters; equal arguments give equal weights."""
    from mhar_compile import Decoder, DecoderConfig, Router

    def build(residual: Any = "mhar", layers: int = 2, dtype: torch.dtype = torch.float64, **overrides: Any) -> Decoder:
        shape = {"vocabulary": 32, "width": 16, "heads": 2, "kv_heads": 1, "ffn_width": 24, "max_positions": 32}
        config = DecoderConfig(
            **{**shape, "layers": layers, "residual": residual, "routing_heads": 4, "blocks": 2, **overrides}
        )
        with torch.random.fork_rng():
            torch.manual_seed(0)
            model = Decoder(config)
            for module in model.modules():
                if isinstance(module, Router):
                    for parameter in module.parameters():
                        nn.init.normal_(parameter, mean=float(parameter is module.key_weight), std=0.5)
        return model.to(dtype)

    return build


@pytest.fixture
def step() -> Callable[..., list[Tensor]]:
    """Runs a decoder forward and backward: the logits and the gradient of every trainable parameter."""

    def run(model: nn.Module, tokens: Tensor, call: Callable[..., Tensor] | None = None) -> list[Tensor]:
        logits = (model if call is None else call)(tokens)
        loss = nn.functional.cross_entropy(logits.flatten(0, -2).double(), tokens.flatten())
        return [logits.detach(), *torch.autograd.grad(loss, [p for p in model.parameters() if p.requires_grad])]

    return run


@pytest.fixture
def same() -> Callable[..., None]:
    """Asserts that two lists of float64 results are equal but for the order of summation."""

    def check(results: list[Tensor], expected: list[Tensor]) -> None:
        for actual, wanted in zip(results, expected, strict=True):
            torch.testing.assert_close(actual, wanted, rtol=1e-9, atol=1e-12)

    return check


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    """Dynamo without compiled code, before and after; hitting its recompile limit is an error."""
    torch._dynamo.reset()
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        yield
    torch._dynamo.reset()
