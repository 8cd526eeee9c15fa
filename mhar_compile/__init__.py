"""Multi-head attention residuals: learned routing over depth, as a compiler-friendly PyTorch operator."""

from pathlib import Path as _Path

_here = _Path(__file__).parent
if not (_here / "ops").is_dir():  # a source checkout: ops/ and lowering/ stand beside this folder
    __path__.append(str(_here.parent))

from . import ops  # noqa: E402  after the path above; importing it registers torch.ops.mhar
from .config import DecoderConfig  # noqa: E402
from .decoder import Decoder  # noqa: E402
from .functional import route  # noqa: E402
from .router import Router  # noqa: E402

__all__ = ["Decoder", "DecoderConfig", "Router", "ops", "route"]
__version__ = "0.1.0"
