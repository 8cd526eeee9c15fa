"""Triton's interpreter, made to round as the hardware does, to sum by numpy, and to know what libdevice computes.

To be imported before the kernels that it shall run, in a process that was started with TRITON_INTERPRET=1.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.language.extra.cuda import libdevice
from triton.runtime import interpreter

if os.environ.get("TRITON_INTERPRET") != "1":
    raise RuntimeError("perf.interpreter needs TRITON_INTERPRET=1, set before Triton is imported")

approximate = interpreter._convert_float
patch_language, patch_tensor, patched = interpreter._patch_lang, interpreter._patch_lang_tensor, set()
plain_atomic = interpreter.InterpreterBuilder.create_atomic_rmw
plain_load, plain_store = (
    interpreter.InterpreterBuilder.create_masked_load,
    interpreter.InterpreterBuilder.create_masked_store,
)
BY_NUMPY = {"maximum": np.max, "minimum": np.min, "_any_combine": np.any}  # of Inductor's; all three keep a NaN
LIBRARY = {"pow": np.power, "rsqrt": lambda x: 1 / np.sqrt(x)}  # where numpy has no function of that name


def convert_float(data: Any, source: Any, target: Any, rounding: Any) -> Any:
    """float32 to bfloat16 and back as the hardware does it, to nearest even; the interpreter cuts bits off."""
    if source == tl.float32 and target == tl.bfloat16:
        rounded = torch.from_numpy(np.ascontiguousarray(data).view(np.float32)).bfloat16()
        return rounded.view(torch.int16).numpy().view(np.uint16).reshape(data.shape)
    if source == tl.bfloat16 and target == tl.float32:
        return np.ascontiguousarray(data).view(np.uint16).astype(np.uint32) << np.uint32(16)
    return approximate(data, source, target, rounding)


class FastReductions(interpreter.ReduceOps):  # type: ignore[misc]
    """Sums, ours of one tensor or several, and what Inductor reduces by; by numpy, not element by element."""

    def apply_impl(self, input: Any) -> Any:  # noqa: A002  the interpreter's own name
        name = self.combine_fn.fn.__name__
        if name in ("add_1", "add_2", "add_4"):
            return tuple(self.sum(part) for part in input)
        if name in BY_NUMPY:
            return self.min_max(input[0], val_reduce_op=BY_NUMPY[name])
        return super().apply_impl(input)


def patch_once(fn: Any) -> Any:
    """Triton's language is patched once a module, for good; the interpreter does it anew for every call of a helper."""
    if fn.__module__ not in patched:
        patched.add(fn.__module__)
        patch_language(fn)
    return interpreter._LangPatchScope()  # nothing to undo


def patch_index(tensor: Any, scope: Any) -> None:
    """A tensor of one number as that number, however many dimensions it has: numpy 2.4 and Triton 3.6 do not agree."""
    patch_tensor(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())


def of_library(builder: Any, name: str, path: str, symbol: str, values: Any, result: Any, pure: bool) -> Any:
    """A function of libdevice, whose code is NVIDIA's."""
    known = symbol.removeprefix("__nv_").removesuffix("f" if values[0].dtype == tl.float32 else "")
    data = LIBRARY.get(known, getattr(np, known, None))(*(value.data for value in values))
    return interpreter.TensorHandle(data.astype(values[0].data.dtype), result.scalar)


def atomic(builder: Any, operation: Any, *handles: Any) -> Any:
    """An atomic operation on arrays that lie in memory element by element, which the interpreter takes them to do."""
    for handle in handles[:3]:  # pointers, values and mask
        handle.data = np.ascontiguousarray(handle.data)
    return plain_atomic(builder, operation, *handles)


def load(builder: Any, pointers: Any, mask: Any, *others: Any) -> Any:
    """Triton 3.9 takes truth values alone for a mask, and makes other numbers of some."""
    mask.data = mask.data.astype(bool)
    return plain_load(builder, pointers, mask, *others)


def store(builder: Any, pointers: Any, values: Any, mask: Any, *others: Any) -> Any:
    mask.data = mask.data.astype(bool)
    return plain_store(builder, pointers, values, mask, *others)


interpreter._convert_float = convert_float
interpreter._patch_lang = patch_once
interpreter._patch_lang_tensor = patch_index
interpreter.ReduceOps = FastReductions
interpreter.InterpreterBuilder.create_atomic_rmw = atomic
interpreter.InterpreterBuilder.create_masked_load = load
interpreter.InterpreterBuilder.create_masked_store = store
interpreter.InterpreterBuilder.create_extern_elementwise = of_library
interpreter._patch_builtin(libdevice, interpreter.interpreter_builder, interpreter._LangPatchScope())
