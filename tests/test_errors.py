"""Every mistake a caller can make with `route` and `Router`, and the message it meets, eager and compiled."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch

from mhar_compile import Router, route


class Mistake(NamedTuple):
    name: str
    error: type[Exception]
    message: str
    changes: dict[str, Any]


def good() -> dict[str, Any]:
    return {"sources": [torch.randn(2, 5, 12) for _ in range(3)], "query": torch.randn(4, 3)}


def meta(*shape: int) -> torch.Tensor:
    return torch.empty(*shape, device="meta")


S = good()["sources"]
MISTAKES = [
    Mistake("no sources", ValueError, "no sources", {"sources": []}),
    Mistake("null without residual", ValueError, "no sources", {"sources": [], "null_source": torch.zeros(12)}),
    Mistake("not a sequence", TypeError, "sources must be a sequence of tensors .* got dict", {"sources": {}}),
    Mistake("one bare source", TypeError, r"sources must be a sequence .* got a tensor of shape \[12\]", {"sources": torch.randn(12)}),
    Mistake("not tensors", TypeError, r"sources\[1\] must be a tensor, got float", {"sources": [S[0], 1.0]}),
    Mistake("first not a tensor", TypeError, r"sources\[0\] must be a tensor, got str", {"sources": ["x", S[0]]}),
    Mistake(
        "shape",
        ValueError,
        r"sources\[2\] has shape \[2, 5, 8\], expected \[2, 5, 12\], the shape of sources\[0\]",
        {"sources": [S[0], S[1], torch.randn(2, 5, 8)]},
    ),
    Mistake("dtype", ValueError, r"sources\[1\] has dtype torch.bfloat16, expected torch.float32", {"sources": [S[0], S[1].bfloat16()]}),
    Mistake("device", ValueError, r"sources\[1\] is on meta, expected cpu", {"sources": [S[0], meta(2, 5, 12)]}),
    Mistake("integers", TypeError, r"sources\[0\] has dtype torch.int64", {"sources": [torch.ones(2, 12, dtype=torch.int64)]}),
    Mistake("no width", ValueError, r"expected \[..., d\] with d >= 1", {"sources": [torch.randn(3, 0)]}),
    Mistake("scalar source", ValueError, r"sources\[0\] has shape \[\]", {"sources": [torch.tensor(1.0)]}),
    Mistake("heads", ValueError, "width 12 is not divisible by 5 heads", {"query": torch.randn(12), "heads": 5}),
    Mistake("no heads", ValueError, "width 12 is not divisible by 0 heads", {"query": torch.randn(12), "heads": 0}),
    Mistake("heads type", TypeError, "heads must be an int, got float", {"query": torch.randn(12), "heads": 4.0}),
    Mistake("flat query", ValueError, r"query has shape \[12\]; pass it as \[H, d/H\]", {"query": torch.randn(12)}),
    Mistake("query shape", ValueError, r"query has shape \[4, 4\], expected \[4, 3\]", {"query": torch.randn(4, 4)}),
    Mistake("query rows", ValueError, r"width 12 is not divisible by 5 heads", {"query": torch.randn(5, 3)}),
    Mistake("query and heads", ValueError, r"query has shape \[4, 3\], expected \[3, 4\]", {"heads": 3}),
    Mistake("query dtype", TypeError, "query has dtype torch.int64", {"query": torch.ones(4, 3, dtype=torch.int64)}),
    Mistake("query type", TypeError, "query must be a tensor, got list", {"query": [[0.0]]}),
    Mistake("query device", ValueError, "query is on meta, expected cpu", {"query": meta(4, 3)}),
    Mistake("key weight", ValueError, r"key_weight has shape \[4, 3\], expected \[12\]", {"key_weight": torch.ones(4, 3)}),
    Mistake("key weight device", ValueError, "key_weight is on meta", {"key_weight": meta(12)}),
    Mistake("null source", ValueError, r"null_source has shape \[1, 12\], expected \[12\]", {"null_source": torch.ones(1, 12)}),
    Mistake("null source dtype", TypeError, "null_source has dtype torch.bool", {"null_source": torch.ones(12, dtype=torch.bool)}),
    Mistake("gate", ValueError, r"gate has shape \[\], expected \[1\]", {"gate": torch.tensor(1.0)}),
    Mistake("gate type", TypeError, "gate must be a tensor, got float", {"gate": 1.0}),
    Mistake("residual", ValueError, r"residual has shape \[12\], expected \[2, 5, 12\]", {"residual": torch.ones(12)}),
    Mistake("residual dtype", ValueError, "residual has dtype torch.float64", {"residual": S[0].double()}),
    Mistake("eps zero", ValueError, "eps must be positive and finite, got 0", {"eps": 0.0}),
    Mistake("eps negative", ValueError, "eps must be positive and finite, got -1", {"eps": -1.0}),
    Mistake("eps nan", ValueError, "eps must be positive and finite, got nan", {"eps": float("nan")}),
    Mistake("eps type", TypeError, "eps must be a number, got str", {"eps": "1e-6"}),
]  # fmt: skip
every_mistake = pytest.mark.parametrize(
    "mistake", MISTAKES, ids=[mistake.name.replace(" ", "-") for mistake in MISTAKES]
)


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()


@every_mistake
def test_eager(mistake: Mistake):
    with pytest.raises(mistake.error, match=mistake.message):
        route(**{**good(), **mistake.changes})


@every_mistake
def test_compiled_raises_the_same(mistake: Mistake):
    with pytest.raises(mistake.error, match=mistake.message):
        torch.compile(route, backend="aot_eager")(**{**good(), **mistake.changes})


@every_mistake
def test_fullgraph_says_the_same(mistake: Mistake):
    """With fullgraph=True torch wraps what a traced function raises; the text of our error is inside."""
    with pytest.raises(Exception, match=mistake.message):
        torch.compile(route, backend="aot_eager", fullgraph=True)(**{**good(), **mistake.changes})


def test_none_of_the_mistakes_is_in_the_good_call():
    assert route(**good()).shape == (2, 5, 12)


@pytest.mark.parametrize(("width", "heads"), [(12, 5), (12, 0), (0, 1), (4, 8)])
def test_router_sizes(width: int, heads: int):
    with pytest.raises(ValueError, match=f"width {width} is not divisible by {heads} heads"):
        Router(width, heads)


def test_router_eps():
    with pytest.raises(ValueError, match="eps must be positive, got 0"):
        Router(12, 4, eps=0)
