"""Autocast and gradient scaling: where dtypes change, and that numbers are those of autocast without compiling."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mhar_compile import Router, compile_blocks, parameter_groups, route

TOKENS = torch.randint(32, (2, 7))
NARROW = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
pytestmark = [
    pytest.mark.usefixtures("fresh_compiler"),
    # Dynamo's own, for a graph input that is not a leaf
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
]


@NARROW
@pytest.mark.parametrize("residual", ["mhar", "delta"])
def test_the_stream_keeps_the_embeddings_dtype_and_outputs_are_cast_to_it(small_decoder, step, dtype, residual):
    model, seen = small_decoder(residual, dtype=torch.float32), []
    for block in model.blocks:
        block.attention.register_forward_hook(lambda _, args, out: seen.append((args[0].dtype, out.dtype)))
        block.register_forward_hook(lambda _, args, out: seen.extend((x.dtype, x.dtype) for x in out))
    with torch.autocast("cpu", dtype=dtype):
        logits, *grads = step(model, TOKENS)
    assert logits.dtype == dtype  # of the last product
    assert {grad.dtype for grad in grads} == {torch.float32}
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert set(seen) == {(torch.float32, dtype), (torch.float32, torch.float32)}  # narrow from a projection, cast back


def test_a_bfloat16_model_has_a_bfloat16_stream(small_decoder):
    model, seen = small_decoder(dtype=torch.bfloat16), set()
    for block in model.blocks:
        block.register_forward_hook(lambda _, args, out: seen.update(x.dtype for x in out))
    model(TOKENS)
    assert seen == {torch.bfloat16}


@NARROW
def test_autocast_leaves_a_route_alone(dtype):
    """The operator has no autocast rule: it computes in float32 whatever its sources are."""
    sources, router = [torch.randn(3, 8) for _ in range(4)], Router(8, 2)
    torch.nn.init.normal_(router.query)
    expected = router(sources)
    with torch.autocast("cpu", dtype=dtype):
        assert torch.equal(router(sources), expected)
        assert router([x.to(dtype) for x in sources]).dtype == dtype


def test_sources_of_two_dtypes_are_an_error_that_says_which():
    """What a list becomes under autocast where nobody casts: an embedding and the outputs of projections."""
    sources, query = [torch.randn(3, 8)], torch.randn(2, 4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        sources.append(torch.nn.functional.linear(sources[0], torch.eye(8)))
        with pytest.raises(ValueError, match=r"sources\[1\] has dtype torch.bfloat16, expected torch.float32"):
            route(sources, query)


@NARROW
@pytest.mark.parametrize("how", ["blocks", "whole"])
def test_compiled_inside_autocast(small_decoder, step, dtype, how):
    plain, model = (small_decoder("delta", dtype=torch.float32) for _ in range(2))
    compiled: Any = torch.compile(model, backend="aot_eager", fullgraph=True)
    if how == "blocks":
        compiled = compile_blocks(model, backend="aot_eager")
    with torch.autocast("cpu", dtype=dtype):
        results, expected = step(model, TOKENS, compiled), step(plain, TOKENS)
    truth = step(small_decoder("delta"), TOKENS)
    for ours, theirs, exact in zip(results, expected, truth, strict=True):
        assert ours.dtype == theirs.dtype
        assert (ours - exact).norm() <= 1.5 * (theirs - exact).norm() + 1e-6 * exact.norm()


@NARROW
@pytest.mark.parametrize("compiled", [False, True])
def test_gradient_scaling(small_decoder, dtype, compiled):
    """Scaled and unscaled again: the step of an unscaled backward; an overflow skips the step and halves the scale."""
    models = [small_decoder(layers=1, dtype=torch.float32) for _ in range(2)]
    if compiled:
        compile_blocks(models[0], backend="aot_eager")
    start = [parameter.detach().clone() for parameter in models[0].parameters()]
    for model, scale in zip(models, (128.0, 1.0), strict=True):
        optimizer = torch.optim.SGD(parameter_groups(model, lr=0.5, weight_decay=0.0))
        scaler = torch.amp.GradScaler("cpu", init_scale=scale)
        with torch.autocast("cpu", dtype=dtype):
            loss = torch.nn.functional.cross_entropy(model(TOKENS).flatten(0, 1).float(), TOKENS.flatten())
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
    for one, other, before in zip(*(model.parameters() for model in models), start, strict=True):
        moved = (other - before).norm()  # zero for the first site, which reads one source
        assert (one - other).norm() <= 32 * torch.finfo(dtype).eps * moved + 1e-7

    assert not torch.equal(models[0].embedding.weight, start[0])

    model = models[0]
    optimizer = torch.optim.SGD(parameter_groups(model, lr=0.5, weight_decay=0.0))
    scaler = torch.amp.GradScaler("cpu", init_scale=3e38)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    with torch.autocast("cpu", dtype=dtype):
        loss = model(TOKENS).float().square().sum()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() < 2e38
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), before, strict=True))
