"""Loops in closed form, by induction over the steps.

A step is a normal form in the carries. A carry is solved by a law of the form

    c(t+1) = c(t) + b(t)          →  c(t) = c(0) + Σ_{s<t} b(s)
    c(t+1) = max(c(t), b(t))      →  c(t) = max(c(0), max_{s<t} b(s))
    c(t+1) = a(t)·c(t) + b(t)     →  the affine recurrence of a, b and c(0)

where a and b do not read carries that are unsolved. The update of an online softmax is the first
law after a change of variables: with g(t) = exp(m(t)), `l' = l·exp(m − m') + b·exp(−m')` is
`(l·g)' = l·g + b`, and g is never zero. A loop of another form is an opaque function of its step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from symjax_rewrite.proofs import functions, reductions
from symjax_rewrite.proofs.affine_trees import Tree
from symjax_rewrite.proofs.arithmetic import Calculus, Operation
from symjax_rewrite.proofs.conditions import Condition
from symjax_rewrite.proofs.forms import (
    ONE,
    ZERO,
    Atom,
    Form,
    Index,
    Mono,
    Number,
    Poly,
    linear,
    names_of,
    plain,
)
from symjax_rewrite.proofs.lifting import Lifting, leaf
from symjax_rewrite.proofs.opened_loops import OpenLoop

FOLD = "fold of a sum: c(t+1) = c(t) + b(t)  →  c(t) = c(0) + Σ_{s<t} b(s)"
FOLD_MAX = "fold of a maximum: c(t+1) = max(c(t), b(t))  →  c(t) = max(c(0), max_{s<t} b(s))"
AFFINE = "affine recurrence: c(t+1) = a(t)·c(t) + b(t)"
GAUGE = "change of variables: c·g is folded, where g(t) ≠ 0 for all t"

Leaves = Mapping[int, Callable[[tuple[Index, ...]], Poly]]


def replaced(a: Calculus, p: Poly, leaves: Leaves) -> Poly:
    """Return a polynomial with some inputs replaced by polynomials of their indices."""
    out = []
    for mono, c in p:
        made = a.constant(c)
        for atom, e in mono:
            made = a.mul(made, _replaced_power(a, atom, e, leaves))
        out.append(made)
    return a.add(*out)


def _replaced_power(a: Calculus, atom: Atom, e: Number, leaves: Leaves) -> Poly:
    if atom.form in leaves:
        return a.power(leaves[atom.form](atom.at), e)
    if not _reads(a, atom.form, leaves):
        return ((((atom, e),), 1),)
    branches = [(names, replaced(a, p, leaves)) for names, p in a.opened(atom)]
    form = a.form(atom)
    return a.power(a.builders[form.kind](a, form, branches), e)


def _reads(a: Calculus, form: int, leaves: Leaves | set[int]) -> bool:
    return form in leaves or any(
        _reads(a, atom.form, leaves)
        for _, p in a.table.forms[form].branches
        for mono, _ in p
        for atom, _ in mono
    )


def reads(a: Calculus, p: Poly, leaves: Leaves | set[int]) -> bool:
    """Return True if a polynomial depends on some inputs."""
    return any(_reads(a, atom.form, leaves) for mono, _ in p for atom, _ in mono)


@dataclass(slots=True)
class Carried:
    """A carry: its input form, the names of its axes, its start, its next value, its solution.

    solved: its value before the step of a name, over `names`; None if it is not solved.
    """

    form: int
    names: list[int]
    start: Poly
    after: Poly
    solved: Poly | None = None


@dataclass(slots=True)
class LoopSolver:
    """The loops of a program, solved when they are read.

    loops: by the values that they make. steps: the name of the step of each loop, by the value that
    is the number of the step.
    """

    loops: dict[int, OpenLoop]
    steps: dict[int, int]
    solved: dict[int, list[Carried] | None] = field(default_factory=dict)
    conditions: dict[int, set[Condition]] = field(default_factory=dict)

    def __call__(self, lifting: Lifting, equation: int, output: int, names: list[int]) -> Any:
        """Return an output of a loop over some names; None if the loop is not solved."""
        made = lifting.t.program.equations[equation].outvals
        opened = self.loops.get(made[output])
        if opened is None:
            return None
        kind, what = opened.results[output]
        layout = lifting.t.ids[made[output]]
        at = [plain(n) for n in names]
        if kind == "outer":
            return self._read(lifting, what, layout, at)
        if kind == "number":
            return lifting.a.constant(int(what))
        carries = self._carries(lifting, opened)
        if carries is None:
            return None
        return self._result(lifting, opened, carries, kind, what, layout, at)

    def _result(
        self, lifting: Lifting, opened: OpenLoop, carries: list[Carried], kind: str, what: Any,
        layout: Sequence[int], at: list[Index],
    ) -> Poly | None:  # fmt: skip
        a, step = lifting.a, self.steps[opened.step]
        if kind == "final":
            if lifting.t.ids[opened.carries[what]] != tuple(layout):
                return None
            c = carries[what]
            assert c.solved is not None
            end = a.table.size_index(opened.length)
            return a.substitute(c.solved, {step: end, **dict(zip(c.names, at, strict=True))})
        axis, k, kept = 0, what, False
        if kind == "stored":
            k, stored = what
            axis, kept = stored.axis, stored.kept
            whole = stored.start == 0 and stored.step == 1
            if not whole or _size_of(lifting, stored.base, axis) != opened.length:
                return None
        elif kind != "ys":
            return None
        return self._entry(lifting, opened, carries, opened.ys[k], axis, kept, layout, at)

    def _entry(
        self, lifting: Lifting, opened: OpenLoop, carries: list[Carried], y: Any, axis: int,
        kept: bool, layout: Sequence[int], at: list[Index],
    ) -> Poly | None:  # fmt: skip
        """Return the result of the step that the axis of steps reads."""
        a, step = lifting.a, self.steps[opened.step]
        if opened.length == 1 or not isinstance(y, int):
            return None
        place = _place_of_axis(lifting, y, axis, kept)
        rest = at[:place] + at[place + 1 :]
        ids = [*layout[:place], *layout[place + 1 :]]
        if list(lifting.t.ids[y]) != ids:
            return None
        with lifting.apart() as found:
            p = lifting.of(lifting.t.view(y), rest)
        self._require(lifting, opened, carries, found)
        stored = at[place]
        turned = _forward(a, opened, stored)
        for c in carries:
            after = a.substitute(c.after, {step: _forward(a, opened, plain(step))})
            after = a.substitute(after, dict(zip(c.names, rest, strict=False)))
            if after == p and len(rest) == len(c.names):
                later = (turned[0] + 1, turned[1])
                here = {step: later, **dict(zip(c.names, rest, strict=True))}
                assert c.solved is not None
                return a.substitute(c.solved, here)
        leaves = self._leaves(a, carries, step, turned)
        return a.substitute(replaced(a, p, leaves), {step: stored})

    def _leaves(self, a: Calculus, carries: list[Carried], step: int, at: Index) -> Leaves:
        """Return the solved carries as functions of their indices, before a step in time."""

        def value(c: Carried) -> Callable[[tuple[Index, ...]], Poly]:
            def read(indices: tuple[Index, ...]) -> Poly:
                assert c.solved is not None
                return a.substitute(
                    c.solved, {step: at, **dict(zip(c.names, indices, strict=True))}
                )

            return read

        return {c.form: value(c) for c in carries if c.solved is not None}

    def _read(
        self, lifting: Lifting, value: Any, layout: Sequence[int], at: list[Index]
    ) -> Poly | None:
        if not isinstance(value, int):
            return lifting.constant(np.asarray(value.val).item(), str(value.aval.dtype))
        if lifting.t.ids[value] != tuple(layout):
            return None
        return lifting.of(lifting.t.view(value), at)

    def _carries(self, lifting: Lifting, opened: OpenLoop) -> list[Carried] | None:
        """Return the carries of a loop, all of them solved, or None."""
        if opened.step not in self.solved:
            self.solved[opened.step] = None  # while it is being solved
            with lifting.apart() as found:
                self.solved[opened.step] = self._solve(lifting, opened)
            self.conditions[opened.step] = found
        carries = self.solved[opened.step]
        self._require(lifting, opened, carries or [], self.conditions[opened.step])
        return carries

    def _solve(self, lifting: Lifting, opened: OpenLoop) -> list[Carried] | None:
        a, step = lifting.a, self.steps[opened.step]
        carries: list[Carried] = []
        for v, start, after in zip(opened.carries, opened.starts, opened.after, strict=True):
            layout = lifting.t.ids[v]
            names = [a.table.fresh(s) for s in lifting.t.sizes[v]]
            at = [plain(n) for n in names]
            form = leaf(a, v, lifting.t.dtypes[v], len(names))
            ends = [self._read(lifting, x, layout, at) for x in (start, after)]
            if ends[0] is None or ends[1] is None:
                return None
            turned = a.substitute(ends[1], {step: _forward(a, opened, plain(step))})
            carries.append(Carried(form, names, ends[0], turned))
        while any(c.solved is None for c in carries):
            if not any(_solve_one(a, c, carries, step) for c in carries if c.solved is None):
                return None
        return carries

    def _require(
        self, lifting: Lifting, opened: OpenLoop, carries: list[Carried], found: set[Condition]
    ) -> None:
        """Record conditions of a step, with the carries replaced by their solutions."""
        a, step = lifting.a, self.steps[opened.step]
        leaves = self._leaves(a, carries, step, _forward(a, opened, plain(step)))
        for c in found:
            lifting.require(c.kind, replaced(a, c.p, leaves))


def _forward(a: Calculus, opened: OpenLoop, stored: Index) -> Index:
    """Return the number of a step in time, of its number in stored order; or the reverse."""
    if not opened.loop.reverse:
        return stored
    offset, terms = a.table.size_index(opened.length)
    return linear(offset - 1 - stored[0], [*terms, *((n, -s) for n, s in stored[1])])


def _size_of(lifting: Lifting, value: Any, axis: int) -> Any:
    shape = lifting.t.program.avals[value].shape if isinstance(value, int) else value.aval.shape
    return shape[axis]


def _place_of_axis(lifting: Lifting, y: int, axis: int, kept: bool) -> int:
    """Return the position of the axis of steps among the atoms of the stacked result."""
    groups = lifting.t.positions[y]
    before = groups[:axis]
    return sum(len(g) for g in before)


# ---------------------------------------------------------------- laws of recurrences


def _solve_one(a: Calculus, c: Carried, carries: Sequence[Carried], step: int) -> bool:
    """Solve a carry, if its next value reads no other carry that is not solved."""
    unsolved = {x.form for x in carries if x.solved is None}
    solved = [x for x in carries if x.solved is not None]
    if reads(a, c.after, unsolved - {c.form}):
        return False
    me = a.of(Atom(c.form, tuple(plain(n) for n in c.names)))
    for law in (_as_maximum, _as_affine):
        made = law(a, c, me, solved, step)
        if made is not None:
            c.solved, text = made
            _record(a, "loop", text, c, carries, step)
            return True
    return False


def _before(a: Calculus, solved: Sequence[Carried], step: int, at: Index) -> Leaves:
    """Return solved carries before another step as functions of their indices."""

    def value(c: Carried) -> Callable[[tuple[Index, ...]], Poly]:
        def read(indices: tuple[Index, ...]) -> Poly:
            assert c.solved is not None
            return a.substitute(c.solved, {step: at, **dict(zip(c.names, indices, strict=True))})

        return read

    return {c.form: value(c) for c in solved}


def _as_maximum(
    a: Calculus, c: Carried, me: Poly, solved: Sequence[Carried], step: int
) -> tuple[Poly, str] | None:
    """Return the fold of c' = max(c, b), or of c' = min(c, b)."""
    for sign in (1, -1):
        branches = reductions.flattened(a, (), a.scale(sign, c.after))
        old = ((), a.scale(sign, me))
        rest = [b for b in branches if b != old]
        if old not in branches or not rest or any(reads(a, p, {c.form}) for _, p in rest):
            continue
        leaves = _before(a, solved, step, plain(step))
        s = a.table.fresh(a.table.sizes[step])
        out: list[tuple[tuple[int, ...], Poly]] = [((), a.scale(sign, c.start))]
        for names, p in rest:
            p = a.substitute(replaced(a, p, leaves), {step: plain(s)})
            out.append(((s, *names), a.add(p, _earlier(a, s, step))))
        return a.scale(sign, reductions.maximum(a, out)), FOLD_MAX
    return None


def _earlier(a: Calculus, s: int, step: int) -> Poly:
    return functions.mask(a, _is_earlier(a, s, step))


def _is_earlier(a: Calculus, s: int, step: int) -> Poly:
    """Return [s < t]."""
    return functions.positive(a, a.sub(a.index(plain(step)), a.index(plain(s))))


def _as_affine(
    a: Calculus, c: Carried, me: Poly, solved: Sequence[Carried], step: int
) -> tuple[Poly, str] | None:
    """Return the fold of c' = a·c + b, after a change of variables if a reads carries."""
    mine = me[0][0][0][0]
    slope: list[tuple[Mono, Number]] = []
    rest: list[tuple[Mono, Number]] = []
    for mono, k in c.after:
        e = dict(mono).get(mine, 0)
        if e == 1:
            slope.append((tuple([f for f in mono if f[0] != mine]), k))
        elif e == 0:
            rest.append((mono, k))
        else:
            return None
    factor, shift = tuple(sorted(slope)), tuple(rest)
    if reads(a, factor, {c.form}) or reads(a, shift, {c.form}):
        return None
    others = {x.form for x in solved}
    gauge = ONE
    if reads(a, factor, others):
        gauge = _gauge(a, factor, solved)
    after = replaced(a, gauge, {x.form: _next(a, x) for x in solved})
    factor = a.product(factor, after, a.power(gauge, -1))
    shift = a.mul(shift, after)
    leaves = _before(a, solved, step, plain(step))
    if reads(a, factor, others) or reads(a, shift, others):
        if gauge != ONE and reads(a, factor, others):
            return None
        factor, shift = (replaced(a, p, leaves) for p in (factor, shift))
    start = ZERO
    if c.start != ZERO:
        first = replaced(a, gauge, {x.form: _first(a, x) for x in solved})
        start = a.mul(c.start, first)
    folded = _fold(a, factor, shift, start, c.names, step)
    here = replaced(a, gauge, leaves)
    law = FOLD if factor == ONE else AFFINE
    law = law if gauge == ONE else f"{law}; {GAUGE}"
    return a.mul(folded, a.power(here, -1)), law


def _next(a: Calculus, c: Carried) -> Callable[[tuple[Index, ...]], Poly]:
    return lambda at: a.substitute(c.after, dict(zip(c.names, at, strict=True)))


def _first(a: Calculus, c: Carried) -> Callable[[tuple[Index, ...]], Poly]:
    return lambda at: a.substitute(c.start, dict(zip(c.names, at, strict=True)))


def _gauge(a: Calculus, factor: Poly, solved: Sequence[Carried]) -> Poly:
    """Return the powers of solved carries, and of their exponentials, in a factor of one term."""
    out = ONE
    if len(factor) != 1:
        return out
    forms = {c.form for c in solved}
    for atom, e in factor[0][0]:
        form = a.form(atom)
        inner = a.operand(atom) if form.kind == "exp" else a.of(atom)
        is_carry = len(inner) == 1 and len(inner[0][0]) == 1 and inner[0][0][0][0].form in forms
        if is_carry and inner[0][1] == 1 and inner[0][0][0][1] == 1:
            out = a.mul(out, a.term(1, {atom: e}))
    return out


def _fold(a: Calculus, factor: Poly, shift: Poly, start: Poly, names: list[int], step: int) -> Poly:
    """Return the value before a step of the recurrence c' = factor·c + shift."""
    s = a.table.fresh(a.table.sizes[step])
    if factor == ONE:
        term = a.mul(a.substitute(shift, {step: plain(s)}), _is_earlier(a, s, step))
        return a.add(start, reductions.total(a, term, (s,)))
    return recurrence(a, factor, shift, start, step, a.index(plain(step)))


def recurrence(a: Calculus, factor: Poly, shift: Poly, start: Poly, step: int, at: Poly) -> Poly:
    """Return h(at) of h(0) = start, h(t+1) = factor(t)·h(t) + shift(t)."""
    if shift == ZERO and start == ZERO:
        return ZERO
    branches: list[tuple[Sequence[int], Poly]] = []
    for p in (factor, shift):
        n = a.table.fresh(a.table.sizes[step])
        branches.append(((n,), a.substitute(p, {step: plain(n)})))
    branches += [((), start), ((), at)]
    return affine_again(a, None, branches)


def affine_again(
    a: Calculus, form: Form | None, branches: Sequence[tuple[Sequence[int], Poly]]
) -> Poly:
    """Make an affine recurrence of its factors, its shifts, its start and its place.

    h(e + 1) becomes a(e)·h(e) + b(e), for an index e.
    """
    (_, start), (_, place) = branches[2:]
    if place == ZERO:
        return start
    facts = {"real": all(a.is_real(p) for _, p in branches)}
    made = a.of(a.table.intern("recurrence", None, branches, facts, keeps_bound=True))
    index = functions.as_index(a, place)
    ends = None if index is None or not names_of(place) else a.table.index_range(index)
    if index is None or ends is None or not a.facts.nonnegative(ends[0] - 1):
        return made
    last = (index[0] - 1, index[1])
    factor, shift = (a.substitute(p, {names[0]: last}) for names, p in branches[:2])
    before = affine_again(a, form, [*branches[:3], ((), a.index(last))])
    unfolded = a.add(a.mul(factor, before), shift)
    operation = Operation("same", (((), made),))
    return a.recorded("unfold", f"{AFFINE}, at t + 1", operation, unfolded)


def tree_value(lifting: Lifting, v: int, tree: Tree, at: list[Index]) -> Poly | None:
    """Return a value that `associative_scan` computes, over its axes."""
    a, t, prefix = lifting.a, lifting.t, tree.prefix
    step = a.table.fresh(prefix.length)
    along = t.positions[v][tree.layout.index(prefix.axis)]
    if len(along) != 1:
        return None
    entries = []
    for source in (prefix.factors, prefix.added):
        read = _entry_of_tree(lifting, v, tree, source, at, step)
        if read is None:
            return None
        entries.append(lifting.of(t.view(source), read))
    factor, shift = entries
    after = a.add(a.index(at[along[0]]), ONE)
    if tree.kind == "A":
        return recurrence(a, factor, ZERO, ONE, step, after)
    return recurrence(a, factor, shift, ZERO, step, after)


def _entry_of_tree(
    lifting: Lifting, v: int, tree: Tree, source: int, at: list[Index], step: int
) -> list[Index] | None:
    """Return the indices at which a step of a tree reads an array of its steps."""
    t, read = lifting.t, dict[int, Index]()
    for axis, theirs in enumerate(tree.layout):
        mine, other = t.positions[v][axis], t.positions[source][theirs]
        if theirs == tree.prefix.axis:
            if len(other) != 1:
                return None
            read[other[0]] = plain(step)
        elif [t.ids[v][q] for q in mine] != [t.ids[source][q] for q in other]:
            return None
        else:
            read.update((q, at[p]) for q, p in zip(other, mine, strict=True))
    return [read[k] for k in range(len(read))]


def _record(
    a: Calculus, name: str, text: str, c: Carried, carries: Sequence[Carried], step: int
) -> None:
    """Record the induction step of a solution: one more step gives the solution one step later."""
    assert c.solved is not None
    leaves = _before(a, [x for x in carries if x.solved is not None], step, plain(step))
    after = a.substitute(c.solved, {step: (1, ((step, 1),))})
    before = Operation("same", (((), replaced(a, c.after, leaves)),))
    a.recorded(name, f"{text}; induction step", before, after)
