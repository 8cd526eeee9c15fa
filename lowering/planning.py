"""Decides what to rewrite: families of sites, runs to score, windows and tiles of pulls, all by the model."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import pairwise, product
from typing import Literal

import torch
from torch.fx import Node

from . import model
from .liveness import Buffer, sizes
from .model import Costs, Launch, Shape, Timeline
from .partition import Backward
from .pinning import region
from .reading import ALIASES, VIEWS, Site, is_sum, only_user, sum_of
from .versions import is_recomputed, size_of, symbol

PEAK_WOULD_RISE = "the backward's peak memory would rise"
PULLED = 2  # sources that share a read of a site's gradient: a kernel has registers for no more
GAP = 2  # unread rows that a run of scored sites may hold, for each row that is read


@dataclass(frozen=True)
class Settings:
    """What a user may override.

    Attributes:
        rewrite: "auto" rewrites where the model predicts a gain and no rise of the backward's peak memory, "always" and
            "never" whatever it predicts.
        window: sites a window of pulls takes in; None lets the model choose.
        tile: sources and sites that share a read; 1 switches tiling off, None lets the model choose.
        slack: by what fraction the backward's peak memory may rise where that saves traffic.
    """

    rewrite: Literal["auto", "always", "never"] = "auto"
    window: int | None = None
    tile: int | None = None
    slack: float = 0.0

    def __post_init__(self) -> None:
        if self.rewrite not in ("auto", "always", "never"):
            raise ValueError(f'rewrite must be "auto", "always" or "never", got {self.rewrite!r}')
        for name, value in (("window", self.window), ("tile", self.tile)):
            if value is not None and (not isinstance(value, int) or value < 1):
                raise ValueError(f"{name} must be a positive int or None, got {value!r}")
        if not self.slack >= 0:
            raise ValueError(f"slack must be a fraction >= 0, got {self.slack!r}")


@dataclass(eq=False)
class Run:
    """A source and the consecutive sites it is scored at in one launch."""

    source: Node
    first: int
    count: int


@dataclass(eq=False)
class Sum:
    """Gradients of one source that are added up: what one chain of pulls can replace."""

    run: Run
    entries: list[tuple[int, Node | None]]  # site and gradient, in the order of the backward

    @property
    def sites(self) -> list[int]:
        return [site for site, _ in self.entries]


@dataclass(eq=False)
class Pull:
    """A rectangle of sources x sites, pulled when the gradient of its last site has arrived."""

    sums: list[Sum]
    sites: list[int]
    carried: list[Pull]
    wide: list[bool]  # the gradient is carried on in float32
    last: list[bool]  # the gradient is complete

    @property
    def span(self) -> range:
        """The sites from the first to the last, in the order of the forward."""
        return range(min(self.sites), max(self.sites) + 1)


@dataclass(eq=False)
class Tile:
    """Consecutive sites whose mixture over older sources is computed at once."""

    sites: list[int]
    sources: list[Node]


@dataclass(eq=False)
class Family:
    """Sites that share heads, width, dtype, device and eps; a site's number is its place in ``sites``."""

    sites: list[Site]
    runs: dict[Node, list[Run]]
    sums: list[Sum]
    order: list[int]  # the sites that have a backward, as their gradients arrive
    shape: Shape
    tiles: list[Tile] = field(default_factory=list)
    pulls: list[Pull] = field(default_factory=list)
    held: set[int] = field(default_factory=set)  # sites whose output the backward holds whatever the plan
    from_output: set[int] = field(default_factory=set)  # sites whose S is formed from the output
    rescored: bool = False  # checkpointed sites have their logits computed again
    scored_twice: bool = False  # pulls have their sources scored again; logits are saved for couplings alone
    windows: list[range] = field(default_factory=list)  # of sites, where what each holds is to be freed at its end

    def run_of(self, source: Node, site: int) -> Run:
        return next(run for run in self.runs[source] if 0 <= site - run.first < run.count)

    def window_of(self, site: int) -> range:
        """The sites whose backwards share a window with this one's; all, where windows free nothing."""
        return next((window for window in self.windows if site in window), range(len(self.sites)))

    @property
    def early(self) -> int:
        """The first site from which on every S is formed from the output."""
        return 1 + max(set(self.order) - self.from_output, default=-1)

    def part_of(self, run: Run, site: int) -> range:
        """The sites of a run whose logits are in one tensor with this one's."""
        window = self.window_of(site)
        if self.scored_twice and site < self.early:
            window = range(self.early)
        return range(max(run.first, window.start), min(run.first + run.count, window.stop))

    def tile_of(self, site: int) -> Tile | None:
        return next((tile for tile in self.tiles if site in tile.sites), None)

    def keeps_residue(self, site: int) -> bool:
        return site in self.from_output and self.sites[site].value.dtype in (torch.bfloat16, torch.float16)

    def saves(self, site: int) -> bool:
        """Whether a site's results are saved for the backward, not recomputed."""
        return not is_recomputed(self.sites[site].node)

    def saves_logits(self, run: Run) -> bool:
        return not self.rescored or any(self.saves(run.first + n) for n in range(run.count))


@dataclass
class Plan:
    """A family, what to do with it, and what the model says of it."""

    family: Family
    before: list[Launch]
    after: list[Launch]
    peak_before: int  # bytes of the sites' tensors
    peak_after: int
    held: int  # bytes at the peak of the whole backward


@dataclass(frozen=True)
class Room:
    """What a backward holds beside the sites' tensors, before the sites of ``order``, at each and after each."""

    beside: list[int]
    limit: float  # bytes at the peak of the whole backward


def families(sites: list[Site]) -> list[Family]:
    """The sites by family."""
    found: dict[tuple[object, ...], list[Site]] = {}
    for site in sites:
        value, eps = site.value, site.eps
        width = size_of(value.shape[-1])
        key = (site.heads, width, value.dtype, value.device, eps if isinstance(eps, Node) else float(eps))
        found.setdefault(key, []).append(site)
    return [family(members) for members in found.values()]


def family(sites: list[Site]) -> Family:
    readers: dict[Node, list[int]] = {}
    for number, site in enumerate(sites):
        for source in site.sources:
            readers.setdefault(source, []).append(number)
    runs = {source: list(runs_of(source, numbers)) for source, numbers in readers.items()}
    order = sorted((n for n, site in enumerate(sites) if site.backward is not None), key=lambda n: sites[n].backward)  # type: ignore[arg-type,return-value]
    value = max((site.value for site in sites), key=lambda value: tokens_of(value))
    tokens, width = tokens_of(value), size_of(value.shape[-1])
    wide = 8 if value.dtype == torch.float64 else 4
    shape = Shape(
        row=tokens * width * value.element_size(),
        head_row=tokens * sites[0].heads * wide,
        wide_row=tokens * width * wide,
        token=tokens * wide,
        query=width * wide,
    )
    held = {n for n in order if has_saved_output(sites[n])}
    result = Family(sites, runs, [], order, shape, held=held)
    result.sums = sums_of(result)
    return result


def tensors_of(family: Family) -> set[Buffer]:
    """The tensors that the timelines count: finished gradients are the rest of the graph's."""
    found: set[Buffer] = set()
    for site in family.sites:
        found |= {(site.node, (n,)) for n in range(1, 4)}
        for node in (site.grad_out, site.backward, *site.sources):
            if node is not None:
                found |= {(node, path) for path, _ in sizes(node.meta["val"])}
    for total in family.sums:
        for _, grad in total.entries:
            if grad is not None:
                end, entry = sum_of(grad)
                node = only_user(entry)
                while node is not None and node is not end:
                    found.add((node, ()))
                    node = only_user(node)
    return found


def tokens_of(value: torch.Tensor) -> int:
    count = 1
    for size in value.shape[:-1]:
        count *= size_of(size)
    return count


def runs_of(source: Node, sites: list[int]) -> Iterator[Run]:
    """Consecutive sites, small gaps included."""
    first, last, read = sites[0], sites[0], 1
    for site in sites[1:]:
        if site - last - 1 > GAP * read:
            yield Run(source, first, last - first + 1)
            first, read = site, 0
        last, read = site, read + 1
    yield Run(source, first, last - first + 1)


def sums_of(family: Family) -> list[Sum]:
    """Every gradient that a backward sends, by source and by the chain of additions it enters."""
    sums: dict[tuple[Run, Node | None], Sum] = {}
    for number in family.order:
        site = family.sites[number]
        for source, grad in zip(site.sources, site.grads, strict=True):
            if grad is None and not {"query", "key_weight"} & site.parameter_grads.keys():
                continue
            run = family.run_of(source, number)
            end = None if grad is None else end_of(grad)
            sums.setdefault((run, end), Sum(run, [])).entries.append((number, grad))
    return list(sums.values())


def end_of(grad: Node) -> Node:
    """Names the chain of additions that a gradient enters; a gradient that enters none names itself."""
    end, entry = sum_of(grad)
    user = only_user(entry)
    return end if user is not None and is_sum(user) else grad


def plan(family: Family, settings: Settings, costs: Costs, backward: Backward, aim: float) -> Plan | str:
    """The cheapest plan that is to hold at most ``aim`` times the backward's peak, or why there is none."""
    before = [*forward_before(family), *backward_before(family)]
    always = settings.rewrite == "always"
    room = Room([0] * (2 * len(family.order) + 1), math.inf)
    if not always:
        found = cheapest(family, settings, costs, before, room)
        if found is None or model.time(found.after, costs) >= model.time(before, costs):
            return "the model predicts no gain"
    if family.order:
        arrivals = [node for n in family.order if (node := family.sites[n].backward) is not None]
        beside, whole = (backward.beside(arrivals, some) for some in (tensors_of(family), ()))
        # The sum of two highest levels is too high where they do not fall together: the graph as it is knows better.
        known = [total - mine for total, mine in zip(whole, timeline_before(family), strict=True)]
        room = Room([min(pair) for pair in zip(beside, known, strict=True)], backward.peak * aim)
    found = cheapest(family, settings, costs, before, room)
    if found is None and always:
        found = cheapest(family, settings, costs, before, replace(room, limit=math.inf))
    if found is None:
        return PEAK_WOULD_RISE
    if not always and model.time(found.after, costs) >= model.time(before, costs):
        return "the model predicts no gain"
    return found


def cheapest(family: Family, settings: Settings, costs: Costs, before: list[Launch], room: Room) -> Plan | None:
    """The cheapest plan that fits. Windows only add to a plan's cost: none is tried that could not be the cheapest."""

    def cost(plan: Family) -> float:
        return model.time([*forward_after(plan), *backward_after(plan)], costs)

    best: Family | None = None
    for bound, _, choice, tile, frees in sorted(bounded(family, settings, cost), key=lambda item: item[:2]):
        if best is not None and bound >= cost(best):
            break
        found = windowed(choice, settings.window, tile, frees, room)
        if found is not None and (best is None or cost(found) < cost(best)):
            best = found
    if best is None:
        return None
    alive = timeline_after(best)
    total = max(a + b for a, b in zip(alive, room.beside, strict=True))
    after = [*forward_after(best), *backward_after(best)]
    return Plan(best, before, after, max(timeline_before(family)), max(alive), total)


def bounded(
    family: Family, settings: Settings, cost: Callable[[Family], float]
) -> Iterator[tuple[float, int, Family, int, bool]]:
    """Every choice: its cost without windows, a number, the choice itself, its tile and whether its windows free."""
    recomputed = any(not family.saves(n) for n in family.order)
    sizes = [settings.tile] if settings.tile else [8, 4, 1]
    switch = [False, True][: 1 + recomputed]
    for n, (tile, outputs, rescored, frees) in enumerate(product(sizes, outputs_of(family), switch, switch)):
        tiles = list(tiles_of(family, tile))
        if not (frees and tiles):
            choice = replace(family, tiles=tiles, from_output=outputs, rescored=rescored)
            for twice in switch_of(choice):
                choice = replace(choice, scored_twice=twice)
                yield cost(replace(choice, pulls=pulls_of(choice, [0], min(tile, PULLED)))), n, choice, tile, frees


def switch_of(family: Family) -> list[bool]:
    """Whether pulls may have their sources scored again: where little else in the backward reads logits."""
    able = family.early <= len(family.sites) // 2 and all(family.saves(n) for n in family.order)
    return [False, True] if able and family.order else [False]


def outputs_of(family: Family) -> list[set[int]]:
    """Which sites may form S from their outputs: all that can, those of them with most sources, those held, none."""
    able = [n for n in family.order if n in family.held or may_be_held(family.sites[n])]
    able.sort(key=lambda n: len(family.sites[n].sources))
    most = [set(able[len(able) // part :]) for part in (8, 4, 2)]
    found: list[set[int]] = []
    for choice in (set(able), *most, family.held | most[-1], family.held, set()):
        if choice not in found:
            found.append(choice)
    return found


def windowed(family: Family, window: int | None, tile: int, frees: bool, room: Room) -> Family | None:
    """The plan with as few windows as fit: one ends before, or with, the first site at which too much would be held.

    With ``frees`` each window has logits, folded queries and gradients of queries of its own, freed at its end.
    """
    starts = list(range(0, len(family.order), window)) if window else [0]
    while True:
        family = replace(family, pulls=pulls_of(family, starts, min(tile, PULLED)))
        if frees:
            family.windows = windows_of(family, starts)
        held = [a + b for a, b in zip(timeline_after(family), room.beside, strict=True)]
        over = next((n for n, size in enumerate(held) if size > room.limit), None)
        if over is None:
            return family
        place = (over - 1) // 2  # of the site at which, or after which, too much is held
        ends = [end for end in (place, place + 1) if end not in starts and end < len(family.order)]
        if window or over == 0 or not ends:
            return None
        starts.append(ends[0])


def may_be_held(site: Site) -> bool:
    """Whether the output is the mixture, and not in the hands of the caller, who may write into it."""
    return site.plain and site.out is not None and not is_returned(site.out)


def is_returned(node: Node) -> bool:
    return any(user.op == "output" or (user.target in ALIASES | VIEWS and is_returned(user)) for user in node.users)


def has_saved_output(site: Site) -> bool:
    """Whether the output is the mixture, and the backward holds it for something else already."""
    if not site.plain or site.out is None:
        return False
    stack, seen = list(site.out.users), 0
    while stack and seen < 64:
        user, seen = stack.pop(), seen + 1
        if user.meta.get("partitioner_tag") == "is_backward":
            return True
        if getattr(user.target, "__name__", "").split(".")[0] in ("alias", "view", "convert_element_type", "_to_copy"):
            stack.extend(user.users)
    return False


def tiles_of(family: Family, size: int) -> Iterator[Tile]:
    """Groups of consecutive sites, while their carried mixtures fit in what later sites will hold anyway."""
    first = 0
    while size > 1 and first < len(family.sites):
        tile = next((tile for k in (size, size // 2, size // 4) if (tile := tile_at(family, first, k))), None)
        if tile:
            yield tile
        first += len(tile.sites) if tile else 1


def tile_at(family: Family, first: int, count: int) -> Tile | None:
    sites = family.sites[first : first + count]
    if count < 2 or len(sites) < count or any(is_recomputed(site.node) for site in sites):
        return None
    if any([symbol(s) for s in site.value.shape] != [symbol(s) for s in sites[0].value.shape] for site in sites):
        return None
    counts = [Counter(site.sources) for site in sites]
    common = [source for source in counts[0] if all(counter[source] == 1 for counter in counts)]
    ratio = family.shape.wide_row / family.shape.row
    later = family.sites[first:]
    room = len(later) if sites[0].backward else max(len(site.sources) for site in later) - len(sites[0].sources)
    if len(common) * (count - 1) <= 2 * ratio * count or ratio * count > room:
        return None
    return Tile(list(range(first, first + count)), common)


def pulls_of(family: Family, starts: list[int], tile: int) -> list[Pull]:
    """All pulls, in the order of their last sites' gradients. Windows start at these places of ``family.order``."""
    place = {site: at for at, site in enumerate(family.order)}
    windows: dict[int, list[tuple[Sum, list[int]]]] = {}
    for total in family.sums:
        parts: dict[int, list[int]] = {}
        for site in total.sites:
            parts.setdefault(sum(start <= place[site] for start in starts), []).append(site)
        for number, sites in parts.items():
            windows.setdefault(number, []).append((total, sites))
    pulls: list[Pull] = []
    carried: dict[Sum, Pull] = {}
    for number in sorted(windows):
        parts_here = windows[number]
        while parts_here:
            parts_here.sort(key=lambda part: place[part[1][-1]])
            rectangle, parts_here = take(parts_here, carried, tile, family.shape)
            pulls.append(rectangle)
            carried.update((total, rectangle) for total in rectangle.sums)
    return sorted(pulls, key=lambda pull: place[pull.sites[-1]])


def windows_of(family: Family, starts: list[int]) -> list[range]:
    """The sites of each window; none where there is one, or where windows do not follow each other in the forward."""
    groups = sorted((family.order[a:b] for a, b in pairwise([*sorted(starts), len(family.order)])), key=min)
    if len(groups) < 2 or any(max(a) > min(b) for a, b in pairwise(groups)):
        return []
    return [range(a, b) for a, b in pairwise([0, *(min(group) for group in groups[1:]), len(family.sites)])]


def take(
    parts: list[tuple[Sum, list[int]]], carried: dict[Sum, Pull], tile: int, shape: Shape
) -> tuple[Pull, list[tuple[Sum, list[int]]]]:
    """The next rectangle: the source that completes first, and others that share its sites; and what is left."""
    (head, sites), *others = parts
    worth = 2 * shape.wide_row < len(sites) * shape.row  # carrying a gradient on costs a write and a read of it
    members, rest, left = [head], [], []
    for total, mine in others:
        joins = len(members) < tile and (total in carried) == (head in carried) and mine[: len(sites)] == sites
        if joins and (len(mine) == len(sites) or worth):
            members.append(total)
            if len(mine) > len(sites):
                rest.append((total, mine[len(sites) :]))
        else:
            left.append((total, mine))
    unfinished = {total for total, _ in rest}
    done = [total not in unfinished and sites[-1] == total.sites[-1] for total in members]
    before = [carried[total] for total in members] if head in carried else []
    pull = Pull(members, sites, before, [total in unfinished for total in members], done)
    return pull, rest + left


def forward_before(family: Family) -> Iterator[Launch]:
    for site in family.sites:
        yield model.route(family.shape, len(site.sources), site.residual is not None)


def backward_before(family: Family) -> Iterator[Launch]:
    for number in family.order:
        yield model.route_backward(family.shape, len(family.sites[number].sources))
    for _ in range(adds_of(family)):
        yield model.add(family.shape)


def adds_of(family: Family) -> int:
    """Additions of gradients that the pulls make needless."""
    return sum(len(total.entries) - 1 for total in family.sums if total.entries[0][1] is not None)


def forward_after(family: Family) -> Iterator[Launch]:
    shape = family.shape
    for runs in family.runs.values():
        yield from (model.score(shape, run.count) for run in runs)
        yield from (model.part(shape, run.count) for run in runs if len(family.part_of(run, run.first)) < run.count)
    for tile in family.tiles:
        yield model.mix_tile(shape, len(tile.sources), len(tile.sites))
    for number, site in enumerate(family.sites):
        tile_here = family.tile_of(number)
        count = len(site.sources) - (len(tile_here.sources) if tile_here else 0)
        yield model.mix(shape, count, site.residual is not None, tile_here is not None, family.keeps_residue(number))


def backward_after(family: Family) -> Iterator[Launch]:
    shape = family.shape
    for window in family.windows:
        yield from (model.fold(shape, len(window)) for _ in ("fold", "unfold"))
    for number in family.order:
        count = 0 if number in family.from_output else len(family.sites[number].sources)
        yield model.coupling(shape, count, family.keeps_residue(number))
    for pull in family.pulls:
        yield from (model.score(shape, len(pull.span)) for _ in pull.sums if family.scored_twice)
        results = sum(shape.wide_row if wide else shape.row for wide in pull.wide)
        carried = sum(
            gradient_bytes(shape, before, total) for total, before in zip(pull.sums, pull.carried, strict=False)
        )
        yield model.pull(shape, len(pull.sums), len(pull.sites), carried, results)


def timeline_before(family: Family) -> list[int]:
    """Bytes of the sites' tensors alive in the backward of the graph as it stands."""
    line, shape, arrived = Timeline(), family.shape, {}
    for number in family.order:
        count = len(family.sites[number].sources)
        line.site()
        now = arrived[number] = line.launch()
        line.alive(held_from(family, number, arrived), now, (count + 1) * shape.head_row + count * shape.token)
        line.alive(now, now, (count + 1) * shape.row)  # its results and the gradient it reads
        line.rest()
    for total in family.sums:
        if total.entries[0][1] is not None and len(total.entries) > 1:
            line.alive(arrived[total.sites[0]], arrived[total.sites[-1]], shape.row)
    keep_sources(line, family, arrived, [(total.run, arrived[total.sites[-1]]) for total in family.sums])
    return line.peaks()


def timeline_after(family: Family) -> list[int]:
    """Bytes of the sites' tensors alive in the backward of a plan."""
    line, shape = Timeline(), family.shape
    arrived: dict[int, int] = {}
    site_ends: dict[int, int] = {}
    run_ends: dict[Run, int] = {}
    part_ends: dict[tuple[Run, range], int] = {}
    window_ends: dict[range, int] = {}
    made: dict[tuple[Pull, Sum], int] = {}
    partials: list[tuple[int, int, range]] = []
    pulls = iter([*family.pulls, None])
    pull = next(pulls)
    for number in family.order:
        line.site()
        now = arrived[number] = site_ends[number] = line.launch()
        line.alive(held_from(family, number, arrived), now, kept_bytes(family, number))
        while pull is not None and pull.sites[-1] == number:
            now = line.launch()
            site_ends.update((site, now) for site in pull.sites)
            run_ends.update((total.run, now) for total in pull.sums)
            part_ends.update(((total.run, family.part_of(total.run, pull.sites[0])), now) for total in pull.sums)
            window_ends[family.window_of(number)] = now
            partials.append((now, len(pull.sites) * shape.query, family.window_of(number)))
            made.update(((pull, total), now) for total in pull.sums)
            if family.scored_twice:
                line.alive(now, now, len(pull.sums) * (len(pull.span) * shape.head_row + shape.token))
            line.alive(now, now, shape.row * sum(pull.last))
            for total, before in zip(pull.sums, pull.carried, strict=False):
                line.alive(made[before, total], now, gradient_bytes(shape, before, total))
            pull = next(pulls)
        line.rest()
    for number, end in site_ends.items():
        line.alive(arrived[number], end, shape.row + shape.head_row)  # the gradient and S
        line.alive(0 if family.saves(number) else arrived[number], end, shape.head_row)
    first = min(arrived.values(), default=0)  # by then every recomputed site needs logits of all its sources
    if family.scored_twice:
        saved = sum(len(family.part_of(run, run.first)) for run in run_ends if run.first < family.early)
        line.alive(0, math.inf, saved * shape.head_row)
    else:
        for run, end in run_ends.items():
            line.alive(0 if family.saves_logits(run) else first, end, shape.token)
        for (run, part), end in part_ends.items():
            line.alive(0 if family.saves_logits(run) else first, end, len(part) * shape.head_row)
    for at, size, window in partials:
        line.alive(at, window_ends[window] if family.windows else math.inf, size)
    for window, end in window_ends.items():
        line.alive(min(arrived[n] for n in window if n in arrived), end, len(window) * shape.query)
    keep_sources(line, family, arrived, list(run_ends.items()))
    return line.peaks()


def kept_bytes(family: Family, number: int) -> int:
    """What forming S from the output holds: the residue, and the output where nothing else would have kept it."""
    if number not in family.from_output:
        return 0
    residue = family.shape.residue if family.keeps_residue(number) else 0
    return residue + (0 if number in family.held and family.saves(number) else family.shape.row)


def held_from(family: Family, number: int, arrived: dict[int, int]) -> int:
    """The launch after which a site's results are there: recomputed ones once the backward reaches their region."""
    return 0 if family.saves(number) else region_start(family, region(family.sites[number].node), arrived)


def region_start(family: Family, mine: object, arrived: dict[int, int]) -> int:
    """The last launch, of those so far, before a checkpointed region is reached."""
    start = 0
    for other, at in arrived.items():
        if region(family.sites[other].node) == mine:
            break
        start = at
    return start


def gradient_bytes(shape: Shape, pull: Pull, total: Sum) -> int:
    """The size of a gradient that a pull hands on."""
    return shape.wide_row if pull.wide[pull.sums.index(total)] else shape.row


def keep_sources(line: Timeline, family: Family, arrived: dict[int, int], ends: list[tuple[Run, int]]) -> None:
    """Sources stand until they are read last; recomputed ones from when the backward reaches their region."""
    last: dict[Node, int] = {}
    for run, end in ends:
        last[run.source] = max(end, last.get(run.source, 0))
    for source, end in last.items():
        start = region_start(family, region(source), arrived) if is_recomputed(source) else 0
        line.alive(start, end, family.shape.row)
