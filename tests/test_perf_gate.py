"""The static gate: what is worse fails, beside what was recorded; what is better passes and asks to be recorded."""

import copy
import json
import shutil

import pytest

pytest.importorskip("triton", reason="the kernels are written in Triton")

from perf import aot, gate, static
from perf.static import compiled, disassembled, innermost, instructions, machine_code

RECORDED = {section: json.loads((gate.BASELINE / f"{section}.json").read_text()) for section in gate.SECTIONS}


@pytest.fixture
def baseline(tmp_path, monkeypatch):
    """A copy of the committed baseline, as if recorded with what is installed."""
    for section, content in RECORDED.items():
        (tmp_path / f"{section}.json").write_text(json.dumps({**content, "versions": gate.versions()}))
    return tmp_path


def figures(section):
    return copy.deepcopy(RECORDED[section]["figures"])


@pytest.mark.parametrize("section", gate.SECTIONS)
def test_the_same_passes(section, baseline, capsys):
    assert gate.judged(section, figures(section), baseline) == 0
    assert "0 worse, 0 better" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("section", "figure"),
    [
        ("kernels", "registers"),
        ("kernels", "spilled bytes"),
        ("kernels", "shared bytes"),
        ("kernels", "narrow accesses"),
        ("kernels", "barriers"),
        ("kernels", "shuffles"),
        ("kernels", "inner loop instructions"),
        ("code", "launches"),
        ("code", "kernels"),
        ("traffic", "bytes"),
        ("traffic", "rows alive"),
    ],
)
def test_one_more_fails_and_both_are_shown(section, figure, baseline, capsys):
    new = figures(section)
    name = next(iter(new))
    old = new[name][figure]
    new[name][figure] += 1
    assert gate.judged(section, new, baseline) == 1
    printed = capsys.readouterr().out
    (line,) = [line for line in printed.splitlines() if line.startswith("WORSE")]
    assert name in line
    assert figure in line
    assert f"{old:,} -> " in line
    assert line.endswith(f" {old + 1:,}")
    assert "1 worse" in printed
    assert f'python -m perf.gate {section} --record "reason"' in printed


def test_one_less_passes_and_asks_to_be_recorded(baseline, capsys):
    new = figures("kernels")
    new[next(iter(new))]["registers"] -= 1
    assert gate.judged("kernels", new, baseline) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("better")
    assert "--record" in printed


@pytest.mark.parametrize("by", [-1, 1])
def test_wide_accesses_may_change_neither_way(by, baseline):
    new = figures("kernels")
    new[next(iter(new))]["16-byte loads"] += by
    assert gate.judged("kernels", new, baseline) == 1


@pytest.mark.parametrize("edit", [lambda new: new.popitem(), lambda new: new.update(another={"registers": 1})])
def test_a_kernel_more_or_less_fails(edit, baseline, capsys):
    new = figures("kernels")
    edit(new)
    assert gate.judged("kernels", new, baseline) == 1
    assert "WORSE" in capsys.readouterr().out


def test_source_may_grow_by_a_hundredth(baseline):
    for factor, status in ((1.009, 0), (1.02, 1)):
        new = figures("code")
        entry = new[next(iter(new))]
        entry["source bytes"] = int(entry["source bytes"] * factor)
        assert gate.judged("code", new, baseline) == status


def test_other_versions_are_not_compared(baseline, monkeypatch, capsys):
    monkeypatch.setattr(gate, "versions", lambda: {"torch": "1.0", "triton": "1.0"})
    assert gate.judged("traffic", figures("traffic"), baseline) == 2
    assert "nothing to compare" in capsys.readouterr().out
    assert gate.judged("traffic", figures("traffic"), baseline / "empty") == 2


def test_a_record_keeps_its_reasons(tmp_path):
    for number, reason in enumerate(["first", "tiles of 32"]):
        gate.record("traffic", {"1b mhar": {"bytes": number}}, reason, tmp_path)
    content = json.loads((tmp_path / "traffic.json").read_text())
    assert content["figures"] == {"1b mhar": {"bytes": 1}}
    assert [entry["reason"] for entry in content["history"]] == ["first", "tiles of 32"]
    assert all(entry["date"] and entry["torch"] and entry["triton"] for entry in content["history"])


@pytest.mark.parametrize("arguments", [["--record", " "], ["speed"]])
def test_mistakes_on_the_command_line(arguments, capsys):
    with pytest.raises(SystemExit) as ended:
        gate.main(arguments)
    assert ended.value.code == 2
    assert "reason" in capsys.readouterr().err or "speed" in arguments


def test_the_command_records_and_judges(tmp_path, monkeypatch):
    found = {"traffic": {"1b mhar": {"bytes": 5}}}
    monkeypatch.setattr(gate, "measured", lambda sections: {section: found[section] for section in sections})
    monkeypatch.setattr(gate.record, "__defaults__", (tmp_path,))
    monkeypatch.setattr(gate.judged, "__defaults__", (tmp_path,))
    assert gate.main(["traffic"]) == 2, "nothing is recorded yet"
    assert gate.main(["traffic", "--record", "first"]) == 0
    assert gate.main(["traffic"]) == 0
    found["traffic"]["1b mhar"]["bytes"] = 6
    assert gate.main(["traffic"]) == 1


def test_what_is_recorded_is_all_there_is():
    """Every named shape and decoder, with every figure."""
    kernels = RECORDED["kernels"]["figures"]
    for shape, size in static.SHAPES.items():
        names = {
            launch.kernel.__name__ for maker in (aot.Site(*size), aot.Rectangle(*size)) for launch in maker.launches()
        }
        found = {name.split(": ")[1].split()[0] for name in kernels if name.startswith(f"{shape}, ")}
        assert found >= names, shape
    assert set(RECORDED["traffic"]["figures"]) == {f"{preset} {kind}" for preset, kind in static.TRAFFIC}
    assert len(RECORDED["code"]["figures"]) == 2 * len(static.GENERATED)


def test_figures_of_machine_code():
    """One kernel, counted here and by the ahead-of-time tests in another way."""
    launch = next(iter(aot.Site(512, 4).launches()))
    found, binary = machine_code(compiled(launch)), aot.compiled(launch)
    assert found["registers"] == binary.registers
    assert found["16-byte loads"] >= binary.accesses["load 16"] > 0
    assert found["shuffles"] == binary.count("shfl.sync")
    assert found["barriers"] == binary.count("bar.sync")
    assert 0 < found["inner loop instructions"] < found["instructions"]
    assert found["instructions"] == disassembled(compiled(launch).asm["cubin"]).count(" ;") + 1, "and the last branch"


def test_innermost_loops():
    sass = """
.L_x_0:
        /*0000*/                   LDG.E.128 R4, [R2] ;
.L_x_1:
        /*0010*/                   LDG.E R4, [R2] ;
        /*0020*/                   BAR.SYNC 0x0 ;
        /*0030*/              @P0  BRA `(.L_x_1) ;
        /*0040*/              @P1  BRA `(.L_x_0) ;
        /*0050*/                   STG.E.128 [R2], R4 ;
.L_x_2:
        /*0060*/                   BRA `(.L_x_2);
"""
    found = instructions(sass)
    assert found == {
        "16-byte loads": 1, "16-byte stores": 1, "narrow accesses": 1, "barriers": 1, "shuffles": 0,
        "inner loop instructions": 3, "instructions": 7,
    }  # fmt: skip
    lines = ["a", "BRA `(.L_x_9)", "BRA `(.L_x_8)"]
    assert innermost(lines, {".L_x_9": 0, ".L_x_8": 3}) == [(0, 1)], "a jump ahead is no loop"
    assert shutil.which(str(static.NVDISASM))
