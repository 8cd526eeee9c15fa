"""``mhar_compile.testing`` where Hypothesis may be missing: recipes and budgets need torch alone."""

from __future__ import annotations

import importlib.util
import sys
from unittest.mock import MagicMock

if importlib.util.find_spec("hypothesis") is None:
    sys.modules["hypothesis"] = sys.modules["hypothesis.strategies"] = MagicMock()

from mhar_compile.testing import Recipe, ratios
from mhar_compile.testing.problems import LAYOUTS, Problem

__all__ = ["LAYOUTS", "Problem", "Recipe", "ratios"]
