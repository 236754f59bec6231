"""Products of scaled factors at the ends of a dtype's range: finite as written, so finite always.

Two arrays are far from 1, all others near it: in no order are products of the arrays alone what
overflows or vanishes, if it is not so as written. A number beside them brings both into range.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from symjax_rewrite import sym_optimize
from tests.fuzz.check import Mode, choosing
from tests.fuzz.interpret import Machine

N = 24
FAR = {"float32": 30, "bfloat16": 30, "float16": 3.5}  # decades from 1 that an array may be
ENDS = {"float32": (-34, 37), "bfloat16": (-34, 37), "float16": (-1.5, 4)}  # of finite results
SLACK = {"float32": 1e-4, "bfloat16": 0.1, "float16": 2e-2}

# K and m are the far arrays, s their number; W is near 1/N, x near 1.
FORMS: dict[str, Callable[..., Any]] = {
    "outside": lambda s, K, m, W, x: x * ((s * K) @ m),
    "beside": lambda s, K, m, W, x: m * ((s * K) @ x),
    "on the vector": lambda s, K, m, W, x: (K @ (s * m)) * x,
    "divided": lambda s, K, m, W, x: ((K / (1 / s)) @ m) * x,
    "chain": lambda s, K, m, W, x: W @ ((s * K) @ (W @ m)),
    "matrix chain": lambda s, K, m, W, x: ((W @ (s * K)) @ W) @ m,
    "product": lambda s, K, m, W, x: (s * (K @ W)) @ m,
    "form": lambda s, K, m, W, x: m @ ((s * K) @ x),
    "sum": lambda s, K, m, W, x: jnp.sum((s * K) * m[:, None] * x, 0) / N,
    "low rank": lambda s, K, m, W, x: (W + (s * K[:, :2]) @ W[:2]) @ m,
    "scaled low rank": lambda s, K, m, W, x: (W + s * (K[:, :2] @ W[:2])) @ m,
    "shared": lambda s, K, m, W, x: (s * K) @ m + (s / 2 * K.T) @ m,
    "shared factor": lambda s, K, m, W, x: (s * K) @ m + s * W @ m,
    "trace": lambda s, K, m, W, x: jnp.sum(W * ((s * K) @ (W * m))),
    "masked": lambda s, K, m, W, x: jnp.where(x > 0, (s * K) @ m, 0) * x,
    "einsum": lambda s, K, m, W, x: jnp.einsum("ij,j,jk,k->i", s * K, m, W, x),
    "row": lambda s, K, m, W, x: (((s * K) @ (W * m)) @ W)[3],
    "twice": lambda s, K, m, W, x: ((s**0.5 * K) @ (s**0.5 * m)) * x,
}  # fmt: skip


def drawn(seed: int, dtype: str) -> tuple[float, list[jax.Array]]:
    """A number and arrays of random decades: K·m·number is in range, as number·K and number·m are.

    One time in two the result is near an end of the range, and the number near 1.
    """
    r = random.Random(seed)
    far = FAR[dtype]
    a = r.uniform(-far, far)
    if r.random() < 0.5:
        s = r.uniform(-0.15, 0.15) * far
        b = r.choice(ENDS[dtype]) - s - a
    else:
        b = r.uniform(-far, far)
        b = -b if abs(a + b) < far and r.random() < 0.5 else b
        low, high = max(-far, -far - min(a, b)), min(far, far - max(a, b))
        s = min(max(r.uniform(-0.3, 0.3) * far - (a + b), low), high)
    rng = np.random.default_rng(seed)
    near = lambda *shape: 0.5 + rng.random(shape)  # noqa: E731
    arrays = (10.0**a * near(N, N), 10.0**b * near(N) / N, near(N, N) / N, near(N))
    return 10.0**s, [jnp.asarray(x, dtype) for x in arrays]


def lost(form: str, seed: int, dtype: str, choice: str) -> str:
    """Say what a finite program loses when it is optimised; nothing where it loses nothing."""
    s, args = drawn(seed, dtype)
    number = float(jnp.asarray(s, dtype))
    f = lambda *xs: FORMS[form](number, *xs)  # noqa: E731
    closed = jax.make_jaxpr(f)(*args)
    values = [np.asarray(x) for x in args]
    wide = Machine(wide=True).run(closed, values)[0]
    wanted = Machine().run(closed, values)[0].astype(np.float64)
    slack = SLACK[dtype] * np.abs(wide)
    if not np.isfinite(wanted).all() or not (np.abs(wanted - wide) <= slack).all():
        return ""  # out of range as it is written
    with choosing(Mode(choice=choice, seed=seed)):
        ours = jax.make_jaxpr(sym_optimize(f, on_unsupported="error"))(*args)
    got = Machine().run(ours, values)[0].astype(np.float64)
    if np.isfinite(got).all() and (np.abs(got - wide) <= 8 * slack).all():
        return ""
    values = f"{got.flat[0]:.3g} for {wide.flat[0]:.3g}"
    return f"{form}, seed {seed}, {dtype}, {choice}, number {s:.3g}: {values}"
