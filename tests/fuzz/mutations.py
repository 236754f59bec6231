"""Planted bugs: each breaks one fact the optimiser rests on, and the fuzzer must see it.

A mutation replaces one function of the library by a wrong one for as long as the context is open.
"""

from __future__ import annotations

import contextlib
import dataclasses
import random
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import jax.numpy as jnp
import numpy as np
from jax import lax

from symjax_rewrite import jax_internals
from symjax_rewrite.api import differentiation
from symjax_rewrite.codegen import term_lowering
from symjax_rewrite.ir import egraph, index_tests, indexing_primitives, primitives, step_program
from symjax_rewrite.ir.primitive_context import Site
from symjax_rewrite.ir.term import ADD, CONCAT, CUMSUM, SLICE, TAKE, Ref
from symjax_rewrite.kernel_selection.folds import epilogue as folds_epilogue
from symjax_rewrite.loops import loop
from symjax_rewrite.pallas_kernels import monoid
from symjax_rewrite.rewriting import product_trees
from symjax_rewrite.rules import (
    cancellation,
    distributivity,
    locality,
    low_rank,
    separability,
    sparsity,
)
from tests.fuzz import algebra, edges, grammar, lookalikes
from tests.fuzz.builder import RandomChooser
from tests.fuzz.check import Failure, InvalidProgramError, Mode, check

Change = tuple[Any, str, Callable[[Any], Any]]  # owner, name, what makes the wrong function


def _wrong(result: Callable[..., Any]) -> Callable[[Any], Any]:
    """A function that does something else, whatever the right one does."""
    return lambda right: result


def _cast_is_dropped(right: Any) -> Any:
    def row(s: Site) -> Any:
        source = s.g.classes[s.refs[0].cls].dtype
        if primitives.dtype_kind(source) == primitives.dtype_kind(s.dtype[0]) == "f":
            return [s.refs[0]]
        return right(s)

    return row


def _everything_is_read(right: Any) -> Any:
    def narrowed(self: Any, made: Any, used: Any) -> Any:
        return (self, made, [True] * len(made.in_avals)) if all(used) else right(self, made, used)

    return narrowed


def _count_is_dropped(right: Any) -> Any:
    def count_unread(p: Any, dtype: str) -> Any:
        found = right(p, dtype)
        return found and found._replace(coefficient=p.coefficient)

    return count_unread


def _fill_is_changed(right: Any) -> Any:
    def add(self: Any, kind: str, data: Any = None, args: tuple = (), dtype: str = "") -> int:
        masked = kind == "const" and not isinstance(data, complex) and data < -1e3
        return right(self, kind, -2.0 if masked else data, args, dtype)

    return add


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
            n = data.shape[labels.index(term_lowering.dropped_label(slot) if index < 0 else index)]
            late = isinstance(attr, int) and 0 < attr < n - 1
            moved.append(attr + 1 if late else attr)
        return right(node._replace(attr=tuple(moved)), operands, sizes, dtype)

    return lowered


def _branches_are_swapped(right: Any) -> Any:
    def replace(self: Any, eqn: Any, made: Any) -> Any:
        if self._branch is not None and len(eqn.params[self._key]) == 2:
            self = jax_internals.BodySpot(self.body, self.times, self._key, 1 - self._branch)
        return right(self, eqn, made)

    return replace


def _first_piece_is_read(right: Any) -> Any:
    def one_piece(r: Any, inner: Any, by_slot: Any) -> Any:
        target = inner.attr[0]
        attr, index = by_slot[target]
        start = (0, attr[1]) if isinstance(attr, tuple) else 0
        return right(r, inner, {**by_slot, target: (start, index)})

    return one_piece


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
        for test in sparsity.indicated(ctx.g, f):
            left, other = (sparsity.index_of(ctx.g, side) for side in (test.left, test.right))
            if left and other and test.kind != "eq" and left[0] != other[0]:
                below = (test.kind in ("ge", "gt")) != test.negated
                return (left[0], other[0], 0) if below else (other[0], left[0], 0)
        return None

    return triangle_of


def _not_shifted(right: Any) -> Any:
    return lambda r, side: r.sum((0.0, right(r, side)))


def _derivatives_of_the_rewritten(right: Any) -> Any:
    return lambda self, values: jax_internals.eval_jaxpr(self.runs, *values)


def _carries_never_change(right: Any) -> Any:
    def levels(self: loop.Loop) -> dict[int, int]:
        consts = {**self.consts, **{c.inner: c.start for c in self.carries}}
        return right(dataclasses.replace(self, consts=consts, carries=[]))

    return levels


def _results_of_another_carry(right: Any) -> Any:
    def finish(self: loop.Loop, finals: list, ys: list, read: Any) -> list:
        shapes = [(np.shape(x), jnp.result_type(x)) for x in finals]
        swapped = finals[::-1] if len(set(shapes)) == 1 else finals
        return right(self, swapped, ys, read)

    return finish


def _dtypes_meet(right: Any) -> Any:
    def add(self: Any, op: str, attr: Any, args: Any, sizes: Any, bound: Any, dtype: str,
            reason: Any = egraph.ORIGINAL) -> Any:  # fmt: skip
        if op == "contract":
            same, read = self.canonical_args(op, attr, args)
            node, outs = egraph.canonical(op, same, read, len(sizes), bound)
            for other in {"float32", "bfloat16", "float16"} - {dtype}:
                found = self.memo.get((node, tuple([sizes[i] for i in outs]), other))
                if found is not None:
                    return self.find(Ref(found, outs))
        return right(self, op, attr, args, sizes, bound, dtype, reason)

    return add


def _not_refined(right: Any) -> Any:
    def whole(r: Any, *terms: Any) -> Ref:
        return terms[0][1] if [c for c, _ in terms] == [1, 1] else right(r, *terms)

    return whole


@dataclasses.dataclass(frozen=True, slots=True)
class Mutation:
    """A planted bug. by: productions it concerns. transform: see `check.TRANSFORMS`."""

    changes: list[Change]
    by: tuple[grammar.Production, ...]
    transform: str = "value"


_swapped = (lookalikes.carried, lookalikes.recurrence)
_slices = (grammar.parts, edges.restrided)
_chains = (algebra.chain, algebra.powers)
_scores = (lookalikes.attention_like,)

MUTATIONS: dict[str, Mutation] = {
    "every operand of a call is read": Mutation(
        [(differentiation.Call, "narrowed", _everything_is_read)], _chains
    ),
    "a cast between floats is dropped": Mutation(
        [(indexing_primitives.ROWS, "convert_element_type", _cast_is_dropped)],
        (edges.precisions, edges.rounded_twice),
    ),
    "nodes of two dtypes are one": Mutation(
        [(egraph.EGraph, "add", _dtypes_meet)], (edges.rounded_twice,)
    ),
    "a coefficient is dropped": Mutation(
        [(product_trees, "scaled", _wrong(lambda g, ref, *_: ref))], (grammar.scale, algebra.matmul)
    ),
    "an index that nothing reads is not counted": Mutation(
        [
            (product_trees, "count_unread", _count_is_dropped),
            (distributivity, "count_unread", _count_is_dropped),
        ],
        (edges.counted,),
    ),
    "the fill of a mask is changed": Mutation(
        [(step_program.StepProgram, "add", _fill_is_changed)], _scores
    ),
    "exponents are not shifted": Mutation(
        [
            (monoid, "shift_of", _wrong(jnp.zeros_like)),
            (folds_epilogue, "shift_of", _wrong(jnp.zeros_like)),
        ],
        _scores,
    ),
    "one-hot labels are not checked": Mutation(
        [(term_lowering._LOWER, TAKE, _out_of_range_is_clipped)], (edges.out_of_range,)
    ),
    "an index may wrap": Mutation(
        [
            (primitives, "holds", _wrong(lambda *_: True)),
            (index_tests, "holds", _wrong(lambda *_: True)),
        ],
        (edges.many_classes,),
    ),
    "a square product is transposed": Mutation(
        [(term_lowering, "product_of", _square_is_transposed)], _chains
    ),
    "square matrices are symmetric": Mutation(
        [(egraph.EGraph, "_canonical_ref", _squares_are_symmetric)], _chains
    ),
    "products are rounded to bfloat16": Mutation(
        [(term_lowering, "product_of", _rounded_dot)], _chains
    ),
    "a slice of a slice forgets its stride": Mutation(
        [(locality, "_compose", _stride_is_forgotten)], _slices
    ),
    "a slice starts one late": Mutation(
        [(term_lowering._LOWER, SLICE, _slice_starts_late)], _slices
    ),
    "branches are swapped": Mutation(
        [(jax_internals.BodySpot, "replace", _branches_are_swapped)], (grammar.branch, *_chains)
    ),
    "carries never change": Mutation([(loop.Loop, "levels", _carries_never_change)], _swapped),
    "carries change places": Mutation([(loop.Loop, "finish", _results_of_another_carry)], _swapped),
    "the first piece is read for any": Mutation(
        [(locality, "_within_block", _first_piece_is_read)], (algebra.blocks,)
    ),
    "pieces are reversed": Mutation(
        [(term_lowering._LOWER, CONCAT, _pieces_are_reversed)], (algebra.blocks,)
    ),
    "coefficients stay while terms change places": Mutation(
        [(egraph, "canonical", _terms_change_places)], (grammar.sums, algebra.shared_operand)
    ),
    "weak types are lost": Mutation(
        [(jax_internals, "with_aval", _wrong(lambda value, aval: value))], (edges.weak,)
    ),
    "a prefix runs backwards": Mutation(
        [(term_lowering._LOWER, CUMSUM, _prefix_runs_backwards)],
        (edges.constants, algebra.diagonal),
    ),
    "every triangle ends at the diagonal": Mutation(
        [(sparsity, "triangle_of", _any_triangle)], (edges.constants,)
    ),
    "sums that may cancel are distributed": Mutation(
        [(distributivity, "is_safe", _wrong(lambda *_: True))], (edges.cancelling,)
    ),
    "near values are scaled before they are subtracted": Mutation(
        [
            (distributivity, "is_rounded", _wrong(lambda *_: True)),
            (cancellation, "is_rounded", _wrong(lambda *_: True)),
        ],
        (edges.near,),
    ),
    "a low-rank solve is not refined": Mutation(
        [(low_rank, "_whole", _not_refined)], (edges.low_rank_readout,)
    ),
    "pairs are separated unshifted": Mutation(
        [(separability, "_mean", _not_shifted)], (edges.far_pairs,)
    ),
    "derivatives are those of the rewritten program": Mutation(
        [(differentiation.Call, "bind", _derivatives_of_the_rewritten)],
        (grammar.with_rule, *_chains),
        "grad",
    ),
}


@contextlib.contextmanager
def planted(name: str) -> Iterator[None]:
    """Inside, the library has this bug."""
    with contextlib.ExitStack() as stack:
        for owner, attribute, make in MUTATIONS[name].changes:
            if isinstance(owner, dict):
                wrong = make(owner[attribute])
                stack.enter_context(mock.patch.dict(owner, {attribute: wrong}))
            else:
                wrong = make(getattr(owner, attribute))
                stack.enter_context(mock.patch.object(owner, attribute, wrong))
        yield


@dataclasses.dataclass(frozen=True, slots=True)
class Caught:
    """The detection of a planted bug: the number of programs, and the kind of failure."""

    programs: int
    kind: str
    seed: int


def once(name: str, seed: int) -> Failure | str:
    """Run the program of a seed, made of a mutation's productions."""
    mutation = MUTATIONS[name]
    rng = random.Random(seed)
    made = grammar.program(RandomChooser(rng), lines=3, swarm=mutation.by)
    choice = rng.choice(("random", "wide", "always"))
    mode = Mode(mutation.transform, choice, seed, kernels=rng.choice(("always", "always", "off")))
    try:
        return check(made, mode)
    except InvalidProgramError as error:
        return str(error)


def hunt(name: str, seeds: range) -> Caught | None:
    """The first program of these seeds that shows a planted bug."""
    with planted(name):
        for count, seed in enumerate(seeds, start=1):
            outcome = once(name, seed)
            if isinstance(outcome, Failure):
                return Caught(count, outcome.kind, seed)
    return None
