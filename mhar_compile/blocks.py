"""``compile_blocks``: a model compiled block by block, or by groups of blocks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import FunctionType, MethodType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

Model = TypeVar("Model", bound=nn.Module | Sequence[nn.Module])


class Blocks(nn.ModuleList):
    """Modules that run one after the other; each takes and returns the residual stream, a tuple of tensors."""

    def forward(self, stream: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The stream after the last block."""
        return run_blocks(list(self), stream)


def compile_blocks(model: Model, *, group: int = 1, **compile_options: Any) -> Model:
    """Compile the blocks of a model in place, each as one graph, or each ``group`` consecutive ones as one graph.

    Nothing is compiled until a block is called. State-dict keys stay as they are; a deep copy is compiled too, an
    unpickled model is not. Every block, or group, has a cache and a recompile limit of its own in Dynamo, so as many
    blocks compile as there are, although each sees another number of sources. With gradients and without, and train
    and eval where a module tells them apart, take an entry each.

    With activation checkpointing and FSDP2 the order is: ``checkpoint_wrapper`` around each block, then
    ``compile_blocks``, then ``fully_shard`` on each block and on the model. FSDP2 gathers a block at a time, so it
    needs ``group=1``.

    The gradient of a source that several graphs read is summed by autograd, in the source's dtype. Where that matters
    (bfloat16, many blocks), compile groups of blocks or the whole model.

    Args:
        model: a module whose ``blocks`` is a ``ModuleList``, as the :class:`mhar_compile.Decoder`'s; or a sequence of
            modules.
        group: how many consecutive blocks are one graph. More than one needs ``model.blocks`` to be a :class:`Blocks`
            that the model calls, as the Decoder's is.
        compile_options: as for ``torch.compile``; by default ``backend=mhar_compile.backend`` and ``fullgraph=True``.

    Returns:
        The model.

    Raises:
        TypeError: the model has no blocks, or they cannot be grouped, or group is not an int.
        ValueError: group is not positive, there are no blocks, or a block's forward was replaced (or compiled) before.
    """
    if not isinstance(group, int) or isinstance(group, bool):
        raise TypeError(f"compile_blocks: group must be an int, got {type(group).__name__}")
    if group < 1:
        raise ValueError(f"compile_blocks: group must be positive, got {group}")
    blocks = blocks_of(model)
    from .compiler import backend

    options = {"backend": backend, "fullgraph": True, **compile_options}
    if group == 1:
        for n, block in enumerate(blocks):
            replace_forward(block, own_compiled(type(block).forward, n, options))
    else:
        container = container_of(model)
        runs = [own_compiled(run_blocks, n, options) for n in range(0, len(container), group)]
        replace_forward(container, grouped(runs, group))
    return model


def blocks_of(model: object) -> list[nn.Module]:
    """The modules to compile, checked."""
    blocks = getattr(model, "blocks", None) if isinstance(model, nn.Module) else model
    if isinstance(model, nn.ModuleList):
        blocks = model
    if not isinstance(blocks, (nn.ModuleList, list, tuple)) or not all(isinstance(b, nn.Module) for b in blocks):
        raise TypeError(
            f"compile_blocks: {type(model).__name__} has no `blocks`; expected a module whose `blocks` is a "
            "ModuleList, or a sequence of modules"
        )
    if not len(blocks):
        raise ValueError("compile_blocks: there are no blocks; expected at least one")
    if isinstance(blocks, Blocks) and "forward" in vars(blocks):
        raise ValueError("compile_blocks: these blocks were compiled before; call compile_blocks once")
    for n, block in enumerate(blocks):
        if "forward" in vars(block) or not isinstance(type(block).forward, FunctionType):
            raise ValueError(
                f"compile_blocks: the forward of block {n} was replaced or compiled before; call compile_blocks once, "
                "and wrap a block by checkpoint_wrapper instead of replacing its forward"
            )
    return list(blocks)


def container_of(model: object) -> Blocks:
    """What runs the blocks of a model in sequence."""
    container = getattr(model, "blocks", model)
    if not isinstance(container, Blocks):
        raise TypeError(
            f"compile_blocks: group > 1 needs a model that calls its `blocks`, an mhar_compile.Blocks, got "
            f"{type(container).__name__}; use group=1, or build the model's blocks as Blocks"
        )
    return container


def run_blocks(blocks: Sequence[nn.Module], stream: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The stream after these blocks."""
    for block in blocks:
        stream = block(stream)
    return tuple(stream)


def grouped(runs: Sequence[Callable[..., Any]], group: int) -> Callable[..., Any]:
    """The forward of blocks of which each group is one graph."""

    def forward(self: Blocks, stream: Sequence[Tensor]) -> tuple[Tensor, ...]:
        blocks = list(self)
        if not torch.compiler.is_compiling() and any(hasattr(block, "reshard") for block in blocks):
            raise RuntimeError(
                "compile_blocks: blocks sharded by fully_shard cannot run as groups, since FSDP2 gathers a block at a "
                "time; use compile_blocks(model, group=1)"
            )
        for n, run in enumerate(runs):
            stream = run(blocks[n * group : (n + 1) * group], stream)
        return tuple(stream)

    return forward


def own_compiled(function: Any, n: int, options: dict[str, Any]) -> Callable[..., Any]:
    """The function compiled, with a code object of its own: that is what Dynamo's caches and limits belong to."""
    code = function.__code__.replace(co_name=f"{function.__name__}_{n}")
    own = FunctionType(code, function.__globals__, function.__name__, function.__defaults__, function.__closure__)
    own.__kwdefaults__ = function.__kwdefaults__
    compiled = torch.compile(own, **options)

    def forward(*args: Any, **keywords: Any) -> Any:  # torch 2.11 cannot inline a compiled function as a method
        return compiled(*args, **keywords)

    return forward


def replace_forward(module: nn.Module, forward: Callable[..., Any]) -> None:
    """Give a module a forward of its own: a method, since a deep copy binds it anew and pickle finds the class's."""
    module.forward = MethodType(forward, module)
