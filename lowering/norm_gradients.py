"""Finds the gradient of the RMSNorm behind a site, however it is written.

With y = x inverse weight, the gradient of x [..., d] from that of y, dy, and that of the weight are

    dx = inverse (dy weight - x inverse^2 mean(dy weight x))        dweight = sum over tokens of dy x inverse

torch's formula and what autograd makes of a norm that is written out differ in their operations. So what makes a tensor
is evaluated on a few random rows and compared with the formula, in float64 and without the roundings between, which
Inductor leaves out of a kernel, too: two expressions of sums, products and powers that agree there are the same. Of
others, such as a clamp that the drawn rows do not reach, that would not be true.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.fx import Node

from .norms import CONVERT, dtype_of
from .reading import ALIASES, VIEWS, behind_aliases, same_shape
from .rules import TERMS
from .versions import symbol

aten = torch.ops.aten
SAME = {*ALIASES, *VIEWS, CONVERT, aten.clone.default, aten.expand.default}  # the same values, or the same repeated
ARITHMETIC = {
    *(getattr(getattr(aten, name), kind) for name in ("add", "sub", "mul", "div") for kind in ("Tensor", "Scalar")),
    *(aten.neg.default, aten.square.default, aten.reciprocal.default, aten.pow.Tensor_Scalar),
}
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LIMIT = 64  # operations between the gradients of a norm's result and of its argument; those known have 25
ROWS = 3  # that expressions are compared on


@dataclass(frozen=True)
class NormGradientNodes:
    """The backward of an RMSNorm.

    Attributes:
        x: what is normalised, [..., d].
        terms: tensors in memory, [..., d], whose sum is the gradient of the norm's result.
        inverse: the reciprocal root mean square, [..., 1] float32.
        weight: [d], or None.
        result: the gradient of x, in its dtype.
        weight_sum: of the weight's gradient, over all tokens; None where nobody reads it.
    """

    x: Node
    terms: tuple[Node, ...]
    inverse: Node
    weight: Node | None
    result: Node
    weight_sum: Node | None

    @property
    def given(self) -> list[Node]:
        """The tensors that it reads."""
        return [*self.terms, self.x, self.inverse, *([] if self.weight is None else [self.weight])]

    @property
    def first(self) -> Node:
        """Where its results are needed first."""
        return self.result if self.weight_sum is None else min(self.result, self.weight_sum)


@dataclass(frozen=True)
class Expression:
    """How a tensor [..., d] is formed from others, the leaves, by operations on rows."""

    root: Node
    inside: set[Node]
    leaves: set[Node]

    def agrees(self, expected: Tensor, values: dict[Node, Tensor]) -> bool:
        """Whether it has the expected values, given those of the leaves."""
        found = evaluated(self.root, dict(values))
        return found.shape == expected.shape and torch.allclose(found, expected, rtol=1e-9, atol=1e-9)


def norm_gradient_of(result: Node) -> NormGradientNodes | None:
    """The backward of the RMSNorm whose argument has this gradient, if it is one that a kernel takes."""
    whole = expression(result, None)
    for dy in [] if whole is None else sorted(whole.inside | whole.leaves):
        if not is_row(dy, result) or (formed := expression(result, dy)) is None:
            continue
        rows = [leaf for leaf in formed.leaves if leaf is not dy and is_row(leaf, result)]
        factors = [leaf for leaf in formed.leaves if is_factor(leaf, result)]
        weights = [leaf for leaf in formed.leaves if is_weight(leaf, result)]
        if len(rows) != 1 or len(factors) != 1 or len(weights) > 1 or len(formed.leaves) != 3 + len(weights):
            continue
        with unset_fake_temporarily():  # AOTAutograd compiles a backward of dynamic shapes within its own
            values = drawn({dy, rows[0]}, factors[0], weights)
            if formed.agrees(gradient(values, dy, rows[0], factors[0], weights), values):
                found = backward(formed, dy, rows[0], factors[0], weights, values)
                return found if is_taken(found) else None
    return None


def backward(
    formed: Expression, dy: Node, x: Node, inverse: Node, weights: list[Node], values: dict[Node, Tensor]
) -> NormGradientNodes:
    """What is known of the backward, with the terms of dy and the gradient of the weight."""
    inside = set(formed.inside)
    weight_sum = None
    for node in token_sums(dy):
        (summand, *_) = node.args
        assert isinstance(summand, Node)
        product = expression(summand, dy)
        if product is not None and product.leaves == {dy, x, inverse}:
            if product.agrees(values[dy] * values[x] * values[inverse], values):
                weight_sum, inside = node, inside | product.inside | {node}
                break
    terms = tuple(terms_of(dy, inside))
    weight_sum = None if weight_sum is None else converted(weight_sum)
    weight = weights[0] if weights else None
    return NormGradientNodes(x, terms, inverse, weight, formed.root, weight_sum)


def converted(node: Node) -> Node:
    """What alone reads a tensor, as long as that is its view or its conversion."""
    while len(node.users) == 1 and next(iter(node.users)).target in {CONVERT, *VIEWS}:
        node = next(iter(node.users))
    return node


def is_taken(found: NormGradientNodes) -> bool:
    """Whether the kernel takes these tensors, and reads no more than is in memory anyhow."""
    x, result, inverse = (node.meta["val"] for node in (found.x, found.result, found.inverse))
    return (
        len(found.terms) <= TERMS
        and all(node.meta["val"].dtype in DTYPES for node in found.given)
        and len({term.meta["val"].dtype for term in found.terms}) == 1
        and inverse.dtype == torch.float32
        and all(node.meta["val"].device == x.device for node in found.given)
        and result.dtype == x.dtype
        and x.is_contiguous()
        and inverse.is_contiguous()
        and not any(is_pointwise(behind_aliases(term)) for term in found.terms)
    )


def gradient(values: dict[Node, Tensor], dy: Node, x: Node, inverse: Node, weights: list[Node]) -> Tensor:
    """dx by the formula."""
    through = values[dy] * values[weights[0]] if weights else values[dy]
    factor = values[inverse]
    return factor * (through - values[x] * factor**2 * (through * values[x]).mean(-1, keepdim=True))


def drawn(rows: set[Node], inverse: Node, weights: list[Node]) -> dict[Node, Tensor]:
    """Random values of a few rows."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu")

    width = int(next(iter(rows)).meta["val"].shape[-1])
    values = {row: normal(ROWS, width) for row in sorted(rows)}
    return values | {inverse: normal(ROWS, 1).abs() + 0.5} | {weight: normal(width) for weight in weights}


def evaluated(node: Node, values: dict[Node, Tensor]) -> Tensor:
    """The value of an expression of leaves of known values, which also takes the values between."""
    if node not in values:
        args: list[Any] = [evaluated(arg, values) if isinstance(arg, Node) else arg for arg in node.args]
        if node.target is aten.expand.default:
            values[node] = args[0].expand(ROWS, int(node.meta["val"].shape[-1]))
        elif node.target in SAME:
            values[node] = args[0]
        elif node.target in ROW_SUMS:
            values[node] = ROW_SUMS[node.target](args[0], -1, keepdim=True)
        else:
            assert callable(node.target)
            values[node] = node.target(*args, **node.kwargs)
    return values[node]


ROW_SUMS = {aten.sum.dim_IntList: torch.sum, aten.mean.dim: torch.mean}


def expression(root: Node, cut: Node | None) -> Expression | None:
    """The operations on rows that end in a node; the cut is a leaf in any case. None where they are too many."""
    inside: set[Node] = set()
    leaves: set[Node] = set()
    waiting = [root]
    while waiting:
        node = waiting.pop()
        if node in inside or node in leaves:
            continue
        if node is cut or not is_row_operation(node, root):
            leaves.add(node)
            continue
        inside.add(node)
        waiting += node.all_input_nodes[:1] if node.target in SAME else node.all_input_nodes  # and no sizes
        if len(inside) > LIMIT:
            return None
    return Expression(root, inside, leaves)


def is_row_operation(node: Node, like: Node) -> bool:
    """Whether a node combines rows [..., d], or factors [..., 1], of the same tokens."""
    if node.op != "call_function" or node.target is aten.rsqrt.default:
        return False
    if node.target in SAME:
        (base, *_) = node.args
        if not isinstance(base, Node) or not (same_shape(node, base) or node.target is aten.expand.default):
            return False
        return node.target is not CONVERT or {dtype_of(node), dtype_of(base)} <= {*DTYPES}
    if not (is_row(node, like) or is_factor(node, like)):
        return False
    if node.target in ROW_SUMS:
        last = node.meta["val"].dim() - 1
        return list(node.args[1:]) in ([[-1], True], [[last], True]) and not node.kwargs
    return node.target in ARITHMETIC and not any(isinstance(value, Node) for value in node.kwargs.values())


def is_row(node: Node, like: Node) -> bool:
    """Whether a node is [..., d] as another is."""
    return isinstance(node.meta.get("val"), Tensor) and same_shape(node, like)


def is_factor(node: Node, like: Node) -> bool:
    """Whether a node is [..., 1] where another is [..., d]."""
    mine, rows = node.meta.get("val"), like.meta["val"]
    if not isinstance(mine, Tensor) or mine.dim() != rows.dim():
        return False
    return [*map(symbol, mine.shape)] == [*map(symbol, rows.shape[:-1]), 1]


def is_weight(node: Node, like: Node) -> bool:
    """Whether a node is [d] where another is [..., d]."""
    mine, rows = node.meta.get("val"), like.meta["val"]
    return isinstance(mine, Tensor) and tuple(mine.shape) == (int(rows.shape[-1]),) and rows.dim() > 1


def is_pointwise(node: Node) -> bool:
    return torch.Tag.pointwise in getattr(node.target, "tags", ())


def token_sums(dy: Node) -> Iterator[Node]:
    """Sums over all tokens of rows that are formed from dy."""
    seen: set[Node] = set()
    waiting = list(dy.users)
    while waiting and len(seen) < LIMIT:
        node = waiting.pop(0)
        if node in seen:
            continue
        seen.add(node)
        if node.target is aten.sum.dim_IntList:
            dims, rank = node.args[1], dy.meta["val"].dim()
            if isinstance(dims, list) and sorted(int(dim) % rank for dim in dims) == list(range(rank - 1)):
                yield node
        elif is_row_operation(node, dy) and is_row(node, dy):
            waiting += node.users


def terms_of(node: Node, readers: set[Node]) -> Iterator[Node]:
    """What a sum adds up, where nobody but the readers needs the sum itself."""
    if node.target is aten.add.Tensor and not node.kwargs and {*node.users} <= readers:
        both = [part for part in node.args if isinstance(part, Node) and is_row(part, node)]
        if len(both) == 2:
            for part in both:
                yield from terms_of(part, {node})
            return
    yield node
