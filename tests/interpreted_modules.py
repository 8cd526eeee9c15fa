"""What tests/test_kernels.py runs of modules that Inductor generates for CUDA, interpreted: see perf/executed.py."""

import dataclasses
import math
import re

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from perf import executed  # before the kernels: it decides what is interpreted

from mhar_compile import route  # isort: skip
from perf.model_checks import TOPOLOGIES, Case, check  # isort: skip

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*:RuntimeWarning"),  # numpy, of padded rows
    pytest.mark.filterwarnings(r"ignore:\s*Online softmax is disabled:UserWarning"),  # torch 2.11, of its own choice
]
BF16, FP32 = torch.bfloat16, torch.float32


def compiled(function, found, dynamic=None, **settings):
    torch._dynamo.reset()
    backend = executed.backend(found, rewrite="always", **settings)
    return torch.compile(function, backend=backend, fullgraph=True, dynamic=dynamic)


def compare(case, **settings):
    """A decoder of which the generated code is run, against eager and float64; the modules."""
    found = []

    def compile_with(model, case):
        return compiled(model, found, dynamic=case.dynamic)

    heads = {} if case.residual == "attnres" else {"routing_heads": 4}
    sizes = {"layers": 2, "width": 32, "heads": 2, "kv_heads": 1, "ffn_width": 48, **heads}
    with executed.generating(**settings):
        check(case, "cpu", compile_with, (2, 5), draws=2 if case.dtype == BF16 else 12, **sizes)
    return found


def test_a_decoder():
    """With null sources, gates, residuals, and mixtures that are computed again."""
    forward, backward = compare(Case("delta", BF16, checkpointed=True))
    assert {"score_named", "mix_norm_named"} <= set(forward.launches)
    assert {"pull_named", "query_gradient_named", "site_sums_named"} <= set(backward.launches)


CASES = [
    *(Case(name, dtype, checkpointed=dtype == FP32) for name in TOPOLOGIES for dtype in (BF16, FP32)),
    Case("mhar", BF16, inference=True),
    Case("delta", BF16, checkpointed=True, dynamic=True),
]


@pytest.mark.long
@pytest.mark.parametrize("case", CASES, ids=str)
def test_decoders(case):
    compare(case)


@pytest.mark.long
@pytest.mark.parametrize("name", ["mhar", "delta"])
def test_nothing_is_read_that_was_not_written(name):
    """Where no buffer is used anew each is full of NaN until it is written."""
    modules = compare(Case(name, BF16), allow_buffer_reuse=False, inplace_buffers=False)
    assert not any("# reuse" in module.body for module in modules)


def test_a_query_that_is_computed_again_in_the_backward_and_read_by_several_sites():
    """The products that are its sites' gradients are not computed in one launch with the query."""
    torch.manual_seed(0)
    leaves = [torch.randn(6, 32), torch.randn(4, 8), *(torch.rand(32) + 0.5 for _ in range(3))]

    def sites(x, base, *weights):
        sources, query = [x, x.sin()], base.tanh()
        for weight in weights:
            sources.append(route(sources, query, key_weight=weight).tanh())
        return sources[-1]

    found = []
    again = compiled(lambda *args: checkpoint(sites, *args, use_reentrant=False), found)
    wide = [leaf.double().requires_grad_() for leaf in leaves]
    truth = torch.autograd.grad(sites(*wide).sin().sum(), wide)
    narrow = [leaf.requires_grad_() for leaf in leaves]
    with executed.generating():
        grads = torch.autograd.grad(again(*narrow).sin().sum(), narrow)
    errors = [float((one - other).norm() / other.norm()) for one, other in zip(grads, truth, strict=True)]
    assert max(errors) <= 1e-4, errors
    assert found[1].launches["query_gradient_named"]


def test_gradients_of_queries_where_a_site_is_followed_by_what_inductor_computes():
    """Pulls subtract S from products with the gradient as it is stored, bfloat16; S is formed from the same numbers."""
    torch.manual_seed(0)

    def sites(x, queries):
        sources = [x]
        for query in queries.unbind():
            sources.append(route(sources, query).tanh())
        return sources[-1]

    errors, modules = [], []
    found = compiled(sites, modules, slack=10.0)  # room for what S is formed from beside the output
    for _ in range(2):
        narrow = [torch.randn(size).to(BF16).requires_grad_() for size in ((6, 32), (5, 4, 8))]
        wide = [leaf.detach().double().requires_grad_() for leaf in narrow]
        with executed.generating():
            grads, ours, eager = (
                torch.autograd.grad(function(*leaves).double().sin().sum(), leaves)[1]
                for function, leaves in ((sites, wide), (found, narrow), (sites, narrow))
            )
        assert not ours[0].any(), "a site of one source has no gradient"
        errors.append([float((one - grads).norm() / grads.norm()) for one in (ours, eager)])
    assert modules[1].launches["coupling_named"] <= 1, "S is formed from the output, but of the first site"
    found, eager = zip(*errors, strict=True)
    assert math.hypot(*found) <= 1.5 * math.hypot(*eager)


def chain(x, query, gate):
    sources = [x]
    for _ in range(3):
        sources.append(route(sources, query, gate=gate, residual=x).tanh())
    return F.rms_norm(route(sources, query), (32,)) @ sources[1].mT


@pytest.fixture(scope="module")
def module_of_a_chain():
    """The generated code, and arguments for it."""
    torch.manual_seed(0)
    inputs, found = (torch.randn(6, 32), torch.randn(4, 8), torch.randn(1)), []
    with executed.generating(), torch.no_grad():
        assert holds(compiled(chain, found)(*inputs), inputs)
    return found[0], inputs


def holds(result, inputs):
    return (result - chain(*(x.double() for x in inputs))).norm() <= 1e-6 * result.norm()


# What is changed in the code (a pattern, and what is put in its place), and what is said of it; else a result is wrong.
FAULTS = {
    "nothing": (r"call", "call", "right"),
    "two sizes of a grid": (r"(mix_named_\d+\.run\(.*), 1, stream", r"\1, stream", "missing 1 required"),
    "a launch is left out": (r" mix_named_\d+\.run\(.*\)\n", " pass\n", None),
    "arguments swapped": (r"(score_named_\d+\.run\(.*?, buf\d+), (\w+), (\w+\(.*?, 0\)),", r"\1, \3, \2,", "behind"),
    "memory not aligned": (r"(\(3, 4, 8\), \(32, 8, 1\), )32\)", r"\g<1>33)", "multiples of 16"),
    "memory in use taken": (
        r"(buf\d+)( = empty_strided_cuda\(\(4, 6, 4\)[^?]*?buf\d+ = )empty_strided_cuda\(\(3, 6, 4\).*",
        r"\1\2reinterpret_tensor(\1, (3, 6, 4), (24, 4, 1), 0)",
        None,
    ),
    "another stride": (r"(score_named_\d+\.run\(\w+, )32,", r"\g<1>48,", None),
    "one token more": (r"(score_named_\d+\.run\(.*, \d+), 15, 1, 1, 1, stream", r"\1, 17, 1, 1, 1, stream", "behind"),
    "another dtype": (r"(empty_strided_cuda\(\(4, 6, 4\), .*torch\.)float32", r"\1float16", r"compiled for \*fp32"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_seen(module_of_a_chain, fault):
    module, inputs = module_of_a_chain
    pattern, other, said = FAULTS[fault]
    source, count = re.subn(pattern, other, module.source, count=1)
    assert count == 1
    run = executed.executed(dataclasses.replace(module, source=source), None)
    order = [inputs[n] for n in order_of(module)]
    if said in (None, "right"):
        assert holds(run(order)[0], inputs) == (said == "right")
    else:
        with pytest.raises((AssertionError, TypeError), match=said):
            run(order)


def order_of(module):
    """Which of the chain's inputs each argument is: they differ in their sizes."""
    names = re.search(r"(.*) = args\n", module.body)[1].strip().split(", ")
    sizes = [re.search(rf"assert_size_stride\({name}, (\(.*?\)),", module.body)[1] for name in names]
    return [["(6, 32)", "(4, 8)", "(1, )"].index(size) for size in sizes]
