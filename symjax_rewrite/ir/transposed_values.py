"""Transposed values that are computed from transposed products: (−A B)ᵀ = −(A B)ᵀ.

XLA takes the transposition of a product into the product, which then writes its result in the other
order. It does not look through functions of a product, and reads across their rows instead.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jax import lax

from symjax_rewrite import jax_internals
from symjax_rewrite.ir.dataflow import cone, postorder, value_operands
from symjax_rewrite.ir.flat_program import Equation
from symjax_rewrite.ir.primitives import ELEMENTWISE

INDICES = frozenset({"iota", "broadcast_in_dim"})  # written in any order of axes


@dataclass(frozen=True, slots=True)
class TransposedValue:
    """A transposed value as a function of values that are transposed instead of it.

    order: the permutation of the axes. equations: computed in the other order, each after
    its operands. products: values that nothing else reads, and XLA transposes at no cost. stored:
    values that are read across their rows.
    """

    order: tuple[int, ...]
    equations: tuple[Equation, ...]
    products: tuple[Equation, ...]
    stored: tuple[int, ...]

    @property
    def leaves(self) -> tuple[int, ...]:
        """Return the values that are transposed."""
        return (*[e.outvals[0] for e in self.products], *self.stored)

    @property
    def reads(self) -> tuple[int, ...]:
        """Return the values that it is computed from."""
        made = {v for e in self.equations for v in e.outvals}
        undone = {v for e in self.equations if e.name == "transpose" for v in e.reads}
        read = [v for e in self.equations for v in e.reads if v not in made - undone]
        return tuple(dict.fromkeys([*self.leaves, *read]))

    def computed(self, *arrays: Any) -> Any:
        """Return the transposed value from the arrays of `reads`."""
        given = dict(zip(self.reads, arrays, strict=True))
        transposed = {v: lax.transpose(given[v], self.order) for v in self.leaves}
        last = self.leaves[0]
        for e in self.equations:
            env = given | transposed if e.name in ELEMENTWISE else given
            operands = [env[v] if isinstance(v, int) else v.val for v in e.invals]
            last = e.outvals[0]
            if e.name == "transpose":
                transposed[last] = operands[0]
            else:
                (transposed[last],) = jax_internals.eval_equation(e.eqn, operands, self._params(e))
        return transposed[last]

    def _params(self, e: Equation) -> dict[str, Any]:
        """Return the parameters of an equation for the other order of its axes."""
        params = dict(e.eqn.params)
        if e.name in INDICES:
            params["shape"] = tuple(params["shape"][k] for k in self.order)
        if e.name == "iota":
            params["dimension"] = self.order.index(params["dimension"])
        elif e.name == "broadcast_in_dim":
            axes = params["broadcast_dimensions"]
            params["broadcast_dimensions"] = tuple(self.order.index(k) for k in axes)
        return params


def transposed_value(
    transposition: Equation,
    makers: Mapping[int, Equation],
    users: Mapping[int, Sequence[Equation]],
    outputs: Container[int],
) -> TransposedValue | None:
    """Return how a transposition is computed from transposed products; None if it reads none."""
    order = tuple(transposition.eqn.params["permutation"])
    if not transposition.reads or not _swaps_last(order):
        return None
    (root,) = transposition.reads
    inside: dict[int, Equation] = {}

    def alone(v: int) -> bool:
        return v not in outputs and all(
            e is transposition or (e.name != "transpose" and e.outvals[0] in inside)
            for e in users.get(v, ())
        )

    fits: dict[int, bool] = {}
    queue = [root]  # again where a reader has entered
    for v in queue:
        if v in inside or (e := makers.get(v)) is None:
            continue
        if _undoes(e, order) or (e.name in ELEMENTWISE and alone(v)):
            new = {v: e}
        else:
            new = _of_indices(v, makers, fits)
        inside |= new
        queue += _operands(new.values())
    equations = [makers[v] for v in postorder([root], value_operands(inside)) if v in inside]
    leaves = [v for v in _operands(equations) if v not in inside] if inside else [root]
    products = [e for v in leaves if (e := makers.get(v)) and alone(v) and _is_matrix_product(e)]
    stored = tuple(v for v in leaves if makers.get(v) not in products)
    return TransposedValue(order, tuple(equations), tuple(products), stored) if products else None


def _operands(equations: Iterable[Equation]) -> list[int]:
    """Return the arrays that elementwise functions read, each once."""
    read = (zip(e.invals, e.eqn.invars, strict=True) for e in equations if e.name in ELEMENTWISE)
    arrays = [v for pairs in read for v, x in pairs if isinstance(v, int) and _rank(x)]
    return list(dict.fromkeys(arrays))


def _rank(x: Any) -> int:
    return x.aval.ndim


def _swaps_last(order: tuple[int, ...]) -> bool:
    """Return True for the permutation that swaps the last two axes."""
    n = len(order)
    return n > 1 and order == (*range(n - 2), n - 1, n - 2)


def _undoes(e: Equation, order: tuple[int, ...]) -> bool:
    """Return True for a transposition that another one undoes; swaps undo themselves."""
    return e.name == "transpose" and tuple(e.eqn.params["permutation"]) == order


def _of_indices(
    v: int, makers: Mapping[int, Equation], fits: dict[int, bool]
) -> dict[int, Equation]:
    """Return the equations that compute a mask from indices, vectors and numbers; {} for others.

    fits: True for masks, by value; values are added.
    """
    operands = lambda v: _operands([makers[v]]) if v in makers else ()  # noqa: E731
    for u in postorder([v], lambda u: () if u in fits else operands(u)):
        e = makers.get(u)
        if u not in fits:
            fits[u] = e is not None and (
                _is_index(e) or (e.name in ELEMENTWISE and all(fits[a] for a in operands(u)))
            )
    return {u: makers[u] for u in cone([v], operands)} if fits[v] else {}


def _is_index(e: Equation) -> bool:
    """Return True for indices and for broadcasts of vectors and numbers."""
    return e.name in INDICES and all(_rank(x) < 2 for x in e.eqn.invars)


def _is_matrix_product(e: Equation) -> bool:
    """Return True for a product of matrices, or of batches of matrices."""
    if e.name != "dot_general":
        return False
    (summed, _), (batch, _) = e.eqn.params["dimension_numbers"]
    axes = len(summed) + len(batch) + 1
    return bool(summed) and all(_rank(x) == axes for x in e.eqn.invars)
