"""The cost of one equation as written, before terms are built.

Loops are priced equation by equation: their gain follows from trip counts and the rows of products.
"""

from __future__ import annotations

import functools
import math
from typing import Any

from symjax_rewrite import jax_internals
from symjax_rewrite.cost.device_profiles import Device
from symjax_rewrite.cost.term_cost import Cost, itemsize, shape_of
from symjax_rewrite.ir.primitives import ELEMENTWISE, VIEWS, dtype_name
from symjax_rewrite.jax_internals import ClosedJaxpr, JaxprEqn

SYMBOLIC = 64  # value of a symbolic size
JOINED_SUM = 2048  # elements, at most, that XLA's code of a loop sums without the library
APART = ("sort", "top_k", "approx_top_k", "fft", "pallas_call")
PLAIN = ELEMENTWISE | VIEWS | {"slice", "concatenate"}  # a step for each element of the result


def aval_size(aval: Any) -> float:
    """Return the number of elements of a value; symbolic sizes count as `SYMBOLIC`."""
    return elements(getattr(aval, "shape", ()))


@functools.lru_cache(1 << 12)
def elements(shape: tuple[Any, ...]) -> float:
    """Return the number of elements of a shape; symbolic sizes count as `SYMBOLIC`."""
    return float(math.prod(map(_number, shape)))


def _number(size: Any) -> int:
    return size if isinstance(size, int) else SYMBOLIC


def aval_bytes(aval: Any) -> float:
    """Return the bytes of a value."""
    return _bytes(getattr(aval, "shape", ()), getattr(aval, "dtype", "float32"))


@functools.lru_cache(1 << 12)
def _bytes(shape: tuple[Any, ...], dtype: Any) -> float:
    return elements(shape) * itemsize(dtype_name(dtype))


def equation_seconds(
    eqn: JaxprEqn,
    device: Device,
    times: int = 1,
    moving: tuple[int, ...] = (),
    summed: bool = False,
    in_step: bool = False,
) -> float:
    """Return the seconds of one equation, by the roofline.

    times: number of repetitions, in one kernel. moving: numbers of the operands that differ in each
    repetition; others are read once. summed: True if only the sum of all its results is written.
    in_step: True for an equation of a loop's body.
    """
    name = eqn.primitive.name
    if jax_internals.is_replacement(eqn) and (cost := replacement_cost(eqn, device)) is not None:
        return cost.seconds * times
    made = sum([aval_size(v.aval) for v in eqn.outvars]) * times
    if name in PLAIN:
        return made / device.elementwise_per_s
    if name in ("dot_general", "conv_general_dilated"):
        dtype = str(getattr(eqn.outvars[0].aval, "dtype", "float32"))
        moved = made * itemsize(dtype) / (times if summed else 1)
        for k, v in enumerate(eqn.invars):
            moved += aval_bytes(v.aval) * (times if k in moving else 1)
        cached = times == 1 and moved <= device.memory.step_cache_bytes
        rate = device.bytes_per_s * (device.memory.cached_step if cached else 1)
        fixed = _step_launch(eqn, device) if in_step else device.launch_s
        busy = _flops(eqn) * times / device.peak(dtype)
        busy += _copied_seconds(eqn, times, moving, summed, device)
        return max(busy, moved / rate) + fixed
    inside = in_step or name != "cond"
    inner = [closed_seconds(b, device, inside) for b in jax_internals.bodies(eqn)]
    if inner:
        steps = _number(eqn.params.get("length", 1))
        return times * (max(inner) if name == "cond" else steps * sum(inner))
    if name in ("sort", "top_k"):
        return sorting_seconds(eqn, device) * times
    return made / device.elementwise_per_s


def replacement_cost(eqn: JaxprEqn, device: Device) -> Cost | None:
    """Return the cost stated by the part behind a replacement equation; None if it states none."""
    cost = getattr(eqn.params["part"], "cost", None)
    return None if cost is None else cost(device)


def sorting_seconds(eqn: JaxprEqn, device: Device) -> float:
    """Return the seconds of XLA's own `sort` or `top_k`."""
    shape = shape_of(eqn.invars[0])
    if eqn.primitive.name == "sort":
        return selection_seconds(shape, eqn.params["dimension"], None, device)
    return selection_seconds(shape, -1, eqn.params["k"], device)


def selection_seconds(
    shape: tuple[Any, ...], axis: int, places: int | None, device: Device
) -> float:
    """Return the seconds of XLA's own top-k of rows, or of a sort if `places` is None."""
    length = _number(shape[axis])
    rows = math.prod(map(_number, shape)) / max(length, 1)
    kind = "sorted" if places is None else "top_k"
    steps = device.folds.plain_steps(kind, rows, length, places or 0)
    return steps / device.folds.fused_steps_per_s


def work_seconds(eqn: JaxprEqn, device: Device) -> float:
    """Return the seconds of a product or sum by its flops, bytes and operands, without a launch."""
    read = max((aval_size(v.aval) for v in eqn.invars), default=0.0) / device.elementwise_per_s
    return max(equation_seconds(eqn, device) - device.launch_s, read)


def _step_launch(eqn: JaxprEqn, device: Device) -> float:
    """Return the fixed cost of a product in a step.

    A CPU inlines a product with a vector, and computes an outer product with the operations that
    read it: adding one of 3 by 3 to a carry takes 0.02 µs a step, one of 16 by 16 0.15 µs (a core).
    """
    if device.loops.steps_are_launches or eqn.primitive.name != "dot_general":
        return device.loops.product_s
    return 0.0 if _has_vector(eqn) or _is_outer(eqn) else device.loops.product_s


def _is_outer(eqn: JaxprEqn) -> bool:
    """Return True if a product sums over no axis longer than one."""
    (summed, _), _ = eqn.params["dimension_numbers"]
    shape = shape_of(eqn.invars[0])
    return all(shape[k] == 1 for k in summed)


def _has_vector(eqn: JaxprEqn) -> bool:
    """Return True if an operand of a product has no axis of its own longer than one."""
    summed, batch = eqn.params["dimension_numbers"]
    sides = zip(eqn.invars, summed, batch, strict=True)
    return any(
        all(n == 1 for k, n in enumerate(shape_of(v)) if k not in ours and k not in many)
        for v, ours, many in sides
    )


def runs_apart(eqn: JaxprEqn) -> bool:
    """Return True if an equation, or one inside it, is a call that no loop is compiled with.

    On CPUs these are products of matrices, sums of many elements, and sorts (`inlined_seconds`).
    """
    if bodies := jax_internals.bodies(eqn):
        return any(runs_apart(e) for body in bodies for e in body.eqns)
    name = eqn.primitive.name
    if name == "dot_general":
        return not (_has_vector(eqn) or _is_outer(eqn))
    if name.startswith("scatter"):
        return aval_size(eqn.invars[1].aval) > len(shape_of(eqn.invars[0]))  # of one place, a write
    if name.startswith("reduce_"):
        return aval_size(eqn.invars[0].aval) > JOINED_SUM
    return name.startswith(APART)


def _copied_seconds(
    eqn: JaxprEqn, times: int, moving: tuple[int, ...], summed: bool, device: Device
) -> float:
    """Return the seconds in which a product copies operands that it reads across their rows.

    The sum goes along the rows of the left operand, and across those of the right one. Each row of
    the longest axis takes some time. The other arguments are those of `equation_seconds`.
    """
    if eqn.primitive.name != "dot_general" or _has_vector(eqn):
        return 0.0
    if times == 1 and _is_outer(eqn):
        return 0.0
    (left, right), (_, batch) = eqn.params["dimension_numbers"]
    contracted = math.prod(map(_number, summed_sizes(eqn)))
    many = math.prod(_number(shape_of(eqn.invars[1])[k]) for k in batch)
    axes = [aval_size(v.aval) / max(contracted * many, 1) for v in eqn.invars] + [contracted]
    if len(moving) == 1:  # the steps are further rows of one operand
        axes[moving[0]] *= times
    elif summed:
        axes[2] *= times
    else:
        many *= times
    rows = many * max(axes) if min(axes) else 0.0
    ends = [k + len(shape_of(eqn.invars[0])) - len(left) for k in range(len(left))]
    starts = [k + len(batch) for k in range(len(right))]
    total = 0.0
    for side, (ours, usual) in enumerate(((left, ends), (right, starts))):
        if sorted(ours) != usual:
            total += aval_bytes(eqn.invars[side].aval) * (times if side in moving else 1)
    return device.packing_seconds(total, rows)


def closed_seconds(closed: ClosedJaxpr, device: Device, in_step: bool = False) -> float:
    """Return the seconds of a jaxpr: the sum over equations, times the trip counts of loops."""
    return sum(equation_seconds(e, device, in_step=in_step) for e in closed.jaxpr.eqns)


def _flops(eqn: JaxprEqn) -> float:
    return 2 * aval_size(eqn.outvars[0].aval) * math.prod(map(_number, summed_sizes(eqn)))


def summed_sizes(eqn: JaxprEqn) -> list[Any]:
    """Return the sizes over which a contraction or convolution sums, as JAX has them."""
    if eqn.primitive.name == "dot_general":
        (contracted, _), _ = eqn.params["dimension_numbers"]
        return [shape_of(eqn.invars[0])[i] for i in contracted]
    features = eqn.params["dimension_numbers"].rhs_spec[0]
    return [d for k, d in enumerate(shape_of(eqn.invars[1])) if k != features]
