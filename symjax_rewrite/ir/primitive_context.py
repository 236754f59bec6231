"""The context in which a primitive is lifted: operands, atoms, and a graph for new terms.

A row of `primitives` is a function of a `Site`.

    "exp": lambda s: s.add("map", ("exp", ()), (s.refs[0],))
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

from symjax_rewrite.ir.egraph import EGraph
from symjax_rewrite.ir.sizes import Dim
from symjax_rewrite.ir.term import CONST, Ref

Groups = tuple[tuple[int, ...], ...]  # for every axis of a value, the positions of its atoms


class NotLiftedError(Exception):
    """An equation, or the alignment of its axes, that no term expresses (internal)."""


def require(condition: object) -> None:
    """Raise `NotLiftedError` unless a condition for lifting an equation holds."""
    if not condition:
        raise NotLiftedError


class Layout(NamedTuple):
    """The atoms of a value: solved ids, sizes, their positions by axis, and the value's shape."""

    ids: tuple[int, ...]
    sizes: tuple[Dim, ...]
    groups: Groups
    shape: tuple[Any, ...]

    def ids_of(self, positions: Iterable[int]) -> list[int]:
        """Return the ids of the atoms at some positions, such as a group."""
        return [self.ids[q] for q in positions]


@dataclass(slots=True)
class Site:
    """The context of one equation: operand references and the index space of its output.

    Output atoms are numbered 0..n-1 in order. `refs[k]` reads operand k over its own atom
    positions. `ins` and `outs` are the layouts of operands and outputs. `dtype` is the outputs'
    dtype.
    """

    g: EGraph
    params: dict[str, Any]
    refs: list[Ref]
    ins: list[Layout]
    outs: list[Layout]
    dtype: list[str]

    def add(
        self, op: str, attr: object, args: tuple[Ref, ...], bound: tuple[Dim, ...] = (), k: int = 0
    ) -> Ref:
        """Add a term over the atoms of output k."""
        return self.g.add(op, attr, args, self.outs[k].sizes, bound, self.dtype[k])

    def node(self, k: int) -> Any:
        """Return the original node of operand k's class."""
        return self.g.classes[self.refs[k].cls].first

    def scalar(self, k: int) -> Any:
        """Return the number that all elements of operand k equal, or None."""
        ref = self.refs[k]
        if ref.axes:
            return None  # a constant has no index
        node = self.g.classes[ref.cls].first
        return node.attr[0] if node.op == CONST else None

    def over(self) -> list[Ref]:
        """Return every operand over the output's atoms.

        A scalar, and an axis of size 1, is read at every index of the output.
        """
        made: list[Ref] = []
        out = self.outs[0]
        for k, (ref, mine) in enumerate(zip(self.refs, self.ins, strict=True)):
            if mine.ids == out.ids or not mine.groups:
                made.append(ref)
                continue
            require(len(mine.groups) == len(out.groups))
            pairs = ((a, a) for a, group in enumerate(mine.groups) if group)
            made.append(ref.over(self.aligned(k, pairs)))
        return made

    def aligned(self, k: int, pairs: Iterable[tuple[int, int]]) -> dict[int, int]:
        """Return the output's index of each atom of operand k.

        pairs: axes of the operand, and the axes of the output that read them whole.
        """
        mine, out = self.ins[k], self.outs[0]
        to: dict[int, int] = {}
        for axis, out_axis in pairs:
            here, there = mine.groups[axis], out.groups[out_axis]
            require(mine.ids_of(here) == out.ids_of(there))
            to.update(zip(here, there, strict=True))
        return to


def solve_matrix(params: dict[str, Any]) -> tuple[int, int, int] | None:
    """Return the axes of a custom_linear_solve with an explicit matrix.

    Returns:
        (row axis, column axis of the matrix, axis of the right side): the matvec is `out[.., row] =
        Σ_column matrix[row, column] · x[.., column]`; None for any other operator.
    """
    lengths, jaxprs = params["const_lengths"], params["jaxprs"]
    matvec = jaxprs.matvec
    if lengths.matvec != 1 or len(matvec.jaxpr.invars) != 2 or matvec.consts:
        return None
    matrix, x = matvec.jaxpr.invars
    eqns = list(matvec.jaxpr.eqns)
    if len(matrix.aval.shape) != 2 or not eqns or eqns[0].primitive.name != "dot_general":
        return None
    dot = eqns[0]
    (lc, rc), (lb, _) = dot.params["dimension_numbers"]
    if len(lc) != 1 or lb or set(dot.invars) != {matrix, x}:
        return None
    first = dot.invars[0] is matrix
    column, vector = (lc[0], rc[0]) if first else (rc[0], lc[0])
    # Axis map of the dot's result: the matrix row must take the place of x's axis.
    rest = len(x.aval.shape) - 1
    order = [-1, *range(rest)] if first else [*range(rest), -1]
    for eqn in eqns[1:]:
        if eqn.primitive.name == "transpose":
            order = [order[i] for i in eqn.params["permutation"]]
        elif eqn.primitive.name != "reduce_sum" or eqn.params["axes"]:
            return None
    wanted = list(range(rest))
    wanted.insert(vector, -1)
    if order != wanted or matvec.jaxpr.outvars[0] is not eqns[-1].outvars[0]:
        return None
    return 1 - column, column, vector
