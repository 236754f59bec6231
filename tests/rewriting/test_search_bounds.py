"""Regions that cannot save a share of the program are not searched, and large ones in part."""

from itertools import pairwise

import jax
import jax.numpy as jnp
import pytest

from symjax_rewrite import sym_optimize
from symjax_rewrite.rewriting import region_solver, search_bounds
from tests.profiles import changed


def _steps(x, count):
    """Products of entries of a small state: parts of parts, which are one region."""
    while len(x) > 8:
        x = x[: len(x) // 2] * x[len(x) // 2 :]
    for _ in range(count):
        x = jnp.concatenate([x[4:] * x[:4], 0.5 * x[2:6]])
    return x


def _solved(monkeypatch):
    """Return a list that receives the number of classes of every region that is solved."""
    sizes = []
    solve = region_solver.Solver._solved

    def counted(self, region):
        sizes.append(len(region.classes))
        return solve(self, region)

    monkeypatch.setattr(region_solver.Solver, "_solved", counted)
    return sizes


def _spec(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def test_a_region_of_scalars_is_not_searched(monkeypatch):
    """Its time is launches of elementwise terms, which XLA fuses; a search took half a second."""
    sizes = _solved(monkeypatch)
    read = changed(search={"large_program": 10_000})  # else the program is light: no term is read
    report = sym_optimize(lambda x: _steps(x, 100), device=read).explain(_spec(8))
    assert not report.rules
    assert not sizes
    (use,) = [r for r in report.routes if r.name == "search"]
    assert use.reason == "no rule was tried: less than 3 % of the program's predicted time"


def test_a_large_product_among_a_thousand_scalars_is_found(monkeypatch):
    sizes = _solved(monkeypatch)

    def f(a, b, x):
        return _steps((a @ b) @ x, 400)

    report = sym_optimize(f).explain(_spec(512, 512), _spec(512, 512), _spec(512))
    assert "contraction_order" in [r.name for r in report.rules]
    assert max(sizes) < 600  # the part of the region near the product


def _rotated(q):
    """Rotary positions (Su et al. 2021): halves of the features turn into each other."""
    half = q.shape[1] // 2
    angle = jnp.sin(jnp.arange(q.shape[0] * 1.0))[:, None]
    return q * jnp.cos(angle) + jnp.concatenate([-q[:, half:], q[:, :half]], 1) * jnp.sin(angle)


def _sum_of_products(x, u, w):
    return x @ u + jnp.tanh(x) @ w


PRODUCTS = {
    "in the best order": (lambda x, a, b, u, w: (x @ a) @ b, False),
    "scores": (lambda x, a, b, u, w: (x @ u + 1.0) @ (x @ w).T, False),
    "a gate": (lambda x, a, b, u, w: ((x @ u) * jnp.tanh(x @ u) * (x @ w)) @ u, False),
    "rotated scores": (lambda x, a, b, u, w: _rotated(x @ u) @ _rotated(x @ w).T, False),
    "a gather": (lambda x, a, b, u, w: (x[jnp.argsort(x[:, 0])] @ u) @ (x @ w).T, False),
    "read twice": (lambda x, a, b, u, w: jnp.tanh((q := x @ u) @ w) @ jnp.tanh(x.T @ q), False),
    "a sum of products": (lambda x, a, b, u, w: _sum_of_products(x, u, w), False),
    "a part": (lambda x, a, b, u, w: (x @ u @ w)[:64], True),
    "gathered": (lambda x, a, b, u, w: (x @ u @ w)[jnp.argsort(x[:64, 0])], True),
    "low rank, read twice": (lambda x, a, b, u, w: jnp.tanh(x @ (q := a @ b)) @ (u @ q), True),
    "a product of a sum": (lambda x, a, b, u, w: _sum_of_products(x, u, w) @ a, True),
    "in another order": (lambda x, a, b, u, w: x @ (a @ b), True),
    "low rank": (lambda x, a, b, u, w: x @ (u + a @ b), False),
    "low rank, a sum": (lambda x, a, b, u, w: x @ (u + w @ (a @ b)), True),
    "a common factor": (lambda x, a, b, u, w: x @ u + x @ w, True),
    "one product, scaled": (lambda x, a, b, u, w: (x @ u) * (x @ (2.0 * u + 1.0)), True),
    "a sum of a product": (lambda x, a, b, u, w: x @ u @ jnp.ones((256, 8)) @ (b @ w), True),
}


@pytest.mark.parametrize(("product", "searched"), PRODUCTS.values(), ids=PRODUCTS)
def test_products_are_searched_unless_their_order_is_the_best(monkeypatch, product, searched):
    """Among layers of other sizes, as a program of few regions is searched in any case."""
    sizes = _solved(monkeypatch)

    def f(x, a, b, u, w, layers):
        y = jnp.tanh(product(x, a, b, u, w))
        for gain, weight in layers:
            x = jnp.tanh((x * gain + 1.0) @ weight)
        return x, y

    layers = [(_spec(n), _spec(n, m)) for n, m in pairwise((256, 320, 384, 448, 512))]
    arrays = [_spec(*s) for s in ((512, 256), (256, 8), (8, 256), (256, 256), (256, 256))]
    sym_optimize(f).explain(*arrays, layers)
    assert bool(sizes) is searched


def test_the_best_order_of_a_product_is_searched_once(monkeypatch):
    """Two bounds of a region ask for it, and so do regions that are alike but for scales."""
    found = []
    search = search_bounds._best_seconds
    monkeypatch.setattr(
        search_bounds, "_best_seconds", lambda model, *key: found.append(key) or search(model, *key)
    )

    def f(x, ws):
        for n, (a, b) in enumerate(ws):
            x = jnp.tanh(n * (x @ a) @ b)
        return x

    weights = [(_spec(256, 256), _spec(256, 256))] * 12
    sym_optimize(f).explain(_spec(256, 256), weights)
    assert found
    assert len(found) == len({*found})
