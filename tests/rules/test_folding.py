"""Folding and merging with frozen arguments: the operations left after `.prepare`."""

from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from symjax_rewrite import jax_internals, sym_optimize
from tests.rewriting.families import random, specs


def _batch_norm(y, gain, shift, mean, variance):
    return (y - mean) * lax.rsqrt(variance + 1e-5) * gain + shift


def _conv(x, w):
    return lax.conv_general_dilated(
        x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


NORM = "o,o,o,o"
FOLDED = {
    # program, shapes, how many arguments vary (the first ones), primitives that must not be left
    "bias into bias": (lambda x, W, b, c: (x @ W + b) + c, "nd,do,o,o", 1, {"add": 1}),
    "scale into weight": (lambda x, W, g: (x @ W) * g, "nd,do,o", 1, {"mul": 0}),
    "gain before a linear layer": (lambda x, g, W: (x * g) @ W, "nd,d,do", 1, {"mul": 0}),
    "BatchNorm after a linear layer": (
        lambda x, W, *norm: _batch_norm(x @ W, *norm),
        f"nd,do,{NORM}",
        1,
        {"mul": 0, "sub": 0, "add": 1},
    ),
    "BatchNorm after a biased layer": (
        lambda x, W, b, *norm: _batch_norm(x @ W + b, *norm),
        f"nd,do,o,{NORM}",
        1,
        {"mul": 0, "sub": 0, "add": 1},
    ),
    "BatchNorm after a convolution": (
        lambda x, w, *norm: _batch_norm(_conv(x, w), *norm),
        f"nhhd,kkdo,{NORM}",
        1,
        {"mul": 0, "sub": 0, "add": 1},
    ),
    "merged adapter": (lambda x, W, A, B: x @ (W + A @ B), "nd,do,dr,ro", 1, {"dot_general": 1}),
    "adapter beside": (
        lambda x, W, A, B: x @ W + (x @ A) @ B,
        "nd,do,dr,ro",
        1,
        {"dot_general": 1},
    ),
    "product of weights": (lambda x, U, V: (x @ U) @ V, "nd,do,od", 1, {"dot_general": 1}),
    "RMSNorm gain": (
        lambda x, g, W: (x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True)) * g) @ W,
        "nd,d,do",
        1,
        {"mul": 2},
    ),
}
SIZES = {"n": 64, "d": 128, "o": 128, "r": 4, "h": 8, "k": 3}


@pytest.mark.parametrize("name", FOLDED)
def test_frozen_operands_are_folded(name):
    fun, shapes, varying, left = FOLDED[name]
    avals = specs(shapes, SIZES)
    args = random(avals)
    args = [np.abs(a) if a.ndim == 1 else a for a in args]
    names = [f"a{k}" for k in range(len(args))]
    source = f"lambda {', '.join(names)}: fun({', '.join(names)})"
    named = eval(source, {"fun": fun})
    prepared = sym_optimize(named, frozen=tuple(names[varying:])).prepare(
        **dict(zip(names[varying:], args[varying:], strict=True))
    )
    got, wanted = prepared(*args[:varying]), jax.jit(fun)(*args)
    assert np.abs(got - wanted).max() <= 2e-4 * np.abs(wanted).max()
    closed = jax.make_jaxpr(prepared)(*args[:varying])
    found = Counter(e.primitive.name for e in jax_internals.all_equations(closed))
    assert {k: found[k] for k, most in left.items() if found[k] > most} == {}
