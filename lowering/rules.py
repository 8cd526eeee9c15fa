"""Launch rules: how kernels are cut for a width, from (H, K, element size) alone, never from N or the token count.

Registers, bytes of stack (spills), shuffles and barriers are those of Triton 3.7.1 for sm_90, as "forward / backward /
backward with null source, residual and gate"; perf/aot.py reads them without a GPU. Nothing here was timed yet.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import product

RECTANGLE = 16  # sources a launch: 4 selects pick a pointer, and a site of 73 takes 5 launches
MULTIPROCESSORS = 132  # of an H100 or H200; elsewhere a backward's programs are merely a little uneven
LANES = 512  # of a program: its 16 warps leave each thread the 128 registers that 16 values a thread take
LIVE = 168  # registers for values: 56 in bfloat16, 227 / 178 / 255; at 64 (192) 252 / 214 / 112 bytes of stack
WASTE = 1.125  # padded / true width that costs nothing: K 72 as 5 x 16 is 1.11, 40 values a thread; 9 x 8 are 72 values
VALUES = 16  # a thread: 111 / 111 / 128 at d 2048; 32 are 167 / 183 / 193; 8 save no more than 102 / 104 / 126

TERMS = 4  # of a gradient that norm_backward sums as it reads them: query's, key's and value's, and one more
BACKWARD = 256  # values a thread times warps of norm_backward: 16 x 16 (d 8192) take 128 registers, 24 x 16 spill
LONGEST = (
    48  # values a thread of norm_backward beside sums of several heads: 254 registers; 56 spill, of one head 8 bytes
)
WIDEST = 64  # values a thread of mix_norm: 128 registers at d 32768; 96 (d 49152) spill
IN_FLIGHT = 160  # bytes that a thread of mix_norm waits for: at d 1280 four sources, 320, take 165 registers and not 98


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
    """The rule of the site kernels: the preferred cut, and as many sources at a time as the registers hold.

    A thread reads 16 bytes at a time and holds `values` elements of a source. 16 bfloat16 values and two sources at a
    time take at most 128 registers, so 16 warps are resident; 32 values and one source 199, so 10; 40 take 254, so 8.
    """
    vector = 16 // itemsize
    choices = product(powers_of_two(64), [columns for columns in powers_of_two(8192) if columns >= vector])
    fitting = [choice for choice in choices if choice[0] * choice[1] <= LANES * vector]
    tile_heads, columns = min(fitting, key=lambda choice: preference(heads, head_width, itemsize, *choice))
    lanes = tile_heads * columns // vector
    values = ceil_div(heads, tile_heads) * ceil_div(head_width, columns) * vector
    warps = max(lanes // 32, 1)
    return SiteRule(
        tokens=max(32 // lanes, 1),
        heads=tile_heads,
        columns=columns,
        warps=warps,
        group=2 if values <= VALUES and itemsize == 2 else 1,
        resident=max(16 if values <= 16 else 10 if values <= 32 else 8, warps),
    )


def pull_sources(heads: int, head_width: int, itemsize: int, left: int) -> int:
    """Sources that one launch of pull takes, of those left: 2 where their rows and float32 sums fit a thread, else 1.

    Registers on sm_90 in bfloat16, two sources: 16 values a thread 122, 40 values 255 and a spill; four of 16: 231.
    """
    values = values_of(site_rule(heads, head_width, itemsize), heads, head_width, itemsize)
    return min(2 if values <= 32 else 1, left)


def values_of(rule: SiteRule, heads: int, head_width: int, itemsize: int) -> int:
    """Elements of a row that a thread holds, 16 bytes of each unit."""
    return ceil_div(heads, rule.heads) * ceil_div(head_width, rule.columns) * (16 // itemsize)


def preference(heads: int, head_width: int, itemsize: int, tile_heads: int, columns: int) -> tuple[float, ...]:
    """What a cut is chosen by, the least first, one criterion after the other."""
    vector = 16 // itemsize
    groups, chunks = ceil_div(heads, tile_heads), ceil_div(head_width, columns)
    lanes, values = tile_heads * columns // vector, groups * chunks * vector
    return (
        max(values * (2 + itemsize / 2), LIVE),  # registers of mixture, query, and two rows in flight: no spills
        max(groups * tile_heads * chunks * columns / (heads * head_width), WASTE),  # idle lanes
        lanes > 32,  # a token in one warp: 0 / 1 / 1 barriers at d 1024, in two warps 17 / 13 / 25
        max(values, VALUES),  # registers, and so warps that hide each other's latency; see VALUES
        groups,  # of heads, whose dots are summed apart: 1 takes 42 / 70 / 141 shuffles at d 512, 4 take 65 / 85 / 152
        lanes,  # fewer values than VALUES a thread are half the work between two barriers
    )


@dataclass(frozen=True)
class MixRule:
    """How mix reads, in the cut of the site's rule; a program has one unit, 8 bfloat16 values a thread.

    Attributes:
        group: sources whose loads are in flight together: one site takes 44 to 64 registers with 4; beside the states
            of eight sites, 128 to 161 registers, there is room for 1.
    """

    group: int


def mix_rule(sites: int) -> MixRule:
    """The rule of mix at a number of sites."""
    return MixRule(group=4 if sites == 1 else 1)


@dataclass(frozen=True)
class NormRule:
    """How mix_norm and norm_backward read, in the cut of the site's rule; a program has whole rows.

    Attributes:
        group: rows whose loads are in flight together, 112 to 160 bytes a thread and 70 to 110 KB a multiprocessor.
            Registers of mix_norm in bfloat16 / float32: 79 / 64 at d 4096, 98 / 72 at d 1280, 80 / 64 at d 1024, 72 /
            64 at d 512, 128 / 96 at d 576 with 9 heads, 96 / 75 at d 7168.
        backward: whether norm_backward takes such rows. Registers with / without coupling in bfloat16: 128 / 80 at d
            4096, 255 / 165 at d 1280, 168 / 128 at d 1024, 96 / 80 at d 512, 254 / 166 at d 576, 255 / 223 at d 7168.
    """

    group: int
    backward: bool


def norm_rule(heads: int, head_width: int, itemsize: int) -> NormRule | None:
    """The rule of mix_norm, or None where the RMSNorm behind a site is left to Inductor.

    It saves a launch and the reading of a row, but its programs are as wide as a row, where mix has one for each 8
    values a thread. Whether that pays is not yet measured: the section norms of perf/gpu.py says, and this decides.
    """
    rule = site_rule(heads, head_width, itemsize)
    values = values_of(rule, heads, head_width, itemsize)
    if values > WIDEST:
        return None
    group = max(n for n in (1, 2, 4) if n == 1 or n * values * itemsize <= IN_FLIGHT)
    backward = values * rule.warps <= BACKWARD and (values <= LONGEST or heads == 1)
    return NormRule(group, backward)


@dataclass(frozen=True)
class SumRule:
    """Blocks of the second stage of the sums over tokens; 32 registers a thread.

    Attributes:
        programs: rows that are added at a time, 4 KiB in flight a program.
        columns: columns of a program: rows of 128 bytes, and 40 programs at d 1280.
        warps: warps of a program: each thread has 8 of the 32 x 32 values.
    """

    programs: int = 32
    columns: int = 32
    warps: int = 4


@dataclass(frozen=True)
class BlockRule:
    """Blocks of the kernels that are matrix products: score and query_gradient.

    Attributes:
        tokens: tokens of a block; twice the least that tensor cores take.
        columns: columns of a head at a time, 16 to 64; 128 take 255 registers in score.
        warps: warps of a program; each lane then reads 16 bytes of bfloat16 or more.
        stages: of score's pipeline; with masked columns 3 spill (K 72: 80 registers, 8 bytes of stack in Triton 3.6), 1
            takes 72.
        sites: sites at a time, the least that tensor cores take: more would be padding for most windows.
        shares: programs over the tokens in query_gradient: 1,280 in all at d 1280, 256 at d 512; each adds to its own
            [sites, d] float32, 12 MB of the second-level cache's 50 for 73 sites at d 1280.
    """

    tokens: int
    columns: int
    warps: int
    stages: int
    sites: int = 16
    shares: int = 32


@lru_cache
def block_rule(head_width: int) -> BlockRule:
    """The rule of the matrix products: the widest columns that waste little."""

    def waste(columns: int) -> tuple[float, int]:
        return max(ceil_div(head_width, columns) * columns / head_width, WASTE), -columns

    columns = min((16, 32, 64), key=waste)
    return BlockRule(tokens=32, columns=columns, warps=min(columns // 8, 4), stages=1 if head_width % columns else 3)


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def powers_of_two(largest: int) -> list[int]:
    """1, 2, 4, ... up to largest."""
    return [1 << n for n in range(largest.bit_length())]
