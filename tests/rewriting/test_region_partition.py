"""Regions stay small where a program joins all of its parts; equal regions have equal keys."""

import jax
import jax.numpy as jnp
import numpy as np

from symjax_rewrite import sym_optimize
from symjax_rewrite.ir.dataflow import needed
from symjax_rewrite.ir.flat_program import flatten
from symjax_rewrite.ir.term_graph import build
from symjax_rewrite.rewriting import region_keys
from symjax_rewrite.rewriting.region_keys import LeafTag, Region
from symjax_rewrite.rewriting.region_partition import find_regions


def _regions(fun, *avals):
    t = build(flatten(jax.make_jaxpr(fun)(*avals)))
    return find_regions(t, needed(t), lambda c: LeafTag(False, "float32", False))


def test_a_norm_of_all_gradients_does_not_join_them_into_one_region():
    """Its sum of squares made one region of a whole training step: seconds of search."""

    def loss(ws, x):
        for w in ws:
            x = jnp.tanh(x @ w)
        return x.sum()

    def step(ws, x):
        gradients = jax.grad(loss)(ws, x)
        scale = jax.lax.rsqrt(sum(jnp.sum(g**2) for g in gradients))
        return [w - 0.1 * scale * g for w, g in zip(ws, gradients, strict=True)]

    for layers in (3, 12):
        regions = _regions(step, [jnp.ones((32, 32))] * layers, jnp.ones((128, 32)))
        assert max(len(r.classes) for r in regions) <= 8 * layers


def test_halves_of_elementwise_products_are_read_from_them():
    """A product of all entries is a tree of halves; each node was computed for each of its parts.

    Its gradient took five times as long. Values of which parts remain unread are still cut.
    """
    x = jax.ShapeDtypeStruct((64, 128, 64), jnp.float32)
    gradient = jax.grad(lambda x: jnp.sin(jnp.prod(x, 1)).sum())
    assert not sym_optimize(gradient).explain(x).rules
    part = sym_optimize(lambda x: jnp.sin((x * x)[:8]) + jnp.cos((x * x)[8:16]))
    assert [r.name for r in part.explain(x).rules] == ["partial_access"]


def test_equal_layers_are_solved_once_for_any_order_of_axes():
    """The first layer reads the embedding, so its classes have other numbers, and other axes."""
    B, T, D, F = 2, 16, 32, 64

    def norm(x, g):
        return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * g

    def block(x, p):
        g1, q, k, v, o, g2, w1, b1, w2 = p
        h = norm(x, g1)
        s = jnp.einsum("btd,bsd->bts", h @ q, h @ k) / D**0.5
        x = x + jnp.einsum("bts,bsd->btd", jax.nn.softmax(s, -1), h @ v) @ o
        return x + jax.nn.gelu(norm(x, g2) @ w1 + b1) @ w2

    def model(emb, pos, layers, tokens):
        x = emb[tokens] + pos
        for p in layers:
            x = block(x, p)
        return x.sum()

    shapes = [(D,), (D, D), (D, D), (D, D), (D, D), (D,), (D, F), (F,), (F, D)]
    layer = [jnp.ones(s) for s in shapes]
    for fun in (model, jax.grad(model, argnums=(0, 1, 2))):
        counts = []
        for layers in (2, 3):
            weights = jnp.ones((100, D)), jnp.ones((T, D)), [layer] * layers
            regions = _regions(fun, *weights, jnp.zeros((B, T), jnp.int32))
            counts.append(len({r.key for r in regions}))
        assert counts[0] == counts[1] <= 8, counts


def test_regions_that_are_written_alike_are_numbered_once(monkeypatch):
    """A region that takes the numbering of another has the one that it would get by itself."""

    def layer(x, p, mask):
        a, b, c = p
        return jnp.tanh(jnp.where(mask, x @ a @ b, 0.0) @ c + (x @ a) * 2.0)

    def model(layers, x, mask):
        mask = mask > 0
        for n, p in enumerate(layers):
            x = layer(x, p[::-1] if n == 4 else p, mask) + (n == 5)
        return x

    count, run = [], region_keys.Numbering.run
    monkeypatch.setattr(region_keys.Numbering, "run", lambda self: count.append(run(self)))
    p, tag = [jnp.ones((32, 32))] * 3, LeafTag(False, "float32", False)
    t = build(flatten(jax.make_jaxpr(model)([p] * 9, jnp.ones((8, 32)), jnp.ones((8, 32)))))
    need = needed(t)
    regions = find_regions(t, need, lambda c: tag)
    assert len(regions) == 9 and len(count) < 5
    for r in regions:
        alone = Region(sorted({*r.classes}.difference(r.leaves)), r.roots, r.fused)
        region_keys.Numbering(t.graph, need, alone, lambda c: tag).run()
        assert alone == r


def test_a_solution_is_used_at_a_place_with_another_order_of_axes():
    def chain(p, q, b, c):
        return (jnp.tanh(p @ q) @ b) @ c

    def both(p, q, b, c, c2, b2, q2, p2):
        return chain(p, q, b, c), chain(p2, q2, b2, c2)

    shapes = (256, 16), (16, 8), (8, 512), (512, 4)
    draw = np.random.default_rng(0).standard_normal
    args = [jnp.asarray(draw(s), jnp.float32) for s in (*shapes, *shapes[::-1])]
    first, second = _regions(both, *args)
    assert first.key == second.key
    orders = [[r.slots[c] for c in r.leaves] for r in (first, second)]
    assert orders[0] != orders[1]
    fun = sym_optimize(both)
    assert next(r.count for r in fun.explain(*args).rules if r.name == "contraction_order") == 2
    for got, wanted in zip(fun(*args), both(*args), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-4)
