"""Compiled decoders under DistributedDataParallel, and routes of DTensors: two processes against one."""

from __future__ import annotations

from typing import Any

import pytest

from tests.distributed.launch import Results, once, run


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    folder = once(tmp_path_factory.getbasetemp(), "ddp", lambda path: run("tests.distributed.ddp", path, timeout=500))
    return Results(folder, 2)


@pytest.mark.parametrize("name", ["eager", "whole", "bucketed", "bucketed delta", "bucketed with code"])
def test_a_step_is_that_of_one_process(results: Results, name: str) -> None:
    for found in results[name]:
        assert found["error"] <= 1.5 * found["single"]


def test_without_bucketing_the_passes_see_one_graph(results: Results) -> None:
    for found in results["whole"]:
        assert (found["graphs"], found["sites"], found["scored"]) == (1, 7, 7)


@pytest.mark.parametrize(("name", "sites"), [("bucketed", 7), ("bucketed delta", 4)])
def test_bucketing_cuts_the_model_and_every_piece_is_rewritten(results: Results, name: str, sites: int) -> None:
    for found in results[name]:
        assert found["graphs"] > 1
        assert found["sites"] == sites
        assert found["scored"] > found["graphs"]


def test_explain_says_that_it_saw_pieces(results: Results) -> None:
    for found in results["explain"]:
        assert found["graphs"] > 1
        assert f"the passes saw {found['graphs']} pieces of the model" in found["text"]
        assert "torch._dynamo.config.optimize_ddp" in found["text"]


DTENSORS = [
    "dtensor-R-R-False",
    "dtensor-S(0)-R-False",
    "dtensor-S(1)-S(0)-False",
    "dtensor-S(0)-R-True",
    "dtensor-S(1)-S(0)-True",
]


@pytest.mark.parametrize("name", DTENSORS)
def test_dtensors(results: Results, name: str) -> None:
    for found in results[name]:
        assert found["difference"] < 1e-12
        assert found["placements"] == found["expected"]


REFUSED: list[Any] = [
    ("plain sources", "TypeError", r"query is a DTensor and sources[0] a plain tensor; pass all as DTensors or none"),
    ("plain query", "TypeError", r"sources[0] is a DTensor and query a plain tensor"),
    ("width", "ValueError", "sources[0] has placements (Shard(dim=2),), expected Replicate, or Shard of any dimension"),
    ("placements", "ValueError", "sources[1] has placements (Shard(dim=1),), expected (Shard(dim=0),)"),
]


@pytest.mark.parametrize(("kind", "error", "message"), REFUSED)
def test_dtensors_that_do_not_fit(results: Results, kind: str, error: str, message: str) -> None:
    for found in results[f"refused-{kind}"]:
        assert found["raised"] == error
        assert message in found["text"]
