"""``DecoderConfig``: the shape of a decoder, and the presets of the paper's tables."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, get_args

Residual = Literal["prenorm", "mhar", "attnres", "block", "delta"]


@dataclass(frozen=True)
class DecoderConfig:
    """Shape of a :class:`mhar_compile.Decoder`; the defaults are the Qwen3 recipe of arXiv 2607.27230.

    Args:
        vocabulary: number of token ids.
        width: d, the width of the residual stream.
        layers: L, each an attention and an MLP sublayer.
        heads: attention heads; head_dim = width // heads must be even.
        kv_heads: key and value heads, shared by groups of heads (grouped-query attention).
        ffn_width: inner width of the SwiGLU MLP.
        max_positions: longest sequence accepted.
        rope_theta: base of the rotary frequencies.
        norm_eps: added to the mean square by every RMSNorm, routing sites included.
        tie_embeddings: the output projection is the token embedding.
        initializer_std: standard deviation of the initial embedding and projections.
        residual: the topology, one of prenorm, mhar, attnres (mhar with one head), block, delta.
        routing_heads: H, heads of a routing site; attnres and prenorm ignore it.
        blocks: into how many blocks the block and delta topologies divide the layers, ceil(layers / blocks) layers
            each; where that does not divide layers, the last block is shorter or there are fewer blocks.

    Raises:
        TypeError: a field has another type than declared.
        ValueError: a field is out of its range, or fields do not fit each other.
    """

    vocabulary: int
    width: int
    layers: int
    heads: int
    kv_heads: int
    ffn_width: int
    max_positions: int
    rope_theta: float = 1e4
    norm_eps: float = 1e-6
    tie_embeddings: bool = True
    initializer_std: float = 0.02
    residual: Residual = "mhar"
    routing_heads: int = 8
    blocks: int = 8

    def __post_init__(self) -> None:
        for field in fields(self):
            check_field(field.name, str(field.type), getattr(self, field.name))
        if self.residual not in get_args(Residual):
            raise ValueError(f"residual is {self.residual!r}, expected one of: {', '.join(get_args(Residual))}")
        check_divides("heads", self.heads, "width", self.width)
        check_divides("kv_heads", self.kv_heads, "heads", self.heads)
        check_divides("routing_heads", self.routing_heads, "width", self.width)
        if self.head_dim % 2:
            raise ValueError(
                f"width / heads is {self.head_dim}, expected an even number, since rotary embeddings turn pairs; "
                "choose other heads or another width"
            )

    @property
    def head_dim(self) -> int:
        """Width of an attention head."""
        return self.width // self.heads

    @property
    def layers_per_block(self) -> int:
        """Layers of a block in the block and delta topologies."""
        return math.ceil(self.layers / self.blocks)

    def starts_block(self, sublayer: int) -> bool:
        """Whether a block begins with this sublayer; sublayer 2l is the attention of layer l, 2l + 1 its MLP."""
        return sublayer % (2 * self.layers_per_block) == 0

    @classmethod
    def from_preset(cls, name: str, **overrides: Any) -> DecoderConfig:
        """A preset by name, with any fields replaced.

        Raises:
            ValueError: there is no such preset, or the fields do not fit each other.
            TypeError: an override is not a field, or has another type than the field.
        """
        if name not in PRESETS:
            raise ValueError(f"there is no preset {name!r}, expected one of: {', '.join(PRESETS)}")
        known = [field.name for field in fields(cls)]
        unknown = [key for key in overrides if key not in known]
        if unknown:
            raise TypeError(f"there is no field {unknown[0]!r} to override, expected one of: {', '.join(known)}")
        return replace(PRESETS[name], **overrides)


def check_field(name: str, declared: str, value: object) -> None:
    """Raise unless a field has its declared type and, where it is a number, is positive and finite."""
    expected = {"int": (int,), "float": (float, int), "bool": (bool,)}.get(declared, (str,))
    if not isinstance(value, expected) or (isinstance(value, bool) and declared != "bool"):
        raise TypeError(f"{name} is {value!r}, expected {expected[0].__name__}")
    if isinstance(value, (int, float)) and declared != "bool" and not 0 < value < math.inf:
        raise ValueError(f"{name} is {value}, expected a positive finite number")


def check_divides(part_name: str, part: int, whole_name: str, whole: int) -> None:
    """Raise unless part divides whole."""
    if whole % part:
        raise ValueError(f"{part_name} is {part}, expected a divisor of {whole_name}, which is {whole}")


QWEN3_VOCABULARY = 151_936
PRESETS = {
    "tiny": DecoderConfig(256, 128, 4, 4, 2, 384, max_positions=512, routing_heads=4, blocks=2),
    "100m": DecoderConfig(QWEN3_VOCABULARY, 512, 12, 8, 4, 1536, max_positions=4096),
    "350m": DecoderConfig(QWEN3_VOCABULARY, 1024, 24, 16, 8, 4096, max_positions=2048),
    "1b": DecoderConfig(QWEN3_VOCABULARY, 1280, 36, 16, 8, 5120, max_positions=2048),
    "8b": DecoderConfig(
        128_256, 4096, 32, 32, 8, 14_336, max_positions=8192, rope_theta=5e5, tie_embeddings=False, residual="delta"
    ),
}
"""The paper's configurations, max_positions twice the training length, and one for bytes that trains on a CPU.

8b is the shape of Llama 3 with the vocabulary, rotary base and untied head of that model.
"""
