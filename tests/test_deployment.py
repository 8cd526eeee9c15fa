"""Programs that leave: exported, expanded and packaged ones, in processes that never import this package."""

from __future__ import annotations

import itertools
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

import mhar_compile
from mhar_compile import Decoder, DecoderConfig, Router
from mhar_compile.ops import expansion, reference
from mhar_compile.testing import Problem, assert_within_budget, problems, ratios

pytestmark = pytest.mark.filterwarnings("ignore:.isinstance.treespec, LeafSpec:FutureWarning")  # torch warns of itself

ROWS: list[tuple[Any, bool, torch.dtype]] = [
    (residual, strict, (torch.float32, torch.bfloat16)[(n + strict) % 2])
    for (n, residual), strict in itertools.product(enumerate(["mhar", "attnres", "block", "delta"]), (False, True))
]
SHAPES = [(2, 8), (5, 3), (2, 31)]


def decoder(residual: Any, dtype: torch.dtype, layers: int = 2) -> Decoder:
    torch.manual_seed(layers)
    model = Decoder(DecoderConfig(32, 32, layers, 2, 1, 48, 64, residual=residual, routing_heads=4, blocks=2))
    for module in model.modules():
        if isinstance(module, Router):
            for parameter in module.parameters():
                nn.init.normal_(parameter)
    return model.to(dtype).eval()


def exported(model: nn.Module, strict: bool = False) -> ExportedProgram:
    """A decoder's program for any batch and length."""
    sizes = ({0: Dim("batch", max=64), 1: Dim("length", max=64)},)
    return torch.export.export(model, (torch.zeros(2, 8, dtype=torch.long),), dynamic_shapes=sizes, strict=strict)


def tokens(*shape: int) -> Tensor:
    return torch.randint(32, shape, generator=torch.Generator().manual_seed(shape[1]))


def assert_close(found: Tensor, expected: Tensor) -> None:
    """Logits of one decoder that differ by its roundings alone: 64 of them, and 4 ulps of the largest logit."""
    assert found.dtype == expected.dtype
    assert found.shape == expected.shape
    error = (found.double() - expected.double()).abs().max()
    assert error <= 64 * torch.finfo(expected.dtype).eps * expected.abs().max()


def targets(program: ExportedProgram) -> set[str]:
    return {str(node.target) for node in program.graph.nodes if node.op == "call_function"}


class Integers(nn.Module):
    """The weights of a site whose sources are integers: their mean square is exact in whatever order it is summed."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.router = Router(64, 4, null_source=True).to(dtype)
        self.generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            self.router.query.copy_(64 * torch.randn(4, 16, generator=self.generator))
            self.router.null_source.copy_(self.integers(127, 64))

    def integers(self, largest: int, *shape: int) -> Tensor:
        return torch.randint(-largest, largest + 1, shape, generator=self.generator)

    def forward(self, x: Tensor) -> Tensor:
        return self.router.weights(list(x.unbind()))

    def inputs(self) -> Tensor:
        """Sources that are alike, so that the rounding of keys decides between them."""
        return (self.integers(125, 3, 32, 64) + self.integers(2, 5, 3, 32, 64)).to(self.router.query.dtype)

    def without_rounding(self, x: Tensor) -> Tensor:
        """What a site with exact keys gives."""
        query, null = self.router.query.float(), self.router.null_source.float()
        return reference(list(x.float()), query, null_source=null, eps=self.router.eps)[1]


def assert_rounds_keys(model: Integers, x: Tensor, found: Tensor) -> None:
    with torch.no_grad():
        expected = model(x)
        assert (model.without_rounding(x) - expected).abs().max() > 1e-2, "a missing rounding would be seen"
        assert (found - expected).abs().max() <= 1e-3  # the float32 sums of logits, of terms near 100, may differ


def expanded_site(sources: Any, query: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    names = ("key_weight", "null_source", "residual", "gate")
    out, logits, _, _ = expansion.route(sources, query, *(options[name] for name in names), options["eps"])
    return out, logits.softmax(0).detach()


@given(problems())
def test_the_expansion_is_within_its_budgets(problem: Problem) -> None:
    results = problem.run(expanded_site)
    worst = ratios(problem, results)
    assert max(worst["out"], worst["weights"]) <= 1


@given(problems(decades=False, null_source=False))  # the gradient of a null source is rounded with its sources'
def test_its_gradients_pass_the_rounding_of_the_key(problem: Problem) -> None:
    assert_within_budget(problem, problem.run(expanded_site))


@pytest.mark.parametrize(("residual", "strict", "dtype"), ROWS, ids=str)
def test_expanded_programs_compute_what_the_model_does(residual: Any, strict: bool, dtype: torch.dtype) -> None:
    model = decoder(residual, dtype)
    program = exported(model, strict)
    assert "mhar.route.default" in targets(program)
    expanded = mhar_compile.expand(program)
    assert not any("mhar" in name for name in targets(expanded))
    for shape in SHAPES:
        assert_close(expanded.module()(tokens(*shape)), model(tokens(*shape)))


def test_a_site_is_few_operations_however_many_its_sources() -> None:
    def added(layers: int) -> float:
        program = exported(decoder("mhar", torch.bfloat16, layers))
        before, sites = len(program.graph.nodes), 2 * layers + 1
        return (len(mhar_compile.expand(program).graph.nodes) - before) / sites

    assert max(added(1), added(4)) <= 30


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_inductor_keeps_the_rounding_of_the_key(dtype: torch.dtype) -> None:
    model = Integers(dtype)
    x = model.inputs()
    compiled = torch.compile(mhar_compile.expand(torch.export.export(model, (x,))).module())
    with torch.no_grad():
        assert_rounds_keys(model, x, compiled(x))


ELSEWHERE = """
import sys, torch
sys.modules["mhar_compile"] = None  # importing it would raise
saved, packaged, inputs, outputs = sys.argv[1:]
import torch._inductor
models = [torch.export.load(saved).module(), torch._inductor.aoti_load_package(packaged)]
with torch.no_grad():
    torch.save([[model(x) for x in torch.load(inputs)] for model in models], outputs)
assert not hasattr(torch.ops.mhar, "route")
assert [name for name in sys.modules if name.split(".")[0] == "mhar_compile"] == ["mhar_compile"]
"""


def elsewhere(folder: Path, program: ExportedProgram, inputs: list[Tensor]) -> list[list[Tensor]]:
    """Outputs of a saved program and of its package, in a process without this package."""
    torch.export.save(mhar_compile.expand(program), folder / "saved.pt2")
    packaged = mhar_compile.package(program, folder / "packaged.pt2")
    torch.save(inputs, folder / "inputs.pt")
    files = [str(folder / name) for name in ("saved.pt2", "packaged.pt2", "inputs.pt", "outputs.pt")]
    assert packaged == files[1]
    command = [sys.executable, "-W", "ignore", "-c", ELSEWHERE, *files]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    outputs: list[list[Tensor]] = torch.load(files[3])
    return outputs


def test_a_decoder_runs_where_this_package_is_not(tmp_path: Path) -> None:
    model, inputs = decoder("delta", torch.float32, layers=1), [tokens(*shape) for shape in SHAPES]
    for outputs in elsewhere(tmp_path, exported(model), inputs):
        for x, found in zip(inputs, outputs, strict=True):
            assert_close(found, model(x))


def test_a_site_rounds_its_keys_where_this_package_is_not(tmp_path: Path) -> None:
    model = Integers(torch.bfloat16)
    x = model.inputs()
    for (found,) in elsewhere(tmp_path, torch.export.export(model, (x,)), [x]):
        assert_rounds_keys(model, x, found)


def test_a_failure_leaves_the_file_that_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, path = Integers(torch.bfloat16), tmp_path / "model.pt2"
    path.write_text("before")

    def fails(program: Any, *, package_path: str, inductor_configs: Any) -> str:
        Path(package_path).write_text("half")
        raise OSError("disk full")

    monkeypatch.setattr(torch._inductor, "aoti_compile_and_package", fails)
    with pytest.raises(OSError, match="disk full"):
        mhar_compile.package(torch.export.export(model, (model.inputs(),)), path)
    assert path.read_text() == "before"
    assert list(tmp_path.iterdir()) == [path]


def test_what_is_no_program_or_no_path(tmp_path: Path) -> None:
    model = Integers(torch.bfloat16)
    program = torch.export.export(model, (model.inputs(),))
    for function in (mhar_compile.expand, lambda model: mhar_compile.package(model, tmp_path / "m.pt2")):
        with pytest.raises(
            TypeError, match=r"program is Integers, expected an ExportedProgram; make one by torch\.exp"
        ):
            function(model)  # type: ignore[operator]
    with pytest.raises(ValueError, match=r"path is 'm\.so', expected one that ends in \.pt2"):
        mhar_compile.package(program, "m.so")
    with pytest.raises(FileNotFoundError, match=r"there is no folder .*absent.* create it first"):
        mhar_compile.package(program, tmp_path / "absent" / "m.pt2")


class Backward(nn.Module):
    """A program that holds more of this package than routes."""

    def forward(self, x: Tensor) -> Tensor:
        out, logits, lse, rstd = torch.ops.mhar.route([x], x[:1].clone(), None, None, None, None, 1e-6)
        grads: Tensor = torch.ops.mhar.route_backward(out, [x], x[:1].clone(), None, None, None, logits, lse, rstd)[1]
        return grads


def test_a_program_with_a_backward_is_refused() -> None:
    with pytest.raises(ValueError, match=r"holds mhar\.route_backward\.default, expected mhar\.route alone"):
        mhar_compile.expand(torch.export.export(Backward(), (torch.randn(3, 8),)))
