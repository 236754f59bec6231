"""The cost of one equation as written, before terms are built.

Loops are priced equation by equation: their gain follows from trip counts and the rows of products.
"""

from __future__ import annotations

import functools
import math
from typing import Any

from symjax_rewrite import jax_internals
from symjax_rewrite.cost.device_profiles import Device
from symjax_rewrite.cost.term_cost import itemsize
from symjax_rewrite.jax_internals import ClosedJaxpr, JaxprEqn

SYMBOLIC = 64  # value of a symbolic size


def aval_size(aval: Any) -> float:
    """Return the number of elements of a value; symbolic sizes count as `SYMBOLIC`."""
    return float(math.prod(map(_number, getattr(aval, "shape", ()))))


def _number(size: Any) -> int:
    return size if isinstance(size, int) else SYMBOLIC


def aval_bytes(aval: Any) -> float:
    """Return the bytes of a value."""
    return aval_size(aval) * itemsize(_dtype_name(getattr(aval, "dtype", "float32")))


_dtype_name = functools.cache(str)


def shape_of(atom: Any) -> tuple[Any, ...]:
    """Return the shape of a variable or literal of a jaxpr."""
    return atom.aval.shape


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
    made = sum(aval_size(v.aval) for v in eqn.outvars) * times
    if name in ("dot_general", "conv_general_dilated"):
        dtype = str(getattr(eqn.outvars[0].aval, "dtype", "float32"))
        moved = made * itemsize(dtype) / (times if summed else 1)
        for k, v in enumerate(eqn.invars):
            moved += aval_bytes(v.aval) * (times if k in moving else 1)
        cached = times == 1 and moved <= device.memory.step_cache_bytes
        rate = device.bytes_per_s * (device.memory.cached_step if cached else 1)
        fixed = _step_launch(eqn, device) if in_step else device.launch_s
        return max(_flops(eqn) * times / device.peak(dtype), moved / rate) + fixed
    inside = in_step or name != "cond"
    inner = [closed_seconds(b, device, inside) for b in jax_internals.bodies(eqn)]
    if inner:
        steps = _number(eqn.params.get("length", 1))
        return times * (max(inner) if name == "cond" else steps * sum(inner))
    return made / device.elementwise_per_s


def _step_launch(eqn: JaxprEqn, device: Device) -> float:
    """Return the fixed cost of a product in a step; a CPU inlines a product with a vector."""
    if device.loops.steps_are_launches or eqn.primitive.name != "dot_general":
        return device.loops.product_s
    summed, batch = eqn.params["dimension_numbers"]
    sides = zip(eqn.invars, summed, batch, strict=True)
    free = [
        math.prod(_number(n) for k, n in enumerate(shape_of(v)) if k not in ours and k not in many)
        for v, ours, many in sides
    ]
    return device.loops.product_s if min(free) > 1 else 0.0


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
