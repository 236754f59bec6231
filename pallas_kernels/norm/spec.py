"""Specs of a matmul whose loop over k computes further sums (may import the ground layer).

    result = finish( Σ_k left·γ·W,  Σ_k side,  Σ_k c·W )      left, side: terms of x[m, k]

With `left` = x and `side` = x² the matmul is a norm and the linear layer after it. The row scale
leaves the contraction, so x is read once: `Σ_k (x·r·γ)·W = r·Σ_k x·(γ·W)` (Graef et al. 2024,
"FlashNorm"; the moments monoid). With `left` = dy the matmul is the gradient towards x.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from symjax_rewrite import jax_internals
from symjax_rewrite.errors import UsageError
from symjax_rewrite.pallas_kernels.backend import bytes_of

Array = Any
HALF = ("bfloat16", "float16")


@dataclass(frozen=True, slots=True)
class RowProgram:
    """An elementwise function, compared and hashed by its key."""

    fun: Callable[..., Any] = field(compare=False)
    key: Hashable


class RowSums(NamedTuple):
    """The arguments of `finish`; everything broadcasts to [m, n].

    products: `Σ_k left·γ·W` for each weight, [m, n]. sides: [m, 1]. columns: for each entry of
    `column_sums` the sum for each weight, [1, n]. centre: the mean of x over k, [m, 1]; 0 if the
    spec is not centred. rows [m, 1], ends [1, n], fulls [m, n]: further operands.
    """

    products: tuple[Array, ...]
    sides: tuple[Array, ...]
    columns: tuple[tuple[Array, ...], ...]
    centre: Array
    rows: tuple[Array, ...]
    ends: tuple[Array, ...]
    fulls: tuple[Array, ...]


@dataclass(frozen=True, slots=True)
class NormSpec:
    """A matmul with sums; operands in the order pairs, columns, weights, rows, ends, fulls.

    Args:
        rows: m. width: k. outputs: n.
        pairs: dtypes of the operands [m, k]; the first is x.
        columns: dtypes of the operands [k].
        weights: dtypes of the operands [k, n].
        row_vectors: dtypes of the operands [m].
        ends: dtypes of the operands [n].
        fulls: dtypes of the operands [m, n].
        left: `(pairs, columns, centre) -> (left, sides)`, in f32 (f64 for f64 operands).
        finish: `(RowSums) -> result`.
        dtype: of the result.
        centred: True if the mean of x is computed before the loop.
        gain: number of the column γ that scales the weights' rows; None for no scale.
        column_sums: columns c for which `Σ_k c·W` is computed; None stands for `Σ_k γ·W`.
        precision: of the products, as in `jax.lax.dot`.
        pairs_swapped: True if the pairs are stored [k, m].
        weights_swapped: True if the weights are stored [n, k].

    Raises:
        UsageError: the parts are inconsistent.
    """

    rows: int
    width: int
    outputs: int
    pairs: tuple[str, ...]
    weights: tuple[str, ...]
    left: RowProgram
    finish: RowProgram
    dtype: str
    columns: tuple[str, ...] = ()
    row_vectors: tuple[str, ...] = ()
    ends: tuple[str, ...] = ()
    fulls: tuple[str, ...] = ()
    centred: bool = False
    gain: int | None = None
    column_sums: tuple[int | None, ...] = ()
    precision: str | None = None
    pairs_swapped: bool = False
    weights_swapped: bool = False

    def __post_init__(self) -> None:
        wanted = [c for c in (*self.column_sums, self.gain) if c is not None]
        if not self.pairs or not self.weights or any(c >= len(self.columns) for c in wanted):
            raise UsageError(
                "not a matmul with sums", expected="x, a weight, and the columns named", got=self
            )

    @property
    def groups(self) -> tuple[tuple[str, ...], ...]:
        """Return the dtypes of the operands by group, in order."""
        return self.pairs, self.columns, self.weights, self.row_vectors, self.ends, self.fulls

    @property
    def avals(self) -> list[jax.ShapeDtypeStruct]:
        """Return shape and dtype of every operand, in order."""
        m, k, n = self.rows, self.width, self.outputs
        pair = (k, m) if self.pairs_swapped else (m, k)
        weight = (n, k) if self.weights_swapped else (k, n)
        shapes = (pair, (k,), weight, (m,), (n,), (m, n))
        return [
            jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))
            for shape, dtypes in zip(shapes, self.groups, strict=True)
            for dtype in dtypes
        ]

    def split(self, operands: Any) -> tuple[tuple[Any, ...], ...]:
        """Return the operands by group: pairs, columns, weights, rows, ends, fulls."""
        rest = iter(operands)
        return tuple(tuple(itertools.islice(rest, len(dtypes))) for dtypes in self.groups)

    @property
    def accumulator(self) -> Any:
        """Return the dtype of every sum."""
        return jax_internals.joint_dtype(jnp.float32, *self.pairs, *self.weights)

    @property
    def factor(self) -> Any:
        """Return the dtype of the factors of the product; f16 overflows after a γ or a mean."""
        dtype = jnp.dtype(self.weights[0])
        moved = self.centred or self.gain is not None or jnp.dtype(self.pairs[0]) != dtype
        return self.accumulator if dtype == jnp.float16 and moved else dtype

    @property
    def in_parts(self) -> bool:
        """Return True if `left` is split into two bf16 parts; x fits in one, x - mean does not."""
        exact = self.pairs[0] == "bfloat16" and not self.centred
        return self.factor == jnp.bfloat16 and not exact

    @property
    def flops(self) -> int:
        """Return the FLOPs of the products, 2mnk each, doubled if x is multiplied in two parts."""
        products = len(self.weights) * (2 if self.in_parts else 1)
        return 2 * self.rows * self.width * self.outputs * products

    @property
    def result(self) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((self.rows, self.outputs), jnp.dtype(self.dtype))

    @property
    def bytes_moved(self) -> int:
        """Return the bytes of every operand and the result, each once."""
        return NormGroup((self,)).bytes_moved

    @property
    def scaled_before(self) -> NormSpec:
        """Return the spec that reads γ·W in place of W."""
        return replace(self, gain=None)

    @property
    def scales_before(self) -> bool:
        """Return True if an earlier kernel may multiply the weights by γ, with the same rounding.

        Sums of a column and W need the weights as they are; γ·W in f16 might overflow.
        """
        as_they_are = any(c is not None for c in self.column_sums)
        same = all(jnp.dtype(w) == self.factor for w in self.weights)
        return self.gain is not None and same and not as_they_are

    @property
    def of_x(self) -> tuple:
        """Return a key that is equal for matmuls that can read one x."""
        return self.rows, self.width, self.pairs, self.pairs_swapped


@dataclass(frozen=True, slots=True)
class NormGroup:
    """Matmuls with sums of one x as one kernel, each with its own weights, sums and result.

    Operands: the shared pairs; then for each member its other operands.

    Raises:
        UsageError: the members have different x.
    """

    members: tuple[NormSpec, ...]

    def __post_init__(self) -> None:
        if not self.members or len({s.of_x for s in self.members}) > 1:
            raise UsageError("not matmuls of one operand", expected="one x", got=self.members)

    @property
    def first(self) -> NormSpec:
        """Return the first member, which holds the fields that all members share."""
        return self.members[0]

    @property
    def avals(self) -> list[jax.ShapeDtypeStruct]:
        shared = len(self.first.pairs)
        return self.first.avals[:shared] + [a for s in self.members for a in s.avals[shared:]]

    def given(self, operands: Any) -> list[tuple[Any, ...]]:
        """Return the operands of each member, including the shared operands."""
        rest = iter(operands)
        shared = tuple(itertools.islice(rest, len(self.first.pairs)))
        counts = (len(s.avals) - len(shared) for s in self.members)
        return [(*shared, *itertools.islice(rest, count)) for count in counts]

    @property
    def scaled_before(self) -> NormGroup:
        """Return the group that reads γ·W in place of W."""
        return NormGroup(tuple(s.scaled_before for s in self.members))

    @property
    def bytes_moved(self) -> int:
        return bytes_of([*self.avals, *(s.result for s in self.members)])
