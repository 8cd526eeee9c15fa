"""Error budgets derived from float64.

The truth is :func:`mhar_compile.ops.reference` in float64 on the upcast inputs, differentiated by autograd. A result
may differ from it, element by element, by what rounding can cost in the worst case. No tolerance is picked: the
formulas of the site and of its gradients are evaluated in float64, and every step carries a bound on its absolute error
forward (running error analysis). With u the unit roundoff of the arithmetic, 2^-24 (2^-53 for float64 sources), plus
the 2^-53 of the truth itself, a step on values a, b known to within A, B is wrong by at most

    a + b, a - b        A + B                        + 2 u |a + b|
    a b                 |a| B + |b| A + A B          + 2 u |a b|
    sum of n terms      sum A                        + (n + 1) u sum |a|
    1 / sqrt(a)         A / (2 (a - A)^(3/2))        + 4 u / sqrt(a)
    rounding to dtype   A                            + u_dtype |a| + the smallest subnormal

where u_dtype is half an ulp, 2^-8 in bfloat16 and 2^-11 in float16; two roundings are granted to a step because
implementations factor a product differently; and 4 u is the two units in the last place of accelerators' exp, log and
rsqrt. Errors are thus measured against the size of the terms summed, never against a result that cancels. Products of
u and A, left out above, are counted. Two rules are not plain steps:

    key         It is rounded to the sources' dtype by definition, and the truth leaves it exact: u_dtype |key|.
    softmax     Logits known to within delta_n change a weight by a factor within 1 +- omega_n,
                    omega_n = exp(delta_n) sum_m w_m exp(delta_m) - 1,
                and arithmetic does by one within 1 +- rho, rho = exp(u (N + 12 + 8 (max |l| + |lse|))) - 1.
                The former factors keep the weights' sum one, so an average over sources is wrong by at most
                    sum_n w_n (omega_n |x_n - average| + rho (1 + omega_n) |x_n|),
                and by what the A_n and the sum of N terms cost.

Where truth and budget together pass the largest number of the result's dtype, the result may be infinite.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..ops.reference import compute_dtype
from .problems import Problem


@dataclass(frozen=True, eq=False)
class Bounded:
    """A float64 value, and a bound on the absolute error of computing it in arithmetic of `dtype`; see the module."""

    value: Tensor
    error: Tensor
    dtype: torch.dtype

    @property
    def unit(self) -> float:
        return unit_roundoff(self.dtype) + unit_roundoff(torch.float64)

    def step(self, value: Tensor, error: Tensor, units: float = 2) -> Bounded:
        """The result of one operation whose operands alone make it wrong by `error`."""
        least = torch.finfo(self.dtype).tiny  # a product that underflows may be flushed to zero
        return Bounded(value, error + units * self.unit * (value.abs() + error) + least, self.dtype)

    def __add__(self, other: Bounded) -> Bounded:
        return self.step(self.value + other.value, self.error + other.error)

    def __sub__(self, other: Bounded) -> Bounded:
        return self.step(self.value - other.value, self.error + other.error)

    def __mul__(self, other: Bounded) -> Bounded:
        error = self.value.abs() * other.error + (other.value.abs() + other.error) * self.error
        return self.step(self.value * other.value, error)

    def __getitem__(self, index: Any) -> Bounded:
        return Bounded(self.value[index], self.error[index], self.dtype)

    def sum(self, dims: int | tuple[int, ...]) -> Bounded:
        value, error = self.value.sum(dims), self.error.sum(dims)
        terms = math.prod(self.value.shape[dim] for dim in (dims if isinstance(dims, tuple) else (dims,)))
        growth = gamma(terms + 1, self.unit) * (self.value.abs().sum(dims) + error)
        return Bounded(value, error + growth, self.dtype)

    def rsqrt(self) -> Bounded:
        return self.step(self.value.rsqrt(), self.error / (self.value - self.error) ** 1.5 / 2, units=4)

    def rounded(self, dtype: torch.dtype) -> Bounded:
        """Rounded once to a narrower dtype; infinite where that may overflow."""
        info, reach = torch.finfo(dtype), self.value.abs() + self.error
        if info.eps <= torch.finfo(self.dtype).eps:
            return self
        error = self.error + unit_roundoff(dtype) * reach + info.tiny * info.eps
        return Bounded(self.value, error.where(reach + error <= info.max, math.inf), self.dtype)


class Softmax:
    """Weights over dimension 0 of logits [N, ..., H], split into what the logits' errors and what rounding does."""

    def __init__(self, logits: Bounded) -> None:
        value, unit = logits.value, logits.unit
        self.weights = value.softmax(0)
        self.omega = torch.expm1(logits.error + (self.weights * logits.error.expm1()).sum(0).log1p())
        exponents = value.abs().amax(0) + value.logsumexp(0).abs()
        self.rho = torch.expm1(unit * (len(value) + 12 + 8 * exponents))
        least = torch.finfo(logits.dtype).tiny
        error = self.weights * (self.omega + self.rho + self.omega * self.rho) + least
        self.bounded = Bounded(self.weights, error, logits.dtype)

    def average(self, x: Bounded) -> Bounded:
        """Average of x [N, ..., H, K] or [N, ..., H] over N."""
        trailing = (..., *[None] * (x.value.dim() - self.weights.dim()))
        weights, omega, rho = self.weights[trailing], self.omega[trailing], self.rho[trailing]
        average, size = (weights * x.value).sum(0), x.value.abs()
        spread = weights * omega * (x.value - average).abs()
        rounding = weights * (1 + omega) * (rho * size + (1 + rho) * x.error)
        underflow = torch.finfo(x.dtype).tiny * (size + x.error)
        summation = gamma(len(size) + 1, x.unit) * weights * (1 + omega) * (1 + rho) * (size + x.error)
        return Bounded(average, (spread + rounding + underflow + summation).sum(0), x.dtype)


def unit_roundoff(dtype: torch.dtype) -> float:
    """The largest relative error of rounding to nearest."""
    return torch.finfo(dtype).eps / 2


def gamma(terms: int, unit: float) -> float:
    """Worst relative growth of the error over a chain of roundings."""
    return terms * unit / (1 - terms * unit)


class Site:
    """The formulas of one site and of its gradients on bounded values, [N, tokens, H, K] with the null source first."""

    def __init__(self, problem: Problem) -> None:
        exact, shape = problem.exact(), problem.grad_out.shape
        self.dtype, self.wide = problem.grad_out.dtype, compute_dtype(problem.grad_out.dtype)
        heads, head_width = problem.query.shape
        rows = [*exact.sources] if exact.null_source is None else [exact.null_source.expand(shape), *exact.sources]
        by_head = (math.prod(shape[:-1]), heads, head_width)
        self.x = self.known(torch.stack(rows).reshape(len(rows), *by_head))
        self.dout = self.known(exact.grad_out.reshape(by_head))
        self.residual = None if exact.residual is None else self.known(exact.residual.reshape(by_head))
        self.query = self.read(exact.query)
        self.key_weight = self.read(exact.key_weight, heads, head_width)
        self.gate = self.read(exact.gate, 1)
        self.over_width = self.read(torch.tensor(1 / shape[-1], dtype=torch.float64))
        self.eps = self.read(torch.tensor(exact.eps, dtype=torch.float64))
        self.forward()

    def known(self, x: Tensor) -> Bounded:
        return Bounded(x, torch.zeros_like(x), self.wide)

    def read(self, parameter: Tensor | None, *shape: int) -> Bounded:
        """A number rounded to the arithmetic's dtype; one, and free of error, where it is absent."""
        if parameter is None:
            return self.known(torch.ones(shape, dtype=torch.float64))
        value = parameter.view(shape or parameter.shape)
        return Bounded(value, unit_roundoff(self.wide) * value.abs(), self.wide)

    def forward(self) -> None:
        x = self.x
        self.rstd = ((x * x).sum((2, 3)) * self.over_width + self.eps).rsqrt()[..., None, None]
        self.normal = x * self.rstd
        self.key = self.normal.rounded(self.dtype)
        self.folded = self.query * self.key_weight
        self.logits = (self.key * self.folded).sum(3)
        self.softmax = Softmax(self.logits)
        out = self.softmax.average(x) * self.gate
        self.out = out if self.residual is None else out + self.residual

    def gradients(self) -> dict[str, Bounded]:
        """Of every argument, absent ones too; the null source's is the first of the sources', over all tokens."""
        weights = self.softmax.bounded
        dots = (self.x * self.dout).sum(3)
        coupling = self.softmax.average(dots)
        dlogits = weights * (dots - coupling) * self.gate
        through_norm = (dlogits * self.logits).sum(2)[..., None, None] * self.over_width * self.rstd
        through_key = self.rstd * (dlogits[..., None] * self.folded)
        dx = weights[..., None] * (self.dout * self.gate) + through_key - self.normal * through_norm
        dfolded = (dlogits[..., None] * self.key).sum((0, 1))
        return {
            "sources": dx,
            "query": dfolded * self.key_weight,
            "key_weight": dfolded * self.query,
            "null_source": dx[0].sum(0),
            "residual": self.dout,
            "gate": coupling.sum((0, 1)),
        }


def budgets(problem: Problem) -> dict[str, Tensor]:
    """The largest error, in float64, that each result of :meth:`Problem.run` may have: see the module's description."""
    site, shape = Site(problem), problem.grad_out.shape
    weights = site.softmax.bounded.error
    limits = {
        "out": site.out.rounded(site.dtype).error.reshape(shape),
        "weights": weights.reshape(len(weights), *shape[:-1], problem.query.shape[0]),
    }
    gradients = site.gradients()
    if problem.sources:
        dx = gradients["sources"][1 if problem.null_source is not None else 0 :]
        limits["sources"] = dx.rounded(site.dtype).error.reshape(len(problem.sources), *shape)
    for name, argument in problem.arguments().items():
        if argument is not None:
            limits[name] = gradients[name].rounded(argument.dtype).error.reshape(argument.shape)
    return limits


def ratios(problem: Problem, results: dict[str, Tensor]) -> dict[str, float]:
    """The largest error / budget of each result of :meth:`Problem.run`: at most 1 is right, NaN counts as infinite."""
    truth, limits = problem.truth(), budgets(problem)
    if results.keys() != truth.keys():
        raise AssertionError(f"results {sorted(results)} were given, expected {sorted(truth)}")
    worst = {}
    for name, limit in limits.items():
        if results[name].shape != truth[name].shape:
            raise AssertionError(f"{name} has shape {list(results[name].shape)}, expected {list(truth[name].shape)}")
        error = (results[name].double() - truth[name]).abs()
        ratio = error / limit
        ratio = torch.where(error <= limit, ratio.nan_to_num(0.0), ratio.nan_to_num(math.inf, math.inf))
        worst[name] = float(ratio.max()) if ratio.numel() else 0.0
    return worst


def assert_within_budget(problem: Problem, results: dict[str, Tensor]) -> None:
    """Raise AssertionError unless every result of :meth:`Problem.run` is within its budget."""
    over = {name: ratio for name, ratio in ratios(problem, results).items() if not ratio <= 1}
    if over:
        listed = ", ".join(f"{name} {ratio:.3g}" for name, ratio in over.items())
        raise AssertionError(f"largest error / budget: {listed}; expected at most 1, for {problem}")
