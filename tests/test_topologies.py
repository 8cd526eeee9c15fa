"""Residual topologies: against sums and mixtures written out by hand, and what a decoder does with its stream."""

import copy

import pytest
import torch
import torch._dynamo.utils
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from mhar_compile import Decoder, Router
from mhar_compile.ops import reference

RESIDUALS = ["prenorm", "mhar", "attnres", "block", "delta"]
SMALL = {
    "vocabulary": 48,
    "width": 32,
    "layers": 4,
    "heads": 4,
    "kv_heads": 2,
    "ffn_width": 48,
    "max_positions": 64,
    "routing_heads": 4,
}


def trained(residual, **overrides):
    """A small decoder whose norms and routers are away from their initial values."""
    decoder = Decoder.from_preset("tiny", residual=residual, **{**SMALL, "initializer_std": 0.2, **overrides})
    for module in decoder.modules():
        if isinstance(module, (nn.RMSNorm, Router)):
            for parameter in module.parameters(recurse=False):
                parameter.data.add_(torch.randn_like(parameter), alpha=0.5)
    return decoder


def some_tokens(batch=2, length=12):
    return torch.randint(SMALL["vocabulary"], (batch, length))


def gradients(decoder, logits, grad):
    return torch.autograd.grad(logits, list(decoder.parameters()), grad)


def block_sums(outputs, size):
    return [sum(outputs[i : i + size]) for i in range(0, len(outputs), size)]


def mixture(site, sources, **added):
    return reference(sources, site.router.query, key_weight=site.router.key_weight, **added)[0]


def read_delta(site, x, outputs, size):
    if site.router is None:
        return x + sum(outputs)
    null, gate = site.router.null_source, site.router.gate
    return mixture(site, block_sums(outputs, size), null_source=null, gate=gate, residual=x + sum(outputs))


# What a site reads, from the embedding and the outputs of all the sublayers before it; size is sublayers a block.
READS = {
    "prenorm": lambda site, x, outputs, size: x + sum(outputs),
    "mhar": lambda site, x, outputs, size: mixture(site, [x, *outputs]),
    "attnres": lambda site, x, outputs, size: mixture(site, [x, *outputs]),
    "block": lambda site, x, outputs, size: mixture(site, [x, *block_sums(outputs, size)]),
    "delta": read_delta,
}


def logits_by_hand(decoder, tokens, read, size=None):
    """The decoder with its residual stream replaced by a list of all outputs."""
    x, outputs = decoder.embedding(tokens), []
    for block in decoder.blocks:
        for site, norm, sublayer in (
            (block.attention_site, block.attention_norm, block.attention),
            (block.mlp_site, block.mlp_norm, block.mlp),
        ):
            outputs.append(sublayer(norm(read(site, x, outputs, size))))
    return decoder.norm(read(decoder.final_site, x, outputs, size)) @ decoder.embedding.weight.T


@pytest.mark.parametrize(("layers", "blocks", "layers_per_block"), [(5, 2, 3), (3, 3, 1), (4, 1, 4), (2, 8, 1)])
@pytest.mark.parametrize("residual", RESIDUALS)
def test_outputs_and_gradients_equal_those_by_hand(residual, layers, blocks, layers_per_block):
    decoder = trained(residual, layers=layers, blocks=blocks).double()
    tokens = some_tokens()
    logits = decoder(tokens)
    expected = logits_by_hand(decoder, tokens, READS[residual], 2 * layers_per_block)
    torch.testing.assert_close(logits, expected, rtol=1e-10, atol=1e-10)
    grad = torch.randn_like(logits)
    for (name, _), ours, theirs in zip(
        decoder.named_parameters(),
        gradients(decoder, logits, grad),
        gradients(decoder, expected, grad),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9, msg=lambda text, name=name: f"{name}: {text}")


def test_attnres_is_mhar_with_one_head():
    attnres, mhar = trained("attnres"), trained("mhar", routing_heads=1)
    mhar.load_state_dict(attnres.state_dict())
    tokens = some_tokens()
    assert torch.equal(attnres(tokens), mhar(tokens))


def test_new_mhar_decoder_reads_the_average_of_its_sources():
    decoder = Decoder.from_preset("tiny", residual="mhar", **SMALL).double()
    tokens = some_tokens()
    average = logits_by_hand(decoder, tokens, lambda site, x, outputs, size: torch.stack([x, *outputs]).mean(0))
    torch.testing.assert_close(decoder(tokens), average, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_new_delta_decoder_is_exactly_prenorm(dtype):
    prenorm = trained("prenorm").to(dtype)
    delta = Decoder.from_preset("tiny", residual="delta", **SMALL).to(dtype)
    missing, unexpected = delta.load_state_dict(prenorm.state_dict(), strict=False)
    assert missing
    assert all(".router." in name for name in missing)
    assert not unexpected
    tokens = some_tokens()
    assert torch.equal(delta(tokens), prenorm(tokens))


def test_new_delta_decoder_gives_a_gradient_to_its_gates_first():
    delta = Decoder.from_preset("tiny", residual="delta", **SMALL)
    delta(some_tokens()).square().sum().backward()
    moved = {name.rpartition(".")[2] for name, p in delta.named_parameters() if ".router." in name and p.grad.any()}
    assert moved == {"gate"}


@pytest.mark.parametrize("residual", RESIDUALS)
def test_every_parameter_has_a_gradient(residual):
    decoder = trained(residual, blocks=2).double()
    logits = decoder(some_tokens())
    logits.backward(torch.randn_like(logits))
    zero = {name for name, parameter in decoder.named_parameters() if parameter.grad.abs().max() < 1e-12}
    # The first site has one source, the embedding or the null source: nothing for its query to choose from.
    first = "blocks.0.attention_site.router."
    assert zero == (set() if residual == "prenorm" else {first + "query", first + "key_weight"})


def count_sources(decoder):
    """How many sources each site mixes, the null source included, in the order of the forward pass."""
    counts = []

    def count(router, args, kwargs):
        counts.append(len(args[0]) + (router.null_source is not None))

    for module in decoder.modules():
        if isinstance(module, Router):
            module.register_forward_pre_hook(count, with_kwargs=True)
    with torch.no_grad():
        decoder(torch.zeros(1, 4, dtype=torch.long, device="meta"))
    return counts


def test_delta_mixes_few_sources_at_the_8b_shape():
    with torch.device("meta"):
        counts = count_sources(Decoder.from_preset("8b"))
    attention, mlp = counts[0::2], counts[1::2]
    assert len(attention) == len(mlp) == 32
    assert min(counts) == 1
    assert max(counts) == 9
    assert sum(attention) / 32 == 5.25
    assert sum(mlp) / 32 == 5.5


@pytest.mark.parametrize("residual", ["mhar", "attnres"])
def test_full_mixes_everything_before_it(residual):
    with torch.device("meta"):
        counts = count_sources(Decoder.from_preset("100m", residual=residual))
    assert counts == list(range(1, 26))


def test_block_mixes_whole_blocks_and_the_running_one():
    with torch.device("meta"):
        counts = count_sources(Decoder.from_preset("8b", residual="block"))
    # The first sublayer of block n sees the embedding and n sums, the other seven also their own; the last site all 8.
    assert counts == [1 + n + (sublayer > 0) for n in range(8) for sublayer in range(8)] + [9]


@pytest.mark.parametrize("residual", RESIDUALS)
def test_blocks_take_lists_and_leave_them_alone(residual):
    decoder = trained(residual)
    stream = [decoder.embedding(some_tokens())]
    for block in decoder.blocks:
        before, expected = list(stream), block(tuple(stream))
        after = block(stream)
        assert all(now is then for now, then in zip(stream, before, strict=True))
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(after, expected, strict=True))
        assert any(tensor.requires_grad for tensor in after)
        stream = list(after)


def held_tensors(value):
    """Tensors in a value and the containers inside it."""
    if isinstance(value, torch.Tensor):
        return [value]
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple, set)) else ()
    return [tensor for item in inside for tensor in held_tensors(item)]


@pytest.mark.parametrize("residual", RESIDUALS)
def test_modules_keep_no_activation(residual):
    decoder = trained(residual)
    parameters = set(decoder.parameters())
    decoder(some_tokens()).sum().backward()
    for name, module in decoder.named_modules():
        kept = [tensor for tensor in held_tensors(vars(module)) if tensor not in parameters]
        assert not kept, name


@pytest.mark.parametrize("residual", RESIDUALS)
def test_state_dict_round_trip(residual):
    first, second = trained(residual), trained(residual)
    tokens = some_tokens()
    assert not torch.equal(first(tokens), second(tokens))
    second.load_state_dict(first.state_dict())
    assert torch.equal(first(tokens), second(tokens))


@pytest.mark.parametrize("residual", RESIDUALS)
def test_autocast_keeps_one_dtype_in_the_stream(residual):
    decoder = trained(residual)
    tokens = some_tokens()
    exact = decoder(tokens)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        stream = (decoder.embedding(tokens),)
        for block in decoder.blocks:
            stream = block(stream)
        rounded = decoder(tokens)
    assert {tensor.dtype for tensor in stream} == {torch.float32}
    assert rounded.dtype == torch.bfloat16
    assert ((rounded - exact).norm(dim=-1) / exact.norm(dim=-1)).median() < 0.1
    rounded.float().square().mean().backward()
    assert all(parameter.grad.isfinite().all() for parameter in decoder.parameters())


# Both are raised inside torch: by Dynamo for a graph input that is not a leaf, by Inductor as it imports.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
class TestCompiled:
    """Under torch.compile, against the same decoder in eager."""

    @pytest.fixture(autouse=True)
    def fresh_compiler(self):
        torch._dynamo.reset()
        yield
        torch._dynamo.reset()

    def check(self, decoder, compiled, tokens):
        expected, logits = decoder(tokens), compiled(tokens)
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-5)
        grad = torch.randn_like(logits)
        for ours, theirs in zip(gradients(compiled, logits, grad), gradients(decoder, expected, grad), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)

    @pytest.mark.parametrize("residual", RESIDUALS)
    def test_one_graph(self, residual):
        decoder = trained(residual, layers=2, blocks=2)
        self.check(decoder, torch.compile(decoder, backend="aot_eager", fullgraph=True), some_tokens())

    def test_inductor(self):
        decoder = trained("mhar", layers=2).double()  # in float32 a large gradient may miss check's tolerance
        with sdpa_kernel(SDPBackend.MATH):  # torch 2.11 compiles a fused attention in float64 that fails
            self.check(decoder, torch.compile(decoder, fullgraph=True), some_tokens())

    @pytest.mark.parametrize("residual", ["mhar", "delta"])
    def test_any_batch_and_length_share_one_graph(self, residual):
        # Not the backend's call count: floats such as a norm's eps make Dynamo trace twice before it keeps one graph.
        statistics = torch._dynamo.utils.counters["stats"]
        statistics.clear()
        decoder = trained(residual, layers=1)
        compiled = torch.compile(decoder, backend="aot_eager", fullgraph=True, dynamic=True)
        for shape in ((2, 16), (3, 24), (4, 40)):
            self.check(decoder, compiled, some_tokens(*shape))
        assert statistics["unique_graphs"] == 1

    @pytest.mark.parametrize("residual", ["mhar", "delta"])
    def test_block_by_block(self, residual):
        decoder = trained(residual, layers=3)
        compiled = copy.deepcopy(decoder)
        for block in compiled.blocks:
            block.compile(backend="aot_eager", fullgraph=True)
        self.check(decoder, compiled, some_tokens())
