"""The symmetry of a tile: its sign where rows and columns are swapped.

A step is brought into a normal form, a sum of products of atoms. The sign of a sum stands apart, so
that x - y and y - x are one atom. The tile and the swapped tile are compared in this form.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from symjax_rewrite.ir.step_program import Step, run
from symjax_rewrite.ir.term import ADD, CONTRACT, MAP
from symjax_rewrite.kernel_selection.folds.tile_program import COLUMN, ROW

Form = tuple[tuple[tuple[int, ...], float], ...]  # by product of atoms: its coefficient
Place = Callable[[int], tuple[str | None, Any]]
SWAPPED = {ROW: COLUMN, COLUMN: ROW, None: None}
PARITY: dict[str, int] = dict.fromkeys("square cos cosh abs".split(), 0)  # 1 for odd functions
PARITY |= dict.fromkeys("sin tan asin atan sinh tanh asinh atanh erf sign cbrt".split(), 1)
CAST = "convert_element_type"
COMMUTING = frozenset("max min eq ne and or xor".split())


class Unswappable(Exception):
    """The tile has no known symmetry."""


def swap_sign(steps: Sequence[Step], root: int, place: Place) -> int:
    """Return 1 if a step is symmetric in rows and columns, -1 if it is antisymmetric.

    Args:
        steps: the tile program.
        root: the number of the step.
        place: the side of a value by its number, and a hashable name that both sides share.

    Raises:
        Unswappable: it is neither.
    """
    forms = _Forms(place)
    straight, swapped = forms.of(steps, False)[root], forms.of(steps, True)[root]
    if straight == swapped:
        return 1
    if straight == _scaled(swapped, -1):
        return -1
    raise Unswappable


class _Forms:
    """The normal forms of steps; atoms are numbered, and equal atoms have one number."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self.known: dict[tuple, int] = {}

    def of(self, steps: Sequence[Step], swap: bool) -> list[Form]:
        """Return the form of each step, with rows and columns swapped or not."""

        def coordinate(name: Any, side: str | None) -> Form:
            return self.atom(name, SWAPPED[side] if swap else side)

        def value(number: int, args: list[Form], dtype: str) -> Form:
            side, name = self.place(number)
            return coordinate(name, side)

        handlers = {
            "value": value,
            "const": self.constant,
            "index": lambda of_row, args, dtype: coordinate("index", ROW if of_row else COLUMN),
            "delta": lambda data, args, dtype: self.atom("delta", dtype),
            "diagonal": lambda data, args, dtype: self.atom("diagonal", *args),
            "cast": lambda data, args, dtype: self.mapped(CAST, {}, args, dtype),
            "apply": self.applied,
        }
        if not {s.kind for s in steps} <= set(handlers):
            raise Unswappable
        return run(steps, handlers)

    def atom(self, *parts: Any) -> Form:
        return (((self.known.setdefault(parts, len(self.known)),), 1.0),)

    def constant(self, value: Any, args: list[Form], dtype: str) -> Form:
        if np.ndim(value):
            raise Unswappable
        if dtype == "bool":
            return self.atom("const", bool(value))
        return (((), float(value)),) if value else ()

    def applied(self, data: Any, args: list[Form], dtype: str) -> Form:
        op, attr = data
        if op == ADD:
            return _sum([_scaled(a, float(c)) for a, c in zip(args, attr, strict=True)])
        if op == CONTRACT:
            return self.product(args)
        if op == MAP:
            return self.mapped(attr[0], dict(attr[1]), args, dtype)
        raise Unswappable

    def mapped(self, name: str, params: dict[str, Any], args: list[Form], dtype: str) -> Form:
        parity = params["y"] % 2 if name == "integer_pow" else PARITY.get(name)
        if name == "neg":
            return _scaled(args[0], -1)
        if name == "div":
            return self.product([args[0], self.mapped("integer_pow", {"y": -1}, args[1:], dtype)])
        if name == "select_n" or (name == CAST and dtype != "bool"):
            parity = 1
        if parity is not None:
            values = args[1:] if name == "select_n" else args
            sign = next((_sign(a) for a in values if a), 1)
            positive = [_scaled(a, sign) for a in values]
            made = self.atom(name, repr(params), dtype, *args[: len(args) - len(values)], *positive)
            return _scaled(made, sign if parity else 1)
        args = sorted(args) if name in COMMUTING else args
        return self.atom(name, repr(params), dtype, *args)

    def product(self, forms: Sequence[Form]) -> Form:
        """Return a product of sums that are not multiplied out; each is an atom up to its sign."""
        atoms, scale = [], 1.0
        for form in forms:
            if len(form) > 1:
                form = _scaled(self.atom("sum", _scaled(form, _sign(form))), _sign(form))
            if not form:
                return ()
            ((factors, c),) = form
            atoms, scale = [*atoms, *factors], scale * c
        return ((tuple(sorted(atoms)), scale),)


def _scaled(form: Form, by: float) -> Form:
    return tuple((product, c * by) for product, c in form)


def _sign(form: Form) -> int:
    """Return the sign of a form's first coefficient."""
    return -1 if form and form[0][1] < 0 else 1


def _sum(forms: Sequence[Form]) -> Form:
    total: Counter[tuple[int, ...]] = Counter()
    for product, c in (term for form in forms for term in form):
        total[product] += c  # pyright: ignore[reportArgumentType]
    return tuple(sorted((p, float(c)) for p, c in total.items() if c))
