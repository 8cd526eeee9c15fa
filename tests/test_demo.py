"""The demo's parts that need no training, and the probe behind its route map."""

from __future__ import annotations

import pytest
import torch

from mhar_compile import Decoder, Router, route
from mhar_compile.probe import routing_weights

demo = pytest.importorskip("mhar_compile.demo", reason="the demo needs the extras `train` and `plot`")


def result(topology: str, held_out: torch.Tensor) -> demo.Result:
    return demo.Result(topology, Decoder.from_preset("tiny", layers=1), 1234, 5.0, [3.0, 2.0, 1.0], held_out)


def test_training_and_held_out_text_come_from_different_files():
    text, held_out = demo.corpus()
    assert len(text) > 5 * len(held_out) > 0
    marker = bytes(held_out[:2000].tolist())
    assert marker not in bytes(text.tolist())


def test_targets_are_the_next_bytes():
    text = torch.arange(200, dtype=torch.uint8)
    tokens, targets = demo.draw(text, torch.Generator().manual_seed(0))
    assert tokens.shape == targets.shape == (demo.BATCH, demo.LENGTH)
    assert torch.equal(targets, tokens + 1)


def test_learning_rate_warms_up_and_decays_to_a_tenth():
    rates = [demo.learning_rate(step, 200) for step in range(201)]
    assert rates[0] < rates[demo.WARM_UP // 2] < rates[demo.WARM_UP] == max(rates) == pytest.approx(demo.PEAK_RATE)
    assert rates[200] == pytest.approx(demo.PEAK_RATE / 10)


def test_verdict_names_the_lowest_loss_whoever_it_is():
    noise = torch.randn(100, generator=torch.Generator().manual_seed(0)).abs()
    clear = demo.verdict([result("mhar", noise + 1), result("prenorm", noise)])
    assert clear.startswith("Lowest held-out loss: prenorm, 1.0000 nats a byte ahead of mhar")
    assert ": more than sampling noise" in clear
    close = demo.verdict([result("mhar", noise), result("prenorm", noise.flip(0) + 1e-6)])
    assert ": not more than sampling noise" in close


def test_table_has_a_row_for_each_topology():
    lines = demo.table([result("prenorm", torch.ones(4)), result("mhar", torch.zeros(4))]).splitlines()
    assert lines[1].split() == ["prenorm", "1,234", "5.00", "1.0000"]
    assert lines[2].split() == ["mhar", "1,234", "5.00", "0.0000"]


def test_figures_are_png_files(tmp_path):
    results = [result(topology, torch.ones(4)) for topology in demo.TOPOLOGIES]
    demo.plot_losses(results, tmp_path / "loss.png")
    demo.plot_routes(routing_weights(results[-1].model, torch.zeros(1, 8, dtype=torch.long)), tmp_path / "routes.png")
    for name in ("loss.png", "routes.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("residual", ["mhar", "attnres", "block", "delta"])
def test_routing_weights_of_every_site_in_order(residual):
    model, tokens = Decoder.from_preset("tiny", residual=residual, layers=2), torch.randint(256, (2, 5))
    for module in model.modules():
        if isinstance(module, Router):
            torch.nn.init.normal_(module.query, std=0.5)
    weights = routing_weights(model, tokens)
    assert list(weights) == [name for name, module in model.named_modules() if isinstance(module, Router)]
    for mean in weights.values():
        torch.testing.assert_close(mean.sum(0), torch.ones(mean.shape[1]))
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_routing_weights_are_means_over_tokens_also_of_a_compiled_module():
    router, sources = Router(12, 4), [torch.randn(2, 3, 12) for _ in range(3)]
    torch.nn.init.normal_(router.query)
    expected = route(sources, router.query, return_weights=True)[1].mean((1, 2))
    for module in (router, torch.compile(router, backend="eager")):
        (mean,) = routing_weights(module, sources).values()
        torch.testing.assert_close(mean, expected)


def test_routing_weights_refuse_a_router_that_runs_twice():
    class Twice(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.router = Router(12, 4)

        def forward(self, sources):
            return self.router([self.router(sources), *sources])

    with pytest.raises(ValueError, match="router runs more than once"):
        routing_weights(Twice(), [torch.randn(2, 12)])


def test_names_are_the_models_own_also_where_it_is_compiled():
    model, tokens = Decoder.from_preset("tiny", layers=1), torch.zeros(1, 4, dtype=torch.long)
    assert list(routing_weights(torch.compile(model, backend="eager"), tokens)) == list(routing_weights(model, tokens))


def test_routing_weights_need_a_router():
    with pytest.raises(ValueError, match="the model has no Router"):
        routing_weights(torch.nn.Linear(2, 2), torch.ones(2))
