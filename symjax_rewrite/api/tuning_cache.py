"""Measured choices in files, so that a program is tuned once per machine.

An entry is one JSON file in `$SYMJAX_CACHE_DIR/tune`, else in `symjax_rewrite/tune` of the user's
cache folder. Its name is a digest of everything that the choice depends on: the program with its
sizes, dtypes and small constants, the options, the device and its cores, XLA's flags and the
versions. A file that cannot be read, or that is of something else, is ignored with a line in the
log; files are written whole or not at all.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
import numpy as np

from symjax_rewrite import options
from symjax_rewrite.cost.core_scaling import instruction_set, usable_cores
from symjax_rewrite.cost.profile_file import write_atomically
from symjax_rewrite.jax_internals import ClosedJaxpr
from symjax_rewrite.optimizer import Optimiser
from symjax_rewrite.options import logger

FORMAT = 1
WRITTEN = "as written"  # the program that every measurement has
MOST_HASHED = 1 << 24  # bytes of a constant whose values are part of the key
XLA_FLAGS = os.environ.get("XLA_FLAGS", "")
Measured = Mapping[str, tuple[float, float]]  # median seconds and spread, by program


@dataclass(frozen=True, slots=True)
class Entry:
    """A stored choice.

    choices: signatures of the candidates to take; None for the model's choice. measured: as when
    the choice was made.
    """

    choices: frozenset[str] | None
    measured: Measured


def key_of(closed: ClosedJaxpr, optimiser: Optimiser) -> dict[str, Any]:
    """Return everything that a measured choice depends on."""
    chosen, rules, device = optimiser.options, optimiser.rules, jax.devices()[0]
    return {
        "program": hashlib.sha256(str(closed.jaxpr).encode()).hexdigest(),
        "constants": [_digest(x) for x in closed.consts],
        "options": [chosen.kernels, repr(chosen.numerics), *chosen.assume],
        "rules": sorted({*(rule.name for rule in rules.rules), *rules.passes}),
        "device": [device.platform, device.device_kind, optimiser.device.name],
        "cores": [usable_cores(), instruction_set()],
        "xla_flags": XLA_FLAGS,
        "versions": {name: _version(name) for name in ("symjax_rewrite", "jax", "jaxlib")},
    }


def _digest(x: Any) -> str:
    """Return a digest of a constant: its shape and dtype, and the values unless they are many."""
    about = f"{np.shape(x)} {getattr(x, 'dtype', type(x))}"
    if getattr(x, "nbytes", 0) > MOST_HASHED:
        return about
    try:
        values = np.asarray(x).tobytes()
    except TypeError:  # a key of random numbers
        return about
    return f"{about} {hashlib.sha256(values).hexdigest()[:16]}"


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:  # a checkout that is not installed
        return "uninstalled"


def _file(key: Mapping[str, Any]) -> Path:
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:32]
    return options.CACHE_DIRECTORY / "tune" / f"{digest}.json"


def load(closed: ClosedJaxpr, optimiser: Optimiser) -> Entry | None:
    """Return the stored choice for a program, or None."""
    key = key_of(closed, optimiser)
    path = _file(key)
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        return ignored(path, str(error))
    try:
        return _entry(json.loads(text), key)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        return ignored(path, f"{type(error).__name__}: {error}")


def _entry(record: Any, key: Mapping[str, Any]) -> Entry:
    """Read a record; raise an error that names the fault of a malformed record."""
    if record["format"] != FORMAT or record["key"] != json.loads(json.dumps(key)):
        raise ValueError("it was measured for another program or format")
    choices = record["choices"]
    if choices is not None and not all(isinstance(c, str) for c in choices):
        raise ValueError("its choices are not signatures of candidates")
    times = {str(n): (float(s), float(by)) for n, (s, by) in record["measured"].items()}
    if (times.keys() <= {WRITTEN} and choices != []) or not times.get(WRITTEN, (0.0,))[0] > 0:
        raise ValueError("it lacks measured times")
    return Entry(None if choices is None else frozenset(choices), times)


def ignored(path: Path, why: str) -> None:
    """Log that a file is not used."""
    logger.warning("tune: ignored %s: %s", path, why)


def store(closed: ClosedJaxpr, optimiser: Optimiser, entry: Entry) -> None:
    """Write a choice; where the folder cannot be written, log that."""
    key = key_of(closed, optimiser)
    path = _file(key)
    choices = None if entry.choices is None else sorted(entry.choices)
    record = {"format": FORMAT, "key": key, "choices": choices, "measured": dict(entry.measured)}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, json.dumps(record, indent=1) + "\n")
    except OSError as error:
        logger.warning("tune: nothing is stored: %s", error)


def place(closed: ClosedJaxpr, optimiser: Optimiser) -> Path:
    """Return the file of a program's choice."""
    return _file(key_of(closed, optimiser))
