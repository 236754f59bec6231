"""Pass that gives reductions of short rows long ones, by the forms of `row_forms`.

XLA's CPU compiler computes a reduction and the operations that it reads in one call of its library,
which takes some time for every innermost row (experiments/orientation): of a loss over n numbers,
`mean((tanh(x) - y)**2)` with x, y: float[n, 1], for every number, and of the distances of n points
in space for each of them. Axes are joined where the reduction treats them alike, and where every
array that the call reads has both or is repeated along both; an axis of one element goes with any
other.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from symjax_rewrite import jax_internals
from symjax_rewrite.candidates import Candidate, Context, Replacement
from symjax_rewrite.cost.equation_cost import elements, shape_of
from symjax_rewrite.cost.fusion_facts import FusionFacts
from symjax_rewrite.cost.library_calls import is_known
from symjax_rewrite.cost.placed_products import is_product
from symjax_rewrite.ir.dataflow import numbers, postorder, walk
from symjax_rewrite.ir.flat_program import Equation, Program
from symjax_rewrite.ir.primitives import VIEWS
from symjax_rewrite.rewriting.equation_forms import candidate, is_in_place, is_sharded
from symjax_rewrite.rewriting.fused_chains import (
    FUSED,
    REDUCTIONS,
    Fused,
    elementwise_seconds,
    is_reduced_again,
    is_view,
    size_made,
    size_read,
)
from symjax_rewrite.rewriting.fused_products import DTYPES
from symjax_rewrite.rewriting.row_forms import (
    COMPUTED,
    JoinedRows,
    RowCall,
    RowSource,
    SplitRows,
    WrittenRows,
    kept_axes,
    long_shape,
    reduced_axes,
    reduces,
)
from symjax_rewrite.rewriting.rule import LOCALITY, ROWS

RULE = (ROWS, LOCALITY)
MOVES = frozenset({"reshape", "squeeze", "transpose", "broadcast_in_dim"})
Form = JoinedRows | SplitRows | WrittenRows
Priced = tuple[Form, tuple[float, float]]  # seconds as written, and of the form


class ShortRows:
    """Pass that joins, splits or writes out the short rows of reductions."""

    name = ROWS

    def candidates(self, program: Program, context: Context) -> Iterator[Candidate]:
        """Yield reductions of short rows, and equations that drop an axis in their calls."""
        facts = context.device.fusions
        if facts is None or not context.runs(self.name) or not _has_short_rows(program, facts):
            return
        found = [e for e in program.equations if reduces(e) and is_in_place(e, DTYPES)]
        found = [e for e in found if size_read(e) >= facts.least_elements and not is_view(e)]
        r = Fused(program, context.device, facts)
        calls = _Calls(r, not jax_internals.may_be_partitioned(), context.reorders())
        forms: dict[Equation, Candidate] = {}
        for e in found:
            if min([r.chain(v).width for v in e.reads]) <= facts.short_row:
                forms |= calls.forms(e)
        dropped = {shape_of(m.eqn.invars[0]) for m in forms if _drops_rows(m)}
        for m in program.equations if dropped else ():
            if m not in forms and _drops_rows(m) and shape_of(m.eqn.invars[0]) in dropped:
                forms |= calls.form(m)  # another spelling of the same fusion
        yield from forms.values()


def _has_short_rows(program: Program, facts: FusionFacts) -> bool:
    """Return False if no large array of a program has short rows."""
    shapes = {shape for a in program.avals if (shape := getattr(a, "shape", ()))}
    short = [s for s in shapes if isinstance(s[-1], int) and s[-1] <= facts.short_row]
    return any(elements(s) >= facts.least_elements for s in short)


def _keeps_order(e: Equation) -> bool:
    """Return True if a result is the operand with axes of one element left out, added or moved."""
    if not (e.name in MOVES or is_view(e)) or len(e.reads) != 1:
        return False
    before, after = shape_of(e.eqn.invars[0]), shape_of(e.eqn.outvars[0])
    moved = [k for k in e.eqn.params.get("permutation", ()) if before[k] != 1]
    return long_shape(before) == long_shape(after) and moved == sorted(moved)


def _drops_rows(e: Equation) -> bool:
    """Return True if a result is the operand without rows of one element."""
    shapes = [shape_of(v) for v in (*e.eqn.invars[:1], *e.eqn.outvars)]
    return _keeps_order(e) and shapes[0][-1:] == (1,) and len(shapes[1]) < len(shapes[0])


class _Calls:
    """Calls of the library in a program, and their forms.

    joins: False if an axis may lie on several devices, which a joined one could not. reorders: True
    if sums may be taken in another order.
    """

    def __init__(self, r: Fused, joins: bool, reorders: bool) -> None:
        self.r, self.joins, self.reorders = r, joins, reorders
        self.outputs = {*numbers(r.program.outputs)}

    def forms(self, e: Equation) -> dict[Equation, Candidate]:
        """Return forms of a reduction, and of what drops axes in its call, where they pay."""
        makers, forms = self.r.makers, dict[Equation, Candidate]()

        def fused(v: int) -> tuple[int, ...]:
            m = makers.get(v)
            return m.reads if m is not None and (m.name in FUSED or is_view(m)) else ()

        inside = set[int]()
        for m in (e, *[makers[v] for v in walk(e.reads, fused) if v in makers]):
            if (m is e or _drops_rows(m)) and inside.isdisjoint(m.outvals):
                made = self.form(m)
                forms |= made
                inside.update(self._order(m) if made else ())
        return forms

    def form(self, e: Equation) -> dict[Equation, Candidate]:
        """Return the form of an equation with long rows, if one pays."""
        if not is_in_place(e, None) or not long_shape(shape_of(e.eqn.invars[0])):
            return {}
        order = self._order(e)
        if len(order) > self.r.facts.longest_form or (order and is_reduced_again(e, self.r)):
            return {}
        call = RowCall(e, order, self._sources(e, order), self.r.makers)
        width = min([self._shape(v)[-1] for v in (*order, *e.reads)])
        for priced in (self._joined(call, width), self._partial(call)):
            if priced is not None and self.r.pays(*priced[1]):
                form, seconds = priced
                part = Replacement(e.outvals, call.read, form.run, source=e.eqn)
                return {e: candidate(RULE, e.where(), part, seconds)}
        return {}

    def _joined(self, call: RowCall, width: int) -> Priced | None:
        """Return a call with joined axes. XLA joins those of a single array in memory itself.

        width: of the shortest innermost rows as written.
        """
        facts, steps = self.r.facts, sum([self._steps(self.r.makers[v]) for v in call.order])
        form = JoinedRows(call, self._first_joined(call))
        size, row = size_read(call.e), form.shape[-1]
        if steps < self._least_steps(call) or row <= width or width > facts.short_row:
            return None
        rows_s = [facts.rows_seconds(size / n, steps) for n in (width, row)]
        return form, self._seconds(call, form.shape, rows_s)

    def _least_steps(self, call: RowCall) -> int:
        """Return the operations from which joined axes are worth while.

        What others compute too a loop stores for all, in an order of its own behind a barrier.
        """
        makers = self.r.makers
        whole = [s.read for s in call.sources.values() if len(s.axes) == len(call.shape)]
        made = [makers[v] for v in whole if v in makers]
        return 2 if any(map(self._is_computed, made)) else 1

    def _partial(self, call: RowCall) -> Priced | None:
        """Return a call that reduces its rows, or the axis before its rows, in another form.

        A loop over rows of `scalar_row` elements computes nothing of them in vectors.
        """
        facts, row, last = self.r.facts, call.shape[-1], len(call.shape) - 1
        is_sum, reduced = call.e.name in ("reduce_sum", "dot_general"), reduced_axes(call.e)
        if row > facts.narrow_row or last < 1 or (is_sum and not self.reorders):
            return None
        computed, ended = [call.makers[v] for v in call.order], self._ended(call.e)
        if row == facts.scalar_row and (ended or any(self._steps(m) > 1 for m in computed)):
            return None
        if reduced == {last}:
            longest = facts.followed_row if ended else facts.narrow_row
            if not is_sum or self._is_shared(call):
                longest = facts.narrow_row // 2
            is_long = row > longest or row * len(computed) > facts.longest_form
            slow = any(self.r.device.functions.of(m.name) > 1 for m in computed + ended)
            is_small = slow and size_read(call.e) < facts.least_columns
            if is_long or is_small or _is_product(call):
                return None
            return self._written(call, computed, ended)
        return self._split(call) if reduced == {last - 1} and self.joins else None

    def _is_shared(self, call: RowCall) -> bool:
        """Return True if others read a value that a call computes: they have it in memory."""
        mine = {*call.e.outvals, *call.order}
        read = [u for v in call.order for u in self.r.users[v]]
        return any(mine.isdisjoint(u.outvals) for u in read)

    def _written(self, call: RowCall, computed: list[Equation], ended: list[Equation]) -> Priced:
        """Return a call that is written out.

        computed: what it computes. ended: what loops compute after it.
        """
        facts, rows = self.r.facts, math.prod(call.shape[:-1])
        functions = [self.r.device.functions.of(m.name) for m in computed + ended]
        most = self.r.device.functions.scalar
        longer = sum([min(facts.column_functions * n, most) - n for n in functions if n])
        loops_s = longer * size_read(call.e) / self.r.device.folds.fused_steps_per_s
        rows_s = [
            facts.partial_seconds(rows, sum(map(self._steps, computed + ended))),
            facts.stored_s * rows + self._pages_s(rows) + loops_s,
        ]
        users = self.r.users.get(call.e.outvals[0], ())
        stored = call.has_whole or (len(users) > 1 and not self.r.device.folds.calls_go_on)
        return WrittenRows(call, stored), self._seconds(call, call.shape, rows_s)

    def _split(self, call: RowCall) -> Priced | None:
        """Return a call whose last axis but one is split, if it has whole parts."""
        facts, shape, last = self.r.facts, call.shape, len(call.shape) - 1
        part = _part(shape[-2], facts.long_row // shape[-1])
        alone = any(last - 1 in s.axes and last not in s.axes for s in call.sources.values())
        if alone or part * shape[-1] < 2 * facts.narrow_row:
            return None
        form, steps = SplitRows(call, part), sum([self._steps(call.makers[v]) for v in call.order])
        rows = [size_read(call.e) / n for n in (shape[-1], form.shape[-1])]
        rows_s = [facts.partial_seconds(n, steps) for n in rows]
        return form, self._seconds(call, form.shape, rows_s)

    def _ended(self, e: Equation) -> list[Equation]:
        """Return what the call of a reduction computes of the size of its operand after it.

        If the call ends with the reduction, loops compute it.
        """
        size, users = size_read(e), self.r.users

        def after(m: Equation) -> list[Equation]:
            known = m.name == "select_n" and not isinstance(m.invals[0], int)  # XLA drops it
            if not (m is e or known or self._is_computed(m) or m.name in VIEWS):
                return []
            return [u for v in m.outvals for u in users.get(v, ())]

        found = [m for m in walk([e], after) if m is not e and self._is_computed(m)]
        return [m for m in found if size_made(m) == size]

    def _seconds(
        self, call: RowCall, shape: tuple[int, ...], rows_s: list[float]
    ) -> tuple[float, float]:
        """Return the seconds of a call as written, and of a form whose arrays have a shape.

        rows_s: of the rows of both.
        """
        work_s = sum([elementwise_seconds(v, self.r) for v in {*call.e.reads}])
        stored_s = self._stored_seconds(call.sources, shape)
        return work_s + rows_s[0], work_s + stored_s + rows_s[1]

    def _pages_s(self, elements: float) -> float:
        return self.r.device.page_seconds(4.0 * elements)

    def _steps(self, e: Equation) -> int:
        """Return the operations of an equation in a call; a function takes several."""
        return 0 if e.name not in COMPUTED else 1 + (self.r.device.functions.of(e.name) > 0)

    def _order(self, e: Equation) -> list[int]:
        """Return the values that a call computes for an equation, operands first.

        A value that others read too is stored, unless it is computed from smaller ones alone.
        """
        makers, users, long = self.r.makers, self.r.users, long_shape(shape_of(e.eqn.invars[0]))
        below = lambda v: self._operands(v, long)  # noqa: E731
        found, small = postorder(e.reads, below), set[int]()
        for v in found:
            operands = below(v)
            if small.issuperset(operands) if operands else not self._is_whole(v, long):
                small.add(v)
        inside, mine = list[int](), {*e.outvals}
        for v in reversed(found):
            read_here = [not mine.isdisjoint(u.outvals) for u in users[v]]
            alone = all(read_here) and v not in self.outputs
            if below(v) and any(read_here) and (alone or v in small):
                mine.update(makers[v].outvals)
                inside.append(v)
        return inside[::-1]

    def _operands(self, v: int, long: tuple[int, ...]) -> tuple[int, ...]:
        """Return the operands from which a call computes an array; none if it reads the array."""
        m = self.r.makers.get(v)
        if m is None or not m.reads or long_shape(self._shape(v)) != long or is_sharded(m):
            return ()
        is_moved = _keeps_order(m) and not _drops_rows(m)  # what drops them has a form of its own
        return m.reads if is_moved or self._is_computed(m) else ()

    def _is_computed(self, e: Equation) -> bool:
        """Return True for an elementwise operation that the library has."""
        makers = self.r.makers
        names = [makers[u].name for u in e.reads if u in makers]
        return e.name in COMPUTED and is_known(e.name, names)

    def _shape(self, v: int) -> tuple[Any, ...]:
        aval: Any = self.r.program.avals[v]
        return aval.shape

    def _is_whole(self, v: int, long: tuple[int, ...]) -> bool:
        """Return True for a value that repeats no smaller one to the shape of a call."""
        return len(self._source(v, self._shape(v)).axes) == len(long)

    def _sources(self, e: Equation, order: list[int]) -> dict[int, RowSource]:
        """Return what a call reads, by the value that it stands for."""
        found, inside = dict[int, RowSource](), {*order}
        for u in [*[self.r.makers[v] for v in order], e]:
            for v in [v for v in u.reads if v not in inside]:
                whole = shape_of(u.eqn.outvars[0]) if u.name in COMPUTED else self._shape(v)
                found[v] = self._source(v, whole)
        return found

    def _source(self, v: int, whole: tuple[Any, ...]) -> RowSource:
        """Return what is read for a value; whole: shape of the array that is computed from it."""
        m, shape = self.r.makers.get(v), self._shape(v)
        read, given, places = v, shape, tuple(range(len(shape)))
        if m is not None and m.name == "broadcast_in_dim" and len(m.invals) == 1 and m.reads:
            read, places = m.reads[0], m.eqn.params["broadcast_dimensions"]
            given = self._shape(read)
        kept = kept_axes(whole)
        axes = [kept.index(k) for k, n in zip(places, given, strict=True) if n != 1]
        return RowSource(read, tuple(axes))

    def _first_joined(self, call: RowCall) -> int:
        """Return the first of the last axes that can be joined."""
        reduced, first = reduced_axes(call.e), len(call.shape) - 1
        is_sum = call.e.name in ("reduce_sum", "dot_general")
        stays = not self.joins or (is_sum and first in reduced and not self.reorders)

        def alike(k: int) -> bool:
            same = (k in reduced) == (k + 1 in reduced)
            return same and all((k in s.axes) == (k + 1 in s.axes) for s in call.sources.values())

        while first and not stays and alike(first - 1):
            first -= 1
        return first

    def _stored_seconds(self, sources: Mapping[int, RowSource], shape: tuple[int, ...]) -> float:
        """Return the seconds in which arrays are stored that a call would compute.

        shape: of the form's arrays; an array that has it already needs no barrier.
        """
        size = math.prod(shape)
        whole = {s.read for s in sources.values() if math.prod(self._shape(s.read)) == size}
        reshaped = [v for v in whole if self._shape(v) != shape]
        count = sum(not self._is_in_memory(v) for v in reshaped)
        return count * (self.r.facts.stored_s * size + self._pages_s(size))

    def _is_in_memory(self, v: int) -> bool:
        """Return True for a value that a call reads from memory."""
        m = self.r.makers.get(v)
        if m is None or len(self.r.users[v]) > 1:
            return True
        if m.reads and (_keeps_order(m) or m.name == "reshape"):
            return self._is_in_memory(m.reads[0])
        is_called = m.name in REDUCTIONS or is_product(m) or self._is_computed(m)
        return bool(m.reads) and not is_called


def _part(n: int, most: int) -> int:
    """Return the largest divisor of a number up to a bound."""
    return max(k for k in range(1, max(most, 1) + 1) if n % k == 0)


def _is_product(call: RowCall) -> bool:
    """Return True for a sum of products that XLA computes as a product of matrices."""
    m = call.makers.get(call.e.reads[0]) if call.e.name == "reduce_sum" else None
    if m is None or m.name != "mul" or call.has_whole:
        return False
    last = len(call.shape) - 1
    read = [call.sources[v].axes for v in m.reads if v in call.sources]
    return len(read) == len(m.reads) == 2 and all(last in axes for axes in read)
