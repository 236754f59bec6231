"""Batched products with a repeated operand: the copies are not made.

In Σ_d q[b,(h,g),t,d]·k[b,h,s,d], as of grouped-query heads, a program repeats k along g and
multiplies batch by batch. The group g is a free axis of q: one product for every (b, h), with the
rows (g, t).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jax import lax

from symjax_rewrite.candidates import Replacement
from symjax_rewrite.cost.device_profiles import Device
from symjax_rewrite.cost.equation_cost import aval_bytes, equation_seconds, shape_of
from symjax_rewrite.cost.product_layouts import copy_seconds
from symjax_rewrite.ir.flat_program import Equation, Program


@dataclass(frozen=True, slots=True)
class Repeated:
    """A value whose axis `axis` repeats every entry of another value `count` times."""

    value: int
    axis: int
    count: int


def repeated(program: Program, v: object, makers: Mapping[int, Equation]) -> Repeated | None:
    """Return the value that `jnp.repeat` repeats to make v, or None."""
    merged = makers.get(v) if isinstance(v, int) else None
    if merged is None or merged.name != "reshape" or merged.eqn.params["dimensions"] is not None:
        return None
    source = merged.invals[0]
    spread = makers.get(source) if isinstance(source, int) else None
    if spread is None or spread.name != "broadcast_in_dim" or len(spread.invals) != 1:
        return None
    x, kept = spread.invals[0], spread.eqn.params["broadcast_dimensions"]
    shape = spread.eqn.params["shape"]
    new = [k for k in range(len(shape)) if k not in kept]
    if not isinstance(x, int) or len(new) != 1 or new[0] == 0:
        return None
    j = new[0]
    same = program.avals[x].shape == (*shape[:j], *shape[j + 1 :]) and list(kept) == sorted(kept)
    whole = (*shape[: j - 1], shape[j - 1] * shape[j], *shape[j + 1 :])
    if not same or shape_of(merged.eqn.outvars[0]) != whole:
        return None
    return Repeated(x, j - 1, shape[j])


def ungrouped(
    program: Program, e: Equation, makers: Mapping[int, Equation], device: Device
) -> tuple[Replacement, float, float] | None:
    """Return a batched product without the copies of its right operand, or None.

    Returns:
        The replacement, and the predicted seconds as written and without the copies.
    """
    params = e.eqn.params
    (summed, right_summed), (batch, right_batch) = params["dimension_numbers"]
    found, left = repeated(program, e.invals[1], makers), e.invals[0]
    if found is None or not isinstance(left, int) or right_batch[-1] != found.axis:
        return None
    aval: Any = program.avals[left]
    free = [k for k in range(len(aval.shape)) if k not in batch and k not in summed]
    order = [*batch, *free, *summed]  # batch axes, the rows of a group, summed axes
    sizes = [aval.shape[k] for k in order]
    heads = len(batch) - 1
    split = (*sizes[:heads], sizes[heads] // found.count, found.count, *sizes[heads + 1 :])
    shape = program.avals[e.outvals[0]].shape
    ends = tuple(range(len(split) - len(summed), len(split))), right_summed
    dims = (ends, (tuple(range(len(batch))), right_batch))

    def run(q: Any, k: Any) -> Any:
        q = lax.reshape(lax.transpose(q, order), split)
        kind = params["preferred_element_type"]
        made = lax.dot_general(q, k, dims, params["precision"], preferred_element_type=kind)
        return lax.reshape(made, shape)

    part = Replacement(e.outvals, (left, found.value), run, source=e.eqn)
    base = equation_seconds(e.eqn, device)
    copy = copy_seconds(aval_bytes(e.eqn.invars[1].aval), device)
    return part, base + copy, base
