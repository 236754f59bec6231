"""Places of extrema and sorted arrays: equations `argmax`, `argmin`, `sort` and `top_k`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from symjax_rewrite.ir.sizes import from_jax
from symjax_rewrite.proofs import orders, reductions
from symjax_rewrite.proofs.forms import Index, Poly, plain

if TYPE_CHECKING:
    from symjax_rewrite.proofs.lifting import Lifting

SORTS = frozenset("argmax argmin sort top_k".split())


def ordered(lifting: Lifting, number: int, output: int, here: list[Index]) -> Poly | None:
    """Return an output of an equation that orders numbers along an axis; None without laws."""
    a, program = lifting.a, lifting.t.program
    e = program.equations[number]
    keys, params, made = e.invals[0], e.eqn.params, e.outvals[output]
    if not isinstance(keys, int) or params.get("num_keys", 1) != 1:
        return None
    shape = program.avals[keys].shape
    axis = params.get("dimension", params.get("axes", (params.get("axis", -1),))[0]) % len(shape)
    k = a.table.fresh(from_jax(shape[axis]))
    if e.name.startswith("arg"):
        read = lifting.entry(made, keys, here, {axis: plain(k)}, removed=axis)
        if read is None or not a.is_real(read):
            return None
        return orders.place(a, "argmax", k, a.scale(1 if e.name == "argmax" else -1, read))
    at = lifting.place(made, axis, here)
    read = lifting.entry(made, keys, here, {axis: plain(k)})
    if at is None or read is None or not a.is_real(read):
        return None
    sign = -1 if e.name == "top_k" else 1
    read, j = a.scale(sign, read), a.index(at)
    if output == 0:
        return a.scale(sign, orders.sorted_value(a, k, read, j))
    if not params.get("is_stable", True):
        return None
    place = orders.place(a, "order", k, read, [((), j)])
    if e.name == "top_k":
        return place
    other = e.invals[output]
    if not isinstance(other, int):
        return None
    carried = lifting.entry(made, other, here, {axis: plain(k)})
    return None if carried is None else reductions.taken(a, carried, [k], [place])
