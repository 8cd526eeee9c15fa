"""``Decoder``: a decoder-only Transformer of the Qwen3 recipe with a choice of residual topology."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .blocks import Blocks
from .config import DecoderConfig
from .router import Router
from .topologies import SITES


class Decoder(nn.Module):
    """Token ids to next-token logits: RMSNorm, grouped-query attention with q/k norm and RoPE, SwiGLU, no biases.

    The residual topology is the configuration's. Initialised with N(0, initializer_std^2), norm weights one and
    routing parameters as in :class:`mhar_compile.Router`; one seed gives the same weights in every topology.

    May be built on the meta device and materialised by ``to_empty`` and ``reset_parameters``. ``blocks`` are the units
    to checkpoint, shard or compile one by one: each takes and returns the residual stream, tensors [B, T, d].

    Args:
        config: the shape; see :meth:`from_preset` for known ones.
    """

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        if not isinstance(config, DecoderConfig):
            raise TypeError(
                f"Decoder: config is {type(config).__name__}, expected DecoderConfig; "
                "presets are built by Decoder.from_preset"
            )
        self.config = config
        self.embedding = nn.Embedding(config.vocabulary, config.width)
        self.blocks = Blocks(Block(config, layer) for layer in range(config.layers))
        self.final_site = SITES[config.residual](config, 2 * config.layers)
        self.norm = nn.RMSNorm(config.width, eps=config.norm_eps)
        # Tied weights are one parameter under one name: a second name would not survive to_empty().
        self.lm_head = None if config.tie_embeddings else linear(config.width, config.vocabulary)
        self.reset_parameters()

    @classmethod
    def from_preset(cls, name: str, **overrides: Any) -> Decoder:
        """A preset (tiny, 100m, 350m, 1b, 8b) with any field of :class:`DecoderConfig` replaced.

        Example: ``Decoder.from_preset("tiny", residual="delta")``.

        Raises:
            ValueError: there is no such preset, or the fields do not fit each other.
            TypeError: an override is not a field, or has another type than the field.
        """
        return cls(DecoderConfig.from_preset(name, **overrides))

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw the weights anew from the default generator."""
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                module.weight.normal_(std=self.config.initializer_std)
            elif isinstance(module, (nn.RMSNorm, Router)):
                module.reset_parameters()

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits [B, T, vocabulary], in the parameters' dtype, of tokens [B, T] (int64 or int32).

        Raises:
            TypeError: tokens is not a tensor of int64 or int32.
            ValueError: tokens is not [B, T], or T exceeds max_positions.
        """
        self.check_tokens(tokens)
        x = self.norm(self.final_site(self.blocks((self.embedding(tokens),))))
        return F.linear(x, self.embedding.weight if self.lm_head is None else self.lm_head.weight)

    def check_tokens(self, tokens: object) -> None:
        """Raise unless tokens are [B, T] integers, T <= max_positions."""
        if not isinstance(tokens, Tensor):
            raise TypeError(f"Decoder: tokens is {type(tokens).__name__}, expected a tensor [B, T] of token ids")
        if tokens.dtype not in (torch.int64, torch.int32):
            raise TypeError(f"Decoder: tokens has dtype {tokens.dtype}, expected int64 or int32; convert by .long()")
        if tokens.dim() != 2:
            raise ValueError(
                f"Decoder: tokens has shape {list(tokens.shape)}, expected [B, T]; a batch of one is tokens[None]"
            )
        if tokens.shape[1] > self.config.max_positions:
            raise ValueError(
                f"Decoder: tokens has {tokens.shape[1]} positions, expected at most max_positions, which is "
                f"{self.config.max_positions}; shorten the sequence or raise max_positions"
            )


class Block(nn.Module):
    """One layer, attention then MLP, each reading the residual stream through its site and writing to it."""

    def __init__(self, config: DecoderConfig, layer: int) -> None:
        super().__init__()
        site = SITES[config.residual]
        self.attention_site = site(config, 2 * layer)
        self.attention_norm = nn.RMSNorm(config.width, eps=config.norm_eps)
        self.attention = Attention(config)
        self.mlp_site = site(config, 2 * layer + 1)
        self.mlp_norm = nn.RMSNorm(config.width, eps=config.norm_eps)
        self.mlp = MLP(config)

    def forward(self, stream: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The stream, tensors [B, T, d], after this layer."""
        x = self.attention_site(stream)
        # Under autocast an output is narrower than the embedding, and the tensors of a stream share one dtype.
        stream = self.attention_site.write(stream, self.attention(self.attention_norm(x)).to(x.dtype))
        x = self.mlp_site(stream)
        return self.mlp_site.write(stream, self.mlp(self.mlp_norm(x)).to(x.dtype))


class Attention(nn.Module):
    """Causal grouped-query attention; queries and keys are normalised per head, then rotated (RoPE)."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.head_dim, self.rope_theta = config.head_dim, config.rope_theta
        self.grouped = config.kv_heads != config.heads
        kv_width = config.kv_heads * config.head_dim
        self.q_proj = linear(config.width, config.width)
        self.k_proj = linear(config.width, kv_width)
        self.v_proj = linear(config.width, kv_width)
        self.o_proj = linear(config.width, config.width)
        self.q_norm = nn.RMSNorm(config.head_dim, eps=config.norm_eps)
        self.k_norm = nn.RMSNorm(config.head_dim, eps=config.norm_eps)

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, d] to [B, T, d]."""
        rotation = rotations(x, self.head_dim, self.rope_theta)
        q = rotate(self.q_norm(self.split(self.q_proj(x))), *rotation)
        k = rotate(self.k_norm(self.split(self.k_proj(x))), *rotation)
        q, k, v = (heads.transpose(1, 2) for heads in (q, k, self.split(self.v_proj(x))))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.grouped)
        out: Tensor = self.o_proj(mixed.transpose(1, 2).flatten(-2))
        return out

    def split(self, x: Tensor) -> Tensor:
        """[B, T, n * head_dim] as [B, T, n, head_dim], in the parameters' dtype even under autocast."""
        return torch.unflatten(x.to(self.q_norm.weight.dtype), -1, (x.shape[-1] // self.head_dim, self.head_dim))


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.gate_proj = linear(config.width, config.ffn_width)
        self.up_proj = linear(config.width, config.ffn_width)
        self.down_proj = linear(config.ffn_width, config.width)

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, d] to [B, T, d]."""
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


def linear(inputs: int, outputs: int) -> nn.Linear:
    """A projection without bias."""
    return nn.Linear(inputs, outputs, bias=False)


def rotations(x: Tensor, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """Cosines and sines [T, 1, head_dim / 2] of RoPE for x [B, T, d], in float32 (float64 for a float64 x).

    Computed where they are used: a buffer or an argument would be rounded when a model, or a sharded block's inputs,
    are cast to bfloat16. A compiler computes equal ones once.
    """
    dtype = torch.promote_types(x.dtype, torch.float32)
    position = torch.arange(x.shape[1], device=x.device, dtype=dtype)
    exponent = torch.arange(0, head_dim, 2, device=x.device, dtype=dtype) / head_dim
    angle = position[:, None, None] / theta**exponent
    return angle.cos(), angle.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the pairs (i, i + head_dim / 2) of x [B, T, heads, head_dim] by their position's angles."""
    a, b = x.to(cos.dtype).chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype)
