"""Random routing problems: what they are, how a seed fills them, and Hypothesis strategies for them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from ..functional import FLOATS, route
from ..ops.reference import reference

ELEMENTS = 8192  # of all sources of a drawn problem together
MOST = 129  # sources
WIDEST = 129
TOKENS = ((1,), (17,), (8,), (5, 3), (4, 1), (2, 3, 2), (0,), (2, 0))  # drawn as often as all other leading dimensions
WIDTHS = (1, 6, 8, 15, 24, 60, 105, 128)  # and as often as all other widths
LARGEST = 1e18  # its square, summed over WIDEST elements, is finite in float32 and bfloat16
LAYOUTS = ("contiguous", "slice", "transposed", "width first", "strided", "expanded tokens", "expanded width")


def routed(sources: list[Tensor], query: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    """``route`` with the signature of ``reference``: the output and the weights."""
    return route(sources, query, return_weights=True, **options)


@dataclass(frozen=True, eq=False, repr=False)
class Problem:
    """The arguments of one routing site, and the gradient of its output.

    Shapes as in :func:`mhar_compile.route`: sources N x [..., d], query [H, d/H], key_weight [d], null_source [d],
    residual [..., d], gate [1], grad_out [..., d]. Absent arguments are None.
    """

    sources: list[Tensor]
    query: Tensor
    key_weight: Tensor | None
    null_source: Tensor | None
    residual: Tensor | None
    gate: Tensor | None
    eps: float
    grad_out: Tensor

    def run(self, function: Callable[..., tuple[Tensor, Tensor]] = routed) -> dict[str, Tensor]:
        """The output, the weights and every gradient that `function`, called like ``reference``, gives.

        The keys are ``out``, ``weights`` and, for the gradients, the arguments' names; ``sources`` is stacked,
        [N, ..., d]. What the problem lacks has no key.
        """
        sources = [source.detach().requires_grad_() for source in self.sources]
        single = {
            name: None if tensor is None else tensor.detach().requires_grad_()
            for name, tensor in self.arguments().items()
        }
        out, weights = function(sources, eps=self.eps, **single)
        present = {name: tensor for name, tensor in single.items() if tensor is not None}
        grads = torch.autograd.grad(out, [*sources, *present.values()], self.grad_out)
        results = {"out": out.detach(), "weights": weights.detach()}
        if sources:
            results["sources"] = torch.stack(grads[: len(sources)])
        return results | dict(zip(present, grads[len(sources) :], strict=True))

    def truth(self) -> dict[str, Tensor]:
        """The results of the reference in float64."""
        return self.exact().run(reference)

    def exact(self) -> Problem:
        """The same problem in float64, the null source rounded to the sources' dtype first, which is its definition."""
        null = self.null_source
        single = self.arguments() | {"null_source": None if null is None else null.to(self.grad_out.dtype)}
        upcast: dict[str, Any] = {name: None if tensor is None else tensor.double() for name, tensor in single.items()}
        return replace(self, sources=[x.double() for x in self.sources], grad_out=self.grad_out.double(), **upcast)

    def arguments(self) -> dict[str, Tensor | None]:
        """Every tensor argument but the sources."""
        return {name: getattr(self, name) for name in ("query", "key_weight", "null_source", "residual", "gate")}

    def __repr__(self) -> str:
        def described(value: Any) -> str:
            if isinstance(value, Tensor):
                return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
            return f"{len(value)} x {described(value[0])}" if value and isinstance(value, list) else str(value)

        return f"Problem({', '.join(f'{f.name}={described(getattr(self, f.name))}' for f in fields(self))})"


@dataclass(frozen=True)
class Recipe:
    """The sizes and kinds of a problem; a seed adds the values.

    Args:
        tokens: the leading dimensions.
        count: the number of sources, the null source not counted.
        heads: H.
        head_width: K; d = H K.
        dtype: of sources, residual and gradient.
        parameter_dtype: of query, key weight, null source and gate.
        key_weight: there is one.
        null_source: there is one.
        residual: there is one.
        gate: None, 0 or 1: absent, zero or random.
        query_scale: standard deviation of the query, in units of 1 / sqrt(K).
        shared: the sources are one common vector with a thirtieth of their own, the case in which gradients cancel.
        decades: every source has a scale of its own, 1e-18 to 1e18; in float16 1/4 to 4, whose gradients are finite.
        layouts: the sources' memory layouts, in turn.
        eps: added to the mean square.
    """

    tokens: tuple[int, ...] = (5,)
    count: int = 3
    heads: int = 2
    head_width: int = 4
    dtype: torch.dtype = torch.float32
    parameter_dtype: torch.dtype = torch.float32
    key_weight: bool = True
    null_source: bool = False
    residual: bool = False
    gate: int | None = None
    query_scale: float = 1.0
    shared: bool = False
    decades: bool = False
    layouts: tuple[str, ...] = ("contiguous",)
    eps: float = 1e-6

    def problem(self, seed: int) -> Problem:
        """The problem of this recipe whose values come from a generator with this seed."""
        generator = torch.Generator().manual_seed(seed)
        width, rows = self.heads * self.head_width, self.count + 1  # the last row is the residual

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, dtype=torch.float64)

        x = normal(rows, *self.tokens, width)
        if self.shared:
            x = (x + 30 * normal(*self.tokens, width)) / 30
        scale = torch.ones(rows + 1, dtype=torch.float64)
        if self.decades:
            decades = math.log10(4 if self.dtype == torch.float16 else LARGEST)
            scale = 10 ** (torch.rand(rows + 1, generator=generator, dtype=torch.float64) * 2 - 1).mul(decades)
        x = (x * scale[:rows].reshape(-1, *[1] * (x.dim() - 1))).clamp(-LARGEST, LARGEST).to(self.dtype)
        null = (normal(width) * scale[rows]).clamp(-LARGEST, LARGEST).to(self.parameter_dtype)
        *sources, residual = (arranged(row, self.layouts[n % len(self.layouts)]) for n, row in enumerate(x))
        query = normal(self.heads, self.head_width) * self.query_scale / math.sqrt(self.head_width)
        key_weight = (1 + normal(width) / 4).to(self.parameter_dtype)
        return Problem(
            sources=sources,
            query=arranged(query.to(self.parameter_dtype), self.layouts[0]),
            key_weight=key_weight if self.key_weight else None,
            null_source=null if self.null_source else None,
            residual=residual if self.residual else None,
            gate=None if self.gate is None else (self.gate * normal(1)).to(self.parameter_dtype),
            eps=self.eps,
            grad_out=arranged(normal(*self.tokens, width).to(self.dtype), self.layouts[-1]),
        )


def arranged(x: Tensor, layout: str) -> Tensor:
    """A tensor of the shape of x [..., d] in another memory layout; only the expanded layouts change its values."""
    width = x.shape[-1]
    if layout == "slice":
        return torch.cat([x, x, x], -1)[..., width : 2 * width]
    if layout == "transposed" and x.dim() > 2:
        return x.transpose(0, -2).contiguous().transpose(0, -2)
    if layout == "width first":
        return x.movedim(-1, 0).contiguous().movedim(0, -1)
    if layout == "strided":
        return x.repeat_interleave(2, -1)[..., ::2]
    if layout == "expanded tokens" and x.dim() > 1:
        return x[:1].expand_as(x) if len(x) else x
    if layout == "expanded width":
        return x[..., :1].expand_as(x)
    return x


@st.composite
def recipes(draw: st.DrawFn, /, **fixed: Any) -> Recipe:
    """Recipes of every kind.

    Up to 129 sources (none where null source and residual allow it), widths up to 129, none to three leading dimensions
    with zero tokens among them, and every value of the other fields, or those that are fixed.

    A float16 parameter of other sources is not combined with `decades`: all its gradients would overflow.

    Args:
        fixed: fields of the recipe that are given, not drawn.
    """
    if unknown := fixed.keys() - {field.name for field in fields(Recipe)}:
        raise TypeError(f"recipes: {', '.join(sorted(unknown))} is no field of a Recipe")

    def pick(name: str, strategy: st.SearchStrategy[Any]) -> Any:
        return fixed[name] if name in fixed else draw(strategy)

    dtype = pick("dtype", st.sampled_from(FLOATS))
    flags = {name: pick(name, st.booleans()) for name in ("key_weight", "null_source", "residual", "shared", "decades")}
    fewest = 0 if flags["null_source"] and flags["residual"] else 1
    count = pick("count", st.integers(fewest, 8) | st.integers(1, MOST))
    tokens = pick("tokens", st.lists(st.integers(1, 4), max_size=3).map(tuple) | st.sampled_from(TOKENS))
    widest = min(WIDEST, max(1, ELEMENTS // max(1, count * math.prod(tokens))))
    width = draw(st.integers(1, widest) | st.sampled_from([d for d in WIDTHS if d <= widest]))
    heads = pick("heads", st.sampled_from([h for h in range(1, width + 1) if width % h == 0]))
    narrow_ok = dtype == torch.float16 or not flags["decades"]
    parameter_dtypes = [d for d in FLOATS if narrow_ok or d != torch.float16]
    return Recipe(
        tokens=tokens,
        count=count,
        heads=heads,
        head_width=pick("head_width", st.just(max(1, width // heads))),
        dtype=dtype,
        parameter_dtype=pick("parameter_dtype", st.just(dtype) | st.sampled_from(parameter_dtypes)),
        gate=pick("gate", st.sampled_from([None, 1, 0, 1])),
        query_scale=pick("query_scale", st.sampled_from([1.0, 0.3, 3.0, 0.0])),
        layouts=pick("layouts", st.lists(st.sampled_from(LAYOUTS), min_size=1, max_size=3).map(tuple)),
        eps=pick("eps", st.sampled_from([1e-6, 1e-5, 1e-2])),
        **flags,
    )


def problems(**fixed: Any) -> st.SearchStrategy[Problem]:
    """Problems of any recipe with these fields: sizes and flags are drawn, and shrink; a drawn seed adds the values."""
    return st.builds(Recipe.problem, recipes(**fixed), st.integers(0, 2**32 - 1))
