"""Figures of a device profile by path: `launch_s`, `flops_per_s.float32`, `scans.steps.step_s`.

Imports nothing of the package: a profile is any dataclass of fields made by `quantity` and `group`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

Profile = TypeVar("Profile")


def value_of(profile: Any, path: str) -> Any:
    """Return a figure of a profile, or an entry of its rates, by its path."""
    found = profile
    for name in path.split("."):
        found = found[name] if isinstance(found, Mapping) else getattr(found, name)
    return found


def has(profile: Any, path: str) -> bool:
    """Return False for a rate that the profile lacks, or a figure of a group that is None."""
    try:
        value_of(profile, path)
    except (AttributeError, KeyError):
        return False
    return True


def with_value(profile: Profile, path: str, value: Any) -> Profile:
    """Return the profile with one figure changed."""
    name, _, inner = path.partition(".")
    if isinstance(profile, Mapping):
        return {**profile, name: value}  # pyright: ignore[reportReturnType]
    changed = with_value(getattr(profile, name), inner, value) if inner else value
    return dataclasses.replace(profile, **{name: changed})  # pyright: ignore[reportArgumentType]


def figures(profile: Any, prefix: str = "") -> Iterator[tuple[str, Any, Mapping[str, str]]]:
    """Yield path, value, and unit, meaning and source of every figure; entries of rates apart.

    A figure that may be a fraction is a float, though the profile states a whole number.
    """
    for f in dataclasses.fields(profile):
        value, path = getattr(profile, f.name), prefix + f.name
        value = float(value) if f.type == "float" else value
        if dataclasses.is_dataclass(value):
            yield from figures(value, f"{path}.")
        elif isinstance(value, Mapping) and f.metadata["unit"] != "text":
            yield from ((f"{path}.{key}", entry, f.metadata) for key, entry in value.items())
        else:
            yield path, value, f.metadata


def is_number(value: Any) -> bool:
    """Return True for an integer or float; False for a boolean."""
    return isinstance(value, int | float) and not isinstance(value, bool)
