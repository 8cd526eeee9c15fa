"""The kernels of a rectangle of sources x sites: score (1 x M), mix (N x S), pull (1 x M) and its query gradients.

They are what a graph of many sites is made of: a source is scored against all its readers when it is born, a site's
mixture starts from logits that are known, and a source's gradient is gathered from its readers at once.

Shapes: sources, douts, residual: rows of d values with a stride, and a jump every `inner` tokens, as in site.py; out,
grad [tokens, d]; queries [sites, d] float32, key weight included; logits, dlogits [sites, tokens, H]; rstd [tokens];
lse, coupling [tokens, H] of one site. coupling is <dout, mix>.
"""

import triton
import triton.language as tl

from .tiles import (
    PAIRED,
    heads_of,
    load_unit,
    mask_heads,
    pick,
    pick_row,
    place_of,
    rounded,
    rounded_key,
    start_of_row,
    store_unit,
    tile_of,
    tokens_of,
)


@triton.jit
def exact_dot(narrow, wide, total):
    """total + narrow @ wide, products in float32: bfloat16 takes wide as a sum of two of its kind.

    float16 would lose what is small in wide (gradients of logits), and is itself exact in tf32: three products of that.
    """
    if PAIRED and narrow.dtype == tl.float16:
        return tl.dot(narrow.to(tl.float32), wide, total, input_precision="tf32x3")
    if PAIRED and narrow.dtype == tl.bfloat16:
        high = wide.to(narrow.dtype)
        low = (wide - high.to(tl.float32)).to(narrow.dtype)
        total = tl.dot(narrow, high, total)
        return tl.dot(narrow, low, total)
    return tl.dot(narrow.to(tl.float32), wide, total, input_precision="ieee")


@triton.jit
def block_of(source, start, live, head, first, K: tl.constexpr, COLUMNS: tl.constexpr):
    """COLUMNS columns of one head, for a block of tokens' rows: [TOKENS, COLUMNS], zero where masked."""
    column = first + tl.arange(0, COLUMNS)
    mask = live[:, None]
    if K % COLUMNS != 0:
        mask = mask & (column < K)[None, :]
    offsets = start[:, None] + (head * K + column)[None, :]
    return tl.load(source + offsets, mask=mask, other=0.0)


@triton.jit(do_not_specialize=["inner", "sites", "tokens"])
def score(
    source,
    stride,
    jump,
    inner,
    queries,
    logits,
    rstd,
    sites,
    tokens,
    eps,
    H: tl.constexpr,
    K: tl.constexpr,
    TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
    SITES: tl.constexpr,
):
    """Reciprocal RMS of one source and its logits against every query, SITES at a time, for one block of tokens."""
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    live = token < tokens
    start = start_of_row(place_of(token, inner), stride, jump)
    square = tl.zeros([TOKENS, COLUMNS], tl.float32)
    for head in range(0, H):
        for first in range(0, K, COLUMNS):
            x = block_of(source, start, live, head, first, K, COLUMNS).to(tl.float32)
            square += x * x
    inverse = tl.rsqrt(tl.sum(square, 1) * (1.0 / (H * K)) + eps)
    tl.store(rstd + token, inverse, mask=live)
    for first_site in range(0, sites, SITES):
        site = first_site + tl.arange(0, SITES)
        for head in range(0, H):
            total = tl.zeros([TOKENS, SITES], tl.float32)
            for first in range(0, K, COLUMNS):
                x = block_of(source, start, live, head, first, K, COLUMNS)
                key = rounded_key(x, inverse)
                column = first + tl.arange(0, COLUMNS)
                at = site.to(tl.int64)[None, :] * (H * K) + (head * K + column)[:, None]
                inside = (site < sites)[None, :] & (column < K)[:, None]
                total = exact_dot(key, tl.load(queries + at, mask=inside, other=0.0), total)
            at = (site[None, :] * tokens.to(tl.int64) + token[:, None]) * H + head
            tl.store(logits + at, total, mask=live[:, None] & (site < sites)[None, :])


@triton.jit
def load_states(maximum, total, mixture, token, tokens, live, unit, TILE: tl.constexpr, SITES: tl.constexpr):
    """(max, sum, mixture) of every site for one unit, one after the other in a tuple; empty where not live.

    Without a total it is one: then maximum is a log-sum-exp and mixture is normalised.
    """
    at = token * TILE.H + heads_of(unit // TILE.CHUNKS, TILE)
    heads = mask_heads(live, unit // TILE.CHUNKS, TILE)
    states = ()
    for s in tl.static_range(SITES):
        site = tokens.to(tl.int64) * s
        top = tl.load(maximum + site * TILE.H + at, mask=heads, other=float("-inf"))
        if total is None:
            weights = tl.where(heads, 1.0, 0.0)
        else:
            weights = tl.load(total + site * TILE.H + at, mask=heads, other=0.0)
        mixed = load_unit(mixture + site * TILE.WIDTH, token * TILE.WIDTH, live, unit, TILE)
        states = states + (top, weights, mixed)
    return states


@triton.jit
def store_states(
    maximum, total, mixture, states, token, tokens, live, unit, TILE: tl.constexpr, SITES: tl.constexpr
):  # fmt: skip
    """Write what load_states reads; the first unit of a head writes its max and sum."""
    at = token * TILE.H + heads_of(unit // TILE.CHUNKS, TILE)
    once = mask_heads(live, unit // TILE.CHUNKS, TILE) & (unit % TILE.CHUNKS == 0)
    for s in tl.static_range(SITES):
        site = tokens.to(tl.int64) * s
        tl.store(maximum + site * TILE.H + at, states[3 * s], mask=once)
        tl.store(total + site * TILE.H + at, states[3 * s + 1], mask=once)
        store_unit(mixture + site * TILE.WIDTH, states[3 * s + 2], token, live, unit, TILE)


@triton.jit
def absorb_one(state, logit, x):
    """One more source into the running (max, sum, mixture) of one site."""
    highest = tl.maximum(state[0], logit)
    shift = tl.where(highest == float("-inf"), 0.0, highest)
    decay = tl.exp(state[0] - shift)
    weight = tl.exp(logit - shift)
    return highest, state[1] * decay + weight, state[2] * decay[:, None] + weight[:, None] * x.to(tl.float32)


@triton.jit
def absorb_rows(
    states, sources, logits, first, count, place, tokens, live, unit,
    TILE: tl.constexpr, GROUP: tl.constexpr, SITES: tl.constexpr,
):  # fmt: skip
    """GROUP more sources, whose loads are in flight together, into the states of every site."""
    head = place[0] * TILE.H + heads_of(unit // TILE.CHUNKS, TILE)
    rows = ()
    for i in tl.static_range(GROUP):
        source, start = pick_row(sources, first + i, place)
        rows = rows + (load_unit(source, start, live & (first + i < count), unit, TILE),)
    for i in tl.static_range(GROUP):
        scores = pick(logits, first + i)
        present = mask_heads(live, unit // TILE.CHUNKS, TILE) & (first + i < count)
        updated = ()
        for s in tl.static_range(SITES):
            logit = tl.load(scores + tokens.to(tl.int64) * (s * TILE.H) + head, mask=present, other=float("-inf"))
            updated = updated + absorb_one((states[3 * s], states[3 * s + 1], states[3 * s + 2]), logit, rows[i])
        states = updated
    return states


@triton.jit
def rounding_residue(value, narrow):
    """What rounding lost, in 256ths of the last place of narrow: the distance of the two's bits as integers."""
    shift: tl.constexpr = 8 if narrow.dtype == tl.bfloat16 else 5
    lost = value.to(tl.int32, bitcast=True) - narrow.to(tl.float32).to(tl.int32, bitcast=True)
    return tl.minimum(tl.maximum((lost + (1 << (shift - 1))) >> shift, -128), 127)


@triton.jit
def finish(
    states, scale, extra, lse, out, residue, token, tokens, live, unit, TILE: tl.constexpr, SITES: tl.constexpr
):  # fmt: skip
    """Write log-sum-exp and extra + scale * mixture of every site, and what its rounding lost."""
    at = token * TILE.H + heads_of(unit // TILE.CHUNKS, TILE)
    once = mask_heads(live, unit // TILE.CHUNKS, TILE) & (unit % TILE.CHUNKS == 0)
    for s in tl.static_range(SITES):
        site = tokens.to(tl.int64) * s
        tl.store(lse + site * TILE.H + at, states[3 * s] + tl.log(states[3 * s + 1]), mask=once)
        value = states[3 * s + 2] * (scale / states[3 * s + 1])[:, None]
        if extra is not None:
            value += extra
        if residue is not None:
            narrow = rounded(value, tl.zeros([1], out.dtype.element_ty))
            store_unit(out, narrow, token, live, unit, TILE)
            store_unit(residue, rounding_residue(value, narrow), token, live, unit, TILE)
        else:
            store_unit(out + site * TILE.WIDTH, value, token, live, unit, TILE)


@triton.jit(do_not_specialize=["inner", "count", "carried", "last", "tokens"])
def mix(
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
    lse,
    out,
    residue,
    carry_max,
    carry_sum,
    carry_mix,
    next_max,
    next_sum,
    next_mix,
    carried,
    last,
    tokens,
    H: tl.constexpr,
    K: tl.constexpr,
    TOKENS: tl.constexpr,
    HEADS: tl.constexpr,
    COLUMNS: tl.constexpr,
    GROUP: tl.constexpr,
    SITES: tl.constexpr,
):
    """The softmax mixtures of `count` sources at SITES sites, from known logits, for one tile of tokens and one unit.

    logits holds for every source its [SITES, tokens, H]. With `last` the sites are finished: lse, out = residual +
    gate * mixture [SITES, tokens, d], and for a single site residue [tokens, d]. Otherwise (max, sum, mixture) are left
    in next_*. carry_max and carry_sum are read by the programs of all of a head's units, next_max and next_sum written
    by one: they must not be the same memory. Without carry_sum the carry is a log-sum-exp and a normalised mixture.
    """
    TILE: tl.constexpr = tile_of(H, K, TOKENS, HEADS, COLUMNS)
    unit = tl.program_id(1)
    token = tokens_of(tl.program_id(0), TILE)
    live = token < tokens
    place = place_of(token, inner)
    state = load_states(carry_max, carry_sum, carry_mix, token, tokens, live & (carried != 0), unit, TILE, SITES)
    placed = (sources, strides, jumps)
    for first in range(0, count, GROUP):
        state = absorb_rows(state, placed, logits, first, count, place, tokens, live, unit, TILE, GROUP, SITES)
    if last:
        scale = 1.0
        if gate is not None:
            scale = tl.load(gate).to(tl.float32)
        extra = None
        if residual is not None:
            start = start_of_row(place, residual_stride, residual_jump)
            extra = load_unit(residual, start, live, unit, TILE).to(tl.float32)
        finish(state, scale, extra, lse, out, residue, token, tokens, live, unit, TILE, SITES)
    else:
        store_states(next_max, next_sum, next_mix, state, token, tokens, live, unit, TILE, SITES)
