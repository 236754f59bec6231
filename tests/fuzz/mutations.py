"""Planted bugs: each breaks one fact the optimiser rests on, and the fuzzer must see it.

A mutation replaces one function of the library by a wrong one for as long as the context is open.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import jax.numpy as jnp
import numpy as np
from jax import lax

from symjax_rewrite import api, compat, egraph, emit, fold_route, loops, lower, monoid, ops, order
from symjax_rewrite.ir import ADD, CONCAT, CUMSUM, SLICE, TAKE, Ref
from symjax_rewrite.rules import associativity, distributivity, locality, separability, sparsity

Change = tuple[Any, str, Callable[[Any], Any]]  # owner, name, what makes the wrong function


def _wrong(result: Callable[..., Any]) -> Callable[[Any], Any]:
    """A function that does something else, whatever the right one does."""
    return lambda right: result


def _cast_is_dropped(right: Any) -> Any:
    def row(s: ops.Site) -> Any:
        source = s.g.classes[s.refs[0].cls].dtype
        if ops.dtype_kind(source) == ops.dtype_kind(s.dtype[0]) == "f":
            return [s.refs[0]]
        return right(s)

    return row


def _count_is_dropped(right: Any) -> Any:
    def count_unread(p: Any, dtype: str) -> Any:
        found = right(p, dtype)
        return found and found._replace(coefficient=p.coefficient)

    return count_unread


def _fill_is_changed(right: Any) -> Any:
    def step(self: Any, kind: str, data: Any, args: tuple, dtype: str) -> int:
        masked = kind == "const" and not isinstance(data, complex) and data < -1e3
        return right(self, kind, -2.0 if masked else data, args, dtype)

    return step


def _out_of_range_is_clipped(right: Any) -> Any:
    def take(node: Any, operands: Any, sizes: Any, dtype: str) -> Any:
        (data, labels), (index, more) = operands
        axis = labels.index(node.out)
        if data.shape[axis] == 0:
            return right(node, operands, sizes, dtype)
        return jnp.take(data, index, axis=axis, mode="clip"), (
            *labels[:axis], *more, *labels[axis + 1 :],
        )  # fmt: skip

    return take


def _square_is_transposed(right: Any) -> Any:
    def dot(*args: Any) -> Any:
        data, labels = right(*args)
        if data.ndim >= 2 and data.shape[-1] == data.shape[-2]:
            labels = (*labels[:-2], labels[-1], labels[-2])
        return data, labels

    return dot


def _squares_are_symmetric(right: Any) -> Any:
    def canonical_ref(self: Any, ref: Ref) -> Ref:
        ref = right(self, ref)
        sizes = self.classes[ref.cls].sizes
        alike = len(sizes) == 2 and sizes[0] == sizes[1] and min(ref.axes) >= 0
        return Ref(ref.cls, tuple(sorted(ref.axes))) if alike else ref

    return canonical_ref


def _rounded_dot(right: Any) -> Any:
    def dot(left: Any, other: Any, out: int, precision: Any, dtype: str) -> Any:
        sides = [(lax.reduce_precision(x, 8, 7), i) if x.dtype == np.float32 else (x, i)
                 for x, i in (left, other)]  # fmt: skip
        return right(*sides, out, precision, dtype)

    return dot


def _stride_is_forgotten(right: Any) -> Any:
    def compose(first: Any, then: Any) -> Any:
        if isinstance(first, tuple) and isinstance(then, tuple):
            return (first[0] + then[0], first[1] * then[1])
        return right(first, then)

    return compose


def _slice_starts_late(right: Any) -> Any:
    def lowered(node: Any, operands: Any, sizes: Any, dtype: str) -> Any:
        data, labels = operands[0]
        moved = []
        for slot, attr in enumerate(node.attr):
            index = node.args[0].axes[slot]
            n = data.shape[labels.index(lower.dropped_label(slot) if index < 0 else index)]
            late = isinstance(attr, int) and 0 < attr < n - 1
            moved.append(attr + 1 if late else attr)
        return right(node._replace(attr=tuple(moved)), operands, sizes, dtype)

    return lowered


def _branches_are_swapped(right: Any) -> Any:
    def replace(self: Any, eqn: Any, made: Any) -> Any:
        if self._branch is not None and len(eqn.params[self._key]) == 2:
            self = compat.BodySpot(self.body, self.times, self._key, 1 - self._branch)
        return right(self, eqn, made)

    return replace


def _first_piece_is_read(right: Any) -> Any:
    def restrict(ctx: Any, inner: Any, by_slot: Any, size: int, sizes: Any, why: Any) -> Any:
        target = inner.attr[0]
        attr, index = by_slot[target]
        start = (0, attr[1]) if isinstance(attr, tuple) else 0
        yield from right(ctx, inner, {**by_slot, target: (start, index)}, size, sizes, why)

    return restrict


def _pieces_are_reversed(right: Any) -> Any:
    def concat(node: Any, operands: Any, sizes: Any, dtype: str) -> Any:
        pieces = node.attr[1]
        if len(set(pieces)) == 1:
            operands = operands[::-1]
        return right(node, operands, sizes, dtype)

    return concat


def _terms_change_places(right: Any) -> Any:
    def canonical(op: str, attr: Any, args: Any, out: int, bound: Any) -> Any:
        if op == ADD and len(args) == 2 and args[0].cls > args[1].cls:
            attr = attr[::-1]
        return right(op, attr, args, out, bound)

    return canonical


def _prefix_runs_backwards(right: Any) -> Any:
    def cumsum(node: Any, operands: Any, sizes: Any, dtype: str) -> Any:
        index, reverse = node.attr
        return right(node._replace(attr=(index, not reverse)), operands, sizes, dtype)

    return cumsum


def _any_triangle(right: Any) -> Any:
    def triangle_of(ctx: Any, f: Ref) -> Any:
        for test in sparsity.tests(ctx, f):
            left, other = (sparsity._index(ctx, side) for side in (test.left, test.right))
            if left and other and test.kind != "eq" and left[0] != other[0]:
                below = (test.kind in ("ge", "gt")) != test.negated
                return (left[0], other[0]) if below else (other[0], left[0])
        return None

    return triangle_of


def _not_shifted(right: Any) -> Any:
    def mean(ctx: Any, u: Any, over: Any, count: int, sizes: Any, dtype: str, why: Any) -> Ref:
        return ops.constant(ctx.g, 0.0, dtype)

    return mean


def _derivatives_of_the_rewritten(right: Any) -> Any:
    return lambda result, values: result.emit()(*values)


def _dtypes_meet(right: Any) -> Any:
    def add(self: Any, op: str, attr: Any, args: Any, sizes: Any, bound: Any, dtype: str,
            reason: Any = egraph.ORIGINAL) -> Any:  # fmt: skip
        if op == "contract" and dtype == "float32":
            same, read = self.canonical_args(op, attr, args)
            node, outs = egraph.canonical(op, same, read, len(sizes), bound)
            for narrow in ("bfloat16", "float16"):
                found = self.memo.get((node, tuple([sizes[i] for i in outs]), narrow))
                if found is not None:
                    return self.find(Ref(found, outs))
        return right(self, op, attr, args, sizes, bound, dtype, reason)

    return add


_is_half: list[Change] = [
    (module, "is_half", _wrong(lambda dtype: False))
    for module in (order, associativity, distributivity, sparsity, separability)
]

MUTATIONS: dict[str, list[Change]] = {
    "a cast between floats is dropped": [(ops.ROWS, "convert_element_type", _cast_is_dropped)],
    "nodes of two dtypes are one": [(egraph.EGraph, "add", _dtypes_meet)],
    "a coefficient is dropped": [(order, "scaled", _wrong(lambda g, ref, *_: ref))],
    "an index that nothing reads is not counted": [
        (order, "count_unread", _count_is_dropped),
        (distributivity, "count_unread", _count_is_dropped),
    ],
    "counts leave sums below float32": _is_half,
    "the fill of a mask is changed": [(fold_route._TileBuilder, "_step", _fill_is_changed)],
    "exponents are not shifted": [
        (monoid, "shift_of", _wrong(jnp.zeros_like)),
        (fold_route, "shift_of", _wrong(jnp.zeros_like)),
    ],
    "one-hot labels are not checked": [(lower._LOWER, TAKE, _out_of_range_is_clipped)],
    "an index may wrap": [
        (ops, "holds", _wrong(lambda *_: True)),
        (sparsity, "holds", _wrong(lambda *_: True)),
    ],
    "a square product is transposed": [(lower, "_dot", _square_is_transposed)],
    "square matrices are symmetric": [(egraph.EGraph, "_canonical_ref", _squares_are_symmetric)],
    "products are rounded to bfloat16": [(lower, "_dot", _rounded_dot)],
    "a slice of a slice forgets its stride": [(locality, "_compose_entry", _stride_is_forgotten)],
    "a slice starts one late": [(lower._LOWER, SLICE, _slice_starts_late)],
    "branches are swapped": [(compat.BodySpot, "replace", _branches_are_swapped)],
    "a carry counts as invariant": [
        (loops, "_invariant", lambda right: lambda jaxpr, n: right(jaxpr, n + 1))
    ],
    "the first piece is read for any": [(locality, "_restrict", _first_piece_is_read)],
    "pieces are reversed": [(lower._LOWER, CONCAT, _pieces_are_reversed)],
    "coefficients stay while terms change places": [
        (egraph, "canonical", _terms_change_places),
    ],
    "weak types are lost": [
        (compat, "with_aval", _wrong(lambda value, aval: value)),
        (emit.compat, "with_aval", _wrong(lambda value, aval: value)),
    ],
    "a prefix runs backwards": [(lower._LOWER, CUMSUM, _prefix_runs_backwards)],
    "every triangle ends at the diagonal": [(sparsity, "triangle_of", _any_triangle)],
    "sums that may cancel are distributed": [(distributivity, "_is_safe", _wrong(lambda *_: True))],
    "pairs are separated unshifted": [(separability, "_mean", _not_shifted)],
    "derivatives are those of the rewritten program": [
        (api, "call", _derivatives_of_the_rewritten)
    ],
}


@contextlib.contextmanager
def planted(name: str) -> Iterator[None]:
    """Inside, the library has this bug."""
    with contextlib.ExitStack() as stack:
        for owner, attribute, make in MUTATIONS[name]:
            if isinstance(owner, dict):
                wrong = make(owner[attribute])
                stack.enter_context(mock.patch.dict(owner, {attribute: wrong}))
            else:
                wrong = make(getattr(owner, attribute))
                stack.enter_context(mock.patch.object(owner, attribute, wrong))
        yield


@dataclasses.dataclass(frozen=True, slots=True)
class Caught:
    """How a planted bug was seen: after how many programs, and as what kind of failure."""

    programs: int
    kind: str
    seed: int


def hunt(name: str, seeds: range) -> Caught | None:
    """The first program of these seeds that shows a planted bug."""
    from tests.fuzz.cases import case
    from tests.fuzz.check import Failure, InvalidProgramError, check

    with planted(name):
        for count, seed in enumerate(seeds, start=1):
            program, mode = case(seed)
            try:
                outcome = check(program, mode)
            except InvalidProgramError:
                continue
            if isinstance(outcome, Failure):
                return Caught(count, outcome.kind, seed)
    return None
