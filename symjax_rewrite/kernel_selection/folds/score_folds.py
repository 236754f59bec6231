"""The fold of the result and the log-sum-exp of plain attention, within a fold of more results."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from symjax_rewrite.ir.term import ADD, CONTRACT, MAP, Ref, identity, over
from symjax_rewrite.ir.term_graph import TermGraph
from symjax_rewrite.kernel_selection.folds.epilogue import Names
from symjax_rewrite.kernel_selection.folds.tile_program import COLUMN
from symjax_rewrite.pallas_kernels.fold.attention import normalised
from symjax_rewrite.pallas_kernels.fold.attention_symbols import (
    HALVES,
    Number,
    Scores,
    interpreted,
    rules_of,
)
from symjax_rewrite.pallas_kernels.fold.spec import (
    ExpSums,
    FoldSpec,
    Tile,
    WeightedTerm,
)


def score_fold(spec: FoldSpec) -> tuple[FoldSpec, tuple[int, int, int]] | None:
    """Return the fold of the result and log-sum-exp, and the numbers of q, k and v in a fold.

    None if the fold does not sum values by the exponentials of masked scores.
    """
    if len(spec.outputs) != 1 or spec.tile.reads or spec.named or not spec.contractions:
        return None
    (output,) = spec.outputs
    if not isinstance(output, ExpSums):
        return None
    number, inner, root = _score_number(spec, output.tile), spec.tile, output.tile
    weighted = None if number is None else _weighted(spec, output, number)
    if number is None or weighted is None or weighted.weights is None:
        return None
    c, count = spec.contractions[number], len(spec.contractions)
    numbers = c.row, c.col, weighted.weights
    q, k, v = (spec.operands[n] for n in numbers)
    if v.dtype not in HALVES:
        return None

    def tile(dots: tuple, values: tuple, i: Any, j: Any) -> Any:
        made = inner.fun(dots * count, values, i, j)
        return (made[root] if isinstance(made, tuple) else made,)

    lse = (*spec.batch, spec.row)
    made = replace(
        spec,
        operands=(q, k, v),
        contractions=(replace(c, row=0, col=1),),
        tile=Tile(tile, key=("scores", inner.key, root, number), dtypes=("float32",)),
        outputs=(ExpSums((WeightedTerm(), replace(weighted, weights=2, round_to=v.dtype))),),
        epilogue=normalised(v.dtype, (*lse, *spec.features(numbers[2])), lse),
    )
    return made, numbers


def _weighted(spec: FoldSpec, output: ExpSums, number: int) -> WeightedTerm | None:
    """Return the weighted sum of a fold, whose scores are contraction `number`.

    A gradient whose result is not read sums products with the values alone.
    """
    weighted = [t for t in output.terms if t.weights is not None]
    if weighted:
        return weighted[0] if len(weighted) == 1 else None
    others = {c.col for n, c in enumerate(spec.contractions) if n != number}
    if len(others) != 1:
        return None
    (values,) = others
    return WeightedTerm(values, round_to=spec.operands[values].dtype)


def _score_number(spec: FoldSpec, root: int) -> int | None:
    """Return the number of the contraction that a tile scales and masks."""
    one, index = (jax.ShapeDtypeStruct((1, 1), d) for d in (jnp.float32, jnp.int32))
    count = len(spec.contractions)
    if any(c.dtype != "float32" for c in spec.contractions):
        return None
    closed = jax.make_jaxpr(spec.tile.fun)((one,) * count, (), index, index)
    for number in range(count):
        dots = [Scores(1.0) if n == number else None for n in range(count)]
        given = [*dots, Number(1, 0, 0), Number(0, 1, 0)]
        if isinstance(interpreted(closed, given, rules_of(Scores(1.0)))[root], Scores):
            return number
    return None


def log_sum_exp(
    t: TermGraph, top: int, of_top: Names, total: int, of_total: Names
) -> tuple[int, Names]:
    """Add the class of max + log(total); return the class and its axes.

    top, total: the classes of the maxima and the sums; of_top, of_total: their axes.
    """
    g, sizes = t.graph, t.graph.classes[top].sizes
    slots = tuple([of_top.index(axis) for axis in of_total])
    logarithm = g.add(MAP, ("log", ()), (Ref(total, slots),), sizes, (), "float32")
    maximum = Ref(top, identity(len(sizes)))
    made = g.add(ADD, (1, 1), (maximum, logarithm), sizes, (), "float32")
    return made.cls, tuple([of_top[n] for n in made.axes])


def weighted_sum(
    t: TermGraph, scores: Ref, lse: tuple[int, Names], values: Ref, dtype: str
) -> tuple[int, Names]:
    """Add the class of Σ e^(scores - lse)·values over columns; return the class and its axes.

    lse: the class of the log-sum-exp, and its axes. All references are over named axes.
    """
    g = t.graph
    named: Any = dict.fromkeys((*scores.axes, *values.axes))
    names = sorted(named, key=lambda axis: axis == COLUMN)
    size: Any = {
        axis: n
        for ref in (scores, values)
        for axis, n in zip(ref.axes, g.classes[ref.cls].sizes, strict=True)
    }
    pairs = tuple(scores.axes)
    shift = Ref(lse[0], tuple([pairs.index(axis) for axis in lse[1]]))
    sizes = g.classes[scores.cls].sizes
    tile = Ref(scores.cls, identity(len(sizes)))
    shifted = g.add(ADD, (1, -1), (tile, shift), sizes, (), "float32")
    weights = g.add(MAP, ("exp", (("accuracy", None),)), (shifted,), sizes, (), "float32")
    number = {axis: n for n, axis in enumerate(names)}
    read = (over(Ref(-1, tuple([number[a] for a in pairs])), weights), values.over(number))
    shape = tuple([size[axis] for axis in names])
    made = g.add(CONTRACT, None, read, shape[:-1], shape[-1:], dtype)
    return made.cls, tuple([names[n] for n in made.axes])
