"""One thread for every benchmark, and where it ran in the record."""

from __future__ import annotations

import pytest
import torch

from perf import bench


@pytest.fixture(autouse=True, scope="session")
def memory():
    bench.keep_freed_memory()


@pytest.fixture(autouse=True)
def setting():
    torch.set_num_threads(1)
    torch.manual_seed(0)
    with torch._dynamo.config.patch(recompile_limit=100):  # all decoders are of one class
        yield


def pytest_benchmark_update_machine_info(config, machine_info):
    machine_info["origin"] = bench.information()
