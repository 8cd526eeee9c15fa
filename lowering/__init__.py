"""What turns the routing operator into fast code: Triton kernels and Inductor passes.

The only part of the package that may import triton or torch._inductor, and nothing imports it eagerly.
"""

if __name__ != "mhar_compile.lowering":
    raise ImportError(
        f"this folder is the package mhar_compile.lowering, but it was imported as {__name__!r}; "
        "write `from mhar_compile import lowering`"
    )
