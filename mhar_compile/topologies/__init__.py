"""Residual topologies: what a sublayer reads from the residual stream, and how its output enters it.

The stream is a tuple of tensors [B, T, d]; before the first layer it is ``(embedding,)``. A topology is a subclass of
:class:`Site`, of which a decoder of L layers holds 2L + 1.
"""

from .block import BlockSite
from .delta import DeltaSite
from .full import FullSite
from .prenorm import PrenormSite
from .site import Site

SITES: dict[str, type[Site]] = {
    "prenorm": PrenormSite,
    "mhar": FullSite,
    "attnres": FullSite,
    "block": BlockSite,
    "delta": DeltaSite,
}

__all__ = ["SITES", "BlockSite", "DeltaSite", "FullSite", "PrenormSite", "Site"]
