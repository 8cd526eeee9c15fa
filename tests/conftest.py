"""What all tests share: Hypothesis profiles, one thread a process, and which warnings of torch itself are let pass."""

import os

import torch
from hypothesis import settings

settings.register_profile("local", deadline=None, print_blob=True)
settings.register_profile("repeatable", deadline=None, print_blob=True, derandomize=True)
settings.load_profile("repeatable" if os.environ.get("CI") else "local")

IMPORTING_INDUCTOR = "ignore:`torch.jit.script_method` is deprecated:DeprecationWarning"


def pytest_configure(config):
    config.addinivalue_line("filterwarnings", IMPORTING_INDUCTOR)
    torch.set_num_threads(1)  # tensors are small, and pytest's workers share the cores
