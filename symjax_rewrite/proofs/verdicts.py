"""The results of `prove_equal`: a proof, a counterexample, or how far it came.

Each prints as text (`proved equal in 4 steps …`), shows itself in a notebook, and gives JSON. A
`Proof` is true, the others are false.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from html import escape
from typing import Any, ClassVar

import numpy as np

from symjax_rewrite.spec_texts import spec_text

MODULO = (
    "arithmetic is exact: rounding, overflow and the order of operations do not count",
    "no infinity and no NaN arises, except −∞ in masks and as the start of a maximum",
    "numbers in the program stand for reals to within the rounding of their dtype",
    "named sizes are at least 1",
)


@dataclass(frozen=True, slots=True)
class ProofStep:
    """One application of a law.

    name: of the law. law: the law. before, after: its two sides here, in index notation. where: the
    user's line. of: "f", "g" or both. instances: random instances at which both sides were compared
    in float64. error: the largest relative difference found.
    """

    name: str
    law: str
    before: str
    after: str
    where: str
    of: str
    instances: int
    error: float

    def __str__(self) -> str:
        return f"{self.before}\n    = {self.after}\n    by {self.law}"


class _Shown:
    """Text, HTML and JSON of a verdict. told: the fields in its JSON."""

    __slots__ = ()
    told: ClassVar[tuple[str, ...]]

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        return f"<pre>{escape(str(self))}</pre>"

    def to_json(self) -> str:
        """Return the verdict as JSON; arrays as nested lists."""
        fields = {name: getattr(self, name) for name in self.told}
        verdict = {"verdict": type(self).__name__, **fields}
        return json.dumps(verdict, indent=1, default=_plain, ensure_ascii=False)


@dataclass(frozen=True, slots=True, repr=False)
class Proof(_Shown):
    """A proof that two functions have equal values.

    steps: applications of laws, each checked numerically. normal_forms: of every output, to which
    the steps bring both functions. modulo: what the equality does not cover. conditions: where both
    functions are defined. sizes: the named sizes at which steps were checked. time_s: seconds.
    """

    told = ("steps", "normal_forms", "modulo", "conditions", "sizes", "time_s")
    steps: tuple[ProofStep, ...]
    normal_forms: tuple[str, ...]
    modulo: tuple[str, ...]
    conditions: tuple[str, ...]
    sizes: tuple[dict[str, int], ...]
    time_s: float
    again: Callable[[int], bool] = field(compare=False)

    def __bool__(self) -> bool:
        return True

    def replay(self, seed: int = 1) -> bool:
        """Derive the proof again, and compare both sides of every step at new random instances.

        Returns:
            True if the same steps hold and lead to one normal form.
        """
        return self.again(seed)

    def __str__(self) -> str:
        lines = [f"proved equal in {len(self.steps)} steps"]
        for number, step in enumerate(self.steps, 1):
            where = f"  at {step.where}" if step.where else ""
            lines.append(f"{number}. {step.name} (in {step.of}){where}")
            lines += [f"    {line.strip()}" for line in str(step).split("\n")]
            lines.append(f"    compared at {step.instances} instances, error {step.error:.1e}")
        lines += [f"both are {text}" for text in self.normal_forms]
        lines += [f"where {text}" for text in self.conditions]
        return "\n".join([*lines, *[f"modulo: {text}" for text in self.modulo]])


@dataclass(frozen=True, slots=True, repr=False)
class Different(_Shown):
    """Two functions that differ.

    reason: the difference, in one sentence. inputs: the arguments of a counterexample, as flat
    arrays; empty if structure, shape or dtype differ. left, right: the differing output of f and of
    g. output: its number. index: the place of the largest difference. sizes: the named sizes.
    """

    told = ("reason", "inputs", "left", "right", "output", "index", "sizes")
    reason: str
    inputs: tuple[np.ndarray, ...] = ()
    left: Any = None
    right: Any = None
    output: int = 0
    index: tuple[int, ...] = ()
    sizes: dict[str, int] = field(default_factory=dict)
    again: Callable[[], bool] | None = field(default=None, compare=False)

    def __bool__(self) -> bool:
        return False

    def replay(self) -> bool:
        """Evaluate both functions at the counterexample again; return True if they differ."""
        return self.again is None or self.again()

    def __str__(self) -> str:
        lines = [f"different: {self.reason}"]
        if self.sizes:
            lines.append("at sizes " + ", ".join(f"{n} = {k}" for n, k in self.sizes.items()))
        for k, x in enumerate(self.inputs):
            lines.append(f"input {k} = {_array_text(x)}")
        return "\n".join(lines)


@dataclass(frozen=True, slots=True, repr=False)
class Unknown(_Shown):
    """Two functions that were neither proved equal nor shown to differ.

    reason: what ended the search. left, right: the normal forms of f and g of every output that is
    not proved equal. remains: what is left of f − g. missing: the operations in it that no law
    takes apart. samples: random instances at which they agree.
    """

    told = ("reason", "left", "right", "remains", "missing", "samples")
    reason: str
    left: tuple[str, ...] = ()
    right: tuple[str, ...] = ()
    remains: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    samples: int = 0

    def __bool__(self) -> bool:
        return False

    def __str__(self) -> str:
        lines = [f"unknown: {self.reason}"]
        for f, g, rest in zip(self.left, self.right, self.remains, strict=True):
            lines += [f"  f is {f}", f"  g is {g}", f"  f − g is {rest}"]
        if self.missing:
            lines.append(f"no law takes apart: {', '.join(self.missing)}")
        return "\n".join(
            [*lines, f"equal at {self.samples} random instances, which proves nothing"]
        )


def _array_text(x: np.ndarray) -> str:
    if x.size > 64:
        return spec_text(x)
    return f"{spec_text(x)} {np.array2string(x, separator=', ', threshold=64)}".replace("\n", "")


def _plain(x: Any) -> Any:
    """Return an array as nested lists, with complex and non-finite numbers as text; or a step."""
    if isinstance(x, ProofStep):
        return asdict(x)
    if isinstance(x, np.ndarray | np.generic):
        array = np.asarray(x)
        if array.dtype.kind in "iub":
            return array.tolist()
        if array.dtype.kind == "f" and np.isfinite(array).all():
            return array.astype(float).tolist()
        return array.astype(str).tolist()
    return str(x)
