"""Elementwise programs as source text of Triton, for kernels that jax-triton compiles.

A kernel here has one loop. An equation whose operands no step of the loop changes is written before
the loop. May import the ground layer and triton_programs.py.
"""

from __future__ import annotations

import linecache
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from symjax_rewrite import jax_internals
from symjax_rewrite.pallas_kernels.triton_programs import for_triton_loop

DTYPES = frozenset({"float32", "bfloat16", "float16", "int32"})
TYPES = {"bool": "int1", **{name: name for name in DTYPES}}  # Triton's names
# An equation of one result by its primitive; the operands are `{0}`, `{1}` …
OPERATIONS = {
    "add": "{0} + {1}", "add_any": "{0} + {1}", "sub": "{0} - {1}", "mul": "{0} * {1}",
    "neg": "-{0}", "abs": "tl.abs({0})", "square": "{0} * {0}",
    "clamp": "tl.minimum(tl.maximum({1}, {0}), {2})",
    "max": "tl.maximum({0}, {1})", "min": "tl.minimum({0}, {1})",
    "eq": "{0} == {1}", "ne": "{0} != {1}", "lt": "{0} < {1}", "le": "{0} <= {1}",
    "gt": "{0} > {1}", "ge": "{0} >= {1}",
    "and": "{0} & {1}", "or": "{0} | {1}", "xor": "{0} ^ {1}", "not": "~{0}",
    **dict.fromkeys(
        ("copy", "stop_gradient", "broadcast_in_dim", "reshape", "squeeze"), "{0}"
    ),
}  # fmt: skip
# Functions of f32 alone; narrower floats are computed in f32.
MAPS = {
    "exp": "tl.exp({0})", "exp2": "tl.exp2({0})", "sym_power_of_two": "tl.exp2({0})",
    "log": "tl.log({0})", "log1p": "libdevice.log1p({0})", "expm1": "libdevice.expm1({0})",
    "logistic": "tl.sigmoid({0})", "tanh": "libdevice.tanh({0})", "erf": "tl.erf({0})",
    "sqrt": "tl.sqrt_rn({0})", "rsqrt": "tl.rsqrt({0})", "sin": "tl.sin({0})",
    "cos": "tl.cos({0})", "floor": "tl.floor({0})", "ceil": "tl.ceil({0})",
    "pow": "libdevice.pow({0}, {1})",
}  # fmt: skip
POINT = (1, 1, 1, 1)  # the shape that programs are traced at


class Expression(NamedTuple):
    """A value of a kernel: its name or constant, its dtype, and True if no step changes it."""

    text: str
    dtype: str
    is_fixed: bool

    def __str__(self) -> str:
        return self.text


class TritonSource:
    """The statements of a kernel, and the operations that Triton has no form for.

    before, inside, after: statements before, inside and after the loop.
    """

    def __init__(self) -> None:
        self.before: list[str] = []
        self.inside: list[str] = []
        self.after: list[str] = []
        self.unlowered: set[str] = set()
        self._count = 0

    def let(
        self, expression: str, dtype: str, is_fixed: bool = False, name: str = ""
    ) -> Expression:
        """Give an expression a name, a new one if left out."""
        self._count += not name
        value = Expression(name or f"v{self._count}", dtype, is_fixed)
        (self.before if is_fixed else self.inside).append(f"{value} = {expression}")
        return value

    def evaluate(self, fun: Callable[..., Any], *args: Any) -> Any:
        """Write the statements of an elementwise function of pytrees of values.

        Exponentials are powers of two, and maxima keep NaN, as in the Pallas kernels.
        """
        leaves, tree = jax.tree.flatten(args, is_leaf=lambda x: isinstance(x, Expression))
        avals = [jax.ShapeDtypeStruct(POINT, jnp.dtype(v.dtype)) for v in leaves]
        run = for_triton_loop(fun, [v.is_fixed for v in leaves])
        closed, outs = jax_internals.make_jaxpr(run, *jax.tree.unflatten(tree, avals))
        made = [_value(x) for x in self._each(jax_internals.without_dead(closed), leaves)]
        self.unlowered |= {f"result of dtype {v.dtype}" for v in made if v.dtype not in TYPES}
        return jax.tree.unflatten(outs, made)

    def _each(self, closed: Any, args: Sequence[Expression]) -> list[Any]:
        def run(eqn: Any, operands: list[Any]) -> list[Any]:
            known = [_value(x) for x in operands]
            text, made = expression(eqn, known), [str(v.aval.dtype) for v in eqn.outvars]
            if text is None:
                self.unlowered.add(eqn.primitive.name)
            is_fixed = all(v.is_fixed for v in known)
            return [self.let(text or "0", dtype, is_fixed) for dtype in made]

        return jax_internals.eval_inlined(closed, args, run)


def expression(eqn: Any, operands: Sequence[Expression]) -> str | None:
    """Return an equation of a jaxpr as an expression of Triton, or None if there is none.

    operands: the values that it reads.
    """
    name, (dtype, *others) = eqn.primitive.name, [str(v.aval.dtype) for v in eqn.outvars]
    texts = [v.text for v in operands]
    if others or not {dtype, *(v.dtype for v in operands)} <= TYPES.keys():
        return None
    if name in OPERATIONS:
        return OPERATIONS[name].format(*texts)
    if name in MAPS:
        wide = [f"{x}.to(tl.float32)" for x in texts] if dtype != "float32" else texts
        return f"({MAPS[name].format(*wide)}).to(tl.{TYPES[dtype]})"
    match name:
        case "div":
            return f"{texts[0]} {'//' if dtype == 'int32' else '/'} {texts[1]}"
        case "rem" if dtype == "int32":
            return f"{texts[0]} % {texts[1]}"
        case "select_n" if len(texts) == 3:
            return f"tl.where({texts[0]}, {texts[2]}, {texts[1]}).to(tl.{TYPES[dtype]})"
        case "integer_pow" if eqn.params["y"] > 0:
            return " * ".join([texts[0]] * eqn.params["y"])
        case "integer_pow" if eqn.params["y"] < 0 and dtype == "float32":
            return f"1.0 / ({' * '.join([texts[0]] * -eqn.params['y'])})"
        case "convert_element_type":
            return f"{texts[0]}.to(tl.{TYPES[dtype]})"
    return None


def _value(x: Any) -> Expression:
    """Return a value, or a constant of a program as one; an array has no dtype of Triton."""
    if isinstance(x, Expression):
        return x
    array = np.asarray(x)
    if array.size != 1:
        return Expression("0", f"{array.dtype}{array.shape}", True)
    is_float = jnp.issubdtype(array.dtype, jnp.floating)
    dtype = str(array.dtype)
    return Expression(literal(array.astype("float32") if is_float else array, dtype), dtype, True)


def literal(number: Any, dtype: str) -> str:
    """Return a number as a scalar of a dtype.

    Example:
        >>> literal(float("-inf"), "float32")
        'tl.full((), float("-inf"), tl.float32)'
    """
    number = np.asarray(number).item()
    text = repr(number) if np.isfinite(number) else f'float("{number}")'
    return f"tl.full((), {text}, tl.{TYPES.get(dtype, dtype)})"


def compiled(source: str, modules: dict[str, Any], name: str) -> Any:
    """Return an object that source text defines; Triton reads the text again by its file's name."""
    file = f"<{name} {hash(source):x}>"
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    space = {**modules, "__name__": __name__}
    exec(compile(source, file, "exec"), space)
    return space[name]
