"""What tests/test_kernels.py runs of whole models, interpreted: graphs with launches in place of operators."""

from functools import partial

import pytest
import torch
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.decomposition import select_decomp_table

from mhar_compile import route
from mhar_compile.compiler import EXPANSIONS, joint_pass
from mhar_compile.lowering.lowered import Lowering
from mhar_compile.lowering.tracing import boxed
from perf.model_checks import Case, check

from . import interpreted  # noqa: F401  rounds as the hardware does
from .windows import windows_that_free

pytestmark = pytest.mark.filterwarnings("ignore:.*:RuntimeWarning")  # numpy, of padded rows


def lowered(module, _, targets):
    Lowering(module.graph, EXPANSIONS, device="cpu").run()
    module.recompile()
    targets += [node.target for node in module.graph.nodes]
    return boxed(module)


def backend(targets, **settings):
    """The passes, the split, and launches that the interpreter runs."""
    joint = joint_pass(**settings)

    def split(module, joint_inputs, **rest):
        joint(module.graph)
        return min_cut_rematerialization_partition(module, joint_inputs, compiler="inductor", **rest)

    def infer(module, inputs):
        joint(module.graph)
        return lowered(module, inputs, targets)

    compiler = partial(lowered, targets=targets)
    return aot_autograd(
        fw_compiler=compiler,
        bw_compiler=compiler,
        inference_compiler=infer,
        partition_fn=split,
        decompositions=select_decomp_table,
        keep_inference_input_mutations=True,
    )


CASES = [
    Case("attnres", torch.bfloat16),  # of one head errors in float32 are luck: few of them make up the sum
    Case("mhar", torch.bfloat16),
    Case("block", torch.float32, checkpointed=True),
    Case("delta", torch.bfloat16),
    Case("mhar", torch.float32, dynamic=True),
    Case("block", torch.bfloat16, inference=True),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_launches_compute_what_the_operators_do(case):
    compare(case)


def test_launches_of_windows_that_free_what_they_hold():
    with windows_that_free():
        compare(Case("delta", torch.float32, checkpointed=True), window=2, tile=1)


def test_operators_left_beside_launches():
    """Sites with a float64 gate, which no kernel takes, in a family whose other sites are launched."""
    torch.manual_seed(0)
    leaves = [torch.randn(3, 16), *(torch.randn(2, 8) for _ in range(4)), torch.randn(1, dtype=torch.float64)]
    for leaf in leaves:
        leaf.requires_grad_()

    def model(x, a, b, c, d, gate):
        first = route([x, x.sin()], a)
        second = route([x, x.sin(), first.cos()], b)
        third = route([x, x.sin()], c, gate=gate).sin()
        fourth = route([x, x.sin(), third], d, gate=gate)
        return torch.cat([second.sin(), fourth.sin()])

    torch._dynamo.reset()
    targets = []
    compiled = torch.compile(model, backend=backend(targets, rewrite="always", tile=1), fullgraph=True)
    expected, found = (torch.autograd.grad(f(*leaves).sum(), leaves) for f in (model, compiled))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    assert {"pull_named", "pull.default"} <= {str(getattr(target, "__name__", target)) for target in targets}


def test_a_single_token_without_a_dimension_of_tokens_is_no_null_source():
    torch.manual_seed(0)
    leaves = [torch.randn(16, requires_grad=True), torch.randn(2, 8, requires_grad=True)]

    def model(x, query):
        return route([x.sin(), x.cos()], query, null_source=x).sin()

    torch._dynamo.reset()
    compiled = torch.compile(model, backend=backend([], rewrite="always"), fullgraph=True)
    expected, found = (torch.autograd.grad(f(*leaves).sum(), leaves) for f in (model, compiled))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def compare(case, **settings):
    targets = []

    def compile_with(model, case):
        torch._dynamo.reset()
        launching = backend(targets, rewrite="always", **settings)
        return torch.compile(model, backend=launching, dynamic=case.dynamic, fullgraph=True)

    heads = {} if case.residual == "attnres" else {"routing_heads": 3}
    sizes = {"layers": 2, "width": 24, "heads": 2, "kv_heads": 1, "ffn_width": 32, **heads}
    check(case, "cpu", compile_with, (2, 4), draws=2, **sizes)
    names = {str(getattr(target, "__name__", target)) for target in targets}
    assert not [name for name in names if "mhar" in name]
    expected = {"score_named", "mix_norm_named"} | (
        {"pull_named", "query_gradient_named"} if not case.inference else set()
    )
    assert expected <= names
