"""``python -m mhar_compile.demo``: three residual topologies trained on real text, compiled, on a CPU, in minutes.

The text is the Python standard library's own source, byte by byte: every machine that can run this has it.
"""

from __future__ import annotations

import argparse
import math
import sysconfig
import time
from dataclasses import dataclass
from pathlib import Path

import matplotlib
import torch
from torch import Tensor
from torch.nn import functional as F
from tqdm import tqdm

from .decoder import Decoder
from .probe import routing_weights

matplotlib.use("Agg")  # figures go to files; no screen is needed
import matplotlib.pyplot as plt

TOPOLOGIES = ("prenorm", "attnres", "mhar")
COLOURS = {"prenorm": "#7f7f7f", "attnres": "#1f77b4", "mhar": "#d62728"}
BATCH, LENGTH, PEAK_RATE, WARM_UP = 16, 128, 3e-3, 20
HELD_OUT_BATCHES = 16


@dataclass(frozen=True)
class Result:
    """One trained model: losses in nats per byte."""

    topology: str
    model: Decoder
    parameters: int
    steps_per_second: float
    training: list[float]
    held_out: Tensor  # [sequences], one loss each, the same sequences for every topology


def corpus() -> tuple[Tensor, Tensor]:
    """The standard library's sources as bytes, for training and, every tenth file, held out."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(p for p in root.rglob("*.py") if not {"test", "tests", "site-packages"} & set(p.parts))
    parts = [torch.frombuffer(bytearray(data), dtype=torch.uint8) for p in files if (data := p.read_bytes())]
    return torch.cat([p for n, p in enumerate(parts) if n % 10]), torch.cat(parts[::10])


def draw(text: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """A batch of random windows: tokens and the tokens that follow, both [BATCH, LENGTH]."""
    starts = torch.randint(len(text) - LENGTH - 1, (BATCH, 1), generator=generator)
    window = text[starts + torch.arange(LENGTH + 1)].long()
    return window[:, :-1], window[:, 1:]


def learning_rate(step: int, steps: int) -> float:
    """Linear warm-up, then a cosine to a tenth of the peak."""
    if step < WARM_UP:
        return PEAK_RATE * (step + 1) / WARM_UP
    progress = (step - WARM_UP) / max(1, steps - WARM_UP)
    return PEAK_RATE * (0.55 + 0.45 * math.cos(math.pi * progress))


def train(topology: str, steps: int, text: Tensor, held_out_text: Tensor) -> Result:
    """Train the tiny preset from seed 0 on the same batches in the same order as every other topology."""
    torch.manual_seed(0)
    model = Decoder.from_preset("tiny", residual=topology)
    compiled = torch.compile(model, fullgraph=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK_RATE, betas=(0.9, 0.95), weight_decay=0.1)
    batches = torch.Generator().manual_seed(1)
    losses: list[float] = []
    started = time.perf_counter()
    for step in tqdm(range(steps), desc=f"{topology:8}", unit="step"):
        if step == 1:  # the first step compiles
            started = time.perf_counter()
        tokens, targets = draw(text, batches)
        loss = F.cross_entropy(compiled(tokens).flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.param_groups[0]["lr"] = learning_rate(step, steps)
        optimizer.step()
        losses.append(loss.item())
    speed = (steps - 1) / (time.perf_counter() - started)
    parameters = sum(p.numel() for p in model.parameters())
    return Result(topology, model, parameters, speed, losses, evaluate(model, held_out_text))


@torch.no_grad()
def evaluate(model: Decoder, text: Tensor) -> Tensor:
    """The loss of each held-out sequence, [HELD_OUT_BATCHES * BATCH]."""
    batches = torch.Generator().manual_seed(2)
    losses = []
    for _ in range(HELD_OUT_BATCHES):
        tokens, targets = draw(text, batches)
        losses.append(F.cross_entropy(model(tokens).transpose(1, 2), targets, reduction="none").mean(1))
    return torch.cat(losses)


def table(results: list[Result]) -> str:
    """One row per topology."""
    rows = [f"{'topology':10} {'parameters':>10} {'steps/s':>8} {'held-out loss':>14}"]
    rows += [
        f"{r.topology:10} {r.parameters:>10,} {r.steps_per_second:>8.2f} {r.held_out.mean().item():>14.4f}"
        for r in results
    ]
    return "\n".join(rows)


def verdict(results: list[Result]) -> str:
    """Who has the lowest held-out loss, and whether the lead is more than the noise of the held-out sample."""
    first, second = sorted(results, key=lambda r: r.held_out.mean().item())[:2]
    lead = second.held_out - first.held_out
    error = lead.std().item() / math.sqrt(len(lead))
    clear = lead.mean().item() > 2 * error
    return (
        f"Lowest held-out loss: {first.topology}, {lead.mean().item():.4f} nats a byte ahead of {second.topology} "
        f"(standard error of the difference {error:.4f}: {'more' if clear else 'not more'} than sampling noise). "
        "One seed and a short run: this shows that it works, not which topology is better."
    )


def plot_losses(results: list[Result], path: Path) -> None:
    """Training loss against steps, smoothed, and the held-out loss as a dashed line."""
    figure, axes = plt.subplots(figsize=(7, 4.2), layout="constrained")
    for r in results:
        width = max(1, len(r.training) // 20)
        smooth = torch.tensor(r.training).unfold(0, width, 1).mean(1)
        axes.plot(range(width, width + len(smooth)), smooth, color=COLOURS[r.topology], label=r.topology)
        axes.axhline(r.held_out.mean().item(), color=COLOURS[r.topology], linestyle="--", linewidth=0.8)
    axes.set(xlabel="step", ylabel="loss, nats per byte", title="Training loss (running mean); dashed: held out")
    axes.legend(frameon=False)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def plot_routes(weights: dict[str, Tensor], path: Path) -> None:
    """One panel per head: the mean weight that each site (row) gives each source (column)."""
    heads, sites = next(iter(weights.values())).shape[1], len(weights)
    grid = torch.full((heads, sites, max(w.shape[0] for w in weights.values())), float("nan"))
    for site, w in enumerate(weights.values()):
        grid[:, site, : w.shape[0]] = w.T
    figure, panels = plt.subplots(
        1, heads, figsize=(3 * heads + 1, 3.4), sharey=True, layout="constrained", squeeze=False
    )
    for head, axes in enumerate(panels[0]):
        image = axes.imshow(grid[head], vmin=0, vmax=1, cmap="viridis", aspect="auto")
        axes.set(title=f"head {head}", xlabel="source")
    panels[0][0].set(ylabel="site")
    figure.colorbar(image, ax=panels[0], label="mean weight")
    figure.savefig(path, dpi=150)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=250, help="training steps for each topology (default %(default)s)")
    parser.add_argument("--out", type=Path, default=Path("runs/demo"), help="folder for the figures")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)

    text, held_out_text = corpus()
    print(f"{len(text):,} bytes to train on, {len(held_out_text):,} held out, {torch.get_num_threads()} threads")
    results = [train(topology, arguments.steps, text, held_out_text) for topology in TOPOLOGIES]
    tokens, _ = draw(held_out_text, torch.Generator().manual_seed(2))
    plot_losses(results, arguments.out / "loss.png")
    plot_routes(routing_weights(results[-1].model, tokens), arguments.out / "routes.png")
    print(f"\n{table(results)}\n\n{verdict(results)}\n\nFigures: {arguments.out}/loss.png, {arguments.out}/routes.png")


if __name__ == "__main__":
    main()
