"""How close gradients are to float64: ``python -m perf.numerics`` prints the tables; needs mhar-compile[test].

A chain is 25 routing sites in a row. Site i mixes all sources so far, and a sublayer makes the next source of it:

    out_i = route(source_0 .. source_i; query_i, key_weight_i),    source_{i+1} = sublayer_i(out_i)

with queries of standard deviation 0.3 / sqrt(K), key weights 1 +- 0.1, and a normal gradient of the last output. The
truth is the same chain in float64. Left out are tensors whose true gradient is zero: those of the first site, which has
one source. Sublayers:

    dense      silu(out W), W of standard deviation 1 / sqrt(d), trained; float32.
    alike      a tanh(out), a = 1 +- 0.1, constant; bfloat16. Every source resembles those before it, as in the residual
               stream of a deep network, so that the terms of a query's gradient cancel.
    unlike     a tanh(out), a normal, constant; bfloat16. Sources have little in common, and what both sides share, that
               every source is rounded to bfloat16, is most of all the error there is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields

import torch
from torch import Tensor
from torch.nn import functional as F

from mhar_compile import route
from mhar_compile.ops import figure3, reference
from mhar_compile.testing import Recipe

SITES, TOKENS, WIDTH, HEADS = 25, 64, 128, 8
SEEDS = range(5)
Site = Callable[[list[Tensor], Tensor, Tensor], Tensor]
SHAPES = {  # of single sites
    "2 sources, 1 head of 64": Recipe((32,), 2, 1, 64),
    "9 sources, 8 heads of 16, null source": Recipe((4, 8), 9, 8, 16, null_source=True),
    "33 sources, 4 heads of 16, alike": Recipe((16,), 33, 4, 16, shared=True),
    "129 sources, 8 heads of 8, gate": Recipe((8,), 129, 8, 8, gate=1),
}


def ours(sources: list[Tensor], query: Tensor, key_weight: Tensor) -> Tensor:
    return route(sources, query, key_weight=key_weight)


def plain(sources: list[Tensor], query: Tensor, key_weight: Tensor) -> Tensor:
    return reference(sources, query, key_weight=key_weight)[0]


def dense(out: Tensor, weight: Tensor) -> Tensor:
    return F.silu(out @ weight)


def elementwise(out: Tensor, weight: Tensor) -> Tensor:
    return weight * out.tanh()


def last_output(
    site: Site, source: Tensor, queries: list[Tensor], key_weights: list[Tensor], weights: list[Tensor]
) -> Tensor:
    """A chain as a function of its tensors, one for each site or sublayer."""
    sources = [source]
    for query, key_weight, weight in zip(queries, key_weights, weights, strict=False):
        sublayer = dense if weight.dim() == 2 else elementwise
        sources.append(sublayer(site(sources, query, key_weight), weight))
    return site(sources, queries[-1], key_weights[-1])


@dataclass(frozen=True)
class Chain:
    """The tensors of a chain: source and grad_out [tokens, d], queries [sites, H, K], key weights [sites, d], and the
    sublayers' weights [sites - 1, d, d] (trained) or [sites - 1, d] (constant)."""

    source: Tensor
    queries: Tensor
    key_weights: Tensor
    weights: Tensor
    grad_out: Tensor

    def to(self, dtype: torch.dtype) -> Chain:
        return Chain(*(getattr(self, field.name).to(dtype) for field in fields(self)))

    def gradients(self, site: Site, run: Callable[..., Tensor] | None = None) -> dict[str, Tensor]:
        """Of the first source, and of the parameters of every site and sublayer; run: ``last_output``, compiled."""
        first, *parameters = (
            tensor.detach().requires_grad_()
            for tensor in (self.source, *self.queries, *self.key_weights, *self.weights)
        )
        sites = len(self.queries)
        queries, key_weights, weights = parameters[:sites], parameters[sites : 2 * sites], parameters[2 * sites :]
        trained = weights if self.weights.dim() == 3 else []
        out = (run or last_output)(site, first, queries, key_weights, weights)
        named = {"source": first}
        for kind, tensors in (("query", queries[1:]), ("key weight", key_weights[1:]), ("sublayer", trained)):
            named |= {f"{kind} {i}": tensor for i, tensor in enumerate(tensors)}
        return dict(zip(named, torch.autograd.grad(out, list(named.values()), self.grad_out), strict=True))

    def truth(self) -> dict[str, Tensor]:
        return self.to(torch.float64).gradients(plain)


def chain(kind: str, seed: int, sites: int = SITES) -> Chain:
    """A chain of sublayers that are "dense" (float32), "alike" or "unlike" (bfloat16)."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    source, grad_out = normal(TOKENS, WIDTH), normal(TOKENS, WIDTH)
    queries = normal(sites, HEADS, WIDTH // HEADS) * 0.3 / math.sqrt(WIDTH // HEADS)
    key_weights = 1 + normal(sites, WIDTH) / 10
    if kind == "dense":
        weights = normal(sites - 1, WIDTH, WIDTH) / math.sqrt(WIDTH)
    else:
        weights = normal(sites - 1, WIDTH) if kind == "unlike" else 1 + normal(sites - 1, WIDTH) / 10
    dtype = torch.float32 if kind == "dense" else torch.bfloat16
    return Chain(source, queries, key_weights, weights, grad_out).to(dtype)


def largest_error(results: dict[str, Tensor], truth: dict[str, Tensor]) -> float:
    """The largest error of any tensor, relative to that tensor's largest element."""
    return max(float((results[name] - true).abs().max() / true.abs().max()) for name, true in truth.items())


def error_ratio(results: dict[str, Tensor], others: dict[str, Tensor], truth: dict[str, Tensor]) -> float:
    """The geometric mean, over tensors, of norm(results - truth) / norm(others - truth)."""
    return geometric_mean(
        float((results[name] - true).norm() / (others[name] - true).norm()) for name, true in truth.items()
    )


def geometric_mean(numbers: Iterable[float]) -> float:
    logarithms = [math.log(number) for number in numbers]
    return math.exp(sum(logarithms) / len(logarithms))


def float32_chain(seed: int) -> tuple[float, float]:
    """Largest error of the dense chain's gradients, and their error ratio to the reference under float32 autograd."""
    case = chain("dense", seed)
    truth, gradients = case.truth(), case.gradients(ours)
    return largest_error(gradients, truth), error_ratio(gradients, case.gradients(plain), truth)


def float32_site(recipe: Recipe, seed: int) -> float:
    """Error ratio of one site's results and gradients to those of the reference under float32 autograd.

    The gate's gradient, a single number whose error is luck in both, is left out.
    """
    problem = recipe.problem(seed)
    truth = {name: tensor for name, tensor in problem.truth().items() if name != "gate"}
    return error_ratio(problem.run(), problem.run(reference), truth)


def bfloat16_chain(kind: str, seed: int) -> float:
    """Error ratio of a chain's gradients to those of the paper's Figure 3."""
    case = chain(kind, seed)
    return error_ratio(case.gradients(ours), case.gradients(figure3), case.truth())


def main() -> None:
    print(f"chains of {SITES} sites, {TOKENS} tokens, width {WIDTH}, {HEADS} heads; seeds {SEEDS[0]} to {SEEDS[-1]}\n")
    errors, float32 = zip(*(float32_chain(seed) for seed in SEEDS), strict=True)
    print(f"float32, dense: largest gradient error, relative to the tensor's largest element {max(errors):.2e}\n")
    rows = {"float32, dense chain, to the reference": float32}
    rows |= {f"float32, {name}": [float32_site(recipe, seed) for seed in SEEDS] for name, recipe in SHAPES.items()}
    for kind in ("alike", "unlike"):
        rows[f"bfloat16, {kind} chain, to Figure 3"] = [bfloat16_chain(kind, seed) for seed in SEEDS]
    print(f"{'error ratio, geometric mean over tensors':<50} mean   each seed")
    for name, ratios in rows.items():
        print(f"{name:<50} {geometric_mean(ratios):.3f}  {' '.join(f'{ratio:.3f}' for ratio in ratios)}")


if __name__ == "__main__":
    main()
