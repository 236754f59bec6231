"""The normal forms of all outputs of two functions, over one table.

stable and naive softmax  →  [i,j] ↦ exp(x[i,j])/(Σ_k exp(x[i,k])), twice
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from symjax_rewrite.ir.flat_program import Program, flatten
from symjax_rewrite.ir.sizes import Assumptions, Dim
from symjax_rewrite.ir.term_graph import TermGraph, build, dtype_of
from symjax_rewrite.jax_internals import ClosedJaxpr, Literal
from symjax_rewrite.proofs.algebra import functions, orders, reductions
from symjax_rewrite.proofs.algebra.arithmetic import Builder, Calculus, operation
from symjax_rewrite.proofs.algebra.forms import ZERO, Atom, Index, Number, Poly, plain, plain_name
from symjax_rewrite.proofs.algebra.sign_cases import is_zero_by_cases
from symjax_rewrite.proofs.reading import sorting
from symjax_rewrite.proofs.reading.affine_forms import affine_again
from symjax_rewrite.proofs.reading.affine_trees import find_trees
from symjax_rewrite.proofs.reading.conditions import Conditions, undecided
from symjax_rewrite.proofs.reading.lifting import Lifting
from symjax_rewrite.proofs.reading.opened_loops import open_loops
from symjax_rewrite.proofs.reading.recurrences import LoopSolver, iteration_again, tree_value

ANGULAR = frozenset(["sin", "cos", "tan"])
ROUNDS = 4  # denominators within denominators that are multiplied out


BUILDERS: Mapping[str, Builder] = {
    "sum": lambda a, _, b: reductions.total(a, b[0][1], b[0][0]),
    "power": lambda a, _, b: b[0][1],
    "exp": lambda a, _, b: functions.exp(a, b[0][1]),
    "log": lambda a, _, b: functions.log(a, b[0][1]),
    "abs": lambda a, _, b: functions.absolute(a, b[0][1]),
    "positive": lambda a, _, b: functions.positive(a, b[0][1]),
    "zero": lambda a, _, b: functions.zero(a, b[0][1]),
    "mask": lambda a, _, b: functions.mask(a, b[0][1]),
    "max": lambda a, _, b: reductions.maximum(a, b),
    "take": lambda a, _, b: sorting.taken(a, b[0][1], b[0][0], [p for _, p in b[1:]]),
    "map": lambda a, f, b: functions.applied(a, *f.attr, *[p for _, p in b], integer=f.integer),
    "opaque": lambda a, f, b: a.of(a.table.intern("opaque", f.attr, b, f.facts, keeps_bound=True)),
    "argmax": orders.place_again,
    "order": orders.place_again,
    "sorted": sorting.sorted_again,
    "recurrence": affine_again,
    "iteration": iteration_again,
}


class Mode(NamedTuple):
    """Options of making normal forms.

    maxima_as_cases: True to write maxima of two values by a test. entries, angle_sums: see
    `Calculus`.
    """

    maxima_as_cases: bool = False
    entries: frozenset[tuple[Any, int]] | None = None
    angle_sums: bool = False


@dataclass(frozen=True, slots=True)
class Output:
    """An output of a function, or an entry of it.

    number: of the output. sizes: of its axes. at: the indices at which it is read. value: its
    normal form. conditions: where it is defined. laws: how many laws were applied when it was read.
    """

    number: int
    sizes: tuple[Dim, ...]
    at: tuple[Index, ...]
    value: Poly
    conditions: Conditions
    laws: int


@dataclass(slots=True)
class NormalForms:
    """The outputs of two functions f and g of the same inputs, in normal form.

    inputs: the numbers of the inputs of the program. pairs: for each output, or its entries, that
    of f and that of g, over the same names.
    """

    a: Calculus
    t: TermGraph
    inputs: tuple[int, ...]
    pairs: list[tuple[Output, Output]]

    def other_modes(self) -> Iterator[Mode]:
        """Yield the modes in which the functions may be equal if they are not in the first."""
        if any(f.kind == "map" and f.attr[0] in ANGULAR for f in self.a.table.forms):
            yield Mode(angle_sums=True)
        yield Mode(maxima_as_cases=True)
        entries = frozenset(self._entries())
        loops = [
            k for k, f in enumerate(self.a.table.forms) if f.kind in ("iteration", "recurrence")
        ]
        if entries or loops:
            yield Mode(entries=entries)
        read = [self.a.table.forms[k] for loop in loops for k in self.a.reached(loop)]
        leaves = {(f.attr, k) for f in read if f.kind == "leaf" for k in range(f.slots)}
        if not leaves <= entries:
            yield Mode(entries=entries | leaves)

    def _entries(self) -> Iterator[tuple[Any, int]]:
        """Yield the inputs, with an axis, of which entries or parts are read."""
        polys = [p for form in self.a.table.forms for _, p in form.branches]
        polys += [out.value for pair in self.pairs for out in pair]
        for atom in {atom for p in polys for mono, _ in p for atom, _ in mono}:
            form = self.a.form(atom)
            if form.kind == "leaf":
                yield from ((form.attr, k) for k, i in enumerate(atom.at) if plain_name(i) is None)


PLAIN = Mode()


def normal_forms(
    closed: ClosedJaxpr, count: int, facts: Assumptions, most_laws: int, mode: Mode = PLAIN
) -> NormalForms:
    """Return the normal forms of a program with the outputs of f, then the outputs of g.

    closed: the program; its other outputs are not read, they relate the axes of f and g. count: the
    number of outputs of f. facts: about sizes. most_laws: the budget, in applications of laws.

    Raises:
        OutOfBudgetError: the normal forms are too large.
    """
    program = flatten(closed)
    inputs = tuple(program.inputs)
    a = Calculus(BUILDERS, most_laws=most_laws, facts=facts, **mode._asdict())
    loops = open_loops(program)
    steps = {o.step: a.table.fresh(o.length) for o in loops.values()}
    t = build(program)
    lifting = Lifting(a, t, LoopSolver(loops, steps), steps, _trees(program, t))
    pairs = [pair for k in range(count) for pair in _pairs(lifting, program, k, count)]
    return NormalForms(a, t, inputs, pairs)


def _trees(program: Program, t: TermGraph) -> dict[int, Any]:
    """Return how the classes that `associative_scan` computes are read."""
    out = {}
    for v, tree in find_trees(program).items():
        cls, axes = t.view(v)
        if sorted(axes) == list(range(len(t.sizes[v]))):
            out[cls] = functools.partial(tree_value, v, tree, axes)
    return out


def _pairs(lifting: Lifting, program: Program, k: int, count: int) -> list[tuple[Output, Output]]:
    """Return an output of f and of g; if only its entries are equal, all entries of an axis."""
    a, t = lifting.a, lifting.t
    values = (program.outputs[k], program.outputs[count + k])
    sizes = next((t.sizes[v] for v in values if isinstance(v, int)), ())
    whole = [plain(a.table.fresh(s)) for s in sizes]
    choices = [[whole]]
    for axis, size in enumerate(sizes if a.entries is not None else ()):
        if isinstance(size, int) and 1 < size <= reductions.MOST_ENTRIES:
            before, after = whole[:axis], whole[axis + 1 :]
            choices.append([[*before, (n, ()), *after] for n in range(size)])
    out: list[tuple[Output, Output]] = []
    for choice in choices:
        out = []
        for at in choice:
            left, right = (_output(lifting, k, v, sizes, at) for v in values)
            out.append((left, right))
            if not equal(a, left.value, right.value):
                break
        else:
            break
    return out


def _output(
    lifting: Lifting, k: int, v: int | Literal, sizes: tuple[Dim, ...], at: list[Index]
) -> Output:
    a = lifting.a
    if isinstance(v, Literal):
        value = lifting.constant(np.asarray(v.val).item(), dtype_of(v.aval))
        return Output(k, sizes, tuple(at), value, {}, len(a.laws))
    with lifting.apart() as found:
        value = lifting.of(lifting.t.view(v), at)
    return Output(k, sizes, tuple(at), value, undecided(a, found), len(a.laws))


def equal(a: Calculus, p: Poly, q: Poly) -> bool:
    """Return True if polynomials are equal: multiplied out, or in every case of their tests."""
    rest = ZERO if p == q else a.sub(p, q)
    if cancels(a, rest):
        return True
    if not a.maxima_as_cases or not is_zero_by_cases(a, rest, functools.partial(cancels, a)):
        return False
    a.record("sign_cases", operation("same", p), q)
    return True


def cancels(a: Calculus, rest: Poly) -> bool:
    """Return True if a polynomial is zero after denominators are multiplied out."""
    for _ in range(ROUNDS):
        if rest == ZERO:
            return True
        rest = reductions.with_series(a, reductions.with_split_ranges(a, rest))
        below: dict[Atom, Number] = {}
        for mono, _ in rest:
            for atom, e in mono:
                if e < 0:
                    below[atom] = max(below.get(atom, 0), -e)
        product, multiplied = a.term(1, below), a.distributed((tuple(below.items()), 1), rest)
        rest = a.record("common_denominator", operation("mul", rest, product), multiplied)
    return rest == ZERO
