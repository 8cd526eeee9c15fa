"""Where the rows of a launch lie: tensors [..., d] of one shape, read in place by one stride, or by two."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import Any

from torch import Tensor

from .rules import RECTANGLE


@dataclass(frozen=True)
class Row:
    """A tensor whose row of token t begins at t * stride, plus t // inner * jump where its rows lie in several runs.

    Attributes:
        tensor: the memory; elements of a row follow each other.
        stride: elements from one token to the next of a run.
        jump: what is added for every `inner` tokens before; None where one stride is all there is.
    """

    tensor: Tensor
    stride: int
    jump: int | None


def rows_of(tensors: Sequence[Tensor]) -> tuple[list[Row], int | None]:
    """The rows of tensors [..., d] of one shape, and the length of their runs: None where no tensor has several.

    A tensor [d] is one row that all tokens share. The runs are the same for all, such that the fewest are copied.
    """
    close = [x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous() for x in tensors]
    leading = next((x.shape[:-1] for x in close if x.dim() > 1), ())
    strided = [x for x in close if x.dim() > 1 and not x.is_contiguous()]  # the others fit any runs
    splits = range(max(len(leading), 1))
    whole = [n for n in splits if all(fits(x, n) for x in strided)]
    n = whole[0] if whole else max(splits, key=lambda n: sum(fits(x, n) for x in strided))
    inner = prod(leading[n:])
    return [row_of(x, n, inner) for x in close], inner if n else None


def row_of(x: Tensor, n: int, inner: int) -> Row:
    """A tensor whose runs are the dimensions from n on, of `inner` tokens; copied if it has no such runs."""
    if x.dim() == 1:
        return Row(x, 0, 0 if n else None)
    if not fits(x, n):
        x = x.contiguous()
    sizes, strides = x.shape[:-1], x.stride()[:-1]
    stride = step(sizes[n:], strides[n:])
    return Row(x, stride, step(sizes[:n], strides[:n]) - inner * stride if n else None)


def fits(x: Tensor, n: int) -> bool:
    """Whether one stride leads through the first n dimensions, and one through the others but the last."""
    sizes, strides = x.shape[:-1], x.stride()[:-1]
    return evenly(sizes[:n], strides[:n]) and evenly(sizes[n:], strides[n:])


def evenly(sizes: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether one stride leads through all elements of dimensions of these sizes and strides."""
    steps = [(size, stride) for size, stride in zip(sizes, strides, strict=True) if size > 1]
    return all(outer == size * inner for (_, outer), (size, inner) in pairwise(steps))


def step(sizes: Sequence[int], strides: Sequence[int]) -> int:
    """The stride that leads through dimensions which are evenly spaced; 0 where they hold one element."""
    return next((stride for size, stride in zip(reversed(sizes), reversed(strides), strict=True) if size > 1), 0)


def row_arguments(rows: Sequence[Row], inner: int | None) -> dict[str, Any]:
    """What the kernels read up to RECTANGLE rows by."""
    return dict(
        sources=padded([row.tensor for row in rows]),
        strides=padded([row.stride for row in rows]),
        jumps=None if inner is None else padded([row.jump for row in rows]),
        inner=inner,
        count=len(rows),
    )


def padded(values: list[Any]) -> tuple[Any, ...]:
    """RECTANGLE entries; the last one fills the slots that `count` masks."""
    return (*values, *values[-1:] * (RECTANGLE - len(values)))
