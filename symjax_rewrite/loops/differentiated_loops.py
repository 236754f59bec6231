"""Loops together with their gradients, where JAX would differentiate another form of the loop.

A program that was differentiated before it is optimised holds a loop that stores residuals, and a
backward loop that reads them. If the gradient of another form of the loop is better (states made
again instead of stored, for example), the pair is replaced by that form and its gradient, as if the
optimised loop had been differentiated. The backward loop is recognised by deriving it again: JAX
differentiates the loop without its residuals, and the same equations must result. So rules of the
user's and subgradients are kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any

import jax

from symjax_rewrite import jax_internals
from symjax_rewrite.candidates import Context, Found, Replacement
from symjax_rewrite.cost.device_profiles import Device
from symjax_rewrite.cost.equation_cost import aval_bytes
from symjax_rewrite.ir.dataflow import numbers
from symjax_rewrite.ir.flat_program import Equation, Program, flatten
from symjax_rewrite.ir.primitives import ELEMENTWISE, VIEWS
from symjax_rewrite.ir.value_numbering import ValueNumbers
from symjax_rewrite.jax_internals import ClosedJaxpr
from symjax_rewrite.loops.changes import candidate
from symjax_rewrite.loops.fusion import Surroundings
from symjax_rewrite.loops.loop import Loop, get, run_equations, scanned
from symjax_rewrite.loops.loop_optimizer import LoopPass, Routed, before_derivatives
from symjax_rewrite.loops.normalization import normal_loop
from symjax_rewrite.loops.rematerialization import backward_loops, fused_pair
from symjax_rewrite.rewriting.rule import RECOMPUTATION

MOST_CHOICES = 8  # assignments of cotangents to results that are tried
MOST_SUNK = 16  # equations before a loop that are taken for equations of its steps


class DifferentiatedLoops(LoopPass):
    """Replaces loops and their backward loops by another loop and its gradient.

    Its kernels are those with cheap derivatives.
    """

    name = "differentiated_loops"

    def candidates(self, program: Program, context: Context) -> Iterator[Found]:
        """Yield the pairs of loops that have a better form."""
        if not (context.has(RECOMPUTATION) and context.reorders()):
            return
        route = self.routes(context)
        numbering: list[tuple[ValueNumbers, dict[int, int]]] = []
        for around, there, back in loop_pairs(program, context):
            pair = _LoopAndGradient(around, there, back)
            if _improved(pair.loop(), context.device, route) is None or pair.fuses():
                continue
            if not numbering:
                known = ValueNumbers()
                given = [known.named("input", v) for v in program.inputs]
                numbering.append((known, known.of(program, given)))
            if not pair.is_derived(*numbering[0]):
                continue
            better = _improved(pair.loop(), context.device, route)
            if better is not None:
                reason = "the loop and its gradient are those of another form of the loop"
                yield candidate(*pair.parts(better), names=[RECOMPUTATION], reason=reason)


def _improved(
    closed: ClosedJaxpr, device: Device, route: Callable[[Loop], Routed]
) -> ClosedJaxpr | None:
    """Return a form of a loop with a better gradient, or None."""
    better = before_derivatives(closed, device, route)
    return None if better is closed else better


def _may_sink(maker: Equation | None) -> bool:
    return maker is not None and not maker.eqn.effects and maker.name in ELEMENTWISE | VIEWS


def loop_pairs(
    program: Program, context: Context
) -> Iterator[tuple[Surroundings, Equation, Equation]]:
    """Yield the scans with the one scan that reads their results in the other direction."""
    scans = [e for e in program.equations if e.name == "scan" and not e.eqn.effects]
    if len(scans) < 2:
        return
    around = context.once(Surroundings, program)
    backs: dict[Equation, list[Equation]] = {e: [] for e in scans}
    for there, back in backward_loops(around):
        backs[there].append(back)
    yield from ((around, there, back[0]) for there, back in backs.items() if len(back) == 1)


@dataclass(slots=True)
class _LoopAndGradient:
    """A loop and its backward loop.

    public: the results of the loop that others read. wanted: the results of the backward loop that
    others read. sunk: equations before the loop that are differentiated as equations of its steps.
    cotangents: the cotangent of each public result, None if it has none. made: by result of the
    backward loop, the number among `live` of the value whose cotangent it is.
    """

    around: Surroundings
    there: Equation
    back: Equation
    public: list[int] = field(init=False)
    wanted: list[int] = field(init=False)
    sunk: list[Equation] = field(default_factory=list)
    cotangents: list[int | None] = field(default_factory=list)
    made: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        users, outputs = self.around.users, self.around.outputs

        def is_read(v: int) -> bool:
            return v in outputs or any(u is not self.back for u in users.get(v, ()))

        self.public = [v for v in self.there.outvals if is_read(v)]
        self.wanted = [v for v in self.back.outvals if is_read(v)]

    @property
    def program(self) -> Program:
        """Return the program that holds both loops."""
        return self.around.program

    @property
    def reads(self) -> list[int]:
        """Return the values that the loop reads, with the sunk equations as a part of it."""
        made = {v for e in self.sunk for v in e.outvals}
        invals = (v for e in (*self.sunk, self.there) for v in e.reads)
        return [v for v in dict.fromkeys(invals) if v not in made]

    @property
    def live(self) -> list[int]:
        """Return the values that the loop reads and that may have cotangents."""
        return [v for v in self.reads if jax_internals.is_differentiable(self.program.avals[v])]

    @property
    def given(self) -> list[int]:
        """Return the cotangents of the public results that have one."""
        return [v for v in self.cotangents if v is not None]

    def fuses(self) -> bool:
        """Return True if the loops could compute coefficients as large as their states themselves.

        The gradient of another form would read these coefficients from memory, and write theirs.
        """
        there, back = normal_loop(self.there), normal_loop(self.back)
        if there is None or back is None:
            return True
        saved = fused_pair(there, back, self.around, [self.there, self.back], True)[2]
        states = sum(aval_bytes(there.body.avals[c.inner]) for c in there.carries)
        return saved >= there.length * states

    def loop(self) -> ClosedJaxpr:
        """Return the loop without its residuals, from `reads` to the public results."""
        reads = self.reads

        def run(*values: Any) -> list[Any]:
            outs = self._run(dict(zip(reads, values, strict=True)))
            made = dict(zip(self.there.outvals, outs, strict=True))
            return [made[v] for v in self.public]

        closed = jax_internals.make_avals_jaxpr(run, [self.program.avals[v] for v in reads])
        return jax_internals.without_dead(closed)

    def _run(self, known: dict[int, Any]) -> list[Any]:
        """Return the results of the loop; every step also runs the sunk equations."""
        body, (n, m) = self.there.eqn.params["jaxpr"], jax_internals.scan_counts(self.there.eqn)
        avals = body.in_avals[n : n + m]

        def typed(carry: Sequence[Any]) -> list[Any]:
            return [jax_internals.with_aval(x, a) for x, a in zip(carry, avals, strict=True)]

        def step(carry: list[Any], xs: list[Any]) -> tuple[list[Any], list[Any]]:
            env = dict(known)
            run_equations(self.sunk, env)
            consts = [get(env, v) for v in self.there.invals[:n]]
            outs = jax_internals.eval_jaxpr(body, *consts, *carry, *xs)
            return typed(outs[:m]), outs[m:]

        env = dict(known)
        run_equations(self.sunk, env)
        given = [get(env, v) for v in self.there.invals[n:]]
        return scanned(self.there, step, typed(given[:m]), given[m:])

    def is_derived(self, known: ValueNumbers, numbered: dict[int, int]) -> bool:
        """Return True if JAX makes the backward loop of the loop; find the cotangents.

        JAX computes loop-invariant values before the loop, and differentiates them in the steps.
        So the maker of an operand is sunk into the steps where its cotangent is not found.
        """
        makers = self.around.makers
        fixed = jax_internals.scan_counts(self.there.eqn)[0]
        for choice in islice(self._choices(), MOST_CHOICES):
            self.cotangents, self.sunk = list(choice), []
            operands = numbers(self.there.invals[:fixed])
            while True:
                found = self._found(known, numbered)
                if len(self.made) == len(self.wanted):
                    return True
                more = [v for v in operands if v not in found and _may_sink(makers.get(v))]
                if not more or len(self.sunk) + len(more) > MOST_SUNK:
                    break
                sunk = {id(makers[v]) for v in more} | {id(e) for e in self.sunk}
                self.sunk = [e for e in self.program.equations if id(e) in sunk]
                operands = [u for v in more for u in makers[v].reads]
        return False

    def _found(self, known: ValueNumbers, numbered: dict[int, int]) -> set[int]:
        """Derive the gradient, find results of the backward loop in it; return their values."""
        given = [*self.reads, *self.given]
        closed, avals = self.loop(), [self.program.avals[v] for v in given]
        gradient = jax_internals.make_avals_jaxpr(lambda *xs: self._gradient(closed, xs), avals)
        derived = flatten(jax_internals.without_dead(gradient))
        env = known.of(derived, [numbered[v] for v in given])
        place = {known.read(v, env): k for k, v in enumerate(derived.outputs)}
        self.made = {v: place[numbered[v]] for v in self.wanted if numbered[v] in place}
        return {self.live[k] for k in self.made.values()}

    def _choices(self) -> Iterator[tuple[int | None, ...]]:
        """Yield the values that may be the cotangents of the public results, likely ones first."""
        avals, own = self.program.avals, {*self.reads, *self.there.outvals}
        given = [v for v in dict.fromkeys(self.back.reads) if v not in own]

        def from_result(k: int, left: list[int]) -> Iterator[tuple[int | None, ...]]:
            if k == len(self.public):
                yield ()
                return
            like = [v for v in left if _is_cotangent(avals[v], avals[self.public[k]])]
            for v in (*like, None):
                for rest in from_result(k + 1, [u for u in left if u != v]):
                    yield v, *rest

        return (each for each in from_result(0, given) if any(v is not None for v in each))

    def _pullback(self, closed: ClosedJaxpr, values: Sequence[Any]) -> tuple[list[Any], Any]:
        """Return the public results, and the pullback of those that have cotangents."""
        known = dict(zip(self.reads, values, strict=True))

        def moving(*given: Any) -> tuple[list[Any], list[Any]]:
            full = (known | dict(zip(self.live, given, strict=True))).values()
            outs = jax_internals.eval_jaxpr(closed, *full)
            kept = [c is not None for c in self.cotangents]
            return [x for x, k in zip(outs, kept, strict=True) if k], outs

        _, pull, outs = jax.vjp(moving, *[known[v] for v in self.live], has_aux=True)
        return outs, pull

    def _gradient(self, closed: ClosedJaxpr, values: Sequence[Any]) -> list[Any]:
        count = len(self.reads)
        _, pull = self._pullback(closed, values[:count])
        return list(pull(list(values[count:])))

    def parts(self, better: ClosedJaxpr) -> tuple[Replacement, Replacement]:
        """Return another form of the loop and its gradient as parts of the program."""
        reads, given, trees = self.reads, self.given, []

        def forward(*values: Any) -> list[Any]:
            outs, pull = self._pullback(better, values)
            leaves, tree = jax.tree.flatten(pull)
            trees.append(tree)
            return [*outs, *leaves]

        closed = jax_internals.make_avals_jaxpr(forward, [self.program.avals[v] for v in reads])
        kept = [self.program.new_value(a) for a in closed.out_avals[len(self.public) :]]

        def backward(*values: Any) -> list[Any]:
            pull = jax.tree.unflatten(trees[0], values[: len(kept)])
            found = pull(list(values[len(kept) :]))
            return [found[k] for k in self.made.values()]

        run = partial(jax_internals.eval_jaxpr, closed)
        return (
            Replacement((*self.public, *kept), tuple(reads), run, source=self.there.eqn),
            Replacement(tuple(self.made), (*kept, *given), backward, source=self.back.eqn),
        )


def _is_cotangent(aval: Any, of: Any) -> bool:
    return jax_internals.is_differentiable(of) and (aval.shape, aval.dtype) == (of.shape, of.dtype)
