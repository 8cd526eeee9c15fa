"""``parameter_groups``: a model's parameters as an optimizer takes them, the routing parameters apart."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from .router import Router


def parameter_groups(
    model: nn.Module, *, lr: float | Tensor, weight_decay: float, routing_lr: float | Tensor | None = None
) -> list[dict[str, Any]]:
    """The trainable parameters of a model in up to three groups, each parameter once, for any torch optimizer.

    - ``weights``: every parameter with two dimensions or more that is in neither of the others; decayed.
    - ``no_decay``: norm weights, biases and whatever else has one dimension, and embeddings, also where an embedding is
      tied to the output projection; not decayed.
    - ``routing``: query, key weight, null source and gate of every :class:`mhar_compile.Router`; not decayed, since
      decay would pull a query towards the plain average and a key weight towards no score at all; at ``routing_lr``.

    Frozen parameters (``requires_grad=False``) are left out; call this again after unfreezing. A group without
    parameters is left out. Queries that are held outside a Router are not known as such.

    Example: ``torch.optim.AdamW(parameter_groups(model, lr=4e-4, weight_decay=0.1, routing_lr=4e-3), fused=True)``.

    Args:
        model: any module; call this after ``fully_shard``, which replaces the parameters.
        lr: learning rate, a number or (for capturable optimizers) a tensor.
        weight_decay: of the group ``weights``; the others have 0.
        routing_lr: learning rate of the group ``routing``; ``lr`` where absent.

    Returns:
        Dictionaries with ``name``, ``params``, ``lr`` and ``weight_decay``, parameters in the model's order.

    Raises:
        TypeError: model is not a module, or a rate is not a number.
        ValueError: a rate is negative or not finite, or the model has no trainable parameter.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"parameter_groups: model must be a torch.nn.Module, got {type(model).__name__}")
    routing_lr = lr if routing_lr is None else routing_lr
    check_rate("lr", lr)
    check_rate("weight_decay", weight_decay)
    check_rate("routing_lr", routing_lr)
    routing = parameters_of(model, Router)
    embeddings = parameters_of(model, nn.Embedding) | parameters_of(model, nn.EmbeddingBag)
    groups: dict[str, dict[str, Any]] = {
        "weights": {"params": [], "lr": lr, "weight_decay": weight_decay},
        "no_decay": {"params": [], "lr": lr, "weight_decay": 0.0},
        "routing": {"params": [], "lr": routing_lr, "weight_decay": 0.0},
    }
    for parameter in model.parameters():  # a tied parameter comes once
        if parameter.requires_grad:
            plain = "no_decay" if parameter in embeddings or parameter.dim() < 2 else "weights"
            groups["routing" if parameter in routing else plain]["params"].append(parameter)
    found = [{"name": name, **group} for name, group in groups.items() if group["params"]]
    if not found:
        raise ValueError(
            f"parameter_groups: {type(model).__name__} has no trainable parameter; set requires_grad on some first"
        )
    return found


def parameters_of(model: nn.Module, kind: type[nn.Module]) -> set[nn.Parameter]:
    """The parameters of all modules of a kind."""
    return {p for module in model.modules() if isinstance(module, kind) for p in module.parameters(recurse=False)}


def check_rate(name: str, rate: object) -> None:
    """Raise unless a rate is a finite number that is not negative."""
    if isinstance(rate, Tensor) and rate.numel() == 1:
        return  # its value may live on another device
    if not isinstance(rate, (int, float)) or isinstance(rate, bool):
        raise TypeError(f"parameter_groups: {name} must be a number, got {type(rate).__name__}")
    if not 0 <= rate < float("inf"):
        raise ValueError(f"parameter_groups: {name} must be finite and not negative, got {rate}")
