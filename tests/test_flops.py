"""FLOPs as torch.utils.flop_counter counts them: those of the paper's listing, in which sites are einsums."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from mhar_compile import Decoder, route
from mhar_compile.ops import figure3

mhar = torch.ops.mhar


def flops(function: Callable[[], Any]) -> int:
    with FlopCounterMode(display=False) as counter:
        function()
    total: int = counter.get_total_flops()
    return total


# einsum multiplies and sums, uncounted, where an index has one value: so two heads, sources and tokens at the least
@pytest.mark.parametrize(("count", "heads", "tokens"), [(2, 2, (3,)), (5, 4, (2, 3)), (7, 2, (4, 1, 2))])
def test_a_site_counts_what_the_listing_counts(count: int, heads: int, tokens: tuple[int, ...]) -> None:
    sources = [torch.randn(*tokens, 8, requires_grad=True) for _ in range(count)]
    query, key = torch.randn(heads, 8 // heads, requires_grad=True), torch.ones(8, requires_grad=True)

    def ours() -> Tensor:
        return route(sources, query, key_weight=key)

    def listing() -> Tensor:
        return figure3(sources, query, key)

    assert flops(ours) == flops(listing) > 0
    assert flops(lambda: ours().sum().backward()) == flops(lambda: listing().sum().backward()) == 3 * flops(ours)


def test_the_null_source_counts_as_a_source() -> None:
    sources, query, null = [torch.randn(5, 8) for _ in range(3)], torch.randn(2, 4), torch.randn(8)
    listed = flops(lambda: route([null.expand(5, 8), *sources], query))
    assert flops(lambda: route(sources, query, null_source=null)) == listed


def test_steps_add_up_to_the_operator() -> None:
    """Score and mix are the forward; pull is the backward, to which <dout, mixture> comes once a site."""
    sources, query = [torch.randn(3, 5, 8) for _ in range(4)], torch.randn(2, 4)
    forward = flops(lambda: route(sources, query))
    contraction = forward // 8  # of one source with one site
    folded = torch.randn(6, 2, 4)
    assert flops(lambda: mhar.score(sources[0], folded, 1, 5, 1e-6)) == 5 * contraction
    scored = [mhar.score(source, folded, 0, 6, 1e-6) for source in sources]
    logits, rstds, firsts = [x for x, _ in scored], [x for _, x in scored], [0] * 4

    def mix(n: int, carried: Tensor | None, lse: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        rest = (None, None, carried, lse, torch.float32, False)
        result: tuple[Tensor, Tensor, Tensor] = mhar.mix(sources[n:], logits[n:], firsts[n:], 1, *rest)
        return result

    assert flops(lambda: mix(0, None, None)) == 4 * contraction
    mixtures, lses = mhar.mix_tile(sources[:3], logits[:3], firsts[:3], [1, 2])
    assert flops(lambda: mhar.mix_tile(sources[:3], logits[:3], firsts[:3], [1, 2])) == 6 * contraction
    assert flops(lambda: mix(3, mixtures[0], lses[0])) == 2 * contraction  # the last source and what is carried
    out, lse, _ = mix(0, None, None)
    assert flops(lambda: mhar.coupling(out, out, None, 2)) == contraction
    rest = (sources, logits, firsts, 1, lse, None)
    assert flops(lambda: mhar.coupling_from_sources(out, *rest)) == 4 * contraction
    coupling = mhar.coupling(out, out, None, 2)
    pull = (sources, rstds, logits, firsts, [1], [out], [lse], [coupling], [None], folded, [], [False] * 4)
    assert flops(lambda: mhar.pull(*pull)) == 16 * contraction == 2 * forward


def test_a_decoder_counts_its_routing() -> None:
    model, tokens = Decoder.from_preset("tiny", layers=2), torch.zeros(1, 16, dtype=torch.long)
    plain = Decoder.from_preset("tiny", layers=2, residual="prenorm")
    routing = 4 * 16 * 128 * (1 + 2 + 3 + 4 + 5)  # five sites read one source more each
    assert flops(lambda: model(tokens)) == flops(lambda: plain(tokens)) + routing
    assert flops(lambda: model(tokens).sum().backward()) == flops(lambda: plain(tokens).sum().backward()) + 3 * routing


@pytest.mark.parametrize("order", ["mhar_compile, torch.utils.flop_counter", "torch.utils.flop_counter, mhar_compile"])
def test_counted_whichever_is_imported_first(order: str) -> None:
    code = (
        f"import torch, {order}\n"
        "counter = torch.utils.flop_counter.FlopCounterMode(display=False)\n"
        "with counter: mhar_compile.route([torch.ones(2, 4)], torch.ones(2, 2))\n"
        "print(counter.get_total_flops())"
    )
    root = Path(__file__).parents[1]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "32", done.stderr
