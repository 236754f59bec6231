"""An optimised call and what its transformations do (a face).

Equal values do not make equal derivatives (safe-where idioms, straight-through estimators,
subgradients at kinks), so differentiation never sees the rewritten program: it acts on the
original, and the programs it gives are optimised again. Reverse mode saves no value that the
optimised forward pass was spared; such values are computed again where they are needed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import numpy as np

from symjax_rewrite import jax_calls, jax_internals
from symjax_rewrite.api.unread_arguments import with_ones
from symjax_rewrite.jax_internals import ClosedJaxpr
from symjax_rewrite.kernel_selection.scans.selection import loop_kernel
from symjax_rewrite.loops.loop_optimizer import before_derivatives
from symjax_rewrite.loops.rematerialization import made_again
from symjax_rewrite.optimizer import Optimiser, Result

CHOOSERS = frozenset({"max", "min", "reduce_max", "reduce_min"})  # differentiated by comparing
MOVES = frozenset({"reshape", "broadcast_in_dim", "squeeze", "expand_dims", "transpose"})

Stage = Callable[[ClosedJaxpr, Sequence[Any]], list[Any]]


@dataclass(eq=False, slots=True)
class Call:
    """One optimised program in place of the original.

    result: what was decided. closed: the original program, or what is left of it where some
    outputs are not used. stage_program: stages out another program, optimised likewise.
    optimiser: what decided.
    """

    result: Result
    closed: ClosedJaxpr
    stage_program: Stage
    optimiser: Optimiser

    def __repr__(self) -> str:
        return f"the original of {len(self.closed.jaxpr.eqns)} equations"

    def bind(self, values: Sequence[Any]) -> list[Any]:
        """Stage out the optimised program, a call of the inputs that are read.

        Nobody else can tell which these are: of an equation every operand counts as read.
        """
        made = jax_internals.make_jaxpr(self.result.emit(), *values)[0]
        used = [True] * len(self.closed.jaxpr.outvars)
        closed = with_ones(self.closed, values, jax_internals.live_part(made, used)[1])
        whole = Call(self.result, closed, self.stage_program, self.optimiser)
        call, made, read = whole.narrowed(made, used)
        return jax_calls.bind_call(made, call, [x for x, r in zip(values, read, strict=True) if r])

    def narrowed(
        self, made: ClosedJaxpr, used: Sequence[bool]
    ) -> tuple[Call, ClosedJaxpr, list[bool]]:
        """Return the call of the outputs `used`, what runs then, and which inputs both take."""
        by_original = jax_internals.live_part(self.closed, used)[1]
        read = jax_internals.live_part(made, used, by_original)[1]
        if all(used) and all(read):
            return self, made, read
        closed = jax_internals.live_part(self.closed, used, read)[0]
        call = Call(self.result, closed, self.stage_program, self.optimiser)
        return call, jax_internals.live_part(made, used, read)[0], read

    def stage(self, closed: ClosedJaxpr, values: Sequence[Any]) -> list[Any]:
        """Stage out another program, optimised likewise."""
        return self.stage_program(closed, values)

    def batch(self, axis: Any, values: Sequence[Any], dims: Any) -> tuple[list[Any], Any]:
        """Stage out the original under vmap, optimised likewise."""
        batched, out_dims = jax_calls.batched(self.closed, axis, dims)
        return self.stage(batched, values), out_dims

    def moving(self, live: list[int]) -> list[bool]:
        """Which results are floats that read one of the inputs `live`."""
        jaxpr = self.closed.jaxpr
        reached = {jaxpr.invars[k] for k in live}
        for eqn in jaxpr.eqns:
            if any(not jax_internals.is_literal(v) and v in reached for v in eqn.invars):
                reached.update(eqn.outvars)
        return [
            not jax_internals.is_literal(v) and v in reached and _is_differentiable(v.aval)
            for v in jaxpr.outvars
        ]

    def jvp(self, primals: Sequence[Any], live: list[int], tangents: list[Any]) -> tuple:
        """Results and tangents of the original, where the inputs `live` have tangents."""
        return jax.jvp(self._of(self.closed, primals, live), [primals[k] for k in live], tangents)

    def vjp(self, primals: Sequence[Any], live: list[int]) -> tuple[list[Any], list[Any], Any]:
        """Results, residuals, and `pull(residuals, cotangents)` to cotangents of live inputs."""
        moving = self.moving(live)
        count = len(moving)
        trees = []
        original = self._kept_small()

        def forward(again: set[tuple], *values: Any) -> list[Any]:
            fun = self._spared(self._of(original, values, live), again)
            outs, pullback = jax.vjp(fun, *[values[k] for k in live])
            leaves, tree = jax.tree.flatten(pullback)
            trees.append(tree)
            return [*outs, *leaves]

        closed, _ = jax_internals.make_jaxpr(partial(forward, set()), *primals)
        again = set() if self.closed.effects else made_again(closed, count, self.optimiser.device)
        if again:
            closed, _ = jax_internals.make_jaxpr(partial(forward, again), *primals)
        kept, read = _forwarded(_without_remat(closed))
        made = self.stage(kept, primals)
        flat = [primals[k] if k < len(primals) else made[k - len(primals)] for k in read]

        def pull(residuals: Sequence[Any], cotangents: list[Any]) -> list[Any]:
            def backward(*both: Any) -> list[Any]:
                leaves, given = both[: len(residuals)], iter(both[len(residuals) :])
                pullback = jax.tree.unflatten(trees[-1], leaves)
                full = [
                    next(given) if m else _no_cotangent(v.aval)
                    for v, m in zip(self.closed.jaxpr.outvars, moving, strict=True)
                ]
                return list(pullback(full))

            values = [*residuals, *cotangents]
            return self.stage(
                _without_remat(jax_internals.make_jaxpr(backward, *values)[0]), values
            )

        return flat[:count], flat[count:], pull

    def transpose(
        self, known: Sequence[Any], linear: dict[int, Any], cotangents: Sequence[Any]
    ) -> list[Any]:
        """Cotangents of the inputs `linear`, given by their avals; the others are `known`."""
        specs = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in linear.values()]

        def backward(known: Sequence[Any], cotangents: list[Any]) -> list[Any]:
            rest = iter(known)
            fixed = [None if k in linear else next(rest) for k in range(len(self.closed.in_avals))]
            original = self._of(self.closed, fixed, list(linear))
            return list(jax.linear_transpose(original, *specs)(list(cotangents)))

        given = (list(known), list(cotangents))
        return self.stage(jax_internals.make_jaxpr(backward, *given)[0], [*known, *cotangents])

    def _kept_small(self) -> ClosedJaxpr:
        """The original with its loops as they keep least for a gradient."""
        optimiser = self.optimiser
        if self.closed.effects or not optimiser.options.numerics.permits("reassoc"):
            return self.closed
        options, device = optimiser.options, optimiser.device
        kernel = lambda loop: loop_kernel(loop, options, device, gradient=True)  # noqa: E731
        return before_derivatives(self.closed, device, kernel)

    def _of(
        self, closed: ClosedJaxpr, primals: Sequence[Any], live: list[int]
    ) -> Callable[..., list[Any]]:
        """A program as a function of the inputs `live`."""

        def original(*moving: Any) -> list[Any]:
            full = list(primals)
            for k, value in zip(live, moving, strict=True):
                full[k] = value
            return jax_internals.eval_jaxpr(closed, *full)

        return original

    def _spared(
        self, original: Callable[..., list[Any]], again: set[tuple]
    ) -> Callable[..., list[Any]]:
        """The same, where some results are no residuals.

        These are what the optimised program does not make, and what equations of the kinds `again`
        make. All stay in programs with complex values, for which `jax.checkpoint` has no rounding.
        """
        spares = leaves_out(self.result)
        if self.closed.effects or not (spares or again) or _has_complex(self.closed):
            return original
        spared = not_made(self.result)

        def may_save(primitive: Any, *avals: Any, **_: Any) -> bool:
            kinds = tuple(map(jax_internals.kind_of, avals))
            if not avals or (primitive.name, *kinds) in again:
                return False  # an iota is not worth its memory
            return not (spares and spared(primitive.name, kinds))

        return jax.checkpoint(original, policy=may_save, prevent_cse=False)


def _made(result: Result) -> set[int]:
    """The values of the base program that the emitted program makes, or keeps for a gradient."""
    program = result.program or result.base
    assert program is not None
    return {v for e in program.equations for v in e.outvals} | program.given | result.dear


def leaves_out(result: Result) -> bool:
    """True if some equation of the program is not among those emitted."""
    if not result.taken or result.base is None:
        return False
    made = _made(result)
    return any(made.isdisjoint(e.outvals) for e in result.base.equations)


def not_made(result: Result) -> Callable[[str, tuple[tuple, ...]], bool]:
    """Return a predicate: is a primitive on operands of some kinds left out of what is emitted?

    So it is for an equation whose results the optimised program does not make, and for whatever
    differentiation adds that reads arrays of a shape of which it makes none. A maximum whose
    derivative asks which operand it equals is not kept either where these are made again, rounded
    otherwise.
    """
    program, mine = result.base, _made(result)
    assert program is not None
    keys: dict[bool, set[tuple]] = {True: set(), False: set()}
    shapes: dict[bool, set[Any]] = {True: set(), False: set()}
    kind = jax_internals.kind_of
    shapes[True].update(kind(program.avals[v])[0] for v in program.inputs)
    there = {*mine, *program.inputs, *program.consts}
    kind_of = lambda name, kinds: (name, *(kinds[:1] if name == "sort" else kinds))  # noqa: E731
    moving, compared = program.moving(), set()  # kinds of maxima that are made again
    for e in program.equations:
        made = any(v in mine for v in e.outvals)
        shapes[made].update(kind(v.aval)[0] for v in e.eqn.outvars)
        if (
            e.name in CHOOSERS
            and e.outvals[0] in moving
            and not there.issuperset(v for v in e.invals if isinstance(v, int))
        ):
            made = False
            compared.add(kind(e.eqn.outvars[0].aval))
        keys[made].add(kind_of(e.name, [kind(v.aval) for v in e.eqn.invars]))
    unmade = shapes[False] - shapes[True]

    def left_out(name: str, operands: tuple[tuple, ...]) -> bool:
        key = kind_of(name, operands)  # a sort's derivative carries the places along
        if name in MOVES and operands[0] in compared:
            return True
        if key in keys[False] or key in keys[True]:
            return key in keys[False]
        return any(k[0] in unmade for k in operands)

    return left_out


def _has_complex(closed: ClosedJaxpr) -> bool:
    return any(
        any(_is_complex(v.aval) for v in e.outvars)
        or any(map(_has_complex, jax_internals.bodies(e)))
        for e in closed.jaxpr.eqns
    )


def _is_complex(aval: Any) -> bool:
    dtype = getattr(aval, "dtype", None)
    return dtype is not None and bool(jax.numpy.issubdtype(dtype, jax.numpy.complexfloating))


def _is_differentiable(aval: Any) -> bool:
    return bool(jax.numpy.issubdtype(aval.dtype, jax.numpy.inexact))


def _no_cotangent(aval: Any) -> Any:
    if _is_differentiable(aval):
        return jax.numpy.zeros(aval.shape, aval.dtype)
    return np.zeros(aval.shape, jax.dtypes.float0)


def _forwarded(closed: ClosedJaxpr) -> tuple[ClosedJaxpr, list[int]]:
    """The program without outputs that are inputs or other outputs.

    Returns:
        The program, and for each old output its number among the inputs and new outputs.
    """
    place = {v: k for k, v in enumerate(closed.jaxpr.invars)}
    keep, read = [], []
    for v in closed.jaxpr.outvars:
        known = None if jax_internals.is_literal(v) else place.get(v)
        keep.append(known is None)
        if known is None:
            known = len(closed.jaxpr.invars) + sum(keep) - 1
            if not jax_internals.is_literal(v):
                place[v] = known
        read.append(known)
    return jax_internals.prune_outputs(closed, keep), read


def _without_remat(closed: ClosedJaxpr) -> ClosedJaxpr:
    """The program with the bodies of its own remat equations in their place.

    For programs that only recompute: nothing stands beside them that XLA could merge them with.
    Nor is what they keep rounded to the precision that it has: that would be a copy of it.
    """

    def run(*args: Any) -> list[Any]:
        env = dict(zip(closed.jaxpr.invars, args, strict=True))
        env.update(zip(closed.jaxpr.constvars, closed.consts, strict=True))
        for eqn in closed.jaxpr.eqns:
            if _rounds_nothing(eqn):
                env[eqn.outvars[0]] = env[eqn.invars[0]]
                continue
            if eqn.primitive.name not in jax_internals.REMAT:
                jax_internals.run_equations([eqn], env)
                continue
            invals = [v.val if jax_internals.is_literal(v) else env[v] for v in eqn.invars]
            outs = jax_internals.eval_jaxpr(ClosedJaxpr(eqn.params["jaxpr"], ()), *invals)
            env.update(zip(eqn.outvars, outs, strict=True))
        return [v.val if jax_internals.is_literal(v) else env[v] for v in closed.jaxpr.outvars]

    eqns = closed.jaxpr.eqns
    if not any(eqn.primitive.name in jax_internals.REMAT or _rounds_nothing(eqn) for eqn in eqns):
        return closed
    return jax_internals.make_avals_jaxpr(run, closed.in_avals)


def _rounds_nothing(eqn: jax_internals.JaxprEqn) -> bool:
    """Whether an equation rounds float32 or wider, which is computed as it is, to itself."""
    if eqn.primitive.name != "reduce_precision" or jax_internals.is_literal(eqn.invars[0]):
        return False
    own, p = jax.numpy.finfo(jax_internals.kind_of(eqn.invars[0].aval)[1]), eqn.params
    return own.bits >= 32 and (p["exponent_bits"], p["mantissa_bits"]) == (own.nexp, own.nmant)


def closing_over_nothing(
    closed: ClosedJaxpr, values: Sequence[Any]
) -> tuple[ClosedJaxpr, Sequence[Any]]:
    """The program and its inputs, where values traced outside that it closes over are inputs too.

    Nothing that is decided then holds on to a tracer, and derivatives with respect to what is
    closed over are those with respect to an input. References stay where they are: effects name
    them by their place.
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
