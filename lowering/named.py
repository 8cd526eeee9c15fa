"""Kernels as generated code takes them: every pointer and stride is a parameter of its own, none is in a tuple.

Numbers that a kernel must not be specialised on travel as 2 n + 3, which is odd and never 1: Inductor, which knows no
``do_not_specialize``, then sees nothing to specialise on.
"""

from __future__ import annotations

import linecache
from functools import cache
from typing import Any

import triton
import triton.language as tl

from .launch import Launch

# The parameters that each kernel writes through; a test compares them with what the compiled kernels do.
WRITTEN = {
    "site_forward": ("logits", "rstd", "lse", "out", "carry_max", "carry_sum", "carry_mix"),
    "site_coupling": ("dots", "coupling"),
    "site_backward": ("grads", "dots", "query_sums", "null_sums", "gate_sums"),
    "site_sums": ("grad_query", "grad_key_weight", "grad_null", "grad_gate"),
    "score": ("logits", "rstd"),
    "mix": ("lse", "out", "residue", "next_max", "next_sum", "next_mix"),
    "mix_norm": ("lse", "out", "residue", "inverse", "normed"),
    "norm_backward": ("grad_out", "coupled", "weight_sums"),
    "coupling": ("coupled", "mass"),
    "pull": ("dlogits", "grads"),
    "query_gradient": ("shares",),
}


def named_arguments(launch: Launch) -> dict[str, Any]:
    """The launch's arguments and constants by the names of ``named_kernel``'s parameters."""
    values: dict[str, Any] = {}
    for parameter in parameters_of(launch.kernel):
        name = parameter.name
        value = launch.constants[name] if name in launch.constants else launch.arguments[name]
        if isinstance(value, tuple):
            values |= {f"{name}_{i}": entry for i, entry in enumerate(value)}
        else:
            values[name] = 2 * value + 3 if disguised(parameter, value) else value
    return values


def written(launch: Launch) -> frozenset[str]:
    """The named arguments that the launch writes through."""
    names: list[str] = []
    kernel = launch.kernel.fn.__name__
    for name in WRITTEN[kernel]:
        value = launch.arguments[name]
        if (kernel, name) == ("site_backward", "dots") and launch.arguments["coupling"] is not None:
            continue  # site_coupling wrote them, they are read
        names += [f"{name}_{i}" for i in range(len(value))] if isinstance(value, tuple) else [name]
    return frozenset(names)


def named_kernel(launch: Launch) -> Any:
    """The launch's kernel with ``named_arguments`` as parameters; floats, which would be float64, are constants."""
    parameters: list[str] = []
    passed: list[str] = []
    for parameter in parameters_of(launch.kernel):
        name = parameter.name
        value = launch.arguments.get(name)
        if isinstance(value, tuple):
            names = [f"{name}_{i}" for i in range(len(value))]
            parameters += names
            passed.append(f"({', '.join(names)},)")
            continue
        constant = name in launch.constants or isinstance(value, float)
        parameters.append(f"{name}: tl.constexpr" if constant else name)
        passed.append(f"({name} - 3) // 2" if disguised(parameter, value) else name)
    return rendered(launch.kernel, ", ".join(parameters), ", ".join(passed))


@cache
def parameters_of(kernel: Any) -> Any:
    """A kernel's parameters; the interpreter's functions do not tell theirs."""
    if isinstance(kernel, triton.JITFunction):
        return kernel.params
    return triton.JITFunction(kernel.fn, do_not_specialize=kernel.kwargs["do_not_specialize"]).params


def disguised(parameter: Any, value: Any) -> bool:
    """Whether a number travels as 2 n + 3."""
    return bool(parameter.do_not_specialize) and value is not None


@cache
def rendered(kernel: Any, parameters: str, passed: str) -> Any:
    """A kernel of these parameters that calls another; its source is where ``inspect`` finds it."""
    inner = kernel.fn.__name__
    name = f"{inner}_named"
    source = f"@triton.jit\ndef {name}({parameters}):\n    {inner}({passed})\n"
    file = f"<{__name__}.{name}.{hash((parameters, passed))}>"
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    namespace = {"triton": triton, "tl": tl, inner: kernel, "__name__": __name__}
    exec(compile(source, file, "exec"), namespace)
    return namespace[name]
