"""The kernel of a site whose output goes on to an RMSNorm: mix for one site, with whole rows, and the norm behind it.

Shapes as in ``rectangles.py``; norm_weight [d], inverse [tokens] float32, normed [tokens, d].
"""

import triton
import triton.language as tl

from .rectangles import rounding_residue
from .site import absorb, group_rstd, load_group
from .tiles import (
    heads_of,
    load_row,
    load_unit,
    mask_heads,
    pick,
    place_of,
    rounded,
    start_of_row,
    store_heads,
    store_unit,
    tile_of,
    tokens_of,
)


@triton.jit
def load_state(maximum, total, mixture, token, live, TILE: tl.constexpr):
    """What other sources left, (max, sum, mixture) of every head; without a total as in ``load_states``."""
    tops = ()
    totals = ()
    for h in tl.static_range(TILE.GROUPS):
        at = token * TILE.H + heads_of(h, TILE)
        heads = mask_heads(live, h, TILE)
        tops = tops + (tl.load(maximum + at, mask=heads, other=float("-inf")),)
        if total is None:
            totals = totals + (tl.where(heads, 1.0, 0.0),)
        else:
            totals = totals + (tl.load(total + at, mask=heads, other=0.0),)
    return tops, totals, load_row(mixture, token * TILE.WIDTH, live, TILE)


@triton.jit
def load_logits(logits, first, count, token, live, TILE: tl.constexpr, GROUP: tl.constexpr):
    """The logits of GROUP sources, those of a head group side by side; -inf where masked."""
    scores = ()
    for h in tl.static_range(TILE.GROUPS):
        at = token * TILE.H + heads_of(h, TILE)
        heads = mask_heads(live, h, TILE)
        for i in tl.static_range(GROUP):
            present = heads & (first + i < count)
            scores = scores + (tl.load(pick(logits, first + i) + at, mask=present, other=float("-inf")),)
    return scores


@triton.jit
def store_normed(normed, inverse, row, weight, eps, token, live, TILE: tl.constexpr, ROUND_FIRST: tl.constexpr):
    """Write the RMSNorm of rows as they were rounded, and the reciprocal root mean square."""
    factor = group_rstd(row, eps, TILE, 1)[0]
    tl.store(inverse + token, factor, mask=live & (heads_of(0, TILE) == 0))
    for u in tl.static_range(TILE.UNITS):
        value = row[u].to(tl.float32) * factor[:, None]
        if ROUND_FIRST:
            value = rounded(value, tl.zeros([1], normed.dtype.element_ty)).to(tl.float32)
        if weight is not None:
            value *= load_unit(weight, token * 0, live, u, TILE).to(tl.float32)
        store_unit(normed, value, token, live, u, TILE)


@triton.jit(do_not_specialize=["inner", "count", "carried", "tokens"])
def mix_norm(
    sources,
    strides,
    jumps,
    inner,
    logits,
    count,
    residual,
    residual_stride,
    residual_jump,
    gate,
    norm_weight,
    lse,
    out,
    residue,
    inverse,
    normed,
    carry_max,
    carry_sum,
    carry_mix,
    carried,
    tokens,
    eps,
    H: tl.constexpr,
    K: tl.constexpr,
    TOKENS: tl.constexpr,
    HEADS: tl.constexpr,
    COLUMNS: tl.constexpr,
    GROUP: tl.constexpr,
    ROUND_FIRST: tl.constexpr,
):
    """The last `count` sources of a site: lse, out (absent where nobody reads it) and residue as ``mix`` writes them,
    and of out as it was rounded the RMSNorm: inverse = (mean of squares + eps)^-1/2, normed = out * inverse * weight,
    with ROUND_FIRST rounded to normed's dtype before the weight too.
    """
    TILE: tl.constexpr = tile_of(H, K, TOKENS, HEADS, COLUMNS)
    token = tokens_of(tl.program_id(0), TILE)
    live = token < tokens
    place = place_of(token, inner)
    top, total, mixture = load_state(carry_max, carry_sum, carry_mix, token, live & (carried != 0), TILE)
    placed = (sources, strides, jumps)
    for first in range(0, count, GROUP):
        rows = load_group(placed, first, count, place, live, TILE, GROUP)
        scores = load_logits(logits, first, count, token, live, TILE, GROUP)
        top, total, mixture = absorb(top, total, mixture, scores, rows, TILE, GROUP)

    scale = 1.0
    if gate is not None:
        scale = tl.load(gate).to(tl.float32)
    levels = ()
    shares = ()
    for h in tl.static_range(TILE.GROUPS):
        levels = levels + (top[h] + tl.log(total[h]),)
        shares = shares + (tl.where(mask_heads(live, h, TILE), scale / total[h], 0.0),)  # no nan in the sum of squares
    store_heads(lse, levels, token, live, TILE)
    row = ()
    for u in tl.static_range(TILE.UNITS):
        value = mixture[u] * shares[u // TILE.CHUNKS][:, None]
        if residual is not None:
            start = start_of_row(place, residual_stride, residual_jump)
            value += load_unit(residual, start, live, u, TILE).to(tl.float32)
        if out is None:
            narrow = rounded(value, tl.zeros([1], normed.dtype.element_ty))
        else:
            narrow = rounded(value, tl.zeros([1], out.dtype.element_ty))
            store_unit(out, narrow, token, live, u, TILE)
        if residue is not None:
            store_unit(residue, rounding_residue(value, narrow), token, live, u, TILE)
        row = row + (narrow,)
    store_normed(normed, inverse, row, norm_weight, eps, token, live, TILE, ROUND_FIRST)
