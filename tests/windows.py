"""Forces what planning chooses only where memory is short."""

from __future__ import annotations

from typing import Any
from unittest import mock

from mhar_compile.lowering import planning


def scored_twice() -> Any:
    """Pulls have their sources scored again wherever they may."""
    switch_of = planning.switch_of
    return mock.patch.object(planning, "switch_of", lambda family: switch_of(family)[-1:])


def windows_that_free() -> Any:
    """Windows of a plan without tiles free what they hold, whether memory is short or not."""
    windowed = planning.windowed

    def always(family: Any, window: Any, tile: Any, frees: bool, room: Any) -> Any:
        return windowed(family, window, tile, frees or not family.tiles, room)

    return mock.patch.object(planning, "windowed", always)
