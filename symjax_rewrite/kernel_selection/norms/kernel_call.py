"""Kernel call for products of one normalised value, as JAX operations.

Arrays are passed in their stored layout where the kernel supports it: a weight may be stored
[outputs, contracted] and x [contracted, rows]. Constant weights are scaled, summed and shifted
once, outside the kernel.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

from symjax_rewrite import jax_internals
from symjax_rewrite.cost.device_profiles import Device
from symjax_rewrite.cost.term_cost import Cost
from symjax_rewrite.ir.dataflow import node_of
from symjax_rewrite.ir.term import Ref
from symjax_rewrite.kernel_selection.kernel_candidate import read_over
from symjax_rewrite.kernel_selection.norms.epilogue import NormEpilogue
from symjax_rewrite.kernel_selection.norms.normalized_operand import Column, Normed
from symjax_rewrite.pallas_kernels.norm.norm_linear import norm_linears
from symjax_rewrite.pallas_kernels.norm.spec import NormGroup, NormSpec


@dataclass(slots=True)
class NormPart:
    """Result of a kernel: an elementwise function of one or several contractions.

    members: the contractions. epilogue: the class it computes. columns: the vectors over k that the
    kernel reads. folded: γ is multiplied into the weights before the call. given: the column sums
    computed outside and read as ends: None for γ·W, else a column, and the member's number.
    """

    spec: NormSpec
    members: list[Normed]
    epilogue: NormEpilogue
    columns: list[tuple[Column, ...]]
    folded: bool
    given: list[tuple[tuple[Column, ...] | None, int]]
    operands: dict[str, list[Ref]]

    def needs(self) -> list[int]:
        first = self.members[0]
        columns = [*self.columns, *(c for c, _ in self.given if c is not None), first.gain]
        found = [first.x.cls, *(m.weight.cls for m in self.members)]
        found += [f.cls for terms in columns for c in terms for f in c.columns]
        return found + [r.cls for refs in self.operands.values() for r in refs]

    def arrays(self, emitter: Any) -> list[Any]:
        """Return the arrays that the spec reads besides x."""
        m, swapped = self.members[0], self.spec.weights_swapped
        across, down = axes_of(m)
        sizes = sizes_of(emitter, m.x.cls)
        vector = lambda c: columns_of(emitter, c, across, sizes)  # noqa: E731
        weights = [weight_of(emitter, w, swapped) for w in self.members]
        raw = weights
        if self.folded and m.gain != ((1.0, ()),):
            gain = vector(m.gain).astype(self.spec.accumulator)
            gain = gain if swapped else gain[:, None]
            weights = [(w.astype(gain.dtype) * gain).astype(w.dtype) for w in weights]
        ends = []
        for what, k in self.given:
            summed = weights[k] if what is None else raw[k]
            summed = summed.T if swapped else summed
            factor = jnp.ones(self.spec.width) if what is None else vector(what)
            total = self.spec.accumulator
            ends.append(jnp.dot(factor.astype(total), summed.astype(total), precision="highest"))
        rows = [read_over(emitter, r, down, sizes).reshape(-1) for r in self.operands["rows"]]
        ends += [self._result_shaped(emitter, r, "ends") for r in self.operands["ends"]]
        fulls = [self._result_shaped(emitter, r, "fulls") for r in self.operands["fulls"]]
        return [*(vector(c) for c in self.columns), *weights, *rows, *ends, *fulls]

    def _result_shaped(self, emitter: Any, ref: Ref, kind: str) -> Any:
        m = self.members[0]
        sizes = sizes_of(emitter, m.cls)
        order = m.ends if kind == "ends" else (*m.rows, *m.ends)
        array = read_over(emitter, ref, order, sizes)
        lead = () if kind == "ends" else (self.spec.rows,)
        return array.reshape(*lead, self.spec.outputs)


@dataclass(slots=True)
class NormRoute:
    """Kernel call for one or several results of one normalised value.

    price: returns its cost on a device; None where the device has no model of the kernel.
    """

    parts: list[NormPart]
    backend: str
    price: Callable[[Device], Cost | None] | None = None

    @property
    def group(self) -> NormGroup:
        return NormGroup(tuple(p.spec for p in self.parts))

    def classes(self) -> set[int]:
        return {c for p in self.parts for c in (p.epilogue.cls, *p.epilogue.inside)}

    def gives(self) -> set[int]:
        return {p.epilogue.cls for p in self.parts}

    def needs(self, cls: int) -> list[int]:
        del cls
        return [c for p in self.parts for c in p.needs()]

    def run(self, emitter: Any) -> list[Any]:
        """Emit the call and return every result as [rows, outputs]."""
        m, spec = self.parts[0].members[0], self.parts[0].spec
        across, down = axes_of(m)
        sizes = sizes_of(emitter, m.x.cls)
        order = (*across, *down) if spec.pairs_swapped else (*down, *across)
        x = read_over(emitter, Ref(m.x.cls, tuple(range(len(sizes)))), order, sizes)
        x = x.reshape(spec.avals[0].shape)
        operands = [x, *(a for p in self.parts for a in p.arrays(emitter))]
        return list(norm_linears(self.group, *operands, backend=self.backend))

    def array(self, emitter: Any, cls: int) -> tuple[Any, tuple[int, ...]]:
        number = next(k for k, p in enumerate(self.parts) if p.epilogue.cls == cls)
        p = self.parts[number]
        return over_slots(emitter, p.members[0], p.epilogue.axes, emitter.folded(self)[number])


def over_slots(
    emitter: Any, m: Normed, axes: tuple[int, ...], data: Any
) -> tuple[Any, tuple[int, ...]]:
    """Return a result [rows, outputs] of a product over the slots of a class, and these slots.

    axes: the slots of the class as indices of the product.
    """
    sizes = sizes_of(emitter, m.cls)
    order = (*m.rows, *m.ends)
    return data.reshape([sizes[i] for i in order]), tuple(axes.index(i) for i in order)


def sizes_of(emitter: Any, cls: int) -> tuple[Any, ...]:
    """Return the sizes of a class as entries of a JAX shape."""
    return tuple(map(emitter.t.jax_size, emitter.t.graph.classes[cls].sizes))


def axes_of(m: Normed) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the slots of x that are contracted, and the other slots."""
    across = tuple(s for s, i in enumerate(m.x.axes) if i in m.contracted)
    return across, tuple(s for s in range(len(m.x.axes)) if s not in across)


def columns_of(emitter: Any, terms: tuple[Column, ...], across: tuple, sizes: Any) -> Any:
    """Return Σ coefficient · Π columns as a vector over k."""
    single = len(terms) == 1 and terms[0].coefficient == 1 and len(terms[0].columns) == 1
    total: Any = None
    for coefficient, refs in terms:
        value: Any = None
        for ref in refs:
            array = read_over(emitter, ref, across, sizes).reshape(-1)
            wide = jax_internals.joint_dtype(array.dtype, jnp.float32)
            array = array if single else array.astype(wide)
            value = array if value is None else value * array
        if value is None:
            value = jnp.ones(math.prod(sizes[s] for s in across), jnp.float32)
        value = value if coefficient == 1 else value * np.asarray(coefficient, value.dtype)
        total = value if total is None else total + value
    return total


def weight_of(emitter: Any, m: Normed, swapped: bool = False) -> Any:
    """Return a product's weight as [contracted, outputs], or as [outputs, contracted]."""
    node = node_of(emitter.t.graph, m.cls)
    sizes = (*sizes_of(emitter, m.cls), *map(emitter.t.jax_size, node.bound))
    first, last = (m.ends, m.contracted) if swapped else (m.contracted, m.ends)
    array = read_over(emitter, m.weight, (*first, *last), sizes)
    rows, columns = (math.prod(sizes[i] for i in side) for side in (first, last))
    return array.reshape(rows, columns)
