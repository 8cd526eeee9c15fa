"""The steps of a compiled route: together they are the operator, and each passes torch's own checks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from mhar_compile import route
from mhar_compile.compiler import joint_pass
from mhar_compile.lowering.tracing import Trace, tracer

mhar = torch.ops.mhar
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
# (sources, heads, key weight, null source, residual and gate)
CASES = [(1, 1, False, False, False), (3, 2, True, False, False), (4, 4, True, True, True), (2, 2, False, True, False)]


def site(
    case: tuple[int, int, bool, bool, bool], dtype: torch.dtype, tokens: tuple[int, ...] = (2, 3)
) -> dict[str, Any]:
    count, heads, weight, null, gated = case
    width = 8

    def draw(*shape: int, of: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(shape, dtype=torch.float64).to(of)

    parameter = torch.float64 if dtype == torch.float64 else torch.float32
    return {
        "sources": [draw(*tokens, width, of=dtype) for _ in range(count)],
        "query": draw(heads, width // heads, of=parameter),
        "key_weight": draw(width, of=parameter) if weight else None,
        "null_source": draw(width, of=dtype) if null else None,
        "residual": draw(*tokens, width, of=dtype) if gated else None,
        "gate": draw(1, of=parameter) if gated else None,
    }


def in_steps(s: dict[str, Any], grad_out: Tensor, *, tile: int, eps: float = 1e-6) -> tuple[Tensor, list[Tensor]]:
    """Output and gradients of one site by the steps; the first ``tile`` sources take the tiled way."""
    wide = torch.float64 if grad_out.dtype == torch.float64 else torch.float32
    rows = ([s["null_source"]] if s["null_source"] is not None else []) + s["sources"]
    folded = mhar.fold([s["query"]] * 2, [s["key_weight"]] * 2, wide)  # the site is the second of two
    scored = [mhar.score(x, folded, 1, 1, eps) if x.dim() == 1 else mhar.score(x, folded, 0, 2, eps) for x in rows]
    logits, rstds = [x for x, _ in scored], [x for _, x in scored]
    firsts = [1 if x.dim() == 1 else 0 for x in rows]
    null = len(rows) - len(s["sources"])
    old, new = slice(null, null + tile), [*range(null), *range(null + tile, len(rows))]
    carried = (None, None)
    if tile:
        mixtures, lses = mhar.mix_tile(rows[old], logits[old], firsts[old], [1])
        carried = (mixtures[0], lses[0])
    narrow = grad_out.dtype in (torch.bfloat16, torch.float16)
    keep = narrow and s["gate"] is None
    out, lse, residue = mhar.mix(
        *([xs[n] for n in new] for xs in (rows, logits, firsts)),
        1,
        s["residual"],
        s["gate"],
        *carried,
        grad_out.dtype,
        keep,
    )
    if s["gate"] is None:
        coupling, dgate = mhar.coupling(grad_out, out, residue if keep else None, folded.shape[1]), None
    else:
        coupling, dgate = mhar.coupling_from_sources(grad_out, rows, logits, firsts, 1, lse, s["gate"])
    grads, partials = [], []
    for group in [[n] for n in range(null)] + [list(range(null, len(rows)))]:
        grad, dfolded = mhar.pull(
            *([xs[n] for n in group] for xs in (rows, rstds, logits, firsts)),
            [1], [grad_out], [lse], [coupling], [s["gate"]], folded, [], [False] * len(group),
        )  # fmt: skip
        grads += grad
        partials.append(dfolded)
    dquery, dkey = mhar.unfold(partials, [1] * len(partials), [s["query"]] * 2, [s["key_weight"]] * 2)
    optional = [x for x in (dkey[1] if s["key_weight"] is not None else None, dgate) if x is not None]
    return out, [*grads, dquery[1], *optional]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("tile", [0, 1])
def test_the_steps_of_a_site_are_the_operator(case: Any, dtype: torch.dtype, tile: int) -> None:
    s = site(case, dtype)
    out, logits, lse, rstd = mhar.route(*s.values(), 1e-6)
    grad_out = torch.randn_like(out)
    grads, dquery, dkey, dnull, dgate = mhar.route_backward(
        grad_out, s["sources"], s["query"], s["key_weight"], s["null_source"], s["gate"], logits, lse, rstd
    )
    expected = [out, *([] if s["null_source"] is None else [dnull]), *grads, dquery]
    expected += [] if s["key_weight"] is None else [dkey]
    expected += [] if s["gate"] is None else [dgate]
    got, got_grads = in_steps(s, grad_out, tile=tile)
    tolerance = {torch.float32: 1e-5, torch.float64: 1e-13, torch.bfloat16: 1e-2, torch.float16: 2e-3}[dtype]
    for actual, wanted in zip([got, *got_grads], expected, strict=True):
        assert actual.dtype == wanted.dtype
        torch.testing.assert_close(actual, wanted, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_the_residue_restores_eight_more_bits(dtype: torch.dtype) -> None:
    from mhar_compile.ops.eager_steps import residue, restored

    exact = torch.cat([torch.randn(4000), torch.tensor([0.0, -0.0, 1.0, 0.99999, -0.9999, 3.1e-3])])
    exact = exact[(exact == 0) | (exact.abs() > 1e-4)]  # float16's subnormals keep less
    narrow = exact.to(dtype)
    lost = (restored(narrow, residue(exact, narrow)) - exact).abs()
    assert (lost <= exact.abs() * torch.finfo(dtype).eps / 2**8).all()
    assert (narrow.float() - exact).abs().max() > 20 * lost.max()


def test_several_sites_and_sources_pull_at_once_as_one_by_one() -> None:
    x = [torch.randn(5, 8) for _ in range(3)]
    queries, grad_outs = [torch.randn(2, 4) for _ in range(4)], [torch.randn(5, 8) for _ in range(4)]
    folded = mhar.fold(queries, [None] * 4, torch.float32)
    logits, rstds = zip(*[mhar.score(s, folded, 0, 4, 1e-6) for s in x], strict=True)
    mixed = [mhar.mix(x, logits, [0] * 3, j, None, None, None, None, torch.float32, False) for j in range(4)]
    s = [mhar.coupling(g, out, None, 2) for g, (out, _, _) in zip(grad_outs, mixed, strict=True)]
    lses = [lse for _, lse, _ in mixed]

    def pull(sources: list[int], sites: list[int], carried: list[Tensor]) -> Any:
        at = [[xs[n] for n in sources] for xs in (x, rstds, logits, [0] * 3)]
        by_site = [[ys[j] for j in sites] for ys in (grad_outs, lses, s)]
        return mhar.pull(*at, sites, *by_site, [None] * len(sites), folded, carried, [False] * len(sources))

    grads, dfolded = pull([0, 1, 2], [0, 1, 2, 3], [])
    for n in range(3):
        first, a = pull([n], [3, 1], [])
        (both,), b = pull([n], [0, 2], first)
        torch.testing.assert_close(both, grads[n])
        dfolded -= torch.stack([b[0], a[1], b[1], a[0]])
    torch.testing.assert_close(dfolded, torch.zeros_like(dfolded), atol=1e-5, rtol=0)


def samples() -> dict[str, tuple[Any, ...]]:
    x, q, w = [torch.randn(2, 3, 8) for _ in range(2)], [torch.randn(2, 4) for _ in range(2)], [torch.randn(8), None]
    folded = mhar.fold(q, w, torch.float32)
    logits, rstds = map(list, zip(*[mhar.score(s, folded, 0, 2, 1e-6) for s in x], strict=True))
    gate, lse = torch.randn(1), torch.randn(2, 3, 2)
    tiled, tiled_lse = mhar.mix_tile(x, logits, [0, 0], [1])
    bf16 = x[0].bfloat16()
    return {
        "fold": (q, w, torch.float32),
        "unfold": ([folded, folded[:1]], [0, 1, 1], q, w),
        "score": (x[0], folded, 0, 2, 1e-6),
        "part": (logits[0], 1, 1),
        "mix": (x, logits, [0, 0], 1, x[1], gate, tiled[0], tiled_lse[0], torch.float32, False),
        "mix_tile": (x, logits, [0, 0], [1, 0]),
        "coupling": (bf16, bf16, torch.zeros(2, 3, 8, dtype=torch.int8), 2),
        "coupling_from_sources": (x[0], x, logits, [0, 0], 1, lse, gate),
        "pull": (x, rstds, logits, [0, 0], [1, 0], x, [lse] * 2, [lse] * 2, [gate, None], folded, x, [True, False]),
    }


def test_a_part_is_a_copy_of_its_own() -> None:
    logits = torch.randn(5, 2, 3, 4)
    for first, count in ((0, 5), (1, 1), (2, 3)):
        part = mhar.part(logits, first, count)
        assert part.equal(logits[first : first + count])
        assert part.untyped_storage().nbytes() == 4 * part.numel()


@pytest.mark.parametrize("name", list(samples()))
def test_opcheck(name: str) -> None:
    torch.library.opcheck(getattr(mhar, name).default, samples()[name])


def test_a_step_refuses_to_lose_a_gradient() -> None:
    query = torch.randn(2, 4, requires_grad=True)
    with pytest.raises(RuntimeError, match="mhar::fold is one step of a compiled route and has no gradient"):
        mhar.fold([query], [None], torch.float32)


def orders(x: Tensor) -> list[Tensor]:
    """The tensor [a, b, d] in every order of its dimensions in memory."""
    back = {(0, 1, 2): (0, 1, 2), (0, 2, 1): (0, 2, 1), (1, 0, 2): (1, 0, 2), (2, 1, 0): (2, 1, 0)}
    back |= {(1, 2, 0): (2, 0, 1), (2, 0, 1): (1, 2, 0)}
    return [x.permute(order).contiguous().permute(inverse) for order, inverse in back.items()]


def test_coupling_of_a_float32_output_is_rounded_once() -> None:
    grad_out, out = torch.randn(5, 7, 48), torch.randn(5, 7, 48)
    truth = (grad_out.double() * out.double()).unflatten(-1, (3, 16)).sum(-1)
    found = mhar.coupling(grad_out, out, None, 3)
    assert found.dtype == torch.float32
    assert ((found - truth).abs() <= 2**-24 * truth.abs() * 1.001).all()


@pytest.mark.parametrize("heads", [1, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_results_are_contiguous_whatever_the_strides(heads: int, dtype: torch.dtype) -> None:
    folded = torch.randn(1, heads, 12 // heads)
    gate = torch.randn(1)
    for x in orders(torch.randn(2, 3, 12, dtype=dtype)):
        logits, rstd = mhar.score(x, folded, 0, 1, 1e-6)
        out, lse, residue = mhar.mix([x], [logits], [0], 0, None, None, None, None, dtype, dtype == torch.bfloat16)
        gated = mhar.mix([x], [logits], [0], 0, x, gate, None, None, dtype, False)
        mixtures, lses = mhar.mix_tile([x], [logits], [0], [0])
        s = mhar.coupling(x, out, residue if dtype == torch.bfloat16 else None, heads)
        scaled, dgate = mhar.coupling_from_sources(x, [x], [logits], [0], 0, lse, gate)
        grads, dfolded = mhar.pull([x], [rstd], [logits], [0], [0], [x], [lse], [s], [gate], folded, [x], [False])
        results = [logits, rstd, out, lse, residue, *gated, *mixtures, *lses, s, scaled, dgate, *grads, dfolded]
        assert all(result.is_contiguous() for result in results)


def test_a_site_of_one_source_has_no_gradient_of_its_query() -> None:
    """Its logit's gradient is a difference of equal sums: it is zero only where both are rounded alike."""
    x, first, second = (torch.randn(size, requires_grad=True) for size in ((40, 16), (2, 8), (2, 8)))

    def sites(x: Tensor, first: Tensor, second: Tensor) -> Tensor:
        return route([x, route([x], first).sin()], second).cos()

    compiled = torch.compile(sites, backend=tracer(Trace(), joint_pass(rewrite="always")), fullgraph=True)
    grad, other = torch.autograd.grad(compiled(x, first, second).sum(), [first, second])
    assert not grad.any()
    assert other.any()
