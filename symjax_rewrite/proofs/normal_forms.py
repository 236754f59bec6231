"""The normal forms of all outputs of two functions, over one table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from symjax_rewrite.ir.flat_program import Program, flatten
from symjax_rewrite.ir.term_graph import TermGraph, build
from symjax_rewrite.jax_internals import ClosedJaxpr, Literal
from symjax_rewrite.proofs import functions, reductions
from symjax_rewrite.proofs.arithmetic import Algebra, Builder
from symjax_rewrite.proofs.conditions import Conditions, undecided
from symjax_rewrite.proofs.forms import Form, Poly, plain
from symjax_rewrite.proofs.lifting import Lifting
from symjax_rewrite.proofs.opened_loops import open_loops
from symjax_rewrite.proofs.recurrences import Solver, affine_again

Operands = list[tuple[tuple[int, ...], Poly]]


def _opaque_again(a: Algebra, form: Form, branches: Operands) -> Poly:
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
    """An output of a function: its value over some index names, and when it is defined."""

    names: tuple[int, ...]
    value: Poly
    conditions: Conditions
    where: str = ""


@dataclass(slots=True)
class NormalForms:
    """The outputs of two functions f and g of the same inputs, in normal form.

    closed: the traced program that computes both. inputs: the numbers of its inputs. pairs: for
    each output, that of f and that of g, over the same names.
    """

    closed: ClosedJaxpr
    a: Algebra
    t: TermGraph
    inputs: tuple[int, ...]
    pairs: list[tuple[Output, Output]]


def normal_forms(closed: ClosedJaxpr, count: int, maxima_as_cases: bool = False) -> NormalForms:
    """Return the normal forms of a program whose outputs are those of f, then those of g."""
    program = flatten(closed)
    inputs = tuple(program.inputs)
    a = Algebra(BUILDERS, maxima_as_cases=maxima_as_cases)
    loops = open_loops(program)
    steps = {o.step: a.table.fresh(o.length) for o in loops.values()}
    t = build(program)
    lifting = Lifting(a, t, Solver(loops, steps), steps)
    pairs = [_pair(lifting, program, k, count) for k in range(count)]
    return NormalForms(closed, a, t, inputs, pairs)


def _pair(lifting: Lifting, program: Program, k: int, count: int) -> tuple[Output, Output]:
    a, t = lifting.a, lifting.t
    values = (program.outputs[k], program.outputs[count + k])
    numbered = [v for v in values if isinstance(v, int)]
    sizes = t.sizes[numbered[0]] if numbered else ()
    names = tuple(a.table.fresh(s) for s in sizes)
    out = []
    for v in values:
        if isinstance(v, Literal):
            out.append(Output(names, a.number(v.val.item(), str(v.aval.dtype)), {}))
            continue
        view = t.view(v)
        with lifting.apart() as found:
            value = lifting.of(view, [plain(n) for n in names])
        out.append(Output(names, value, undecided(a, found), t.where(view.cls)))
    return out[0], out[1]
