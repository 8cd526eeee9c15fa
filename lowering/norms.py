"""Finds the RMSNorm that reads a tensor x [..., d], as ``F.rms_norm`` and the norms of models decompose:

    inverse = rsqrt(x.float().square().mean(-1, keepdim=True) + eps)
    result = (x.float() * inverse) [to dtype] [* weight] [to dtype]

A node stands for its aliases, its views of the same shape and its conversions to float32, which lose nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from .reading import VIEWS, behind_aliases, same_shape

aten = torch.ops.aten
CONVERT = torch.ops.prims.convert_element_type.default
NARROW = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class NormNodes:
    """The RMSNorm of a tensor, in its dtype or a narrower one.

    Attributes:
        inverse: the reciprocal root mean square, [..., 1].
        result: the node that the norm ends in.
        weight: an input of the graph [d], or None.
        eps: what is added to the mean of squares.
        round_first: whether the normalised row is rounded to the result's dtype before it meets the weight, too.
        alone: whether nothing else reads the tensor.
    """

    inverse: Node
    result: Node
    weight: Node | None
    eps: float
    round_first: bool
    alone: bool


def norm_of(x: Node) -> NormNodes | None:
    """The first RMSNorm that reads a tensor and whose result has to be in memory, if there is one."""
    for square in readers(x):
        inverse, eps = inverse_of(square, x) or (None, 0.0)
        scaled = None if inverse is None else scaled_by(inverse, x)
        if inverse is None or scaled is None:
            continue
        for reader in dict.fromkeys(readers(scaled)):
            result, weight, round_first = result_of(scaled, reader)
            if result.meta["val"].itemsize <= x.meta["val"].itemsize and is_kept(result):
                alone = {*readers(x)} == {square, scaled} and (result is scaled or only_reader(scaled) is reader)
                return NormNodes(inverse, result, weight, eps, round_first, alone)
    return None


def inverse_of(square: Node, x: Node) -> tuple[Node, float] | None:
    """rsqrt(mean of x^2 over the last dimension + eps) in float32, and eps; nothing else reads what is between."""
    mean = only_reader(square)
    shifted = only_reader(mean)
    inverse = only_reader(shifted)
    if mean is None or shifted is None or inverse is None:
        return None
    last = x.meta["val"].dim() - 1
    squares = is_power(square, 2) or is_product(square, x, x)
    means = mean.target is aten.mean.dim and mean.args[1:] in (([-1], True), ([last], True)) and not mean.kwargs
    shifts = shifted.target in (aten.add.Scalar, aten.add.Tensor) and not shifted.kwargs
    eps: Any = shifted.args[1] if shifts else None
    roots = inverse.target is aten.rsqrt.default and dtype_of(square) == torch.float32
    if squares and means and roots and last > 0 and isinstance(eps, (int, float)):
        return inverse, float(eps)
    return None


def scaled_by(inverse: Node, x: Node) -> Node | None:
    """x * inverse, where the graph forms it once."""
    found = [user for user in readers(inverse) if is_product(user, x, inverse)]
    return found[0] if len(found) == 1 else None


def result_of(scaled: Node, reader: Node | None) -> tuple[Node, Node | None, bool]:
    """What a normalised row becomes by one of its readers, and on while there is one; its weight; if rounded before."""
    node, narrow, weight, round_first = scaled, None, None, False
    ends: list[tuple[Node, Node | None, bool]] = [(node, weight, round_first)]
    while reader is not None:
        dtype = dtype_of(reader)
        if reader.target is CONVERT and dtype in NARROW and narrow in (None, dtype):
            narrow = dtype
        elif weight is None and dtype in (torch.float32, narrow) and (weight := weight_in(reader, node)) is not None:
            round_first = narrow is not None
        else:
            break
        node, reader = reader, only_reader(reader)
        ends.append((node, weight, round_first))
    return next(end for end in reversed(ends) if not end[2] or dtype_of(end[0]) == narrow)


def weight_in(product: Node, row: Node) -> Node | None:
    """The weight [d] by which a row is multiplied, if it is an input of the graph."""
    width = row.meta["val"].shape[-1]
    if product.target is not aten.mul.Tensor or not same_shape(product, row):
        return None
    for weight in product.all_input_nodes:
        if weight.op == "placeholder" and dtype_of(weight) in (*NARROW, torch.float32):
            if tuple(weight.meta["val"].shape) == (width,):
                return weight
    return None


def is_kept(result: Node) -> bool:
    """Whether somebody needs a tensor in memory; what is elementwise Inductor computes along with the norm."""
    for user in result.users:
        if user.target in VIEWS:
            if is_kept(user):
                return True
        elif torch.Tag.pointwise not in getattr(user.target, "tags", ()):
            return True
    return False


def is_power(node: Node, exponent: int) -> bool:
    return node.target is aten.pow.Tensor_Scalar and bool(node.args[1] == exponent)


def is_product(node: Node, one: Node, other: Node) -> bool:
    if node.target is not aten.mul.Tensor:
        return False
    factors = [origin(factor) for factor in node.args if isinstance(factor, Node)]
    return factors in ([origin(one), origin(other)], [origin(other), origin(one)])


def dtype_of(node: Node) -> torch.dtype | None:
    """The dtype of a tensor; None for another value."""
    value = node.meta.get("val")
    return value.dtype if isinstance(value, torch.Tensor) else None


def origin(node: Node) -> Node:
    """The tensor whose values these are."""
    node = behind_aliases(node)
    while node.target is CONVERT and node.args[1] == torch.float32:
        base = node.args[0]
        assert isinstance(base, Node)
        node = behind_aliases(base)
    return node


def readers(node: Node) -> Iterator[Node]:
    """What reads a tensor's values, each reader once for every name that it reads them by."""
    for user in node.users:
        if user.op == "call_function" and origin(user) is origin(node):
            yield from readers(user)
        else:
            yield user


def only_reader(node: Node | None) -> Node | None:
    found = set() if node is None else {*readers(node)}
    return found.pop() if len(found) == 1 else None
