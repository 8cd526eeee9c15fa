"""Export, schemas and tensor subclasses: what other systems see of the operator."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor

from mhar_compile import route
from mhar_compile.ops import reference

TOKENS = torch.randint(32, (2, 7))
mhar = torch.ops.mhar


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("residual", ["mhar", "delta"])
def test_export_keeps_the_operator(small_decoder, residual, strict):
    model = small_decoder(residual)
    program = torch.export.export(model, (TOKENS,), strict=strict)
    calls = [node for node in program.graph.nodes if node.target is mhar.route.default]
    assert len(calls) == (5 if residual == "mhar" else 4)
    torch.testing.assert_close(program.module()(TOKENS), model(TOKENS))


def in_plain_operations(sources, query, key_weight, null_source, residual, gate, eps):
    """The operator for ``run_decompositions``: what reads its second result takes the softmax of it."""
    options = {"key_weight": key_weight, "null_source": null_source, "residual": residual, "gate": gate}
    out, weights = reference(sources, query, eps=eps, **options)
    return out, weights.log(), weights.sum(0), weights.sum(-1)


@pytest.mark.filterwarnings("ignore:.*LeafSpec.* is deprecated:FutureWarning")  # torch's own, when it copies a program
def test_an_exported_file_without_the_operator_runs_without_the_package(small_decoder, tmp_path):
    model, file = small_decoder("delta"), tmp_path / "decoder.pt2"
    program = torch.export.export(model, (TOKENS,)).run_decompositions({mhar.route.default: in_plain_operations})
    torch.export.save(program, file)
    torch.save((TOKENS, model(TOKENS)), tmp_path / "example.pt")
    code = (
        "import sys, torch\n"
        f"tokens, wanted = torch.load({str(tmp_path / 'example.pt')!r})\n"
        f"torch.testing.assert_close(torch.export.load({str(file)!r}).module()(tokens), wanted)\n"
        "print('mhar_compile' in sys.modules)"
    )
    command = [sys.executable, "-W", "ignore", "-c", code]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.stdout.strip() == "False", done.stderr


@pytest.mark.filterwarnings("ignore:The given buffer is not writable:UserWarning")  # torch 2.11's own, as it loads
def test_an_exported_file_with_the_operator_needs_the_package(small_decoder, tmp_path):
    file = tmp_path / "decoder.pt2"
    torch.export.save(torch.export.export(small_decoder(), (TOKENS,)), file)
    torch.testing.assert_close(torch.export.load(file).module()(TOKENS), small_decoder()(TOKENS))
    command = [sys.executable, "-W", "ignore", "-c", f"import torch; torch.export.load({str(file)!r})"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode != 0
    assert "mhar" in done.stderr


def test_schemas_take_tensors_by_position_and_return_tensors():
    """Sharding rules of DTensor miss tensors that are keyword-only, lists of them, and operators without outputs."""
    names = [name for name in torch._C._dispatch_get_all_op_names() if name.startswith("mhar::")]
    assert len(names) == 11
    for name in names:
        schema = getattr(mhar, name.removeprefix("mhar::")).default._schema
        assert not any(argument.kwarg_only for argument in schema.arguments)
        assert not schema.is_mutable
        assert schema.returns


def test_a_tensor_subclass_is_routed_by_its_own_rules():
    pairs = [TwoTensor(torch.randn(3, 8), torch.randn(3, 8)) for _ in range(3)]
    query = torch.randn(2, 4)
    out = route(pairs, TwoTensor(query, query))
    assert isinstance(out, TwoTensor)
    assert torch.equal(out.a, route([pair.a for pair in pairs], query))
    assert torch.equal(out.b, route([pair.b for pair in pairs], query))
