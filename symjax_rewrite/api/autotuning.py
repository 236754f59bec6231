"""Autotuning: the choice among whole programs by time measured on the device.

With `tune=True` the optimised program, the optimised program without kernels, and the original are
timed in turn on generated inputs. The original is kept unless another program is faster by more
than noise.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from symjax_rewrite import jax_internals
from symjax_rewrite.cost import margins
from symjax_rewrite.cost.device_profiles import Device
from symjax_rewrite.jax_internals import ClosedJaxpr

ROUNDS = 7
SAMPLE_S = 5e-3  # minimum time of a sample; a sample repeats its call
Program = Callable[..., Any]  # function of the flat inputs


def unmeasurable(closed: ClosedJaxpr) -> str | None:
    """Return the reason why a program can't be run on generated inputs, or None."""
    if jax_internals.jaxpr_effects(closed):
        return "it has effects"
    if jax_internals.has_primitive(closed, "while"):
        return "how often its loops run depends on the inputs"
    for v in closed.jaxpr.invars:
        aval = v.aval
        if any(jax_internals.is_symbolic(d) for d in aval.shape):
            return "it has symbolic sizes"
        if getattr(aval.dtype, "kind", "?") not in "fciubV":
            return f"no inputs are made up for {aval.dtype}"
    return None


def measure(programs: Mapping[str, Program], closed: ClosedJaxpr) -> dict[str, float]:
    """Return the median seconds of a call of each program, measured in turn on the same inputs.

    Args:
        programs: functions of the flat inputs of `closed`, by name.
        closed: gives the shapes and dtypes of the inputs. Float inputs are normally distributed.
            Other inputs are zeros, which are in range as indices.
    """
    with jax.ensure_compile_time_eval():
        inputs = _inputs([v.aval for v in closed.jaxpr.invars])
        calls = {}
        for name, program in programs.items():
            compiled = jax.jit(program).lower(*inputs).compile()
            calls[name] = lambda compiled=compiled: jax.block_until_ready(compiled(*inputs))
        repeats = {name: _repeats(call) for name, call in calls.items()}
        rounds = [
            [_sample(call, repeats[name]) for name, call in calls.items()] for _ in range(ROUNDS)
        ]
    return dict(zip(calls, map(statistics.median, zip(*rounds, strict=True)), strict=True))


def fastest(seconds: Mapping[str, float], original: str, device: Device) -> str:
    """Return the fastest program's name, or the original's if none is faster by more than noise."""
    best = min(seconds, key=seconds.__getitem__)
    pays = margins.pays(seconds[original], seconds[best], "measured", device)
    return best if pays else original


def _inputs(avals: Sequence[Any]) -> list[Any]:
    draw = np.random.default_rng(0)
    out = []
    for aval in avals:
        inexact = jax.numpy.issubdtype(aval.dtype, jax.numpy.inexact)
        values = draw.standard_normal(aval.shape) if inexact else np.zeros(aval.shape)
        out.append(jax.numpy.asarray(values.astype(aval.dtype)))
    return out


def _repeats(call: Callable[[], Any]) -> int:
    call()
    return max(1, int(SAMPLE_S / max(_sample(call, 1), 1e-7)))


def _sample(call: Callable[[], Any], repeats: int) -> float:
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    return (time.perf_counter() - start) / repeats
