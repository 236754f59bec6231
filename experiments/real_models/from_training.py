"""Training steps: forward, backward and optimiser as one program."""

from collections.abc import Callable
from typing import Any

import from_equinox
import from_flax
import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from sources import integers


def training(apply: Callable, params: Any, steps: int, batch: tuple) -> tuple[Callable, tuple]:
    """`steps` steps of Adam on a classification loss, unrolled, as one function."""
    optimiser = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))

    def loss(params, inputs, labels):
        logits = apply(params, inputs)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    def train(params, state, inputs, labels):
        losses = []
        for _ in range(steps):
            value, gradient = jax.value_and_grad(loss)(params, inputs, labels)
            updates, state = optimiser.update(gradient, state, params)
            params = optax.apply_updates(params, updates)
            losses.append(value)
        return params, state, jnp.stack(losses)

    return train, (params, optimiser.init(params), *batch)


class LanguageModel(nn.Module):
    """The encoder with a score per word."""

    @nn.compact
    def __call__(self, ids):
        return nn.Dense(1000)(from_flax.Encoder(layers=2, width=128)(ids))


def training_encoder():
    apply, (variables, ids) = from_flax.linen(LanguageModel(), integers(1000, 4, 32))
    return training(apply, variables, 2, (ids, integers(1000, 4, 32, seed=1)))


def training_mlp():
    apply, (arrays, x) = from_equinox.MODELS["equinox MLP"]()
    return training(apply, arrays, 3, (x, integers(10, x.shape[0])))


def gradient(maker: Callable) -> tuple[Callable, tuple]:
    """The gradient of a sum of squares of a model's outputs by its first argument."""
    apply, args = maker()

    def loss(first, *rest):
        leaves = jax.tree.leaves(apply(first, *rest))
        return sum(jnp.sum(x.astype(jnp.float32) ** 2) for x in leaves)

    return jax.value_and_grad(loss), args


MODELS = {
    "training a linen encoder, 2 steps": training_encoder,
    "training an equinox MLP, 3 steps": training_mlp,
    "gradient of a linen LSTM": lambda: gradient(from_flax.MODELS["linen LSTM"]),
    "gradient of an equinox block": lambda: gradient(from_equinox.MODELS["equinox block, rotary"]),
}
