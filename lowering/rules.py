"""Launch rules: how kernels are cut for a width, from (H, K, element size) alone, never from N or the token count."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from math import log2

RECTANGLE = 16  # sources a launch: 4 selects pick a pointer, and a site of 73 takes 5 launches
MULTIPROCESSORS = 132  # of an H100 or H200; elsewhere a backward's programs are merely a little uneven
WASTE = 1.125  # padded / true width that costs nothing: K 72 as five times 16 is 1.11


@dataclass(frozen=True)
class SiteRule:
    """How a row of d = H K values lies in a tile [tokens * heads, columns], and how many warps are at work.

    Attributes:
        tokens: tokens in a tile: as many as share a warp.
        heads: heads in a tile, a power of two.
        columns: columns of a head in a tile, a power of two.
        warps: warps of a program.
        group: sources whose loads are in flight together and whose sums share a barrier.
        resident: warps that a multiprocessor holds at once; its 65,536 registers leave each 2048 / resident a thread.
    """

    tokens: int
    heads: int
    columns: int
    warps: int
    group: int
    resident: int

    @property
    def programs(self) -> int:
        """Programs of a backward at most: all that are resident. Each leaves a row of query-side sums."""
        return MULTIPROCESSORS * max(self.resident // self.warps, 1)

    @property
    def registers(self) -> int:
        """Registers that a thread may use, in the hardware's units of 8, at most 255."""
        return min(2048 // self.resident // 8 * 8, 255)


@lru_cache
def site_rule(heads: int, head_width: int, itemsize: int) -> SiteRule:
    """The rule of the site kernels: the cut of least cost, and as many sources at a time as the registers hold.

    A thread reads 16 bytes at a time and holds `values` elements of a source. Registers on sm_90 in bfloat16, forward /
    backward / backward with a null source: 16 values and two sources at a time 111 / 113 / 127; 32 values, one source
    160 / 181 / 193; 40 values 190 / 168 / 241; 56 values 227 / 187 / -. None of these spills.
    """
    vector = 16 // itemsize
    choices = product(powers_of_two(64), [columns for columns in powers_of_two(8192) if columns >= vector])
    tile_heads, columns = min(choices, key=lambda choice: cost(heads, head_width, choice[0], choice[1], vector))
    lanes = tile_heads * columns // vector
    values = ceil_div(heads, tile_heads) * ceil_div(head_width, columns) * vector
    warps = max(lanes // 32, 1)
    return SiteRule(
        tokens=max(32 // lanes, 1),
        heads=tile_heads,
        columns=columns,
        warps=warps,
        group=2 if values <= 16 and itemsize == 2 else 1,
        resident=max(16 if values <= 16 else 10 if values <= 32 else 8, warps),
    )


def pull_sources(heads: int, head_width: int, itemsize: int, left: int) -> int:
    """Sources that one launch of pull takes, of those left: 2 where their rows and float32 sums fit a thread, else 1.

    Registers on sm_90 in bfloat16, two sources: 16 values a thread 122, 40 values 255 and a spill; four of 16: 231.
    """
    rule = site_rule(heads, head_width, itemsize)
    values = ceil_div(heads, rule.heads) * ceil_div(head_width, rule.columns) * (16 // itemsize)
    return min(2 if values <= 32 else 1, left)


@dataclass(frozen=True)
class BlockRule:
    """Blocks of the kernels that are matrix products: score and query_gradient.

    Attributes:
        tokens: tokens of a block; twice the least that tensor cores take.
        columns: columns of a head at a time, 16 to 64; 128 take 255 registers in score.
        warps: warps of a program; each lane then reads 16 bytes of bfloat16 or more.
        sites: sites at a time, the least that tensor cores take: more would be padding for most windows.
        shares: programs over the tokens in query_gradient; each leaves [sites, d] float32.
    """

    tokens: int
    columns: int
    warps: int
    sites: int = 16
    shares: int = 32


@lru_cache
def block_rule(head_width: int) -> BlockRule:
    """The rule of the matrix products: the widest columns that waste little."""

    def waste(columns: int) -> tuple[float, int]:
        return max(ceil_div(head_width, columns) * columns / head_width, WASTE), -columns

    columns = min((16, 32, 64), key=waste)
    return BlockRule(tokens=32, columns=columns, warps=min(columns // 8, 4))


def cost(heads: int, head_width: int, tile_heads: int, columns: int, vector: int) -> float:
    """What a cut costs, in doublings of the work: idle lanes, too few or too many values a thread, barriers."""
    groups, chunks = ceil_div(heads, tile_heads), ceil_div(head_width, columns)
    lanes, values = tile_heads * columns // vector, groups * chunks * vector
    idle = groups * tile_heads * chunks * columns / (heads * head_width)
    sharing = max(32 / lanes, 1) if tile_heads > 1 else 1  # tokens of a warp, whose sums over heads are taken in turn
    crossing = max(columns / vector / 32, 1)  # warps that a row's sum crosses
    return (
        16 * log2(max(idle / WASTE, 1))
        + abs(log2(values / 20))
        + 6 * log2(max(values / 64, 1))  # more spill
        + (lanes > 32) / 2
        + log2(crossing) / 2
        + log2(groups) / 4
        + log2(sharing) / 4
        + 64 * (lanes > 512)  # a program of more than 16 warps
    )


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def powers_of_two(largest: int) -> list[int]:
    """1, 2, 4, ... up to largest."""
    return [1 << n for n in range(largest.bit_length())]
