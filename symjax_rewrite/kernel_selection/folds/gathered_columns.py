"""One column of a pairwise term for each row, computed from that row and column alone.

The label's logit in a cross-entropy, `(h @ W)[m, label[m]]`, needs one product per row. The tile
program of a fold evaluates the term, after the column operands are gathered.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from symjax_rewrite.ir.step_program import run
from symjax_rewrite.ir.term import Ref
from symjax_rewrite.kernel_selection.folds.builder import read_operands
from symjax_rewrite.kernel_selection.folds.tile_program import (
    COLUMN,
    ROW,
    TileBuilder,
    tile_handlers,
)
from symjax_rewrite.kernel_selection.kernel_candidate import ClassRoute, read_over

Named = tuple[Any, tuple[str, ...]]


@dataclass(slots=True)
class Columns:
    """Tile program at selected columns.

    names: the axes of its values: rows, the axes that rows and columns share, and the axes that
    number the columns of one row. place: the columns, integers over some of these axes.
    """

    builder: TileBuilder
    names: tuple[str, ...]
    place: Ref

    def needs(self) -> list[int]:
        """Return the classes that the tile program and the selection read."""
        return [*(c for c, _ in self.builder.inputs), self.place.cls]

    def steps(self, emitter: Any) -> tuple[list[Any], Any]:
        """Return the value of every step and the columns, over the names or broadcastable.

        Columns out of range are clipped in the steps.
        """
        b, over = self.builder, tuple(n for n in self.names if n in self.place.axes)
        place = read_over(emitter, self.place, over, b.sizes)
        near = jnp.clip(place, 0, b.sizes[COLUMN] - 1)
        blocks = [self._gathered(emitter, k, near, over) for k in range(len(b.inputs))]
        values = tuple(self._spread(*blocks[k]) for k in b.reads)
        dots = tuple(self._dot(c, blocks) for c in b.contractions)
        i = self._spread(jnp.arange(b.sizes[ROW], dtype=jnp.int32), (ROW,))
        j = self._spread(near.astype(jnp.int32), over)
        made = run(b.steps, tile_handlers(dots, values, i, j, emitter.t.primitives))
        return made, self._spread(place, over)

    def inside(self, place: Any) -> Any:
        """Return True where columns are in range."""
        return (place >= 0) & (place < self.builder.sizes[COLUMN])

    def _gathered(self, emitter: Any, k: int, place: Any, over: tuple[str, ...]) -> Named:
        cls, entry = self.builder.inputs[k]
        data = read_operands(emitter, [(cls, entry)], [self.builder.operands[k].dtype])[0]
        axes = self.builder.operands[k].axes
        return _take(data, axes, place, over) if COLUMN in axes else (data, axes)

    def _spread(self, data: Any, axes: tuple[str, ...]) -> Any:
        """Return an array with its axes in the order of the names; missing axes have size 1."""
        order = sorted(range(len(axes)), key=lambda k: self.names.index(axes[k]))
        data = jax.lax.transpose(data, order)
        return jax.lax.expand_dims(data, [k for k, n in enumerate(self.names) if n not in axes])

    def _dot(self, c: Any, blocks: list[Named]) -> Any:
        (a, left), (b, right) = blocks[c.row], blocks[c.col]
        lead = [n for n in self.names if n in left or n in right]
        letters = {n: chr(ord("a") + k) for k, n in enumerate((*lead, *c.over))}
        text = ["".join(letters[n] for n in names) for names in (left, right, lead)]
        dot = jnp.einsum(
            f"{text[0]},{text[1]}->{text[2]}",
            a,
            b,
            precision=c.precision,
            preferred_element_type=jnp.dtype(c.dtype),
        )
        return self._spread(dot, tuple(lead))

    def chosen(self, cls: int, root: int, fill: Any) -> ClassRoute:
        """Return a class over the names whose values are those of a step.

        fill: value out of range; with None the nearest column is read.
        """

        def make(emitter: Any) -> tuple[Any, tuple[int, ...]]:
            info = emitter.t.graph.classes[cls]
            made, place = self.steps(emitter)
            sizes = tuple(map(emitter.t.jax_size, info.sizes))
            data = jnp.broadcast_to(made[root], sizes).astype(np.dtype(info.dtype))
            if fill is not None:
                data = jnp.where(self.inside(place), data, jnp.asarray(fill, data.dtype))
            return data, tuple(range(len(info.sizes)))

        return ClassRoute(cls, self.needs(), make)


def _take(data: Any, axes: tuple[str, ...], place: Any, over: tuple[str, ...]) -> Named:
    """Return `data[.., place, ..]` along the column axis; axes that both share are batched."""
    left, right = list(axes), list(over)
    shared = [a for a in axes if a in over]
    batched = []
    for axis in shared:
        batched.append((left.index(axis), right.index(axis)))
        left.remove(axis)
        right.remove(axis)
    at = left.index(COLUMN)
    take = partial(jnp.take, axis=at, mode="clip")
    for in_axes in reversed(batched):
        take = jax.vmap(take, in_axes=in_axes)
    return take(data, place), (*shared, *left[:at], *right, *left[at + 1 :])
