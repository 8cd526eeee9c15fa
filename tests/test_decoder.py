"""The decoder: its size, its recipe against transformers' Qwen3, positions, construction, and what it refuses."""

import dataclasses
import math
import os
import re
import subprocess
import sys
import typing

import pytest
import torch
from torch import nn

from mhar_compile import Decoder, DecoderConfig
from mhar_compile.config import PRESETS, Residual
from mhar_compile.decoder import rotate, rotations
from mhar_compile.topologies import SITES

SHAPE = {
    "vocabulary": 48,
    "width": 32,
    "layers": 2,
    "heads": 4,
    "kv_heads": 2,
    "ffn_width": 48,
    "max_positions": 64,
    "routing_heads": 4,
}


def size(**overrides):
    with torch.device("meta"):
        decoder = Decoder.from_preset(**overrides)
    return sum(parameter.numel() for parameter in decoder.parameters())


@pytest.mark.parametrize("name", PRESETS)
def test_routing_adds_the_parameters_of_the_paper(name):
    c, plain = PRESETS[name], size(name=name, residual="prenorm")
    layer = 2 * c.width * (c.heads + c.kv_heads) * c.head_dim + 3 * c.width * c.ffn_width + 2 * c.width + 2 * c.head_dim
    assert plain == c.vocabulary * c.width * (1 if c.tie_embeddings else 2) + c.layers * layer + c.width
    for residual in ("mhar", "attnres", "block"):
        assert size(name=name, residual=residual) == plain + 4 * c.width * c.layers + 2 * c.width
    assert size(name=name, residual="delta") == plain + 2 * c.layers * (3 * c.width + 1)


def test_presets_have_the_sizes_of_the_paper():
    assert round(size(name="100m") / 1e6) == 116
    assert round(size(name="350m") / 1e6) == 533
    assert size(name="8b") - size(name="8b", residual="prenorm") == 786_496


# Our parameter names to those of transformers' Qwen3ForCausalLM.
QWEN3_NAMES = {
    r"^embedding\.": "model.embed_tokens.",
    r"^norm\.": "model.norm.",
    r"^blocks\.": "model.layers.",
    r"\.attention\.": ".self_attn.",
    r"\.attention_norm\.": ".input_layernorm.",
    r"\.mlp_norm\.": ".post_attention_layernorm.",
}


def qwen3_name(name):
    for ours, theirs in QWEN3_NAMES.items():
        name = re.sub(ours, theirs, name)
    return name


@pytest.mark.parametrize("overrides", [{}, {"tie_embeddings": False, "rope_theta": 5e5, "kv_heads": 4}])
def test_prenorm_gives_the_logits_of_qwen3(overrides):
    transformers = pytest.importorskip("transformers", reason="the Qwen3 oracle needs transformers")
    decoder = Decoder.from_preset("tiny", residual="prenorm", initializer_std=0.1, **overrides)
    c = decoder.config
    qwen3 = transformers.Qwen3ForCausalLM(
        transformers.Qwen3Config(
            vocab_size=c.vocabulary,
            hidden_size=c.width,
            num_hidden_layers=c.layers,
            num_attention_heads=c.heads,
            num_key_value_heads=c.kv_heads,
            head_dim=c.head_dim,
            intermediate_size=c.ffn_width,
            max_position_embeddings=c.max_positions,
            rms_norm_eps=c.norm_eps,
            tie_word_embeddings=c.tie_embeddings,
            rope_parameters={"rope_type": "default", "rope_theta": c.rope_theta},
        )
    )
    for name, parameter in decoder.named_parameters():
        if name.endswith("norm.weight"):
            parameter.data.add_(torch.randn_like(parameter), alpha=0.3)
    weights = {qwen3_name(name): weight for name, weight in decoder.state_dict().items()}
    if c.tie_embeddings:
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    qwen3.load_state_dict(weights)
    tokens = torch.randint(c.vocabulary, (2, 200))
    with torch.no_grad():
        logits, expected = decoder(tokens), qwen3(tokens, use_cache=False).logits
    error = (logits - expected).norm(dim=-1) / expected.norm(dim=-1)
    assert error.max() < 1e-4
    assert error.median() < 1e-5


@pytest.mark.parametrize("residual", SITES)
def test_logits_depend_on_no_later_token(residual):
    decoder = Decoder(DecoderConfig(**SHAPE, residual=residual, initializer_std=0.2))
    tokens = torch.randint(SHAPE["vocabulary"], (2, 20))
    changed = tokens.clone()
    changed[:, 11:] = (changed[:, 11:] + 1) % SHAPE["vocabulary"]
    before, after = decoder(tokens), decoder(changed)
    torch.testing.assert_close(before[:, :11], after[:, :11])
    assert not torch.allclose(before[:, 11:], after[:, 11:])


def test_rotation_depends_on_distance_alone():
    x = torch.zeros(1, 40, 8, dtype=torch.float64)
    q, k = torch.randn(2, 8, dtype=torch.float64).unbind()
    cos, sin = rotations(x, 8, 1e4)
    q, k = (rotate(vector.expand(1, 40, 1, 8), cos, sin).squeeze() for vector in (q, k))
    scores = q @ k.T
    torch.testing.assert_close(scores[7:, 7:], scores[:-7, :-7])
    assert (scores[1:, 0] - scores[0, 0]).abs().min() > 1e-6


def test_positions_stay_exact_in_a_bfloat16_model():
    length, head_dim = 8192, 128
    exact = torch.arange(length, dtype=torch.float64)[:, None] * 1e4 ** -(
        torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim
    )
    cos, sin = rotations(torch.zeros(1, length, head_dim, dtype=torch.bfloat16), head_dim, 1e4)
    for ours, theirs in ((cos, exact.cos()), (sin, exact.sin())):
        assert ours.dtype == torch.float32
        assert (ours.squeeze(1) - theirs).abs().max() < length * torch.finfo(torch.float32).eps


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("model_dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_logits_have_the_dtype_of_the_model(dtype, model_dtype):
    decoder = Decoder(DecoderConfig(**SHAPE)).to(model_dtype)
    logits = decoder(torch.zeros(3, 5, dtype=dtype))
    assert logits.shape == (3, 5, SHAPE["vocabulary"])
    assert logits.dtype == model_dtype


@pytest.mark.parametrize("tied", [True, False])
def test_new_weights_follow_the_recipe(tied):
    decoder = Decoder(DecoderConfig(**{**SHAPE, "width": 256, "ffn_width": 512}, tie_embeddings=tied))
    for module in decoder.modules():
        if isinstance(module, (nn.Linear, nn.Embedding)):
            weight, count = module.weight, module.weight.numel()
            assert abs(weight.mean()) < 5 * 0.02 / math.sqrt(count)
            assert abs(weight.std() - 0.02) < 5 * 0.02 / math.sqrt(2 * count)
        elif isinstance(module, nn.RMSNorm):
            assert (module.weight == 1).all()
    assert not any(name.endswith("bias") for name, _ in decoder.named_parameters())
    assert ("lm_head.weight" in decoder.state_dict()) is not tied


def test_one_seed_gives_one_set_of_weights_in_every_topology():
    states = []
    for residual in SITES:
        torch.manual_seed(5)
        states.append(Decoder(DecoderConfig(**SHAPE, residual=residual)).state_dict())
    for state in states[1:]:
        assert all(torch.equal(state[name], weight) for name, weight in states[0].items())


@pytest.mark.parametrize("tied", [True, False])
def test_meta_decoder_materialises(tied):
    config = DecoderConfig(**SHAPE, residual="delta", tie_embeddings=tied)
    with torch.device("meta"):
        late = Decoder(config)
    late.to_empty(device="cpu")
    early = Decoder(config)
    for decoder in (late, early):
        torch.manual_seed(3)
        decoder.reset_parameters()
    tokens = torch.randint(SHAPE["vocabulary"], (2, 9))
    assert late.state_dict().keys() == early.state_dict().keys()
    assert torch.equal(late(tokens), early(tokens))


def test_every_topology_has_a_name():
    assert set(SITES) == set(typing.get_args(Residual))


def test_presets_take_overrides():
    config = Decoder.from_preset("tiny", residual="block", layers=3, blocks=3).config
    assert config == dataclasses.replace(PRESETS["tiny"], residual="block", layers=3, blocks=3)
    assert config.layers_per_block == 1
    assert PRESETS["8b"].layers_per_block == 4


@pytest.mark.parametrize(
    ("overrides", "error", "message"),
    [
        ({"residual": "hyper"}, ValueError, "residual is 'hyper', expected one of: prenorm, mhar, attnres"),
        ({"residual": None}, TypeError, "residual is None, expected str"),
        ({"heads": 5}, ValueError, "heads is 5, expected a divisor of width, which is 128"),
        ({"kv_heads": 3}, ValueError, "kv_heads is 3, expected a divisor of heads, which is 4"),
        ({"routing_heads": 7}, ValueError, "routing_heads is 7, expected a divisor of width, which is 128"),
        ({"width": 12}, ValueError, "width / heads is 3, expected an even number"),
        ({"layers": 0}, ValueError, "layers is 0, expected a positive finite number"),
        ({"blocks": -1}, ValueError, "blocks is -1, expected a positive finite number"),
        ({"norm_eps": 0.0}, ValueError, "norm_eps is 0.0, expected a positive finite number"),
        ({"rope_theta": math.nan}, ValueError, "rope_theta is nan, expected a positive finite number"),
        ({"layers": 2.0}, TypeError, "layers is 2.0, expected int"),
        ({"layers": True}, TypeError, "layers is True, expected int"),
        ({"tie_embeddings": 1}, TypeError, "tie_embeddings is 1, expected bool"),
        ({"depth": 3}, TypeError, "there is no field 'depth' to override, expected one of: vocabulary, width"),
    ],
)
def test_configuration_errors(overrides, error, message):
    with pytest.raises(error, match=re.escape(message)):
        DecoderConfig.from_preset("tiny", **overrides)


def test_unknown_preset_names_the_known():
    with pytest.raises(ValueError, match="there is no preset '2b', expected one of: tiny, 100m, 350m, 1b, 8b"):
        Decoder.from_preset("2b")
    with pytest.raises(TypeError, match=r"config is str, expected DecoderConfig; presets are built by Decoder\.from"):
        Decoder("tiny")


@pytest.mark.parametrize(
    ("tokens", "error", "message"),
    [
        ([[1, 2]], TypeError, "is list, expected a tensor [B, T]"),
        (torch.zeros(1, 4), TypeError, "has dtype torch.float32, expected int64 or int32"),
        (torch.zeros(1, 4, dtype=torch.uint8), TypeError, "convert by .long()"),
        (
            torch.zeros(4, dtype=torch.long),
            ValueError,
            "tokens has shape [4], expected [B, T]; a batch of one is tokens[None]",
        ),
        (torch.zeros(1, 65, dtype=torch.long), ValueError, "has 65 positions, expected at most max_positions"),
    ],
)
def test_token_errors(tokens, error, message):
    with pytest.raises(error, match=re.escape(message)):
        Decoder(DecoderConfig(**SHAPE))(tokens)


def test_import_and_eager_use_load_no_compiler():
    code = """
import sys, torch, mhar_compile
mhar_compile.Decoder.from_preset("tiny")(torch.zeros(1, 4, dtype=torch.long)).sum().backward()
print([name for name in sys.modules if name.startswith(("triton", "torch._dynamo", "torch._inductor"))])
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    result = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
