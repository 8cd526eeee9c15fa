"""The operator on CUDA devices: the Triton kernels of ``mhar_compile.lowering``, imported at the first call.

float64 sources, which the kernels do not cover, take the plain PyTorch implementation.
"""

from __future__ import annotations

from functools import cache
from types import ModuleType
from typing import Any

import torch

from . import eager


def route(sources: Any, query: Any, key_weight: Any, null_source: Any, residual: Any, *rest: Any) -> Any:
    """See :func:`mhar_compile.ops.eager.route`."""
    like = sources[0] if sources else residual
    implementation = eager.route if like.dtype == torch.float64 else kernels().route
    with torch.cuda.device_of(like):
        return implementation(sources, query, key_weight, null_source, residual, *rest)


def route_backward(grad_out: Any, *rest: Any) -> Any:
    """See :func:`mhar_compile.ops.eager.route_backward`."""
    implementation = eager.route_backward if grad_out.dtype == torch.float64 else kernels().route_backward
    with torch.cuda.device_of(grad_out):
        return implementation(grad_out, *rest)


@cache
def kernels() -> ModuleType:
    """The launching module; a clear error where Triton is missing."""
    try:
        from ..lowering import launch
    except ImportError as error:
        if error.name is None or not error.name.startswith("triton"):
            raise
        raise ImportError(
            "mhar_compile routes CUDA tensors with Triton kernels, but triton is not installed; install the triton "
            "package that your torch build pins (pip install triton), or move the tensors to the CPU"
        ) from error
    return launch
