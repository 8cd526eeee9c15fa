"""The module that Inductor generates for CUDA, run on the CPU: its launches through Inductor's own launchers.

A launcher orders a kernel's arguments and computes its grid; here it ends in Triton's interpreter, not on a device. The
rest of the module runs as it is. Its memory is full of NaN until something is written, and has margins that nothing
may be written to. Each launch is held to what its kernel was compiled for.

A process that imports this is to be started with TRITON_INTERPRET=1: what Triton and Inductor bring is interpreted,
while the project's kernels are taken in as they are for a device, since code is generated for one.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch
import triton
from torch import Tensor
from torch._inductor.runtime import triton_helpers
from torch._inductor.runtime.triton_heuristics import CachingAutotuner
from torch.fx import GraphModule
from torch.nn.attention import SDPBackend, sdpa_kernel
from triton.language.extra.cuda import libdevice
from triton.runtime.interpreter import InterpretedFunction, InterpreterOptions, interpreter_builder
from triton.runtime.jit import JITFunction, mangle_type

from . import interpreter  # noqa: F401  which everything above is imported for

os.environ["TRITON_INTERPRET"] = "0"
interpreter_builder.options = InterpreterOptions(sanitize_overflow=False)  # so Inductor compiles

from mhar_compile.compiler import inductor_options  # noqa: E402

from .codegen import Module, constant, generator, pretended_gpu  # noqa: E402

NEVER = 255  # each byte of what was not written: NaN, or -1
BOOLEAN = {"*i1": "*u1"}  # Inductor's name for memory of truth values, and Triton's
MARGIN = 2**16 + 16  # bytes on either side of a buffer, whose address then is a multiple of 16 and of no more


def backend(found: list[Module], **settings: Any) -> Callable[..., Any]:
    """A backend that generates CUDA code for each graph and runs that code; to be called within ``generating``."""
    return generator(found, inductor_options(**settings), run=executed)


@contextmanager
def generating(**settings: Any) -> Iterator[None]:
    """Settings under which code is generated that runs here; ``settings`` are Inductor's."""
    with (
        torch._inductor.config.patch(compile_threads=1, fx_graph_cache=False, **settings),
        sdpa_kernel(SDPBackend.MATH),
    ):
        yield


def executed(module: Module, graph: GraphModule) -> Callable[..., Any]:
    """The generated code as a function of a list of arguments, which is how AOTAutograd calls it."""
    memory = Memory()
    names: dict[str, Any] = {"__name__": module.kind}
    guards: Any = torch._C._dynamo.guards
    with (
        pretended_gpu(),
        mock.patch.object(triton, "compile", Binary),
        mock.patch.object(triton_helpers, "set_driver_to_gpu", constant(None)),
        mock.patch.object(torch._C, "_cuda_getCurrentRawStream", constant(0), create=True),
        mock.patch.object(guards, "_empty_strided_cuda", memory.empty_strided, create=True),
    ):
        exec(compile(module.source, f"<{module.kind}>", "exec"), names)

    def call(args: list[Any]) -> Any:
        with (
            mock.patch.multiple(torch.cuda, _DeviceGuard=nullcontext, set_device=constant(None)),
            mock.patch.object(CachingAutotuner, "autotune_to_one_config", first_of_launchers),
        ):
            outputs = names["call"](args)
        memory.check_margins()
        return outputs

    call._boxed_call = True  # type: ignore[attr-defined]
    return call


def first_of_launchers(tuner: CachingAutotuner, *args: Any, **kwargs: Any) -> None:
    """In the place of timing them."""
    tuner.launchers = tuner.launchers[:1]


class Memory:
    """What a module allocates in one call."""

    def __init__(self) -> None:
        self.blocks: list[Tensor] = []

    def empty_strided(self, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> Tensor:
        count = 1 + sum((n - 1) * step for n, step in zip(size, stride, strict=True)) if all(size) else 0
        block = torch.full((count * dtype.itemsize + 2 * MARGIN,), NEVER, dtype=torch.uint8)
        self.blocks.append(block)
        return torch.empty(0, dtype=dtype).set_(block.untyped_storage(), MARGIN // dtype.itemsize, size, stride)

    def check_margins(self) -> None:
        for block in self.blocks:
            assert (block[:MARGIN] == NEVER).all(), "something was written in front of a buffer"
            assert (block[-MARGIN:] == NEVER).all(), "something was written behind a buffer"
        self.blocks.clear()


class Binary:
    """What Triton would compile from a kernel, as a launcher knows it: it is interpreted."""

    def __init__(self, src: Any, target: Any, options: dict[str, Any]) -> None:
        self.src, self.target, self.hash = src, target, "0" * 64
        self.metadata = self.packed_metadata = self
        self.num_warps, self.num_ctas, self.cluster_dims, self.shared = options["num_warps"], 1, (1, 1, 1), 0
        self.function = self.n_regs = self.n_spills = 0
        self.constants = {place[0]: value for place, value in src.constants.items()}
        self.kernel = interpreted(src.fn)

    def _init_handles(self) -> None:
        """There is nothing to load."""

    def launch_metadata(self, *args: Any) -> None:
        """There is nobody to tell."""

    def run(
        self, x: int, y: int, z: int, stream: int, function: Any, metadata: Any, told: Any, enter: Any, leave: Any,
        *args: Any,
    ) -> None:  # fmt: skip
        assert max(y, z) < 2**16, "CUDA's limit of the second and third size of a grid"
        with triton.knobs.runtime.scope():
            triton.knobs.runtime.interpret = True
            self.kernel[x, y, z](*(self.argument(n, value) for n, value in enumerate(args)))

    def argument(self, n: int, value: Any) -> Any:
        """An argument as the compiled kernel has it: what it was compiled for, or what is passed and must be alike."""
        name = self.src.fn.arg_names[n]
        kind, where = self.src.signature[name], f"{name} of {self.src.fn.__name__}"
        if kind == "constexpr":
            expected = self.constants[n]
            assert expected is None or value == expected, f"{where} was compiled for {expected}"
            return expected
        if isinstance(value, Tensor):
            assert mangle_type(value) == BOOLEAN.get(kind, kind), f"{where} was compiled for {kind}"
        else:
            assert isinstance(value, int), where
            assert kind == "i64" or (kind == "i32" and -(2**31) <= value < 2**31), f"{where} was compiled for {kind}"
        number = value.data_ptr() if isinstance(value, Tensor) else value
        for _, divisor in self.src.attrs.get((n,), ()):
            assert number % divisor == 0, f"{where} was compiled for multiples of {divisor}"
        return value


def interpreted(kernel: JITFunction) -> InterpretedFunction:
    """A kernel for the interpreter, along with what it calls in its module."""
    names = kernel.fn.__globals__
    for name, value in list(names.items()):
        if isinstance(value, JITFunction):
            names[name] = InterpretedFunction(value.fn)
    names |= {"libdevice": libdevice, "PAIRED": False}  # no function of PTX
    return InterpretedFunction(kernel.fn)
