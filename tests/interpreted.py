"""The kernels on the CPU, under Triton's interpreter; imported by what runs in a process with TRITON_INTERPRET=1.

Importing this module makes the kernels the CPU implementation of ``mhar::route`` and ``mhar::route_backward``, so that
the public functions, autograd and the library's own properties run through them.
"""

import torch

import mhar_compile  # noqa: F401  registers the operators
from mhar_compile.ops import cuda
from perf import interpreter  # noqa: F401  rounds as the hardware does

LIBRARY = torch.library.Library("mhar", "IMPL")
LIBRARY.impl("route", cuda.route, "CPU")
LIBRARY.impl("route_backward", cuda.route_backward, "CPU")
