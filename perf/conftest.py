"""One thread for every benchmark, and where it ran in the record."""

from __future__ import annotations

import pytest
import torch

from perf import bench


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)
    torch.manual_seed(0)


def pytest_benchmark_update_machine_info(config, machine_info):
    machine_info["origin"] = bench.information()
