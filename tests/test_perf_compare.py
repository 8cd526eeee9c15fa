"""``python -m perf.compare``: exit codes, both kinds of files, tolerances."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from perf.compare import LIMIT, Result, Row, main

ROOT = Path(__file__).parents[1]


@pytest.fixture
def written(tmp_path):
    """Writes pytest-benchmark's JSON of medians by name, and returns its path."""

    def write(name, medians, **extra):
        content = [{"name": key, "stats": {"median": value}, "extra_info": extra} for key, value in medians.items()]
        path = tmp_path / f"{name}.json"
        path.write_text(json.dumps({"benchmarks": content}))
        return str(path)

    return write


@pytest.mark.parametrize(("factor", "status", "verdict"), [(1.3, 1, "SLOWER"), (1.03, 0, "same"), (0.7, 0, "faster")])
def test_exit_code_and_table(written, capsys, factor, status, verdict):
    assert main([written("old", {"step": 0.2}), written("new", {"step": 0.2 * factor})]) == status
    row = capsys.readouterr().out.splitlines()[-1].split()
    assert row[:4] == [verdict, "step", "0.2", f"{0.2 * factor:.4g}"]
    assert row[4] == f"{factor - 1:+.1%}"


def test_a_ratio_counts_before_a_median(written):
    old = written("old", {"step": 1.0}, ratio=1.2)
    assert main([old, written("slower machine", {"step": 9.0}, ratio=1.2)]) == 0
    assert main([old, written("slower step", {"step": 1.0}, ratio=1.6)]) == 1


def test_missing_and_new(written, capsys):
    one, two = written("one", {"a": 1.0}), written("two", {"a": 1.0, "b": 1.0})
    assert main([two, one]) == 1
    assert "MISSING" in capsys.readouterr().out
    assert main([one, two]) == 0
    assert "new" in capsys.readouterr().out


def test_tolerance_by_benchmark(written):
    files = [written("old", {"site": 1.0, "step": 1.0}), written("new", {"site": 1.15, "step": 1.02})]
    assert main(files) == 1
    assert main([*files, "--tolerance", "20%"]) == 0
    assert main([*files, "--tolerance", "site=0.2"]) == 0
    assert main([*files, "--tolerance", "20%", "--tolerance", "s*e=1%"]) == 1
    assert main([*files, "--tolerance", "much"]) == 2


def test_noise_widens_up_to_a_limit():
    def allowed(noise):
        return Row("step", Result(1, noise), Result(1, 0)).allowed

    assert allowed(0) == 0.10
    assert allowed(0.02) == pytest.approx(0.14)
    assert allowed(0.5) == LIMIT
    assert Row("step", Result(1, 0.5), Result(1.3, 0.5)).verdict == "SLOWER"
    assert Row("step", Result(1, 0), Result(1, 0.5), tolerance=0.4).allowed == 0.4


def test_results_of_our_own(tmp_path, capsys):
    def write(name, us):
        rows = [{"name": "copy", "tb_s": 4.1}, {"name": "ours", "shape": "8B", "pass": "forward", "us": us, "bytes": 7}]
        path = tmp_path / name
        path.write_text(json.dumps({"origin": {}, "sections": {"sites": {"rows": rows}}}))
        return str(path)

    assert main([write("old", 200.0), write("new", 300.0)]) == 1
    assert "SLOWER   sites, ours, 8B, forward" in capsys.readouterr().out


def test_another_device_is_shown_and_not_judged(tmp_path, written, capsys):
    files = [written("old", {"step": 1.0}), written("new", {"step": 2.0})]
    for path, cpu in zip(files, ("one", "another"), strict=True):
        content = json.loads(Path(path).read_text())
        Path(path).write_text(json.dumps(content | {"machine_info": {"origin": {"driver": None, "cpu": cpu}}}))
    assert main([*files, "--same-device"]) == 0
    assert "SLOWER" in capsys.readouterr().out
    assert main(files) == 1
    assert main([files[0], files[0], "--same-device"]) == 0


def test_a_record_asks_for_a_reason_and_keeps_it(tmp_path, written, capsys):
    baseline, new = str(tmp_path / "folder" / "baseline.json"), written("new", {"step": 2.0}, ratio=1.1)
    assert main([baseline, new, "--record", " "]) == 2
    assert main([baseline, str(tmp_path / "absent"), "--record", "first"]) == 2
    for reason in ("first", "second"):
        assert main([baseline, new, "--record", reason]) == 0
    assert [entry["reason"] for entry in json.loads(Path(baseline).read_text())["history"]] == ["first", "second"]
    assert main([baseline, new]) == 0
    assert main([baseline, written("slower", {"step": 2.0}, ratio=2.2)]) == 1


@pytest.mark.parametrize("text", ["no json", "{}", '{"benchmarks": []}', '{"sections": {"sites": {"rows": []}}}'])
def test_what_cannot_be_compared(tmp_path, written, text, capsys):
    path = tmp_path / "bad.json"
    path.write_text(text)
    assert main([str(path), written("new", {"a": 1.0})]) == 2
    assert "bad.json" in capsys.readouterr().out
    assert main([str(tmp_path / "absent.json"), str(path)]) == 2


def test_as_a_command(written):
    command = [sys.executable, "-m", "perf.compare", written("old", {"a": 1.0}), written("new", {"a": 2.0})]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert result.returncode == 1, result.stderr
    assert "SLOWER" in result.stdout
