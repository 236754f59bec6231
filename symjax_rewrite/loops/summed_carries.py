"""Detection of carries that only accumulate products of every step.

The gradient of a weight that every step uses is such a carry. Σ_t u_t·v_t over the steps is one
product with the steps among its summed indices. The accumulator is then not read and written step
by step.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from jax import lax

from symjax_rewrite import jax_internals
from symjax_rewrite.ir.dataflow import makers_of
from symjax_rewrite.ir.flat_program import Equation, Value
from symjax_rewrite.loops.loop import Loop, get

_VIEWS = frozenset({"transpose", "reshape", "squeeze", "broadcast_in_dim", "neg"})


@dataclass(frozen=True, slots=True)
class Accumulation:
    """The update carry ← carry + views(product).

    carry: its number. product: a `dot_general` of two values of the step. views: the layout
    equations after the product, in order; they commute with sums.
    """

    carry: int
    product: Equation
    views: tuple[Equation, ...]
    add: Equation

    @property
    def equations(self) -> tuple[Equation, ...]:
        """Return the equations that leave the loop."""
        return (self.product, *self.views, self.add)

    def total(self, steps: dict[int, Any], start: Any) -> Any:
        """Return the carry after the last step, from the stacked operands of the product."""
        e = self.product
        params = dict(e.eqn.params)
        (left, right), (left_batch, right_batch) = params["dimension_numbers"]
        up = lambda axes: tuple(i + 1 for i in axes)  # noqa: E731
        operands = [get(steps, v) for v in e.invals]
        contract = ((0, *up(left)), (0, *up(right)))
        if not left_batch and left == right == tuple(range(len(left))):
            operands = [_rows_joined(x, len(left) + 1) for x in operands]
            contract = ((0,), (0,))
        params["dimension_numbers"] = (contract, (up(left_batch), up(right_batch)))
        (value,) = jax_internals.eval_equation(e.eqn, operands, params)
        env = {e.outvals[0]: value}
        for view in self.views:
            (value,) = jax_internals.eval_equation(view.eqn, [get(env, v) for v in view.invals])
            env[view.outvals[0]] = value
        return lax.add(start, value)


def _rows_joined(x: Any, count: int) -> Any:
    """Return an array with its first `count` axes as one.

    XLA's CPU backend copies the operands of a product that sums over several axes if a
    transposition follows it: the product then takes twice as long.
    """
    return lax.reshape(x, (math.prod(x.shape[:count]), *x.shape[count:]))


def accumulations(loop: Loop, level: dict[int, int]) -> list[Accumulation]:
    """Return the carries of a loop that only accumulate products, in order."""
    makers = makers_of(loop.body.equations)
    uses: dict[Value, int] = {}
    outs = [c.out for c in loop.carries]
    for v in [v for e in loop.body.equations for v in e.invals] + loop.ys + outs:
        if isinstance(v, int):
            uses[v] = uses.get(v, 0) + 1
    found = []
    for k, carry in enumerate(loop.carries):
        add = makers.get(carry.out) if isinstance(carry.out, int) else None
        if add is None or add.name not in ("add", "add_any") or carry.inner not in add.invals:
            continue
        if uses.get(carry.inner) != 1 or uses.get(add.outvals[0]) != 1:
            continue
        y = add.invals[1 - add.invals.index(carry.inner)]
        views: list[Equation] = []
        e = makers.get(y) if isinstance(y, int) else None
        while e is not None and uses.get(e.outvals[0]) == 1 and e.name in _VIEWS:
            views.insert(0, e)
            inner = e.invals[0]
            e = makers.get(inner) if isinstance(inner, int) else None
        if e is None or e.name != "dot_general" or uses.get(e.outvals[0]) != 1:
            continue
        if all(isinstance(v, int) and level[v] > 0 for v in e.invals):
            found.append(Accumulation(k, e, tuple(views), add))
    return found
