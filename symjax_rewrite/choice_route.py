"""One column of a pairwise term for each row, computed from that row and column alone (a face).

The label's logit in a cross-entropy, `(h @ W)[m, label[m]]`, needs one product per row. The term
is evaluated by the same tile program as in a fold, with the column operands gathered first.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from symjax_rewrite.fold_route import read_operand, read_over
from symjax_rewrite.gathers import Choice
from symjax_rewrite.ir import Ref
from symjax_rewrite.tile_program import COLUMN, ROW, TileBuilder, run_steps

Named = tuple[Any, tuple[str, ...]]


@dataclass(slots=True)
class ChoiceRoute:
    """A class that chooses one column of a pairwise term for each of its indices.

    builder: the tile program. root: its step. names: axis name of each index of the class.
    """

    cls: int
    choice: Choice
    builder: TileBuilder
    root: int
    names: tuple[str, ...]
    backend: str = "gathered"

    def classes(self) -> set[int]:
        """The class this route computes."""
        return {self.cls}

    def gives(self) -> set[int]:
        """What others may read."""
        return {self.cls}

    def needs(self, cls: int) -> list[int]:
        """Classes that must be there before."""
        del cls
        return [c for c, _ in self.builder.inputs] + [self.choice.place.cls]

    def array(self, emitter: Any, cls: int) -> tuple[Any, tuple[int, ...]]:
        """The value over the class's indices, and its slots."""
        info = emitter.t.graph.classes[cls]
        sizes = tuple(int(s) for s in info.sizes)
        limit = int(self.choice.size)  # pyright: ignore[reportArgumentType]
        place = Ref(self.choice.place.cls, tuple(self.names[i] for i in self.choice.place.axes))  # pyright: ignore[reportArgumentType]
        over = tuple(n for n in self.names if n in place.axes)
        shape = tuple(sizes[self.names.index(n)] for n in over)
        chosen = read_over(emitter, place, over, shape)
        inside = (chosen >= 0) & (chosen < limit)
        safe = jnp.clip(chosen, 0, limit - 1)
        blocks = [self._gathered(emitter, k, safe, over) for k in range(len(self.builder.inputs))]
        values = tuple(self._over_lead(*blocks[k]) for k in self.builder.reads)
        dots = tuple(self._dot(c, blocks) for c in self.builder.contractions)
        rank = len(self.names)
        row = jnp.arange(sizes[self.names.index(ROW)], dtype=jnp.int32)
        i = self._over_lead(row, (ROW,))
        j = self._over_lead(safe.astype(jnp.int32), over)
        made = run_steps(self.builder.steps, dots, values, i, j, emitter.t.primitives)
        data = jnp.broadcast_to(made[self.root], sizes).astype(np.dtype(info.dtype))
        if self.choice.mode == "fill":
            fill = jnp.asarray(_fill(self.choice.fill, data.dtype), data.dtype)
            data = jnp.where(self._over_lead(inside, over), data, fill)
        return data, tuple(range(rank))

    def _gathered(self, emitter: Any, k: int, place: Any, over: tuple[str, ...]) -> Named:
        cls, entry = self.builder.inputs[k]
        data = read_operand(emitter, cls, entry)
        axes = self.builder.operands[k].axes
        return take(data, axes, place, over) if COLUMN in axes else (data, axes)

    def _over_lead(self, data: Any, axes: tuple[str, ...]) -> Any:
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
        return self._over_lead(dot, tuple(lead))


def take(data: Any, axes: tuple[str, ...], place: Any, over: tuple[str, ...]) -> Named:
    """`data[.., place, ..]` along the column axis, other axes of both in step where shared."""
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
    """What a gather gives out of range (`lax.GatherScatterMode.FILL_OR_DROP`)."""
    if fill is not None:
        return fill
    if dtype == jnp.bool_:
        return True
    if jnp.issubdtype(dtype, jnp.inexact):
        return float("nan")
    info = jnp.iinfo(dtype)
    return info.min if jnp.issubdtype(dtype, jnp.signedinteger) else info.max
