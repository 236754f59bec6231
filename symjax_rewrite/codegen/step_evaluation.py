"""Evaluation of the steps that all step programs share: constants, casts, elementwise terms.

May import `ir.step_program` and `term_lowering`. A step program adds handlers for its own reads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from symjax_rewrite.codegen import term_lowering
from symjax_rewrite.ir.step_program import Handlers
from symjax_rewrite.ir.term import ADD, CONTRACT


def handlers(primitives: Mapping[str, Any], **others: Any) -> Handlers:
    """Return the handlers of "const", "cast" and "apply", and others.

    Args:
        primitives: the primitives of the program, by name.
        others: handlers by kind; each replaces a handler of the same name.
    """
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
        total: Any = None
        for coefficient, x in zip(attr, args, strict=True):
            term = x if coefficient == 1 else x * term_lowering.literal(coefficient, dtype)
            total = term if total is None else total + term
        return total
    if op == CONTRACT:
        total = args[0]
        for x in args[1:]:
            total = total * x
        return total
    return term_lowering.in_kernel(attr, args, dtype, primitives)
