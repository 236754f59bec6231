"""Small programs and arrays that many tests share."""

import dataclasses
import functools
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np

ROOT = Path(__file__).parents[1]


class Pair(NamedTuple):
    first: Any
    second: Any


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["value", "none"], meta_fields=["name"]
)
@dataclasses.dataclass
class Tagged:
    value: Any
    none: Any
    name: str


def put(values: Any, dtype: Any = jnp.float32) -> jax.Array:
    """NumPy's values as an array: `jnp.asarray` compiles a program for each of their shapes."""
    return jax.device_put(np.asarray(values, jax.dtypes.canonicalize_dtype(dtype)))


def normal(*shape, seed=0, dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng([seed, *shape]).standard_normal(shape), dtype)


def spec(*shape: Any, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


X, W, A, B = normal(8, 512), normal(512, 512), normal(512, 4), normal(4, 512)


def lora(x, w, a, b):
    """Return the program as written."""
    return x @ (w + a @ b)


def chain(a, b, v):
    return (a @ b) @ v


M, V = normal(256, 256), normal(256)


def assert_close(want: Any, got: Any, tol: float = 1e-5, scaled: bool = False) -> None:
    """Two trees of arrays have equal shapes, dtypes and weak types, and close values.

    scaled: differences may be `tol` times the largest value of an array.
    """
    assert jax.tree.structure(want) == jax.tree.structure(got)
    for w, g in zip(jax.tree.leaves(want), jax.tree.leaves(got), strict=True):
        assert (w.shape, w.dtype, w.weak_type) == (g.shape, g.dtype, g.weak_type)
        kind = w.dtype if w.dtype.kind in "biu" else "complex64"
        w, g = (np.asarray(x, kind) for x in (w, g))
        atol = tol * float(abs(w).max()) if scaled else tol
        np.testing.assert_allclose(g, w, rtol=tol, atol=atol)


def emitted(report):
    """Return a report's optimised program, a function of the arguments as a flat list."""
    return jax.extend.core.jaxpr_as_fun(report.after.jaxpr)


def run_python(code, **env):
    """A fresh process that has `chain`, `M`, `V`; its output."""
    start = f"""
import jax, jax.numpy as jnp, numpy as np
from symjax_rewrite import sym_optimize
def chain(a, b, v): return (a @ b) @ v
M, V = jnp.ones((256, 256)), jnp.ones((256,))
{code}
"""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", **env}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", start],
        env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr
