"""Activation checkpointing, eager and compiled: the numbers of the plain decoder, and what is computed again."""

from __future__ import annotations

import functools
from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import mhar_compile
from mhar_compile import Router
from mhar_compile.compiler import joint_pass
from mhar_compile.lowering.tracing import Trace, tracer

pytestmark = [
    pytest.mark.usefixtures("fresh_compiler"),
    pytest.mark.filterwarnings("ignore:.*context_fn is passed to torch.utils.checkpoint under torch.compile"),
]
TOKENS = torch.randint(32, (2, 7))
CONTEXTS = functools.partial(create_selective_checkpoint_contexts, mhar_compile.checkpoint_policy)


def checkpointed(model: nn.Module, kind: str) -> nn.Module:
    """Full or selective checkpointing of each block, of each sublayer and site, of both, or of all blocks together."""
    options = {"context_fn": CONTEXTS} if kind == "selective" else {}
    if kind == "whole":
        model.blocks.forward = functools.partial(checkpoint, model.blocks.forward, use_reentrant=False)
    for n, block in enumerate(model.blocks):
        if kind in ("sublayers", "nested"):
            for name in ("attention_site", "attention", "mlp_site", "mlp"):
                part = getattr(block, name)
                part.forward = functools.partial(checkpoint, part.forward, use_reentrant=False)
        if kind in ("blocks", "nested", "selective"):
            model.blocks[n] = checkpoint_wrapper(block, **options)
    return model


class Calls(TorchDispatchMode):
    """Counts the operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[str(op)] += 1
        return op(*args, **(kwargs or {}))


@pytest.mark.parametrize("residual", ["mhar", "delta"])
@pytest.mark.parametrize(
    ("kind", "routes"), [("blocks", 8), ("sublayers", 8), ("nested", 12), ("selective", 8), ("whole", 8)]
)
def test_a_recomputed_forward_gives_the_same_bits(small_decoder, step, residual, kind, routes):
    """The sites of two blocks run twice, a third time where regions are nested; the last site stands outside."""
    model, plain = checkpointed(small_decoder(residual, dtype=torch.bfloat16), kind), small_decoder(residual)
    with Calls() as calls:
        results = step(model, TOKENS)
    for actual, wanted in zip(results, step(plain.bfloat16(), TOKENS), strict=True):
        assert torch.equal(actual, wanted)
    assert calls.counts["mhar.route.default"] == routes + (residual == "mhar")
    assert calls.counts["mhar.route_backward.default"] == 4 + (residual == "mhar")


def test_the_policy_saves_products_and_attention(small_decoder, step):
    counts = {}
    for kind in ("none", "blocks", "selective"):
        with Calls() as calls:
            step(checkpointed(small_decoder(), kind), TOKENS)
        counts[kind] = calls.counts
    product, attention = "aten.mm.default", "aten._scaled_dot_product_flash_attention_for_cpu.default"
    for op in (product, attention):
        assert counts["selective"][op] == counts["none"][op] < counts["blocks"][op]
    assert counts["selective"]["aten.silu.default"] == counts["blocks"]["aten.silu.default"] == 4


@pytest.mark.parametrize(
    ("kind", "rewrite"), [("sublayers", "never"), ("nested", "always"), ("whole", "always"), ("selective", "never")]
)
def test_compiled_checkpointing_computes_sites_again(small_decoder, step, same, kind, rewrite):
    """One graph; its backward computes every checkpointed site again, by whole routes or, with the passes, by mixes."""
    found, model = Trace(), checkpointed(small_decoder(), kind)
    backend = tracer(found, joint_pass(reports=found.reports.append, rewrite=rewrite))
    same(step(model, TOKENS, torch.compile(model, backend=backend, fullgraph=True)), step(small_decoder(), TOKENS))
    ((_, backward),) = found.after
    again = "mhar.mix.default" if rewrite == "always" else "mhar.route.default"
    assert len([node for node in backward.nodes if str(node.target) == again]) == 4
    assert not [node for node in backward.nodes if str(node.target) == "mhar.score.default"]


def test_two_forwards_then_two_backwards(small_decoder, same):
    """Of one module, in both orders; a buffer of gradients in the module would mix them up."""
    batches = [torch.randint(32, (2, 7)) for _ in range(2)]
    plain = small_decoder()
    expected = [list(torch.autograd.grad(plain(batch).square().sum(), list(plain.parameters()))) for batch in batches]
    for kind in ("none", "blocks"):
        model = checkpointed(small_decoder(), kind)
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        parameters = list(model.parameters())
        for function in (model, compiled):
            for order in ((0, 1), (1, 0)):
                losses = [function(batch).square().sum() for batch in batches]
                for n in order:
                    same(list(torch.autograd.grad(losses[n], parameters)), expected[n])


@pytest.mark.parametrize("rewrite", ["never", "always"])
def test_a_memory_budget_weighs_routes_as_work(small_decoder, step, same, rewrite):
    """torch takes a custom operator for free to redo unless told; the backend tells it, and formulas say how much."""
    plain = small_decoder(width=64, ffn_width=128, max_positions=128)
    tokens = torch.randint(32, (1, 128))
    expected, recomputed = step(plain, tokens), {}
    for budget, counted in ((0.7, False), (0.7, True)):
        torch._dynamo.reset()
        found = Trace()
        compiled = torch.compile(plain, backend=tracer(found, joint_pass(rewrite=rewrite)), fullgraph=True)
        with torch._functorch.config.patch(activation_memory_budget=budget, is_non_builtin_to_include=counted):
            same(step(plain, tokens, compiled), expected)
        names = [str(node.target) for node in found.after[0][1].nodes]
        recomputed[budget, counted] = sum(name in ("mhar.route.default", "mhar.mix.default") for name in names)
    assert recomputed[0.7, False] == 5  # all, although the budget is met with fewer
    assert recomputed[0.7, True] < 5


def test_the_backend_tells_the_partitioner(monkeypatch):
    seen = []

    class Inductor:
        def __init__(self, *_: Any) -> None:
            pass

        def __call__(self, model: Any, inputs: Any) -> Any:
            seen.append(torch._functorch.config.is_non_builtin_to_include)
            return model

    monkeypatch.setattr(torch, "_TorchCompileInductorWrapper", Inductor)
    torch.compile(Router(8, 2), backend=mhar_compile.backend)([torch.ones(8)])
    assert seen == [True]
    assert not torch._functorch.config.is_non_builtin_to_include


@pytest.mark.parametrize(
    ("kind", "autocast"),
    [("blocks", torch.bfloat16), ("sublayers", torch.float16), ("selective", torch.bfloat16), ("selective", None)],
)
def test_checkpointing_under_compile_and_autocast_saves_what_it_recomputes(small_decoder, step, kind, autocast):
    """What CheckpointError calls different metadata; the numbers are those of autocast alone, up to its rounding."""
    plain, wide = small_decoder(dtype=torch.float32), small_decoder()
    model = checkpointed(small_decoder(dtype=torch.float32), kind)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    with torch.autocast("cpu", dtype=autocast or torch.bfloat16, enabled=autocast is not None):
        alone, eager, both = step(plain, TOKENS), step(model, TOKENS), step(model, TOKENS, compiled)
    for one, two, three, truth in zip(alone, eager, both, step(wide, TOKENS), strict=True):
        assert torch.equal(one, two)
        assert one.dtype == three.dtype
        scale = truth.norm().clamp(min=1e-9)
        assert (three.double() - truth).norm() / scale <= 1.5 * (one.double() - truth).norm() / scale + 1e-6
