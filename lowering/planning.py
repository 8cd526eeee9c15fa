"""Decides what to rewrite: what is scored, windows and tiles of pulls, all by the model."""

from __future__ import annotations

import math
import operator
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise, product
from typing import Literal

import torch
from torch.fx import Node

from . import model
from .families import Family, Pull, Sum, Tile
from .model import Costs, Launch, Shape
from .partition import Backward
from .reading import Site, shares_memory
from .schedule import (
    backward_after,
    backward_before,
    forward_after,
    forward_before,
    tensors_of,
    timeline_after,
    timeline_before,
)
from .versions import is_recomputed, symbol

PEAK_WOULD_RISE = "the backward's peak memory would rise"
PULLED = 2  # sources that share a read of a site's gradient: a kernel has registers for no more


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
    able = [n for n in family.order if may_be_held(family.sites[n]) and sums_apart(family.sites[n])]
    able.sort(key=lambda n: len(family.sites[n].sources))
    held = family.held & set(able)
    most = [set(able[len(able) // part :]) for part in (8, 4, 2)]
    found: list[set[int]] = []
    for choice in (set(able), *most, held | most[-1], held, set()):
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


def sums_apart(site: Site) -> bool:
    """Whether S may be summed otherwise than the pull's dots are: not of one float32 source, whose S equals its dot."""
    return len(site.sources) > 1 or site.value.dtype != torch.float32


def is_returned(node: Node) -> bool:
    """Whether a node, or a view of it, is a result of the graph."""
    return any(
        user.op == "output" or ((shares_memory(user) or user.target is operator.getitem) and is_returned(user))
        for user in node.users
    )


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
