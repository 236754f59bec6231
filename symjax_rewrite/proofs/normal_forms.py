"""The normal forms of all outputs of two functions, over one table."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from symjax_rewrite.ir.flat_program import Program, flatten
from symjax_rewrite.ir.sizes import Assumptions
from symjax_rewrite.ir.term_graph import TermGraph, build, dtype_of
from symjax_rewrite.jax_internals import ClosedJaxpr, Literal
from symjax_rewrite.proofs import functions, reductions
from symjax_rewrite.proofs.affine_trees import Tree, find_trees
from symjax_rewrite.proofs.arithmetic import Builder, Calculus
from symjax_rewrite.proofs.conditions import Conditions, undecided
from symjax_rewrite.proofs.forms import Form, Index, Poly, plain
from symjax_rewrite.proofs.lifting import Lifting
from symjax_rewrite.proofs.opened_loops import open_loops
from symjax_rewrite.proofs.recurrences import LoopSolver, affine_again, tree_value

Operands = list[tuple[tuple[int, ...], Poly]]


def _opaque_again(a: Calculus, form: Form, branches: Operands) -> Poly:
    names = ("real", "integer", "bit", "sign")
    facts = {name: getattr(form, name) for name in names}
    return a.of(a.table.intern("opaque", form.attr, branches, facts, keeps_bound=True))


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
    "map": functions.mapped,
    "opaque": _opaque_again,
    "recurrence": affine_again,
}


@dataclass(frozen=True, slots=True)
class Output:
    """An output of a function.

    names: of its indices. value: its normal form. conditions: where it is defined. laws: how many
    laws were applied when it was read.
    """

    names: tuple[int, ...]
    value: Poly
    conditions: Conditions
    laws: int = 0


@dataclass(slots=True)
class NormalForms:
    """The outputs of two functions f and g of the same inputs, in normal form.

    closed: the traced program that computes both. inputs: the numbers of its inputs. pairs: for
    each output, that of f and that of g, over the same names.
    """

    closed: ClosedJaxpr
    a: Calculus
    t: TermGraph
    inputs: tuple[int, ...]
    pairs: list[tuple[Output, Output]]


def normal_forms(
    closed: ClosedJaxpr,
    count: int,
    facts: Assumptions,
    most_laws: int = 20_000,
    maxima_as_cases: bool = False,
) -> NormalForms:
    """Return the normal forms of a program whose first outputs are those of f, then those of g.

    Args:
        closed: the program. Its other outputs are not read; they relate the axes of f and g.
        count: the number of outputs of f.
        facts: about sizes.
        most_laws: the budget, in applications of laws.
        maxima_as_cases: True to write maxima of two values by a test.

    Raises:
        OutOfBudgetError: the normal forms are too large.
    """
    program = flatten(closed)
    inputs = tuple(program.inputs)
    a = Calculus(BUILDERS, most_laws=most_laws, maxima_as_cases=maxima_as_cases, facts=facts)
    loops = open_loops(program)
    steps = {o.step: a.table.fresh(o.length) for o in loops.values()}
    t = build(program)
    lifting = Lifting(a, t, LoopSolver(loops, steps), steps, _trees(program, t))
    pairs = [_pair(lifting, program, k, count) for k in range(count)]
    return NormalForms(closed, a, t, inputs, pairs)


def _trees(program: Program, t: TermGraph) -> dict[int, Any]:
    """Return how the classes that `associative_scan` computes are read."""
    out = {}
    for v, tree in find_trees(program).items():
        cls, axes = t.view(v)
        if sorted(axes) == list(range(len(t.sizes[v]))):
            out[cls] = functools.partial(_tree_of_class, v, tree, axes)
    return out


def _tree_of_class(
    v: int, tree: Tree, axes: tuple[int, ...], lifting: Lifting, at: list[Index]
) -> Poly | None:
    """Return the value of a class whose slot k is axis `axes[k]` of a tree's value."""
    return tree_value(lifting, v, tree, [at[axes.index(k)] for k in range(len(axes))])


def _pair(lifting: Lifting, program: Program, k: int, count: int) -> tuple[Output, Output]:
    a, t = lifting.a, lifting.t
    values = (program.outputs[k], program.outputs[count + k])
    numbered = [v for v in values if isinstance(v, int)]
    sizes = t.sizes[numbered[0]] if numbered else ()
    names = tuple(a.table.fresh(s) for s in sizes)
    out = []
    for v in values:
        if isinstance(v, Literal):
            value = lifting.constant(np.asarray(v.val).item(), dtype_of(v.aval))
            out.append(Output(names, value, {}, len(a.laws)))
            continue
        view = t.view(v)
        with lifting.apart() as found:
            value = lifting.of(view, [plain(n) for n in names])
        out.append(Output(names, value, undecided(a, found), len(a.laws)))
    return out[0], out[1]
