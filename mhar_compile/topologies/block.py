"""Block attention residuals: routing over sums of outputs, one sum a block (Kimi, arXiv 2603.15031)."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ..config import DecoderConfig
from ..router import Router
from .site import Site


class BlockSite(Site):
    """Stream (embedding, sum of block 0, sum of block 1, ..., sum so far of the current block).

    A sublayer reads a mixture of all of it. A block's first sublayer sees whole blocks only, and opens a new sum.
    """

    def __init__(self, config: DecoderConfig, index: int) -> None:
        super().__init__(config, index)
        self.router = Router(config.width, config.routing_heads, eps=config.norm_eps)
        self.starts_block = config.starts_block(index)

    def forward(self, stream: Sequence[Tensor]) -> Tensor:
        out: Tensor = self.router(stream)
        return out

    def write(self, stream: Sequence[Tensor], output: Tensor) -> tuple[Tensor, ...]:
        return accumulate(stream, output, self.starts_block)


def accumulate(sums: Sequence[Tensor], output: Tensor, starts_block: bool) -> tuple[Tensor, ...]:
    """The block sums after one more output: a new sum where a block starts, else added to the last."""
    return (*sums, output) if starts_block else (*sums[:-1], sums[-1] + output)
