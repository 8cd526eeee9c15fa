"""FSDP2, two and four processes, against one process in eager: numbers, order of the communication, known traps."""

from __future__ import annotations

import pytest

from tests.distributed.launch import Results, once, run
from tests.distributed.matrix import FOUR, TWO, Case

CASES = [(world, case) for world, cases in ((2, TWO), (4, FOUR)) for case in cases]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Results]:
    return {2: started(tmp_path_factory, 2), 4: started(tmp_path_factory, 4)}


def started(tmp_path_factory: pytest.TempPathFactory, world: int) -> Results:
    def make(folder: object) -> str:
        return run("tests.distributed.fsdp", folder, world, timeout=500)

    return Results(once(tmp_path_factory.getbasetemp(), f"fsdp{world}", make), world)


@pytest.mark.parametrize(("world", "case"), CASES, ids=str)
def test_a_step_is_that_of_one_process(results: dict[int, Results], world: int, case: Case) -> None:
    """Loss, gradients, clipping and the optimizer's step; and every site was rewritten where the passes ran."""
    for found in results[world][str(case)]:
        assert found["error"] <= 1.5 * found["single"]
        if case.compiler == "passes" and case.residual != "prenorm":
            assert len(found["scored"]) == case.layers
            assert all(found["scored"])
            assert {line.split(": ")[1] for line in found["left_alone"]} <= {"it has no sources but the null source"}


@pytest.mark.parametrize(("world", "case"), CASES, ids=str)
def test_gradients_are_reduced_as_the_backward_goes(results: dict[int, Results], world: int, case: Case) -> None:
    """A unit's parameters are gathered, used and reduced before the next unit's; only the root's wait for the end."""
    blocks = [f"blocks.{n}" for n in range(case.layers)]
    units = {"block": blocks, "group": [", ".join(blocks[:2]), ", ".join(blocks[2:])], "root": []}[case.unit]
    expected = [f"{event} {unit}" for unit in reversed(units) if unit for event in ("gather", "reduce")]
    for found in results[world][str(case)]:
        assert found["log"] == ["gather ", *expected, "end", "reduce "]


@pytest.mark.parametrize("name", ["held", "held compiled"])
def test_queries_held_by_the_root_and_passed_in(results: dict[int, Results], name: str) -> None:
    for found in results[2][name]:
        assert found["error"] <= 2 * found["single"]
        assert found["log"] == [
            "gather ",
            *(f"{event} blocks.{n}" for n in (2, 1, 0) for event in ("gather", "reduce")),
            "end",
            "reduce ",
        ]


@pytest.mark.parametrize("name", ["kept", "kept compiled"])
def test_a_sharded_query_kept_from_the_root_is_refused(results: dict[int, Results], name: str) -> None:
    for found in results[2][name]:
        assert "route: query is a DTensor and sources[0] a plain tensor" in found["text"]
        assert "pass it to the block as an argument" in found["text"]


def test_a_frozen_embedding_delays_the_first_block(results: dict[int, Results]) -> None:
    for found in results[2]["frozen"]:
        assert found["error"] < 1e-6
        assert found["log"].index("reduce blocks.0") > found["log"].index("end")


def test_unless_its_output_requires_a_gradient(results: dict[int, Results]) -> None:
    for found in results[2]["frozen cured"]:
        assert found["error"] < 1e-6
        assert found["log"].index("reduce blocks.0") < found["log"].index("end")


def test_a_wider_embedding_is_cast_by_the_first_block(results: dict[int, Results]) -> None:
    for found in results[2]["wide embedding, cast"]:
        assert found["raised"] is None
        assert found["error"] <= 1.5 * found["single"]


def test_a_wider_embedding_beside_narrow_sources_is_refused(results: dict[int, Results]) -> None:
    for found in results[2]["wide embedding at the root"]:
        assert found["raised"] == "ValueError"
        assert (
            "sources[1] has dtype torch.bfloat16, expected torch.float32, the dtype of sources[0]; cast it"
            in found["text"]
        )
