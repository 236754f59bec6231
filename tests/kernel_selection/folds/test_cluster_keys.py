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


@pytest.mark.parametrize("scales", [(2.0,) * LAYERS, (2.0, 3.0, 4.0, 5.0, 6.0)], ids=str)
def test_of_equal_clusters_one_is_decided_for_all(one_device, monkeypatch, scales):
    decided = []
    decide = _FoldSelection._decide
    spy = lambda self, *args: decided.append(args) or decide(self, *args)  # noqa: E731
    monkeypatch.setattr(_FoldSelection, "_decide", spy)
    x = jax.ShapeDtypeStruct((BATCH, ROWS, WIDTH), jnp.float32)
    weights = [jax.ShapeDtypeStruct((3, WIDTH, WIDTH), jnp.float32)] * LAYERS
    report = sym_optimize(lambda x, w: model(x, w, scales)).explain(x, weights)
    refused = [use for use in report.routes if use.name == "fold"]
    assert sum(use.count for use in refused) == LAYERS
    # The axes of the first layer are in another order; the sum of the last one is a result.
    assert len(decided) == (3 if len(set(scales)) == 1 else LAYERS)
