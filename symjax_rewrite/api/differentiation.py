"""The call of an optimised program and its transformations.

Equal values do not make equal derivatives (safe-where idioms, straight-through estimators,
subgradients at kinks). Differentiation therefore acts on the original program and never sees the
rewritten program. Reverse mode traces the original and its derivative as one joint program,
optimises the joint program, and cuts it into a forward and a backward half.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import jax

from symjax_rewrite import jax_axes, jax_calls, jax_internals
from symjax_rewrite.api.joint_gradient import (
    Half,
    Halves,
    Joint,
    Original,
    plain_halves,
    trace_joint,
)
from symjax_rewrite.api.unread_arguments import with_ones
from symjax_rewrite.jax_internals import ClosedJaxpr
from symjax_rewrite.loops.affine_trees import keeps_trees
from symjax_rewrite.loops.loop_optimizer import before_derivatives
from symjax_rewrite.optimizer import Optimiser
from symjax_rewrite.passes import loop_kernel


class Worker(Protocol):
    """Interface of an object that optimises programs and stages them out."""

    def optimised(self, closed: ClosedJaxpr) -> ClosedJaxpr | None:
        """Return the optimised program, or None if the optimiser changes nothing."""
        ...

    def stage(self, closed: ClosedJaxpr, values: Sequence[Any]) -> list[Any]:
        """Optimise a program and stage it out."""
        ...

    def optimiser(self) -> Optimiser:
        """Return the optimiser."""
        ...


@dataclass(eq=False, slots=True)
class Call:
    """A program that runs in place of another program of equal values.

    closed: the program that is differentiated. runs: the program that computes the values. worker:
    optimises the programs that transformations give.
    """

    closed: ClosedJaxpr
    runs: ClosedJaxpr
    worker: Worker
    is_half: bool = False

    def __repr__(self) -> str:
        return f"the original of {len(self.closed.jaxpr.eqns)} equations"

    def bind(self, values: Sequence[Any]) -> list[Any]:
        """Stage out `runs` as a call whose operands are the live inputs.

        JAX counts every operand of an equation as read, so the dead inputs are removed here.
        """
        used, closed = [True] * len(self.closed.jaxpr.outvars), self.closed
        if not self.is_half:  # a half's residual may depend on unread values
            with jax_axes.unchecked():
                read = jax_internals.live_part(self.runs, used)[1]
            closed = with_ones(closed, values, read)
        whole = Call(closed, self.runs, self.worker, self.is_half)
        call, runs, read = whole.narrowed(self.runs, used)
        return jax_calls.bind_call(runs, call, [x for x, r in zip(values, read, strict=True) if r])

    def narrowed(
        self, made: ClosedJaxpr, used: Sequence[bool]
    ) -> tuple[Call, ClosedJaxpr, list[bool]]:
        """Return the call of the outputs `used`, its program, and a mask of the inputs of both.

        Dead equations and carries leave the program: JAX removes none inside a call.
        """
        by_original = jax_internals.live_part(self.closed, used)[1]
        with jax_axes.unchecked():
            runs, read = jax_internals.live_part(made, used, by_original)
        closed = self.closed
        if not (all(used) and all(read)):
            closed = jax_internals.live_part(closed, used, read)[0]
        return Call(closed, runs, self.worker, self.is_half), runs, read

    def batch(self, axis: Any, values: Sequence[Any], dims: Any) -> tuple[list[Any], Any]:
        """Stage out the original under vmap and optimise it.

        Under vmap too, the backward half reads the residuals that the forward half writes.
        """
        if not self.is_half:
            batched, out_dims = jax_calls.batched(self.closed, axis, dims)
            return self.worker.stage(batched, values), out_dims
        runs, run_dims = jax_calls.batched(self.runs, axis, dims)
        _, own_dims = jax_calls.batched(self.closed, axis, dims)
        each = zip(run_dims, own_dims, strict=True)
        out_dims = [0 if mine is None and its is not None else mine for mine, its in each]
        closed, runs = (
            jax_calls.batched(p, axis, dims, out_dims)[0] for p in (self.closed, self.runs)
        )
        runs = self.worker.optimised(runs) or runs
        return Call(closed, runs, self.worker, True).bind(values), out_dims

    def moving(self, live: list[int]) -> list[bool]:
        """Return for each result: is the result a float that depends on an input in `live`?"""
        jaxpr = self.closed.jaxpr
        reached = {jaxpr.invars[k] for k in live}
        for eqn in jaxpr.eqns:
            reads = any(not jax_internals.is_literal(v) and v in reached for v in eqn.invars)
            if reads and eqn.primitive.name != "stop_gradient":
                reached.update(eqn.outvars)
        return [
            not jax_internals.is_literal(v)
            and v in reached
            and jax_internals.is_differentiable(v.aval)
            for v in jaxpr.outvars
        ]

    def jvp(self, primals: Sequence[Any], live: list[int], tangents: list[Any]) -> tuple:
        """Return results and tangents of the original; the inputs `live` have tangents."""
        function, moved = Original(self.closed, live, self.moving(live)).at(primals)
        return jax.jvp(function, moved, tangents)

    def vjp(
        self, primals: Sequence[Any], live: list[int]
    ) -> tuple[list[Any], list[Any], Any] | None:
        """Return results, residuals, and `pull`: residuals and cotangents to input cotangents.

        A cotangent that is None is zero. Returns None if the optimiser changes neither the program
        nor its derivative.
        """
        found = self._halves(primals, live)
        if found is None:
            return None
        halves, stage = found
        forward = halves.forward
        closed, read = _forwarded(forward.closed, forward.runs)
        runs, _ = _forwarded(forward.runs, forward.runs)
        made = stage(Half(closed, runs), primals)
        flat = [primals[k] if k < len(primals) else made[k - len(primals)] for k in read]
        count = len(self.closed.jaxpr.outvars)

        def pull(residuals: Sequence[Any], cotangents: list[Any]) -> list[Any]:
            given = [c for c in cotangents if c is not None]
            return stage(halves.back(residuals, cotangents), [*residuals, *given])

        return flat[:count], flat[count:], pull

    def _halves(self, primals: Sequence[Any], live: list[int]) -> tuple[Halves, Any] | None:
        """Return the halves of the derivative, and the function that stages each half out.

        A program with effects keeps the halves that JAX makes, so that the effects keep their order
        and their number. So does a program whose manual axes are checked: residuals of an optimised
        program have no types that name the axes.
        """
        moving = self.moving(live)
        if not any(moving):
            return None  # JAX asks a rule of the user's for no cotangents
        if self.closed.effects or jax_axes.are_checked():
            return plain_halves(Original(self.closed, live, moving), primals), self._apart
        original, joint = self._traced(primals, live, moving)
        if not joint.closed.effects:
            optimised = self.worker.optimised(joint.closed)
            # JAX would not ask an optimised program inside for its own halves.
            has_calls = jax_internals.has_primitive(self.closed, "sym_call")
            if optimised is None and original.closed is self.closed and not has_calls:
                return None
            halves = joint.halves(optimised or joint.closed, primals)
            if halves is not None:
                return halves, self._as_is
        return plain_halves(original, primals), self._apart

    def _traced(
        self, primals: Sequence[Any], live: list[int], moving: list[bool]
    ) -> tuple[Original, Joint]:
        """Trace the joint program of the original with loops that store the fewest residuals.

        A tree of affine steps becomes a loop beforehand only where the joint program would keep it:
        the loops of a tree and its gradient store less than the gradient of a loop.
        """
        original = Original(self._kept_small(trees=False), live, moving)
        joint = trace_joint(original, primals)
        if keeps_trees(joint.closed, self.worker.optimiser().device):
            original = Original(self._kept_small(trees=True), live, moving)
            joint = trace_joint(original, primals)
        return original, joint

    def _as_is(self, half: Half, values: Sequence[Any]) -> list[Any]:
        """Stage out a half of the joint program, which is optimised already."""
        return Call(half.closed, half.runs, self.worker, True).bind(values)

    def _apart(self, half: Half, values: Sequence[Any]) -> list[Any]:
        """Optimise a half by itself and stage it out."""
        return self.worker.stage(half.closed, values)

    def transpose(
        self, known: Sequence[Any], linear: dict[int, Any], cotangents: Sequence[Any]
    ) -> list[Any]:
        """Return cotangents of the inputs `linear`, given as avals; other inputs are `known`."""
        specs = list(linear.values())

        def backward(known: Sequence[Any], cotangents: list[Any]) -> list[Any]:
            rest = iter(known)
            fixed = [None if k in linear else next(rest) for k in range(len(self.closed.in_avals))]
            function, _ = Original(self.closed, list(linear), []).at(fixed)
            return list(jax.linear_transpose(function, *specs)(list(cotangents)))

        given = (list(known), list(cotangents))
        return self.worker.stage(
            jax_internals.make_jaxpr(backward, *given)[0], [*known, *cotangents]
        )

    def _kept_small(self, trees: bool) -> ClosedJaxpr:
        """Return the original with loops that store the fewest residuals, `trees` as loops too."""
        optimiser = self.worker.optimiser()
        options, device = optimiser.options, optimiser.device
        if not options.numerics.permits("reassoc"):
            return self.closed
        kernel = lambda loop: loop_kernel(loop, options, device, gradient=True)  # noqa: E731
        return before_derivatives(self.closed, device, kernel, trees)


def _forwarded(closed: ClosedJaxpr, runs: ClosedJaxpr) -> tuple[ClosedJaxpr, list[int]]:
    """Return a program without the outputs that `runs` forwards from inputs or other outputs.

    Returns:
        The program, and for each old output its number among the inputs and new outputs.
    """
    place = {v: k for k, v in enumerate(runs.jaxpr.invars)}
    keep, read = [], []
    for v in runs.jaxpr.outvars:
        known = None if jax_internals.is_literal(v) else place.get(v)
        keep.append(known is None)
        if known is None:
            known = len(runs.jaxpr.invars) + sum(keep) - 1
            if not jax_internals.is_literal(v):
                place[v] = known
        read.append(known)
    return jax_internals.prune_outputs(closed, keep), read


def closing_over_nothing(
    closed: ClosedJaxpr, values: Sequence[Any]
) -> tuple[ClosedJaxpr, Sequence[Any]]:
    """Return a program whose captured tracers are inputs, and the values of all inputs.

    The optimised program then holds no tracer. Derivatives with respect to a captured tracer are
    derivatives with respect to an input. References keep their places, because effects name
    references by place.
    """
    traced = [k for k, c in enumerate(closed.consts) if isinstance(c, jax_internals.Tracer)]
    if not traced or not jax_internals.custom_rules_allow(jax_internals.jaxpr_effects(closed)):
        return closed, values

    def opened(given: Sequence[Any], over: Sequence[Any]) -> list[Any]:
        consts = list(closed.consts)
        for k, value in zip(traced, over, strict=True):
            consts[k] = value
        return jax_internals.eval_jaxpr(ClosedJaxpr(closed.jaxpr, consts), *given)

    over = [closed.consts[k] for k in traced]
    return jax_internals.make_jaxpr(opened, values, over)[0], [*values, *over]


def has_derivatives(closed: ClosedJaxpr) -> bool:
    """Return True if a program has no effects and has inputs and results with tangents."""
    jaxpr = closed.jaxpr
    sides = (jaxpr.invars, jaxpr.outvars)
    may_move = lambda v: jax_internals.is_differentiable(v.aval)  # noqa: E731
    return not closed.effects and all(any(map(may_move, side)) for side in sides)
