"""What people do with autograd around routes: the gradients of the reference, or an error that says why not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mhar_compile import route
from mhar_compile.ops import reference

WIDTH, HEADS = 8, 2


class Chain(nn.Module):
    """Three sites over a growing list; ``site`` is our operator or the reference, the same for both but for that."""

    def __init__(self, site: Any, dropout: float = 0.0, tied: bool = False) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.queries = nn.ParameterList(torch.randn(HEADS, WIDTH // HEADS) for _ in range(3))
            self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        if tied:
            self.layers[1], self.queries[2] = self.layers[0], self.queries[0]
        self.site, self.dropout = site, nn.Dropout(dropout)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        sources = [x]
        for query, layer in zip(self.queries, self.layers, strict=False):
            sources.append(self.dropout(layer(self.site(sources, query)).tanh()))
        out: Tensor = self.site(sources, self.queries[2])
        return out


def mixture(sources: list[Tensor], query: Tensor) -> Tensor:
    return reference(sources, query)[0]


def pair(**options: Any) -> tuple[Chain, Chain]:
    return Chain(route, **options), Chain(mixture, **options)


def point(**options: Any) -> Tensor:
    return torch.randn(3, WIDTH, dtype=torch.float64, requires_grad=True, **options)


def close(ours: Any, theirs: Any) -> None:
    torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12)


def test_retained_graphs_and_a_second_backward():
    x, gradients = point(), []
    for model in pair():
        out = model(x)
        first = torch.autograd.grad(out.sum(), [x, *model.parameters()], retain_graph=True)
        second = torch.autograd.grad(out.square().sum(), [x, *model.parameters()])
        gradients.append([*first, *second])
        with pytest.raises(RuntimeError, match="backward through the graph a second time"):
            out.sum().backward()
    close(*gradients)


@pytest.mark.parametrize("wanted", ["x", "queries.1", "layers.0.weight"])
def test_partial_gradients(wanted):
    x, gradients = point(), []
    for model in pair():
        leaf = x if wanted == "x" else model.get_parameter(wanted)
        gradients.append(torch.autograd.grad(model(x).square().sum(), leaf)[0])
    close(*gradients)


def test_a_gradient_of_a_source_that_is_no_leaf():
    x, gradients = point(), []
    for site in (route, mixture):
        sources = [x, x.sin()]
        sources.append(site(sources, torch.ones(HEADS, WIDTH // HEADS, dtype=torch.float64)).cos())
        out = site(sources, torch.ones(HEADS, WIDTH // HEADS, dtype=torch.float64))
        gradients.append(torch.autograd.grad(out.square().sum(), sources))
    close(*gradients)


def test_tensor_hooks_see_and_change_gradients():
    x, gradients = point(), []
    for model in pair():
        seen: list[Tensor] = []

        def double(grad: Tensor, seen: list[Tensor] = seen) -> Tensor:
            seen.append(grad)
            return 2 * grad

        for layer in model.layers:
            layer.register_forward_hook(lambda _, args, out, hook=double: out.register_hook(hook) and None)
        model.queries[0].register_hook(double)
        parameters = list(model.parameters())
        gradients.append([*torch.autograd.grad(model(x).square().sum(), [x, *parameters]), *seen])
        assert len(seen) == 3
    close(*gradients)


def test_module_hooks_see_gradients():
    x, seen = point(), []
    for model in pair():
        grads: list[Tensor] = []
        model.register_full_backward_pre_hook(lambda _, out, grads=grads: grads.extend(out))
        for layer in model.layers:
            layer.register_full_backward_hook(lambda _, into, out, grads=grads: grads.extend((*into, *out)))
        model(x).square().sum().backward()
        assert len(grads) == 5
        seen.append(grads)
    close(*seen)


def test_a_post_accumulate_hook_runs_once_a_parameter():
    """Optimizers that step inside the backward hang there."""
    model, seen = Chain(route), []
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: seen.append(p))
    model(point()).sum().backward()
    assert len(seen) == len(set(seen)) == len(list(model.parameters()))


@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled")
def test_anomaly_mode_gives_the_numbers_and_names_the_route():
    x, gradients = point(), []
    with torch.autograd.set_detect_anomaly(True):
        for model in pair():
            gradients.append(torch.autograd.grad(model(x).square().sum(), [x, *model.parameters()]))
        close(*gradients)
        bad = route([x], torch.full((HEADS, WIDTH // HEADS), float("nan"), dtype=torch.float64))
        with (
            pytest.warns(UserWarning, match="Error detected in GeneratedBackwardFor_mhar_route"),
            pytest.raises(RuntimeError, match="returned nan values"),
        ):
            bad.sum().backward()


def test_gradients_accumulate_over_batches():
    batches, (ours, theirs) = [point() for _ in range(3)], pair()
    for batch in batches:
        ours(batch).square().sum().backward()
    sum(theirs(batch).square().sum() for batch in batches).backward()
    close([p.grad for p in ours.parameters()], [p.grad for p in theirs.parameters()])


def test_tied_layers_and_queries():
    x, gradients = point(), []
    for model in pair(tied=True):
        assert len(list(model.parameters())) == 4
        gradients.append(torch.autograd.grad(model(x).square().sum(), [x, *model.parameters()]))
    close(*gradients)


@pytest.mark.parametrize("compiled", [False, True])
def test_dropout_between_sites_draws_the_same_masks(fresh_compiler, compiled):
    x, gradients = point(), []
    for model in pair(dropout=0.5):
        function = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model
        torch.manual_seed(1)
        gradients.append(torch.autograd.grad(function(x).square().sum(), [x, *model.parameters()]))
    close(*gradients)


@pytest.mark.parametrize("change", ["add_", "mul_", "tanh_", "relu_"])
def test_in_place_changes_of_a_sites_output(change):
    x, gradients = point(), []
    query = torch.randn(HEADS, WIDTH // HEADS, dtype=torch.float64, requires_grad=True)
    for site in (route, mixture):
        out = site([x.sin(), x.cos()], query)
        arguments = (0.5,) if change in ("add_", "mul_") else ()
        getattr(out, change)(*arguments)
        gradients.append(torch.autograd.grad(site([out, x], query).square().sum(), [x, query]))
    close(*gradients)


def test_a_source_changed_in_place_after_it_was_read_is_an_error_not_a_wrong_gradient():
    x, query = point(), torch.ones(HEADS, WIDTH // HEADS, dtype=torch.float64)
    source = x.sin()
    out = route([source, x], query)
    source.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 3 * x**2 * grad


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # Dynamo's own
def test_custom_functions_beside_routes(fresh_compiler, compiled):
    x, gradients = point(), []
    query = torch.randn(HEADS, WIDTH // HEADS, dtype=torch.float64, requires_grad=True)

    def run(x: Tensor, query: Tensor, site: Any) -> Tensor:
        out = site([Cube.apply(x), x], query)
        return Cube.apply(site([x, Cube.apply(out)], query))

    for site in (route, mixture):
        function = torch.compile(run, backend="aot_eager", fullgraph=True) if compiled else run
        gradients.append(torch.autograd.grad(function(x, query, site).sum(), [x, query]))
    close(*gradients)


@pytest.mark.parametrize("where", ["saved on the CPU", "saved as they are"])
def test_saved_tensor_hooks(where):
    """Offloading of activations."""
    x, (ours, theirs) = point(), pair()
    hooks = (
        torch.autograd.graph.save_on_cpu()
        if where == "saved on the CPU"
        else torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t)
    )
    with hooks:
        out = ours(x)
    close(
        torch.autograd.grad(out.square().sum(), [x, *ours.parameters()]),
        torch.autograd.grad(theirs(x).square().sum(), [x, *theirs.parameters()]),
    )


def test_the_backward_leaves_the_incoming_gradient_alone():
    sources, grad = [point() for _ in range(2)], torch.randn(3, WIDTH, dtype=torch.float64)
    for options in ({}, {"residual": point(), "gate": torch.ones(1, dtype=torch.float64, requires_grad=True)}):
        before = grad.clone()
        route(sources, torch.ones(HEADS, WIDTH // HEADS, dtype=torch.float64), **options).backward(grad)
        assert torch.equal(grad, before)
