"""Plots of the stored sweeps: ``python -m perf.plots`` draws perf/results/*-sweep.json into perf/plots, PNG and SVG."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("agg")
import matplotlib.pyplot as plt

STYLES = {
    "ours": {"color": "tab:blue", "marker": "o"},
    "compiled reference": {"color": "tab:orange", "marker": "s"},
    "copy": {"color": "black", "linestyle": "--"},
}
LABELS = {"copy": "a copy of as many bytes"}
UNITS = {"sources": "sources N", "tokens": "tokens"}
FIXED = {"svg.hashsalt": "mhar_compile", "svg.fonttype": "none", "figure.dpi": 120}  # the same file for the same data


def lines(results: dict[str, Any], against: str) -> Any:
    """Time of a site against sources or tokens, forward and with backward, beside the roof."""
    rows = results["sections"][against]["rows"]
    passes = list(dict.fromkeys(row["pass"] for row in rows))
    figure, axes = plt.subplots(1, len(passes), figsize=(4.6 * len(passes), 3.6), sharey=True)
    for axis, name in zip(axes, passes, strict=True):
        for key, style in STYLES.items():
            points = sorted(
                (row[against], row["us"] / 1e3) for row in rows if (row["name"], row["pass"]) == (key, name)
            )
            axis.plot(*zip(*points, strict=True), label=LABELS.get(key, key), **style)
        ticks = sorted({row[against] for row in rows})
        axis.set(xscale="log", yscale="log", title=name, xlabel=UNITS[against])
        axis.set_xticks(ticks, [str(tick) for tick in ticks])
        axis.minorticks_off()
    axes[0].set_ylabel("ms")
    axes[0].legend(fontsize=8)
    site = results["site"]
    other = {"tokens": "sources", "sources": "tokens"}[against]
    title = f"one site, d {site['width']}, {site['heads']} heads, {rows[0][other]} {other}, {site['dtype']}"
    figure.suptitle(f"{title}\n{place(results)}", fontsize=9)
    return figure


def bars(results: dict[str, Any]) -> Any:
    """The time of a training step over that of pre-norm, by model size."""
    rows = results["sections"]["steps"]["rows"]
    sizes = list(dict.fromkeys((row["width"], row["layers"]) for row in rows))
    names = [name for name in dict.fromkeys(row["name"] for row in rows) if name != "prenorm"]
    figure, axis = plt.subplots(figsize=(6.4, 3.6))
    for i, name in enumerate(names):
        found = {(row["width"], row["layers"]): row["ratio"] for row in rows if row["name"] == name}
        spots = [x + (i - (len(names) - 1) / 2) * 0.25 for x in range(len(sizes))]
        axis.bar_label(axis.bar(spots, [found[size] for size in sizes], 0.25, label=name), fmt="%.2f", fontsize=7)
    axis.axhline(1, color="black", linestyle="--")
    millions = {(row["width"], row["layers"]): row["parameters"] / 1e6 for row in rows if row["name"] == names[0]}
    axis.set_xticks(range(len(sizes)), [f"d {w}, {n} layers\n{millions[w, n]:.1f} M" for w, n in sizes], fontsize=8)
    axis.set_ylabel("step / step with pre-norm")
    axis.legend(fontsize=8, loc="upper right")
    figure.suptitle(f"compiled training step; {place(results)}", fontsize=9)
    return figure


def place(results: dict[str, Any]) -> str:
    """Where it was measured."""
    origin = results["origin"]
    device = f"{origin['cpu']}, one thread" if origin["driver"] is None else origin["device"]
    return f"{device}, torch {origin['torch']}"


def draw(path: Path, folder: Path) -> list[Path]:
    """All plots of a sweep."""
    results = json.loads(path.read_text())
    kinds = {"sources": lambda: lines(results, "sources"), "tokens": lambda: lines(results, "tokens")}
    kinds["steps"] = lambda: bars(results)
    written = []
    folder.mkdir(parents=True, exist_ok=True)
    for name in results["sections"]:
        with plt.rc_context(FIXED):
            figure = kinds[name]()
            figure.tight_layout()
            for ending, metadata in (("png", {"Software": None}), ("svg", {"Date": None})):
                target = folder / f"{path.stem.removesuffix('-sweep')}-{name}.{ending}"
                figure.savefig(target, metadata=metadata)
                written.append(target)
            plt.close(figure)
    return written


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m perf.plots", description=__doc__)
    parser.add_argument("--results", type=Path, default=Path("perf/results"))
    parser.add_argument("--out", type=Path, default=Path("perf/plots"))
    options = parser.parse_args(arguments)
    sweeps = sorted(options.results.glob("*-sweep.json"))
    if not sweeps:
        print(f"there is no *-sweep.json in {options.results}; measure one by: python -m perf.sweep")
        return 2
    for path in sweeps:
        print(*draw(path, options.out), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
