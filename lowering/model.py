"""The traffic-and-liveness model: what every launch moves, and which rows are alive when.

A row is one source: tokens x d elements. A head row is tokens x H float32. Time in the backward is counted in launches.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate, pairwise


@dataclass(frozen=True)
class Costs:
    """What a launch costs beside its bytes at copy speed: slowdowns, and the bytes that could be copied meanwhile.

    Measured on one H200 at 8192 tokens, d 4096, H 8, 9 sources, bfloat16 (copy 4.21 TB/s): a site's fused forward 304
    us for 10 rows, its backward 706 us for 19, softmax and weighted sum alone 190 us for 10, scoring a source at 9
    sites 47 us for 1, pulling a source from 9 sites 287 us for 11. Those of small, coupling and add are assumed.
    """

    launch: int = 20_000_000  # 5 us at 4 TB/s
    route: float = 1.9
    route_backward: float = 2.3
    add: float = 1.0
    score: float = 2.9
    small: float = 1.0
    mix: float = 1.2
    pull: float = 1.6
    coupling: float = 1.2


@dataclass(frozen=True)
class Shape:
    """The sizes of one site's tensors, in bytes."""

    row: int
    head_row: int
    wide_row: int
    token: int  # one float32 a token
    query: int  # the gradient of one folded query

    @property
    def residue(self) -> int:
        return self.row // 2


@dataclass(frozen=True)
class Launch:
    """One kernel: its kind, a field of Costs, and the bytes it reads and writes."""

    kind: str
    bytes: int


def route(shape: Shape, sources: int, extra: int) -> Launch:
    """A site's forward; ``extra`` counts the residual."""
    return Launch("route", (sources + extra + 1) * shape.row + (sources + 1) * shape.head_row)


def route_backward(shape: Shape, sources: int) -> Launch:
    return Launch("route_backward", (2 * sources + 1) * shape.row + (sources + 1) * shape.head_row)


def add(shape: Shape) -> Launch:
    return Launch("add", 3 * shape.row)


def score(shape: Shape, sites: int) -> Launch:
    return Launch("score", shape.row + sites * shape.head_row)


def part(shape: Shape, sites: int) -> Launch:
    """The logits of one source copied into parts; Inductor makes one launch of it."""
    return Launch("small", 2 * sites * shape.head_row)


def fold(shape: Shape, sites: int) -> Launch:
    """A window's folded queries, or their gradients taken apart."""
    return Launch("small", 3 * sites * shape.query)


def mix(shape: Shape, sources: int, extra: int, carried: bool, keep: bool) -> Launch:
    rows = (sources + extra + 1) * shape.row + (sources + 1) * shape.head_row
    return Launch("mix", rows + carried * (shape.wide_row + shape.head_row) + keep * shape.residue)


def mix_tile(shape: Shape, sources: int, sites: int) -> Launch:
    return Launch("mix", sources * shape.row + sites * (shape.wide_row + (sources + 1) * shape.head_row))


def coupling(shape: Shape, sources: int, keep: bool) -> Launch:
    """S of one site, from its output (no sources) or from its sources."""
    if sources:
        return Launch("coupling", (sources + 1) * shape.row + (sources + 2) * shape.head_row)
    return Launch("coupling", 2 * shape.row + shape.head_row + keep * shape.residue)


def pull(shape: Shape, sources: int, sites: int, carried: int, results: int) -> Launch:
    """``carried`` and ``results`` are the bytes of the gradients read and written."""
    rows = (sources + sites) * shape.row + (sources + 2) * sites * shape.head_row
    return Launch("pull", rows + carried + results)


def total(launches: Iterable[Launch]) -> int:
    """Bytes that launches move."""
    return sum(launch.bytes for launch in launches)


def time(launches: Iterable[Launch], costs: Costs) -> float:
    """What launches cost, in bytes at copy speed."""
    return float(sum(costs.launch + getattr(costs, launch.kind) * launch.bytes for launch in launches))


class Timeline:
    """Bytes alive over the launches of a backward: before the first site, then during each site's and after them."""

    def __init__(self) -> None:
        self.now = 1  # launch 0 stands for all that comes before the first site
        self.starts = [0]
        self.births: list[tuple[float, int]] = []

    def site(self) -> None:
        """The next site's gradient arrives."""
        self.starts.append(self.now)

    def rest(self) -> None:
        """The site's launches are done, and the rest of the graph goes on."""
        self.starts.append(self.now)
        self.now += 1

    def launch(self) -> int:
        """One launch; its number."""
        self.now += 1
        return self.now - 1

    def alive(self, first: int, last: float, size: int) -> None:
        """A tensor that stands from one launch to another, both included; to infinity: to the end."""
        self.births += [(first, size), (last + 1, -size)]

    def peaks(self) -> list[int]:
        """The most bytes alive before the sites, then at each and after each."""
        change = [0] * (self.now + 1)
        for at, size in self.births:
            change[int(min(at, self.now))] += size
        level = list(accumulate(change))
        bounds = [*self.starts, self.now]
        return [max(level[a:b]) for a, b in pairwise(bounds)]
