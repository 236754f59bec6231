"""Regions that cannot save a share of the program are not searched, and large ones in part."""

import jax
import jax.numpy as jnp

from symjax_rewrite import sym_optimize
from symjax_rewrite.rewriting import region_solver


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
    report = sym_optimize(lambda x: _steps(x, 100)).explain(_spec(8))
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
