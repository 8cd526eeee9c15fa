"""What a plan is made of: families of sites, runs to score, sums of gradients, pulls and tiles."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch.fx import Node

from .model import Shape
from .reading import Site, is_sum, only_user, sum_of
from .versions import is_recomputed, size_of

GAP = 2  # unread rows that a run of scored sites may hold, for each row that is read


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


def adds_of(family: Family) -> int:
    """Additions of gradients that the pulls make needless."""
    return sum(len(total.entries) - 1 for total in family.sums if total.entries[0][1] is not None)
