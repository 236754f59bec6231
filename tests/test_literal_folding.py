"""Equations of literals become literals with the bits of XLA's results, or stay."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from symjax_rewrite import sym_optimize
from symjax_rewrite.ir.flat_program import Program, bits, flatten

FLOATS = [1.75, -0.0, 0.1, -3.0, 1e30, np.inf, np.nan, 1e-39, 2.0**-126]
INTEGERS = [0, 1, 7, -3, 100, 2**31 - 1, -(2**31)]
KINDS = {
    "float32": FLOATS, "float64": FLOATS, "bfloat16": FLOATS,
    "float16": [1.75, -0.0, 0.1, 6e4, 1e-7, np.inf, np.nan],
    "int32": INTEGERS, "int8": [0, 1, 100, -128], "uint8": [0, 1, 255], "bool": [False, True],
}  # fmt: skip
FP8 = jnp.float8_e4m3fn.dtype.type
BINARY = [lax.add, lax.sub, lax.mul, lax.div, lax.max, lax.eq, lax.lt, lax.ge, lax.bitwise_and]


def convert(x: Any, to: str) -> jax.Array:
    """Convert a number in a call: JAX converts literals itself where it traces."""
    return jax.jit(lambda x: lax.convert_element_type(x, to))(x)


def operations(dtype: str) -> list[Any]:
    """Functions of nothing that compute with literals of one dtype."""
    values = [np.array(v).astype(jnp.dtype(dtype))[()] for v in KINDS[dtype]]
    pairs = [(a, b) for a in values for b in values[:5]]
    found: list[tuple[Any, Any]]
    if dtype == "bool":
        found = [(f, p) for f in (lax.eq, lax.bitwise_and, lax.bitwise_or) for p in pairs]
    else:
        is_float = jnp.issubdtype(dtype, jnp.floating)
        names = [f for f in BINARY if f is not (lax.bitwise_and if is_float else lax.div)]
        found = [(f, p) for f in names for p in pairs] + [(lax.neg, (v,)) for v in values]
    found += [(convert, (v, to)) for v in values for to in KINDS]
    return [lambda f=f, p=p: f(*p) for f, p in found]


def folds(fun: Any) -> Program:
    """The flat program of a function of nothing."""
    return flatten(jax.make_jaxpr(fun)())


@pytest.mark.parametrize("dtype", KINDS)
def test_folded_numbers_have_the_bits_of_the_compiled_program(dtype: str) -> None:
    with jax.enable_x64(True):
        made = operations(dtype)
        program = folds(lambda: [f() for f in made])
        compiled = jax.jit(lambda: [f() for f in made])()
        folded = [v for v in program.outputs if not isinstance(v, int)]
        assert len(folded) > len(made) / 3
        for v, x in zip(program.outputs, compiled, strict=True):
            if not isinstance(v, int):
                assert bits(v) == np.asarray(x).tobytes(), (v, x)
                assert v.aval == jax.typeof(x)


@pytest.mark.parametrize(
    "fun",
    [
        lambda: lax.exp(np.float32(2.0)),
        lambda: lax.sub(np.float32(np.inf), np.float32(np.inf)),
        lambda: lax.add(np.complex64(1j), np.complex64(1)),
        lambda: lax.add(FP8(1.75), FP8(0.1)),
        lambda: lax.mul(np.float32(1e-30), np.float32(1e-9)),
        lambda: lax.max(np.float32(0.0), np.float32(-0.0)),
        lambda: convert(np.float32(1e20), "int32"),
        lambda: lax.add(np.ones(1), np.ones(1)),
    ],
)
def test_results_that_may_differ_are_not_folded(fun: Any) -> None:
    assert folds(fun).equations


def test_results_of_folded_equations_are_folded() -> None:
    fun = jax.jit(lambda y: lax.mul(lax.sub(y, np.float32(1.0)), np.float32(2.0)))
    program = folds(lambda: (fun(np.float32(1.75)), lax.lt(1, 2)))
    assert not program.equations
    assert [v.val for v in program.outputs if not isinstance(v, int)] == [1.5, True]


def test_weak_types_of_results_stay() -> None:
    def fun(x: jax.Array) -> Any:
        return x @ (x @ x[:, 0]), lax.sub(1.75, 1.0), jax.grad(lambda y: y**1.75)(x[0, 0])

    x = jnp.linspace(0.5, 1.0, 64 * 64).reshape(64, 64)
    assert jax.eval_shape(sym_optimize(fun), x) == jax.eval_shape(fun, x)
    for mine, theirs in zip(sym_optimize(fun)(x), jax.jit(fun)(x), strict=True):
        assert mine.weak_type == theirs.weak_type
        np.testing.assert_allclose(mine, theirs, rtol=1e-6)
