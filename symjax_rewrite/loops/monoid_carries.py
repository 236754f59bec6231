"""Carries that follow a monoid: a step combines the state with its own value at the identity.

A step c ← f(c, x) adds a state of a monoid if f(c, x) = c ∘ f(identity, x). Then the last state is
the first, combined with f(identity, x_t) of all t, which are computed at once. The equation is
tested exactly (`exact_steps`), so that no spelling need be known. Examples are a running
log-sum-exp, an online softmax with its values, the place of an extremum, and running moments. A
counter that steps by one can be the count of a mean.
"""

from __future__ import annotations

from collections.abc import Container, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax

from symjax_rewrite import jax_internals
from symjax_rewrite.ir.dataflow import making
from symjax_rewrite.ir.flat_program import Equation
from symjax_rewrite.loops.exact_steps import Points, Sampler, Undecided, chosen, run_exactly
from symjax_rewrite.loops.loop import Loop
from symjax_rewrite.loops.monoids import MONOIDS, CarryMonoid, Exactly, OnArrays, aligned
from symjax_rewrite.loops.motion import all_steps

COUNT = -1  # stands for a carry: a counter
MOST_EQUATIONS = 60  # of a step


class Follows(NamedTuple):
    """A carry that follows a monoid; bases: numbers of carries, or `COUNT`."""

    carry: int
    monoid: CarryMonoid
    bases: tuple[int, ...]


class Count(NamedTuple):
    """A counter as a count before the step: its value minus `offset`."""

    value: int
    offset: int


@dataclass(frozen=True, slots=True)
class MonoidFold:
    """Carries that follow monoids, in an order in which bases come first.

    equations: those of a step that make them.
    """

    loop: Loop
    follows: tuple[Follows, ...]
    equations: tuple[Equation, ...]
    count: Count | None

    @property
    def carries(self) -> list[int]:
        """Return the numbers of the carries."""
        return [f.carry for f in self.follows]

    @property
    def adds(self) -> bool:
        """Return True if a total is rounded in another order than the steps."""
        return not all(f.monoid.selects for f in self.follows)

    def totals(
        self, known: dict[int, Any], steps: dict[int, Any], starts: list[Any]
    ) -> dict[int, Any]:
        """Return the last states by number of the carry."""
        loop, firsts, length = self.loop, dict(enumerate(starts)), self.loop.length
        known = dict(known)
        for f in self.follows:
            aval = loop.body.avals[loop.carries[f.carry].inner]
            known[loop.carries[f.carry].inner] = jnp.full(
                aval.shape, f.monoid.identity_of(aval.dtype), aval.dtype
            )
        given, states = dict(steps), dict[int, Any]()
        if self.count is not None:
            dtype = loop.body.avals[self.count.value].dtype
            known[self.count.value] = jnp.asarray(self.count.offset, dtype)
            del given[self.count.value]
            counted = loop.counters[self.count.value].reshape(-1)
            first = counted[-1 if loop.reverse else 0] - self.count.offset
            firsts[COUNT], states[COUNT] = jnp.asarray(first), jnp.ones(length, np.int32)
        made = given | all_steps(list(self.equations), known, given)
        for f in self.follows:
            x = made[self._stepwise(f, made)]
            states[f.carry] = lax.rev(x, (0,)) if loop.reverse else x
        return self._combined(states, firsts)

    def _stepwise(self, f: Follows, made: Container[int]) -> int:
        """Return the value whose states over all steps make a carry.

        It is what a step adds to the carry, if the identity is zero: `0 +` would end a product.
        """
        out, inner = _next_state(self.loop, f.carry), self.loop.carries[f.carry].inner
        (last,) = [e for e in self.equations if out in e.outvals]
        if f.monoid.identity == 0 and last.name in ("add", "add_any") and inner in last.invals:
            (added,) = [v for v in last.invals if v != inner] or [None]
            aval = self.loop.body.avals
            if isinstance(added, int) and added in made and aval[added].shape == aval[out].shape:
                return added
        return out

    def _combined(self, states: dict[int, Any], firsts: dict[int, Any]) -> dict[int, Any]:
        """Return the start of each carry combined with the states of all steps."""
        totals: dict[int, Any] = {COUNT: jnp.asarray(self.loop.length)}
        finals: dict[int, Any] = {}
        for f in self.follows:
            x, dtype = states[f.carry], states[f.carry].dtype
            if f.bases and f.monoid.is_empty_with_base:
                x = self._emptied(x, f.bases[0], states, firsts)
                states[f.carry] = x
            like = aligned if f.monoid.selects else partial(_as_numbers, dtype=dtype)
            if f.monoid.forgets:
                x = self._begun(f.monoid, firsts[f.carry], x)
            ends = [(like(states[b], x.ndim), like(totals[b], x.ndim - 1)) for b in f.bases]
            total, extremum = f.monoid.total(x, *ends), None
            if isinstance(total, tuple):
                total, extremum = total
            totals[f.carry] = total
            pairs = [(like(firsts[b], total.ndim), like(totals[b], total.ndim)) for b in f.bases]
            if extremum is not None:
                pairs = [(pairs[0][0], extremum)]
            if not f.monoid.forgets:
                total = f.monoid.law(OnArrays, firsts[f.carry], total, *pairs)
            finals[f.carry] = total.astype(dtype)
        return finals

    @staticmethod
    def _begun(monoid: CarryMonoid, start: Any, x: Any) -> Any:
        """Return states of which the first is combined with the start of the loop."""
        number = lax.broadcasted_iota(np.int32, x.shape, 0)
        return jnp.where(number == 0, monoid.law(OnArrays, start[None], x), x)

    def _emptied(self, x: Any, base: int, states: dict[int, Any], firsts: dict[int, Any]) -> Any:
        """Return states that are zero where their base is an identity.

        If the loop starts from an identity, the state of the first step stays as the loop computes
        it: it may be NaN.
        """
        if base == COUNT:
            return x
        b, first = states[base], firsts[base]
        monoid = next(f.monoid for f in self.follows if f.carry == base)
        identity = monoid.identity_of(b.dtype)
        number = lax.broadcasted_iota(np.int32, b.shape, 0)
        empty = (b == identity) & ((number > 0) | (first != identity)[None])
        return jnp.where(aligned(empty, x.ndim), 0, x)


def _next_state(loop: Loop, k: int) -> int:
    """Return the value that a carry has after a step; no literal."""
    out = loop.carries[k].out
    assert isinstance(out, int)
    return out


def _as_numbers(base: Any, ndim: int, dtype: Any) -> Any:
    """Return a base with more axes; counts as numbers of the dtype of the states."""
    base = aligned(base, ndim)
    return base.astype(dtype) if jnp.issubdtype(base.dtype, jnp.integer) else base


def monoid_fold(loop: Loop, carries: set[int], level: dict[int, int]) -> MonoidFold | None:
    """Return carries as monoids if all of them are, and depend on each other alone.

    level: of each value (`Loop.levels`).
    """
    equations = [e for e in loop.body.equations if level[e.outvals[0]] == 2]
    if not carries or len(equations) > MOST_EQUATIONS:
        return None
    if any(len(e.outvals) > 1 or e.eqn.effects for e in equations):
        return None
    if any(jax_internals.is_key(loop.body.avals[v]) for e in equations for v in e.reads):
        return None
    for count in (None, *_counts(loop)):
        found = _CarryReader(loop, carries, count, level).fold()
        if found is not None:
            return found
    return None


def _counts(loop: Loop) -> Iterator[Count]:
    """Yield the counters that step by one, as counts before the step or after it."""
    for v, counted in loop.counters.items():
        line = counted.reshape(-1)
        steps = np.diff(line[::-1] if loop.reverse else line)
        if line.size == loop.length and line.dtype.kind in "iuf" and np.all(steps == 1):
            yield from (Count(v, 0), Count(v, 1))


class _Inputs(NamedTuple):
    """The values that a step reads, at the points of a sampler.

    count: before the step. before: these values, and what a step makes of any states.
    """

    sampler: Sampler
    given: dict[int, Any]
    count: Any
    before: dict[int, Any]


class _CarryReader:
    """Reader of the carries of a loop as monoids, with one counter as a count."""

    def __init__(
        self, loop: Loop, carries: set[int], count: Count | None, level: dict[int, int]
    ) -> None:
        self.loop, self.carries, self.count, self.level = loop, carries, count, level
        self.body = loop.body
        self.equations = [e for e in self.body.equations if level[e.outvals[0]] == 2]
        if count is not None:
            self.equations = [*self._of_counter(count.value, level), *self.equations]
        self.equations = [*self._tests_for_nan(), *self.equations]
        self.inner = {loop.carries[k].inner: k for k in carries}
        self.found: dict[int, Follows] = {}
        made = {v for e in self.equations for v in e.outvals}
        read = {v for e in self.equations for v in e.reads} - made
        self.read = sorted(read)
        self.numbers = self._at_points(Sampler())
        self.zeros = self._at_points(Sampler(zeros=True))
        self.ends = self._at_points(Sampler(zeros=True, ends=True))

    def _of_counter(self, v: int, level: dict[int, int]) -> list[Equation]:
        """Return the equations that read a counter and numbers alone."""
        own, known = [], {v}
        for e in self.body.equations:
            if level[e.outvals[0]] == 1 and e.reads and set(e.reads) <= known:
                own.append(e)
                known.update(e.outvals)
        return own

    def _tests_for_nan(self) -> list[Equation]:
        """Return the equations that test a number beside which a step reads it for NaN."""
        read = {v for e in self.equations for v in e.reads}
        return [
            e
            for e in self.body.equations
            if self.level[e.outvals[0]] == 1
            and {*e.reads} < read >= {*e.outvals}
            and (e.name == "is_finite" or (e.name in ("ne", "eq") and e.reads[:1] == e.reads[1:]))
        ]

    def _at_points(self, sampler: Sampler) -> _Inputs:
        avals = [self.body.avals[v] for v in self.read]
        entries = [sampler.entries(a.shape, np.dtype(a.dtype)) for a in avals]
        given, n = dict(zip(self.read, entries, strict=True)), None
        if self.count is not None:
            n = sampler.entries((), np.dtype("int32"))
            given[self.count.value] = n + sampler.constant(self.count.offset)
        return _Inputs(sampler, given, n, dict(given))

    def fold(self) -> MonoidFold | None:
        """Return the fold if every carry follows a monoid."""
        waiting = {k: self._needs(k) for k in sorted(self.carries)}
        if any(needs is None or not needs <= self.carries for needs in waiting.values()):
            return None
        while waiting:
            ready = [k for k, needs in waiting.items() if not (needs or set()) - {*self.found, k}]
            resolved = [f for k in ready if (f := self._follows(k, waiting[k] or set()))]
            if not resolved or len(resolved) < len(ready):
                return None
            for f in resolved:
                self.found[f.carry] = f
                del waiting[f.carry]
        own = making(self.equations, [_next_state(self.loop, k) for k in self.carries], set())
        fold = MonoidFold(self.loop, tuple(self.found.values()), tuple(own), self.count)
        return fold if any(self.level[v] == 1 for e in own for v in e.reads) else None

    def _needs(self, k: int) -> set[int] | None:
        """Return the carries that the next state of one depends on; None if it is no equation's."""
        out = self.loop.carries[k].out
        if not isinstance(out, int) or all(out not in e.outvals for e in self.equations):
            return None
        own = making(self.equations, [out], set())
        every = {c.inner: n for n, c in enumerate(self.loop.carries)}
        return {every[v] for e in own for v in e.reads if v in every}

    def _follows(self, k: int, needs: set[int]) -> Follows | None:
        """Return the monoid that a carry follows."""
        dtype = self.body.avals[self._inner(k)].dtype
        for monoid in MONOIDS:
            for bases in self._bases(monoid, needs) if monoid.permits(dtype) else ():
                f = Follows(k, monoid, bases)
                points = [self.numbers, self.zeros, *([self.ends] if monoid.selects else [])]
                if all(self._holds(f, inputs) for inputs in points):
                    return f
        return None

    def _bases(self, monoid: CarryMonoid, needs: set[int]) -> Iterator[tuple[int, ...]]:
        """Yield the carries that a monoid can rest on."""
        choices = [
            [
                *[b for b in needs if b in self.found and self.found[b].monoid.name == name],
                *([COUNT] if name == "sum" and self.count is not None else []),
            ]
            for name in monoid.bases
        ]
        yield from product(*choices)

    def _holds(self, f: Follows, inputs: _Inputs) -> bool:
        """Return True if a step combines the carry with the step's value at the identity."""
        try:
            return self._agrees(f, inputs)
        except Undecided:
            return False

    def _agrees(self, f: Follows, inputs: _Inputs) -> bool:
        before, after = inputs.before, self._identities(f, inputs)
        out = _next_state(self.loop, f.carry)
        own = making(self.equations, [out], set())
        self._made(f.carry, before, inputs)
        self._made(f.carry, after, inputs)
        if any(_vanishes(before[v]) for e in own for v in e.outvals):
            return False  # the error of a sum, by which it is corrected
        if self._inner(f.carry) not in before:
            return False
        lift = self._lift(f, after, inputs)
        if f.monoid.name in ("sum", "rescaled sum") and _vanishes(lift):
            return False
        pairs = [self._pair(b, before, after, lift, inputs) for b in f.bases]
        expected = f.monoid.law(Exactly, before[self._inner(f.carry)], lift, *pairs)
        return _agree(expected, before[out])

    def _lift(self, f: Follows, after: dict, inputs: _Inputs) -> Any:
        """Return the value that a step combines with a carry: 0 where its base is an identity."""
        lift = self._made(f.carry, after, inputs)
        if not f.bases or not f.monoid.is_empty_with_base or f.bases[0] == COUNT:
            return lift
        base, ndim = self.found[f.bases[0]], lift.end.ndim
        state = self._made(base.carry, after, inputs)
        if state.value is None or state.end.ndim > ndim:
            raise Undecided
        state = aligned(state, ndim)
        empty, zero = (aligned(inputs.sampler.constant(x), ndim) for x in (base.monoid.identity, 0))
        is_empty = (state.end == empty.end) & ((state.end != 0) | (state.value == empty.value))
        return chosen(is_empty, zero, lift)

    def _made(self, k: int, env: dict, inputs: _Inputs) -> Any:
        """Return the state of a carry after a step."""
        out = _next_state(self.loop, k)
        if out not in env:
            run_exactly(making(self.equations, [out], set()), env, inputs.sampler)
        return env[out]

    def _inner(self, k: int) -> int:
        return self.loop.carries[k].inner

    def _identities(self, f: Follows, inputs: _Inputs) -> dict[int, Any]:
        """Return the inputs of a step from identities."""
        env = dict(inputs.given)
        for g in (*self.found.values(), f):
            shape = self.body.avals[self._inner(g.carry)].shape
            identity = g.monoid.identity
            if self.body.avals[self._inner(g.carry)].dtype == bool:
                identity = bool(identity)
            env[self._inner(g.carry)] = inputs.sampler.constant(identity, shape)
        if self.count is not None:
            env[self.count.value] = inputs.sampler.constant(self.count.offset)
        return env

    def _pair(
        self, b: int, before: dict, after: dict, like: Any, inputs: _Inputs
    ) -> tuple[Any, Any]:
        """Return a base before a step, and the value that the step combines it with."""
        ndim = (like if isinstance(like, np.ndarray) else like.end).ndim
        if b == COUNT:
            return aligned(inputs.count, ndim), aligned(inputs.sampler.constant(1), ndim)
        state, lift = before[self._inner(b)], self._lift(self.found[b], after, inputs)
        if state.end.ndim > ndim:
            raise Undecided
        return aligned(state, ndim), aligned(lift, ndim)


def _vanishes(x: Any) -> bool:
    """Return True for a number that is zero at all points."""
    return isinstance(x, Points) and x.is_zero


def _agree(x: Any, y: Any) -> bool:
    if isinstance(x, np.ndarray):
        return isinstance(y, np.ndarray) and x.shape == y.shape and bool(np.all(x == y))
    return isinstance(y, Points) and x.end.shape == y.end.shape and x.is_equal(y)
