"""``checkpoint_policy``: what selective activation checkpointing saves and what it recomputes."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy

aten = torch.ops.aten
SAVED = {
    aten.mm.default,
    aten.addmm.default,
    aten.bmm.default,
    aten.baddbmm.default,
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_cudnn_attention.default,
    aten._scaled_dot_product_fused_attention_overrideable.default,
}


def checkpoint_policy(ctx: Any, op: Any, *args: Any, **keywords: Any) -> CheckpointPolicy:
    """A policy for ``torch.utils.checkpoint``: matrix products and attention are saved, all else is computed again.

    What is computed again is cheap arithmetic over memory that is read anyway: norms, activations, rotary embeddings
    and the mixtures of the routing sites. Sublayer outputs, the sources of all later sites, are matrix products and
    stay. Eager and under plain ``torch.compile`` a site's logits are computed again together with its mixture, as one
    operator; with ``backend="mhar"`` they are scored once and saved, whatever the policy, and the mixture alone is
    computed again.

    Example::

        contexts = functools.partial(create_selective_checkpoint_contexts, mhar_compile.checkpoint_policy)
        checkpoint(block, stream, use_reentrant=False, context_fn=contexts)

    Compile outside of checkpointing (``checkpoint_wrapper`` first, then ``compile_blocks`` or ``torch.compile``): a
    policy does not reach into a region that is compiled already.
    """
    return CheckpointPolicy.MUST_SAVE if op in SAVED else CheckpointPolicy.PREFER_RECOMPUTE
