"""Device profiles as JSON files, and the choice of a profile by its name.

    {"format": 1, "kind": "symjax_rewrite device profile", "name": "my server", "base": "cpu-8",
     "made": {...}, "figures": {"launch_s": {"unit": "s", "value": 1.4e-06, "residual": 0.02}}}

A file holds the figures that were measured; all others are those of its base.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from symjax_rewrite.cost.device_profiles import Device, device_profile
from symjax_rewrite.cost.profile_paths import figures, is_number, with_value
from symjax_rewrite.errors import ProfileError, UsageError
from symjax_rewrite.options import DEVICE

FORMAT, KIND = 1, "symjax_rewrite device profile"
MEASURED = "measured by `python -m symjax_rewrite calibrate`"
AGAIN = "make the file again with `python -m symjax_rewrite calibrate --save FILE`"


def selected_device(given: object) -> Device:
    """Return the profile that a user names, or that of the device on which JAX runs.

    Args:
        given: a `Device`; the name of a shipped profile; the path of a profile file, as a path
            object or as text that ends in `.json`; None for the profile that `SYMJAX_DEVICE`
            names, else that of the first of `jax.devices()`.

    Raises:
        UsageError: no profile has the name. ProfileError: the file is missing or not valid.
    """
    named = given if given is not None else DEVICE
    if isinstance(named, Device):
        return named
    if isinstance(named, os.PathLike) or (isinstance(named, str) and named.endswith(".json")):
        return read_profile(Path(named))
    if isinstance(named, jax.Device):
        return device_profile(None, named)
    if named is not None and not isinstance(named, str):
        expected = "a name, a path, a Device or one of jax.devices()"
        raise UsageError("not a device", expected=expected, got=repr(named))
    return device_profile(named, jax.devices()[0] if named is None else None)


def read_profile(path: Path) -> Device:
    """Return the profile in a file.

    Raises:
        ProfileError: the file is missing, is no profile, or has a figure that is not valid; the
            message names the file, the figure and the expected value.
    """
    record = _record(path)
    base, name = record["base"], record.get("name", path.stem)
    try:
        device = device_profile(base)
    except UsageError as error:
        raise _wrong(path, "base", error.expected, base) from error
    known = {where: (value, about) for where, value, about in figures(device)}
    said = dict(device.provenance)
    for where, entry in record["figures"].items():
        if where not in known:
            raise _wrong(path, where, "a figure of a device profile", "an unknown name")
        _check(path, where, entry, *known[where])
        value = entry["value"]
        made = type(known[where][0])(value) if isinstance(known[where][0], int) else float(value)
        device, said[where] = with_value(device, where, made), MEASURED
    return dataclasses.replace(device, name=str(name), provenance=said)


def _record(path: Path) -> dict[str, Any]:
    """Return the content of a file, of which the outer fields are valid."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ProfileError(f"cannot read {path}: {error.strerror}", remedy=AGAIN) from error
    except ValueError as error:  # not UTF-8, or not JSON
        what = f"{path} is no device profile: not JSON"
        raise ProfileError(what, got=str(error), remedy=AGAIN) from error
    if not isinstance(record, dict) or record.get("kind") != KIND:
        got = record.get("kind") if isinstance(record, dict) else type(record).__name__
        raise _wrong(path, "kind", repr(KIND), got)
    for name, expected, is_valid in (
        ("format", FORMAT, record.get("format") == FORMAT),
        ("base", "the name of a shipped profile", isinstance(record.get("base"), str)),
        ("figures", "figures by path", isinstance(record.get("figures"), dict)),
    ):
        if not is_valid:
            raise _wrong(path, name, expected, record.get(name, "nothing"))
    return record


def _check(path: Path, where: str, entry: Any, value: Any, about: Mapping[str, str]) -> None:
    """Raise a ProfileError if an entry of a file is no figure like the one of its base."""
    if not isinstance(entry, dict) or "value" not in entry:
        raise _wrong(path, where, "{'value': ..., 'unit': ...}", entry)
    if entry.get("unit", about["unit"]) != about["unit"]:
        raise _wrong(path, f"{where}.unit", repr(about["unit"]), entry["unit"])
    found = entry["value"]
    if not is_number(value):
        raise _wrong(path, where, "a figure that can be measured", found)
    is_valid = is_number(found) and math.isfinite(found) and found > 0
    if not is_valid or (isinstance(value, int) and found != int(found)):
        number = "an integer" if isinstance(value, int) else "a finite number"
        raise _wrong(path, f"{where}.value", f"{number} above 0, in {about['unit']}", found)


def _wrong(path: Path, where: str, expected: object, got: object) -> ProfileError:
    what = f"{path} is not a valid device profile: field {where!r}"
    return ProfileError(what, expected=expected, got=repr(got)[:80], remedy=AGAIN)


def write_profile(path: Path, record: Mapping[str, Any]) -> None:
    """Write the record of a profile as JSON: the whole file, or nothing."""
    outer = {"format": FORMAT, "kind": KIND}
    write_atomically(path, json.dumps(outer | dict(record), indent=1, ensure_ascii=False) + "\n")


def write_atomically(path: Path, text: str) -> None:
    """Write a file so that no reader ever sees a part of it.

    Raises:
        OSError: its folder cannot be written.
    """
    with tempfile.NamedTemporaryFile(
        "w", dir=path.parent, prefix=f".{path.name}.", delete=False, encoding="utf-8"
    ) as file:
        file.write(text)
    try:
        os.replace(file.name, path)
    except OSError:
        os.unlink(file.name)
        raise
