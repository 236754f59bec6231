"""Folds over the pairs of one set of points that compute every pair once.

    Σ_j R(i)·A(i,j)·C(j)   with   A(j,i) = ±A(i,j)

The half of A with i < j gives all sums: its sums over j, and its sums over i with the sign. A(i,i)
is added by point. Newton's third law is the case of forces (Verlet 1967).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax

from symjax_rewrite.cost import margins
from symjax_rewrite.cost.device_profiles import Device
from symjax_rewrite.ir.step_program import Step, StepProgram, pruned
from symjax_rewrite.ir.term import CONTRACT, MAP
from symjax_rewrite.kernel_selection.folds.builder import FoldRoute
from symjax_rewrite.kernel_selection.folds.fold_price import cost_folded, seconds_folded
from symjax_rewrite.kernel_selection.folds.tile_program import COLUMN, ROW, tile_function
from symjax_rewrite.kernel_selection.folds.tile_symmetry import Unswappable, swap_sign
from symjax_rewrite.pallas_kernels.fold.fold import fold
from symjax_rewrite.pallas_kernels.fold.spec import (
    Band,
    ColumnSums,
    FoldSpec,
    Output,
    Sums,
    Tile,
    WeightedTerm,
)
from symjax_rewrite.pallas_kernels.fold.tile import results_of
from symjax_rewrite.pallas_kernels.named_axes import Operand
from symjax_rewrite.rewriting.rule import SYMMETRY

Array = Any
FLOATS = ("float32", "float64")
DTYPES = (*FLOATS, "int32", "bool")  # of a tile's steps: all that `tile_symmetry` reads


class HalfSum(NamedTuple):
    """A sum in the form above: the steps of A, of C and of R, the fold's weights, and the sign."""

    pairs: int
    columns: tuple[int, ...]
    rows: tuple[int, ...]
    weights: int | None
    sign: int


@dataclass(frozen=True, slots=True)
class MirroredFold:
    """A fold whose sums come from the pairs i < j.

    halves: by output and term. program: the steps of `halves`. half: the fold of the pairs i < j,
    which reads the weights of each sum by column and by row after the fold's own operands.
    """

    spec: FoldSpec
    backend: str
    halves: tuple[tuple[HalfSum, ...], ...]
    program: Sequence[Step]
    half: FoldSpec
    primitives: Any
    uses: ClassVar[tuple[str, ...]] = (SYMMETRY,)

    def __call__(self, arrays: Sequence[Array]) -> tuple[Any, ...]:
        halves = [h for output in self.halves for h in output]
        scales = [x for h in halves for x in self._at_points((*h.rows, *h.columns), arrays)]
        scales += [arrays[h.weights] for h in halves if h.weights is not None]
        if not scales:
            return self._mirrored(arrays)
        # The pairs that are left out have A = 0 here, which an infinite C would make NaN.
        finite = jnp.all(jnp.stack([jnp.isfinite(x).all() for x in scales]))
        # An operand that stands twice becomes one of the branches', where XLA sees it as such.
        known = {id(x): x for x in arrays}
        places = [[*known].index(id(x)) for x in arrays]
        return lax.cond(
            finite,
            lambda *xs: self._mirrored([xs[k] for k in places]),
            lambda *xs: fold(self.spec, *[xs[k] for k in places]),
            *known.values(),
        )

    def _mirrored(self, arrays: Sequence[Array]) -> tuple[Any, ...]:
        flat = [h for output in self.halves for h in output]
        charges = [self._charge(h, arrays) for h in flat]
        twice = [q for q in charges for _ in range(2)]
        sums = iter(fold(self.half, *arrays, *twice, backend=self.backend))
        charge, states = iter(charges), []
        for output in self.halves:
            terms = []
            for h in output:
                (along,), (across,) = next(sums), next(sums)
                (alone,) = self._at_points((h.pairs,), arrays)
                here = _widened(alone[..., 0], along.ndim) * next(charge)
                total = along + h.sign * across + here
                terms.append(total * _widened(self._product(h.rows, arrays), along.ndim))
            states.append(tuple(terms))
        return results_of(self.spec, states, arrays)

    def _charge(self, h: HalfSum, arrays: Sequence[Array]) -> Array:
        """Return C times the fold's own weights: [batch.., points, features..]."""
        scale = self._product(h.columns, arrays)
        if h.weights is None:
            return scale
        data = _by_point(self.spec, h.weights, arrays[h.weights])
        return data * _widened(scale, data.ndim)

    def _product(self, steps: tuple[int, ...], arrays: Sequence[Array]) -> Array:
        """Return a product of steps that one side determines: [batch.., points]."""
        dtype = self.program[self.halves[0][0].pairs].dtype
        made = jnp.ones((*self.spec.batch_shape, self.spec.rows), dtype)
        for x in self._at_points(steps, arrays):
            made = made * x[..., 0]
        return made

    def _at_points(self, steps: tuple[int, ...], arrays: Sequence[Array]) -> tuple[Array, ...]:
        """Return steps at the pairs of each point with itself, which broadcast: [.., points, 1]."""
        values = tuple(_by_point(self.spec, k, arrays[k])[..., None] for k in self.spec.tile.reads)
        i = jnp.arange(self.spec.rows, dtype=jnp.int32)[:, None]
        return tile_function(self.program, steps, self.primitives)((), values, i, i)


def _widened(array: Array, ndim: int) -> Array:
    """Return an array with further axes of size 1 behind its own."""
    return array.reshape(*array.shape, *(1,) * (ndim - array.ndim))


def _by_point(spec: FoldSpec, number: int, array: Array) -> Array:
    """Return an operand over rows or columns: [batch.., points, features..], or 1 for an axis."""
    axes, features = spec.operands[number].axes, spec.features(number)
    shared = [(a,) for a in spec.batch] + [(spec.row, spec.col)]
    found = [next((a for a in names if a in axes), None) for names in shared]
    order = [*(a for a in found if a is not None), *features]
    array = lax.transpose(array, [axes.index(a) for a in order])
    return lax.expand_dims(array, [k for k, a in enumerate(found) if a is None])


def mirrored(route: FoldRoute, primitives: Any, device: Device | None) -> FoldRoute:
    """Return a fold that computes every pair once where this is possible, else the fold.

    device: where given, a fold is changed only if it is predicted to be faster there.
    """
    spec = route.spec
    simple = not (spec.named or spec.contractions or spec.tile.whole or spec.tile.over)
    simple = simple and spec.band == Band()
    if not simple or spec.rows != spec.cols or any(s.dtype not in DTYPES for s in route.steps):
        return route
    splitter = _Splitter(route)
    try:
        halves = tuple(splitter.halves(output) for output in spec.outputs)
    except Unswappable:
        return route
    steps = splitter.program.steps
    half = _half_spec(spec, [h for output in halves for h in output], steps, primitives)
    needed, _ = pruned(steps, [h.pairs for output in halves for h in output])
    priced = replace(route, spec=half, steps=[*needed])
    if device is not None:
        seconds = seconds_folded(route, device), seconds_folded(priced, device)
        if not margins.pays(*seconds, "fold", device):
            return route
    compute = MirroredFold(spec, route.backend, halves, steps, half, primitives)
    return replace(route, price=partial(cost_folded, priced), compute=compute)


def _half_spec(
    spec: FoldSpec, halves: list[HalfSum], program: Sequence[Step], primitives: Any
) -> FoldSpec:
    """Return the fold of the pairs i < j: of each sum, over columns and over rows."""
    roots = tuple(dict.fromkeys(h.pairs for h in halves))
    whole = tile_function(program, roots, primitives)
    operands, outputs = [*spec.operands], []
    for h in halves:
        features = () if h.weights is None else spec.features(h.weights)
        for kind, axis in ((Sums, spec.col), (ColumnSums, spec.row)):
            term = WeightedTerm(len(operands), precision="highest")
            outputs.append(kind((term,), roots.index(h.pairs)))
            axes = (*spec.batch, axis, *features)
            operands.append(Operand(axes, program[h.pairs].dtype))

    def upper(dots: tuple, values: tuple, i: Array, j: Array) -> tuple:
        return tuple(jnp.where(j > i, x, jnp.zeros((), x.dtype)) for x in whole(dots, values, i, j))

    return replace(
        spec,
        operands=tuple(operands),
        tile=Tile(upper, spec.tile.reads, ("mirrored", spec.tile.key, roots)),
        outputs=tuple(outputs),
        band=Band(lower=0),
        epilogue=None,
    )


class _Factored(NamedTuple):
    """A step as a product: the step of its pairs, None for 1, and steps of one side each."""

    pairs: int | None
    columns: tuple[int, ...] = ()
    rows: tuple[int, ...] = ()


class _Splitter:
    """Splitting of tiles into factors of pairs, of rows and of columns, as added steps."""

    def __init__(self, route: FoldRoute) -> None:
        self.route, self.spec, self.program = route, route.spec, StepProgram()
        for step in route.steps:
            self.program.add(*step)
        self.sides = self._sides()
        self.known: dict[int, _Factored] = {}

    def halves(self, output: Output) -> tuple[HalfSum, ...]:
        """Return the sums of an output in the form above.

        Raises:
            Unswappable: it has another form.
        """
        if not isinstance(output, Sums):
            raise Unswappable
        return tuple(self._half(output.tile, term) for term in output.terms)

    def _half(self, tile: int, term: WeightedTerm) -> HalfSum:
        key: Any = self.spec.tile.key
        plain = term.weights is None or self.spec.operands[term.weights].dtype in FLOATS
        if term.round_to is not None or not plain:
            raise Unswappable
        found = self._product([key[1][t] for t in (tile, term.factor) if t is not None])
        if found.pairs is None or self.program.steps[found.pairs].dtype not in FLOATS:
            raise Unswappable
        dtypes = {self.program.steps[n].dtype for n in (found.pairs, *found.columns, *found.rows)}
        if term.weights is not None:
            dtypes.add(self.spec.operands[term.weights].dtype)
        if len(dtypes) > 1:
            raise Unswappable
        sign = swap_sign(self.program.steps, found.pairs, self._place)
        return HalfSum(found.pairs, found.columns, found.rows, term.weights, sign)

    def _sides(self) -> list[frozenset[str]]:
        """Return for each step of the tile the sides that it depends on."""
        sides: list[frozenset[str]] = []
        for step in self.route.steps:
            own = frozenset({ROW, COLUMN} if step.kind in ("delta", "diagonal") else ())
            if step.kind == "value":
                own = frozenset(self._axes(step.data)) & {ROW, COLUMN}
            if step.kind == "index":
                own = frozenset([ROW if step.data else COLUMN])
            sides.append(own.union(*(sides[a] for a in step.args)))
        return sides

    def _axes(self, number: int) -> tuple[str, ...]:
        return self.spec.operands[self.spec.tile.reads[number]].axes

    def _place(self, number: int) -> tuple[str | None, Any]:
        """Return the side of a value, and a name that it has on both sides.

        Raises:
            Unswappable: it is stored for every pair.
        """
        operand = self.spec.tile.reads[number]
        side = [a for a in (ROW, COLUMN) if a in self._axes(number)]
        if len(side) > 1 or self.spec.features(operand):
            raise Unswappable
        cls, read = self.route.inputs[operand]
        return (side[0] if side else None), (cls, tuple("point" if a in side else a for a in read))

    def _split(self, n: int) -> _Factored:
        """Return a step of the tile as a product."""
        if n not in self.known:
            self.known[n] = self._factored(n)
        return self.known[n]

    def _factored(self, n: int) -> _Factored:
        step = self.program.steps[n]
        if step.dtype not in FLOATS:
            return _Factored(n)
        if len(self.sides[n]) == 1:
            return _Factored(None, (n,)) if COLUMN in self.sides[n] else _Factored(None, (), (n,))
        if step.kind != "apply" or step.data[0] not in (CONTRACT, MAP):
            return _Factored(n)
        if step.data[0] == CONTRACT:
            return self._product(step.args)
        k = self._linear(step.data[1][0], step.args)
        if k is None or not (inner := self._split(step.args[k])).columns + inner.rows:
            return _Factored(n)
        one = ("const", np.ones((), step.dtype)[()], (), step.dtype)
        args = [*step.args]
        args[k] = self.program.add(*one) if inner.pairs is None else inner.pairs
        pairs = self.program.add(*step._replace(args=tuple(args)))
        return inner._replace(pairs=pairs)

    def _product(self, factors: Sequence[int]) -> _Factored:
        splits = [self._split(n) for n in factors]
        pairs = [s.pairs for s in splits if s.pairs is not None]
        if len(pairs) > 1:
            dtype = self.program.steps[factors[0]].dtype
            pairs = [self.program.add("apply", (CONTRACT, None), tuple(pairs), dtype)]
        columns = tuple(n for s in splits for n in s.columns)
        rows = tuple(n for s in splits for n in s.rows)
        return _Factored(pairs[0] if pairs else None, columns, rows)

    def _linear(self, name: str, args: tuple[int, ...]) -> int | None:
        """Return the argument that an operation is linear in, if it vanishes with its value."""
        if name in ("neg", "div", "copy"):
            return 0
        if name != "select_n" or len(args) != 3:
            return None
        steps = [self.program.steps[a] for a in args]
        zeros = [k for k in (1, 2) if steps[k].kind == "const" and not np.any(steps[k].data)]
        return 3 - zeros[0] if len(zeros) == 1 else None
