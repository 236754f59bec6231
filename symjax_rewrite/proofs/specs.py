"""Specs of arguments: arrays, `ShapeDtypeStruct`s, and texts such as `"f32[b,4096]"`."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax import export

from symjax_rewrite.spec_texts import parse_argument


def specs_of(tree: Any, scope: export.SymbolicScope) -> Any:
    """Return a tree of arguments with texts as specs; arrays and numbers become specs too."""

    def spec(x: Any) -> Any:
        if isinstance(x, str):
            return parse_argument(x, scope)
        is_number = isinstance(x, int | float | complex) and not isinstance(x, bool)
        if is_number:
            return jax.ShapeDtypeStruct((), jax.numpy.asarray(x).dtype, weak_type=True)
        if isinstance(x, jax.Array | np.ndarray | np.generic):
            weak = bool(getattr(x, "weak_type", False))
            return jax.ShapeDtypeStruct(x.shape, x.dtype, weak_type=weak)
        return x

    return jax.tree.map(spec, tree)
