"""What all tests share: Hypothesis profiles, and the warnings of torch itself that are no fault of a test."""

import os

from hypothesis import settings

settings.register_profile("local", deadline=None, print_blob=True)
settings.register_profile("repeatable", deadline=None, print_blob=True, derandomize=True)
settings.load_profile("repeatable" if os.environ.get("CI") else "local")

IMPORTING_INDUCTOR = "ignore:`torch.jit.script_method` is deprecated:DeprecationWarning"


def pytest_configure(config):
    config.addinivalue_line("filterwarnings", IMPORTING_INDUCTOR)
