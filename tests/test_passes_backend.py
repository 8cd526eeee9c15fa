"""The backend under Inductor: modes, options, dynamic shapes, users' own passes, caches in other processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import Graph

import mhar_compile
from mhar_compile import Router

ROOT = Path(__file__).parents[1]


class Net(nn.Module):
    """Four sites over a growing list of sources."""

    def __init__(self) -> None:
        super().__init__()
        self.routers = nn.ModuleList(Router(8, 2) for _ in range(4))
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        for parameter in self.parameters():
            nn.init.normal_(parameter)

    def forward(self, x: Tensor) -> Tensor:
        sources = [x]
        for router, layer in zip(self.routers, self.layers, strict=False):
            sources.append(layer(router(sources)).tanh())
        return self.routers[-1](sources)


def gradients(function: Any, model: Net, x: Tensor) -> list[Tensor]:
    out = function(x)
    return [out, *torch.autograd.grad((out * out.detach().cos()).sum(), list(model.parameters()))]


def assert_same(compiled: Any, model: Net, x: Tensor) -> None:
    for actual, wanted in zip(gradients(compiled, model, x), gradients(model, model, x), strict=True):
        torch.testing.assert_close(actual, wanted, rtol=1e-4, atol=1e-5)


@pytest.fixture(autouse=True)
def fresh() -> Any:
    torch._dynamo.reset()
    with torch._inductor.config.patch(fx_graph_cache=False), torch._functorch.config.patch(enable_autograd_cache=False):
        yield
    torch._dynamo.reset()


def seen_by(options: dict[str, Any]) -> list[Any]:
    """The reports of the pass in these options."""
    reports: list[Any] = []
    options["joint_custom_pre_pass"].reports = reports.append
    return reports


def test_the_callable_with_options_dynamic_and_fullgraph() -> None:
    model, options = Net(), mhar_compile.inductor_options(rewrite="always")
    reports = seen_by(options)
    compiled = torch.compile(model, backend=mhar_compile.backend, options=options, dynamic=True, fullgraph=True)
    assert_same(compiled, model, torch.randn(5, 6, 8))
    (report,) = reports
    assert report.pulled == 4
    assert not report.left_alone
    with torch.compiler.set_stance("fail_on_recompile"):
        assert_same(compiled, model, torch.randn(3, 7, 8))


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated:UserWarning")  # torch 2.11's own, when it autotunes
def test_by_name_with_a_mode() -> None:
    from torch._dynamo.backends import registry

    model = Net()
    if "mhar" not in registry.list_backends():  # a bare checkout has no entry point
        registry.register_backend(mhar_compile.backend, name="mhar")
    assert_same(torch.compile(model, backend="mhar", mode="max-autotune-no-cudagraphs"), model, torch.randn(5, 8))


def test_the_entry_point_names_the_backend() -> None:
    tomllib = pytest.importorskip("tomllib", reason="tomllib is in the standard library from Python 3.11")
    points = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]["torch_dynamo_backends"]
    module, name = points["mhar"].split(":")
    assert getattr(__import__(module, fromlist=[name]), name) is mhar_compile.backend


def test_inductor_options_with_the_users_own_pass() -> None:
    seen: list[int] = []

    def mine(graph: Graph) -> None:
        seen.append(len(graph.find_nodes(op="call_function", target=torch.ops.mhar.route.default)))

    options = mhar_compile.inductor_options({"joint_custom_pre_pass": mine}, rewrite="always")
    reports = seen_by(options)
    model = Net()
    assert_same(torch.compile(model, options=options), model, torch.randn(5, 8))
    assert seen == [4]
    assert reports[0].pulled == 4
    assert options["joint_custom_pre_pass"].uuid() is None  # theirs has no key, so nothing may be cached


def test_a_users_pass_may_leave_nodes_without_values() -> None:
    """Where a site reads one the graph is left alone, and the reason says so."""

    def mine(graph: Graph) -> None:
        for node in graph.find_nodes(op="call_function", target=torch.ops.mhar.route.default):
            first, *others = node.args[0]
            with graph.inserting_before(node):
                other = graph.call_function(torch.ops.aten.view.default, (first, [-1, 8]))
                node.args = ([other, *others], *node.args[1:])

    options, model = mhar_compile.inductor_options({"joint_custom_pre_pass": mine}, rewrite="always"), Net()
    reports = seen_by(options)
    with torch.no_grad():
        x = torch.randn(5, 8)
        torch.testing.assert_close(torch.compile(model, options=options)(x), model(x), rtol=1e-4, atol=1e-5)
    assert reports[0].left_alone == ["every site of the graph: KeyError: 'val'"]


def test_a_pass_in_the_configuration_is_kept() -> None:
    seen: list[Graph] = []
    model = Net()
    with torch._inductor.config.patch(joint_custom_pre_pass=seen.append):
        assert_same(torch.compile(model, backend=mhar_compile.backend), model, torch.randn(5, 8))
    assert len(seen) == 1


def test_wrong_options_are_refused() -> None:
    with pytest.raises(TypeError, match="windows"):
        mhar_compile.inductor_options(windows=3)
    with pytest.raises(ValueError, match='rewrite must be "auto", "always" or "never", got \'often\''):
        mhar_compile.inductor_options(rewrite="often")
    with pytest.raises(ValueError, match="tile must be a positive int or None, got 0"):
        mhar_compile.inductor_options(tile=0)
    with pytest.raises(Exception, match="Unexpected optimization option no_such"):
        torch.compile(Net(), backend=mhar_compile.backend, options={"no_such": 1})(torch.randn(5, 8))


def test_what_goes_wrong_inside_leaves_the_graph_correct(monkeypatch: pytest.MonkeyPatch) -> None:
    from mhar_compile.lowering import rewriting

    def unfold(self: Any, *_: Any) -> None:
        raise KeyError("half way")

    monkeypatch.setattr(rewriting.Rewrite, "unfold", unfold)
    options = mhar_compile.inductor_options(rewrite="always")
    reports, model = seen_by(options), Net()
    assert_same(torch.compile(model, options=options), model, torch.randn(5, 8))
    assert reports[0].left_alone == ["every site of the graph: KeyError: 'half way'"]


def test_explain() -> None:
    model = Net()
    report = mhar_compile.explain(model, torch.randn(50, 8), rewrite="always")
    assert (report.graphs, report.sites, report.sources, report.scored, report.pulled) == (1, 4, 4, 4, 4)
    assert report.adds_removed == 3
    assert report.left_alone == []
    assert min(report.bytes_before, report.bytes_after, report.launches_before, report.launches, report.rows_alive) > 0
    assert report.peak_after <= report.peak_before
    lines = str(report).splitlines()
    assert len({len(line) for line in lines}) == 1
    assert any(line.split() == ["pulled", "4"] for line in lines)
    with torch.no_grad():
        assert mhar_compile.explain(model, torch.randn(50, 8), rewrite="always").pulled == 0


def compiled_itself(model: Net) -> None:
    model.compile()


def compiled_forward(model: Net) -> None:
    model.forward = torch.compile(model.forward)  # type: ignore[method-assign]


@pytest.mark.parametrize("compiled", [compiled_itself, compiled_forward])
def test_explain_of_a_model_that_is_compiled_already(compiled: Callable[[Net], None]) -> None:
    model = Net()
    compiled(model)
    assert mhar_compile.explain(model, torch.randn(50, 8), rewrite="always").pulled == 4
    assert mhar_compile.explain(torch.compile(model), torch.randn(50, 8), rewrite="always").pulled == 4


CACHED = """
import json, sys, torch
sys.path.insert(0, {tests!r})
import mhar_compile
from mhar_compile.lowering import passes
from torch._dynamo.utils import counters
from test_passes_backend import Net, gradients
torch.manual_seed(0)
options = mhar_compile.inductor_options(rewrite="always", **{settings})
options["joint_custom_pre_pass"].key += {change!r}
model = Net()
gradients(torch.compile(model, options=options), model, torch.randn(5, 8))
names = {{"autograd": counters["aot_autograd"], "fx": counters["inductor"]}}
print(json.dumps({{
    "autograd_hit": names["autograd"]["autograd_cache_hit"], "autograd_miss": names["autograd"]["autograd_cache_miss"],
    "fx_hit": names["fx"]["fxgraph_cache_hit"], "fx_miss": names["fx"]["fxgraph_cache_miss"],
    "bypass": names["autograd"]["autograd_cache_bypass"] + names["fx"]["fxgraph_cache_bypass"],
}}))
"""


def test_caches_hit_in_another_process_and_miss_when_a_pass_changes(tmp_path: Path) -> None:
    def run(change: str = "", **settings: Any) -> dict[str, int]:
        code = CACHED.format(tests=str(Path(__file__).parent), change=change, settings=settings)
        environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-W", "ignore", "-c", code]
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        counts: dict[str, int] = json.loads(done.stdout.splitlines()[-1])
        assert counts.pop("bypass") == 0
        return counts

    assert run() == {"autograd_hit": 0, "autograd_miss": 1, "fx_hit": 0, "fx_miss": 2}
    assert run()["autograd_hit"] == 1
    assert run("changed") == {"autograd_hit": 0, "autograd_miss": 1, "fx_hit": 0, "fx_miss": 2}


def test_the_key_changes_with_the_files_and_the_users_pass(tmp_path: Path) -> None:
    from torch._inductor.custom_graph_pass import CustomGraphPass

    from mhar_compile.lowering.passes import JointPass
    from mhar_compile.lowering.planning import Settings

    class Mine(CustomGraphPass):
        def __call__(self, graph: Graph) -> None:
            pass

        def uuid(self) -> str:
            return "mine"

    file = tmp_path / "kernel.py"
    file.write_text("one")
    one, again, mine = (JointPass(Settings(), sources=[file], before=p) for p in (None, None, Mine()))
    file.write_text("two")
    other = JointPass(Settings(), sources=[file])
    assert one.uuid() == again.uuid()
    assert len({one.uuid(), other.uuid(), mine.uuid(), JointPass(Settings(window=2)).uuid()}) == 4
