"""Inductor's CUDA code for a model, generated on a machine without a GPU: what is launched, on what, how often.

A model on the meta device is compiled; its graphs are then taken to stand on an H200 that is not there. Nothing runs.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._guards import detect_fake_mode
from torch.fx import GraphModule
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_map

from mhar_compile.compiler import HOOK, LOWERING, inductor_options
from mhar_compile.lowering.partition import copied
from mhar_compile.lowering.tracing import boxed

H200 = SimpleNamespace(
    name="NVIDIA H200", type="cuda", major=9, minor=0, multi_processor_count=132, total_memory=141 << 30, warp_size=32,
    max_threads_per_multi_processor=2048, regs_per_multiprocessor=65536, shared_memory_per_block=49152,
    shared_memory_per_block_optin=232448, L2_cache_size=50 << 20, gcnArchName="", max_threads_per_block=1024,
)  # fmt: skip


def constant(value: Any) -> Callable[..., Any]:
    return lambda *args, **kwargs: value


@contextmanager
def pretended_gpu() -> Iterator[None]:
    """Let torch and triton believe in one H200 meanwhile."""
    import torch._dynamo.device_interface as interfaces
    from torch._inductor.fx_utils import FakeTensorUpdater
    from torch._subclasses import fake_tensor
    from torch.utils._triton import has_triton
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    limits = {"max_shared_mem": 232448, "multiprocessor_count": 132, "warpSize": 32}
    stub = SimpleNamespace(
        get_current_target=constant(GPUTarget("cuda", 90, 32)),
        get_current_device=constant(0),
        get_current_stream=constant(0),
        get_active_torch_device=constant(torch.device("cuda", 0)),
        get_device_interface=constant(torch.cuda),
        utils=SimpleNamespace(get_device_properties=constant(limits)),
    )
    known = {
        "get_device_properties": H200, "get_device_capability": (9, 0), "is_available": True, "current_device": 0,
        "device_count": 1, "_lazy_init": None,
    }  # fmt: skip
    answers = {
        "current_device": 0, "set_device": None, "device_count": 1, "is_available": True, "get_compute_capability": 90,
        "get_device_properties": H200, "is_triton_capable": True, "raise_if_triton_unavailable": None,
        "synchronize": None, "exchange_device": 0, "maybe_exchange_device": 0, "is_bf16_supported": True,
    }  # fmt: skip
    static = {name: staticmethod(constant(value)) for name, value in answers.items()}
    worker = {name: static[name] for name in ("set_device", "current_device", "get_device_properties")}
    interface = type("Interface", (interfaces.CudaInterface,), {**static, "Worker": type("Worker", (), worker)})
    interfaces.init_device_reg()
    devices = dict.fromkeys(("cuda", "cuda:0"), interface)
    with (
        mock.patch.multiple(torch.cuda, **{name: constant(value) for name, value in known.items()}),
        mock.patch.dict(interfaces.device_interfaces, devices),
        mock.patch.object(driver, "_active", stub),
        # Running operators on CUDA tensors again would need a build with CUDA; their values are known.
        mock.patch.object(FakeTensorUpdater, "incremental_update", constant(0)),
        mock.patch.object(fake_tensor, "init_gpu_context", constant(None)),  # a tensor on the real device
    ):
        has_triton.cache_clear()
        yield
    has_triton.cache_clear()


@dataclass(frozen=True)
class Module:
    """One generated module: which graph it is of, its source, and how often each kernel stands in its ``call``."""

    kind: str
    source: str
    without_graphs: str | None  # why Inductor would not record it as a CUDA graph
    mutated: tuple[str, ...]  # inputs that it writes to

    @property
    def body(self) -> str:
        """What runs at every call."""
        return self.source.split("def call(self, args):")[1].split("runner = Runner")[0]

    @property
    def launches(self) -> Counter[str]:
        """Launches by kernel, without the number that Inductor gives each definition."""
        return Counter(re.sub(r"_\d+$", "", name) for name in re.findall(r"(\w+)\.run\(", self.body))

    @property
    def binaries(self) -> Counter[str]:
        """Definitions by kernel."""
        names = re.findall(r"^(\w+) = async_compile\.triton\(", self.source, flags=re.MULTILINE)
        return Counter(re.sub(r"_\d+$", "", name) for name in names)


def modules(model: Callable[..., Tensor], *inputs: Any, dynamic: bool = False, **settings: Any) -> list[Module]:
    """The modules that Inductor generates for a model on the meta device, called once: forward and backward.

    ``settings`` are those of ``inductor_options``. Attention is decomposed: meta tensors have no fused kernel for it.
    """
    found: list[Module] = []
    torch._dynamo.reset()
    with torch._inductor.config.patch(compile_threads=1, fx_graph_cache=False), sdpa_kernel(SDPBackend.MATH):
        out = torch.compile(model, backend=generator(found, inductor_options(**settings)), dynamic=dynamic)(*inputs)
        if out.requires_grad:
            out.sum().backward()
    torch._dynamo.reset()
    return found


def as_it_is(module: Module, graph: GraphModule) -> Callable[..., Any]:
    """What runs for a graph whose code was generated: the graph, on meta tensors."""
    return boxed(graph)


def generator(
    found: list[Module], options: dict[str, Any], run: Callable[[Module, GraphModule], Callable[..., Any]] = as_it_is
) -> Callable[..., Any]:
    """A backend that generates CUDA code for each graph; ``run`` says what is run for it."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch._inductor.decomposition import select_decomp_table

    def split(module: GraphModule, joint_inputs: Sequence[Any], **rest: Any) -> tuple[GraphModule, GraphModule]:
        options[HOOK](module.graph)
        return min_cut_rematerialization_partition(module, joint_inputs, compiler="inductor", **rest)

    def compiled(kind: str, module: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        if kind == "inference":
            options[HOOK](module.graph)
            module.recompile()
        with pretended_gpu():
            found.append(generated(kind, on_cuda(module), options))
        return run(found[-1], module)

    backend: Callable[..., Any] = aot_autograd(
        fw_compiler=partial(compiled, "forward"),
        bw_compiler=partial(compiled, "backward"),
        inference_compiler=partial(compiled, "inference"),
        partition_fn=split,
        decompositions=select_decomp_table,
        keep_inference_input_mutations=True,
    )
    return backend


def generated(kind: str, moved: GraphModule, options: dict[str, Any]) -> Module:
    """Inductor's code for a graph on CUDA."""
    import torch._inductor.config as inductor
    from torch._inductor.debug import DebugContext
    from torch._inductor.fx_passes.post_grad import post_grad_passes
    from torch._inductor.graph import GraphLowering
    from torch._inductor.virtualized import V

    inputs = [node.meta["val"] for node in moved.graph.find_nodes(op="placeholder")]
    mode = detect_fake_mode(inputs)
    with inductor.patch({LOWERING: options[LOWERING]}), V.set_fake_mode(mode):
        post_grad_passes(moved, kind == "inference")
        lowering = GraphLowering(
            moved, example_inputs=inputs, shape_env=mode.shape_env, is_inference=kind == "inference",
            is_backward=kind == "backward", cpp_wrapper=False, aot_mode=False,
        )  # fmt: skip
        with V.set_graph_handler(lowering), V.set_debug_handler(DebugContext()):
            with inductor.patch(graph_partition=False):  # with it, there are no reasons but pieces
                lowering.run(*inputs)
                reason = without_graphs(lowering, moved)
            code, _ = lowering.codegen()
    return Module(kind, str(code.value), reason, tuple(lowering.mutated_inputs))


def without_graphs(lowering: Any, moved: GraphModule) -> str | None:
    """Why Inductor would not record a graph as a CUDA graph, if it would not."""
    from torch._inductor.cudagraph_utils import check_multiple_devices_or_any_cpu_nodes
    from torch._inductor.utils import get_first_incompatible_cudagraph_node

    unsafe = get_first_incompatible_cudagraph_node(moved)
    reason = lowering.disable_cudagraphs_reason or (unsafe and f"operator {unsafe.target}")
    return reason or check_multiple_devices_or_any_cpu_nodes(lowering.device_node_mapping)


def on_cuda(module: GraphModule) -> GraphModule:
    """A copy of a graph on the meta device whose tensors are said to be on CUDA."""
    moved = copied(module, module.graph)
    for node in moved.graph.nodes:
        mode = detect_fake_mode([node.meta.get("val")])

        def cuda(value: Any, mode: Any = mode) -> Any:
            if not isinstance(value, Tensor):
                return value
            size, stride, offset = value.size(), value.stride(), value.storage_offset()  # which says what is aligned
            extent = offset + 1 + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
            with mode:
                return torch.empty(extent, dtype=value.dtype, device="cuda").as_strided(size, stride, offset)

        node.meta["val"] = tree_map(cuda, node.meta.get("val"))
        if node.kwargs.get("device") is not None:
            node.update_kwarg("device", torch.device("cuda", 0))
    moved.recompile()
    return moved
