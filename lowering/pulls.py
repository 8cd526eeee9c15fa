"""The kernels of the backward of a rectangle of sources x sites: coupling, pull and query_gradient.

coupling is <dout, mixture> of one site; pull gathers the gradients of a few sources from the sites that read them, each
dout read once; query_gradient sums over tokens what the sites' queries owe to one source.

Shapes as in rectangles.py: rows with a stride and a jump; logits, dlogits of a source [sites, tokens, H]; queries
[sites, d] float32, key weight included; lse and coupling of a site [tokens, H]; rstd [tokens].
"""

import triton
import triton.language as tl

from .rectangles import block_of, exact_dot
from .site import group_dots, load_group
from .tiles import (
    SHORT,
    heads_of,
    held,
    load_heads,
    load_row,
    load_unit,
    mask_heads,
    over_heads,
    pick,
    pick_row,
    place_of,
    rounded_key,
    start_of_row,
    store_heads,
    store_unit,
    sums,
    tile_of,
    to_float32,
    tokens_of,
    widened,
)


@triton.jit(do_not_specialize=["inner", "count", "carried", "last", "tokens"])
def coupling(
    grad_out,
    grad_stride,
    grad_jump,
    sources,
    strides,
    jumps,
    inner,
    count,
    logits,
    lse,
    coupled,
    mass,
    carried,
    last,
    tokens,
    H: tl.constexpr,
    K: tl.constexpr,
    TOKENS: tl.constexpr,
    HEADS: tl.constexpr,
    COLUMNS: tl.constexpr,
    GROUP: tl.constexpr,
):
    """<grad_out, mixture> per head of one site, from `count` sources whose logits [tokens, H] are known.

    The weights' sum, one but for the rounding of lse, is divided out at the last launch; until then it is kept in mass.
    """
    TILE: tl.constexpr = tile_of(H, K, TOKENS, HEADS, COLUMNS)
    token = tokens_of(tl.program_id(0), TILE)
    live = token < tokens
    place = place_of(token, inner)
    douts = held(load_row(grad_out, start_of_row(place, grad_stride, grad_jump), live, TILE), TILE)
    levels = load_heads(lse, token, live, TILE)
    parts = load_heads(coupled, token, live & (carried != 0), TILE)
    masses = load_heads(mass, token, live & (carried != 0), TILE)
    placed = (sources, strides, jumps)
    for first in range(0, count, GROUP):
        rows = load_group(placed, first, count, place, live, TILE, GROUP)
        found = group_dots(rows, None, douts, TILE, GROUP)
        new_parts = ()
        new_masses = ()
        for h in tl.static_range(TILE.GROUPS):
            part = parts[h]
            weights = masses[h]
            at = token * TILE.H + heads_of(h, TILE)
            for i in tl.static_range(GROUP):
                present = mask_heads(live, h, TILE) & (first + i < count)
                logit = tl.load(pick(logits, first + i) + at, mask=present, other=float("-inf"))
                weight = tl.exp(logit - levels[h])
                part += weight * found[h * GROUP + i]
                weights += weight
            new_parts = new_parts + (part,)
            new_masses = new_masses + (weights,)
        parts = new_parts
        masses = new_masses
    if last:
        divided = ()
        for h in tl.static_range(TILE.GROUPS):
            divided = divided + (parts[h] / masses[h],)
        store_heads(coupled, divided, token, live, TILE)
    else:
        store_heads(coupled, parts, token, live, TILE)
        store_heads(mass, masses, token, live, TILE)


@triton.jit
def pull_dots(rows, dout, TILE: tl.constexpr, SOURCES: tl.constexpr):
    """<dout, x> per head of every source, SOURCES entries a head group."""
    dots = ()
    for h in tl.static_range(TILE.GROUPS):
        products = ()
        for r in tl.static_range(SOURCES):
            total = tl.zeros([TILE.ROWS, TILE.COLUMNS], tl.float32)
            for c in tl.static_range(TILE.CHUNKS):
                other = dout[h * TILE.CHUNKS + c].to(tl.float32)
                total += widened(rows[r * TILE.UNITS + h * TILE.CHUNKS + c]) * other
            products = products + (total,)
        dots = dots + sums(products, 1)
    return dots


@triton.jit
def pull_logits(dots, norms, logits, dlogits, slot, levels, coupled, scale, token, live, TILE: tl.constexpr):
    """Store dl = w (scale <dout, x> - S) of every source at one site; return scale w, dl, and norms plus sum_h dl l."""
    SOURCES: tl.constexpr = len(logits)
    weights = ()
    found = ()
    updated = ()
    for r in tl.static_range(SOURCES):
        known = load_heads(logits[r] + slot, token, live, TILE)
        norm = norms[r]
        mine = ()
        for h in tl.static_range(TILE.GROUPS):
            weight = tl.exp(known[h] - levels[h])
            dlogit = weight * (scale * dots[h * SOURCES + r] - coupled[h])
            norm += dlogit * known[h]
            weights = weights + (scale * weight,)
            mine = mine + (dlogit,)
        store_heads(dlogits[r] + slot, mine, token, live, TILE)
        found = found + mine
        updated = updated + (norm,)
    return weights, found, updated


@triton.jit
def pull_rows(
    totals, dout, weights, through_key, inverses, folded, query, token, live, TILE: tl.constexpr, SOURCES: tl.constexpr
):  # fmt: skip
    """totals plus what one site owes to every source; an empty folded is read from the query, unit by unit."""
    updated = ()
    for r in tl.static_range(SOURCES):
        for u in tl.static_range(TILE.UNITS):
            if len(folded) > 0:
                unit = folded[u]
            else:
                unit = load_unit(query, token * 0, live, u, TILE)
            part = weights[r * TILE.GROUPS + u // TILE.CHUNKS][:, None] * dout[u].to(tl.float32)
            part += (inverses[r] * through_key[r * TILE.GROUPS + u // TILE.CHUNKS])[:, None] * unit
            updated = updated + (totals[r * TILE.UNITS + u] + part,)
    return updated


@triton.jit(do_not_specialize=["inner", "count", "carried", "tokens"])
def pull(
    sources,
    source_strides,
    source_jumps,
    rstds,
    logits,
    dlogits,
    carries,
    grads,
    douts,
    strides,
    jumps,
    inner,
    lses,
    couplings,
    gates,
    queries,
    count,
    carried,
    tokens,
    H: tl.constexpr,
    K: tl.constexpr,
    TOKENS: tl.constexpr,
    HEADS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """The gradients of the sources from `count` sites that read them all, for one tile of tokens.

    couplings are S = gate * <dout, mixture>. A gradient goes on from its carry [tokens, d] where carried is set, and is
    rounded to the dtype of grads. dlogits are left for query_gradient.
    """
    TILE: tl.constexpr = tile_of(H, K, TOKENS, HEADS, COLUMNS)
    SOURCES: tl.constexpr = len(sources)
    LONG: tl.constexpr = TILE.UNITS > SHORT and sources[0].dtype.element_ty != tl.float32  # queries in flight at once
    token = tokens_of(tl.program_id(0), TILE)
    live = token < tokens
    place = place_of(token, inner)
    rows = ()
    inverses = ()
    norms = ()
    totals = ()
    for r in tl.static_range(SOURCES):
        jump = None
        if source_jumps is not None:
            jump = source_jumps[r]
        rows = rows + held(load_row(sources[r], start_of_row(place, source_strides[r], jump), live, TILE), TILE)
        inverses = inverses + (tl.load(rstds[r] + token, mask=live, other=0.0),)
        norms = norms + (tl.zeros([TILE.ROWS], tl.float32),)
        totals = totals + to_float32(load_row(carries[r], token * TILE.WIDTH, live & (carried != 0), TILE))
    for m in range(0, count):
        pointer, start = pick_row((douts, strides, jumps), m, place)
        dout = load_row(pointer, start, live, TILE)
        dots = pull_dots(rows, dout, TILE, SOURCES)
        scale = 1.0
        if gates is not None:
            scale = tl.load(pick(gates, m)).to(tl.float32)
        levels = load_heads(pick(lses, m), token, live, TILE)
        coupled = load_heads(pick(couplings, m), token, live, TILE)
        query = queries + m * TILE.WIDTH
        folded = ()
        if LONG:
            folded = load_row(query, token * 0, live, TILE)
        slot = tokens.to(tl.int64) * m * TILE.H
        weights, through_key, norms = pull_logits(
            dots, norms, logits, dlogits, slot, levels, coupled, scale, token, live, TILE
        )
        totals = pull_rows(totals, dout, weights, through_key, inverses, folded, query, token, live, TILE, SOURCES)
    summed = over_heads(norms, TILE)
    for r in tl.static_range(SOURCES):
        through_norm = inverses[r] * (summed[r] * (1.0 / TILE.WIDTH))
        for u in tl.static_range(TILE.UNITS):
            normal = rows[r * TILE.UNITS + u].to(tl.float32) * inverses[r][:, None]
            store_unit(grads[r], totals[r * TILE.UNITS + u] - through_norm[:, None] * normal, token, live, u, TILE)


@triton.jit(do_not_specialize=["inner", "first_site", "sites", "pitch", "tokens"])
def query_gradient(
    source,
    stride,
    jump,
    inner,
    rstd,
    dlogits,
    shares,
    first_site,
    sites,
    pitch,
    tokens,
    H: tl.constexpr,
    K: tl.constexpr,
    TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
    SITES: tl.constexpr,
):
    """This program's share, over its blocks of tokens, of sum_t dl key for every site and COLUMNS columns of one head.

    Grid (shares, H * chunks of a head, sites / SITES). It is added to shares [programs, pitch, d] at first_site and on,
    always by the same program; site_sums adds the programs up.
    """
    CHUNKS: tl.constexpr = (K + COLUMNS - 1) // COLUMNS
    head = tl.program_id(1) // CHUNKS
    first = tl.program_id(1) % CHUNKS * COLUMNS
    site = tl.program_id(2) * SITES + tl.arange(0, SITES)
    column = first + tl.arange(0, COLUMNS)
    row = tl.program_id(0).to(tl.int64) * pitch + first_site + site
    mask = (column < K)[:, None] & (site < sites)[None, :]
    share = shares + row[None, :] * (H * K) + (head * K + column)[:, None]
    total = tl.load(share, mask=mask, other=0.0)
    for block in range(tl.program_id(0), tl.cdiv(tokens, TOKENS), tl.num_programs(0)):
        token = tl.zeros([TOKENS], tl.int64) + block * TOKENS + tl.arange(0, TOKENS)
        live = token < tokens
        start = start_of_row(place_of(token, inner), stride, jump)
        x = block_of(source, start, live, head, first, K, COLUMNS)
        inverse = tl.load(rstd + token, mask=live, other=0.0)
        key = rounded_key(x, inverse)
        at = (site[None, :] * tokens.to(tl.int64) + token[:, None]) * H + head
        dlogit = tl.load(dlogits + at, mask=live[:, None] & (site < sites)[None, :], other=0.0)
        total = exact_dot(tl.trans(key), dlogit, total)
    tl.store(share, total, mask=mask)
