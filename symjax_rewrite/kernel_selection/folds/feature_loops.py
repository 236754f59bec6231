"""Sums over features as loops inside a tile.

    Σ_f t(x_f, y_f)

The steps of the term t stand in the tile program once. A step `feature` is an operand with all of
its features; the steps that depend on it are computed at one feature, where the step `summed` adds
them. XLA on a CPU neither vectorises the sum as a reduction, nor compiles it fast written out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from symjax_rewrite.cost.profile_groups import SLOW_MAPS
from symjax_rewrite.ir.dataflow import cone
from symjax_rewrite.ir.step_program import Handlers, Step
from symjax_rewrite.ir.term import MAP
from symjax_rewrite.kernel_selection.folds.pairwise_terms import PIECE
from symjax_rewrite.pallas_kernels.fold.tiling import dividing

Array = Any


class _Features(NamedTuple):
    """An operand by feature: [feature, ..] without the axes of size 1, and the numbers of these.

    XLA copies what a loop reads to another order of such axes.
    """

    array: Array
    units: tuple[int, ...]

    @staticmethod
    def of(array: Array) -> _Features:
        units = tuple([k for k, n in enumerate(array.shape) if k and isinstance(n, int) and n == 1])
        return _Features(lax.squeeze(array, units), tuple([k - 1 for k in units]))

    def at(self, place: Any) -> Array:
        """Return the operand at a feature."""
        start = (jnp.asarray(place, jnp.int32), *[jnp.int32(0)] * (self.array.ndim - 1))
        sizes = (1, *self.array.shape[1:])
        cut = lax.dynamic_slice(self.array, start, sizes, allow_negative_indices=False)
        return lax.expand_dims(lax.squeeze(cut, (0,)), self.units)


def inside_loops(steps: Sequence[Step]) -> list[bool]:
    """Return for each step whether it is computed at one feature."""
    inside: list[bool] = []
    for step in steps:
        found = any(inside[a] or steps[a].kind == "feature" for a in step.args)
        inside.append(found and step.kind != "summed")
    return inside


def loop_lengths(steps: Sequence[Step]) -> list[int]:
    """Return how often a tile computes each step: inside a sum, as often as the sum has terms."""
    inside, lengths = inside_loops(steps), [1] * len(steps)
    for n in reversed(range(len(steps))):
        if steps[n].kind == "summed":
            lengths[n] = steps[n].data
        for a in steps[n].args:
            if inside[a]:
                lengths[a] = max(lengths[a], lengths[n])
    return lengths


def _own(steps: Sequence[Step], inside: Sequence[bool], term: tuple[int, ...]) -> list[int]:
    """Return the steps that a sum of a term computes at each feature, in order."""
    found = cone(term, lambda k: steps[k].args if inside[k] else ())
    return sorted(n for n in found if inside[n])


def steps_of_loops(steps: Sequence[Step]) -> int:
    """Return the number of steps that the loops of a tile take."""
    inside, total = inside_loops(steps), 0
    for _, count, term, _ in (s for s in steps if s.kind == "summed"):
        alone = _calls_functions(steps, _own(steps, inside, term))
        total += count if alone else -(-count // PIECE)
    return total


def run_with_loops(steps: Sequence[Step], handlers: Handlers) -> list[Any]:
    """Return the value of every step that no loop computes; None for the others."""
    inside, made = inside_loops(steps), list[Any]()
    for n, (kind, data, args, dtype) in enumerate(steps):
        if inside[n]:
            made.append(None)
        elif kind == "feature":
            made.append(_Features.of(handlers[kind](data, [], dtype)))
        elif kind == "summed":
            own = _own(steps, inside, args)
            alone = _calls_functions(steps, own)
            term = partial(_term, steps, own, args[0], made, handlers, alone)
            made.append(_summed(term, data, dtype, 1 if alone else PIECE))
        else:
            made.append(handlers[kind](data, [made[a] for a in args], dtype))
    return made


def _calls_functions(steps: Sequence[Step], own: Sequence[int]) -> bool:
    """Return True if some steps are functions, which XLA computes element by element in slices.

    Of operands cut before, from JAX 0.11 on, it computes functions of vectors: in a third of the
    time. Functions of several features in one kernel take longer than one of each.
    """
    applied = [steps[n].data for n in own if steps[n].kind == "apply"]
    return any(op == MAP and attr[0] in SLOW_MAPS for op, attr in applied)


def _term(
    steps: Sequence[Step], own: Sequence[int], root: int, made: Sequence[Any], handlers: Handlers,
    cut_before: bool, place: Any,
) -> Array:  # fmt: skip
    """Return the term of a sum, which is the step `root`, at a feature.

    own: its steps. made: the values of the steps outside. cut_before: its operands are cut in
    kernels of their own.
    """
    values: dict[int, Any] = {}

    def read(n: int) -> Any:
        if n in values:
            return values[n]
        if steps[n].kind == "feature":
            cut = made[n].at(place)
            return lax.optimization_barrier(cut) if cut_before else cut
        return made[n]

    for n in own:
        kind, data, args, dtype = steps[n]
        values[n] = handlers[kind](data, [read(a) for a in args], dtype)
    return read(root)


def _summed(term: Callable[[Any], Array], count: int, dtype: str, most: int) -> Array:
    """Return the sum of a term over features, at most so many in each step of a loop.

    The loop begins with the features that no step of it takes. Behind it XLA would add them in the
    kernel that reads the sum, for which it may compile one kernel for each slice.
    """
    piece = dividing(count, most)
    rest = count % piece

    def add(total: Array, first: Any, many: int) -> Array:
        for k in range(many):
            total = total + term(first + k)
        return total

    def step(number: Array, total: Array) -> Array:
        return add(total, rest + number * piece, piece)

    shape = jax.eval_shape(term, jnp.int32(0)).shape
    begin = add(jnp.zeros(shape, dtype), 0, rest)
    return lax.fori_loop(0, count // piece, step, begin)
