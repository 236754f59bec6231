"""Equal clusters, as of the layers of a model, are decided once."""

import functools

import jax
import jax.numpy as jnp
import pytest

from symjax_rewrite import sym_optimize
from symjax_rewrite.kernel_selection.folds.selection import _FoldSelection

LAYERS, BATCH, ROWS, WIDTH = 5, 2, 512, 64


def attend(x, w, scale):
    q, k, v = (x @ w[i] for i in range(3))
    scores = jnp.tanh(scale * (q @ jnp.swapaxes(k, 1, 2)))
    return x + jax.nn.softmax(scores, axis=-1) @ v


def model(x, weights, scales):
    return functools.reduce(lambda x, of: attend(x, *of), zip(weights, scales, strict=True), x)


@pytest.fixture
def decided(one_device, monkeypatch):
    """The clusters that are decided."""
    found, decide = [], _FoldSelection._decide
    spy = lambda self, *args: found.append(args) or decide(self, *args)  # noqa: E731
    monkeypatch.setattr(_FoldSelection, "_decide", spy)
    return found


def refused(f, *args):
    """The number of folds that are refused."""
    uses = sym_optimize(f).explain(*args).routes
    return sum(use.count for use in uses if use.name == "fold")


X = jax.ShapeDtypeStruct((BATCH, ROWS, WIDTH), jnp.float32)
WEIGHTS = [jax.ShapeDtypeStruct((3, WIDTH, WIDTH), jnp.float32)] * LAYERS


@pytest.mark.parametrize("scales", [(2.0,) * LAYERS, (2.0, 3.0, 4.0, 5.0, 6.0)], ids=str)
def test_of_equal_clusters_one_is_decided_for_all(decided, scales):
    assert refused(lambda x, w: model(x, w, scales), X, WEIGHTS) == LAYERS
    # The axes of the first layer are in another order.
    assert len(decided) == (2 if len(set(scales)) == 1 else LAYERS)


def attend_where(mask, x, w):
    q, k, v = (x @ w[i] for i in range(3))
    scores = 0.5 * (q @ jnp.swapaxes(k, 1, 2))
    weights = jax.nn.softmax(jnp.where(mask, scores, -jnp.inf), axis=-1)
    return x + (1 + jnp.tanh(weights)) @ v


def test_the_first_layer_which_makes_masks_and_numbers_is_equal_to_the_others(decided):
    def masked(table, ids, weights):
        # Traced anew for each layer, and shared by all.
        layer = lambda x, w: attend_where(jnp.tri(ROWS, dtype=bool), x, w)  # noqa: E731
        x = functools.reduce(layer, weights, table[ids] + table)
        return x - x.mean()

    table = jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32)
    ids = jax.ShapeDtypeStruct((BATCH, ROWS), jnp.int32)
    assert refused(masked, table, ids, WEIGHTS) == LAYERS
    assert len(decided) == 1


def test_layers_that_share_a_mask_of_stored_numbers_are_decided_apart(decided):
    def masked(x, mask, weights):
        layer = functools.partial(attend_where, mask > 0)
        return functools.reduce(layer, weights, jnp.sin(x))

    mask = jax.ShapeDtypeStruct((ROWS, ROWS), jnp.float32)
    assert refused(masked, X, mask, WEIGHTS) == LAYERS
    assert len(decided) <= 2
