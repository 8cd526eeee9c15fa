"""Multi-head attention residuals: learned routing over depth, as a compiler-friendly PyTorch operator."""

from pathlib import Path as _Path
from typing import TYPE_CHECKING as _TYPE_CHECKING

_here = _Path(__file__).parent
if not (_here / "ops").is_dir():  # a source checkout: ops/ and lowering/ stand beside this folder
    __path__.append(str(_here.parent))

from . import ops  # noqa: E402  after the path above; importing it registers torch.ops.mhar
from .blocks import Blocks, compile_blocks  # noqa: E402
from .checkpointing import checkpoint_policy  # noqa: E402
from .config import DecoderConfig  # noqa: E402
from .decoder import Decoder  # noqa: E402
from .functional import route  # noqa: E402
from .optimizer import parameter_groups  # noqa: E402
from .router import Router  # noqa: E402

if _TYPE_CHECKING:
    from .compiler import backend, explain, inductor_options

__all__ = [
    "Blocks",
    "Decoder",
    "DecoderConfig",
    "Router",
    "backend",
    "checkpoint_policy",
    "compile_blocks",
    "explain",
    "inductor_options",
    "ops",
    "parameter_groups",
    "route",
]
__version__ = "0.1.0"


def __getattr__(name: str) -> object:
    """What needs Inductor is imported when it is asked for: ``backend``, ``explain`` and ``inductor_options``."""
    if name not in ("backend", "explain", "inductor_options"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from . import compiler

    return getattr(compiler, name)
