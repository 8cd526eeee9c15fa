"""``Router``: the parameters of one routing site."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from .functional import route


class Router(nn.Module):
    """One routing site: a query per head, a key norm weight, and optionally a null source and a gate.

    Initialised as in the paper: query, null source and gate zero, key weight one. A new router without residual is
    therefore the plain average of its sources, and one with a gate returns its residual unchanged.

    Args:
        width: d, the width of a source.
        heads: H; must divide width. H = 1 is attention residuals.
        null_source: add a learnable source [d] that every token shares.
        gate: add a learnable scalar [1] that multiplies the mixture.
        eps: added to the mean square of the key norm.

    Raises:
        ValueError: width is not divisible by heads, or one of them or eps is not positive.
    """

    def __init__(
        self, width: int, heads: int = 8, *, null_source: bool = False, gate: bool = False, eps: float = 1e-6
    ) -> None:
        super().__init__()
        if width < 1 or heads < 1 or width % heads:
            raise ValueError(f"Router: width {width} is not divisible by {heads} heads; both must be positive")
        if not eps > 0:
            raise ValueError(f"Router: eps must be positive, got {eps}")
        self.eps = eps
        self.query = nn.Parameter(torch.empty(heads, width // heads))
        self.key_weight = nn.Parameter(torch.empty(width))
        self.null_source = nn.Parameter(torch.empty(width)) if null_source else None
        self.gate = nn.Parameter(torch.empty(1)) if gate else None
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Set the parameters to the paper's initial values."""
        for parameter in (self.query, self.null_source, self.gate):
            if parameter is not None:
                parameter.zero_()
        self.key_weight.fill_(1.0)

    def forward(self, sources: Sequence[Tensor] | Tensor, residual: Tensor | None = None) -> Tensor:
        """Route N sources [..., d], or one tensor [N, ..., d], to [..., d]; see :func:`mhar_compile.route`."""
        return route(
            sources,
            self.query,
            key_weight=self.key_weight,
            null_source=self.null_source,
            residual=residual,
            gate=self.gate,
            eps=self.eps,
        )

    def weights(self, sources: Sequence[Tensor] | Tensor, residual: Tensor | None = None) -> Tensor:
        """The softmax weights [N, ..., H] of this site, float32, without gradient; arguments as for forward."""
        _, weights = route(
            sources,
            self.query,
            key_weight=self.key_weight,
            null_source=self.null_source,
            residual=residual,
            eps=self.eps,
            return_weights=True,
        )
        return weights

    def extra_repr(self) -> str:
        heads, head_width = self.query.shape
        options = [name for name in ("null_source", "gate") if getattr(self, name) is not None]
        return ", ".join([f"width={heads * head_width}", f"heads={heads}", *options, f"eps={self.eps}"])
