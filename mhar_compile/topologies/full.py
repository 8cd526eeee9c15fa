"""Routing over every earlier output: multi-head attention residuals, and attention residuals with one head."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ..config import DecoderConfig
from ..router import Router
from .site import Site


class FullSite(Site):
    """Stream (embedding, output_0, output_1, ...): a sublayer reads a mixture of all of it and appends its output.

    Eq. 3 of arXiv 2607.27230; Eq. 2 where the residual is attnres.
    """

    def __init__(self, config: DecoderConfig, index: int) -> None:
        super().__init__(config, index)
        heads = 1 if config.residual == "attnres" else config.routing_heads
        self.router = Router(config.width, heads, eps=config.norm_eps)

    def forward(self, stream: Sequence[Tensor]) -> Tensor:
        out: Tensor = self.router(stream)
        return out

    def write(self, stream: Sequence[Tensor], output: Tensor) -> tuple[Tensor, ...]:
        return (*stream, output)
