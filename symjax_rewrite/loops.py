"""What does not change from step to step leaves a loop (a pass, called while tracing).

Only work worth moving moves: invariant parts with a contraction, convolution, factorisation or
reduction in them. XLA hoists cheap invariants itself, but only after a rewrite inside the body
could have made the invariant part depend on the step.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from symjax_rewrite import compat
from symjax_rewrite.compat import JaxprEqn

HEAVY = frozenset(
    """dot_general conv_general_dilated reduce_sum cumsum cholesky lu qr eigh svd triangular_solve
    custom_linear_solve sort""".split()
)
GROWTH = 4  # a hoist may write this many times the bytes of the loop's inputs and outputs


class Hoisted(NamedTuple):
    """A loop with its invariant equations taken out.

    first: equations to run before the loop. results: their variables that the body reads.
    eqn: the loop, with `results` as further constants at positions `at`.
    """

    first: list[JaxprEqn]
    results: list[Any]
    eqn: JaxprEqn
    at: int


def hoist(eqn: JaxprEqn) -> Hoisted | None:
    """Take invariant work out of a scan or while body; None where there is none worth it."""
    name = eqn.primitive.name
    if name == "scan" and eqn.params["length"] != 0:
        key, first = "jaxpr", 0
    elif name == "while":
        key, first = "body_jaxpr", eqn.params["cond_nconsts"]
    else:
        return None
    body, n = eqn.params[key], compat.loop_constants(eqn)
    if body.jaxpr.constvars:
        return None
    moved = _invariant(body.jaxpr, n)
    if not any(_is_heavy(e) for e in moved):
        return None
    inside = {id(e) for e in moved}
    rest = [e for e in body.jaxpr.eqns if id(e) not in inside]
    made = {v for e in moved for v in e.outvars}
    read = [v for e in rest for v in e.invars if not compat.is_literal(v) and v in made]
    read += [v for v in body.jaxpr.outvars if not compat.is_literal(v) and v in made]
    results = list(dict.fromkeys(read))
    if _bytes(results) > GROWTH * _bytes([*eqn.invars, *eqn.outvars]):
        return None
    smaller = compat.jaxpr_without(body, rest, n, results)
    params = compat.with_loop_constants({**eqn.params, key: smaller}, n + len(results))
    return Hoisted(moved, results, eqn.replace(params=params), first + n)


def _invariant(jaxpr: Any, n: int) -> list[JaxprEqn]:
    known = set(jaxpr.invars[:n])
    moved = []
    for e in jaxpr.eqns:
        reads = [v for v in e.invars if not compat.is_literal(v)]
        if not e.effects and reads and all(v in known for v in reads):
            moved.append(e)
            known.update(e.outvars)
    return moved


def _is_heavy(eqn: JaxprEqn) -> bool:
    if eqn.primitive.name in HEAVY:
        return True
    return any(_is_heavy(e) for body in compat.bodies(eqn) for e in body.jaxpr.eqns)


def _bytes(atoms: list[Any]) -> float:
    total = 0.0
    for v in atoms:
        shape = getattr(v.aval, "shape", ())
        if all(isinstance(d, int) for d in shape):
            itemsize = getattr(getattr(v.aval, "dtype", None), "itemsize", 4)
            total += float(np.prod(shape, dtype=float)) * itemsize
    return total
