"""Haiku: functions made pure by `hk.transform`."""

from collections.abc import Callable

import haiku as hk
import jax
import jax.numpy as jnp
from sources import integers, normal


def transformer(ids, layers: int = 3, width: int = 192, heads: int = 4):
    """A causal language model."""
    initial = hk.initializers.VarianceScaling(0.1)
    x = hk.Embed(512, width)(ids)
    x = x + hk.get_parameter("positions", (ids.shape[1], width), init=initial)
    causal = jnp.tril(jnp.ones((1, 1, ids.shape[1], ids.shape[1])))
    for _ in range(layers):
        y = hk.LayerNorm(-1, True, True)(x)
        attention = hk.MultiHeadAttention(heads, width // heads, w_init=initial, model_size=width)
        x = x + attention(y, y, y, mask=causal)
        y = hk.LayerNorm(-1, True, True)(x)
        x = x + hk.Linear(width)(jax.nn.gelu(hk.Linear(4 * width)(y)))
    return hk.Linear(512)(hk.LayerNorm(-1, True, True)(x))


def lstm(x):
    """An LSTM over time, time first."""
    core = hk.LSTM(192)
    outputs, _ = hk.dynamic_unroll(core, x, core.initial_state(x.shape[1]))
    return hk.BatchApply(hk.Linear(10))(outputs)


def resnet(x, is_training: bool):
    """A small residual network, with batch statistics as state."""
    net = hk.nets.ResNet(
        blocks_per_group=(1, 1, 1, 1),
        num_classes=10,
        channels_per_group=(32, 64, 96, 128),
        bottleneck=False,
        use_projection=(True, True, True, True),
    )
    return net(x, is_training=is_training)


def stateless(fun: Callable, *inputs: jax.Array) -> tuple[Callable, tuple]:
    pure = hk.without_apply_rng(hk.transform(fun))
    return pure.apply, (jax.jit(pure.init)(jax.random.key(0), *inputs), *inputs)


def stateful(fun: Callable, inputs: jax.Array) -> tuple[Callable, tuple]:
    """The state is made by a training step, and read by what is measured."""
    pure = hk.without_apply_rng(hk.transform_with_state(fun))
    init = jax.jit(lambda key, inputs: pure.init(key, inputs, True))
    params, state = init(jax.random.key(0), inputs)
    return lambda *args: pure.apply(*args, False), (params, state, inputs)


MODELS = {
    "haiku transformer": lambda: stateless(transformer, integers(512, 2, 64)),
    "haiku LSTM, dynamic_unroll": lambda: stateless(lstm, normal(48, 8, 96)),
    "haiku ResNet": lambda: stateful(resnet, normal(2, 64, 64, 3)),
}
