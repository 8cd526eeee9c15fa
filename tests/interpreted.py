"""The kernels on the CPU, under Triton's interpreter; imported by what runs in a process with TRITON_INTERPRET=1.

Importing this module makes the kernels the CPU implementation of ``mhar::route`` and ``mhar::route_backward``, so that
the public functions, autograd and the library's own properties run through them.
"""

import os

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

import mhar_compile  # noqa: F401  registers the operators
from mhar_compile.lowering import tiles
from mhar_compile.ops import cuda

if os.environ.get("TRITON_INTERPRET") != "1":
    raise RuntimeError("tests.interpreted needs TRITON_INTERPRET=1, set before Triton is imported")

approximate = interpreter._convert_float


def convert_float(data, source, target, rounding):
    """float32 to bfloat16 and back as the hardware does it, to nearest even; the interpreter cuts bits off."""
    if source == tl.float32 and target == tl.bfloat16:
        rounded = torch.from_numpy(np.ascontiguousarray(data).view(np.float32)).bfloat16()
        return rounded.view(torch.int16).numpy().view(np.uint16).reshape(data.shape)
    if source == tl.bfloat16 and target == tl.float32:
        return np.ascontiguousarray(data).view(np.uint16).astype(np.uint32) << np.uint32(16)
    return approximate(data, source, target, rounding)


class FastSums(interpreter.ReduceOps):
    """Sums by numpy, not element by element in Python."""

    def apply_impl(self, input):  # noqa: A002  the interpreter's own name
        if self.combine_fn in (tiles.add_1, tiles.add_2, tiles.add_4):
            return tuple(self.sum(part) for part in input)
        return super().apply_impl(input)


patch_language, patched = interpreter._patch_lang, set()


def patch_once(fn):
    """Triton's language is patched once a module, for good; the interpreter does it anew for every call of a helper."""
    if fn.__module__ not in patched:
        patched.add(fn.__module__)
        patch_language(fn)
    return interpreter._LangPatchScope()  # nothing to undo


interpreter._convert_float = convert_float
interpreter._patch_lang = patch_once
interpreter.ReduceOps = FastSums
LIBRARY = torch.library.Library("mhar", "IMPL")
LIBRARY.impl("route", cuda.route, "CPU")
LIBRARY.impl("route_backward", cuda.route_backward, "CPU")
