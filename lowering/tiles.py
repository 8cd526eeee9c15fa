"""What the kernels share: how a token's row is cut into tiles, and the arithmetic of the routing operator on them.

The d = H * K values of a token are cut into *units* of HEADS heads x COLUMNS columns, both powers of two, which H and K
need not be. A tile holds one unit of TOKENS tokens: [ROWS, COLUMNS], where ROWS = TOKENS * HEADS and
row = token * HEADS + head. A row lies in a few lanes of one warp where it can, so that a head's sum takes few shuffles
and no barrier.

Tuples hold what is larger than a tile: a row is a tuple of units; values per head are a tuple of [ROWS], one for each
group of HEADS heads; values per token are one [ROWS], the same for all heads of a token.
"""

from dataclasses import dataclass

import triton
import triton.language as tl

# Two values to nearest even at a time: one by one it is an instruction of an eighth of the rate (sm_90). And no pass
# drops what is written in assembly; float32 -> bfloat16 -> float32 looks superfluous.
PAIRED = tl.constexpr(not triton.knobs.runtime.interpret)
ROUND_BF16 = tl.constexpr("cvt.rn.bf16x2.f32 $0, $2, $1;")
ROUND_FP16 = tl.constexpr("cvt.rn.f16x2.f32 $0, $2, $1;")
SHORT = tl.constexpr(5)  # units of a row that fit in float32 beside the sums of a loop: 40 bfloat16 values a thread


@dataclass(frozen=True)
class Tile:
    """The constants of a cut, as kernels read them; see the module."""

    H: tl.constexpr
    K: tl.constexpr
    TOKENS: tl.constexpr
    HEADS: tl.constexpr
    COLUMNS: tl.constexpr
    ROWS: tl.constexpr
    WIDTH: tl.constexpr
    CHUNKS: tl.constexpr  # units that a head is cut into
    GROUPS: tl.constexpr  # groups of HEADS heads
    UNITS: tl.constexpr


@triton.constexpr_function
def tile_of(H, K, TOKENS, HEADS, COLUMNS):
    from mhar_compile.lowering.tiles import Tile  # generated code carries this function without its module

    chunks, groups = -(-K // COLUMNS), -(-H // HEADS)
    numbers = (H, K, TOKENS, HEADS, COLUMNS, TOKENS * HEADS, H * K, chunks, groups, chunks * groups)
    return Tile(*(number if triton.knobs.runtime.interpret else tl.constexpr(number) for number in numbers))


@triton.jit
def add_1(a, b):
    return a + b


@triton.jit
def add_2(a0, a1, b0, b1):
    return a0 + b0, a1 + b1


@triton.jit
def add_4(a0, a1, a2, a3, b0, b1, b2, b3):
    return a0 + b0, a1 + b1, a2 + b2, a3 + b3


@triton.jit
def sums(parts, axis: tl.constexpr):
    """The sums of 1, 2 or 4 tensors along an axis; together they pay one barrier where it crosses warps."""
    if len(parts) == 4:
        return tl.reduce(parts, axis, add_4)
    elif len(parts) == 2:
        return tl.reduce(parts, axis, add_2)
    else:
        return (tl.reduce(parts[0], axis, add_1),)


@triton.jit
def pick(values, index):
    """values[index] for an index known at run time; a power of two of values, halved by one bit after the other."""
    for bit in tl.static_range(5):
        if len(values) > 1:
            halved = ()
            for i in tl.static_range(len(values) // 2):
                halved = halved + (tl.where((index >> bit) % 2 == 1, values[2 * i + 1], values[2 * i]),)
            values = halved
    return values[0]


@triton.jit
def over_heads(parts, TILE: tl.constexpr):
    """Values per head [ROWS] summed over the heads of each token: values per token."""
    if TILE.HEADS == 1:
        return parts
    summed = ()
    if TILE.TOKENS == 1:
        totals = sums(parts, 0)
        for i in tl.static_range(len(parts)):
            summed = summed + (totals[i] + tl.zeros([TILE.ROWS], tl.float32),)
    else:
        for i in tl.static_range(len(parts)):
            totals = tl.sum(tl.reshape(parts[i], [TILE.TOKENS, TILE.HEADS]), 1)
            spread = tl.broadcast_to(totals[:, None], [TILE.TOKENS, TILE.HEADS])
            summed = summed + (tl.reshape(spread, [TILE.ROWS]),)
    return summed


@triton.jit
def tokens_of(tile, TILE: tl.constexpr):
    """The token of each row, int64, so that no product with a stride overflows."""
    first = (tl.zeros([TILE.ROWS], tl.int64) + tile) * TILE.TOKENS
    if TILE.TOKENS == 1:
        return first
    return first + tl.arange(0, TILE.ROWS) // TILE.HEADS


@triton.jit
def place_of(token, inner):
    """Where rows are looked up: the token, and which run of `inner` tokens it lies in where there are several."""
    if inner is None:
        return token, token
    else:
        return token, token // inner


@triton.jit
def start_of_row(place, stride, jump):
    """Where the tokens' rows begin: a stride for every token and, with several runs, a jump for every run."""
    start = place[0] * stride
    if jump is not None:
        start += place[1] * jump
    return start


@triton.jit
def pick_row(rows, index, place):
    """Pointer and tokens' starts of one of the rows, which are (pointers, strides, jumps)."""
    jump = None
    if rows[2] is not None:
        jump = pick(rows[2], index)
    return pick(rows[0], index), start_of_row(place, pick(rows[1], index), jump)


@triton.jit
def heads_of(group, TILE: tl.constexpr):
    """The head of each row."""
    first = tl.zeros([TILE.ROWS], tl.int32) + group * TILE.HEADS
    if TILE.HEADS == 1:
        return first
    return first + tl.arange(0, TILE.ROWS) % TILE.HEADS


@triton.jit
def mask_heads(live, group, TILE: tl.constexpr):
    """The rows that are live and whose head is below H."""
    if TILE.H % TILE.HEADS != 0:
        return live & (heads_of(group, TILE) < TILE.H)
    return live


@triton.jit
def start_of(unit, TILE: tl.constexpr):
    """Where a unit begins in a token's row: a constant, so that all units share their lanes' addresses."""
    return (unit // TILE.CHUNKS) * TILE.HEADS * TILE.K + (unit % TILE.CHUNKS) * TILE.COLUMNS


@triton.jit
def lanes_of(TILE: tl.constexpr):
    """Where a unit's values stand from its start: [ROWS, COLUMNS]."""
    return heads_of(0, TILE)[:, None] * TILE.K + tl.arange(0, TILE.COLUMNS)[None, :]


@triton.jit
def mask_unit(live, unit, TILE: tl.constexpr):
    """Live rows, heads below H and columns below K, broadcastable to [ROWS, COLUMNS]."""
    mask = mask_heads(live, unit // TILE.CHUNKS, TILE)[:, None]
    if TILE.K % TILE.COLUMNS != 0:
        column = (unit % TILE.CHUNKS) * TILE.COLUMNS + tl.arange(0, TILE.COLUMNS)
        mask = mask & (column[None, :] < TILE.K)
    return mask


@triton.jit
def load_unit(pointer, start, live, unit, TILE: tl.constexpr):
    """One unit of the tokens' rows, which begin at start [ROWS], in the stored dtype; zero where masked."""
    offsets = start[:, None] + lanes_of(TILE)
    return tl.load(pointer + start_of(unit, TILE) + offsets, mask=mask_unit(live, unit, TILE), other=0.0)


@triton.jit
def store_unit(pointer, value, token, live, unit, TILE: tl.constexpr):
    """Write one unit of the tokens' rows, which lie close together, rounded to the stored dtype."""
    offsets = token[:, None] * TILE.WIDTH + lanes_of(TILE)
    tl.store(
        pointer + start_of(unit, TILE) + offsets, value.to(pointer.dtype.element_ty), mask=mask_unit(live, unit, TILE)
    )


@triton.jit
def load_row(pointer, start, live, TILE: tl.constexpr):
    """The tokens' rows in the stored dtype; see load_unit."""
    row = ()
    for unit in tl.static_range(TILE.UNITS):
        row = row + (load_unit(pointer, start, live, unit, TILE),)
    return row


@triton.jit
def zero_row(TILE: tl.constexpr):
    row = ()
    for _ in tl.static_range(TILE.UNITS):
        row = row + (tl.zeros([TILE.ROWS, TILE.COLUMNS], tl.float32),)
    return row


@triton.jit
def to_float32(row):
    wide = ()
    for u in tl.static_range(len(row)):
        wide = wide + (row[u].to(tl.float32),)
    return wide


@triton.jit
def held(row, TILE: tl.constexpr):
    """A row as a loop keeps it: a short one in float32, a long one as it was stored, and ``widened`` at every use."""
    if TILE.UNITS <= SHORT:
        return to_float32(row)
    else:
        return row


@triton.jit
def widened(x):
    """x in float32, converted at this place: the compiler would do it ahead of the loop, in twice the registers."""
    if PAIRED and x.dtype != tl.float32:
        x = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], x.dtype, is_pure=False, pack=2)
    return x.to(tl.float32)


@triton.jit
def fold_unit(query, key_weight, token, live, unit, TILE: tl.constexpr):
    """One unit of the query times the key weight, in float32."""
    part = load_unit(query, token * 0, live, unit, TILE).to(tl.float32)
    if key_weight is not None:
        part *= load_unit(key_weight, token * 0, live, unit, TILE).to(tl.float32)
    return part


@triton.jit
def fold(query, key_weight, token, live, TILE: tl.constexpr):
    """The query times the key weight, in float32; the same for every token."""
    folded = ()
    for u in tl.static_range(TILE.UNITS):
        folded = folded + (fold_unit(query, key_weight, token, live, u, TILE),)
    return folded


@triton.jit
def load_heads(pointer, token, live, TILE: tl.constexpr):
    """Values of a tensor [tokens, H], zero where masked."""
    values = ()
    for group in tl.static_range(TILE.GROUPS):
        at = pointer + token * TILE.H + heads_of(group, TILE)
        values = values + (tl.load(at, mask=mask_heads(live, group, TILE), other=0.0),)
    return values


@triton.jit
def store_heads(pointer, values, token, live, TILE: tl.constexpr):
    """Write values per head into a tensor [tokens, H]."""
    for group in tl.static_range(TILE.GROUPS):
        at = pointer + token * TILE.H + heads_of(group, TILE)
        tl.store(at, values[group], mask=mask_heads(live, group, TILE))


@triton.jit
def zero_heads(TILE: tl.constexpr):
    values = ()
    for _ in tl.static_range(TILE.GROUPS):
        values = values + (tl.zeros([TILE.ROWS], tl.float32),)
    return values


@triton.jit
def rounded(value, like):
    """float32 rounded once to the dtype of another tensor."""
    if PAIRED and like.dtype == tl.bfloat16:
        return tl.inline_asm_elementwise(ROUND_BF16, "=r,r,r", [value], like.dtype, is_pure=True, pack=2)
    if PAIRED and like.dtype == tl.float16:
        return tl.inline_asm_elementwise(ROUND_FP16, "=r,r,r", [value], like.dtype, is_pure=True, pack=2)
    return value.to(like.dtype)


@triton.jit
def rounded_key(x, rstd):
    """The key before its weight, rounded once to the sources' dtype: [rows, columns] from x and one rstd a row."""
    return rounded(x.to(tl.float32) * rstd[:, None], x)


@triton.jit
def store_sum(pointer, value, row, unit, TILE: tl.constexpr):
    """Write one unit, summed over the tile's tokens, into a row of pointer [rows, d]."""
    first = tl.arange(0, TILE.ROWS) < TILE.HEADS
    if TILE.TOKENS > 1:
        by_token = tl.reshape(value, [TILE.TOKENS, TILE.HEADS, TILE.COLUMNS])
        value = tl.broadcast_to(tl.sum(by_token, 0)[None], [TILE.TOKENS, TILE.HEADS, TILE.COLUMNS])
        value = tl.reshape(value, [TILE.ROWS, TILE.COLUMNS])
    rows = tl.zeros([TILE.ROWS], tl.int64) + row
    store_unit(pointer, value, rows, first, unit, TILE)
