"""What tests/test_kernels.py runs of the steps' launches, interpreted: every step against the plain one in float64."""

import pytest
import torch

from mhar_compile.lowering import steps
from mhar_compile.lowering.rules import RECTANGLE
from mhar_compile.ops import eager_steps

from . import interpreted  # noqa: F401  rounds as the hardware does

pytestmark = pytest.mark.filterwarnings("ignore:.*:RuntimeWarning")  # numpy, of padded rows
SHAPES = [(torch.float32, 2, 8), (torch.bfloat16, 2, 8), (torch.float16, 3, 24), (torch.bfloat16, 4, 20)]
TOKENS = (2, 3)
EPS = 1e-6


def rows(count, width, dtype, shape=TOKENS):
    return [torch.randn(*shape, width).to(dtype) for _ in range(count)]


def widened(value):
    """float64 throughout, for the truth."""
    if isinstance(value, torch.Tensor) and value.is_floating_point():
        return value.double()
    return [widened(entry) for entry in value] if isinstance(value, (list, tuple)) else value


def scored(sources, folded, first=0):
    """Logits and reciprocal RMS of the sources at all sites, as score leaves them."""
    found = [eager_steps.score(source, folded, first, len(folded) - first, EPS) for source in sources]
    return [logits for logits, _ in found], [rstd for _, rstd in found]


def close(found, truth, dtype):
    """Within the rounding of results in dtype and of sums in float32."""
    tolerance = {torch.float32: 2e-6, torch.bfloat16: 5e-3, torch.float16: 7e-4}[dtype]
    scale = truth.abs().max().clamp(min=1)
    assert ((found.double() - truth).abs().max() / scale).item() <= tolerance


@pytest.mark.parametrize(("dtype", "heads", "head_width"), SHAPES)
@pytest.mark.parametrize("shape", [TOKENS, ()])
def test_score(dtype, heads, head_width, shape):
    folded = torch.randn(5, heads, head_width)
    source = torch.randn(*shape, heads * head_width).to(dtype)
    logits, rstd = steps.score(source, folded, 1, 3, EPS)
    expected, root = eager_steps.score(source, folded, 1, 3, EPS)
    assert logits.shape == expected.shape
    assert rstd.shape == root.shape
    close(logits, expected.double(), torch.float32)
    close(rstd, root.double(), torch.float32)


@pytest.mark.parametrize(("dtype", "heads", "head_width"), SHAPES)
@pytest.mark.parametrize(
    ("count", "null", "residual", "gate", "carried"),
    [(3, False, False, False, False), (2, True, True, True, False), (1, False, False, False, True),
     (0, False, True, True, True), (RECTANGLE + 2, True, False, False, True)],
)  # fmt: skip
def test_mix(dtype, heads, head_width, count, null, residual, gate, carried):
    width = heads * head_width
    folded = torch.randn(4, heads, head_width)
    sources = rows(count, width, dtype)
    logits, _ = scored(sources, folded, first=1)
    firsts = [1] * count
    if null:
        sources.insert(0, torch.randn(width).to(dtype))
        logits.insert(0, eager_steps.score(sources[0], folded, 2, 1, EPS)[0])
        firsts.insert(0, 2)
    extra = torch.randn(*TOKENS, width).to(dtype) if residual else None
    scale = torch.randn(1) if gate else None
    before = (torch.randn(*TOKENS, width), torch.randn(*TOKENS, heads)) if carried else (None, None)
    arguments = sources, logits, firsts, 2, extra, scale, *before, dtype
    keep = dtype != torch.float32 and not residual and not gate
    out, lse, residue = steps.mix(*arguments, keep)
    wide = widened(arguments[:-1])
    expected, level, _ = eager_steps.mix(*wide, torch.float64, False)
    close(out, expected, dtype)
    close(lse, level, torch.float32)
    if keep:
        close(eager_steps.restored(out, residue), expected, torch.float32 if dtype == torch.float16 else torch.float16)
        restored = (eager_steps.restored(out, residue).double() - expected).abs().max()
        assert restored <= (out.double() - expected).abs().max() / 50


@pytest.mark.parametrize(("dtype", "heads", "head_width"), SHAPES)
@pytest.mark.parametrize("count", [2, RECTANGLE + 1])
def test_mix_tile(dtype, heads, head_width, count):
    folded = torch.randn(5, heads, head_width)
    sources = rows(count, heads * head_width, dtype)
    logits, _ = scored(sources, folded, first=1)
    arguments = sources, logits, [1] * count, [2, 3]
    mixtures, levels = steps.mix_tile(*arguments)
    expected, truth = eager_steps.mix_tile(*widened(arguments))
    for n in range(2):
        close(mixtures[n], expected[n], torch.float32)
        close(levels[n], truth[n], torch.float32)


@pytest.mark.parametrize(("dtype", "heads", "head_width"), SHAPES)
@pytest.mark.parametrize(("count", "null", "gate"), [(3, True, True), (RECTANGLE + 2, False, False)])
def test_coupling_from_sources(dtype, heads, head_width, count, null, gate):
    width = heads * head_width
    folded = torch.randn(3, heads, head_width)
    sources = rows(count, width, dtype)
    logits, _ = scored(sources, folded)
    firsts = [0] * count
    if null:
        sources.insert(0, torch.randn(width).to(dtype))
        logits.insert(0, eager_steps.score(sources[0], folded, 1, 1, EPS)[0])
        firsts.insert(0, 1)
    _, lse, _ = eager_steps.mix(sources, logits, firsts, 1, None, None, None, None, dtype, False)
    scale = torch.randn(1) if gate else None
    arguments = rows(1, width, dtype)[0], sources, logits, firsts, 1, lse, scale
    coupling, grad = steps.coupling_from_sources(*arguments)
    expected, truth = eager_steps.coupling_from_sources(*widened(arguments))
    close(coupling, expected, torch.float32)
    if gate:
        close(grad, truth, torch.float32)


@pytest.mark.parametrize(("dtype", "heads", "head_width"), SHAPES)
@pytest.mark.parametrize(
    ("count", "sites", "gated", "carried", "wide"),
    [(1, [3, 2, 1], False, False, False), (3, [4, 2, 1], True, True, True), (5, [2], False, True, False),
     (2, [*range(RECTANGLE + 2, 0, -1)], True, False, False)],
)  # fmt: skip
def test_pull(dtype, heads, head_width, count, sites, gated, carried, wide):
    width, total = heads * head_width, max(sites) + 1
    folded = torch.randn(total, heads, head_width)
    sources = rows(count, width, dtype)
    logits, rstds = scored(sources, folded, first=1)
    lses = [torch.stack([row[site - 1] for row in logits]).logsumexp(0) for site in sites]
    arguments = (
        sources, rstds, logits, [1] * count, sites, rows(len(sites), width, dtype), lses,
        [torch.randn(*TOKENS, heads) for _ in sites], [torch.randn(1) if gated else None for _ in sites], folded,
        rows(count, width, torch.float32) if carried else [],
    )  # fmt: skip
    keeps = [wide and n % 2 == 0 for n in range(count)]
    shares = steps.new_shares(folded)
    grads = steps.pull(*arguments, keeps, shares)
    dfolded = shares.sum(0)[sites]
    expected, truth = eager_steps.pull(*widened(arguments), [True] * count)
    # The key that the query's gradient reads is rounded to the sources' dtype in the one and not in the other.
    _, rounded = eager_steps.pull(*arguments, keeps)
    for grad, right, keep in zip(grads, expected, keeps, strict=True):
        assert grad.dtype == (torch.float32 if keep else dtype)
        close(grad, right, torch.float32 if keep else dtype)
    assert dfolded.shape == truth.shape
    close(dfolded, rounded.double(), torch.float32)
