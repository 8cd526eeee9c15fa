"""The routing operator: its reference mathematics, schemas, fakes, gradients and CPU implementation.

Importing this package registers ``torch.ops.mhar``. It needs torch alone.
"""

if __name__ != "mhar_compile.ops":
    raise ImportError(
        f"this folder is the package mhar_compile.ops, but it was imported as {__name__!r}, which would register "
        "every operator twice; write `from mhar_compile import ops`"
    )

from . import flops as _flops
from . import schema as _schema
from .reference import figure3, reference

__all__ = ["figure3", "reference"]

_schema.register()
_flops.register_once_imported()
