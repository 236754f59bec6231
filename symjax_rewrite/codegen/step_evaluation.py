"""Evaluation of the steps that all step programs share: constants, casts, elementwise terms.

A step program adds handlers for its own reads.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from symjax_rewrite import jax_internals
from symjax_rewrite.codegen import term_lowering
from symjax_rewrite.ir.step_program import Handlers
from symjax_rewrite.ir.term import ADD, CONTRACT


def handlers(primitives: Mapping[str, Any], **others: Any) -> Handlers:
    """Return the handlers of "const", "cast" and "apply", and others by kind."""
    return {
        "const": lambda data, args, dtype: np.asarray(data).astype(np.dtype(dtype)),
        "cast": lambda data, args, dtype: args[0].astype(np.dtype(dtype)),
        "apply": lambda data, args, dtype: elementwise(data, args, dtype, primitives),
        **others,
    }


def elementwise(what: tuple, args: Sequence[Any], dtype: str, primitives: Mapping[str, Any]) -> Any:
    """Return one elementwise term `(op, attr)` of arrays that broadcast."""
    op, attr = what
    if op == ADD:
        return _sum(attr, args, dtype)
    if op == CONTRACT:
        wide = jax_internals.joint_dtype(dtype, *(x.dtype for x in args))
        product = functools.reduce(operator.mul, [x.astype(wide) for x in args])
        return product.astype(np.dtype(dtype))
    return term_lowering.in_kernel(attr, args, dtype, primitives)


def _sum(coefficients: Sequence[Any], terms: Sequence[Any], dtype: str) -> Any:
    """Return a sum of multiples; terms with the coefficient -1 are subtracted last.

    XLA would move a product of -1 and a vector out of the loop over tiles, as a kernel of its own.
    """
    pairs = sorted(zip(coefficients, terms, strict=True), key=lambda pair: pair[0] == -1)
    total: Any = None
    for c, x in pairs:
        if c == -1 and total is not None:
            total = total - x
            continue
        scaled = x if c == 1 else x * term_lowering.literal(c, dtype)
        total = scaled if total is None else total + scaled
    return total
