"""Recognition of plain attention in a fold (may import spec.py and attention_symbols.py).

    out = softmax(scale · q kᵀ, with a fill where masked) v        lse = log Σ e^score

The mask is causal, a window, of lengths, or several of these. The programs of tile and epilogue are
read as symbols.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import jax
import jax.numpy as jnp

from symjax_rewrite.pallas_kernels.fold.attention_symbols import (
    HALVES,
    MAXIMUM,
    RULES,
    Exponent,
    Number,
    Scores,
    VisiblePairs,
    Weights,
    interpreted,
    monomial,
)
from symjax_rewrite.pallas_kernels.fold.spec import ExpSums, FoldSpec, WeightedTerm


@dataclass(frozen=True, slots=True)
class PlainAttention:
    """The parts of a fold that is plain attention.

    Args:
        scale: of the scores.
        seen: the pairs that are not masked.
        fill: the score of masked pairs.
        query: number of the operand; likewise `key` and `value`.
        results: for each result "out" or "lse".
    """

    scale: float
    seen: VisiblePairs
    fill: float
    query: int
    key: int
    value: int
    results: tuple[str, ...]


@lru_cache(maxsize=256)
def plain_attention(spec: FoldSpec) -> PlainAttention | None:
    """Return the parts of a fold that is plain attention in half precision, else None."""
    if len(spec.contractions) != 1 or len(spec.outputs) != 1 or spec.epilogue is None:
        return None
    (dot,), (sums,) = spec.contractions, spec.outputs
    value = _values(spec, sums) if isinstance(sums, ExpSums) else None
    if value is None or spec.tile.whole is not None:
        return None
    used = {dot.row, dot.col, value}
    dtypes = {spec.operands[k].dtype for k in used}
    if {*range(len(spec.operands))} != used | {*spec.tile.reads} or used & {*spec.tile.reads}:
        return None
    if len(dtypes) > 1 or not dtypes <= {*HALVES} or spec.epilogue.reads or dot.dtype != "float32":
        return None
    scores, results = _scores(spec), _results(spec, value)
    if scores is None or results is None:
        return None
    return PlainAttention(scores.scale, scores.seen, scores.fill, dot.row, dot.col, value, results)


def _values(spec: FoldSpec, sums: ExpSums) -> int | None:
    """Return the operand that probabilities weight, of sums that are those of attention."""
    plain = [t for t in sums.terms if t == WeightedTerm()]
    weighted = [t for t in sums.terms if t.weights is not None and t.factor is None]
    if (len(plain), len(weighted), len(sums.terms), sums.tile) != (1, 1, 2, 0):
        return None
    (term,) = weighted
    assert term.weights is not None
    return term.weights if term.round_to == spec.operands[term.weights].dtype else None


def _scores(spec: FoldSpec) -> Scores | None:
    """Return the symbol of a tile; None where it is more than a scaled dot under a plain mask."""
    reads = [spec.operands[k] for k in spec.tile.reads]
    if any(o.dtype != "int32" or not {*o.axes} <= {*spec.batch} for o in reads):
        return None
    index = jax.ShapeDtypeStruct((1, 1), jnp.int32)
    dot = jax.ShapeDtypeStruct((1, 1), jnp.float32)
    closed = jax.make_jaxpr(spec.tile.fun)((dot,), (index,) * len(reads), index, index)
    lengths = [Number(0, 0, 0, 1, k) for k in spec.tile.reads]
    given = [Scores(1.0), *lengths, Number(1, 0, 0), Number(0, 1, 0)]
    found = interpreted(closed, given, RULES)
    tile = found[0] if len(found) == 1 else None
    return tile if isinstance(tile, Scores) else None


def _results(spec: FoldSpec, value: int) -> tuple[str, ...] | None:
    """Return the name of each result of the epilogue; None where one is no result of attention."""
    (sums,), epilogue = spec.outputs, spec.epilogue
    assert epilogue is not None and isinstance(sums, ExpSums)
    of_terms = [monomial(**{"total" if t.weights is None else "weighted": 1}) for t in sums.terms]
    one = jax.ShapeDtypeStruct((1, 1), jnp.float32)
    closed = jax.make_jaxpr(epilogue.fun)(((one,) * (1 + len(of_terms)),), ())
    found = interpreted(closed, [MAXIMUM, *of_terms], RULES)
    lead = {*spec.batch, spec.row}
    wanted = {
        monomial(weighted=1, total=-1): (
            "out",
            spec.operands[value].dtype,
            {*lead, *spec.features(value)},
        ),
        Exponent(top=1.0, total=1.0): ("lse", "float32", lead),
    }
    out = []
    for symbol, aval, axes in zip(found, closed.out_avals, epilogue.axes, strict=True):
        known = wanted.get(symbol) if isinstance(symbol, (Weights, Exponent)) else None
        if known is None or known[1:] != (str(aval.dtype), set(axes)):
            return None
        out.append(known[0])
    return tuple(out)
