"""Correctness of the kernels of a site on a device: what must hold before a time is worth measuring.

Every check raises AssertionError with what was found. Nothing here needs a GPU: the tests run all of it under Triton's
interpreter at tiny sizes.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from mhar_compile import route

from .budgets import LAYOUTS, Problem, Recipe, ratios

EPS = 1e-6
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def on_device(problem: Problem, device: str) -> Problem:
    """The problem on a device, every tensor with the strides and the offset that it has here."""
    copies: dict[tuple[int, torch.dtype], Tensor] = {}

    def placed(x: Tensor) -> Tensor:
        key = x.untyped_storage().data_ptr(), x.dtype
        if key not in copies:
            copies[key] = torch.empty(0, dtype=x.dtype).set_(x.untyped_storage()).to(device)
        return copies[key].as_strided(x.shape, x.stride(), x.storage_offset())

    single: dict[str, Any] = {name: None if x is None else placed(x) for name, x in problem.arguments().items()}
    return replace(problem, sources=[placed(x) for x in problem.sources], grad_out=placed(problem.grad_out), **single)


def random_recipes(seed: int, number: int, most: int, tokens: int) -> Iterator[Recipe]:
    """Recipes of all kinds, with up to `most` sources and about `tokens` tokens."""
    pick = random.Random(seed)
    for _ in range(number):
        null, residual, dtype = pick.random() < 0.5, pick.random() < 0.5, pick.choice(DTYPES)
        heads, head_width = pick.choice(
            [(1, 7), (2, 64), (3, 24), (8, 16), (8, 72), (4, 160), (9, 64), (1, 512), (5, 33)]
        )
        yield Recipe(
            tokens=pick.choice([(1,), (tokens,), (2, max(tokens // 2, 1)), (0,)]),
            count=pick.choice([*range(0 if null and residual else 1, 10), min(17, most), most]),
            heads=heads,
            head_width=head_width,
            dtype=dtype,
            parameter_dtype=pick.choice([dtype, torch.float32]),
            key_weight=pick.random() < 0.7,
            null_source=null,
            residual=residual,
            gate=pick.choice([None, 0, 1]),
            query_scale=pick.choice([0.0, 0.3, 1.0, 3.0]),
            shared=pick.random() < 0.3,
            decades=dtype != torch.float16 and pick.random() < 0.3,
            layouts=tuple(pick.choices(LAYOUTS, k=3)),
        )


def check_budget(device: str, recipe: Recipe, seed: int) -> float:
    """The site's outputs and gradients against float64: the largest error / budget, at most 1."""
    problem = recipe.problem(seed)
    worst = ratios(problem, {name: result.cpu() for name, result in on_device(problem, device).run().items()})
    assert max(worst.values()) <= 1, f"{recipe}: error / budget {worst}"
    return max(worst.values())


def forward_backward(sources: list[Tensor], query: Tensor, dout: Tensor, **options: Any) -> list[Tensor]:
    """Output and gradients of one site, on tensors of any layout."""
    leaves = [*(x.detach().requires_grad_() for x in sources), query.detach().requires_grad_()]
    out = route(leaves[:-1], leaves[-1], eps=EPS, **options)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


def check_batch(device: str, tokens: int, width: int, heads: int, count: int, dtype: torch.dtype) -> None:
    """A token's result is bitwise the same alone, in another batch, and from strided or expanded sources."""
    torch.manual_seed(tokens)
    memory = torch.randn(tokens, count, width, device=device).to(dtype)
    sources, dout = list(memory.unbind(1)), torch.randn(tokens, width, device=device).to(dtype)  # strided
    sources.append(torch.randn(1, width, device=device).to(dtype).expand(tokens, width))
    query = torch.randn(heads, width // heads, device=device)
    strided = forward_backward(sources, query, dout)
    contiguous = forward_backward([x.contiguous() for x in sources], query, dout)
    assert all(torch.equal(a, b) for a, b in zip(strided, contiguous, strict=True)), "strides change bits"
    some = slice(tokens // 3, tokens // 3 + max(tokens // 4, 1))
    part = forward_backward([x[some] for x in sources], query, dout[some])
    for whole, own in zip(contiguous[:-1], part[:-1], strict=True):
        assert torch.equal(whole[some], own), "the batch around a token changes its bits"


def check_layouts(device: str, tokens: tuple[int, int], width: int, heads: int, count: int, dtype: torch.dtype) -> None:
    """Rows with two strides give the bits of contiguous ones: parts, transposes and expansions of [B, T, d]."""
    torch.manual_seed(count)
    batch, length = tokens

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, width, device=device).to(dtype)

    kinds: list[Callable[[], Tensor]] = [
        lambda: random(batch, length + 1)[:, 1:],
        lambda: random(batch, length + 2)[:, :length],
        lambda: random(length, batch).transpose(0, 1),
        lambda: random(1, length).expand(batch, -1, -1),
        lambda: random(batch, 1).expand(-1, length, -1),
        lambda: random(batch, length),
    ]
    sources = [kinds[n % len(kinds)]() for n in range(max(count, len(kinds)))]
    query = torch.randn(heads, width // heads, device=device)
    options = {"key_weight": torch.randn(width, device=device), "null_source": torch.randn(width, device=device)}
    for residual, dout in zip((kinds[0](), kinds[2]()), (kinds[2](), kinds[1]()), strict=True):
        uneven = forward_backward(sources, query, dout, residual=residual, **options)
        residual, dout = residual.contiguous(), dout.contiguous()
        plain = forward_backward([x.contiguous() for x in sources], query, dout, residual=residual, **options)
        assert all(torch.equal(a, b) for a, b in zip(uneven, plain, strict=True)), "two strides change bits"


def check_repeats(device: str, tokens: int, width: int, heads: int, count: int, repeats: int) -> None:
    """Outputs and all gradients are bitwise the same every time."""
    torch.manual_seed(count)
    sources = [torch.randn(tokens, width, device=device).bfloat16() for _ in range(count)]
    query, dout = torch.randn(heads, width // heads, device=device), torch.randn_like(sources[0])
    options = {"key_weight": torch.randn(width, device=device), "gate": torch.randn(1, device=device)}
    options["null_source"], options["residual"] = torch.randn(width, device=device), torch.randn_like(dout)
    first = forward_backward(sources, query, dout, **options)
    for n in range(repeats):
        again = forward_backward(sources, query, dout, **options)
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True)), f"repetition {n} differs"


def check_large(device: str, tokens: int, width: int, heads: int, count: int) -> None:
    """The last tokens of huge tensors are bitwise what they are in a small batch."""
    generator = torch.Generator(device=device).manual_seed(0)
    shape = (tokens, width)
    sources = [
        torch.empty(shape, device=device, dtype=torch.bfloat16).normal_(generator=generator) for _ in range(count)
    ]
    dout = torch.empty(shape, device=device, dtype=torch.bfloat16).normal_(generator=generator)
    query = torch.randn(heads, width // heads, device=device)
    whole = forward_backward(sources, query, dout)
    last = slice(tokens - min(tokens, 64), tokens)
    part = forward_backward([x[last].clone() for x in sources], query, dout[last].clone())
    for large, small in zip(whole[:-1], part[:-1], strict=True):
        assert torch.equal(large[last], small), "offsets of the last tokens are wrong"
