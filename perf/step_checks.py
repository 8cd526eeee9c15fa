"""The steps of a route as launches, each against plain PyTorch in float64 on the same device.

Every check raises AssertionError with what was found. What a step allocates is NaN until it is written. The tests run
all of it under Triton's interpreter at tiny sizes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mhar_compile.lowering import steps
from mhar_compile.lowering.rules import norm_rule
from mhar_compile.ops import eager_steps

EPS, NORM_EPS = 1e-6, 0.25  # of a size that nobody can leave out
ROUNDING = {torch.bfloat16: 5e-3, torch.float16: 7e-4}  # of the largest value: an ulp or two there


@dataclass(frozen=True)
class Sizes:
    """Rows [*tokens, H K] on a device; uneven ones [B, T, H K] have two strides, or are transposed or expanded."""

    device: str
    dtype: torch.dtype
    heads: int
    head_width: int
    tokens: tuple[int, ...] = (2, 3)
    uneven: bool = False

    @property
    def width(self) -> int:
        return self.heads * self.head_width

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, device=self.device)

    def folded(self, sites: int) -> Tensor:
        """Queries times key weights [sites, H, K], which make logits of size 2."""
        return self.normal(sites, self.heads, self.head_width) * (2 / self.head_width**0.5)

    def rows(self, count: int) -> list[Tensor]:
        """Several rows [*tokens, d]; uneven ones take their layouts in turn."""
        if not self.uneven:
            return [self.normal(*self.tokens, self.width).to(self.dtype) for _ in range(count)]
        batch, length = self.tokens
        kinds = [
            lambda: self.normal(batch, length + 1, self.width).to(self.dtype)[:, 1:],
            lambda: self.normal(length, batch, self.width).to(self.dtype).transpose(0, 1),
            lambda: self.normal(1, length, self.width).to(self.dtype).expand(batch, -1, -1),
            lambda: self.normal(batch, length, self.width).to(self.dtype),
        ]
        return [make() for make in itertools.islice(itertools.cycle(kinds), count)]

    def close(self, found: Tensor, truth: Tensor, dtype: torch.dtype = torch.float32, slack: float = 0.0) -> None:
        """Within the rounding of a result in dtype, and of float32 sums over a row; slack is of sums over more."""
        assert found.shape == truth.shape, f"shape {list(found.shape)}, expected {list(truth.shape)}"
        limit = ROUNDING.get(dtype, 2e-6 * max(1.0, math.sqrt(self.width) / 8)) * float(truth.abs().max().clamp(min=1))
        worst = float((found.double() - truth).abs().max())
        assert worst <= limit + slack, f"error {worst:.3g}, expected at most {limit + slack:.3g}; {self}"

    def close_by_key(self, found: Tensor, truth: Tensor, unrounded: Tensor) -> None:
        """As ``close`` for what reads rounded keys, of which few may fall to the other side of a boundary: in the norm,
        at most half of what leaving the rounding out would change."""
        assert found.shape == truth.shape, f"shape {list(found.shape)}, expected {list(truth.shape)}"
        norm, rounding = float(truth.norm()), float((truth - unrounded).norm()) if self.dtype in ROUNDING else 0.0
        limit = 2e-6 * max(1.0, math.sqrt(self.width) / 8) * max(norm, 1.0) + rounding / 2
        error = float((found.double() - truth).norm())
        assert error <= limit, f"error {error:.3g} in the norm, expected at most {limit:.3g}; {self}"


@contextmanager
def poisoned() -> Iterator[None]:
    """What is allocated in here is NaN until it is written, or the largest integer."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        assert torch.empty(1).isnan().all(), "torch.utils.deterministic.fill_uninitialized_memory is off"
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


def widened(value: Any) -> Any:
    """float64 where it was floating point, for the truth."""
    if isinstance(value, Tensor) and value.is_floating_point():
        return value.double()
    return [widened(entry) for entry in value] if isinstance(value, (list, tuple)) else value


def scored(sources: Sequence[Tensor], folded: Tensor, first: int = 0) -> tuple[list[Tensor], list[Tensor]]:
    """Logits and reciprocal RMS of the sources at all sites from the first on, as score leaves them."""
    found = [eager_steps.score(source, folded, first, len(folded) - first, EPS) for source in sources]
    return [logits for logits, _ in found], [rstd for _, rstd in found]


def with_null(
    sizes: Sizes, sources: list[Tensor], logits: list[Tensor], firsts: list[int], folded: Tensor, site: int
) -> tuple[list[Tensor], list[Tensor], list[int]]:
    """A null source [d], scored at one site alone, before the others."""
    null = sizes.normal(sizes.width).to(sizes.dtype)
    return [null, *sources], [eager_steps.score(null, folded, site, 1, EPS)[0], *logits], [site, *firsts]


def check_score(sizes: Sizes, sites: int = 3) -> None:
    """Logits and reciprocal RMS of one source, or of a null source [d], at some of the sites."""
    torch.manual_seed(sites)
    folded = sizes.folded(sites + 2)
    for source in (sizes.rows(1)[0], sizes.normal(sizes.width).to(sizes.dtype)):
        with poisoned():
            logits, rstd = steps.score(source, folded, 1, sites, EPS)
        truth, root = eager_steps.score(source, folded.double(), 1, sites, EPS)
        unrounded, _ = eager_steps.score(source.double(), folded.double(), 1, sites, EPS)
        sizes.close_by_key(logits, truth, unrounded)
        sizes.close(rstd, root)


def mix_arguments(sizes: Sizes, count: int, *, null: bool, residual: bool, gate: bool, carried: bool) -> Any:
    """The arguments of mix but for ``keep``: one site of four, and `count` sources."""
    torch.manual_seed(count)
    folded, sources = sizes.folded(4), sizes.rows(count)
    logits, _ = scored(sources, folded, first=1)
    firsts = [1] * count
    if null:
        sources, logits, firsts = with_null(sizes, sources, logits, firsts, folded, 2)
    extra, scale = sizes.rows(1)[0] if residual else None, sizes.normal(1) if gate else None
    before: tuple[Tensor | None, Tensor | None] = (None, None)
    if carried:
        before = sizes.normal(*sizes.tokens, sizes.width), sizes.normal(*sizes.tokens, sizes.heads)
    return sources, logits, firsts, 2, extra, scale, *before, sizes.dtype


def check_mix(
    sizes: Sizes,
    count: int,
    *,
    null: bool = False,
    residual: bool = False,
    gate: bool = False,
    carried: bool = False,
) -> None:
    """Output, log-sum-exp and the residue of the rounding of one site."""
    arguments = mix_arguments(sizes, count, null=null, residual=residual, gate=gate, carried=carried)
    keep = sizes.dtype in ROUNDING and not residual and not gate
    with poisoned():
        found = steps.mix(*arguments, keep)
    compare_mix(sizes, arguments, keep, *found)


def compare_mix(sizes: Sizes, arguments: Any, keep: bool, out: Tensor, lse: Tensor, residue: Tensor) -> None:
    """What mix gives beside the truth."""
    truth, level, _ = eager_steps.mix(*widened(arguments[:-1]), torch.float64, False)
    sizes.close(out, truth, sizes.dtype)
    sizes.close(lse, level)
    if keep:
        restored = (eager_steps.restored(out, residue).double() - truth).abs().max()
        assert restored <= (out.double() - truth).abs().max() / 50, "the residue restores what rounding lost"
    else:
        assert residue.numel() == 0


def check_mix_norm(
    sizes: Sizes,
    count: int,
    *,
    weight: torch.dtype | None = torch.float32,
    result: torch.dtype | None = None,
    round_first: bool = False,
    keep_out: bool = True,
    null: bool = False,
    residual: bool = False,
    gate: bool = False,
    carried: bool = False,
) -> None:
    """What mix gives, and the RMSNorm of the output as it was rounded, itself rounded where it should be.

    result is its dtype, that of the sources unless said. An output that is not kept is not written.
    """
    arguments = mix_arguments(sizes, count, null=null, residual=residual, gate=gate, carried=carried)
    keep = sizes.dtype in ROUNDING and not residual and not gate and keep_out
    scale = None if weight is None else sizes.normal(sizes.width).to(weight)
    dtype = result or sizes.dtype
    rule = norm_rule(sizes.heads, sizes.head_width, sizes.dtype.itemsize)
    assert rule is not None
    norm = steps.Norm(scale, NORM_EPS, dtype, round_first, keep_out, rule)
    with poisoned():
        out, lse, residue, normed, inverse = steps.mix_norm(norm, *arguments, keep)
    truth, _, _ = eager_steps.mix(*widened(arguments[:-1]), torch.float64, False)
    if keep_out:
        compare_mix(sizes, arguments, keep, out, lse, residue)
    else:
        assert out.isnan().all(), "nobody reads the output, and it is written"
    row = (out if keep_out else truth.to(sizes.dtype)).double()
    root = (row.square().mean(-1, keepdim=True) + NORM_EPS).rsqrt()
    expected = row * root
    if round_first:
        expected = expected.to(dtype).double()
    if scale is not None:
        expected = expected * scale.double()
    assert normed.dtype == dtype
    sizes.close(normed, expected, dtype)
    if keep_out:
        sizes.close(inverse, root)
        if dtype in ROUNDING:
            share = float((normed != expected.to(dtype)).double().mean())
            assert share <= 0.03, f"{share:.3g} of the normalised values are rounded otherwise; {sizes}"


def check_norm_backward(
    sizes: Sizes,
    count: int,
    *,
    weight: torch.dtype | None = torch.float32,
    gradient: torch.dtype | None = None,
    coupled: bool = True,
    summed: bool = True,
) -> None:
    """The gradient of a norm's argument, that of its weight, and the site's coupling with the gradient as rounded.

    gradient is the dtype of the `count` terms of the result's gradient, that of the sources unless said.
    """
    arguments = mix_arguments(sizes, 3, null=False, residual=False, gate=False, carried=False)
    rule = norm_rule(sizes.heads, sizes.head_width, sizes.dtype.itemsize)
    assert rule is not None
    assert rule.backward
    out, _, residue = eager_steps.mix(*arguments, coupled and sizes.dtype in ROUNDING)
    kept = residue if residue.numel() else None
    terms = [term.to(gradient or sizes.dtype) for term in sizes.rows(count)]
    scale = None if weight is None else sizes.normal(sizes.width).to(weight)
    inverse = (out.float().square().mean(-1, keepdim=True) + NORM_EPS).rsqrt()
    total = weight if summed and weight is not None else None
    with poisoned():
        found = steps.norm_backward(terms, out, kept, inverse, scale, sizes.heads, coupled, total, rule)
    grad, coupling, dweight = found
    dy, x, root = sum(term.double() for term in terms), out.double(), inverse.double()
    assert isinstance(dy, Tensor)
    through = dy if scale is None else dy * scale.double()
    expected = root * (through - x * root.square() * (through * x).mean(-1, keepdim=True))
    assert grad.dtype == sizes.dtype
    sizes.close(grad, expected, sizes.dtype)
    assert (coupling is not None) == coupled
    if coupling is not None:
        level = eager_steps.coupling(grad.double(), mixture_of(out, kept).double(), None, sizes.heads)
        sizes.close(coupling, level)
        if sizes.dtype == torch.float32:  # summed in float64 and rounded once
            assert ((coupling.double() - level).abs() <= 2**-23 * level.abs()).all(), "S errs by more than its rounding"
    assert (dweight is not None) == (total is not None)
    if dweight is not None:
        summands = (dy * x * root).flatten(0, -2)
        sizes.close(dweight, summands.sum(0), dweight.dtype, slack=2e-6 * float(summands.abs().sum(0).max()))


def mixture_of(out: Tensor, residue: Tensor | None) -> Tensor:
    return out if residue is None else eager_steps.restored(out, residue)


def check_mix_tile(sizes: Sizes, count: int, sites: int = 2) -> None:
    """Mixtures of the same sources at several sites, and their log-sum-exps."""
    torch.manual_seed(count)
    folded, sources = sizes.folded(sites + 3), sizes.rows(count)
    logits, _ = scored(sources, folded, first=1)
    arguments: Any = sources, logits, [1] * count, list(range(2, 2 + sites))
    with poisoned():
        mixtures, levels = steps.mix_tile(*arguments)
    truths, expected = eager_steps.mix_tile(*widened(arguments))
    for found, truth in zip([*mixtures, *levels], [*truths, *expected], strict=True):
        sizes.close(found, truth)


def check_coupling_from_sources(sizes: Sizes, count: int, *, null: bool = False, gate: bool = False) -> None:
    """S of one site from its sources, and the gradient of its gate."""
    torch.manual_seed(count)
    folded, sources = sizes.folded(3), sizes.rows(count)
    logits, _ = scored(sources, folded)
    firsts = [0] * count
    if null:
        sources, logits, firsts = with_null(sizes, sources, logits, firsts, folded, 1)
    _, lse, _ = eager_steps.mix(sources, logits, firsts, 1, None, None, None, None, sizes.dtype, False)
    arguments: Any = sizes.rows(1)[0], sources, logits, firsts, 1, lse, sizes.normal(1) if gate else None
    with poisoned():
        coupling, grad = steps.coupling_from_sources(*arguments)
    truth, expected = eager_steps.coupling_from_sources(*widened(arguments))
    sizes.close(coupling, truth)
    if gate:  # a sum over everything: of its terms' size
        sizes.close(grad, expected, slack=2e-6 * float(truth.norm()) / abs(float(arguments[-1])))
    else:
        assert grad.numel() == 0


def pull_arguments(sizes: Sizes, count: int, sites: Sequence[int], gated: bool, carried: bool) -> list[Any]:
    """The arguments of pull but for ``wide`` and the shares: `count` sources that all of the sites read."""
    folded, sources = sizes.folded(max(sites) + 1), sizes.rows(count)
    logits, rstds = scored(sources, folded, first=1)
    lses = [torch.stack([row[site - 1] for row in logits]).logsumexp(0) for site in sites]
    gates = [sizes.normal(1).to(sizes.dtype) if gated and n % 3 != 1 else None for n in range(len(sites))]
    couplings = [sizes.normal(*sizes.tokens, sizes.heads) for _ in sites]
    before = [sizes.normal(*sizes.tokens, sizes.width) for _ in range(count)] if carried else []
    return [
        sources, rstds, logits, [1] * count, list(sites), sizes.rows(len(sites)), lses, couplings, gates, folded, before
    ]  # fmt: skip


def check_pull(
    sizes: Sizes,
    count: int,
    sites: Sequence[int],
    *,
    gated: bool = False,
    carried: bool = False,
    wide: bool = False,
    shared: bool = True,
) -> None:
    """The gradients of sources from all of the sites, and unless they are not shared those of the folded queries."""
    torch.manual_seed(count)
    arguments = pull_arguments(sizes, count, sites, gated, carried)
    keeps = [wide and n % 2 == 0 for n in range(count)]
    with poisoned():
        shares = steps.new_shares(arguments[9]) if shared else None
        grads = steps.pull(*arguments, keeps, shares)  # type: ignore[arg-type]
    all_wide = [True] * count
    unrounded_grads, unrounded = eager_steps.pull(*widened(arguments), all_wide)
    _, truth = eager_steps.pull(arguments[0], *widened(arguments[1:]), all_wide)
    for grad, right, keep in zip(grads, unrounded_grads, keeps, strict=True):
        dtype = torch.float32 if keep else sizes.dtype
        assert grad.dtype == dtype
        sizes.close(grad, right, dtype)
    if shares is not None:
        total = shares.sum(0)
        sizes.close_by_key(total[list(sites)], truth, unrounded)
        others = [n for n in range(len(total)) if n not in sites]
        assert not total[others].any(), "sites that do not read a source owe it nothing"


def check_pull_null(sizes: Sizes, *, gated: bool = False) -> None:
    """The gradient of a null source, summed over the tokens, and of its query."""
    torch.manual_seed(1)
    folded, null = sizes.folded(3), sizes.normal(sizes.width).to(sizes.dtype)
    logits, rstd = eager_steps.score(null, folded, 1, 1, EPS)
    lse = logits[0] + sizes.normal(*sizes.tokens, sizes.heads).abs()
    coupling, gate = sizes.normal(*sizes.tokens, sizes.heads), sizes.normal(1) if gated else None
    (dout,) = sizes.rows(1)
    grad, dfolded = steps.pull_null(null, rstd, logits, dout, lse, coupling, gate, folded[1])
    arguments = [[null], [rstd], [logits], [1], [1], [dout], [lse], [coupling], [gate], folded, []]
    (truth,), unrounded = eager_steps.pull(*widened(arguments), [True])
    _, rounded = eager_steps.pull([null], *widened(arguments[1:]), [True])  # type: ignore[arg-type]
    sizes.close(grad, truth, slack=2e-6 * float(dout.double().norm()))
    sizes.close_by_key(dfolded, rounded, unrounded)


def check_unfold(
    sizes: Sizes, sites: int = 4, *, shared: bool = True, single: Sequence[int] = (), weighted: Sequence[int] = (0, 2)
) -> None:
    """Gradients of queries and key weights, from what pulls left in shares and from gradients of single sites."""
    torch.manual_seed(sites)
    by_head = sizes.heads, sizes.head_width
    shares = sizes.normal(5, sites, *by_head) if shared else None
    singles = [sizes.normal(1, *by_head) for _ in single]
    queries = [sizes.normal(*by_head).to(sizes.dtype) for _ in range(sites)]
    weights = [sizes.normal(sizes.width).to(sizes.dtype) if n in weighted else None for n in range(sites)]
    with poisoned():
        total = steps.folded_gradients(shares, singles, list(single), sites)
        found = steps.unfold(total, queries, weights)
    grads, places = [grad.double() for grad in singles], list(single)
    if shares is not None:
        grads, places = [shares.double().sum(0), *grads], [*range(sites), *places]
    expected = eager_steps.unfold(grads, places, widened(queries), widened(weights))
    for grad, truth, argument in zip(
        itertools.chain(*found), itertools.chain(*expected), [*queries, *weights], strict=True
    ):
        if argument is None:
            assert grad.numel() == 0
        else:
            assert grad.dtype == argument.dtype
            sizes.close(grad, truth, argument.dtype)
