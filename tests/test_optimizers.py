"""``parameter_groups``, and training with it: every optimizer step that torch offers gives the same weights."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

from mhar_compile import Router, compile_blocks, parameter_groups
from mhar_compile.topologies import SITES


def groups_of(model: nn.Module) -> dict[str, list[str]]:
    names = {parameter: name for name, parameter in model.named_parameters()}
    found = parameter_groups(model, lr=1e-3, weight_decay=0.1)
    return {group["name"]: [names[parameter] for parameter in group["params"]] for group in found}


@pytest.mark.parametrize("residual", SITES)
@pytest.mark.parametrize("tied", [True, False])
def test_every_parameter_is_in_one_group(small_decoder, residual, tied):
    model = small_decoder(residual, tie_embeddings=tied)
    groups = groups_of(model)
    assert sorted(itertools.chain(*groups.values())) == sorted(name for name, _ in model.named_parameters())
    for name in groups["weights"]:
        assert name.endswith("_proj.weight") or name == "lm_head.weight"
    for name in groups["no_decay"]:
        assert "norm" in name or name == "embedding.weight"
    routing = [name for name, _ in model.named_parameters() if ".router." in name]
    assert groups.get("routing", []) == routing
    assert bool(routing) == (residual != "prenorm")
    assert ("lm_head.weight" in groups["weights"]) is not tied


def test_rates_and_decay():
    model = nn.ModuleDict({"router": Router(8, 2, null_source=True, gate=True), "layer": nn.Linear(8, 8)})
    options = {"lr": 1e-3, "weight_decay": 0.1}
    rates = {g["name"]: (g["lr"], g["weight_decay"]) for g in parameter_groups(model, **options, routing_lr=3e-2)}
    assert rates == {"weights": (1e-3, 0.1), "no_decay": (1e-3, 0.0), "routing": (3e-2, 0.0)}
    assert [g["lr"] for g in parameter_groups(model, **options)] == [1e-3] * 3
    assert [len(g["params"]) for g in parameter_groups(model, **options)] == [1, 1, 4]


def test_a_parameter_tied_by_hand_comes_once_and_counts_as_embedding_or_routing():
    model = nn.ModuleDict({"table": nn.Embedding(4, 8), "head": nn.Linear(8, 4, bias=False), "a": Router(8, 2)})
    model["head"].weight = model["table"].weight
    model["b"] = nn.Linear(4, 2, bias=False)
    model["b"].weight = model["a"].query
    assert groups_of(model) == {"no_decay": ["table.weight"], "routing": ["a.query", "a.key_weight"]}


def test_frozen_parameters_are_left_out():
    model = nn.ModuleDict({"router": Router(8, 2), "layer": nn.Linear(8, 8)})
    model["layer"].requires_grad_(False)
    assert groups_of(model) == {"routing": ["router.query", "router.key_weight"]}
    model.requires_grad_(False)
    with pytest.raises(ValueError, match="ModuleDict has no trainable parameter; set requires_grad"):
        parameter_groups(model, lr=1e-3, weight_decay=0.1)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"model": [nn.Linear(2, 2)]}, TypeError, r"model must be a torch\.nn\.Module, got list"),
        ({"lr": -1.0}, ValueError, r"lr must be finite and not negative, got -1\.0"),
        ({"lr": float("nan")}, ValueError, "lr must be finite"),
        ({"lr": "3e-4"}, TypeError, "lr must be a number, got str"),
        ({"weight_decay": True}, TypeError, "weight_decay must be a number, got bool"),
        ({"routing_lr": float("inf")}, ValueError, "routing_lr must be finite"),
    ],
)
def test_mistakes(changes, error, message):
    options = {"model": nn.Linear(2, 2), "lr": 1e-3, "weight_decay": 0.1, **changes}
    with pytest.raises(error, match=message):
        parameter_groups(options.pop("model"), **options)


@pytest.mark.parametrize("compiled", [False, True])
# Dynamo's own, for a graph input that is not a leaf
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_every_implementation_of_adamw_takes_the_same_steps(small_decoder, same, fresh_compiler, compiled):
    """Loop, foreach, fused."""
    tokens = [torch.randint(32, (2, 7)) for _ in range(3)]
    weights = []
    for implementation in ({"foreach": False}, {"foreach": True}, {"fused": True}):
        model = small_decoder(layers=1)
        if compiled:
            compile_blocks(model, backend="aot_eager")
        groups = parameter_groups(model, lr=1e-2, weight_decay=0.1, routing_lr=1e-1)
        optimizer = torch.optim.AdamW(groups, **implementation)
        for batch in tokens:
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()
        weights.append([parameter.detach() for parameter in model.parameters()])
    for other in weights[1:]:
        same(other, weights[0])
    start = small_decoder(layers=1)
    for (name, before), after in zip(start.named_parameters(), weights[0], strict=True):
        if "blocks.0.attention_site" in name:  # reads one source: its weight is 1 whatever the query
            continue
        assert (before - after).abs().max() > (0.05 if ".router.query" in name else 1e-3), name


def test_a_step_inside_the_backward(small_decoder, same):
    inside, after = small_decoder(), small_decoder()
    tokens, options = torch.randint(32, (2, 7)), {"lr": 1e-2, "weight_decay": 0.1}
    for group in parameter_groups(inside, **options):
        for parameter in group.pop("params"):
            rate = {key: group[key] for key in ("lr", "weight_decay")}
            optimizer = torch.optim.AdamW([parameter], **rate)
            parameter.register_post_accumulate_grad_hook(lambda p, optimizer=optimizer: optimizer.step())
    inside(tokens).square().mean().backward()
    optimizer = torch.optim.AdamW(parameter_groups(after, **options))
    after(tokens).square().mean().backward()
    optimizer.step()
    same([p.detach() for p in inside.parameters()], [p.detach() for p in after.parameters()])


def test_optimizer_state_survives_a_round_trip(small_decoder, same):
    def trained(steps: list[int], state: tuple | None) -> tuple:
        model = small_decoder(layers=1)
        optimizer = torch.optim.AdamW(parameter_groups(model, lr=1e-2, weight_decay=0.1, routing_lr=1e-1))
        if state is not None:
            model.load_state_dict(state[0])
            optimizer.load_state_dict(state[1])
        for seed in steps:
            tokens = torch.randint(32, (2, 7), generator=torch.Generator().manual_seed(seed))
            optimizer.zero_grad()
            model(tokens).square().mean().backward()
            optimizer.step()
        return model.state_dict(), optimizer.state_dict()

    straight, resumed = trained([1, 2, 3], None), trained([3], trained([1, 2], None))
    same(list(resumed[0].values()), list(straight[0].values()))
    assert [g["name"] for g in resumed[1]["param_groups"]] == ["weights", "no_decay", "routing"]
