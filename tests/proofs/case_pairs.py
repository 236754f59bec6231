"""Pairs of functions that are equal in every case of signs, and convolutions and products.

`EQUAL` are equal, `UNEQUAL` differ by a plausible slip.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax, nn

from tests.proofs.equal_pairs import Pair

N, TWO = ("f32[n]",), ("f32[n]", "f32[n]")
IMAGES, POINTWISE = ("f32[n,c,5,5]", "f32[o,c,1,1]"), ("f32[n,8,8,3]", "f32[4,4,3,o]")
ROWS, CHANNELS = ("f32[n,8]", "f32[3]"), ("f32[n,6,4]", "f32[3,1,4]")


def conv(strides=(1, 1), padding: Any = "VALID", layout=("NCHW", "OIHW", "NCHW"), groups=1):
    """Return a convolution of its settings."""
    return lambda x, w: lax.conv_general_dilated(
        x, w, strides, padding, dimension_numbers=layout, feature_group_count=groups
    )


def patches(order=(0, 1, 3, 2, 4, 5)):
    """Return a convolution of patches as a matmul of the patches."""

    def run(x, w):
        cut = x.reshape(-1, 2, 4, 2, 4, 3).transpose(order).reshape(-1, 2, 2, 48)
        return cut @ w.reshape(48, -1)

    return run


NHWC, NWC = ("NHWC", "HWIO", "NHWC"), ("NWC", "WIO", "NWC")
depthwise = conv((1,), [(2, 0)], NWC, groups=4)


def taps(first):
    """Return a causal depthwise convolution as a sum of shifted products."""

    def run(x, w):
        padded = jnp.pad(x, ((0, 0), (2, 0), (0, 0)))
        return sum(padded[:, i : i + 6] * w[abs(first - i), 0] for i in range(3))

    return run


def windows(start, combine, width=2):
    """Return a reduction of the windows of rows."""
    return lambda x: lax.reduce_window(x, start, combine, (1, width), (1, 2), "VALID")


def rows_of_two(x):
    return x.reshape(-1, 4, 2)


def products(x):
    return lax.scan(lambda c, v: (c * v, c * v), jnp.float32(1), x)[1]


def huber(edge):
    return lambda x: jnp.where(jnp.abs(x) <= 1, 0.5 * x * x, jnp.abs(x) - edge)


def clipped_huber(x):
    c = jnp.clip(x, -1, 1)
    return c * (x - 0.5 * c)


def cross_entropy(z, y):
    return -(y * nn.log_sigmoid(z) + (1 - y) * nn.log_sigmoid(-z))


EQUAL: dict[str, Pair] = {
    "rows of two axes that are one, reversed": (
        lambda x: x.reshape(8)[::-1], lambda x: x[::-1, ::-1].reshape(8), ("f32[2,4]",)),
    "every second entry of two axes that are one": (
        lambda x: x.reshape(8)[1::2], lambda x: x.reshape(4, 2)[:, 1], ("f32[2,4]",)),
    "numbers of two axes that are one": (
        lambda x: x + jnp.arange(8.0).reshape(2, 4),
        lambda x: x + 4 * jnp.arange(2.0)[:, None] + jnp.arange(4.0), ("f32[2,4]",)),
    "solution_of_a_sum": (
        lambda a, x, y: jnp.linalg.solve(a, x + y),
        lambda a, x, y: jnp.linalg.solve(a, x) + jnp.linalg.solve(a, y),
        ("f32[4,4]", "f32[4]", "f32[4]")),
    "either_test": (
        lambda x, y: jnp.where((x > 0) | (y > 0), 1.0, 0.0),
        lambda x, y: jnp.where(x > 0, 1.0, jnp.where(y > 0, 1.0, 0.0)), TWO),
    "equal_exponentials": (
        lambda x, y: jnp.where(jnp.exp(x) == jnp.exp(y), x, y), lambda x, y: y, TWO),
    "hyperbolic_functions": (lambda x: jnp.sinh(x) + jnp.cosh(x), jnp.exp, N),
    "negative_power": (lambda x: x**-2, lambda x: 1 / (x * x), N),
    "product that a test makes one": (
        lambda x, y: jnp.where(x * y == 1, x * y * y, y), lambda x, y: y, TWO),
    "absolute_value_of_two_relus": (jnp.abs, lambda x: nn.relu(x) + nn.relu(-x), N),
    "difference_of_two_relus": (lambda x: nn.relu(x) - nn.relu(-x), lambda x: x, N),
    "minimum_and_maximum": (
        lambda x, y: jnp.maximum(x, y) * jnp.minimum(x, y), lambda x, y: x * y, TWO),
    "distance_of_extrema": (
        lambda x, y: jnp.maximum(x, y) - jnp.minimum(x, y), lambda x, y: jnp.abs(x - y), TWO),
    "clip_of_two_relus": (lambda x: jnp.clip(x, 0, 1), lambda x: nn.relu(x) - nn.relu(x - 1), N),
    "clip_in_either_order": (
        lambda x: jnp.clip(x, -1, 1), lambda x: jnp.maximum(-1, jnp.minimum(x, 1)), N),
    "hard_tanh": (nn.hard_tanh, lambda x: jnp.clip(x, -1, 1), N),
    "leaky_relu": (lambda x: nn.leaky_relu(x, 0.1), lambda x: jnp.maximum(x, 0.1 * x), N),
    "elu_of_extrema": (
        nn.elu, lambda x: jnp.maximum(x, 0) + jnp.minimum(jnp.expm1(x), 0), N),
    "celu_is_elu": (lambda x: nn.celu(x, 1.0), nn.elu, N),
    "sign_and_absolute_value": (lambda x: jnp.sign(x) * jnp.abs(x), lambda x: x, N),
    "huber_by_clip": (huber(0.5), clipped_huber, N),
    "softplus_by_logarithm": (nn.softplus, lambda x: jnp.log1p(jnp.exp(x)), N),
    "softplus_of_the_opposite": (nn.softplus, lambda x: x + nn.softplus(-x), N),
    "logarithm_of_sigmoid": (lambda x: jnp.log(nn.sigmoid(x)), lambda x: -nn.softplus(-x), N),
    "mish": (nn.mish, lambda x: x * jnp.tanh(jnp.log(1 + jnp.exp(x))), N),
    "binary_cross_entropy": (
        cross_entropy,
        lambda z, y: jnp.maximum(z, 0) - z * y + jnp.log1p(jnp.exp(-jnp.abs(z))), TWO),
    "pointwise_convolution": (
        conv(), lambda x, w: jnp.einsum("nchw,oc->nohw", x, w[:, :, 0, 0]), IMAGES),
    "convolution_of_patches": (conv((4, 4), layout=NHWC), patches(), POINTWISE),
    "causal_depthwise_convolution": (depthwise, taps(0), CHANNELS),
    "convolution_commutes": (jnp.convolve, lambda x, w: jnp.convolve(w, x), ("f32[5]", "f32[3]")),
    "sums_of_windows": (windows(0.0, lax.add), lambda x: rows_of_two(x).sum(-1), ("f32[n,8]",)),
    "maxima_of_windows": (
        windows(-jnp.inf, lax.max), lambda x: rows_of_two(x).max(-1), ("f32[n,8]",)),
    "minima_of_windows": (
        windows(jnp.inf, lax.min), lambda x: rows_of_two(x).min(-1), ("f32[n,8]",)),
    "running_products": (jnp.cumprod, products, N),
    "products_from_the_end": (
        lambda x: lax.cumprod(x, reverse=True)[::-1], lambda x: jnp.cumprod(x[::-1]), N),
    "last_running_product": (lambda x: jnp.cumprod(x)[-1], jnp.prod, ("f32[5]",)),
    "products_of_exponentials": (
        lambda x: jnp.cumprod(jnp.exp(x)), lambda x: jnp.exp(jnp.cumsum(x)), N),
}  # fmt: skip

UNEQUAL: dict[str, Pair] = {
    "solution_of_the_transposed_system": (
        jnp.linalg.solve, lambda a, x: jnp.linalg.solve(a.T, x), ("f32[4,4]", "f32[4]")),
    "two axes that are one, of which one is reversed": (
        lambda x: x.reshape(8)[::-1], lambda x: x[:, ::-1].reshape(8), ("f32[2,4]",)),
    "relus with a slope": (jnp.abs, lambda x: nn.relu(x) + 0.999 * nn.relu(-x), N),
    "maximum less minimum, signed": (
        lambda x, y: jnp.maximum(x, y) - jnp.minimum(x, y), lambda x, y: x - y, TWO),
    "clip at another end": (
        lambda x: jnp.clip(x, 0, 1), lambda x: nn.relu(x) - nn.relu(x - 0.9), N),
    "clip with exchanged ends": (
        lambda x: jnp.clip(x, -1, 1), lambda x: jnp.minimum(-1, jnp.maximum(x, 1)), N),
    "slope above one": (
        lambda x: jnp.where(x > 0, x, 2 * x), lambda x: jnp.maximum(x, 2 * x), N),
    "sign that is one at zero": (
        jnp.sign, lambda x: jnp.where(x >= 0, 1.0, -1.0), ("f32[n]",)),
    "elu without its minimum": (nn.elu, lambda x: jnp.maximum(x, 0) + jnp.expm1(x), N),
    "huber with a jump": (huber(0.4), clipped_huber, N),
    "softplus of the absolute value": (
        nn.softplus, lambda x: jnp.log1p(jnp.exp(jnp.abs(x))), N),
    "cross-entropy of the opposite": (
        cross_entropy,
        lambda z, y: jnp.maximum(z, 0) + z * y + jnp.log1p(jnp.exp(-jnp.abs(z))), TWO),
    "one is not a limit": (
        lambda x: jnp.where(x > 1, 1.0, 0.0) + jnp.where(x < 1, 1.0, 0.0),
        lambda x: jnp.ones_like(x), ("i32[n]",)),
    "guard that drops an argument": (
        lambda x, y: jnp.where(jnp.isnan(x - y), x, x + y), lambda x, y: x + y, TWO),
    "convolution with transposed patches": (
        conv((4, 4), layout=NHWC), patches((0, 1, 3, 4, 2, 5)), POINTWISE),
    "taps in the other order": (depthwise, taps(2), CHANNELS),
    "convolution padded at the other end": (
        depthwise, conv((1,), [(0, 2)], NWC, groups=4), CHANNELS),
    "windows that overlap": (
        windows(0.0, lax.add, 3), lambda x: rows_of_two(x)[:, :3].sum(-1), ("f32[n,8]",)),
    "maxima of padded windows": (
        lambda x: lax.reduce_window(x, 0.0, lax.max, (1, 2), (1, 2), "VALID"),
        lambda x: rows_of_two(x).max(-1), ("f32[n,8]",)),
    "running products without the last": (
        jnp.cumprod, lambda x: jnp.concatenate([jnp.ones(1), jnp.cumprod(x)[:-1]]), ("f32[5]",)),
    "product of sums": (
        lambda x: jnp.prod(jnp.exp(x)), lambda x: jnp.exp(jnp.prod(x)), ("f32[4]",)),
}  # fmt: skip
