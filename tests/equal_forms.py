"""Programs that mean the same whatever equal form of them is chosen."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tests.fuzz.check import Failure, Mode, check_function

CHOICES = [("model", 0), ("always", 0), *(("random", k) for k in range(6)), ("wide", 0)]


def agree(
    f: Callable[..., Any],
    *shapes: Any,
    transform: str = "value",
    choices: Sequence[tuple[str, int]] = CHOICES,
    **mode: Any,
) -> None:
    """The function means the same whatever equal form of it is chosen."""
    rng = np.random.default_rng(0)
    args = [
        np.asarray(rng.standard_normal(getattr(s, "shape", s)), getattr(s, "dtype", np.float32))
        for s in shapes
    ]
    for choice, seed in choices:
        outcome = check_function(f, args, Mode(transform, choice, seed, **mode))
        assert not isinstance(outcome, Failure), f"{choice} {seed}: {outcome}"


def f16(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float16)


def c64(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.complex64)
