"""Names of a program's values: those of the user's arguments, results and assignments."""

from __future__ import annotations

import functools
import linecache
import re

from symjax_rewrite import jax_internals
from symjax_rewrite.ir.flat_program import Program
from symjax_rewrite.reports.places import place

_ASSIGNED = re.compile(r"\s*([A-Za-z_]\w*)\s*(?::[^=]+)?=(?!=)")
_SUBSCRIPTS = str.maketrans("0123456789", "₀₁₂₃₄₅₆₇₈₉")


def short_name(path: str) -> str:
    """Return a path of a pytree as a name.

    Example:
        >>> short_name("p['a'][0]"), short_name("layers[3]['q']"), short_name("x")
        ('p.a₀', 'layers₃.q', 'x')
    """
    text = re.sub(r"\['?([A-Za-z_][^'\]]*)'?\]", r".\1", path)
    return re.sub(r"\[(\d+)\]", lambda m: m[1].translate(_SUBSCRIPTS), text)


def assigned_name(where: str) -> str:
    """Return the name to which a source line assigns; empty if it assigns to none or several."""
    at = place(where)
    found = _ASSIGNED.match(linecache.getline(*at[:2])) if at else None
    return found[1] if found else ""


class Names:
    """The names of the values of a program, each given once."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self._count: dict[str, int] = {}
        self.of: dict[int, str] = {}
        paths = jax_internals.argument_names(program.closed)
        for n, (v, path) in enumerate(zip(program.inputs, paths, strict=True)):
            self.of[v] = self.fresh(short_name(path) or f"x{n}")
        for n, v in enumerate(program.consts):
            self.of[v] = self.fresh(f"c{n}")

    def fresh(self, base: str) -> str:
        """Return a name that is not given yet: x, x_2, x_3; without a base t1, t2."""
        while True:
            count = self._count[base] = self._count.get(base, 0) + 1
            name = f"t{count}" if not base else base if count == 1 else f"{base}_{count}"
            if name == base or name not in self._count:
                self._count.setdefault(name, 1)
                return name

    def letters(self) -> frozenset[str]:
        """Return the names of one letter, which no index should have."""
        return frozenset(name for name in self._count if len(name) == 1)

    @functools.cached_property
    def results(self) -> list[str]:
        """Return the names of the results."""
        paths = jax_internals.result_names(self.program.closed)
        several = len(paths) > 1
        default = (f"result[{n}]" if several else "result" for n in range(len(paths)))
        pairs = zip(paths, default, strict=True)
        return [short_name((path or other).replace("result", "out", 1)) for path, other in pairs]

    @functools.cached_property
    def assigned(self) -> dict[int, str]:
        """Return the names that the user's source assigns, by the last value of a line.

        If the next equation is of another function, which the line may call, it is not the last.
        """
        out: dict[int, str] = {}
        equations = self.program.equations
        places = [e.where() for e in equations]
        for e, where, after in zip(equations, places, [*places[1:], ""], strict=True):
            if where == after or len(e.outvals) != 1 or (after and not _same_frame(where, after)):
                continue
            if name := assigned_name(where):
                out[e.outvals[0]] = name
        return out


def _same_frame(where: str, other: str) -> bool:
    """Return True if two lines are of one function."""
    one, two = place(where), place(other)
    return one is not None and two is not None and (one[0], one[2]) == (two[0], two[2])
