"""Passes that compute single equations of one array by another function of the array."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, ClassVar

from symjax_rewrite import jax_internals
from symjax_rewrite.candidates import Candidate, Context, Replacement
from symjax_rewrite.cost import margins
from symjax_rewrite.cost.term_cost import Cost
from symjax_rewrite.ir.dataflow import makers_of, walk
from symjax_rewrite.ir.flat_program import Equation, Program
from symjax_rewrite.ir.primitives import ELEMENTWISE, VIEWS
from symjax_rewrite.ir.replacement import Part

Seconds = tuple[float, float]  # predicted as written, and of the other form
Form = tuple[Callable[[Any], Any], Seconds]

SAME_ORDER = frozenset({"reshape", "squeeze"})  # of the elements in memory
JOINS = frozenset({"concatenate", "stack"})


class EquationForms(ABC):
    """A pass over single equations.

    rule: the name of the transformation, and its property. primitives, dtypes: of the equations and
    arrays that it examines. margin: see `cost.margins`.
    """

    rule: ClassVar[tuple[str, str]]
    primitives: ClassVar[Collection[str]]
    dtypes: ClassVar[tuple[str, ...]]
    margin: ClassVar[margins.Kind]

    @property
    def name(self) -> str:
        """Return the name of the transformation."""
        return self.rule[0]

    @abstractmethod
    def form(
        self, e: Equation, context: Context, unstored: Callable[[], float | None]
    ) -> Form | None:
        """Return another form of an equation, or None.

        unstored: returns the bytes of the operand that the form writes first (`unstored_bytes`).
        """

    def leaves(self, e: Equation, makers: Mapping[int, Equation]) -> bool:
        """Return True for an equation that XLA computes well by what makes its operands."""
        del e, makers
        return False

    def candidates(self, program: Program, context: Context) -> Iterator[Candidate]:
        """Yield the equations that have a cheaper form."""
        if not context.runs(self.name):
            return
        found = [e for e in program.equations if e.name in self.primitives]
        found = [e for e in found if is_in_place(e, self.dtypes)]
        makers = program.once(makers_of) if found else {}
        for e in found:
            if self.leaves(e, makers):
                continue
            made = self.form(e, context, lambda e=e: unstored_bytes(program, e, makers))
            if made is not None and margins.pays(*made[1], self.margin, context.device):
                part = Replacement(e.outvals, e.invals, made[0], source=e.eqn)
                yield candidate(self.rule, e.where(), part, made[1])


def candidate(
    rule: tuple[str, str], where: str, part: Part, seconds: Seconds, **fields: Any
) -> Candidate:
    """Return the candidate of a rule (name, property) with one part, at the user's line `where`.

    fields: further fields of `Candidate`.
    """
    before, after = (Cost(seconds=s) for s in seconds)
    fields = {"key": rule[0], "share": True, **fields}
    return Candidate(rule[0], (part,), where, rules=(rule,), before=before, after=after, **fields)


def is_in_place(e: Equation, dtypes: tuple[str, ...] | None) -> bool:
    """Return True if an equation reads an array of static sizes that is not empty or sharded.

    dtypes: of the array; None for any.
    """
    aval: Any = e.eqn.invars[0].aval
    is_static = all(isinstance(n, int) and n > 0 for n in aval.shape)
    is_array = isinstance(e.invals[0], int) and (dtypes is None or aval.dtype in dtypes)
    return is_array and is_static and not is_sharded(e)


def is_sharded(e: Equation) -> bool:
    """Return True if an equation, one of its operands or one of its results names a sharding."""
    avals = [v.aval for v in (*e.eqn.invars, *e.eqn.outvars)]
    shardings = (e.eqn.params.get("out_sharding"), *[getattr(a, "sharding", None) for a in avals])
    return any(map(jax_internals.constrains, shardings))


def unstored_bytes(program: Program, e: Equation, makers: dict[int, Equation]) -> float | None:
    """Return the bytes of an operand that XLA computes in the loop of an equation; 0 if stored.

    None if no array that the operand is computed from has as many elements: it would be the
    largest. Arrays that are joined are read where they lie.

    Example: of `reduce_sum(exp(x))` the bytes of `exp(x)`, and 0 of `reduce_sum(x)`; None of
    `reduce_sum(exp(x[:, None] - y))`.
    """
    (x,) = e.reads
    while x in makers and makers[x].name in SAME_ORDER and makers[x].reads:
        x, *_ = makers[x].reads
    fused = lambda v: v in makers and makers[v].name in ELEMENTWISE | VIEWS  # noqa: E731
    if not fused(x):
        return None if x in makers and makers[x].name in JOINS else 0.0
    size = program.avals[x].size
    for v in walk([x], lambda v: makers[v].reads if fused(v) else ()):
        if not fused(v) and getattr(program.avals[v], "size", 0) >= size:
            return size * program.avals[x].dtype.itemsize
    return None
