"""``compile_blocks``: the numbers of the uncompiled decoder, one graph a group, and what the model keeps being."""

from __future__ import annotations

import copy
import functools
import pickle
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import create_selective_checkpoint_contexts

import mhar_compile
from mhar_compile import Blocks, compile_blocks
from mhar_compile.compiler import joint_pass
from mhar_compile.lowering.tracing import Trace, tracer

pytestmark = [
    pytest.mark.usefixtures("fresh_compiler"),
    # Dynamo's own, for a graph input that is not a leaf
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
]
TOKENS = torch.randint(32, (2, 7))
EAGER: dict[str, Any] = {"backend": "aot_eager"}


class Graphs:
    """A backend that counts its graphs and what they call, and runs them as they are."""

    def __init__(self) -> None:
        self.calls: list[Counter[str]] = []

    def __call__(self, module: torch.fx.GraphModule, _: Any) -> Any:
        self.calls.append(Counter(str(node.target) for node in module.graph.nodes))
        return module.forward


@pytest.mark.parametrize(
    ("residual", "group"), [("mhar", 2), ("attnres", 3), ("block", 1), ("delta", 2), ("prenorm", 1)]
)
def test_same_numbers(small_decoder, step, same, residual, group):
    model = compile_blocks(small_decoder(residual, layers=3), group=group, **EAGER)
    same(step(model, TOKENS), step(small_decoder(residual, layers=3), TOKENS))


def test_by_default_one_graph_for_inductor_with_the_passes(small_decoder, monkeypatch):
    backend = Graphs()
    monkeypatch.setattr("mhar_compile.compiler.backend", backend)
    compile_blocks(small_decoder())(TOKENS)
    assert len(backend.calls) == 2
    layer = compile_blocks([Breaks()])[0]
    with pytest.raises(torch._dynamo.exc.Unsupported):
        layer(torch.ones(2))


class Breaks(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return x + 1


@pytest.mark.parametrize(("group", "graphs"), [(1, 3), (2, 2), (9, 1)])
def test_a_group_is_one_graph(small_decoder, group, graphs):
    backend = Graphs()
    compile_blocks(small_decoder(layers=3), group=group, backend=backend)(TOKENS)
    assert len(backend.calls) == graphs
    assert sum(calls["mhar.route"] for calls in backend.calls) == 6


def test_more_blocks_than_the_recompile_limit_with_every_mode_a_slot(small_decoder):
    """Each block sees another number of sources: in one cache, that of the class, the fourth would be refused."""
    layers, backend = 5, Graphs()
    model = compile_blocks(small_decoder(layers=layers), backend=backend)
    modes = [(mode, grad) for mode in ("train", "eval") for grad in (True, False)]
    for mode, grad in modes * 2:
        with torch.set_grad_enabled(grad), torch._dynamo.config.patch(recompile_limit=3):
            getattr(model, mode)()(TOKENS)
    assert len(backend.calls) == layers * 2  # with gradients and without; nothing in a block asks for train or eval


def test_shapes_that_change_become_dynamic_in_every_block(small_decoder, step, same):
    backend, plain = Graphs(), small_decoder(layers=2)
    model = compile_blocks(small_decoder(layers=2), backend=backend)
    for shape in ((2, 7), (3, 9), (4, 11), (5, 8)):
        tokens = torch.randint(32, shape)
        same(step(model, tokens), step(plain, tokens))
    assert len(backend.calls) <= 3 * 2  # the first, the dynamic, and where a traced float restarts one


@pytest.mark.parametrize("group", [1, 2])
def test_a_deep_copy_is_compiled_and_has_its_own_weights(small_decoder, step, same, group):
    backend = Graphs()
    model = compile_blocks(small_decoder(layers=2), group=group, backend=backend)
    before = step(model, TOKENS)
    twin, plain = copy.deepcopy(model), small_decoder(layers=2)
    for each in (twin, plain):
        with torch.no_grad():
            for parameter in each.parameters():
                parameter.mul_(1.5)
    same(step(twin, TOKENS), step(plain, TOKENS))
    same(step(model, TOKENS), before)
    assert len(backend.calls) == 2 // group  # the copy runs the same code


@pytest.mark.parametrize("group", [1, 2])
def test_state_dict_keys_and_pickle(small_decoder, step, same, group):
    model, plain = compile_blocks(small_decoder(), group=group, **EAGER), small_decoder()
    assert list(model.state_dict()) == list(plain.state_dict())
    assert [name for name, _ in model.named_modules()] == [name for name, _ in plain.named_modules()]
    expected = step(model, TOKENS)
    loaded = pickle.loads(pickle.dumps(model))
    same(step(loaded, TOKENS), expected)
    compile_blocks(pickle.loads(pickle.dumps(plain)), group=group, **EAGER).load_state_dict(model.state_dict())


def test_hooks_of_a_block_run_outside_its_graph(small_decoder):
    """FSDP2 gathers and frees a block's parameters in such hooks."""
    model, order = compile_blocks(small_decoder(), **EAGER), []
    for n, block in enumerate(model.blocks):
        block.register_forward_pre_hook(lambda _, args, n=n: order.append(("before", n)))
        block.register_forward_hook(lambda _, args, out, n=n: order.append(("after", n)))
    for _ in range(2):
        model(TOKENS)
    assert order == [("before", 0), ("after", 0), ("before", 1), ("after", 1)] * 2


@pytest.mark.filterwarnings("ignore:.*context_fn is passed to torch.utils.checkpoint under torch.compile")
def test_selective_checkpointing_reaches_compiled_blocks(small_decoder, step, same):
    """Compiled outside of checkpointing, as documented: the backward's graph computes routes again, no product."""
    counts = {}
    for kind in ("none", "full", "selective"):
        contexts = functools.partial(create_selective_checkpoint_contexts, mhar_compile.checkpoint_policy)
        options = {"context_fn": contexts} if kind == "selective" else {}
        model, found = small_decoder(), Trace()
        if kind != "none":
            for n, block in enumerate(model.blocks):
                model.blocks[n] = checkpoint_wrapper(block, **options)
        compile_blocks(model, backend=tracer(found, joint_pass(rewrite="never")))
        same(step(model, TOKENS), step(small_decoder(), TOKENS))
        total = Counter(str(node.target) for _, backward in found.after for node in backward.nodes)
        counts[kind] = (total["mhar.route.default"], total["aten.mm.default"])
    plain = counts["none"]
    assert plain[0] == 0
    assert counts["full"][0] == counts["selective"][0] == 4  # the sites of two blocks
    assert counts["selective"][1] == plain[1] < counts["full"][1]


def test_the_whole_model_compiles_around_compiled_blocks(small_decoder, step, same):
    for group in (1, 2):
        model, backend = compile_blocks(small_decoder(), group=group, **EAGER), Graphs()
        compiled = torch.compile(model, backend=backend, fullgraph=True)
        same(step(model, TOKENS, compiled), step(small_decoder(), TOKENS))
        assert len(backend.calls) == 1


@pytest.mark.parametrize("kind", [list, tuple, nn.ModuleList])
def test_any_sequence_of_modules(kind):
    backend = Graphs()
    layers = kind([nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.Tanh())])
    assert compile_blocks(layers, backend=backend) is layers
    x = torch.randn(3, 4)
    for layer in layers:
        torch.testing.assert_close(layer(x), type(layer).forward(layer, x))
    assert len(backend.calls) == 2


class Other(nn.Module):
    def __init__(self, blocks: nn.Module) -> None:
        super().__init__()
        self.blocks = blocks


@pytest.mark.parametrize(
    ("model", "options", "error", "message"),
    [
        (nn.Linear(2, 2), {}, TypeError, "Linear has no `blocks`; expected a module whose `blocks` is a ModuleList"),
        ([nn.Linear(2, 2), 3], {}, TypeError, "list has no `blocks`"),
        (Other(nn.ModuleList()), {}, ValueError, "there are no blocks"),
        (Other(nn.ModuleList([nn.Linear(2, 2)])), {"group": 2}, TypeError, "an mhar_compile.Blocks, got ModuleList"),
        ([nn.Linear(2, 2)], {"group": 2}, TypeError, "use group=1"),
        (Blocks([nn.Linear(2, 2)]), {"group": 0}, ValueError, "group must be positive, got 0"),
        (Blocks([nn.Linear(2, 2)]), {"group": 2.0}, TypeError, "group must be an int, got float"),
    ],
)
def test_mistakes(model, options, error, message):
    with pytest.raises(error, match=message):
        compile_blocks(model, **options)


@pytest.mark.parametrize("group", [1, 2])
def test_twice_is_refused(small_decoder, group):
    model = compile_blocks(small_decoder(), group=group, **EAGER)
    for again in (1, 2):
        with pytest.raises(ValueError, match=r"compiled before.*call compile_blocks once"):
            compile_blocks(model, group=again, **EAGER)


def test_groups_of_sharded_blocks_are_refused(small_decoder):
    model = compile_blocks(small_decoder(), group=2, **EAGER)
    model.blocks[0].reshard = lambda: None  # what fully_shard gives a module, among others
    with pytest.raises(RuntimeError, match=r"FSDP2 gathers a block at a time; use compile_blocks\(model, group=1\)"):
        model(TOKENS)
