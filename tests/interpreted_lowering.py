"""What tests/test_kernels.py runs of whole models, interpreted: graphs with launches in place of operators."""

from functools import partial

import pytest
import torch
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.decomposition import select_decomp_table

from mhar_compile import Decoder
from mhar_compile.compiler import EXPANSIONS, joint_pass
from mhar_compile.lowering.lowered import Lowering
from mhar_compile.lowering.tracing import boxed

from . import interpreted  # noqa: F401  rounds as the hardware does

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


def decoder(residual, dtype):
    """Three layers of width 24, every routing parameter away from where it starts."""
    torch.manual_seed(0)
    model = Decoder.from_preset(
        "tiny", layers=3, width=24, heads=2, kv_heads=1, ffn_width=32, vocabulary=32, residual=residual,
        routing_heads=1 if residual == "attnres" else 3,
    )  # fmt: skip
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return model.to(dtype)


def outcome(model, tokens, compiled=None):
    """Logits and gradients, of the model or of what it was compiled to."""
    logits = (model if compiled is None else compiled)(tokens)
    logits.float().square().mean().backward()
    grads = {name: parameter.grad for name, parameter in model.named_parameters()}
    for parameter in model.parameters():
        parameter.grad = None
    return {"logits": logits.detach(), **grads}


def errors(found, truth):
    """Of logits and gradients the difference's norm over the truth's, where that is not zero as it is for a site that
    reads one source; gates, single numbers whose error is luck, are left out."""
    assert all(value.isfinite().all() for value in found.values())
    names = [name for name in truth if truth[name].norm() > 0 and truth[name].numel() > 1]
    return torch.tensor([((found[name].double() - truth[name]).norm() / truth[name].norm()).item() for name in names])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("residual", ["attnres", "mhar", "block", "delta"])
def test_launches_compute_what_the_operators_do(residual, dtype):
    model, tokens = decoder(residual, dtype), torch.randint(32, (2, 3))
    truth = outcome(decoder(residual, dtype).double(), tokens)
    plain = errors(outcome(model, tokens), truth)
    torch._dynamo.reset()
    targets = []
    compiled = torch.compile(model, backend=backend(targets, rewrite="always"))
    found = errors(outcome(model, tokens, compiled), truth)
    names = [str(getattr(target, "__name__", target)) for target in targets]
    assert not [name for name in names if "mhar" in name]
    assert {"score_named", "mix_named", "pull_named"} <= set(names)
    assert (found / plain).log().mean().exp() <= 1.2
    assert (found <= 4 * plain).all()
