"""Specs of arguments: arrays, `ShapeDtypeStruct`s, and texts such as `"f32[b,4096]"`."""

from __future__ import annotations

import re
from typing import Any

import jax
import numpy as np
from jax import export

from symjax_rewrite.errors import UsageError

DTYPES = {
    "f16": "float16", "bf16": "bfloat16", "f32": "float32", "f64": "float64", "c64": "complex64",
    "c128": "complex128", "i8": "int8", "i16": "int16", "i32": "int32", "i64": "int64",
    "u8": "uint8", "u16": "uint16", "u32": "uint32", "u64": "uint64", "bool": "bool",
}  # fmt: skip


def parse_spec(text: str, scope: export.SymbolicScope) -> jax.ShapeDtypeStruct:
    """Return `"f32[b,4096]"` as a ShapeDtypeStruct; letters are symbolic sizes.

    Raises:
        UsageError: the text is no spec.
    """
    match = re.fullmatch(r"\s*(\w+)\[([^\]]*)\]\s*", text)
    if not match or match[1] not in DTYPES:
        raise UsageError("not an argument spec", expected="such as f32[b,4096]", got=repr(text))
    sizes = [s.strip() for s in match[2].split(",") if s.strip()]
    if all(s.isdigit() for s in sizes):
        return jax.ShapeDtypeStruct(tuple(map(int, sizes)), DTYPES[match[1]])
    try:
        shape = export.symbolic_shape(",".join(sizes), scope=scope)
    except ValueError as error:
        raise UsageError("not a shape", expected="such as [b,2*n,64]", got=repr(text)) from error
    return jax.ShapeDtypeStruct(shape, DTYPES[match[1]])


def specs_of(tree: Any, scope: export.SymbolicScope) -> Any:
    """Return a tree of arguments with texts as specs; arrays and numbers become specs too."""

    def spec(x: Any) -> Any:
        if isinstance(x, str):
            return parse_spec(x, scope)
        is_number = isinstance(x, int | float | complex) and not isinstance(x, bool)
        if is_number:
            return jax.ShapeDtypeStruct((), jax.numpy.asarray(x).dtype, weak_type=True)
        if isinstance(x, jax.Array | np.ndarray | np.generic):
            weak = bool(getattr(x, "weak_type", False))
            return jax.ShapeDtypeStruct(x.shape, x.dtype, weak_type=weak)
        return x

    return jax.tree.map(spec, tree)
