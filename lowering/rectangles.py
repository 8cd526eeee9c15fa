"""The kernels of a rectangle of sources x sites: score (1 x M), mix (N x S), pull (1 x M) and its query gradients.

They are what a graph of many sites is made of: a source is scored against all its readers when it is born, a site's
mixture starts from logits that are known, and a source's gradient is gathered from its readers at once.

Shapes: source, dout, out [tokens, d] with a stride between tokens; queries [sites, d] float32, key weight included;
logits, dlogits [sites, tokens, H]; rstd [tokens]; lse, coupling [tokens, H] of one site. coupling is <dout, mix>.
"""

import triton
import triton.language as tl

from .tiles import (
    PAIRED,
    heads_of,
    lanes_of,
    load_heads,
    load_row,
    load_unit,
    mask_heads,
    mask_unit,
    over_heads,
    pick,
    rounded_key,
    start_of,
    store_heads,
    store_unit,
    sums,
    tile_of,
    to_float32,
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
def block_of(source, stride, token, live, head, first, K: tl.constexpr, COLUMNS: tl.constexpr):
    """COLUMNS columns of one head, for a block of tokens: [TOKENS, COLUMNS], zero where masked."""
    column = first + tl.arange(0, COLUMNS)
    mask = live[:, None]
    if K % COLUMNS != 0:
        mask = mask & (column < K)[None, :]
    offsets = token[:, None] * stride + (head * K + column)[None, :]
    return tl.load(source + offsets, mask=mask, other=0.0)


@triton.jit(do_not_specialize=["sites", "tokens"])
def score(
    source,
    stride,
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
    square = tl.zeros([TOKENS, COLUMNS], tl.float32)
    for head in range(0, H):
        for first in range(0, K, COLUMNS):
            x = block_of(source, stride, token, live, head, first, K, COLUMNS).to(tl.float32)
            square += x * x
    inverse = tl.rsqrt(tl.sum(square, 1) * (1.0 / (H * K)) + eps)
    tl.store(rstd + token, inverse, mask=live)
    for first_site in range(0, sites, SITES):
        site = first_site + tl.arange(0, SITES)
        for head in range(0, H):
            total = tl.zeros([TOKENS, SITES], tl.float32)
            for first in range(0, K, COLUMNS):
                x = block_of(source, stride, token, live, head, first, K, COLUMNS)
                key = rounded_key(x, inverse)
                column = first + tl.arange(0, COLUMNS)
                at = site.to(tl.int64)[None, :] * (H * K) + (head * K + column)[:, None]
                inside = (site < sites)[None, :] & (column < K)[:, None]
                total = exact_dot(key, tl.load(queries + at, mask=inside, other=0.0), total)
            at = (site[None, :] * tokens.to(tl.int64) + token[:, None]) * H + head
            tl.store(logits + at, total, mask=live[:, None] & (site < sites)[None, :])


@triton.jit
def absorb_one(top, total, mix, logit, x):
    """One more source into the running (max, sum, mixture) of one site."""
    highest = tl.maximum(top, logit)
    shift = tl.where(highest == float("-inf"), 0.0, highest)
    decay = tl.exp(top - shift)
    weight = tl.exp(logit - shift)
    return highest, total * decay + weight, mix * decay[:, None] + weight[:, None] * x.to(tl.float32)


@triton.jit(do_not_specialize=["count", "carried", "last", "tokens"])
def mix(
    sources,
    strides,
    logits,
    count,
    residual,
    residual_stride,
    gate,
    lse,
    out,
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

    logits holds for every source its [SITES, tokens, H]. Several sites leave (max, sum, mixture) in next_*;
    a single site with `last` set is finished: lse and out = residual + gate * mixture. carry_max and carry_sum are read
    by the programs of all of a head's units, next_max and next_sum written by one: they must not be the same memory.
    """
    TILE: tl.constexpr = tile_of(H, K, TOKENS, HEADS, COLUMNS)
    token = tokens_of(tl.program_id(0), TILE)
    live = token < tokens
    unit = tl.program_id(1)
    group = unit // TILE.CHUNKS
    row = token * H + heads_of(group, TILE)
    heads = mask_heads(live, group, TILE)
    place = token[:, None] * TILE.WIDTH + start_of(unit, TILE) + lanes_of(TILE)
    inside = mask_unit(live, unit, TILE)
    state = ()
    for s in tl.static_range(SITES):
        site = tokens.to(tl.int64) * s
        top = tl.load(carry_max + site * H + row, mask=heads & (carried != 0), other=float("-inf"))
        total = tl.load(carry_sum + site * H + row, mask=heads & (carried != 0), other=0.0)
        mixed = tl.load(carry_mix + site * TILE.WIDTH + place, mask=inside & (carried != 0), other=0.0)
        state = state + (top, total, mixed)

    for first in range(0, count, GROUP):
        rows = ()
        for i in tl.static_range(GROUP):
            present = live & (first + i < count)
            stride = pick(strides, first + i)
            rows = rows + (load_unit(pick(sources, first + i), token, stride, present, unit, TILE),)
        for i in tl.static_range(GROUP):
            scores = pick(logits, first + i)
            present = heads & (first + i < count)
            updated = ()
            for s in tl.static_range(SITES):
                at = scores + tokens.to(tl.int64) * (s * H) + row
                logit = tl.load(at, mask=present, other=float("-inf"))
                updated = updated + absorb_one(state[3 * s], state[3 * s + 1], state[3 * s + 2], logit, rows[i])
            state = updated

    if SITES == 1 and last:
        scale = 1.0
        if gate is not None:
            scale = tl.load(gate).to(tl.float32)
        tl.store(lse + row, state[0] + tl.log(state[1]), mask=heads & (unit % TILE.CHUNKS == 0))
        value = state[2] * (scale / state[1])[:, None]
        if residual is not None:
            value += load_unit(residual, token, residual_stride, live, unit, TILE).to(tl.float32)
        store_unit(out, value, token, TILE.WIDTH, live, unit, TILE)
    else:
        for s in tl.static_range(SITES):
            site = tokens.to(tl.int64) * s
            once = heads & (unit % TILE.CHUNKS == 0)
            tl.store(next_max + site * H + row, state[3 * s], mask=once)
            tl.store(next_sum + site * H + row, state[3 * s + 1], mask=once)
            tl.store(next_mix + site * TILE.WIDTH + place, state[3 * s + 2], mask=inside)


@triton.jit
def pull_dlogits(
    x, douts, dout_strides, scales, logits, lses, couplings, dlogits, count, token, tokens, live, TILE: tl.constexpr
):  # fmt: skip
    """Store dl = scale w (<dout, x> - coupling) of every site; return sum over sites and heads of dl l, per token."""
    norm = tl.zeros([TILE.ROWS], tl.float32)
    for m in range(0, count):
        dout = load_row(pick(douts, m), token, pick(dout_strides, m), live, TILE)
        scale = tl.load(scales + m)
        levels = load_heads(pick(lses, m), token, live, TILE)
        coupling = load_heads(pick(couplings, m), token, live, TILE)
        slot = tokens.to(tl.int64) * m * TILE.H
        known = load_heads(logits + slot, token, live, TILE)
        found = ()
        for h in tl.static_range(TILE.GROUPS):
            product = tl.zeros([TILE.ROWS, TILE.COLUMNS], tl.float32)
            for c in tl.static_range(TILE.CHUNKS):
                product += dout[h * TILE.CHUNKS + c].to(tl.float32) * x[h * TILE.CHUNKS + c].to(tl.float32)
            dot = sums((product,), 1)[0]
            dlogit = scale * tl.exp(known[h] - levels[h]) * (dot - coupling[h])
            norm += tl.where(mask_heads(live, h, TILE), dlogit * known[h], 0.0)
            found = found + (dlogit,)
        store_heads(dlogits + slot, found, token, live, TILE)
    return over_heads((norm,), TILE)[0]


@triton.jit(do_not_specialize=["count", "carried", "tokens"])
def pull(
    source,
    stride,
    rstd,
    douts,
    dout_strides,
    scales,
    queries,
    logits,
    lses,
    couplings,
    dlogits,
    carry,
    grad,
    count,
    carried,
    tokens,
    H: tl.constexpr,
    K: tl.constexpr,
    TOKENS: tl.constexpr,
    HEADS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """The gradient of one source from `count` sites that read it, for one tile of tokens; dlogits are left for dq.

    grad may be float32 and be the carry of the next window of sites; it is added to carry where carried is set.
    """
    TILE: tl.constexpr = tile_of(H, K, TOKENS, HEADS, COLUMNS)
    token = tokens_of(tl.program_id(0), TILE)
    live = token < tokens
    x = load_row(source, token, stride, live, TILE)
    norm = pull_dlogits(
        x, douts, dout_strides, scales, logits, lses, couplings, dlogits, count, token, tokens, live, TILE
    )  # fmt: skip
    tl.debug_barrier()  # dlogits are read back by other threads of this program
    inverse = tl.load(rstd + token, mask=live, other=0.0)
    through_norm = inverse * (norm * (1.0 / TILE.WIDTH))
    total = ()
    before = load_row(carry, token, TILE.WIDTH, live & (carried != 0), TILE)
    for u in tl.static_range(TILE.UNITS):
        total = total + (before[u] - through_norm[:, None] * (x[u].to(tl.float32) * inverse[:, None]),)
    for m in range(0, count):
        dout = to_float32(load_row(pick(douts, m), token, pick(dout_strides, m), live, TILE))
        scale = tl.load(scales + m)
        levels = load_heads(pick(lses, m), token, live, TILE)
        slot = tokens.to(tl.int64) * m * TILE.H
        known = load_heads(logits + slot, token, live, TILE)
        through_key = load_heads(dlogits + slot, token, live, TILE)
        updated = ()
        for u in tl.static_range(TILE.UNITS):
            weight = scale * tl.exp(known[u // TILE.CHUNKS] - levels[u // TILE.CHUNKS])
            query = load_unit(queries + m * TILE.WIDTH, token, 0, live, u, TILE)
            part = weight[:, None] * dout[u] + (inverse * through_key[u // TILE.CHUNKS])[:, None] * query
            updated = updated + (total[u] + part,)
        total = updated
    for u in tl.static_range(TILE.UNITS):
        store_unit(grad, total[u], token, TILE.WIDTH, live, u, TILE)


@triton.jit(do_not_specialize=["sites", "tokens"])
def query_gradient(
    source,
    stride,
    rstd,
    dlogits,
    shares,
    sites,
    tokens,
    H: tl.constexpr,
    K: tl.constexpr,
    TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
    SITES: tl.constexpr,
):
    """This program's share, over its blocks of tokens, of sum_t dl key for every site and COLUMNS columns of one head.

    Grid (shares, H * chunks of a head, sites / SITES); shares [programs, sites, d] are summed by site_sums.
    """
    CHUNKS: tl.constexpr = (K + COLUMNS - 1) // COLUMNS
    head = tl.program_id(1) // CHUNKS
    first = tl.program_id(1) % CHUNKS * COLUMNS
    site = tl.program_id(2) * SITES + tl.arange(0, SITES)
    total = tl.zeros([COLUMNS, SITES], tl.float32)
    for block in range(tl.program_id(0), tl.cdiv(tokens, TOKENS), tl.num_programs(0)):
        token = tl.zeros([TOKENS], tl.int64) + block * TOKENS + tl.arange(0, TOKENS)
        live = token < tokens
        x = block_of(source, stride, token, live, head, first, K, COLUMNS)
        inverse = tl.load(rstd + token, mask=live, other=0.0)
        key = rounded_key(x, inverse)
        at = (site[None, :] * tokens.to(tl.int64) + token[:, None]) * H + head
        dlogit = tl.load(dlogits + at, mask=live[:, None] & (site < sites)[None, :], other=0.0)
        total = exact_dot(tl.trans(key), dlogit, total)
    column = first + tl.arange(0, COLUMNS)
    row = tl.program_id(0).to(tl.int64) * sites + site
    mask = (column < K)[:, None] & (site < sites)[None, :]
    tl.store(shares + row[None, :] * (H * K) + (head * K + column)[:, None], total, mask=mask)
