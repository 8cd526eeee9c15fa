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
    "narrower, as under autocast": (lambda x, w: rms(x, w).to(BF16 if x.dtype == FP32 else x.dtype), FP32, FP32),
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


def drawn(seed, form, dtype, weight_dtype):
    """Two sources, a query, the weight, and two matrices that what follows the site is multiplied by."""
    torch.manual_seed(seed)
    sources = [torch.randn(2, 3, WIDTH).to(dtype) for _ in range(2)]
    query, weight = torch.randn(2, WIDTH // 2), (1 + torch.randn(WIDTH) / 4).to(weight_dtype)
    return [*sources, query, weight, torch.randn(2, form(sources[0], weight).shape[-1], 4)]


def run(form, dtype, weight_dtype, train=True, compiled=True):
    """Results and gradients of a site, what follows it and matrix products, and the launches that make them."""

    def function(*leaves):
        *sources, query, weight, matrices = leaves
        y = form(route(sources, query), weight)
        one, other = (y @ matrix.to(y.dtype) for matrix in matrices)
        return one * other

    results, targets = [], []
    torch._dynamo.reset()
    if compiled:
        function = torch.compile(function, backend=backend(targets, rewrite="always"), fullgraph=True)
    for seed in range(6 if train else 2):
        *leaves, matrices = drawn(seed, form, dtype, weight_dtype)
        leaves = [(leaf if compiled else leaf.double()).requires_grad_(train) for leaf in leaves]
        out = function(*leaves, matrices)
        grads = torch.autograd.grad(out.to(leaves[0].dtype).square().mean(), leaves, allow_unused=True) if train else []
        results.append([out.detach(), *(grad for grad in grads if grad is not None)])
    return results, {str(getattr(target, "__name__", target)) for target in targets}


def error(found, truth):
    """The root mean square, over draws, of a tensor's relative errors."""
    ratios = [(one.double() - true).norm() / true.norm() for one, true in zip(found, truth, strict=True)]
    return torch.stack(ratios).square().mean().sqrt()


def compare(form, dtype, weight_dtype, monkeypatch, train=True):
    """Names of what is launched; results err little more than where no norm is done along with its site."""
    found, names = run(form, dtype, weight_dtype, train)
    with monkeypatch.context() as patch:
        patch.setattr(lowered, "norm_behind", lambda mix: None)
        patch.setattr(lowered, "gradient_behind", lambda node: None)
        others, apart = run(form, dtype, weight_dtype, train)
    truths, _ = run(form, dtype, weight_dtype, train, compiled=False)
    assert not {"mix_norm_named", "norm_backward_named"} & apart
    for one, other, truth in zip(*(zip(*results, strict=True) for results in (found, others, truths)), strict=True):
        assert [x.dtype for x in one] == [x.dtype for x in other]
        assert error(one, truth) <= 1.25 * error(other, truth) + 1e-6
    return names


TRAINED = {  # and whether the backward of the norm is a launch, too
    "rms_norm": True,
    "rms_norm, float32": True,
    "rms_norm, wide weight": True,
    "without weight": True,
    "rounded first": True,
    "narrower, as under autocast": True,
    "weight computed": True,
    "eps a tensor": True,
    "the output read too": False,
    "two norms of one output": False,
    "by head": False,
}


@pytest.mark.parametrize("name", TRAINED)
def test_training(name, monkeypatch):
    names = compare(*(ALONG | ALONE)[name], monkeypatch)
    assert ("mix_norm_named" in names) == (name in ALONG)
    assert ("norm_backward_named" in names) == TRAINED[name]
    if name in ALONG:
        assert not {"rsqrt.default", "mean.dim"} & names, "nothing of the norm is computed again"
    if name in ALONG and TRAINED[name]:
        assert not {"sub.Tensor", "div.Tensor", "div.Scalar", "pow.Tensor_Scalar"} & names, (
            "nor is anything of its backward"
        )


@pytest.mark.parametrize("name", [*ALONG, *ALONE])
def test_inference(name, monkeypatch):
    names = compare(*(ALONG | ALONE)[name], monkeypatch, train=False)
    assert ("mix_norm_named" in names) == (name in ALONG)


def test_training_with_a_dynamic_length():
    """The backward is then compiled within AOTAutograd's fake mode, and sizes are nodes of the graph."""

    def function(one, other, query, weight):
        y = rms(route([one, other], query), weight)
        return (y @ y.mT).square().mean()

    torch._dynamo.reset()
    targets = []
    compiled = torch.compile(function, backend=backend(targets, rewrite="always"), fullgraph=True)
    for length in (3, 5, 70):  # of one program, and of several
        torch.manual_seed(length)
        leaves = [torch.randn(2, length, WIDTH), torch.randn(2, length, WIDTH), torch.randn(2, WIDTH // 2)]
        leaves = [leaf.requires_grad_() for leaf in (*leaves, 1 + torch.randn(WIDTH) / 4)]
        for leaf in leaves[:2]:
            torch._dynamo.mark_dynamic(leaf, 1)
        found, expected = (torch.autograd.grad(f(*leaves), leaves) for f in (compiled, function))
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)
    launches = [getattr(target, "__name__", "") for target in targets]
    assert launches.count("norm_backward_named") == 1, "compiled once"
