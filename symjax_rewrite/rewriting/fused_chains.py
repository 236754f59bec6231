"""The operations that XLA fuses into a reduction, and the values that they repeat.

A value with several readers is stored, and the operations above and below it are found apart: they
are found once for all reductions above the stream of residuals of a model, that reaches through all
of its layers.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from symjax_rewrite.cost import margins
from symjax_rewrite.cost.device_profiles import Device
from symjax_rewrite.cost.equation_cost import elements, shape_of
from symjax_rewrite.cost.fusion_facts import FusionFacts
from symjax_rewrite.cost.library_calls import is_known
from symjax_rewrite.cost.placed_products import is_product
from symjax_rewrite.ir.dataflow import cone, makers_of, users_of, walk
from symjax_rewrite.ir.flat_program import Equation, Program
from symjax_rewrite.ir.primitives import ELEMENTWISE, VIEWS
from symjax_rewrite.rewriting.selected_extrema import extremum_of

REDUCTIONS = frozenset({"reduce_sum", "reduce_max", "reduce_min"})
FUSED = ELEMENTWISE | VIEWS


@dataclass(slots=True)
class Chain:
    """The operations that XLA fuses into a reduction.

    steps: operations on arrays of the size of the operand, up to those that XLA stores since
    several equations read them. width: of the shortest innermost rows of these arrays. spread:
    smaller values that are repeated to that size. matrices: those that may be products of two
    matrices, with the equations that repeat them. computed: True if no array of that size is read
    from memory. selected: selections that are extrema. fused: False if the library lacks another
    operation, so that XLA stores the operand of the reduction. stored: the values of that size with
    several readers at which the chain was divided.
    """

    width: int
    steps: int = 0
    spread: set[int] = field(default_factory=set)
    matrices: dict[int, list[Equation]] = field(default_factory=dict)
    computed: bool = True
    selected: list[Equation] = field(default_factory=list)
    fused: bool = True
    stored: list[int] = field(default_factory=list)

    @property
    def is_in_call(self) -> bool:
        """Return True if one call computes the operand, from smaller values alone."""
        return self.fused and self.computed and bool(self.spread)

    def add(self, other: Chain) -> None:
        """Add the operations, none of them in this chain, that compute a stored value."""
        self.width = min(self.width, other.width)
        self.spread |= other.spread
        for v, repeated in other.matrices.items():
            self.matrices[v] = [*self.matrices.get(v, ()), *repeated]
        self.computed &= other.computed
        self.selected += other.selected
        self.fused &= other.fused


class Fused:
    """A program as XLA fuses it on a device.

    makers: of every value. users: the equations that read it. readers: by reduction, the products
    whose calls compute it, once they are known.
    """

    def __init__(self, program: Program, device: Device, facts: FusionFacts) -> None:
        self.program, self.device, self.facts = program, device, facts
        self.makers = program.once(makers_of)
        self.readers: dict[Equation, list[Equation]] = {}
        self._chains: dict[int, Chain] = {}
        self._pieces: dict[int, Chain] = {}
        self._products: dict[int, list[Equation]] = {}

    @functools.cached_property
    def users(self) -> dict[int, list[Equation]]:
        return self.program.once(users_of)

    def chain(self, x: int) -> Chain:
        """Return the operations that compute a value from smaller ones."""
        if x not in self._chains:
            found = self._chains[x] = self._read(x)
            for v in walk(found.stored, lambda v: self._piece(v).stored):
                found.add(self._piece(v))
        return self._chains[x]

    def products(self, v: int) -> list[Equation]:
        """Return the products from which a value is computed, operation by operation."""
        if v not in self._products:
            self._products[v] = [*filter(is_product, made_from([v], self.makers))]
        return self._products[v]

    def pays(self, before_s: float, after_s: float) -> bool:
        """Return True if a form is predicted enough faster."""
        return margins.pays(before_s, after_s, "orientation", self.device)

    def _piece(self, v: int) -> Chain:
        """Return the chain of a stored value, up to the next ones; it is found once."""
        if v not in self._pieces:
            self._pieces[v] = self._read(v)
        return self._pieces[v]

    def _read(self, x: int) -> Chain:
        """Return the chain of a value, up to the values with several readers.

        Each of its other values has one reader, so that it is in no chain of another stored value.
        """
        avals, makers, users = self.program.avals, self.makers, self.users
        shape = avals[x].shape
        found, size, seen, stack = Chain(shape[-1] if shape else 1), elements(shape), {x}, [x]
        for v in stack:
            maker = makers.get(v)
            if maker is None or not (maker.name in FUSED or is_view(maker)):
                found.computed &= maker is not None and not maker.reads  # an iota
                continue
            if v != x and len(users[v]) > 1:
                found.stored.append(v)
                continue
            reads = maker.reads
            if maker.name in ELEMENTWISE and maker.name not in VIEWS:
                found.steps += 1
                found.width = min([found.width, *avals[v].shape[-1:]])
            if extremum_of(maker, makers):
                found.selected.append(maker)
                reads = reads[1:]  # without the test
            elif found.fused and maker.name in ELEMENTWISE and maker.name not in VIEWS:
                found.fused = is_known(maker.name, [makers[a].name for a in reads if a in makers])
            for a in reads:
                if elements(avals[a].shape) < size:
                    found.spread.add(a)
                    if len(own_axes(avals[a].shape, maker)) > 1:
                        found.matrices.setdefault(a, []).append(maker)
                elif a not in seen:
                    seen.add(a)
                    stack.append(a)
        return found


def is_view(e: Equation) -> bool:
    """Return True for a reduction of axes of one element."""
    return e.name in REDUCTIONS and size_read(e) == size_made(e)


def is_reduced_again(e: Equation, r: Fused) -> bool:
    """Return True if another reduction reads the operand of a reduction.

    A loop stores what several reductions read, and takes no time for its rows.
    """
    return sum(u.name in REDUCTIONS for u in r.users[e.reads[0]]) > 1


def size_read(e: Equation) -> int:
    """Return the elements of an equation's first operand."""
    return math.prod(shape_of(e.eqn.invars[0]))


def size_made(e: Equation) -> int:
    """Return the elements of an equation's first result."""
    return math.prod(shape_of(e.eqn.outvars[0]))


def own_axes(shape: tuple[int, ...], u: Equation) -> list[int]:
    """Return the axes along which an equation does not repeat an operand of a shape."""
    places = u.eqn.params.get("broadcast_dimensions", range(len(shape_of(u.eqn.outvars[0]))))
    return [k for k, n in zip(places, shape, strict=False) if n > 1]


def made_from(values: Iterable[int], makers: Mapping[int, Equation]) -> list[Equation]:
    """Return the equations that compute values, operation by operation, and those these end at."""

    def reads(v: int) -> Sequence[int]:
        maker = makers.get(v)
        return maker.reads if maker is not None and maker.name in FUSED else ()

    return [makers[v] for v in sorted(cone(values, reads)) if v in makers]


def elementwise_seconds(v: int, r: Fused) -> float:
    """Return the seconds of the arithmetic that computes a value, in one fused loop."""
    made = [m for m in made_from([v], r.makers) if m.name in ELEMENTWISE - VIEWS]
    sizes = [size_made(m) for m in made]
    steps = [n * (1 + r.device.functions.of(m.name)) for n, m in zip(sizes, made, strict=True)]
    return sum(steps) / r.device.folds.fused_steps_per_s
