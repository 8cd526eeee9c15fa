"""The C++ that AOTInductor generates for a model on CUDA, on a machine without a GPU: compiled, never run."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch._guards import detect_fake_mode
from torch.fx import GraphModule
from torch.nn.attention import SDPBackend, sdpa_kernel

from mhar_compile.compiler import HOOK, LOWERING, inductor_options

from .codegen import constant, on_cuda, pretended_gpu


@dataclass(frozen=True)
class Program:
    """What a package is compiled from.

    Attributes:
        source: the C++.
        ptx: of each kernel that it launches, by its name there; for sm_90.
    """

    source: str
    ptx: dict[str, str]

    @property
    def code(self) -> str:
        """The C++ without comments, in which Triton's sources stand."""
        return re.sub(r"/\*.*?\*/|//[^\n]*", "", self.source, flags=re.S)

    @property
    def launches(self) -> Counter[str]:
        """Launches by kernel, without the number that Inductor gives each definition."""
        return Counter(re.findall(r"^\s*call_(\w+?)_\d+\(", self.code, flags=re.M))

    def passed(self, kernel: str) -> list[int]:
        """Bytes of each argument that is handed to a kernel."""
        wrapper = self.code.split(f"void call_{kernel}(")[1]
        names = re.search(r"kernel_args_\[\] = \{(.*?)\}", wrapper)
        assert names is not None
        declared = dict(declarations(wrapper))
        return [declared[name.strip(" &")] for name in names[1].split(",")]

    def expected(self, kernel: str) -> list[int]:
        """Bytes of each parameter of a kernel."""
        head = self.ptx[kernel].split(".entry")[1].split(")")[0]
        return [int(bits) // 8 for bits in re.findall(r"\.param \.[a-z](\d+)", head)]


def declarations(wrapper: str) -> Iterator[tuple[str, int]]:
    """Local variables of a wrapper, and their sizes, the first declaration of a name last."""
    sizes = {"CUdeviceptr": 8, "int64_t": 8, "double": 8, "int32_t": 4, "float": 4}
    for kind, name in reversed(re.findall(r"^\s*(\w+) (\w+) = ", wrapper, flags=re.M)):
        if kind in sizes:
            yield name, sizes[kind]


def program(model: nn.Module, *inputs: Tensor, dynamic_shapes: Any = None) -> Program:
    """What AOTInductor compiles for a model on the meta device, exported with these inputs, as if it were on CUDA."""
    from torch._inductor.decomposition import select_decomp_table

    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
        exported = torch.export.export(model, inputs, dynamic_shapes=dynamic_shapes)
        exported = exported.run_decompositions(dict(select_decomp_table()))
    options = inductor_options(rewrite="always")
    options[HOOK](exported.graph_module.graph)
    exported.graph_module.recompile()
    with pretended_gpu():
        return generated(on_cuda(exported.graph_module), options)


def generated(moved: GraphModule, options: dict[str, Any]) -> Program:
    import torch._inductor.config as inductor
    from torch._inductor.compile_fx import get_cpp_wrapper_config
    from torch._inductor.debug import DebugContext
    from torch._inductor.fx_passes.post_grad import post_grad_passes
    from torch._inductor.graph import GraphLowering
    from torch._inductor.virtualized import V

    inputs = [node.meta["val"] for node in moved.graph.find_nodes(op="placeholder")]
    mode = detect_fake_mode(inputs)
    settings = {LOWERING: options[LOWERING], "cpp_wrapper": True, "graph_partition": False, "compile_threads": 1}
    with (
        V.set_fake_mode(mode), V.set_aot_compilation(True), inductor.patch(settings),
        inductor.patch(get_cpp_wrapper_config()), compiled_kernels() as ptx,
    ):  # fmt: skip
        post_grad_passes(moved, True)
        lowering = GraphLowering(
            moved, example_inputs=inputs, shape_env=mode.shape_env, is_inference=True, cpp_wrapper=True, aot_mode=True
        )
        with V.set_graph_handler(lowering), V.set_debug_handler(DebugContext()):
            lowering.run(*inputs)
            code, _ = lowering.codegen_with_cpp_wrapper()
    return Program(str(code.value), ptx)


@contextmanager
def compiled_kernels() -> Iterator[dict[str, str]]:
    """Meanwhile kernels are compiled where Inductor would run them once; yields their PTX by name, as they come."""
    from torch._inductor.codegen.wrapper import PythonWrapperCodegen
    from torch._inductor.runtime import triton_helpers
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner
    from triton.compiler import CompiledKernel

    ptx: dict[str, str] = {}

    def compile_all(wrapper: Any) -> None:
        names: dict[str, Any] = {}
        exec(wrapper.kernel_autotune_defs.getvalue() + "\nasync_compile.wait(globals())", names)
        for name, tuner in names.items():
            if isinstance(tuner, CachingAutotuner):
                launcher: Any = tuner.launchers[0]
                tuner.save_gpu_kernel(None, launcher)
                ptx[name] = launcher.bin.asm["ptx"]

    def not_loaded(binary: Any) -> None:
        binary.module = binary.function = binary._run = binary.n_regs = binary.n_spills = 0

    with (
        mock.patch.object(PythonWrapperCodegen, "generate_and_run_autotune_block", compile_all),
        mock.patch.object(CompiledKernel, "_init_handles", not_loaded),
        mock.patch.object(triton_helpers, "set_driver_to_gpu", constant(None)),
    ):
        yield ptx
