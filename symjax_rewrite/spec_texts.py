"""Specs of arguments as text, and trees of them.

`f32[b,4096]`, or `float32[b,4096]`, is an array; letters are named sizes. `key[]` is a random key
of JAX's default kind. Tuples, lists and dictionaries are written as in Python:
`{'w': f32[64,64], 'b': f32[64]}`. A number, a string, True, False or None is itself.
"""

from __future__ import annotations

import ast
import re
from typing import Any

import jax
from jax import export

from symjax_rewrite.errors import UsageError

DTYPES = {
    "f16": "float16", "bf16": "bfloat16", "f32": "float32", "f64": "float64", "c64": "complex64",
    "c128": "complex128", "i8": "int8", "i16": "int16", "i32": "int32", "i64": "int64",
    "u8": "uint8", "u16": "uint16", "u32": "uint32", "u64": "uint64", "bool": "bool",
    "f8e4m3": "float8_e4m3fn", "f8e5m2": "float8_e5m2",
}  # fmt: skip


SHORT = {name: short for short, name in DTYPES.items()}


def dtype_text(dtype: Any) -> str:
    """Return the short name of a dtype: `bf16`."""
    return SHORT.get(str(dtype), str(dtype))


def spec_text(x: Any) -> str:
    """Return the dtype and shape of an array or a spec: `f32[b,4096]`."""
    return f"{dtype_text(x.dtype)}[{','.join(map(str, x.shape))}]"


def parse_argument(text: str, scope: export.SymbolicScope) -> Any:
    """Return one argument: a tree of `ShapeDtypeStruct`s, or a static value.

    Raises:
        UsageError: the text is no argument.
    """
    scalars = re.sub(r"\b(\w+)\[\s*\]", r"\1[()]", text.strip())  # Python has no empty subscript
    try:
        tree = ast.parse(scalars, mode="eval").body
        return _value(tree, text, scope)
    except SyntaxError as error:
        raise _not_a_spec(text) from error


def _not_a_spec(text: str) -> UsageError:
    expected = "such as f32[b,4096], {'w': f32[8,8]}, 3 or 'relu'"
    return UsageError("not an argument spec", expected=expected, got=repr(text))


def _value(node: ast.expr, text: str, scope: export.SymbolicScope) -> Any:
    if isinstance(node, ast.Subscript):
        return _array(node, text, scope)
    if isinstance(node, ast.Dict) and None not in node.keys:
        keys = [ast.literal_eval(k) for k in node.keys if k is not None]
        return dict(zip(keys, (_value(v, text, scope) for v in node.values), strict=True))
    if isinstance(node, (ast.Tuple, ast.List)):
        items = [_value(e, text, scope) for e in node.elts]
        return items if isinstance(node, ast.List) else tuple(items)
    try:
        return ast.literal_eval(node)
    except ValueError as error:
        raise _not_a_spec(text) from error


def _array(node: ast.Subscript, text: str, scope: export.SymbolicScope) -> jax.ShapeDtypeStruct:
    name = node.value.id if isinstance(node.value, ast.Name) else ""
    dtype: Any = DTYPES.get(name, name)
    if dtype == "key":
        dtype = jax.eval_shape(jax.random.key, 0).dtype
    elif dtype not in SHORT:
        raise _not_a_spec(text)
    inner = node.slice
    sizes = [ast.unparse(e) for e in (inner.elts if isinstance(inner, ast.Tuple) else [inner])]
    if all(s.isdigit() for s in sizes):
        return jax.ShapeDtypeStruct(tuple(map(int, sizes)), dtype)
    try:
        shape = export.symbolic_shape(",".join(sizes), scope=scope)
        if any(isinstance(d, int) and d < 0 for d in shape):
            raise ValueError("a size is negative")
    except ValueError as error:
        raise UsageError("not a shape", expected="such as [b,2*n,64]", got=repr(text)) from error
    return jax.ShapeDtypeStruct(shape, dtype)
