"""A kernel launch as a node of a graph that Inductor compiles, and as a part of the code that it generates.

Inductor has a node for kernels that users launch. It finds out what a kernel writes by compiling it, at every launch,
and it makes one binary for each count of sources. Here what is written is known, and launches share binaries.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import sympy  # type: ignore[import-untyped]
import triton
from torch import SymInt, Tensor
from torch._inductor import ir
from torch._inductor.virtualized import V
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.fx.node import has_side_effect
from torch.utils._pytree import tree_map

from .launch import Launch
from .named import named_arguments, named_kernel, written
from .versions import LAUNCH_ATTRIBUTES


def emit(launch: Launch) -> None:
    """Record a launch in the graph that is being traced."""
    mode: Any = get_proxy_mode()
    arguments = named_arguments(launch)
    strides = {name: value.stride() for name, value in arguments.items() if isinstance(value, Tensor)}
    target = node_target(named_kernel(launch), tuple(launch.options.items()), written(launch))
    args = tree_map(mode.tracer.unwrap_proxy, (launch.grid, arguments, strides))
    mode.tracer.create_proxy("call_function", target, args, {}, name=launch.kernel.fn.__name__)


@cache
def node_target(kernel: Any, options: tuple[tuple[str, int], ...], writes: frozenset[str]) -> Callable[..., None]:
    """What stands in a graph for launches of a kernel; Inductor calls it with its own values, to lower them."""
    config = triton.Config({}, **dict(options))

    def launch_kernel(grid: Sequence[Any], arguments: dict[str, Any], strides: dict[str, Sequence[Any]]) -> None:
        if any(isinstance(value, Tensor) for value in arguments.values()):  # the graph is run as it is
            kernel[tuple(grid)](**arguments, **dict(options))
            return
        arguments = {
            name: laid_out(value, strides[name], written=name in writes) if name in strides else value
            for name, value in arguments.items()
        }
        KernelLaunch(kernel, config, [expression(size) for size in (*grid, 1, 1)[:3]], arguments, writes)

    launch_kernel.__name__ = kernel.fn.__name__
    launch_kernel._inductor_lowering_function = True  # type: ignore[attr-defined]
    has_side_effect(launch_kernel)
    return launch_kernel


def laid_out(value: Any, strides: Sequence[Any], *, written: bool) -> Any:
    """A buffer in memory as the launch expects it; what is written was allocated so."""
    value.realize()  # once: what fills several slots of a launch would be computed for each
    return value if written else ir.ExternKernel.require_exact_strides(value, [expression(s) for s in strides])


def expression(size: Any) -> Any:
    if isinstance(size, SymInt):
        return size.node.expr
    return size if isinstance(size, sympy.Expr) else sympy.Integer(size)


class KernelLaunch(ir.UserDefinedTritonKernel):
    """Inductor's node for a launch whose written arguments are known."""

    def __init__(
        self, kernel: Any, config: Any, grid: Sequence[Any], arguments: dict[str, Any], writes: frozenset[str]
    ) -> None:
        self.kernel, self.config = kernel, config
        tensors: dict[str, Any] = {}
        for name, value in arguments.items():
            if isinstance(value, ir.TensorBox):
                tensors[name] = ir.InputsKernel.unwrap_storage_for_input(self.realize_input(value))
        others = tuple(value for name, value in arguments.items() if name not in tensors)
        self.device = next(iter(tensors.values())).get_device()
        ir.ExternKernel.__init__(
            self, None, ir.NoneLayout(device=self.device), list(tensors.values()), others, {**arguments, **tensors}
        )
        self.kernel_idx = -1
        self.kernel_args = arguments
        self.grid = [tuple(grid)]  # three sizes: the launcher has a parameter for each
        vars(self).update(LAUNCH_ATTRIBUTES)
        self.ordered_kwargs_for_cpp_kernel = list(arguments)
        mutated = {tensors[name].get_name(): arguments[name] for name in tensors if name in writes}
        self.mutable_args = list(mutated.values())
        self.mutation_outputs = [
            ir.MutationOutput(ir.NoneLayout(device=self.device), buffer, self) for buffer in self.mutable_args
        ]
        V.graph.register_operation(self)

    def get_kernel_and_metadata(self) -> tuple[Any, list[Any], list[str], list[str]]:
        return self.kernel, [self.config], [], []

    def can_fuse_epilogue(self) -> bool:
        return False

    def codegen(self, wrapper: Any) -> None:
        shared: Any = SharedDefinitions(wrapper)
        super().codegen(shared)


class SharedDefinitions:
    """Inductor's writer of the generated module, but launches that differ in numbers alone share one kernel."""

    def __init__(self, wrapper: Any) -> None:
        self.wrapper = wrapper

    def __getattr__(self, name: str) -> Any:
        return getattr(self.wrapper, name)

    def define_user_defined_triton_kernel(self, kernel: Any, configs: Any, kwargs: Any, *rest: Any) -> Any:
        """The kernel's definition for arguments that stand for all that specialise alike."""
        constants = {parameter.name for parameter in kernel.params if parameter.is_constexpr}
        alike = {name: value if name in constants else specialised(value) for name, value in kwargs.items()}
        return self.wrapper.define_user_defined_triton_kernel(kernel, configs, alike, *rest)


def specialised(value: Any) -> Any:
    """A number that Triton specialises as it does this one; everything else unchanged."""
    if isinstance(value, bool) or not isinstance(value, (int, sympy.Integer)):
        return value
    if value == 1 or not -(2**31) <= value < 2**31:
        return value
    return 16 if value % 16 == 0 else 3
