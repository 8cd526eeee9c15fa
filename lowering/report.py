"""What the passes did to the graphs of a model."""

from __future__ import annotations

from dataclasses import dataclass, field, fields

from . import model
from .families import adds_of
from .planning import Plan

PIECES = (
    "the passes saw {} pieces of the model: a source is scored and pulled anew in each that it enters; pieces come "
    "from graph breaks, blocks compiled one by one, and DDP (unless torch._dynamo.config.optimize_ddp is False)"
)


@dataclass
class Report:
    """What the passes found and did, summed over the graphs they saw. Bytes and rows are the model's, for one step.

    A site whose form the passes do not know (its weights are read, its query depends on an activation, it has no
    sources) counts as a site and is named in ``left_alone``; of its bytes, launches and rows nothing is known.

    Attributes:
        graphs: graphs with routes in them; more than one means that the passes saw the model in pieces.
        sites: ``mhar::route`` nodes.
        sources: tensors that the sites read, null sources left out.
        scored: sources whose logits are computed once, when the source is born.
        rescored: scoring launches that are repeated in the backward, where saved logits would be too much.
        pulled: sources whose gradient is gathered by pulls.
        tiled: launches that serve several sources and several sites at once.
        pinned: sources saved at the border of a checkpointed region.
        adds_removed: additions of gradients that the pulls took in.
        left_alone: sites not rewritten, each with the reason.
        bytes_before: bytes that routes, their backwards and the additions move in a step of the graph as it stood.
        bytes_after: the same after the passes.
        launches_before: launches of the same.
        launches: launches after the passes.
        rows_before: rows (a source, or as many bytes) of the sites' tensors alive at the peak of the backward before.
        rows_alive: the same after the passes.
        peak_before: bytes alive at the peak of the whole backward as it stood; only ``explain`` fills it in.
        peak_after: the same after the passes.
    """

    graphs: int = 0
    sites: int = 0
    sources: int = 0
    scored: int = 0
    rescored: int = 0
    pulled: int = 0
    tiled: int = 0
    pinned: int = 0
    adds_removed: int = 0
    left_alone: list[str] = field(default_factory=list)
    bytes_before: int = 0
    bytes_after: int = 0
    launches_before: int = 0
    launches: int = 0
    rows_before: int = 0
    rows_alive: int = 0
    peak_before: int = 0
    peak_after: int = 0

    def add(self, plan: Plan) -> None:
        """Count a plan that was carried out."""
        family = plan.family
        self.scored += len(family.runs)
        self.rescored += sum(not family.saves_logits(run) for runs in family.runs.values() for run in runs)
        self.rescored += sum(len(pull.sums) for pull in family.pulls if family.scored_twice)
        self.pulled += len({total.run.source for pull in family.pulls for total in pull.sums})
        self.tiled += len(family.tiles) + sum(len(p.sums) > 1 and len(p.sites) > 1 for p in family.pulls)
        self.adds_removed += adds_of(family)
        self.rows_before += round(plan.peak_before / family.shape.row)
        self.rows_alive += round(plan.peak_after / family.shape.row)
        self.count(plan.before, plan.after)

    def count(self, before: list[model.Launch], after: list[model.Launch]) -> None:
        self.bytes_before += model.total(before)
        self.bytes_after += model.total(after)
        self.launches_before += len(before)
        self.launches += len(after)

    def __str__(self) -> str:
        def text(value: object) -> str:
            return (
                f"{value:,}" if isinstance(value, int) else str(len(value)) if isinstance(value, list) else str(value)
            )

        rows = [(f.name.replace("_", " "), text(getattr(self, f.name))) for f in fields(self)]
        width, digits = (max(len(row[n]) for row in rows) for n in (0, 1))
        lines = [f"{name:<{width}}  {value:>{digits}}" for name, value in rows]
        pieces = [PIECES.format(self.graphs)] if self.graphs > 1 else []
        return "\n".join([*lines, *(f"  {reason}" for reason in [*pieces, *self.left_alone])])


def summed(reports: list[Report]) -> Report:
    """The reports of several graphs as one."""
    total = Report()
    for report in reports:
        for f in fields(Report):
            setattr(total, f.name, getattr(total, f.name) + getattr(report, f.name))
    return total
