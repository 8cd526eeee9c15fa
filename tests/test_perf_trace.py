"""The trace of a compiled step: our calls have names with their sites, and TensorBoard's plugin shows the operators."""

import json
import re
import warnings
from collections import defaultdict
from contextlib import contextmanager

import pytest

from perf.trace import main, summary, traced, training_step, with_names

LAYERS = 2
SITES = 2 * LAYERS + 1


@contextmanager
def without_warnings():
    """The plugin's own code warns."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trace")
    step = training_step("mhar", LAYERS, "always", "cpu")
    return summary(traced(step, folder, steps=2)), folder


def test_every_site_has_its_name(recorded):
    times, _ = recorded
    mixes = {name for name in times if name.startswith("forward: mix,")}
    assert mixes == {f"forward: mix, site {n}" for n in range(SITES)}
    assert {f"forward: score, source {n}" for n in range(SITES)} <= times.keys()
    assert any(re.fullmatch(r"backward: pull, sites? \d+.*", name) for name in times)
    assert all(time > 0 for time in times.values())
    assert sum(times.values()) - times["step"] < times["step"], "routing is a part of the step"


def test_the_plugin_shows_our_operators(recorded):
    _, folder = recorded
    with without_warnings():
        pytest.importorskip("torch_tb_profiler", reason="the plugin of TensorBoard is needed to open the trace")
        from torch_tb_profiler.profiler.data import RunProfileData
        from torch_tb_profiler.profiler.run_generator import RunGenerator

        (path,) = folder.glob("*.pt.trace.json")
        data = RunProfileData.parse("worker", None, str(path), str(folder))
        profile = RunGenerator("worker", None, data).generate_run_profile()
    calls = {row["name"]: row["calls"] for row in profile.operation_table_by_name["data"]}
    assert calls["mhar::mix"] == 2 * SITES
    assert calls["mhar::score"] == 2 * SITES
    assert calls["mhar::pull"] > 0


def test_ranges_nest(recorded):
    """Perfetto drops a range that outlasts the one it begins in."""
    _, folder = recorded
    (path,) = folder.glob("*.pt.trace.json")
    tracks = defaultdict(list)
    for event in json.loads(path.read_text())["traceEvents"]:
        if event["ph"] == "X":
            tracks[event["pid"], event["tid"]].append((event["ts"], -event["dur"], event["name"]))
    assert sum(name.startswith("forward: mix, site") for track in tracks.values() for _, _, name in track) == 2 * SITES
    for track in tracks.values():
        ends = []
        for start, negated, name in sorted(track):
            while ends and ends[-1] <= start:
                ends.pop()
            assert not ends or start - negated <= ends[-1] + 0.001, name  # microseconds, written with three digits
            ends.append(start - negated)


def test_the_summary_is_printed(tmp_path, capsys):
    assert main(["--layers", "1", "--rewrite", "never", "--out", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    share = re.search(r"routing takes (\d+\.\d)% of a step", printed)
    assert share is not None
    assert 0 < float(share[1]) < 100
    assert "backward: route_backward" in printed
    assert list(tmp_path.glob("*.pt.trace.json"))


def test_launches_of_kernels_have_names():
    """As they stand in code for CUDA."""
    source = "    primals_1, = args\n        mix_named_0.run(buf1, buf2, grid=g)\n        other.run(1)\n"
    assert with_names(source).splitlines()[1:] == [
        "        with torch.profiler.record_function('forward: mix, call 0'):",
        "            mix_named_0.run(buf1, buf2, grid=g)",
        "        other.run(1)",
    ]
    assert "'backward: mix, call 0'" in with_names(source.replace("primals_1", "tangents_1"))
