"""The kernels of the RMSNorm behind a site: mix_norm is mix for one site, with whole rows, and the norm of its output;
norm_backward is the norm's backward and the coupling of its site.

Shapes as in ``rectangles.py``; norm_weight [d], inverse [tokens] float32, normed [tokens, d]; terms: rows like
sources.
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
    over_heads,
    pick,
    place_of,
    rounded,
    start_of_row,
    store_heads,
    store_sum,
    store_unit,
    sums,
    tile_of,
    tokens_of,
    zero_row,
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


@triton.jit
def sum_of_rows(rows, count, place, live, TILE: tl.constexpr, GROUP: tl.constexpr):
    """The float32 sum of `count` rows, which are (pointers, strides, jumps)."""
    total = zero_row(TILE)
    for first in range(0, count, GROUP):
        group = load_group(rows, first, count, place, live, TILE, GROUP)
        added = ()
        for u in tl.static_range(TILE.UNITS):
            value = total[u]
            for i in tl.static_range(GROUP):
                value += group[i * TILE.UNITS + u].to(tl.float32)
            added = added + (value,)
        total = added
    return total


@triton.jit
def mean_through(dy, x, factor, weight, token, live, TILE: tl.constexpr):
    """The mean over a row of dy * weight * normalised x."""
    product = tl.zeros([TILE.ROWS, TILE.COLUMNS], tl.float32)
    for u in tl.static_range(TILE.UNITS):
        through = dy[u] * (x[u].to(tl.float32) * factor[:, None])
        if weight is not None:
            through *= load_unit(weight, token * 0, live, u, TILE).to(tl.float32)
        product += through
    return over_heads(sums((product,), 1), TILE)[0] * (1.0 / TILE.WIDTH)


@triton.jit
def norm_gradient(dy, x, factor, mean, weight, token, live, unit: tl.constexpr, TILE: tl.constexpr):
    """A unit of normalised x, and of the gradient of x, rounded to its dtype."""
    normal = x.to(tl.float32) * factor[:, None]
    if weight is not None:
        dy *= load_unit(weight, token * 0, live, unit, TILE).to(tl.float32)
    return normal, rounded((dy - normal * mean[:, None]) * factor[:, None], x)


@triton.jit
def restored(narrow, residue, token, live, unit: tl.constexpr, TILE: tl.constexpr):
    """A unit in float32 before it was rounded, to 8 more bits where their residue is there."""
    wide = narrow.to(tl.float32)
    if residue is not None:
        shift: tl.constexpr = 8 if narrow.dtype == tl.bfloat16 else 5
        lost = load_unit(residue, token * TILE.WIDTH, live, unit, TILE).to(tl.int32) << shift
        wide = (wide.to(tl.int32, bitcast=True) + lost).to(tl.float32, bitcast=True)
    return wide


@triton.jit(do_not_specialize=["inner", "count", "tokens"])
def norm_backward(
    terms,
    strides,
    jumps,
    inner,
    count,
    out,
    residue,
    inverse,
    norm_weight,
    grad_out,
    coupled,
    weight_sums,
    tokens,
    H: tl.constexpr,
    K: tl.constexpr,
    TOKENS: tl.constexpr,
    HEADS: tl.constexpr,
    COLUMNS: tl.constexpr,
    GROUP: tl.constexpr,
):
    """From the gradient of the norm's result, the sum of `count` terms, that of a site's output; and where asked for
    coupled = <grad_out, mixture> per head, the output being the mixture, and this program's share of the gradient of
    the norm's weight. A program walks over tiles of tokens.
    """
    TILE: tl.constexpr = tile_of(H, K, TOKENS, HEADS, COLUMNS)
    DOT: tl.constexpr = tl.float64 if out.dtype.element_ty == tl.float32 else tl.float32  # as in eager_steps.coupling
    summed = zero_row(TILE)
    for tile in range(tl.program_id(0), tl.cdiv(tokens, TOKENS), tl.num_programs(0)):
        token = tokens_of(tile, TILE)
        live = token < tokens
        dy = sum_of_rows((terms, strides, jumps), count, place_of(token, inner), live, TILE, GROUP)
        x = load_row(out, token * TILE.WIDTH, live, TILE)
        factor = tl.load(inverse + token, mask=live, other=0.0)
        mean = mean_through(dy, x, factor, norm_weight, token, live, TILE)
        updated = ()
        dots = ()
        for h in tl.static_range(TILE.GROUPS):
            product = tl.zeros([TILE.ROWS, TILE.COLUMNS], DOT)
            for c in tl.static_range(TILE.CHUNKS):
                normal, grad = norm_gradient(
                    dy[h * TILE.CHUNKS + c], x[h * TILE.CHUNKS + c], factor, mean, norm_weight, token, live,
                    h * TILE.CHUNKS + c, TILE,
                )  # fmt: skip
                store_unit(grad_out, grad, token, live, h * TILE.CHUNKS + c, TILE)
                updated = updated + (summed[h * TILE.CHUNKS + c] + dy[h * TILE.CHUNKS + c] * normal,)
                if coupled is not None:
                    mixture = restored(x[h * TILE.CHUNKS + c], residue, token, live, h * TILE.CHUNKS + c, TILE)
                    product += grad.to(DOT) * mixture.to(DOT)
            dots = dots + (product,)
        if weight_sums is not None:
            summed = updated
        if coupled is not None:
            couplings = ()
            for h in tl.static_range(TILE.GROUPS):
                couplings = couplings + sums((dots[h],), 1)
            store_heads(coupled, couplings, token, live, TILE)
    if weight_sums is not None:
        for u in tl.static_range(TILE.UNITS):
            store_sum(weight_sums, summed[u], tl.program_id(0), u, TILE)
