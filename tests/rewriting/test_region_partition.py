"""Regions stay small where a program joins all of its parts."""

import jax
import jax.numpy as jnp


def test_a_norm_of_all_gradients_does_not_join_them_into_one_region():
    """Its sum of squares made one region of a whole training step: seconds of search."""
    from symjax_rewrite.ir.dataflow import needed
    from symjax_rewrite.ir.flat_program import flatten
    from symjax_rewrite.ir.term_graph import build
    from symjax_rewrite.rewriting.region_partition import find_regions

    def loss(ws, x):
        for w in ws:
            x = jnp.tanh(x @ w)
        return x.sum()

    def step(ws, x):
        gradients = jax.grad(loss)(ws, x)
        scale = jax.lax.rsqrt(sum(jnp.sum(g**2) for g in gradients))
        return [w - 0.1 * scale * g for w, g in zip(ws, gradients, strict=True)]

    for layers in (3, 12):
        closed = jax.make_jaxpr(step)([jnp.ones((32, 32))] * layers, jnp.ones((128, 32)))
        t = build(flatten(closed))
        regions = find_regions(t, needed(t), lambda c: ())
        assert max(len(r.classes) for r in regions) <= 8 * layers
