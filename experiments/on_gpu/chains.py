"""A program of several dependent calls, so that their time is the device's; the error of results.

A call takes microseconds and a launch from Python longer. The calls of a chain are launched by one
program, each of them waits for the call before, and successive calls read different copies of the
operands, so that no call finds them in a cache.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

UNROLLED = 10  # calls in one step of a chain's loop, at least: a step costs the loop's own counter


@jax.jit
def error(got: Any, want: Any) -> Any:
    """Return the largest difference over the largest finite value; equal non-finite values are 0.

    A NaN where none is wanted, or none where one is, gives a NaN.
    """
    worst = jnp.float32(0)
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        x, y = x.astype(jnp.float32), y.astype(jnp.float32)
        same = (x == y) | (jnp.isnan(x) & jnp.isnan(y))
        largest = jnp.max(jnp.where(jnp.isfinite(y), jnp.abs(y), 0), initial=1e-30)
        difference = jnp.where(same, 0, jnp.abs(x - y)) / largest
        worst = jnp.maximum(worst, jnp.max(difference, initial=0))
    return worst


def chained(
    fun: Callable[..., Any], calls: int, sets: list[list[Any]], unrolled: int = UNROLLED
) -> Any:
    """Run dependent calls over the sets in turn: `call_count` of them, `unrolled` or more a step.

    A barrier makes the operands of a call wait for the results of the call before, and those of the
    first call of a step for the step's number. It costs no kernel. The results of all calls of a
    step are carried, since the compiler drops calls whose results nothing needs.
    """
    loops, repeats = steps_of(calls, len(sets), unrolled)
    first = fun(*sets[0])

    def body(_: Any, carried: Any) -> Any:
        number, made = carried[0], []
        for operands in sets * repeats:
            waited = made[-1] if made else number
            operands, waited = lax.optimization_barrier((operands, waited))
            if made:
                made[-1] = waited
            else:
                number = waited
            made.append(fun(*operands))
        return number + 1, made

    start = (jnp.int32(0), [first] * (repeats * len(sets)))
    return lax.fori_loop(0, loops, body, start)


def call_count(calls: int, copies: int, unrolled: int = UNROLLED) -> int:
    """Return the calls that `chained` makes: at least `calls`."""
    loops, repeats = steps_of(calls, copies, unrolled)
    return 1 + loops * repeats * copies


def arrays_moved(calls: int, copies: int) -> int:
    """Return how many arrays a chain of elementwise calls reads and writes.

    Its first call writes the results of a whole step, which the loop carries, in one kernel. The
    other calls read and write one each.

    Args:
        calls: as `call_count` tells them.
        copies: of the operands.
    """
    _, repeats = steps_of(calls, copies)
    return 1 + repeats * copies + 2 * (calls - 1)


def steps_of(calls: int, copies: int, unrolled: int = UNROLLED) -> tuple[int, int]:
    """Return the steps of a chain's loop, and how often a step goes through the copies."""
    repeats = -(-min(unrolled, calls) // copies)
    return -(-calls // (repeats * copies)), repeats
