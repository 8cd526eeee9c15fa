"""``Site``: the interface behind which every residual topology stands."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from ..config import DecoderConfig


class Site(nn.Module):
    """One place of a decoder that reads the residual stream.

    There is one before each sublayer, which also writes that sublayer's output back, and one before the final norm.

    Args:
        config: the decoder's shape.
        index: 2l before the attention of layer l, 2l + 1 before its MLP, 2L before the final norm.
    """

    def __init__(self, config: DecoderConfig, index: int) -> None:
        super().__init__()

    def forward(self, stream: Sequence[Tensor]) -> Tensor:
        """Read the stream, tensors [B, T, d], as one tensor [B, T, d]."""
        raise NotImplementedError

    def write(self, stream: Sequence[Tensor], output: Tensor) -> tuple[Tensor, ...]:
        """The stream after this site's sublayer gave its output [B, T, d]."""
        raise NotImplementedError
