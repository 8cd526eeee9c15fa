"""What each kernel is declared to write is what torch's own analysis of the compiled kernel finds.

Inductor orders and reuses buffers by the declaration; a write that is not declared would be silent corruption.
"""

from functools import cache

import pytest
import torch
from torch._higher_order_ops import triton_kernel_wrap
from torch._subclasses import FakeTensorMode

pytest.importorskip("triton", reason="the kernels are written in Triton")

from mhar_compile.lowering import named
from mhar_compile.lowering.rules import RECTANGLE
from perf.aot import Rectangle, Site
from perf.codegen import pretended_gpu

if not hasattr(triton_kernel_wrap, "identify_accessed_tensors"):
    pytest.skip("the analysis of torch 2.11 takes all numbers for constants of the kernel", allow_module_level=True)

DELTA = {"null_source": True, "residual": True, "gate": True}


@cache
def launches():
    """By name one launch of each kernel, and one more of those that have optional arguments."""
    sites = Site(32, 2, count=RECTANGLE + 1, **DELTA), Site(32, 2, count=2, runs=2)
    every = [launch for site in sites for launch in site.launches()] + Rectangle(32, 2, count=2, sites=2).launches()
    return {f"{launch.kernel.__name__} {tuple(tensors(launch))}": launch for launch in every}


def tensors(launch):
    return [name for name, value in named.named_arguments(launch).items() if isinstance(value, torch.Tensor)]


def declared(launch):
    return named.written(launch) & set(tensors(launch))


@cache
def found(name):
    """The tensors that torch sees written."""
    launch = launches()[name]
    with FakeTensorMode():
        arguments = {
            name: torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="cuda")
            if isinstance(value, torch.Tensor)
            else value
            for name, value in named.named_arguments(launch).items()
        }
    kernel = named.named_kernel(launch)
    with pretended_gpu():
        accesses = triton_kernel_wrap.identify_accessed_tensors(kernel, arguments, {})
    return {dependency.name for dependency in accesses.read_writes.writes} & set(tensors(launch))


def test_every_kernel_is_looked_at():
    assert {name.split()[0] for name in launches()} == set(named.WRITTEN)


@pytest.mark.parametrize("kernel", sorted(named.WRITTEN))
def test_declared_writes_are_the_writes(kernel):
    for name, launch in launches().items():
        if name.split()[0] == kernel:
            assert declared(launch) == found(name)


@pytest.mark.parametrize("wrong", [("logits",), ("logits", "rstd", "source")], ids=["one is missing", "one too many"])
def test_a_wrong_declaration_is_noticed(wrong, monkeypatch):
    name = next(name for name in launches() if name.startswith("score "))
    assert declared(launches()[name]) == found(name)
    monkeypatch.setitem(named.WRITTEN, "score", wrong)
    assert declared(launches()[name]) != found(name)
