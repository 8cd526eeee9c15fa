"""Pre-norm residuals: one running sum (Eq. 1 of arXiv 2607.27230)."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from .site import Site


class PrenormSite(Site):
    """Stream (hidden,): a sublayer reads the sum of all outputs so far and adds its own."""

    def forward(self, stream: Sequence[Tensor]) -> Tensor:
        return stream[0]

    def write(self, stream: Sequence[Tensor], output: Tensor) -> tuple[Tensor, ...]:
        return (stream[0] + output,)
