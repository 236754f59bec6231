"""Programs that were slower than as written, or far from their best form: a benchmark, not a test.

Rows written by hand stand in regressions.txt; what the fuzzer finds and makes small stands in
regressions.json.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from performance_fuzz.program import Program, draw, function_of

NAMED = Path(__file__).parent / "regressions.txt"
FOUND = NAMED.with_suffix(".json")


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """A program by its text.

    inputs: name, shape, kind, and below what for an index. hand: texts with the same values,
    written by hand; the best form is the best of these too.
    """

    name: str
    source: str
    inputs: tuple[tuple[str, tuple[int, ...], str, int], ...]
    hand: tuple[str, ...] = ()

    def function(self) -> Any:
        """Return the program as a Python function."""
        return function_of(self.source)

    def functions_by_hand(self) -> list[Any]:
        """Return the forms written by hand as Python functions."""
        return [function_of(text) for text in self.hand]

    def arguments(self) -> list[jax.Array]:
        """Return values for the arguments."""
        rng = np.random.default_rng(0)
        return [jnp.asarray(draw(rng, kind, shape, below)) for _, shape, kind, below in self.inputs]

    def specs(self) -> list[jax.ShapeDtypeStruct]:
        """Return shapes and dtypes of the arguments."""
        types = {"index": "int32", "mask": "bool"}
        return [
            jax.ShapeDtypeStruct(shape, types.get(kind, "float32"))
            for _, shape, kind, _ in self.inputs
        ]


def named() -> list[Row]:
    """Return the rows of regressions.txt.

    A row is a name, inputs with shapes, lines, and a result; then, after `|`, the results of forms
    written by hand.
    """
    return [_row(text.splitlines()) for text in NAMED.read_text(encoding="utf-8").split("\n\n")]


def _row(lines: list[str]) -> Row:
    name, given, *rest = lines
    hand = [line.removeprefix("| ") for line in rest if line.startswith("| ")]
    *body, result = rest[: len(rest) - len(hand)]
    inputs = tuple(_input(text.split()) for text in given.split(";"))
    head = f"def program({', '.join(letter for letter, *_ in inputs)}):"
    texts = ["\n    ".join((head, *body, f"return {r}")) for r in (result, *hand)]
    return Row(name.removeprefix("# "), texts[0], inputs, tuple(texts[1:]))


def _input(words: list[str]) -> tuple[str, tuple[int, ...], str, int]:
    """Read `W 64 32 weight`, `i 64 index:10`: the kind, normal by default, stands last."""
    letter, *rest = words
    kind = rest.pop() if rest and not rest[-1].isdigit() else "normal"
    kind, _, below = kind.partition(":")
    return letter, tuple(map(int, rest)), kind, int(below or 1)


def of_program(name: str, p: Program) -> Row:
    """Return the row of a generated program."""
    inputs = tuple((x.name, p.shape_of(x), x.kind, p.size(x.below)) for x in p.inputs)
    return Row(name, p.source(), inputs)


def found() -> list[Row]:
    """Return the rows that the fuzzer found."""
    if not FOUND.exists():
        return []
    rows = json.loads(FOUND.read_text(encoding="utf-8"))
    return [
        Row(
            r["name"],
            "\n".join(r["source"]),
            tuple((n, tuple(s), k, b) for n, s, k, b in r["inputs"]),
        )
        for r in rows
    ]


def known() -> list[Row]:
    """Return all rows of the table."""
    return [*named(), *found()]


def add(rows: list[Row]) -> None:
    """Store rows that the fuzzer found, those of the same names replaced."""
    kept = {r.name: r for r in (*found(), *rows)}
    text = [
        {"name": r.name, "source": r.source.splitlines(), "inputs": r.inputs} for r in kept.values()
    ]
    FOUND.write_text(json.dumps(text, indent=1) + "\n", encoding="utf-8")
