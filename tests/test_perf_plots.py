"""The sweeps' records and the plots drawn from them."""

import json
import re
from pathlib import Path

import pytest
import torch

pytest.importorskip("matplotlib", reason="plots are drawn with matplotlib")

from perf import plots, sweep

ROOT = Path(__file__).parents[1]
RECORDS = sorted((ROOT / "perf/results").glob("*-sweep.json"))


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.stem)
def test_every_record_says_where_it_is_from_and_is_drawn(path, tmp_path):
    results = json.loads(path.read_text())
    assert all(results["origin"][key] for key in ("device", "torch", "triton", "commit", "time", "threads"))
    written = plots.draw(path, tmp_path)
    assert {file.suffix for file in written} == {".png", ".svg"}
    assert len(written) == 2 * len(results["sections"])
    for file in written:
        assert (ROOT / "perf/plots" / file.name).exists(), "draw it by: make plots"
    for section in ("sources", "tokens"):
        (svg,) = [file for file in written if file.name.endswith(f"{section}.svg")]
        assert all(name in svg.read_text() for name in ("ours", "a copy of as many bytes", results["origin"]["torch"]))


def test_there_is_a_record_of_the_cpu():
    assert "cpu-sweep" in [path.stem for path in RECORDS]


def test_no_record_is_an_error_with_the_command(tmp_path, capsys):
    assert plots.main(["--results", str(tmp_path)]) == 2
    assert "python -m perf.sweep" in capsys.readouterr().out


def test_pictures_of_the_readme_exist():
    pictures = re.findall(r"!\[.*?\]\((.*?)\)", (ROOT / "README.md").read_text())
    assert pictures
    assert all((ROOT / picture).is_file() for picture in pictures)


def test_a_site_is_swept(monkeypatch):
    """Rows of ours, of the reference and of the roof; the roof moves exactly the least bytes."""
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    rows = list(sweep.site(3, 16))
    assert {(row["name"], row["pass"]) for row in rows} == {
        (name, kind) for name in ("ours", "compiled reference", "copy") for kind in ("forward", "forward + backward")
    }
    for row in rows:
        least = {"forward": 4, "forward + backward": 12}[row["pass"]] * 16 * sweep.WIDTH * sweep.DTYPE.itemsize
        assert row["us"] > 0
        assert row["gb_s"] * row["us"] * 1e3 == pytest.approx(least)
