"""What a family's sites launch, as they stand and by a plan, and which of their tensors the backward holds when."""

from __future__ import annotations

import math
from collections.abc import Iterator

from torch.fx import Node

from . import model
from .families import Family, Pull, Run, Sum, adds_of
from .liveness import Buffer, sizes
from .model import Launch, Shape, Timeline
from .pinning import region
from .reading import only_user, sum_of
from .versions import is_recomputed


def forward_before(family: Family) -> Iterator[Launch]:
    for site in family.sites:
        yield model.route(family.shape, len(site.sources), site.residual is not None)


def backward_before(family: Family) -> Iterator[Launch]:
    for number in family.order:
        yield model.route_backward(family.shape, len(family.sites[number].sources))
    for _ in range(adds_of(family)):
        yield model.add(family.shape)


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
