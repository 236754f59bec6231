"""One column of a pairwise term for each row, computed from that row and column alone.

The label's logit in a cross-entropy, `(h @ W)[m, label[m]]`, needs one product per row. The tile
program of a fold evaluates the term, after the column operands are gathered.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from symjax_rewrite.ir.step_program import run
from symjax_rewrite.ir.term import Ref
from symjax_rewrite.kernel_selection.folds.builder import read_operand, read_over
from symjax_rewrite.kernel_selection.folds.gather_patterns import Choice
from symjax_rewrite.kernel_selection.folds.tile_program import (
    COLUMN,
    ROW,
    TileBuilder,
    tile_handlers,
)
from symjax_rewrite.kernel_selection.kernel_candidate import OneClass

Named = tuple[Any, tuple[str, ...]]


@dataclass(slots=True)
class Columns:
    """Tile program at selected columns.

    names: the axes of its values: rows, the axes that rows and columns share, and the axes that
    number the columns of one row.
    """

    builder: TileBuilder
    names: tuple[str, ...]

    def operands(self) -> list[int]:
        """Return the classes that the tile program reads."""
        return [c for c, _ in self.builder.inputs]

    def steps(self, emitter: Any, place: Any, over: tuple[str, ...]) -> list[Any]:
        """Return the value of every step, over the names or broadcastable.

        Args:
            emitter: of the program.
            place: integers, the columns; all in range.
            over: the names of its axes.
        """
        sizes, b = self.builder.sizes, self.builder
        blocks = [self._gathered(emitter, k, place, over) for k in range(len(b.inputs))]
        values = tuple(self.spread(*blocks[k]) for k in b.reads)
        dots = tuple(self._dot(c, blocks) for c in b.contractions)
        i = self.spread(jnp.arange(sizes[ROW], dtype=jnp.int32), (ROW,))
        j = self.spread(place.astype(jnp.int32), over)
        return run(b.steps, tile_handlers(dots, values, i, j, emitter.t.primitives))

    def _gathered(self, emitter: Any, k: int, place: Any, over: tuple[str, ...]) -> Named:
        cls, entry = self.builder.inputs[k]
        data = read_operand(emitter, cls, entry, self.builder.operands[k].dtype)
        axes = self.builder.operands[k].axes
        return take(data, axes, place, over) if COLUMN in axes else (data, axes)

    def spread(self, data: Any, axes: tuple[str, ...]) -> Any:
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
        return self.spread(dot, tuple(lead))


@dataclass(slots=True)
class ChoiceRoute(OneClass):
    """Class that selects one column of a pairwise term for each of its indices.

    columns: the tile program; its names are the class's indices. root: its step.
    """

    cls: int
    choice: Choice
    columns: Columns
    root: int
    backend: str = "gathered"

    def needs(self, cls: int) -> list[int]:
        """Return the classes that must be computed before this class."""
        del cls
        return [*self.columns.operands(), self.choice.place.cls]

    def array(self, emitter: Any, cls: int) -> tuple[Any, tuple[int, ...]]:
        """Return the value over the class's indices, and its slots."""
        info, names = emitter.t.graph.classes[cls], self.columns.names
        sizes = tuple(int(s) for s in info.sizes)
        limit = int(self.choice.size)  # pyright: ignore[reportArgumentType]
        place = Ref(self.choice.place.cls, tuple(names[i] for i in self.choice.place.axes))  # pyright: ignore[reportArgumentType]
        over = tuple(n for n in names if n in place.axes)
        chosen = read_over(emitter, place, over, tuple(sizes[names.index(n)] for n in over))
        made = self.columns.steps(emitter, jnp.clip(chosen, 0, limit - 1), over)
        data = jnp.broadcast_to(made[self.root], sizes).astype(np.dtype(info.dtype))
        if self.choice.mode == "fill":
            fill = jnp.asarray(_fill(self.choice.fill, data.dtype), data.dtype)
            inside = (chosen >= 0) & (chosen < limit)
            data = jnp.where(self.columns.spread(inside, over), data, fill)
        return data, tuple(range(len(names)))


def take(data: Any, axes: tuple[str, ...], place: Any, over: tuple[str, ...]) -> Named:
    """Return `data[.., place, ..]` along the column axis; axes that both share are batched."""
    shared = [a for a in axes if a in over]
    if not shared:
        at = axes.index(COLUMN)
        return jnp.take(data, place, axis=at, mode="clip"), (*axes[:at], *over, *axes[at + 1 :])
    axis = shared[0]
    inner, inner_over = (tuple(a for a in names if a != axis) for names in (axes, over))
    result: list[tuple[str, ...]] = []

    def one(x: Any, p: Any) -> Any:
        taken, names = take(x, inner, p, inner_over)
        result.append(names)
        return taken

    out = jax.vmap(one, in_axes=(axes.index(axis), over.index(axis)))(data, place)
    return out, (axis, *result[0])


def _fill(fill: Any, dtype: Any) -> Any:
    """Return the value that a gather reads out of range (`lax.GatherScatterMode.FILL_OR_DROP`)."""
    if fill is not None:
        return fill
    if dtype == jnp.bool_:
        return True
    if jnp.issubdtype(dtype, jnp.inexact):
        return float("nan")
    info = jnp.iinfo(dtype)
    return info.min if jnp.issubdtype(dtype, jnp.signedinteger) else info.max
