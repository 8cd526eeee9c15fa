"""The kernels of one site and at most len(sources) sources: forward, backward, and the end of the query-side sums.

A site with more sources takes several launches: the forward hands (max, sum, mixture) in float32 from one to the next,
the backward first forms every dot (site_coupling), then the gradients. Sources come in groups of GROUP: the loads of a
group are in flight together and its sums share one barrier. Slots from `count` on are masked, whole groups skipped.

Shapes: sources, grad_out, residual: rows of d values, where token t begins at t * stride + t // inner * jump (inner and
jumps are None where one stride leads through all tokens); out, grads, carry_mix [tokens, d]; logits, dots
[count, tokens, H]; rstd [count, tokens]; lse, carry_max and carry_sum [tokens, H]; coupling (and the weights' sum)
[2, tokens, H]; query [H, K]; key_weight [d].
"""

import triton
import triton.language as tl

from .tiles import (
    fold,
    fold_unit,
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
    rounded,
    rounded_key,
    start_of_row,
    store_heads,
    store_sum,
    store_unit,
    sums,
    tile_of,
    tokens_of,
    widened,
    zero_heads,
    zero_row,
)


@triton.jit
def load_group(sources, first, count, place, live, TILE: tl.constexpr, GROUP: tl.constexpr):
    """The rows of GROUP sources as one tuple of units, source by source."""
    rows = ()
    for i in tl.static_range(GROUP):
        source, start = pick_row(sources, first + i, place)
        rows = rows + load_row(source, start, live & (first + i < count), TILE)
    return rows


@triton.jit
def group_rstd(rows, eps, TILE: tl.constexpr, GROUP: tl.constexpr):
    """Reciprocal root mean squares of GROUP rows, per token."""
    squares = ()
    for i in tl.static_range(GROUP):
        square = tl.zeros([TILE.ROWS, TILE.COLUMNS], tl.float32)
        for u in tl.static_range(TILE.UNITS):
            x = rows[i * TILE.UNITS + u].to(tl.float32)
            square += x * x
        squares = squares + (square,)
    totals = over_heads(sums(squares, 1), TILE)
    rstds = ()
    for i in tl.static_range(GROUP):
        rstds = rstds + (tl.rsqrt(totals[i] * (1.0 / TILE.WIDTH) + eps),)
    return rstds


@triton.jit
def group_dots(rows, rstds, others, TILE: tl.constexpr, GROUP: tl.constexpr):
    """<row, other> per head of GROUP rows, GROUP entries a head group; with rstds of the rounded keys instead."""
    dots = ()
    for h in tl.static_range(TILE.GROUPS):
        products = ()
        for i in tl.static_range(GROUP):
            total = tl.zeros([TILE.ROWS, TILE.COLUMNS], tl.float32)
            for c in tl.static_range(TILE.CHUNKS):
                row = rows[i * TILE.UNITS + h * TILE.CHUNKS + c]
                if rstds is None:
                    total += row.to(tl.float32) * widened(others[h * TILE.CHUNKS + c])
                else:
                    total += rounded_key(row, rstds[i]).to(tl.float32) * others[h * TILE.CHUNKS + c]
            products = products + (total,)
        dots = dots + sums(products, 1)
    return dots


@triton.jit
def absorb(top, total, mix, logits, rows, TILE: tl.constexpr, GROUP: tl.constexpr):
    """One step of the online softmax: GROUP more rows into the running (max, sum, mixture)."""
    tops = ()
    totals = ()
    mixed = ()
    for h in tl.static_range(TILE.GROUPS):
        highest = top[h]
        for i in tl.static_range(GROUP):
            highest = tl.maximum(highest, logits[h * GROUP + i])
        shift = tl.where(highest == float("-inf"), 0.0, highest)
        decay = tl.exp(top[h] - shift)
        weights = ()
        summed = total[h] * decay
        for i in tl.static_range(GROUP):
            weight = tl.exp(logits[h * GROUP + i] - shift)
            weights = weights + (weight,)
            summed += weight
        for c in tl.static_range(TILE.CHUNKS):
            part = mix[h * TILE.CHUNKS + c] * decay[:, None]
            for i in tl.static_range(GROUP):
                part += weights[i][:, None] * rows[i * TILE.UNITS + h * TILE.CHUNKS + c].to(tl.float32)
            mixed = mixed + (part,)
        tops = tops + (highest,)
        totals = totals + (summed,)
    return tops, totals, mixed


@triton.jit
def store_scores(
    logits, rstd, scores, rstds, first, count, token, tokens, live, TILE: tl.constexpr, GROUP: tl.constexpr
):
    """Write logits and reciprocal RMS of GROUP sources; return the logits with -inf for absent sources."""
    masked = ()
    for i in tl.static_range(GROUP):
        once = live & (first + i < count) & (heads_of(0, TILE) == 0)
        tl.store(rstd + (first + i) * tokens.to(tl.int64) + token, rstds[i], mask=once)
    for h in tl.static_range(TILE.GROUPS):
        row = token * TILE.H + heads_of(h, TILE)
        for i in tl.static_range(GROUP):
            present = first + i < count
            at = logits + (first + i) * tokens.to(tl.int64) * TILE.H + row
            tl.store(at, scores[h * GROUP + i], mask=mask_heads(live, h, TILE) & present)
            masked = masked + (tl.where(present, scores[h * GROUP + i], float("-inf")),)
    return masked


@triton.jit(do_not_specialize=["inner", "count", "carried", "last", "tokens"])
def site_forward(
    sources,
    strides,
    jumps,
    inner,
    count,
    query,
    key_weight,
    residual,
    residual_stride,
    residual_jump,
    gate,
    logits,
    rstd,
    lse,
    out,
    carry_max,
    carry_sum,
    carry_mix,
    carried,
    last,
    tokens,
    eps,
    H: tl.constexpr,
    K: tl.constexpr,
    TOKENS: tl.constexpr,
    HEADS: tl.constexpr,
    COLUMNS: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Logits, reciprocal RMS and the softmax mixture of `count` sources, each read once, for one tile of tokens."""
    TILE: tl.constexpr = tile_of(H, K, TOKENS, HEADS, COLUMNS)
    token = tokens_of(tl.program_id(0), TILE)
    live = token < tokens
    folded = fold(query, key_weight, token, live, TILE)
    top = ()
    for h in tl.static_range(TILE.GROUPS):
        at = carry_max + token * H + heads_of(h, TILE)
        top = top + (tl.load(at, mask=mask_heads(live, h, TILE) & (carried != 0), other=float("-inf")),)
    total = load_heads(carry_sum, token, live & (carried != 0), TILE)
    mix = load_row(carry_mix, token * TILE.WIDTH, live & (carried != 0), TILE)

    place = place_of(token, inner)
    placed = (sources, strides, jumps)
    rows = load_group(placed, 0, count, place, live, TILE, GROUP)
    for first in range(0, count, GROUP):
        following = load_group(placed, first + GROUP, count, place, live, TILE, GROUP)
        rstds = group_rstd(rows, eps, TILE, GROUP)
        scores = group_dots(rows, rstds, folded, TILE, GROUP)
        scores = store_scores(logits, rstd, scores, rstds, first, count, token, tokens, live, TILE, GROUP)
        top, total, mix = absorb(top, total, mix, scores, rows, TILE, GROUP)
        rows = following

    if last:
        scale = 1.0
        if gate is not None:
            scale = tl.load(gate).to(tl.float32)
        levels = ()
        for h in tl.static_range(TILE.GROUPS):
            levels = levels + (top[h] + tl.log(total[h]),)
        store_heads(lse, levels, token, live, TILE)
        for u in tl.static_range(TILE.UNITS):
            value = mix[u] * (scale / total[u // TILE.CHUNKS])[:, None]
            if residual is not None:
                start = start_of_row(place, residual_stride, residual_jump)
                value += load_unit(residual, start, live, u, TILE).to(tl.float32)
            store_unit(out, value, token, live, u, TILE)
    else:
        store_heads(carry_max, top, token, live, TILE)
        store_heads(carry_sum, total, token, live, TILE)
        for u in tl.static_range(TILE.UNITS):
            store_unit(carry_mix, mix[u], token, live, u, TILE)


@triton.jit
def load_weight(logits, lse, slot, count, token, tokens, live, group, TILE: tl.constexpr):
    """Logit and softmax weight of one source for one group of heads; zero where masked."""
    present = mask_heads(live, group, TILE) & (slot < count)
    row = token * TILE.H + heads_of(group, TILE)
    logit = tl.load(logits + slot * tokens.to(tl.int64) * TILE.H + row, mask=present, other=0.0)
    level = tl.load(lse + row, mask=present, other=0.0)
    return logit, tl.where(present, tl.exp(logit - level), 0.0)


@triton.jit
def site_dots(
    sources,
    count,
    douts,
    logits,
    lse,
    dots,
    coupling,
    mass,
    place,
    tokens,
    live,
    TILE: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Store <dout, x_n> of every source; return coupling + sum_n w_n <dout, x_n> and mass + sum_n w_n, per head.

    The weights' sum is one but for the rounding of lse, which moves all of them together: what the sources share would
    no longer cancel in <dout, x_n> - coupling. Dividing by the sum takes it out.
    """
    token = place[0]
    for first in range(0, count, GROUP):
        rows = load_group(sources, first, count, place, live, TILE, GROUP)
        found = group_dots(rows, None, douts, TILE, GROUP)
        coupled = ()
        massed = ()
        for h in tl.static_range(TILE.GROUPS):
            part = coupling[h]
            weights = mass[h]
            for i in tl.static_range(GROUP):
                _, weight = load_weight(logits, lse, first + i, count, token, tokens, live, h, TILE)
                at = dots + ((first + i) * tokens.to(tl.int64) + token) * TILE.H + heads_of(h, TILE)
                tl.store(at, found[h * GROUP + i], mask=mask_heads(live, h, TILE) & (first + i < count))
                part += weight * found[h * GROUP + i]
                weights += weight
            coupled = coupled + (part,)
            massed = massed + (weights,)
        coupling = coupled
        mass = massed
    return coupling, mass


@triton.jit(do_not_specialize=["inner", "count", "tokens"])
def site_coupling(
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
    dots,
    coupling,
    tokens,
    H: tl.constexpr,
    K: tl.constexpr,
    TOKENS: tl.constexpr,
    HEADS: tl.constexpr,
    COLUMNS: tl.constexpr,
    GROUP: tl.constexpr,
):
    """The dots of `count` sources, and their part of <dout, mix> and of the weights' sum added to coupling."""
    TILE: tl.constexpr = tile_of(H, K, TOKENS, HEADS, COLUMNS)
    token = tokens_of(tl.program_id(0), TILE)
    live = token < tokens
    place = place_of(token, inner)
    douts = held(load_row(grad_out, start_of_row(place, grad_stride, grad_jump), live, TILE), TILE)
    second = coupling + tokens.to(tl.int64) * H
    coupled = load_heads(coupling, token, live, TILE)
    mass = load_heads(second, token, live, TILE)
    placed = (sources, strides, jumps)
    coupled, mass = site_dots(placed, count, douts, logits, lse, dots, coupled, mass, place, tokens, live, TILE, GROUP)
    store_heads(coupling, coupled, token, live, TILE)
    store_heads(second, mass, token, live, TILE)


@triton.jit
def tile_coupling(
    coupling,
    scale,
    sources,
    count,
    douts,
    logits,
    lse,
    dots,
    place,
    tokens,
    live,
    TILE: tl.constexpr,
    GROUP: tl.constexpr,
):
    """<dout, mix> and the gate over the weights' sum, per head: read from coupling, or formed here with all dots.

    A masked row has no weights and stays zero.
    """
    if coupling is None:
        part = zero_heads(TILE)
        part, mass = site_dots(sources, count, douts, logits, lse, dots, part, part, place, tokens, live, TILE, GROUP)
        tl.debug_barrier()  # the dots are read back by other threads of this program
    else:
        part = load_heads(coupling, place[0], live, TILE)
        mass = load_heads(coupling + tokens.to(tl.int64) * TILE.H, place[0], live, TILE)
    divided = ()
    scales = ()
    for h in tl.static_range(TILE.GROUPS):
        inverse = tl.where(mass[h] == 0, 0.0, 1.0 / mass[h])
        divided = divided + (part[h] * inverse,)
        scales = scales + (scale * inverse,)
    return divided, scales


@triton.jit
def logit_gradient(slot, count, scales, logits, lse, dots, coupling, token, tokens, live, TILE: tl.constexpr):
    """Scaled weights and logit gradients of one source per head, and sum_h dl l per token."""
    weights = ()
    dlogits = ()
    norm = tl.zeros([TILE.ROWS], tl.float32)
    for h in tl.static_range(TILE.GROUPS):
        logit, weight = load_weight(logits, lse, slot, count, token, tokens, live, h, TILE)
        at = dots + (slot * tokens.to(tl.int64) + token) * TILE.H + heads_of(h, TILE)
        dot = tl.load(at, mask=mask_heads(live, h, TILE) & (slot < count), other=0.0)
        dlogit = scales[h] * weight * (dot - coupling[h])
        norm += dlogit * logit
        weights = weights + (scales[h] * weight,)
        dlogits = dlogits + (dlogit,)
    return weights, dlogits, over_heads((norm,), TILE)[0]


@triton.jit
def source_gradient(
    source,
    start,
    grad,
    rstd,
    weights,
    dlogits,
    norm,
    douts,
    folded,
    grad_out,
    grad_start,
    query,
    key_weight,
    dfolded,
    token,
    live,
    TILE: tl.constexpr,
):
    """Write one source's gradient; return dfolded plus dl key. Empty douts and folded are read again, unit by unit."""
    inverse = tl.load(rstd + token, mask=live, other=0.0)
    through_norm = inverse * (norm * (1.0 / TILE.WIDTH))
    updated = ()
    for u in tl.static_range(TILE.UNITS):
        x = load_unit(source, start, live, u, TILE)
        normal = x.to(tl.float32) * inverse[:, None]
        weight = weights[u // TILE.CHUNKS]
        dlogit = dlogits[u // TILE.CHUNKS]
        if len(folded) > 0:
            dout = douts[u]
            through_key = folded[u]
        else:
            dout = load_unit(grad_out, grad_start, live, u, TILE).to(tl.float32)
            through_key = fold_unit(query, key_weight, token, live, u, TILE)
        value = weight[:, None] * dout + (inverse * dlogit)[:, None] * through_key
        value -= through_norm[:, None] * normal  # not inverse^2 x: sources of size 1e18 would vanish in it
        store_unit(grad, value, token, live, u, TILE)
        updated = updated + (dfolded[u] + dlogit[:, None] * rounded(normal, x).to(tl.float32),)
    return updated


@triton.jit
def tile_gradients(
    sources,
    grads,
    nulls,
    count,
    scales,
    S,
    logits,
    lse,
    rstd,
    dots,
    douts,
    folded,
    grad_out,
    grad_start,
    query,
    key_weight,
    dfolded,
    place,
    tokens,
    live,
    TILE: tl.constexpr,
):
    """Write the gradients of the sources behind the null source; return dfolded plus their dl key."""
    token = place[0]
    for slot in range(nulls, count):
        weights, dlogits, norm = logit_gradient(slot, count, scales, logits, lse, dots, S, token, tokens, live, TILE)
        source, start = pick_row(sources, slot, place)
        dfolded = source_gradient(
            source, start, pick(grads, slot), rstd + slot * tokens.to(tl.int64), weights,
            dlogits, norm, douts, folded, grad_out, grad_start, query, key_weight, dfolded, token, live, TILE,
        )  # fmt: skip
    return dfolded


@triton.jit
def add_null(nulls, scales, logits, lse, dots, S, douts, sums, token, tokens, live, TILE: tl.constexpr):
    """Add what the null source, slot 0 where nulls is 1, owes to these tokens: w dout, dl, and sum_h dl l.

    Its row and its RMS are the same for every token, so its gradient needs no more than these sums.
    """
    weights, dlogits, norm = logit_gradient(0, nulls, scales, logits, lse, dots, S, token, tokens, live, TILE)
    mixed = ()
    for u in tl.static_range(TILE.UNITS):
        mixed = mixed + (sums[0][u] + weights[u // TILE.CHUNKS][:, None] * widened(douts[u]),)
    through_key = ()
    for h in tl.static_range(TILE.GROUPS):
        through_key = through_key + (sums[1][h] + dlogits[h],)
    return mixed, through_key, sums[2] + norm


@triton.jit
def store_null(null_sums, sums, null, rstd, query, key_weight, dfolded, TILE: tl.constexpr):
    """Write this program's share of the null source's gradient; return dfolded plus the null source's dl key."""
    row = tl.zeros([TILE.ROWS], tl.int64)
    everywhere = row == 0
    inverse = tl.load(rstd + row)
    folded = fold(query, key_weight, row, everywhere, TILE)
    updated = ()
    for u in tl.static_range(TILE.UNITS):
        x = load_unit(null, row, everywhere, u, TILE)
        normal = x.to(tl.float32) * inverse[:, None]
        dlogit = sums[1][u // TILE.CHUNKS]
        value = sums[0][u] + (inverse * dlogit)[:, None] * folded[u]
        value -= (inverse * (sums[2] * (1.0 / TILE.WIDTH)))[:, None] * normal
        store_sum(null_sums, value, tl.program_id(0), u, TILE)
        updated = updated + (dfolded[u] + dlogit[:, None] * rounded(normal, x).to(tl.float32),)
    return updated


@triton.jit(do_not_specialize=["inner", "count", "nulls", "carried", "tokens"])
def site_backward(
    grad_out,
    grad_stride,
    grad_jump,
    sources,
    strides,
    jumps,
    inner,
    grads,
    count,
    nulls,
    query,
    key_weight,
    gate,
    logits,
    lse,
    rstd,
    dots,
    coupling,
    query_sums,
    null_sums,
    gate_sums,
    carried,
    tokens,
    H: tl.constexpr,
    K: tl.constexpr,
    TOKENS: tl.constexpr,
    HEADS: tl.constexpr,
    COLUMNS: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Source gradients, and this program's share of the sums over tokens; a program walks over tiles of tokens.

    Without coupling the dots are formed here, in a first pass over the sources; the second finds them in the caches.
    """
    TILE: tl.constexpr = tile_of(H, K, TOKENS, HEADS, COLUMNS)
    HELD: tl.constexpr = 4 if null_sums is None else 2  # units of dout and query that fit beside the sums over tokens
    row = tl.program_id(0).to(tl.int64) + tl.zeros([TILE.ROWS], tl.int64)
    resumed = (tl.arange(0, TILE.ROWS) < HEADS) & (carried != 0)
    scale = 1.0
    if gate is not None:
        scale = tl.load(gate).to(tl.float32)
    dfolded = load_row(query_sums, row * TILE.WIDTH, resumed, TILE)
    null = ((), (), ())
    if null_sums is not None:
        null = (zero_row(TILE), zero_heads(TILE), tl.zeros([TILE.ROWS], tl.float32))
    dgate = tl.zeros([TILE.ROWS], tl.float32)
    placed = (sources, strides, jumps)
    for tile in range(tl.program_id(0), tl.cdiv(tokens, TOKENS), tl.num_programs(0)):
        token = tokens_of(tile, TILE)
        live = token < tokens
        place = place_of(token, inner)
        grad_start = start_of_row(place, grad_stride, grad_jump)
        douts = held(load_row(grad_out, grad_start, live, TILE), TILE)
        S, scales = tile_coupling(
            coupling, scale, placed, count, douts, logits, lse, dots, place, tokens, live, TILE, GROUP
        )
        for h in tl.static_range(TILE.GROUPS):
            dgate += S[h]
        if null_sums is not None:
            null = add_null(nulls, scales, logits, lse, dots, S, douts, null, token, tokens, live, TILE)
        folded = ()
        if TILE.UNITS <= HELD:
            folded = fold(query, key_weight, token, live, TILE)
        else:
            douts = ()
        dfolded = tile_gradients(
            placed, grads, nulls, count, scales, S, logits, lse, rstd, dots, douts, folded, grad_out, grad_start,
            query, key_weight, dfolded, place, tokens, live, TILE,
        )  # fmt: skip

    if null_sums is not None:
        if nulls > 0:
            dfolded = store_null(null_sums, null, sources[0], rstd, query, key_weight, dfolded, TILE)
    for u in tl.static_range(TILE.UNITS):
        store_sum(query_sums, dfolded[u], tl.program_id(0), u, TILE)
    if gate_sums is not None:
        if carried == 0:
            tl.store(gate_sums + tl.program_id(0), tl.sum(dgate, 0))


@triton.jit
def column_sums(shares, programs, width, column, inside, PROGRAMS: tl.constexpr, COLUMNS: tl.constexpr):
    """Sum of shares [programs, width] over the programs, for some columns, in a fixed order."""
    total = tl.zeros([PROGRAMS, COLUMNS], tl.float32)
    for first in range(0, programs, PROGRAMS):
        program = first + tl.arange(0, PROGRAMS)[:, None]
        mask = (program < programs) & inside[None, :]
        total += tl.load(shares + program.to(tl.int64) * width + column[None, :], mask=mask, other=0.0)
    return tl.sum(total, 0)


@triton.jit(do_not_specialize=["programs"])
def site_sums(
    query_sums,
    null_sums,
    gate_sums,
    query,
    key_weight,
    grad_query,
    grad_key_weight,
    grad_null,
    grad_gate,
    programs,
    width,
    PROGRAMS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """The second stage of the sums over tokens: add up the programs' shares and unfold query and key weight."""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < width
    dfolded = column_sums(query_sums, programs, width, column, inside, PROGRAMS, COLUMNS)
    dquery = dfolded
    if key_weight is not None:
        dquery = dfolded * tl.load(key_weight + column, mask=inside, other=0.0).to(tl.float32)
        dkey = dfolded * tl.load(query + column, mask=inside, other=0.0).to(tl.float32)
        tl.store(grad_key_weight + column, dkey.to(grad_key_weight.dtype.element_ty), mask=inside)
    tl.store(grad_query + column, dquery.to(grad_query.dtype.element_ty), mask=inside)
    if null_sums is not None:
        dnull = column_sums(null_sums, programs, width, column, inside, PROGRAMS, COLUMNS)
        tl.store(grad_null + column, dnull.to(grad_null.dtype.element_ty), mask=inside)
    if gate_sums is not None:
        only = tl.arange(0, COLUMNS)
        total = column_sums(gate_sums, programs, 1, only, only == 0, PROGRAMS, COLUMNS)
        tl.store(grad_gate + only, total.to(grad_gate.dtype.element_ty), mask=(only == 0) & (tl.program_id(0) == 0))
