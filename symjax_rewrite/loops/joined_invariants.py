"""Products of which two factors do not change in a loop: joined, they are computed once.

In `(h @ A) @ B` nothing is loop-invariant as written. `A @ B` may cost more than one step saves,
and less than all steps save. The algebra therefore runs on the body with its invariants as frozen
inputs, whose products cost nothing. A loop of unknown length must also lose nothing within
`FEW_STEPS`.

    for …: h ← tanh((h @ A) @ B)  →  C = A @ B; for …: h ← tanh(h @ C)
    for …: h ← tanh((h @ (P @ Q)) @ B)  →  C = Q @ B; for …: h ← tanh((h @ P) @ C), P narrow
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator

from symjax_rewrite import jax_internals
from symjax_rewrite.cost import margins
from symjax_rewrite.cost.device_profiles import Device
from symjax_rewrite.cost.equation_cost import aval_size, elements, summed_sizes
from symjax_rewrite.ir.dataflow import makers_of
from symjax_rewrite.ir.flat_program import Equation
from symjax_rewrite.ir.primitives import VIEWS
from symjax_rewrite.jax_internals import JaxprEqn
from symjax_rewrite.loops.loop import Loop

SUMS = VIEWS | {"add", "add_any", "sub", "neg", "convert_element_type", "slice"}
SCALED = frozenset({"mul", "div"})  # linear if one operand alone changes
FEW_STEPS = 2


def invariant_inputs(eqn: JaxprEqn) -> frozenset[int]:
    """Return the numbers of the inputs of a loop's body that are the same in all steps."""
    is_while = eqn.primitive.name == "while"
    count = eqn.params["body_nconsts"] if is_while else jax_internals.scan_counts(eqn)[0]
    return frozenset(range(count))


def pays_joined(
    before_s: Callable[[int], float], after_s: Callable[[int], float], loop: Loop, device: Device
) -> bool:
    """Return True if a product of invariants, computed once, saves time.

    before_s, after_s: seconds (or operations) of so many steps. `FEW_STEPS` is a number that nearly
    all loops reach.
    """
    steps, few = loop.steps, FEW_STEPS
    gains = margins.pays(before_s(steps), after_s(steps), "hoist", device)
    return gains and (
        loop.condition is None or margins.pays(before_s(few), after_s(few), "even", device)
    )


def may_join(loop: Loop, device: Device) -> bool:
    """Return True if two invariant factors of a product could be joined, by their sizes."""
    products = [e for e in loop.body.equations if e.name == "dot_general"]
    return len(products) > 1 and any(map(_Pairs(loop, device).gain, products))


class _Pairs:
    """The products of a loop's body by invariants, in pairs of which one reads the other."""

    def __init__(self, loop: Loop, device: Device) -> None:
        self.loop, self.device = loop, device
        self.level = loop.levels()

    @functools.cached_property
    def uses(self) -> Counter[int]:
        """Return how often each value is read."""
        return self.loop.uses()

    @functools.cached_property
    def makers(self) -> dict[int, Equation]:
        """Return, for each value, the equation that makes it."""
        return makers_of(self.loop.body.equations)

    def gain(self, outer: Equation) -> bool:
        """Return True if the invariant of a product, joined with another one, saves time."""
        return any(self._pays(inner, outer) for inner in self._inner(outer))

    def _inner(self, outer: Equation) -> Iterator[Equation]:
        """Yield the products by invariants that only a product by an invariant reads."""
        stack = self._varying(outer) if self._is_by_invariant(outer) else []
        for v in stack:
            maker = self.makers.get(v) if self.uses[v] == 1 else None
            if maker is None:
                continue
            read = self._varying(maker)
            if self._is_by_invariant(maker):
                yield maker
            elif maker.name in SUMS or (maker.name in SCALED and len(read) == 1):
                stack += read

    def _is_by_invariant(self, e: Equation) -> bool:
        return e.name == "dot_general" and len(self._varying(e)) == 1

    def _varying(self, e: Equation) -> list[int]:
        """Return the operands that are not the same in all steps."""
        return [v for v in e.reads if self.level[v] > 0]

    def _pays(self, inner: Equation, outer: Equation) -> bool:
        """Return True if the product of the two invariants, computed once, saves arithmetic.

        Of an invariant that is a product, the factor next to the other invariant may be joined
        with that one. The time in which a product starts is no reason: one wider product may take
        as long as two.
        """
        alone = sum([aval_size(e.eqn.outvars[0].aval) * self._summed(e) for e in (inner, outer)])
        moving, first = self._sizes(inner)
        summed, between = self._summed(inner), self._summed(outer)
        columns = self._sizes(outer)[1] / between
        narrow = moving / summed * (summed + columns)  # in each step, by element of the rank
        forms = [(moving * columns, first * columns)]
        forms += [(narrow * r, r * between * columns) for r in self._ranks(inner)]
        forms += [(narrow * r, first * r) for r in self._ranks(outer)]

        def pays(each: float, once: float) -> bool:
            return pays_joined(
                lambda steps: steps * alone,
                lambda steps: steps * each + once,
                self.loop,
                self.device,
            )

        return any(pays(*form) for form in forms)

    def _ranks(self, e: Equation) -> Iterator[float]:
        """Yield the elements that a product sums over which makes the invariant operand."""
        stack = [v for v in e.reads if self.level[v] == 0]
        for v in stack:
            maker = self.makers.get(v)
            if maker is None:
                continue
            if maker.name == "dot_general":
                yield self._summed(maker)
            elif maker.name in VIEWS | SCALED:
                stack += maker.reads

    def _summed(self, e: Equation) -> float:
        return max(elements(tuple(summed_sizes(e.eqn))), 1.0)

    def _sizes(self, e: Equation) -> tuple[float, float]:
        """Return the elements of the operand that changes, and of the other one."""
        sizes = [aval_size(v.aval) for v in e.eqn.invars]
        left, right = sizes if e.invals[0] in self._varying(e) else sizes[::-1]
        return left, right
