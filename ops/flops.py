"""What ``torch.utils.flop_counter`` counts for our operators: two operations for each multiplication and addition of a
contraction, as torch counts matrix products. Norms, softmax and gates are not counted, as torch's own are not.

A site that reads N sources of T tokens and width d contracts four times: its logits and its mixture forward, 4 N T d,
and the two gradients of each backward, 8 N T d. The steps of the compiler add up to the same, and <dout, mixture>.
"""

from __future__ import annotations

import sys
from importlib.abc import MetaPathFinder
from importlib.util import find_spec
from math import prod
from types import ModuleType
from typing import Any

import torch

COUNTER = "torch.utils.flop_counter"
Shape = Any  # a torch.Size, or a list of them
Count = Any  # an int, or a torch.SymInt


def route(sources: Shape, query: Shape, *_: Any, out_shape: Shape, **__: Any) -> Count:
    """Logits and mixture; the null source is a source as any other."""
    return 4 * size(out_shape[1]) * query[1]


def route_backward(grad_out: Shape, sources: Shape, query: Shape, *rest: Shape, **_: Any) -> Count:
    """Gradients of sources and query through the logits, and of sources and weights through the mixture."""
    logits = rest[3]
    return 8 * size(logits) * query[1]


def score(source: Shape, folded: Shape, first: int, count: int, *_: Any, **__: Any) -> Count:
    return 2 * size(source) * count


def mix(sources: Shape, *rest: Any, out_shape: Shape, **_: Any) -> Count:
    carried = rest[5]
    return 2 * size(out_shape[0]) * (len(sources) + (carried is not None))


def mix_tile(sources: Shape, *_: Any, out_shape: Shape, **__: Any) -> Count:
    return 2 * len(sources) * sum(size(mixture) for mixture in out_shape[0])


def coupling(grad_out: Shape, *_: Any, **__: Any) -> Count:
    return 2 * size(grad_out)


def coupling_from_sources(grad_out: Shape, sources: Shape, *_: Any, **__: Any) -> Count:
    return 2 * size(grad_out) * len(sources)


def pull(sources: Shape, *rest: Any, **_: Any) -> Count:
    grad_outs = rest[4]
    return 8 * len(sources) * sum(size(grad) for grad in grad_outs)


def size(shape: Shape) -> Count:
    """The number of elements."""
    return prod(shape)


FORMULAS = (route, route_backward, score, mix, mix_tile, coupling, coupling_from_sources, pull)


def register(counter: ModuleType) -> None:
    """Register every formula with torch.utils.flop_counter."""
    for formula in FORMULAS:
        counter.register_flop_formula(getattr(torch.ops.mhar, formula.__name__))(formula)


def register_once_imported() -> None:
    """Register now where the counter is imported already, else when it is: it imports triton, which we must not."""
    if COUNTER in sys.modules:
        register(sys.modules[COUNTER])
    else:
        sys.meta_path.insert(0, Finder())


class Finder(MetaPathFinder):
    """Finds the counter as Python would, and registers the formulas behind it."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != COUNTER:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(name)
        assert spec is not None
        loader: Any = spec.loader
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            register(module)

        loader.exec_module = exec_module
        return spec
