"""Equations of scalar literals, evaluated where NumPy's result has the bits of XLA's.

JAX writes such equations in derivatives: the exponent of `d/dx x**1.75` is `sub 1.75 1.0`. Excluded
are results and operands that XLA may flush to zero (subnormal numbers) or write with other bits
(NaN), functions that are not rounded correctly, and dtypes whose arithmetic XLA does in another one
(fp8, int4, complex).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from symjax_rewrite.jax_internals import JaxprEqn, Literal, dtype_name

# Primitives that NumPy has, with the same meaning for integers and booleans.
NUMPY: dict[str, Callable[..., Any]] = {
    name: getattr(np, ufunc)
    for name, ufunc in (
        pair.split("=")
        for pair in """add=add add_any=add sub=subtract mul=multiply neg=negative abs=abs
        max=maximum min=minimum eq=equal ne=not_equal lt=less le=less_equal gt=greater
        ge=greater_equal and=bitwise_and or=bitwise_or not=invert""".split()
    )
}

_KINDS = {
    "bool": "b",
    **dict.fromkeys("int8 int16 int32 int64 uint8 uint16 uint32 uint64".split(), "i"),
    **dict.fromkeys("float16 bfloat16 float32 float64".split(), "f"),
}
# By primitive, the kinds of operands: extrema of 0.0 and -0.0 differ in the sign.
_ALLOWED = {
    **dict.fromkeys("add add_any sub mul neg".split(), "if"),
    **dict.fromkeys("eq ne lt le gt ge select_n convert_element_type".split(), "bif"),
    **dict.fromkeys("and or not".split(), "bi"),
    **dict.fromkeys("max min".split(), "i"),
    "div": "f",
}
FOLDABLE = frozenset(_ALLOWED)
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    **NUMPY,
    "div": np.divide,
    "select_n": lambda which, *cases: cases[int(which)],
    "convert_element_type": lambda x: x,
}


def folded(eqn: JaxprEqn, operands: Sequence[Literal]) -> Literal | None:
    """Return the result of an equation of literals; None if XLA's may have other bits."""
    name, aval = eqn.primitive.name, _aval(eqn.outvars[0])
    if name not in FOLDABLE or aval.shape or dtype_name(aval.dtype) not in _KINDS:
        return None
    given = [(np.asarray(a.val), _aval(a).dtype) for a in operands]
    if any(x.ndim or _KINDS.get(dtype_name(d), "?") not in _ALLOWED[name] for x, d in given):
        return None
    made = _number(name, aval.dtype, *[(x.tobytes(), x.dtype, d) for x, d in given])
    return None if made is None else Literal(made, aval)


@functools.lru_cache(maxsize=4096)
def _number(name: str, dtype: np.dtype, *given: tuple[bytes, np.dtype, np.dtype]) -> Any:
    """Return the result of a primitive at numbers, or None if XLA's may have other bits.

    Programs have few different ones: the same indices are normalised wherever an array is read.

    given: the bits of each number, with its dtype and that of the operand.
    """
    with np.errstate(all="ignore"):
        numbers = [np.frombuffer(bits, own)[0].astype(d) for bits, own, d in given]
        made = np.asarray(_FUNCTIONS[name](*numbers)).astype(dtype)[()]
    if name == "convert_element_type" and not _is_rounded_once(numbers[0], made):
        return None
    return made if all(map(_has_known_bits, (*numbers, made))) else None


def _aval(atom: Any) -> Any:
    return atom.aval


def _has_known_bits(x: Any) -> bool:
    """Return True for a number that is neither NaN nor subnormal."""
    if _KINDS[dtype_name(x.dtype)] != "f":
        return True
    size = abs(float(x))
    return size == 0 or size >= float(jnp.finfo(x.dtype).smallest_normal)


def _is_rounded_once(x: Any, made: Any) -> bool:
    """Return True if a conversion is exact, wraps integers, or rounds by way of no other dtype."""
    kinds = _KINDS[dtype_name(x.dtype)] + _KINDS[dtype_name(made.dtype)]
    if kinds == "ii":
        return True
    if kinds == "ff" and x.dtype.itemsize == 2 * made.dtype.itemsize:
        return True
    return x.item() == made.item() or (kinds == "if" and made.dtype.itemsize > 2)
