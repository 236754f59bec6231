"""Loops in closed form, by induction over the steps.

A step is a normal form in the carries. A carry is solved by a law of the form

    c(t+1) = c(t) + b(t)          →  c(t) = c(0) + Σ_{s<t} b(s)
    c(t+1) = max(c(t), b(t))      →  c(t) = max(c(0), max_{s<t} b(s))
    c(t+1) = a(t)·c(t) + b(t)     →  the affine recurrence of a, b and c(0)

where a and b do not read carries that are unsolved. The update of an online softmax is the first
law after a change of variables: with g(t) = exp(m(t)), `l' = l·exp(m − m') + b·exp(−m')` is
`(l·g)' = l·g + b`, and g is never zero. Carries of another form, such as h' = tanh(W·h + x(t)), are
the iteration of their starts and their step. Two iterations are equal if both are equal.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from symjax_rewrite.proofs.algebra import functions, reductions
from symjax_rewrite.proofs.algebra.arithmetic import Calculus, Leaves, operation
from symjax_rewrite.proofs.algebra.forms import (
    ONE,
    ZERO,
    Atom,
    Branch,
    Branches,
    Form,
    Index,
    Mono,
    Number,
    Poly,
    linear,
    plain,
)
from symjax_rewrite.proofs.reading.affine_forms import bound_names, recurrence
from symjax_rewrite.proofs.reading.affine_trees import Tree
from symjax_rewrite.proofs.reading.conditions import Condition
from symjax_rewrite.proofs.reading.entries import entry
from symjax_rewrite.proofs.reading.lifting import Lifting, facts_of
from symjax_rewrite.proofs.reading.opened_loops import OpenLoop


def reads(a: Calculus, p: Poly, forms: set[int]) -> bool:
    """Return True if a polynomial depends on some inputs."""
    return any(not a.reached(atom.form).isdisjoint(forms) for mono, _ in p for atom, _ in mono)


@dataclass(slots=True)
class Carried:
    """A carry: its input form, the names of its axes, its start, its next value, its solution.

    step, time: the name of the number of a step, below n, and of the steps done, up to n.
    solved: its value after so many steps, over `time` and `names`; None if it is not solved.
    """

    form: int
    names: list[int]
    start: Poly
    after: Poly
    step: int
    time: int
    solved: Poly | None = None


def leaves_of(
    a: Calculus, carries: Sequence[Carried], part: str, to: Mapping[int, Index] | None = None
) -> Leaves:
    """Return the starts, next values or solutions of carries as functions of their indices."""

    def read(c: Carried) -> Callable[[tuple[Index, ...]], Poly]:
        p, given = getattr(c, part), dict(to or {})
        if part == "solved":
            given[c.time] = given.get(c.step, plain(c.step))
        return lambda at: a.substitute(p, given | dict(zip(c.names, at, strict=True)))

    return {c.form: read(c) for c in carries if getattr(c, part) is not None}


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

    def __call__(
        self, lifting: Lifting, equation: int, output: int, at: list[Index]
    ) -> Poly | None:
        """Return an output of a loop at indices; None if the loop is not solved."""
        made = lifting.t.program.equations[equation].outvals[output]
        opened = self.loops.get(made)
        if opened is None:
            return None
        kind, what = opened.results[output]
        layout = lifting.t.ids[made]
        if kind == "outer":
            return _read(lifting, what, layout, at)
        if kind == "number":
            return lifting.a.constant(int(what))
        carries = self._carries(lifting, opened)
        if carries is None:
            return None
        if kind == "final":
            if lifting.t.ids[opened.carries[what]] != tuple(layout):
                return None
            last = {self.steps[opened.step]: lifting.a.table.size_index(opened.length)}
            return leaves_of(lifting.a, carries, "solved", last)[carries[what].form](tuple(at))
        if kind == "ys":
            return self._entry(lifting, opened, carries, opened.ys[what], 0, layout, at)
        if kind != "stored":
            return None
        k, stored = what
        avals = lifting.t.program.avals
        base = avals[stored.base] if isinstance(stored.base, int) else stored.base.aval
        whole = stored.start == 0 and stored.step == 1
        if not whole or base.shape[stored.axis] != opened.length:
            return None
        return self._entry(lifting, opened, carries, opened.ys[k], stored.axis, layout, at)

    def _entry(
        self, lifting: Lifting, opened: OpenLoop, carries: list[Carried], y: Any, axis: int,
        layout: Sequence[int], at: list[Index],
    ) -> Poly | None:  # fmt: skip
        """Return the result of the step that the axis of steps reads."""
        a, step = lifting.a, self.steps[opened.step]
        if opened.length == 1 or not isinstance(y, int):
            return None
        place = sum(len(g) for g in lifting.t.positions[y][:axis])
        rest = at[:place] + at[place + 1 :]
        if list(lifting.t.ids[y]) != [*layout[:place], *layout[place + 1 :]]:
            return None
        with lifting.apart() as found:
            p = lifting.of(lifting.t.view(y), rest)
        self._require(lifting, opened, carries, found)
        stored = at[place]
        forward = _forward(a, opened, stored)
        for c in carries:
            after = a.substitute(c.after, {step: _forward(a, opened, plain(step))})
            after = a.substitute(after, dict(zip(c.names, rest, strict=False)))
            if after == p and len(rest) == len(c.names):
                later = {step: (forward[0] + 1, forward[1])}
                return leaves_of(a, [c], "solved", later)[c.form](tuple(rest))
        leaves = leaves_of(a, carries, "solved", {step: forward})
        return a.substitute(a.replaced(p, leaves), {step: stored})

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
            form = a.table.leaf("leaf", v, len(names), **facts_of(lifting.t.dtypes[v]))
            ends = [_read(lifting, x, layout, at) for x in (start, after)]
            if ends[0] is None or ends[1] is None:
                return None
            forward = a.substitute(ends[1], {step: _forward(a, opened, plain(step))})
            time = a.table.fresh(opened.length + 1)
            carries.append(Carried(form, names, ends[0], forward, step, time))
        while unsolved := [c for c in carries if c.solved is None]:
            if not any(_solve_one(a, c, carries, step) for c in unsolved):
                _iterate(a, _group(a, unsolved), carries, step)
        return carries

    def _require(
        self, lifting: Lifting, opened: OpenLoop, carries: list[Carried], found: set[Condition]
    ) -> None:
        """Record conditions of a step, with the carries replaced by their solutions."""
        a, step = lifting.a, self.steps[opened.step]
        leaves = leaves_of(a, carries, "solved", {step: _forward(a, opened, plain(step))})
        for c in found:
            lifting.require(c.kind, a.replaced(c.p, leaves))


def _read(lifting: Lifting, value: Any, layout: Sequence[int], at: list[Index]) -> Poly | None:
    if not isinstance(value, int):
        return lifting.constant(np.asarray(value.val).item(), str(value.aval.dtype))
    same = lifting.t.ids[value] == tuple(layout)
    return lifting.of(lifting.t.view(value), at) if same else None


def _forward(a: Calculus, opened: OpenLoop, stored: Index) -> Index:
    """Return the number of a step in time, of its number in stored order; or the reverse."""
    if not opened.loop.reverse:
        return stored
    offset, terms = a.table.size_index(opened.length)
    return linear(offset - 1 - stored[0], [*terms, *((n, -s) for n, s in stored[1])])


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
            name, c.solved = made
            here = leaves_of(a, carries, "solved")
            later = a.substitute(c.solved, {c.time: (1, ((step, 1),))})
            a.record(name, operation("same", a.replaced(c.after, here)), later)
            return True
    return False


def _as_maximum(
    a: Calculus, c: Carried, me: Poly, solved: Sequence[Carried], step: int
) -> tuple[str, Poly] | None:
    """Return the fold of c' = max(c, b), or of c' = min(c, b)."""
    for sign in (1, -1):
        branches = reductions.flattened(a, (), a.scale(sign, c.after))
        old = ((), a.scale(sign, me))
        rest = [b for b in branches if b != old]
        if old not in branches or not rest or any(reads(a, p, {c.form}) for _, p in rest):
            continue
        leaves = leaves_of(a, solved, "solved")
        s = a.table.fresh(a.table.sizes[step])
        earlier = functions.mask(a, _is_earlier(a, s, c.time))
        out: list[Branch] = [((), a.scale(sign, c.start))]
        for names, p in rest:
            p = a.substitute(a.replaced(p, leaves), {step: plain(s)})
            out.append(((s, *names), a.add(p, earlier)))
        return "fold_of_maximum", a.scale(sign, reductions.maximum(a, out))
    return None


def _is_earlier(a: Calculus, s: int, time: int) -> Poly:
    """Return [s < t]."""
    return functions.positive(a, a.sub(a.index(plain(time)), a.index(plain(s))))


def _as_affine(
    a: Calculus, c: Carried, me: Poly, solved: Sequence[Carried], step: int
) -> tuple[str, Poly] | None:
    """Return the fold of c' = a·c + b, after a change of variables if a reads carries."""
    mine = me[0][0][0][0]
    parts: dict[Number, list[tuple[Mono, Number]]] = {0: [], 1: []}
    for mono, k in c.after:
        e = dict(mono).get(mine, 0)
        if e not in parts:
            return None
        parts[e].append((tuple([f for f in mono if f[0] != mine]), k))
    factor, shift = a.add(tuple(parts[1])), tuple(parts[0])
    if reads(a, factor, {c.form}) or reads(a, shift, {c.form}):
        return None
    others = {x.form for x in solved}
    gauge = _gauge(a, factor, solved) if reads(a, factor, others) else ONE
    after = a.replaced(gauge, leaves_of(a, solved, "after"))
    factor = a.product(factor, after, a.power(gauge, -1))
    shift = a.mul(shift, after)
    leaves = leaves_of(a, solved, "solved")
    if gauge != ONE and reads(a, factor, others):
        return None
    factor, shift = (a.replaced(p, leaves) for p in (factor, shift))
    start = ZERO
    if c.start != ZERO:
        start = a.mul(c.start, a.replaced(gauge, leaves_of(a, solved, "start")))
    weight = ONE if factor == ONE else _weight(a, factor, step)
    if weight is None:
        folded = recurrence(a, factor, shift, start, step, a.index(plain(c.time)))
    else:
        folded = _weighted_sum(a, c, shift, start, weight, step)
    name = "affine_recurrence" if weight is None else "fold_of_sum"
    if weight not in (None, ONE) and gauge == ONE:
        name = "change_of_variables"
    if gauge == ONE:
        return name, folded
    now = a.replaced(gauge, leaves_of(a, solved, "solved", {step: plain(c.time)}))
    return "change_of_variables", a.mul(folded, a.power(now, -1))


def _weight(a: Calculus, factor: Poly, step: int) -> Poly | None:
    """Return w(t) of a factor w(t)/w(t + 1), where w(t + 1) > 0; None for another factor.

    That of t/(t + 1) is t.
    """
    below: dict[Atom, Number] = {}
    for mono, _ in factor:
        for atom, e in mono:
            if e < 0:
                below[atom] = max(below.get(atom, 0), -e)
    denominator = (tuple(below.items()), 1)
    weight, later = a.distributed(denominator, factor), a.distributed(denominator, ONE)
    is_weight = _after(a, weight, step) == later and functions.positive(a, later) == ONE
    return weight if is_weight else None


def _after(a: Calculus, p: Poly, step: int) -> Poly:
    return a.substitute(p, {step: (1, ((step, 1),))})


def _weighted_sum(
    a: Calculus, c: Carried, shift: Poly, start: Poly, weight: Poly, step: int
) -> Poly:
    """Return the fold of c' = c·w(t)/w(t + 1) + b, where w(t) > 0 for t > 0: w·c is a sum.

    Where w(0) = 0, as for a running mean, c(0) is the start.
    """
    s = a.table.fresh(a.table.sizes[step])
    added = a.substitute(a.mul(shift, _after(a, weight, step)), {step: plain(s)})
    total = reductions.total(a, a.mul(added, _is_earlier(a, s, c.time)), (s,))
    if weight == ONE:
        return a.add(start, total)
    first, last = (a.substitute(weight, {step: at}) for at in ((0, ()), plain(c.time)))
    summed = a.mul(a.add(a.mul(first, start), total), a.power(last, -1))
    return a.case(functions.positive(a, last), summed, start)


def _gauge(a: Calculus, factor: Poly, solved: Sequence[Carried]) -> Poly:
    """Return the powers of solved carries, and of their exponentials, in a factor of one term."""
    out = ONE
    if len(factor) != 1:
        return out
    forms = {c.form for c in solved}
    for atom, e in factor[0][0]:
        inner = a.operand(atom) if a.form(atom).kind == "exp" else a.of(atom)
        carry = inner[0][0][0][0] if len(inner) == 1 and len(inner[0][0]) == 1 else None
        if carry is not None and carry.form in forms and inner == a.of(carry):
            out = a.mul(out, a.term(1, {atom: e}))
    return out


# ---------------------------------------------------------------- iterations


def _group(a: Calculus, unsolved: list[Carried]) -> list[Carried]:
    """Return the fewest carries whose next values read no other carry that is not solved."""

    def closed(c: Carried) -> list[Carried]:
        found = [c]
        for x in found:
            found += [y for y in unsolved if y not in found and reads(a, x.after, {y.form})]
        return found

    return min(map(closed, unsolved), key=len)


def _iterate(a: Calculus, group: list[Carried], carries: list[Carried], step: int) -> None:
    """Solve carries as the iteration of their step.

    Their order follows from their starts and steps, not from the order in the program.
    """
    here = leaves_of(a, carries, "solved")
    steps = {c.form: a.replaced(c.after, here) for c in group}
    levels = [_level(a, p) for c in group for p in (c.start, steps[c.form])]
    level = 1 + max(levels)
    blank = {c.form: _carry(a, c, level, -1) for c in group}

    def rank(c: Carried) -> int:
        after = bound_names(a, [step, *c.names], a.replaced(steps[c.form], _leaves(a, blank)))
        parts = [bound_names(a, c.names, c.start), after]
        return a.table.intern("ranked", None, parts, {}, keeps_bound=True).form

    group = sorted(group, key=rank)
    mine = {c.form: _carry(a, c, level, k) for k, c in enumerate(group)}
    branches: list[tuple[Sequence[int], Poly]] = []
    for c in group:
        branches.append(bound_names(a, c.names, c.start))
        after = a.replaced(steps[c.form], _leaves(a, mine))
        branches.append(bound_names(a, [step, *c.names], after))
    for k, c in enumerate(group):
        places = [((), a.index(plain(n))) for n in (c.time, *c.names)]
        attr = (level, k, tuple(mine.values()))
        c.solved = _iteration(a, attr, [*branches, *places])


def _level(a: Calculus, p: Poly) -> int:
    """Return how deeply iterations are nested in a polynomial."""
    reached = [a.table.forms[f] for mono, _ in p for x, _ in mono for f in a.reached(x.form)]
    return max((f.attr[0] for f in reached if f.kind in ("carry", "iteration")), default=0)


def _carry(a: Calculus, c: Carried, level: int, number: int) -> int:
    """Return the form of a carry inside the step of an iteration."""
    f = a.table.forms[c.form]
    return a.table.leaf("carry", (level, number, *f.facts.values()), f.slots, **f.facts)


def _leaves(a: Calculus, forms: Mapping[int, int]) -> Leaves:
    return {old: lambda at, new=new: a.of(Atom(new, at)) for old, new in forms.items()}


def _iteration(a: Calculus, attr: Any, branches: Branches) -> Poly:
    f = a.table.forms[attr[2][attr[1]]]
    return a.of(a.table.intern("iteration", attr, branches, f.facts, keeps_bound=True))


def iteration_again(a: Calculus, form: Form, branches: Branches) -> Poly:
    """Make an iteration of its starts, its steps, its place and its indices.

    Where single entries are read, h(k) of a number k becomes the step of h(k − 1).
    """
    (level, which, carries), count = form.attr, 2 * len(form.attr[2])
    found = [functions.as_index(a, p) for _, p in branches[count:]]
    made = _iteration(a, form.attr, branches)
    places = [i for i in found if i is not None]
    if a.entries is None or len(places) < len(found) or places[0][1]:
        return made
    (time, *at), (names, start), (bound, after) = places, *branches[2 * which : 2 * which + 2]
    if time[0] == 0:
        return a.substitute(start, dict(zip(names, at, strict=True)))
    if time[0] > reductions.MOST_ENTRIES:
        return made
    before = (time[0] - 1, ())

    def value(k: int) -> Callable[[tuple[Index, ...]], Poly]:
        free = [a.table.fresh(a.table.sizes[n]) for n in (bound[0], *branches[2 * k][0])]
        inner = [*branches[:count], *[((), a.index(plain(n))) for n in free]]
        h = _iteration(a, (level, k, carries), inner)
        return lambda at: a.substitute(h, dict(zip(free, (before, *at), strict=True)))

    here = a.substitute(after, dict(zip(bound, (before, *at), strict=True)))
    unfolded = a.replaced(here, {leaf: value(k) for k, leaf in enumerate(carries)})
    return a.record("unfold", operation("same", made), unfolded)


# ---------------------------------------------------------------- trees


def tree_value(
    v: int, tree: Tree, axes: tuple[int, ...], lifting: Lifting, at: list[Index]
) -> Poly | None:
    """Return a class that `associative_scan` computes; its slot k is axis `axes[k]` of value v."""
    a, t, prefix = lifting.a, lifting.t, tree.prefix
    at = [at[axes.index(k)] for k in range(len(axes))]
    step = a.table.fresh(prefix.length)
    along = t.positions[v][tree.layout.index(prefix.axis)]
    factor, shift = (
        entry(lifting, v, source, at, {prefix.axis: plain(step)}, tree.layout.index)
        for source in (prefix.factors, prefix.added)
    )
    if len(along) != 1 or factor is None or shift is None:
        return None
    after = a.add(a.index(at[along[0]]), ONE)
    if tree.kind == "A":
        return recurrence(a, factor, ZERO, ONE, step, after)
    return recurrence(a, factor, shift, ZERO, step, after)
