"""A loop and its backward loop, optimised as one step forth and back.

A loop over layers that was differentiated stores residuals of every step, such as the weights of
attention, and its backward loop reads them. Each body alone does not tell which values to store and
which to compute twice. Here both bodies are one program, from the operands of a step to the results
of both, which is optimised and cut again (`program_partition`): the forward loop stores the values
at the cut.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from typing import Any

from jax import lax

from symjax_rewrite import jax_internals
from symjax_rewrite.candidates import Candidate, Context, Found, Replacement
from symjax_rewrite.cost.equation_cost import aval_bytes
from symjax_rewrite.cost.profile_groups import SLOW_MAPS
from symjax_rewrite.ir.dataflow import numbers
from symjax_rewrite.ir.flat_program import Equation, Program, flatten
from symjax_rewrite.ir.replacement import Read
from symjax_rewrite.jax_internals import ClosedJaxpr, JaxprEqn, Var
from symjax_rewrite.loops.changes import part_of
from symjax_rewrite.loops.differentiated_loops import loop_pairs
from symjax_rewrite.loops.fusion import Surroundings
from symjax_rewrite.loops.loop import get, run_equations, scanned
from symjax_rewrite.loops.loop_optimizer import LoopPass
from symjax_rewrite.loops.normalization import normal_loop
from symjax_rewrite.loops.program_partition import (
    FUSED,
    RECOMPUTED,
    CutProgram,
    smallest_split,
    without_barrier,
)
from symjax_rewrite.loops.sunk_operands import Sinkable
from symjax_rewrite.rewriting.rule import RECOMPUTATION, REDUNDANCY


class PairedSteps(LoopPass):
    """Optimises the body of a loop and the body of its backward loop together."""

    name = "paired_steps"

    def candidates(self, program: Program, context: Context) -> Iterator[Found]:
        """Yield the pairs of loops whose steps, taken together, have a fold or store less.

        Kernels of both loops compute elementwise work again in registers.
        """
        if not (context.has(RECOMPUTATION) and context.reorders()):
            return
        loops = context.device.loops
        sinkable = Sinkable(program, loops.least_unwritten_bytes)
        for around, there, back in loop_pairs(program, context):
            length, pair = there.eqn.params["length"], _Pair(there, back, around, sinkable)
            if not isinstance(length, int) or pair.hidden_bytes < loops.least_unwritten_bytes:
                continue
            cut, bodies = None, ()
            if pair.hidden_bytes >= length * loops.least_remade_bytes:
                made = context.optimise(pair.joint())
                if any(use.taken and use.name == "fold" for use in made.routes):
                    cut, bodies = pair.cut(made.staged()), ((made, length),)
            if cut is None and loops.steps_are_launches:
                cut, bodies = pair.cut(pair.joint(), (FUSED | SLOW_MAPS,)), ()
            parts = () if cut is None else pair.parts(cut)
            if parts and (bodies or all(self._is_kernel(p, program, context) for p in parts)):
                rules, where = ((RECOMPUTATION, REDUNDANCY),), there.where()
                yield Candidate("scan", parts, where, rules=rules, bodies=bodies)

    def _is_kernel(self, part: Replacement, program: Program, context: Context) -> bool:
        """Return True if the loop of a part runs as a kernel."""
        avals = [program.avals[v] for v in numbers(part.reads)]
        inside = flatten(jax_internals.make_avals_jaxpr(part.fun, avals)).equations
        loops = [normal_loop(e) for e in inside if e.name == "scan"]
        route = self.routes(context)
        return all(x is not None and route(x)[0] is not None for x in loops)


Slot = tuple[str, Any]  # an operand of a step: its kind, and an outer value or number of a carry
FIXED, STEP, CARRY, COTANGENT = "fixed", "step", "carry", "cotangent"


class _Half:
    """One of the two loops.

    slots: of each operand of its body. equations: those that compute large fixed operands. leaves:
    the slots that the body and these equations read.
    """

    def __init__(self, e: Equation, carry: str, sinkable: Sinkable) -> None:
        self.e = e
        (spot,) = jax_internals.optimisable_bodies(e.eqn)
        self.body, self.carry = spot.body, carry
        fixed, self.count = jax_internals.scan_counts(e.eqn)
        moving = fixed + self.count
        kinds = [FIXED] * fixed + [carry] * self.count + [STEP] * (len(e.invals) - moving)
        places = [*e.invals[:fixed], *range(self.count), *e.invals[moving:]]
        self.slots: list[Slot] = [*zip(kinds, places, strict=True)]
        self.starts = e.invals[fixed:moving]
        sunk = [v for v in dict.fromkeys(numbers(e.invals[:fixed])) if sinkable.has(v)]
        leaves, self.equations = sinkable.making(sunk)
        self.leaves: dict[Slot, Any] = {
            (kind, v): aval
            for (kind, v), aval in zip(self.slots, self.body.in_avals, strict=True)
            if isinstance(v, int) and not (kind == FIXED and v in sunk)
        }
        self.leaves |= {(FIXED, v): sinkable.program.avals[v] for v in leaves}

    def run(self, env: dict[Slot, Any]) -> list[Any]:
        """Return the results of the body, from the values of its slots."""
        known = {v: x for (kind, v), x in env.items() if kind == FIXED}
        run_equations(self.equations, known)
        read = [get(known, v) if kind == FIXED else env[kind, v] for kind, v in self.slots]
        return jax_internals.eval_jaxpr(self.body, *read)


class _Pair:
    """A loop and its backward loop.

    hidden: the stacked results of the loop that only the backward loop reads, step by step. public:
    the other stacked results. known, late: the slots of the joint program, with their avals: of
    a forward step, and of a backward step alone.
    """

    def __init__(
        self, there: Equation, back: Equation, around: Surroundings, sinkable: Sinkable
    ) -> None:
        self.program = around.program
        self.there, self.back = _Half(there, CARRY, sinkable), _Half(back, COTANGENT, sinkable)
        stacked = there.outvals[self.there.count :]
        whole = {*around.outputs, *[v for kind, v in self.back.leaves if kind == FIXED]}
        whole |= {*numbers(self.back.starts)}
        self.hidden = [
            v for v in stacked if v not in whole and all(u is back for u in around.users.get(v, ()))
        ]
        self.public = [v for v in stacked if v not in self.hidden]
        self.length = there.eqn.params["length"]
        self.known, made = self.there.leaves, {(STEP, v) for v in stacked}
        late = self.back.leaves.items()
        self.late = {s: a for s, a in late if s not in self.known and s not in made}

    @property
    def hidden_bytes(self) -> float:
        """Return the bytes of the hidden results of all steps."""
        return sum(aval_bytes(self.program.avals[v]) for v in self.hidden)

    @property
    def results(self) -> int:
        """Return the number of results of a forward step that are not hidden."""
        return self.there.count + len(self.public)

    def joint(self) -> ClosedJaxpr:
        """Return the program of a forward step and the backward step that reads its residuals.

        Its operands are the known and the late slots. Its results are the forward step's that are
        not hidden, and the backward step's. A barrier makes the late operands depend on
        the forward step, so that no kernel computes results of both.
        """
        stacked = self.there.e.outvals[self.there.count :]

        def run(*values: Any) -> list[Any]:
            env = dict(zip([*self.known, *self.late], values, strict=True))
            outs, n = self.there.run(env), self.there.count
            carried, ys = outs[:n], dict(zip(stacked, outs[n:], strict=True))
            late = {s: env[s] for s in self.late if not jax_internals.is_key(env[s])}
            after = [x for x in carried if not jax_internals.is_key(x)]
            env |= lax.optimization_barrier((after, late))[1]
            env |= {(STEP, v): y for v, y in ys.items()}
            return [*carried, *[ys[v] for v in self.public], *self.back.run(env)]

        return jax_internals.make_avals_jaxpr(run, [*self.known.values(), *self.late.values()])

    def cut(
        self, joint: ClosedJaxpr, again: Sequence[Container[str] | None] = RECOMPUTED
    ) -> CutProgram | None:
        """Cut the joint program after the forward step; None if no fewer bytes are kept.

        again: choices of primitives that the backward step may compute again.
        """
        closed = _with_sealed_kernels(without_barrier(joint, len(self.known)))
        slots = zip(closed.jaxpr.invars, self.known, strict=False)
        free = {var for var, slot in slots if slot[0] == FIXED or slot in self.back.leaves}
        ends = closed.jaxpr.outvars[self.there.count : self.results]
        free.update(v for v in ends if not jax_internals.is_literal(v))
        bound = self.hidden_bytes / self.length
        found = smallest_split(closed, len(self.known), self.results, free, bound, again)
        if found is None:
            return None
        kept = sum(aval_bytes(v.aval) for v in found.kept if v not in free)
        return found if kept < bound else None

    def parts(self, cut: CutProgram) -> tuple[Replacement, Replacement]:
        """Return the parts for both loops."""
        jaxpr, n = cut.closed.jaxpr, self.there.count
        where: dict[Var, Slot] = dict(zip(jaxpr.invars, self.known, strict=False))
        ends = zip(jaxpr.outvars[n : self.results], self.public, strict=True)
        where |= {var: (STEP, v) for var, v in ends if not jax_internals.is_literal(var)}
        stacks = []  # numbers of kept values that the forward loop stacks besides
        for k, var in enumerate(cut.kept):
            if where.get(var, (CARRY, 0))[0] == CARRY:
                aval: Any = var.aval
                aval = aval.update(shape=(self.length, *aval.shape))
                where[var] = STEP, self.program.new_value(aval)
                stacks.append(k)
        kept = [where[var] for var in cut.kept]
        made = [*self.there.e.outvals[:n], *self.public, *[kept[k][1] for k in stacks]]

        def forth(env: dict[Slot, Any]) -> list[Any]:
            outs = cut.run_first([env[s] for s in self.known])
            return [*outs[: self.results], *[outs[self.results + k] for k in stacks]]

        def back(env: dict[Slot, Any]) -> list[Any]:
            return cut.run_last([env[s] for s in kept], [env[s] for s in self.late])

        return (
            _part(self.there, self.known, made, forth),
            _part(self.back, [*kept, *self.late], self.back.e.outvals, back),
        )


def _with_sealed_kernels(closed: ClosedJaxpr) -> ClosedJaxpr:
    """Return a program whose kernels later passes leave as they are."""

    def is_kernel(eqn: JaxprEqn) -> bool:
        inside = [e for b in jax_internals.bodies(eqn) for e in b.jaxpr.eqns]
        return any(jax_internals.platform_branches(e) for e in (eqn, *inside))

    def run(eqn: JaxprEqn, args: list[Any]) -> Any:
        plain = lambda *xs: jax_internals.eval_equation(eqn, xs)  # noqa: E731
        return jax_internals.sealed(plain)(*args) if is_kernel(eqn) else plain(*args)

    sealed = lambda *values: jax_internals.eval_each(closed, values, run)  # noqa: E731
    return jax_internals.make_avals_jaxpr(sealed, closed.in_avals)


def _part(
    half: _Half, slots: Iterable[Slot], makes: Sequence[int], body: Callable[[Any], list[Any]]
) -> Replacement:
    """Return a part that runs a loop with another body, which reads other slots."""
    fixed, stacked = (numbers({v: 0 for kind, v in slots if kind == k}) for k in (FIXED, STEP))

    def run(read: Read) -> list[Any]:
        known = {(FIXED, v): read(v) for v in fixed}

        def step(carried: list[Any], xs: list[Any]) -> tuple[list[Any], list[Any]]:
            env = known | {(half.carry, k): x for k, x in enumerate(carried)}
            outs = body(env | {(STEP, v): x for v, x in zip(stacked, xs, strict=True)})
            n, avals = half.count, half.body.out_avals
            return [*map(jax_internals.with_aval, outs[:n], avals)], outs[n:]

        return scanned(half.e, step, map(read, half.starts), map(read, stacked))

    return part_of(half.e.eqn, [*fixed, *numbers(half.starts), *stacked], makes, run)
