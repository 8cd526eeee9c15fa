"""What all tests share: Hypothesis profiles, and one thread a process."""

import os

import torch
from hypothesis import settings

settings.register_profile("local", deadline=None, print_blob=True)
settings.register_profile("repeatable", deadline=None, print_blob=True, derandomize=True)
settings.load_profile("repeatable" if os.environ.get("CI") else "local")


def pytest_configure(config):
    torch.set_num_threads(1)  # tensors are small, and pytest's workers share the cores
