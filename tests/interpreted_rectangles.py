"""What tests/test_kernels.py runs of score, mix, pull and query_gradient under the interpreter: parts of a chain."""

import pytest
import torch
from mhar_compile.lowering.launch import row_of
from mhar_compile.lowering.rectangle_launch import mix_launches, pull_launches, query_gradient_launches, score_launch
from mhar_compile.lowering.rules import RECTANGLE
from mhar_compile.ops import reference

from . import interpreted  # noqa: F401  float32 to bfloat16 as the hardware does it

pytestmark = pytest.mark.filterwarnings("ignore:.*:RuntimeWarning")  # numpy, of padded rows
EPS = 1e-6
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}  # of the largest value; roundings of x


def run(launches):
    for launch in launches:
        launch.run()


def scored(x, queries, heads):
    """logits [sites, tokens, H] and rstd [tokens] of one source."""
    logits, rstd = (
        x.new_full((len(queries), len(x), heads), torch.nan, dtype=torch.float32),
        torch.full((len(x),), torch.nan),
    )
    score_launch(x, queries, EPS, logits, rstd).run()
    return logits, rstd


def mixed(rows, logits, sites):
    """The carried state after mixing rows at some sites."""
    tokens, heads, width = len(rows[0]), logits[0].shape[-1], rows[0].shape[1]
    carry = tuple(torch.full((sites, tokens, size), torch.nan) for size in (heads, heads, width))
    run(mix_launches(rows, logits, sites, carry, carried=False))
    return carry


def close(ours, truth, dtype):
    assert not ours.isnan().any()
    assert (ours.double() - truth).abs().max() <= TOLERANCE[dtype] * max(float(truth.abs().max()), 1e-3)


CASES = [
    (torch.float32, 2, 8, 3, 2),
    (torch.bfloat16, 2, 8, 3, 2),
    (torch.float16, 3, 24, 2, 3),
    (torch.bfloat16, 4, 20, 2, 1),
    (torch.float32, 1, 40, 2, 2),
]


@pytest.mark.parametrize(("dtype", "heads", "head_width", "count", "sites"), CASES)
def test_tile_then_site(dtype, heads, head_width, count, sites):
    """Old sources are mixed at all sites in one rectangle; each site then merges one recent source and finishes."""
    torch.manual_seed(count)
    tokens, width = 5, heads * head_width
    rows = [torch.randn(tokens, width).to(dtype) for _ in range(count + sites)]
    queries, gate = torch.randn(sites, width) / head_width**0.5, torch.randn(1)
    residual = torch.randn(tokens, width).to(dtype)
    logits = [scored(x, queries, heads)[0] for x in rows]
    carry = mixed(rows[:count], logits[:count], sites)
    for site in range(sites):
        own = tuple(part[site : site + 1] for part in carry)
        recent = [rows[count + site]], [logits[count + site][site]]
        out, lse = torch.full_like(residual, torch.nan), torch.full((tokens, heads), torch.nan)
        run(mix_launches(*recent, 1, own, True, out, lse, residual, gate))
        sources = [x.double() for x in [*rows[:count], rows[count + site]]]
        truth, _ = reference(
            sources, queries[site].double().view(heads, -1), residual=residual.double(), gate=gate.double()
        )
        close(out, truth, dtype)


def test_more_sources_than_a_rectangle():
    tokens, heads, head_width, count = 2, 2, 4, RECTANGLE + 3
    rows = [torch.randn(tokens, heads * head_width) for _ in range(count)]
    queries = torch.randn(1, heads * head_width)
    logits = [scored(x, queries, heads)[0][0] for x in rows]
    carry = tuple(torch.full((1, tokens, size), torch.nan) for size in (heads, heads, heads * head_width))
    out, lse = torch.full_like(rows[0], torch.nan), torch.full((tokens, heads), torch.nan)
    run(mix_launches(rows, logits, 1, carry, False, out, lse))
    truth, _ = reference([x.double() for x in rows], queries[0].double().view(heads, -1))
    close(out, truth, torch.float32)


@pytest.mark.parametrize(
    ("dtype", "heads", "head_width", "count", "sites"), [*CASES, (torch.float32, 2, 4, 1, RECTANGLE + 2)]
)
def test_pull(dtype, heads, head_width, count, sites):
    """The gradient of one source from all sites, and of the queries through it, against float64 autograd."""
    torch.manual_seed(sites)
    tokens, width = 3, heads * head_width
    others = [torch.randn(tokens, width).to(dtype) for _ in range(count)]
    source = torch.randn(2 * tokens, width).to(dtype)[::2]  # strided
    queries, scales = torch.randn(sites, width) / head_width**0.5, torch.randn(sites)
    douts = [torch.randn(tokens, width).to(dtype) for _ in range(sites)]
    logits, rstd = scored(row_of(source), queries, heads)

    x, by_head = source.double().requires_grad_(), (heads, head_width)
    lses, couplings, loss, dqueries = [], [], 0, []
    key = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS)
    for m in range(sites):
        rows, dout = [x, *(other.double() for other in others)], douts[m].double()
        out, weights = reference(rows, queries[m].double().view(by_head), eps=EPS)
        loss = loss + scales[m].double() * (out * dout).sum()
        coupling = (out * dout).unflatten(1, by_head).sum(-1)
        dlogit = scales[m] * weights[0] * ((x * dout).unflatten(1, by_head).sum(-1) - coupling)
        dqueries.append((dlogit.unsqueeze(-1) * key.unflatten(1, by_head)).sum(0).flatten())
        lses.append((logits[m] - weights[0].log()).float().detach())
        couplings.append(coupling.float().detach())
    (truth,) = torch.autograd.grad(loss, x)

    dlogits, carry = torch.full_like(logits, torch.nan), torch.full((tokens, width), torch.nan)
    grad = torch.full((tokens, width), torch.nan, dtype=dtype)
    run(pull_launches(row_of(source), rstd, douts, scales, queries, logits, lses, couplings, dlogits, carry, grad))
    close(grad, truth, dtype)
    shares, grad_queries = torch.full((2, sites, width), torch.nan), torch.full((sites, width), torch.nan)
    run(query_gradient_launches(row_of(source), rstd, dlogits, shares, grad_queries))
    close(grad_queries, torch.stack(dqueries).detach(), dtype)
