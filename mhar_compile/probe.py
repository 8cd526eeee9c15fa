"""What a trained model's sites read: the routing weights, averaged over tokens."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .router import Router


@torch.no_grad()
def routing_weights(model: nn.Module, *inputs: Any) -> dict[str, Tensor]:
    """The mean routing weights of every site, in the order in which the sites run.

    The model runs eagerly once, also where it is compiled.

    Args:
        model: a module that holds Routers.
        inputs: what the model is called with.

    Returns:
        For each Router, by module name, the mean over tokens of its weights [N, H] in float32; the null source, where
        there is one, is row 0.

    Raises:
        ValueError: the model holds no Router.
    """
    names = {module: name for name, module in model.named_modules() if isinstance(module, Router)}
    if not names:
        raise ValueError("routing_weights: the model has no Router; expected a model with at least one routing site")
    found: dict[str, Tensor] = {}

    def record(router: Router, args: tuple[Any, ...]) -> None:
        found[names[router]] = router.weights(*args).flatten(1, -2).mean(1)

    hooks = [router.register_forward_pre_hook(record) for router in names]
    try:
        with torch.compiler.set_stance("force_eager"):
            model(*inputs)
    finally:
        for hook in hooks:
            hook.remove()
    return found
