"""The models: name to a maker of (function, arguments), by the package they come from.

A module whose package is not installed is named, not passed over.
"""

import importlib
from collections.abc import Callable
from typing import Any

Maker = Callable[[], tuple[Callable[..., Any], tuple]]

MODULES = (
    "from_flax",
    "from_equinox",
    "from_haiku",
    "from_transformers",
    "from_training",
    "from_science",
    "from_simulation",
    "from_physics",
    "from_learning",
)


def makers(modules: tuple[str, ...] = MODULES) -> tuple[dict[str, Maker], dict[str, str]]:
    """Every maker by its model's name, and why what is missing is missing."""
    found: dict[str, Maker] = {}
    missing: dict[str, str] = {}
    for module in modules:
        try:
            found |= importlib.import_module(module).MODELS
        except ModuleNotFoundError as error:
            missing[module] = str(error)
    return found, missing
