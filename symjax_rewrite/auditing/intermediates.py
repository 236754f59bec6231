"""Intermediate values of a program, in the bodies of loops and calls too."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from symjax_rewrite import jax_internals
from symjax_rewrite.cost.term_cost import itemsize
from symjax_rewrite.ir.sizes import from_jax, value
from symjax_rewrite.jax_internals import ClosedJaxpr, JaxprEqn
from symjax_rewrite.spec_texts import spec_text


class Intermediate(NamedTuple):
    """A value that is neither an argument nor a result: its bytes, shape, dtype and source line."""

    bytes: float = 0.0
    text: str = ""
    where: str = ""


def intermediates(
    closed: ClosedJaxpr, is_result: list[bool], calls: tuple[JaxprEqn, ...] = ()
) -> Iterator[tuple[str, JaxprEqn, Any]]:
    """Yield line, equation and aval of every value that is no result, in bodies too.

    is_result: for every output of the jaxpr, False if it counts as an intermediate. calls: the
    equations in whose bodies the jaxpr stands, the innermost first.
    """
    flags = zip(closed.jaxpr.outvars, is_result, strict=True)
    results = {v for v, flag in flags if flag and not jax_internals.is_literal(v)}
    for eqn in closed.jaxpr.eqns:
        mine = [v in results for v in eqn.outvars]
        inner = jax_internals.bodies(eqn)
        for body in inner:
            same = len(body.jaxpr.outvars) == len(mine)
            ends = mine if same else [False] * len(body.jaxpr.outvars)
            yield from intermediates(body, ends, (eqn, *calls))
        where = jax_internals.source_line(eqn, *calls)
        yield from ((where, eqn, v.aval) for v in eqn.outvars if v not in results and not inner)


def largest_intermediate(closed: ClosedJaxpr, sample: Mapping[str, int]) -> Intermediate:
    """Return the largest intermediate value of a program; every equation counts as materialised.

    sample: numbers for named sizes.
    """
    largest = Intermediate()
    for where, _, aval in intermediates(closed, [True] * len(closed.jaxpr.outvars)):
        size = float(itemsize(str(getattr(aval, "dtype", "bool"))))
        for d in getattr(aval, "shape", ()):
            size *= value(from_jax(d), dict(sample))
        if hasattr(aval, "dtype") and size > largest.bytes:
            largest = Intermediate(size, spec_text(aval), where)
    return largest
