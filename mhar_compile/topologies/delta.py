"""Delta attention residuals: a running sum, corrected by gated routing over block deltas (arXiv 2605.18855)."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ..config import DecoderConfig
from ..router import Router
from .block import accumulate
from .site import Site


class DeltaSite(Site):
    """Stream (hidden, delta of block 0, delta of block 1, ..., delta so far of the current block).

    A sublayer reads hidden + gate * mixture over a learned null source and the deltas, where a block's delta is what
    its sublayers added to hidden. Its output joins hidden, which is never reset, and the current delta. The gate
    starts at zero, so a new decoder computes exactly what pre-norm residuals do. The final norm reads hidden.
    """

    def __init__(self, config: DecoderConfig, index: int) -> None:
        super().__init__(config, index)
        self.starts_block = config.starts_block(index)
        self.router: Router | None = None
        if index < 2 * config.layers:
            self.router = Router(config.width, config.routing_heads, null_source=True, gate=True, eps=config.norm_eps)

    def forward(self, stream: Sequence[Tensor]) -> Tensor:
        if self.router is None:
            return stream[0]
        out: Tensor = self.router(stream[1:], residual=stream[0])
        return out

    def write(self, stream: Sequence[Tensor], output: Tensor) -> tuple[Tensor, ...]:
        return (stream[0] + output, *accumulate(stream[1:], output, self.starts_block))
