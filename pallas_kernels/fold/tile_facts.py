"""Tile programs, epilogues and monoids of a fold as its GPU kernels run them (imports tile.py)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp

from symjax_rewrite import jax_internals
from symjax_rewrite.cost.profile_groups import SLOW_MAPS
from symjax_rewrite.pallas_kernels import monoid
from symjax_rewrite.pallas_kernels.backend import LEAST_SIDE, too_large
from symjax_rewrite.pallas_kernels.fold.reference import flat_shapes
from symjax_rewrite.pallas_kernels.fold.spec import ExpSums, Extremum, FoldSpec, Output, terms_of
from symjax_rewrite.pallas_kernels.fold.tile import bundle, monoid_of
from symjax_rewrite.pallas_kernels.index_bounds import inside_band
from symjax_rewrite.pallas_kernels.monoid import Monoid, State
from symjax_rewrite.pallas_kernels.positive_factors import without_factors
from symjax_rewrite.pallas_kernels.triton_programs import exp, for_triton

ONE_INSTRUCTION = frozenset("sqrt reciprocal div rsqrt exp exp2 log log2".split())  # or about one
EXPANDED = SLOW_MAPS - ONE_INSTRUCTION


def limits(spec: FoldSpec) -> list[tuple[bool, str]]:
    """Return the checks of GPU kernels of any kind, as `first_reason` takes them."""
    return [
        (0 in dict(spec.sizes).values(), "an axis is empty"),
        (spec.tile.whole is not None, "the tile compares a term with its own reduction"),
        (bool(spec.tile.over), "the tile sums features in a loop"),
        (too_large(a.shape for a in spec.avals), "an operand has more than 2^31 elements"),
    ]


def tile_arguments(spec: FoldSpec) -> tuple[Any, ...]:
    """Return the avals of a tile program's arguments for a least tile."""
    side = LEAST_SIDE
    dots = tuple(jax.ShapeDtypeStruct((side, side), c.dtype) for c in spec.contractions)
    values = tuple(operand_tile(spec, k) for k in spec.tile.reads)
    i, j = (jax.ShapeDtypeStruct(s, jnp.int32) for s in ((side, 1), (1, side)))
    return dots, values, i, j


def operand_tile(spec: FoldSpec, number: int) -> jax.ShapeDtypeStruct:
    """Return the aval of an operand as programs over a least tile read it."""
    axes, dtype = spec.operands[number].axes, spec.operands[number].dtype
    lead = [LEAST_SIDE if a in axes else 1 for a in (spec.row, spec.col)]
    summed = spec.summed(number)
    features = [spec.size[a] for a in spec.features(number) if a not in summed]
    return jax.ShapeDtypeStruct([*(spec.size[a] for a in summed), *lead, *features], dtype)


@lru_cache(maxsize=256)
def values_per_pair(spec: FoldSpec) -> int:
    """Return how many values of a pair the tile program holds at once, at most.

    Products and operands over pairs are among them; conditions are not, which are single bits. A
    program over tiles holds an intermediate of all pairs of its tile before the next operation. A
    function that is several instructions holds one value more.
    """
    fun, given = programs_of(spec)[0]
    closed = jax_internals.without_dead(jax.make_jaxpr(for_triton(fun))(*given))

    def counts(v: Any) -> bool:
        return v in last and v.aval.shape == (LEAST_SIDE, LEAST_SIDE) and v.aval.dtype != bool

    last: dict[Any, int] = {}
    for place, eqn in enumerate(closed.jaxpr.eqns):
        last |= {v: place for v in eqn.invars if not jax_internals.is_literal(v)}
    kept = [v for v in closed.jaxpr.outvars if not jax_internals.is_literal(v)]
    last |= dict.fromkeys(kept, len(closed.jaxpr.eqns))
    held = {v for v in closed.jaxpr.invars if counts(v)}
    most = len(held)
    for place, eqn in enumerate(closed.jaxpr.eqns):
        held |= {v for v in eqn.outvars if counts(v)}
        most = max(most, len(held) + (eqn.primitive.name in EXPANDED and counts(eqn.outvars[0])))
        held = {v for v in held if last[v] > place}
    return most


@lru_cache(maxsize=256)
def implies_masks(spec: FoldSpec) -> bool:
    """Return True if the band of a fold implies masks of its tile program."""
    band = (spec.band.lower, spec.band.upper)
    if band == (None, None):
        return False
    found: list[bool] = []

    def tile(*given: Any) -> Any:
        made, decided = inside_band(spec.tile.fun, given, band)
        found.append(decided)
        return made

    jax.eval_shape(tile, *tile_arguments(spec))
    return found[0]


@lru_cache(maxsize=256)
def factors_of(spec: FoldSpec) -> tuple[float, ...]:
    """Return by tile the factor that exponentials of it are multiplied by, 1 for other tiles.

    Inside the band the program has fewer masks. The factor must be the same there.
    """
    found: list[tuple[float, ...]] = []

    def factors(is_inner: bool, *given: Any) -> Any:
        made = _in_factors(spec, is_inner, *given)
        found.append(tuple(x.factor or 1.0 for x in made))
        return [x.value for x in made]

    for is_inner in (False, True):
        jax.eval_shape(partial(factors, is_inner), *tile_arguments(spec))
    of_sums = {o.tile for o in spec.outputs if isinstance(o, ExpSums)}
    others = {o.tile for o in spec.outputs if not isinstance(o, ExpSums)}
    others |= {t.factor for o in spec.outputs for t in terms_of(o) if t.factor is not None}
    return tuple(
        k if k == inner and number in of_sums - others else 1.0
        for number, (k, inner) in enumerate(zip(*found, strict=True))
    )


def _in_factors(spec: FoldSpec, is_inner: bool, *given: Any) -> Any:
    band, program = (spec.band.lower, spec.band.upper), spec.tile.fun
    if is_inner:
        program = lambda *given: inside_band(spec.tile.fun, given, band)[0]  # noqa: E731
    return without_factors(for_triton(program), *given)


def tiles_of(spec: FoldSpec, is_inner: bool, *given: Any) -> list[Any]:
    """Return the tiles without their `factors_of`; inside the band without masks that it implies.

    given: the arguments of the tile program.
    """
    made = zip(_in_factors(spec, is_inner, *given), factors_of(spec), strict=True)
    return [t.value if k == 1 else t.base for t, k in made]


def programs_of(spec: FoldSpec) -> list[tuple[Any, tuple[Any, ...]]]:
    """Return the tile program and the epilogue, if any, with avals of their arguments."""
    programs: list[Any] = [(spec.tile.fun, tile_arguments(spec))]
    if spec.epilogue is not None:
        raw = replace(spec, epilogue=None)
        states = [jax.ShapeDtypeStruct((LEAST_SIDE, 1), s.dtype) for s in flat_shapes(raw)]
        rows = tuple(operand_tile(spec, k) for k in spec.epilogue.reads)
        programs.append((spec.epilogue.fun, (bundle(raw, states), rows)))
    return programs


def kernel_monoid(output: Output, factor: float = 1.0) -> Monoid:
    """Return the monoid; any and all are max and min of integers (Triton reduces no booleans).

    factor: of the exponents of `ExpSums`, which the tile and the stored maximum lack.
    """
    if isinstance(output, Extremum) and output.kind in ("any", "all"):
        return monoid.MAX if output.kind == "any" else monoid.MIN
    if isinstance(output, ExpSums):
        return monoid.exp_sums_by(partial(exp, factor=factor))
    return monoid_of(output)


def identities(spec: FoldSpec, avals: Sequence[Any]) -> tuple[State, ...]:
    """Return the identity of every output's monoid, of states with given avals."""
    states = bundle(replace(spec, epilogue=None), avals)
    return tuple(
        kernel_monoid(o).identity(state) for o, state in zip(spec.outputs, states, strict=True)
    )
