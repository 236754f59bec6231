"""Frozen weights behind a norm, with γ, β and shared projections folded into the weights.

((x - μ)·r·γ + β) @ W + b = ((x - μ)·r) @ (γ⊙W) + (β @ W + b)

`.prepare` computes everything on the right but x, μ and r once. On a GPU, weights that multiply the
same normalised value are concatenated into one product where its result is small against the
weights: slicing the result then costs less than further launches. On a CPU one wide product was
slower than three (experiments/deferred_norm). Distributing over β is safe because the normalised
value is bounded, so no large terms cancel.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from symjax_rewrite import jax_internals
from symjax_rewrite.candidates import Context, Found
from symjax_rewrite.ir.dataflow import Needed, is_computed_from, node_of
from symjax_rewrite.ir.egraph import EGraph
from symjax_rewrite.ir.flat_program import Program
from symjax_rewrite.ir.term import ADD, Ref
from symjax_rewrite.ir.term_graph import TermGraph
from symjax_rewrite.kernel_selection.kernel_candidate import Proposal, candidates, read_over
from symjax_rewrite.kernel_selection.norms.kernel_call import (
    axes_of,
    columns_of,
    over_slots,
    sizes_of,
    weight_of,
)
from symjax_rewrite.kernel_selection.norms.normalized_operand import (
    Column,
    Normed,
    has_sums,
    normal_form,
)


@dataclass(slots=True)
class FrozenProduct:
    """Product of a normalised value and a frozen weight.

    result: the class it computes: the product, or its sum with a frozen bias. axes: the slots
    of `result` as indices of the product.
    """

    normed: Normed
    result: int
    axes: tuple[int, ...]
    bias: Ref | None


@dataclass(slots=True)
class FrozenRoute:
    """Products of one normalised value, with all frozen factors folded beforehand."""

    products: list[FrozenProduct]
    cut_share: float | None

    def classes(self) -> set[int]:
        return {c for p in self.products for c in (p.result, p.normed.cls)}

    def gives(self) -> set[int]:
        return {p.result for p in self.products}

    def needs(self, cls: int) -> list[int]:
        m = self.products[0].normed
        found = [m.x.cls, *(p.normed.weight.cls for p in self.products)]
        found += m.columns
        found += [r.cls for r in m.scale] + [r.cls for s in m.shifts for r in s.rows]
        return found + [p.bias.cls for p in self.products if p.bias is not None]

    def run(self, emitter: Any) -> list[Any]:
        """Return every product as [rows, outputs]."""
        m = self.products[0].normed
        g, sizes = emitter.t.graph, sizes_of(emitter, m.x.cls)
        across, down = axes_of(m)
        value = _normalised(emitter, m, (*down, *across), sizes)
        value = value.reshape(-1, math.prod(sizes[s] for s in across)).astype(m.dtype)
        gain = columns_of(emitter, m.gain, across, sizes)
        weights, biases = [], []
        for p in self.products:
            raw = weight_of(emitter, p.normed)
            total = jax_internals.joint_dtype(raw.dtype, jnp.float32)
            plain = m.gain == (Column(1.0, ()),)
            folded = raw if plain else (raw.astype(total) * gain.astype(total)[:, None])
            weights.append(folded.astype(raw.dtype))
            biases.append(_bias(emitter, p, raw.astype(total), across, sizes))
        results = _products(value, weights, [p.normed for p in self.products], g, self.cut_share)
        out = []
        for p, y, b in zip(self.products, results, biases, strict=True):
            y = y.astype(g.classes[p.normed.cls].dtype)
            out.append(y if b is None else y + b.astype(y.dtype))
        return out

    def array(self, emitter: Any, cls: int) -> tuple[Any, tuple[int, ...]]:
        number = next(k for k, p in enumerate(self.products) if p.result == cls)
        p = self.products[number]
        return over_slots(emitter, p.normed, p.axes, emitter.folded(self)[number])


def _normalised(emitter: Any, m: Normed, order: tuple, sizes: Any) -> Any:
    """Return (x + Σ rows)·Π scale: the operand without γ and β."""
    slots = tuple(range(len(sizes)))
    over = lambda r: read_over(emitter, r, order, sizes)  # noqa: E731
    total = jax_internals.joint_dtype(emitter.t.graph.classes[m.x.cls].dtype, jnp.float32)
    value = over(Ref(m.x.cls, slots)).astype(total)
    for s in m.shifts:
        rest = m.added_rows(s)
        if rest is not None:
            term: Any = np.asarray(s.coefficient / m.gain[0].coefficient, total)
            for r in rest:
                term = term * over(r).astype(total)
            value = value + term
    for r in m.scale:
        value = value * over(r).astype(total)
    return value


def _bias(emitter: Any, p: FrozenProduct, raw: Any, across: tuple, sizes: Any) -> Any:
    """Return β @ W + b, or None."""
    m = p.normed
    out: Any = None
    for s in m.shifts:
        if m.added_rows(s) is None:
            column = columns_of(emitter, (Column(s.coefficient, s.columns),), across, sizes)
            term = jnp.dot(column.astype(raw.dtype), raw, precision="highest")
            out = term if out is None else out + term
    if p.bias is not None:
        result = emitter.t.graph.classes[m.cls].sizes
        b = read_over(emitter, p.bias, m.ends, result).reshape(-1).astype(raw.dtype)
        out = b if out is None else out + b
    return out


def _products(
    value: Any, weights: list[Any], products: list[Normed], g: EGraph, cut_share: float | None
) -> list[Any]:
    """Return value @ W for every weight, as one product where its result is small."""
    rows, width = value.shape
    node = node_of(g, products[0].cls)
    dtype = np.dtype(g.classes[products[0].cls].dtype)

    def dot(w: Any) -> Any:
        return lax.dot(value, w, precision=node.attr, preferred_element_type=dtype)

    if len(weights) == 1 or cut_share is None or 2 * rows * cut_share > width:
        return [dot(w) for w in weights]
    joined = dot(jnp.concatenate(weights, axis=1))
    return jnp.split(joined, np.cumsum([w.shape[1] for w in weights[:-1]]), axis=1)


class FrozenWeights:
    """Pass that folds norms into frozen weights; later rules see its equations."""

    name = "frozen_norm"

    def candidates(self, program: Program, context: Context) -> Iterator[Found]:
        """Yield the frozen weights into which a norm's scale and shift are folded."""
        if not context.frozen or not context.reorders():
            return
        terms = context.terms(program)
        t, need = terms.t, terms.need
        if t.dim_env:
            return
        groups: dict[tuple, list[Normed]] = {}
        cache: dict[int, bool] = {}
        for cls in need.order:
            m = None if cls in need.known else normal_form(t.graph, cls, cache)
            if isinstance(m, Normed) and _is_frozen(t, need, m):
                node = node_of(t.graph, cls)
                key = (m.key, repr(node.attr), t.graph.classes[cls].dtype)
                groups.setdefault(key, []).append(m)
        for members in groups.values():
            products = [_with_bias(t, need, m) for m in members]
            cut_share = context.device.norms.cut_share if len(products) > 1 else None
            route = FrozenRoute(products, cut_share)
            reason = f"folded into {len(members)} frozen weights, once"
            proposal = Proposal([route], reason, t.where(members[0].cls))
            yield from candidates(t, self.name, [proposal], opens=cut_share is None)


def _is_frozen(t: TermGraph, need: Needed, m: Normed) -> bool:
    """Return True if weights and columns are frozen and the value has its own statistics."""
    g = t.graph
    if not need.known.issuperset((m.weight.cls, *m.columns)) or m.dtype == "float16":
        return False
    if any(s.rows and m.added_rows(s) is None for s in m.shifts) or 0 in g.classes[m.cls].sizes:
        return False
    own = any(is_computed_from(g, r.cls, (m.x.cls,)) and has_sums(g, r.cls, {}) for r in m.scale)
    return own and 0 not in g.classes[m.x.cls].sizes


def _with_bias(t: TermGraph, need: Needed, m: Normed) -> FrozenProduct:
    """Return the product, with a frozen bias if the bias is the only term added to it."""
    g = t.graph
    alone = FrozenProduct(m, m.cls, tuple(range(len(g.classes[m.cls].sizes))), None)
    users = need.users.get(m.cls, [])
    if len(users) != 1 or m.cls in need.outside:
        return alone
    node = node_of(g, users[0])
    if node.op != ADD or node.attr != (1, 1) or g.classes[users[0]].dtype != "float32":
        return alone
    own = [a for a in node.args if a.cls == m.cls]
    others = [a for a in node.args if a.cls != m.cls]
    if len(own) != 1 or others[0].cls not in need.known:
        return alone
    place = dict(zip(own[0].axes, range(len(own[0].axes)), strict=True))
    if sorted(place) != list(range(node.out)):
        return alone
    axes = tuple(place[i] for i in range(node.out))
    bias = Ref(others[0].cls, tuple(axes[i] for i in others[0].axes))
    if not set(bias.axes) <= set(m.ends):
        return alone
    return FrozenProduct(m, users[0], axes, bias)
