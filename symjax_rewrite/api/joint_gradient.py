"""The joint program of reverse mode, and its cut into a forward and a backward half.

The program and its derivative are traced as one joint program, from primals and cotangents to
results and cotangents of the live inputs. The joint program is optimised, then cut. Equations that
read no cotangent are the forward half; the other equations are the backward half. Second
derivatives are taken of the halves as they were written: the written backward half reads the
primals alone, because residuals of the optimised forward half have no derivatives.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from symjax_rewrite import jax_axes, jax_internals
from symjax_rewrite.cost.equation_cost import aval_bytes
from symjax_rewrite.jax_internals import ClosedJaxpr
from symjax_rewrite.loops.linear_zeros import with_zero
from symjax_rewrite.loops.program_partition import CutProgram, smallest_split, without_barrier


@dataclass(frozen=True, slots=True)
class Original:
    """A program to be differentiated.

    closed: the program. live: numbers of the inputs that have tangents. moving: for each result,
    True if it has a cotangent.
    """

    closed: ClosedJaxpr
    live: list[int]
    moving: list[bool]

    def at(self, primals: Sequence[Any]) -> tuple[Callable[..., list[Any]], list[Any]]:
        """Return the program as a function of its live inputs, and the live inputs."""

        def function(*moving: Any) -> list[Any]:
            full = list(primals)
            for k, value in zip(self.live, moving, strict=True):
                full[k] = value
            return jax_internals.eval_jaxpr(self.closed, *full)

        return function, [primals[k] for k in self.live]

    def vjp(self, primals: Sequence[Any]) -> tuple[list[Any], Any]:
        """Return the results, and the pullback of the cotangents of the moving results."""
        function, moved = self.at(primals)
        return jax.vjp(function, *moved)

    def pull(self, pullback: Any, cotangents: Sequence[Any]) -> list[Any]:
        """Pull cotangents of the moving results back to the live inputs."""
        given = iter(cotangents)
        outvars = self.closed.jaxpr.outvars
        full = [
            next(given) if moves else _no_cotangent(v.aval)
            for v, moves in zip(outvars, self.moving, strict=True)
        ]
        return list(pullback(full))

    def cotangent_avals(self) -> list[Any]:
        """Return the avals of the cotangents of the moving results."""
        outvars = zip(self.closed.jaxpr.outvars, self.moving, strict=True)
        return [v.aval.to_ct_aval() for v, moves in outvars if moves]


def _no_cotangent(aval: Any) -> Any:
    if jax_internals.is_differentiable(aval):
        return jax_axes.zeros(aval)
    return np.zeros(aval.shape, jax.dtypes.float0)


@dataclass(frozen=True, slots=True)
class Half:
    """A program, and the program that is differentiated in its place.

    closed: the program that is differentiated. runs: the optimised program that computes the
    values.
    """

    closed: ClosedJaxpr
    runs: ClosedJaxpr


@dataclass(frozen=True, slots=True)
class Halves:
    """The forward half (primals to results and residuals) and the backward half.

    back: returns the backward half at residuals and cotangents. A cotangent that is None is zero
    and is no input.
    """

    forward: Half
    back: Callable[[Sequence[Any], Sequence[Any]], Half]


def plain_halves(original: Original, primals: Sequence[Any]) -> Halves:
    """Return the halves of a program as JAX differentiates it."""
    trees = []

    def forward(*values: Any) -> list[Any]:
        outs, pullback = original.vjp(values)
        leaves, tree = jax.tree.flatten(pullback)
        trees.append(tree)
        return [*outs, *leaves]

    closed, _ = jax_internals.make_jaxpr(forward, *primals)

    def back(residuals: Sequence[Any], cotangents: Sequence[Any]) -> Half:
        def backward(residuals: Sequence[Any], cotangents: Sequence[Any]) -> list[Any]:
            full = map(with_zero, cotangents, original.cotangent_avals())
            return original.pull(jax.tree.unflatten(trees[-1], residuals), list(full))

        closed, _ = jax_internals.make_jaxpr(backward, list(residuals), list(cotangents))
        return Half(closed, closed)

    return Halves(Half(closed, closed), back)


@dataclass(frozen=True, slots=True)
class Joint:
    """A program and its derivative as one program.

    closed: maps primals, then cotangents, to results, then cotangents of the live inputs. known:
    the number of primals. results: the number of results. plain_bytes: bytes of the residuals of
    plain reverse mode, without primals and results. An optimisation barrier makes the cotangents
    depend on the results.
    """

    closed: ClosedJaxpr
    known: int
    results: int
    plain_bytes: float

    def halves(self, optimised: ClosedJaxpr, primals: Sequence[Any]) -> Halves | None:
        """Cut the optimised joint program; return None if a result depends on a cotangent."""
        written, optimised = (without_barrier(p, self.known) for p in (self.closed, optimised))
        count = len(written.jaxpr.outvars)
        first, given = _needed_part(written, [k < self.results for k in range(count)])
        pull, used = _needed_part(written, [k >= self.results for k in range(count)])
        reads = [k for k in used if k < self.known]
        jaxpr = optimised.jaxpr
        free = {jaxpr.invars[k] for k in reads}
        free.update(v for v in jaxpr.outvars[: self.results] if not jax_internals.is_literal(v))
        parts = smallest_split(optimised, self.known, self.results, free, self.plain_bytes)
        if parts is None:
            return None
        backward = _Backward(pull, used, parts, reads)

        def runs(*primals: Any) -> list[Any]:
            values = parts.run_first(primals)
            outs, kept = values[: self.results], values[self.results :]
            return [*outs, *backward.residuals(primals, kept)]

        def original(*primals: Any) -> list[Any]:
            outs = jax_internals.eval_jaxpr(first, *[primals[k] for k in given])
            fixed = runs(*map(jax.lax.stop_gradient, primals))[self.results :]
            return [*outs, *[primals[k] for k in backward.reads], *fixed[len(backward.reads) :]]

        forward = Half(*(jax_internals.make_jaxpr(f, *primals)[0] for f in (original, runs)))
        return Halves(forward, backward.half)


def _needed_part(closed: ClosedJaxpr, used: Sequence[bool]) -> tuple[ClosedJaxpr, list[int]]:
    """Return the program of some outputs, and the numbers of the inputs that it reads."""
    part, read = jax_internals.live_part(closed, used)
    return part, [k for k, is_read in enumerate(read) if is_read]


class _Backward:
    """The backward half as a function of its residuals.

    pull: the backward half as written, of the primals and the cotangents `used`. parts: the
    optimised halves. reads: numbers of the primals that are residuals; the other residuals are
    intermediate values.
    """

    def __init__(
        self, pull: ClosedJaxpr, used: Sequence[int], parts: CutProgram, reads: Sequence[int]
    ) -> None:
        self.pull, self.used, self.parts = pull, used, parts
        place = {v: k for k, v in enumerate(parts.closed.jaxpr.invars)}
        self.sources = [place.get(v) for v in parts.kept]
        also = [k for k in self.sources if k is not None and k not in reads]
        self.reads = [*reads, *also]

    def residuals(self, primals: Sequence[Any], kept: Sequence[Any]) -> list[Any]:
        """Return the primals that are residuals, then the other residuals."""
        made = [x for x, k in zip(kept, self.sources, strict=True) if k is None]
        return [*[primals[k] for k in self.reads], *made]

    def half(self, residuals: Sequence[Any], cotangents: Sequence[Any]) -> Half:
        """Trace the backward half."""

        def written(residuals: Sequence[Any], cotangents: Sequence[Any]) -> list[Any]:
            primals, _ = self._taken_apart(residuals)
            full = list(map(with_zero, cotangents, late))
            args = [primals[k] if k < known else full[k - known] for k in self.used]
            return jax_internals.jaxpr_as_fun(self.pull)(*args)

        def runs(residuals: Sequence[Any], cotangents: Sequence[Any]) -> list[Any]:
            primals, made = self._taken_apart(residuals)
            kept = [next(made) if k is None else primals[k] for k in self.sources]
            outs = self.parts.run_last(kept, cotangents)
            return list(map(jax_internals.with_aval, outs, closed.out_avals))

        known = self.parts.known
        late = [v.aval for v in self.parts.closed.jaxpr.invars[known:]]
        values = (list(residuals), list(cotangents))
        closed, _ = jax_internals.make_jaxpr(written, *values)
        return Half(closed, jax_internals.make_jaxpr(runs, *values)[0])

    def _taken_apart(self, residuals: Sequence[Any]) -> tuple[dict[int, Any], Any]:
        count = len(self.reads)
        return dict(zip(self.reads, residuals[:count], strict=True)), iter(residuals[count:])


def trace_joint(original: Original, primals: Sequence[Any]) -> Joint:
    """Trace a program and its derivative as one program.

    Cotangents exist only after the results do. A barrier states this, so that no kernel computes
    results together with equations that read cotangents.
    """
    known = len(primals)
    plain_bytes = 0.0

    def joint(*values: Any) -> list[Any]:
        nonlocal plain_bytes
        outs, pullback = original.vjp(values[:known])
        there = {id(x) for x in (*values, *outs)}
        leaves = {id(x): x for x in jax.tree.leaves(pullback) if id(x) not in there}
        plain_bytes = sum(aval_bytes(jax.typeof(x)) for x in leaves.values())
        after = [x for x in outs if not jax_internals.is_key(x)]
        _, cotangents = jax.lax.optimization_barrier((after, values[known:]))
        return [*outs, *original.pull(pullback, cotangents)]

    closed, _ = jax_internals.make_jaxpr(joint, *primals, *original.cotangent_avals())
    return Joint(closed, known, len(original.moving), plain_bytes)
