"""The noise rule: a planted slowdown of 30% is caught and one of 3% is not, on real timings and on synthetic ones."""

import random
import time

import pytest
import torch

from perf import bench
from perf.compare import Result, Row

BASE = Result(1.0, 0.01)  # of an earlier run: two equal steps take the same time, give or take 1%


def verdict(least):
    return Row("step", BASE, Result(bench.ratio(least, "ours"), bench.noise(least))).verdict


def work(fraction):
    """Some milliseconds of real work, and a fraction more of its time."""
    a = torch.randn(256, 256)

    def step():
        start = time.process_time()
        for _ in range(8):
            torch.mm(a, a).sum().item()
        end = time.process_time()
        while time.process_time() < end + fraction * (end - start):
            pass

    return step


@pytest.mark.parametrize(("fraction", "expected"), [(0.30, "SLOWER"), (0.03, "same")])
def test_planted_in_real_timings(fraction, expected):
    steps = {"ours": work(fraction), "yardstick": work(0), "again": work(0)}
    assert verdict(bench.least_seconds(steps, device="cpu")) == expected


@pytest.mark.parametrize(("fraction", "expected"), [(0.30, "SLOWER"), (0.03, "same"), (0.0, "same")])
def test_planted_in_synthetic_timings(fraction, expected, monkeypatch):
    """Times as on a shared machine: never less than the true one, mostly a little more, at times twice as much."""
    generator = random.Random(0)

    def sample(seconds, device):
        busy = generator.uniform(1.3, 2) if generator.random() < 0.3 else 1
        return seconds * busy * (1 + generator.expovariate(1 / 0.04))

    monkeypatch.setattr(bench, "seconds", lambda step, device: sample(step(), device))
    times = {"ours": 1 + fraction, "yardstick": 1.0, "again": 1.0}
    steps = {name: lambda value=value: value for name, value in times.items()}
    verdicts = [verdict(bench.least_seconds(steps)) for _ in range(300)]
    assert verdicts.count(expected) == len(verdicts)


def test_a_noisy_run_is_measured_longer(monkeypatch):
    calls = []

    def seconds(step, device):
        calls.append(step)
        return 2.0 if step is steps["again"] else 1.0

    monkeypatch.setattr(bench, "seconds", seconds)
    steps = {"ours": lambda: 0, "yardstick": lambda: 1, "again": lambda: 2}
    assert bench.noise(bench.least_seconds(steps, rounds=2)) == 1.0
    assert len(calls) == bench.BATCHES * 2 * 3
