"""What tests/test_kernels.py runs of norms behind a site, interpreted: which are done along with it, and results."""

import pytest
import torch
import torch.nn.functional as F

from mhar_compile import route
from mhar_compile.lowering import lowered

from . import interpreted  # noqa: F401  rounds as the hardware does
from .interpreted_lowering import backend

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*:RuntimeWarning"),  # numpy, of padded rows
    pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight:UserWarning"),  # that norm is composed
]
WIDTH, EPS = 16, 0.125
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def rms(x, w, dimensions=(WIDTH,)):
    return F.rms_norm(x, dimensions, w, EPS)


def scaled(x, square, eps=EPS):
    return x.float() * torch.rsqrt(square.mean(-1, keepdim=True) + eps)


def rounded_first(x, w):
    return w * scaled(x, x.float() * x.float()).to(x.dtype)


def mean_read_too(x, w):
    mean = x.float().pow(2).mean(-1, keepdim=True)
    return w * (x.float() * torch.rsqrt(mean + EPS)).to(x.dtype) + mean.to(x.dtype)


# What stands between a site of x's dtype and a matrix product, and the dtypes of x and of the weight.
ALONG = {
    "rms_norm": (rms, BF16, BF16),
    "rms_norm, float32": (rms, FP32, FP32),
    "rms_norm, float16": (rms, FP16, FP16),
    "rms_norm, wide weight": (rms, BF16, FP32),
    "without weight": (lambda x, w: rms(x, None), BF16, BF16),
    "without eps": (lambda x, w: F.rms_norm(x, (WIDTH,), w), BF16, BF16),
    "rounded first": (rounded_first, BF16, BF16),
    "rounded first, wide weight": (lambda x, w: rounded_first(x, w).to(x.dtype), BF16, FP32),
    "rounded to the weight": (lambda x, w: w * scaled(x, x.pow(2)).to(w.dtype), FP32, BF16),
    "narrower, as under autocast": (lambda x, w: rms(x, w).bfloat16(), FP32, FP32),
    "a view": (lambda x, w: rms(x.view(x.shape), w).view(-1, WIDTH), BF16, BF16),
    "the output read too": (lambda x, w: torch.cat((rms(x, w), x.tanh()), -1), BF16, BF16),
    "two norms of one output": (lambda x, w: torch.cat((rms(x, w), rms(x, None)), -1), BF16, BF16),
}
ALONE = {
    "weight computed": (lambda x, w: rms(x, None) * (1 + w), BF16, BF16),
    "another dimension": (lambda x, w: rms(x.mT, None, x.shape[1:2]).mT, BF16, BF16),
    "two dimensions": (lambda x, w: rms(x, None, tuple(x.shape[1:])), BF16, BF16),
    "by head": (lambda x, w: rms(x.unflatten(-1, (2, -1)), None, (WIDTH // 2,)).flatten(-2), BF16, BF16),
    "fourth powers": (lambda x, w: scaled(x, x.float().pow(4)).to(x.dtype), BF16, BF16),
    "a result wider than the output": (lambda x, w: w * scaled(x, x.float().pow(2)), BF16, FP32),
    "a wider product of a rounded row": (lambda x, w: w * scaled(x, x.pow(2)).bfloat16(), FP32, FP32),
    "layer norm": (lambda x, w: F.layer_norm(x, (WIDTH,), w, None, EPS), BF16, BF16),
    "eps a tensor": (lambda x, w: scaled(x, x.float().pow(2), w[:1].float().abs()).to(x.dtype), BF16, BF16),
    "the mean read too": (mean_read_too, BF16, BF16),
    "read element by element": (lambda x, w: rms(x, w).tanh(), BF16, BF16),
}


def run(form, dtype, weight_dtype, train=True):
    """Results and gradients of a site, what follows it and a matrix product, and the launches that make them."""
    torch.manual_seed(0)
    sources = [torch.randn(2, 3, WIDTH).to(dtype).requires_grad_(train) for _ in range(2)]
    query, weight = torch.randn(2, WIDTH // 2), (1 + torch.randn(WIDTH) / 4).to(weight_dtype)
    leaves = [*sources, query.requires_grad_(train), weight.requires_grad_(train)]
    with torch.no_grad():
        shape = form(sources[0].detach(), weight.detach()).shape
    projection = torch.randn(shape[-1], 4)

    def function(*leaves):
        *sources, query, weight = leaves
        y = form(route(sources, query), weight)
        return y @ projection.to(y.dtype)

    targets = []
    torch._dynamo.reset()
    out = torch.compile(function, backend=backend(targets, rewrite="always"), fullgraph=True)(*leaves)
    results = [out.detach()]
    if train:
        grads = torch.autograd.grad(out.float().square().sum(), leaves, allow_unused=True)
        results += [grad for grad in grads if grad is not None]
    return results, {str(getattr(target, "__name__", target)) for target in targets}


def compare(form, dtype, weight_dtype, monkeypatch, train=True):
    """Names of what is launched; results are those of the graph in which no norm is done along with its site."""
    found, names = run(form, dtype, weight_dtype, train)
    with monkeypatch.context() as patch:
        patch.setattr(lowered, "norm_behind", lambda mix: None)
        expected, apart = run(form, dtype, weight_dtype, train)
    assert "mix_norm_named" not in apart
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == other.dtype
        assert one.isfinite().all()
        limit = {FP32: 1e-6, BF16: 2e-2, FP16: 2e-3}[max(dtype, weight_dtype, key=lambda x: torch.finfo(x).eps)]
        assert (one - other).abs().max() <= limit * other.abs().max()
        if one.dtype == BF16:
            assert (one == other).double().mean() >= 0.8, "an order of sums changes few bits of few values"
    return names


@pytest.mark.parametrize(
    "name",
    ["rms_norm", "rounded first", "narrower, as under autocast", "the output read too", "two norms of one output"],
)
def test_training(name, monkeypatch):
    names = compare(*ALONG[name], monkeypatch)
    assert "mix_norm_named" in names
    assert not {"rsqrt.default", "mean.dim"} & names, "nothing of the norm is computed again"


@pytest.mark.parametrize("name", [*ALONG, *ALONE])
def test_inference(name, monkeypatch):
    names = compare(*(ALONG | ALONE)[name], monkeypatch, train=False)
    assert ("mix_norm_named" in names) == (name in ALONG)
