"""Checkpoints: what was saved comes back, in any arrangement of processes; what is damaged or half written does not."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from mhar_compile import Decoder, checkpoints
from mhar_compile.checkpoints import load_checkpoint, save_checkpoint
from tests.distributed.launch import Results, once, run
from tests.distributed.matrix import batch, decoder, loss_of

RESIDUAL, LAYERS = "delta", 1


def trained(steps: int = 1) -> tuple[Decoder, torch.optim.Optimizer]:
    model = decoder(RESIDUAL, LAYERS)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for tokens in batch(steps):
        loss_of(model(tokens), tokens).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def fresh() -> tuple[Decoder, torch.optim.Optimizer]:
    model = decoder(RESIDUAL, LAYERS)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(7.0)
    return model, torch.optim.AdamW(model.parameters(), lr=0.5)


def state(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    return model.state_dict(), optimizer.state_dict()


def assert_same(actual: Any, expected: Any) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


def test_what_was_saved_comes_back(tmp_path: Path) -> None:
    model, optimizer = trained()
    path = save_checkpoint(tmp_path, 12, model, optimizer, schedule={"warm": [1, 2.5, None]}, name="a")
    other = fresh()
    found = load_checkpoint(tmp_path, *other)
    assert found == (12, {"schedule": {"warm": [1, 2.5, None]}, "name": "a"}, path)
    assert_same(state(*other), state(model, optimizer))


def test_weights_alone(tmp_path: Path) -> None:
    model, optimizer = trained()
    save_checkpoint(tmp_path, 0, model, optimizer)
    other, _ = fresh()
    assert load_checkpoint(tmp_path, other, None) is not None
    assert_same(other.state_dict(), model.state_dict())
    save_checkpoint(tmp_path, 1, model, None)
    with pytest.raises(RuntimeError, match=r"could not read the checkpoint .*Missing key.*optimizer"):
        load_checkpoint(tmp_path, *fresh())


@pytest.mark.parametrize("folder", ["", "not/yet"])
def test_nothing_there_yet(tmp_path: Path, folder: str) -> None:
    model, optimizer = fresh()
    assert load_checkpoint(tmp_path / folder, model, optimizer) is None
    assert all((parameter == 7).all() for parameter in model.parameters())


def test_the_newest_are_kept(tmp_path: Path) -> None:
    model, _ = trained()
    for step in (1, 2, 10, 1_000_000_000):
        save_checkpoint(tmp_path, step, model, None, keep=2)
    assert [path.name for path in checkpoints.checkpoints(tmp_path)] == ["step-1000000000", "step-000000010"]
    found = load_checkpoint(tmp_path, model, None)
    assert found is not None
    assert found.step == 1_000_000_000


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def lengthen(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"x")


FILES = ["checkpoint.json", ".metadata", "__0_0.distcp"]


@pytest.mark.parametrize("damage", [cut, lengthen, Path.unlink, lambda path: path.write_bytes(b"")])
@pytest.mark.parametrize("name", FILES)
def test_a_damaged_checkpoint_is_passed_over(tmp_path: Path, name: str, damage: Any) -> None:
    model, optimizer = trained()
    save_checkpoint(tmp_path, 1, model, optimizer)
    later = trained(3)
    path = save_checkpoint(tmp_path, 2, *later)
    assert sorted(file.name for file in path.iterdir()) == sorted(FILES)
    damage(path / name)
    other = fresh()
    with pytest.warns(UserWarning, match=f"{path.name} is passed over, since it.*{name}"):
        found = load_checkpoint(tmp_path, *other)
    assert found is not None
    assert found.step == 1
    assert_same(state(*other), state(model, optimizer))
    with pytest.warns(UserWarning, match=f"{path.name} is replaced, since"):
        save_checkpoint(tmp_path, 2, *later)
    found = load_checkpoint(tmp_path, *other)
    assert found is not None
    assert found.step == 2
    assert_same(state(*other), state(*later))


def test_only_damaged_ones(tmp_path: Path) -> None:
    model, optimizer = trained()
    cut(save_checkpoint(tmp_path, 1, model, optimizer) / ".metadata")
    with (
        pytest.warns(UserWarning, match="passed over"),
        pytest.raises(ValueError, match=r"no checkpoint in .* is whole \(step-000000001: its file .metadata has"),
    ):
        load_checkpoint(tmp_path, model, optimizer)


MOMENTS: dict[str, tuple[Any, str]] = {
    "before the parts": (checkpoints.state_dict_saver, "save"),
    "before the description": (checkpoints.json, "dump"),
    "before the name": (checkpoints, "sync"),
    "before the oldest goes": (checkpoints, "checkpoints"),
}


@pytest.mark.parametrize("moment", MOMENTS)
def test_killed_while_saving(tmp_path: Path, moment: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that dies at any moment of a saving leaves the last checkpoint, or the new one if it has its name."""
    first, second = trained(), trained(2)
    save_checkpoint(tmp_path, 1, *first)
    child = os.fork()
    if not child:
        try:
            monkeypatch.setattr(*MOMENTS[moment], lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL))
            save_checkpoint(tmp_path, 2, *second, keep=1)
        finally:
            os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    other = fresh()
    found = load_checkpoint(tmp_path, *other)
    assert found is not None
    assert found.step == (2 if moment == "before the oldest goes" else 1)
    assert_same(state(*other), state(*(second if found.step == 2 else first)))
    save_checkpoint(tmp_path, 3, *second, keep=1)
    assert [path.name for path in tmp_path.iterdir()] == ["step-000000003"]


def test_each_step_is_saved_once(tmp_path: Path) -> None:
    model, _ = trained()
    save_checkpoint(tmp_path, 1, model, None)
    with pytest.raises(ValueError, match="step-000000001 exists already"):
        save_checkpoint(tmp_path, 1, model, None)


@pytest.mark.parametrize(
    ("step", "options", "error", "message"),
    [
        (1.0, {}, TypeError, "step must be an int, got float"),
        (True, {}, TypeError, "step must be an int, got bool"),
        (-1, {}, ValueError, "step is -1, expected at least 0"),
        (1, {"keep": 0}, ValueError, "keep is 0, expected at least 1"),
        (1, {"keep": "3"}, TypeError, "keep must be an int, got str"),
        (1, {"noise": torch.ones(1)}, TypeError, "noise is tensor.*tensors belong into the model"),
        (1, {"shape": (1, 2)}, TypeError, r"shape is \(1, 2\), expected numbers, strings, None, lists"),
        (1, {"table": {1: 2}}, TypeError, "dicts with string keys"),
    ],
)
def test_mistakes_in_saving(tmp_path: Path, step: Any, options: Any, error: Any, message: str) -> None:
    model, _ = fresh()
    with pytest.raises(error, match=message):
        save_checkpoint(tmp_path, step, model, None, **options)
    assert not list(tmp_path.iterdir())


def test_another_model(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, 1, decoder("delta", 1), None)
    with pytest.raises(ValueError, match=r"router.gate does not exist in the model and has shape \[1\] in .*step-0"):
        load_checkpoint(tmp_path, decoder("mhar", 1), None)
    with pytest.raises(ValueError, match=r"blocks.1.* has shape .* in the model and does not exist in .*step-0"):
        load_checkpoint(tmp_path, decoder("delta", 2), None)


def test_the_optimizer_of_another_model(tmp_path: Path) -> None:
    model, optimizer = trained()
    other, _ = fresh()
    with pytest.raises(ValueError, match="of the optimizer's parameters are not the model's"):
        save_checkpoint(tmp_path, 1, other, optimizer)
    save_checkpoint(tmp_path, 0, model, optimizer)
    with pytest.raises(ValueError, match="of the optimizer's parameters are not the model's"):
        load_checkpoint(tmp_path, other, optimizer)


def test_the_wrong_kind_of_optimizer(tmp_path: Path) -> None:
    model, optimizer = trained()
    save_checkpoint(tmp_path, 1, model, optimizer)
    with pytest.raises(RuntimeError, match=r"Missing key in checkpoint state_dict: optimizer.*momentum_buffer"):
        load_checkpoint(tmp_path, model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        save_checkpoint(tmp_path / "file", 1, trained()[0], None)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    def make(folder: Path) -> str:
        model, optimizer = trained()
        save_checkpoint(folder / "single", 3, model, optimizer, who="one process")
        return run("tests.distributed.checkpoints", folder, timeout=300)

    return Results(once(tmp_path_factory.getbasetemp(), "checkpoints", make), 2)


@pytest.mark.parametrize("name", ["fully sharded", "ddp"])
def test_two_processes_go_on_from_one(results: Results, name: str) -> None:
    for found in results[name]:
        assert found["loaded"] == [3, {"who": "one process"}]
        assert found["same"]


@pytest.mark.parametrize("name", ["fully sharded", "ddp"])
def test_one_process_goes_on_from_two(results: Results, name: str) -> None:
    """Checkpointed, compiled and sharded, or under DDP: the names are those of the plain model, the bits too."""
    (found, _) = results[name]
    model, optimizer = fresh()
    loaded = load_checkpoint(found["folder"], model, optimizer)
    assert loaded is not None
    assert loaded.extra == {"rank": 0}
    expected = torch.load(found["whole"])
    assert_same(model.state_dict(), expected)
    assert optimizer.param_groups[0]["lr"] == 0.01
    files = json.loads((loaded.path / "checkpoint.json").read_text())["files"]
    assert len([file for file in files if file.endswith(".distcp")]) == 2


@pytest.mark.parametrize("name", ["disk full", "no name"])
def test_an_error_of_one_process_is_every_process_s(results: Results, name: str) -> None:
    for found in results[name]:
        assert found["raised"] == ("RuntimeError" if name == "disk full" else "OSError")
        assert "no space left" in found["text"]
        assert found["newest"] == 3
