"""Runs cases of ``matrix`` and the known traps under FSDP2: ``python -m tests.distributed.fsdp FOLDER PROCESSES``."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch._inductor.compile_fx  # before the processes fork, so that it is loaded once
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_param_group as groups
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from mhar_compile import Decoder, Router, checkpoint_policy, compile_blocks, route
from mhar_compile.compiler import joint_pass
from mhar_compile.lowering.tracing import Trace, tracer
from tests.distributed.launch import fork, run_cases
from tests.distributed.matrix import FOUR, TWO, VOCABULARY, Case, batch, decoder, error, loss_of, single, step


def prepared(case: Case, found: Trace) -> Decoder:
    """The case's decoder: checkpointed, then compiled, then sharded."""
    model = decoder(case.residual, case.layers)
    for n, block in enumerate(model.blocks):
        if case.checkpointing == "full":
            model.blocks[n] = checkpoint_wrapper(block)
        if case.checkpointing == "selective":
            context = functools.partial(create_selective_checkpoint_contexts, checkpoint_policy)
            model.blocks[n] = checkpoint_wrapper(block, context_fn=context)
    if case.compiler is not None:
        code = case.compiler == "inductor"
        passes = tracer(found, joint_pass(reports=found.reports.append, rewrite="always"))
        compile_blocks(model, **({} if code else {"backend": passes}))
    policy = MixedPrecisionPolicy()
    if case.precision != "float32":
        cast = case.precision == "bfloat16"
        policy = MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=cast)
    shard(model, case.unit, reshard_after_forward=case.reshard, mp_policy=policy)
    return model


def shard(model: Decoder, unit: str, **options: Any) -> None:
    blocks = list(model.blocks)
    for group in {"block": blocks, "group": [blocks[:2], blocks[2:]], "root": []}[unit]:
        if group:
            fully_shard(group, **options)
    fully_shard(model, **options)


@contextmanager
def events() -> Iterator[list[str]]:
    """What FSDP2 does in a backward: "gather" and "reduce" with the name of what is sharded together, and "end"."""
    log: list[str] = []
    reduced: list[str] = []

    def noted(owner: Any, name: str, note: Callable[..., None]) -> Any:
        original = getattr(owner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            note(*args)
            return original(*args, **kwargs)

        return mock.patch.object(owner, name, call)

    def gather(group: Any, *_: Any) -> None:  # called by each output of a unit
        if log[-1:] != [f"gather {group._module_fqn}"]:
            log.append(f"gather {group._module_fqn}")

    with (
        noted(groups.FSDPParamGroup, "pre_backward", gather),
        noted(groups.FSDPParamGroup, "post_backward", lambda group, *_: reduced.append(group._module_fqn)),
        noted(groups, "foreach_reduce", lambda *_: log.append(f"reduce {reduced[-1]}")),
        noted(FSDPState, "_root_post_backward_final_callback", lambda _: log.append("end")),
    ):
        yield log


def train(model: nn.Module, tokens: Tensor) -> tuple[list[Tensor], list[str]]:
    """The mean loss and what ``step`` gives, in one piece, and the events of the backward."""
    loss = loss_of(model(tokens), tokens)
    with events() as log:
        loss.backward()
    mean = loss.detach().clone()
    dist.all_reduce(mean)
    return [mean / dist.get_world_size(), *step(model)], log


def compared(case: Case) -> dict[str, Any]:
    """Errors against float64, sharded and in one process, both in the case's dtype; events; what was rewritten."""
    torch._dynamo.reset()
    found, parts = Trace(), batch(dist.get_world_size())
    values, log = train(prepared(case, found), parts[dist.get_rank()])
    dtype = torch.float32 if case.precision == "float32" else torch.bfloat16
    plain = single(decoder(case.residual, case.layers), parts, dtype)
    exact = decoder(case.residual, case.layers).to(dtype).double()
    truth = single(exact, parts, torch.float64)
    return {
        "error": error(values, truth),
        "single": error(plain, truth),
        "log": log,
        "scored": [report.scored for report in found.reports],
        "left_alone": found.report.left_alone,
    }


class Held(nn.Module):
    """Routing parameters held by the root and passed into the blocks, which return the new source alone."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCABULARY, 16)
        self.routers = nn.ModuleList(Router(16, 2) for _ in range(4))
        self.blocks = nn.ModuleList(Sublayer() for _ in range(3))
        for router in self.routers:
            nn.init.normal_(router.query)

    def forward(self, tokens: Tensor) -> Tensor:
        sources = (self.embedding(tokens),)
        for router, block in zip(self.routers, self.blocks, strict=False):
            sources = (*sources, block(sources, router.query, router.key_weight))
        return nn.functional.linear(self.routers[-1](sources), self.embedding.weight)


class Sublayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, sources: tuple[Tensor, ...], query: Tensor, key_weight: Tensor) -> Tensor:
        out: Tensor = self.linear(route(sources, query, key_weight=key_weight)).tanh()
        return out


def held_by_the_root(compiled: bool) -> dict[str, Any]:
    torch._dynamo.reset()
    parts, model, found = batch(dist.get_world_size()), Held(), Trace()
    passes = tracer(found, joint_pass(reports=found.reports.append, rewrite="always"))
    if compiled:
        compile_blocks(model, backend=passes)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    values, log = train(model, parts[dist.get_rank()])
    truth = single(Held().double(), parts, torch.float64)
    return {"error": error(values, truth), "single": error(single(Held(), parts, torch.float32), truth), "log": log}


def kept_from_the_root(compiled: bool) -> dict[str, Any]:
    """A query that is kept from the root, sharded as it is, instead of passed from the root's forward."""
    torch._dynamo.reset()
    model = Held()
    if compiled:
        compile_blocks(model, backend="aot_eager")
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    kept = model.routers[0].query
    try:
        model.blocks[0]((torch.randn(2, 5, 16),), kept, torch.ones(16))
    except Exception as raised:
        return {"raised": type(raised).__name__, "text": str(raised)}
    return {"raised": None}


def frozen_embedding(cured: bool) -> dict[str, Any]:
    """Block 0 gets no argument that requires a gradient, unless the embedding's output is told to."""

    def made() -> Decoder:
        model = Decoder(replace(decoder("mhar", 2).config, tie_embeddings=False))
        model.embedding.weight.requires_grad_(False)
        if cured:
            model.embedding.register_forward_hook(lambda module, inputs, output: output.requires_grad_())
        return model

    parts = batch(dist.get_world_size())
    torch.manual_seed(0)
    model = made()
    torch.manual_seed(0)
    expected = single(made(), parts, torch.float32)
    shard(model, "block")
    values, log = train(model, parts[dist.get_rank()])
    return {"error": error(values, expected), "log": log}


NARROW = MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.float32)


def wide_embedding() -> dict[str, Any]:
    """The embedding, sharded by itself, stays float32; every block computes in bfloat16 and returns all sources."""
    parts = batch(dist.get_world_size())

    def made() -> Decoder:
        torch.manual_seed(0)
        return Decoder(replace(decoder("mhar", 2).config, tie_embeddings=False))

    model = made()
    fully_shard(model.embedding)
    shard(model, "block", mp_policy=NARROW)
    values, _ = train(model, parts[dist.get_rank()])
    truth = single(made().bfloat16().double(), parts, torch.float64)
    return {
        "raised": None,
        "error": error(values, truth),
        "single": error(single(made(), parts, torch.bfloat16), truth),
    }


def wide_embedding_at_the_root() -> dict[str, Any]:
    """The root's own site reads the float32 embedding beside what the bfloat16 blocks return."""
    model = Held()
    fully_shard(model.embedding)
    for block in model.blocks:
        fully_shard(block, mp_policy=NARROW)
    fully_shard(model)
    try:
        model(batch(2)[dist.get_rank()])
    except Exception as raised:
        return {"raised": type(raised).__name__, "text": str(raised)}
    return {"raised": None}


TRAPS: dict[str, Callable[[], dict[str, Any]]] = {
    "held": functools.partial(held_by_the_root, False),
    "held compiled": functools.partial(held_by_the_root, True),
    "kept": functools.partial(kept_from_the_root, False),
    "kept compiled": functools.partial(kept_from_the_root, True),
    "frozen": functools.partial(frozen_embedding, False),
    "frozen cured": functools.partial(frozen_embedding, True),
    "wide embedding, cast": wide_embedding,
    "wide embedding at the root": wide_embedding_at_the_root,
}


def main(folder: str, world: str) -> None:
    cases = {str(case): functools.partial(compared, case) for case in (TWO if world == "2" else FOUR)}
    fork(run_cases, int(world), Path(folder), Path(folder), cases | (TRAPS if world == "2" else {}))


if __name__ == "__main__":
    main(*sys.argv[1:])
