"""Programs made to take long: the optimiser comes back within its budget, with the same values."""

import functools
import itertools
import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from symjax_rewrite import Budget, sym_optimize


def repeat(times):
    """Apply a step many times, unrolled."""

    def make(step):
        def program(x, *rest):
            for k in range(times):
                x = step(x, k, *rest)
            return x

        return program

    return make


def nested_scans(x):
    f = lambda c: jnp.tanh(c @ c)  # noqa: E731
    for _ in range(20):
        f = (lambda g: lambda c: lax.scan(lambda a, _: (g(a), None), c, None, length=1)[0])(f)
    return f(x)


def products_of_pairs(*ws):
    return sum(ws[i] @ ws[j] for i in range(30) for j in range(30))


def product_of_sums(x, *ws):
    return functools.reduce(operator.mul, [x @ (a + b) for a, b in itertools.pairwise(ws)])


PROGRAMS = {
    "chain of 500": (lambda *ms: functools.reduce(operator.matmul, ms), [(8, 8)] * 500),
    "wide sum of products": (lambda x, *ws: sum(x @ w for w in ws), [(8, 16)] + [(16, 16)] * 300),
    "sums of products of sums": (
        lambda x, *ws: sum(x @ (a + b) @ (b + a) for a, b in itertools.pairwise(ws)),
        [(8, 16)] + [(16, 16)] * 80,
    ),
    "products of pairs": (products_of_pairs, [(8, 8)] * 30),
    "product of sums": (product_of_sums, [(8, 16)] + [(16, 16)] * 40),
    "10,000 equations": (repeat(5000)(lambda x, k: jnp.sin(x) * 1.01), [(16,)]),
    "nested polynomials": (repeat(40)(lambda x, k: (x + 0.1) * (x + 0.5) / 4), [(64,)]),
    "powers": (repeat(60)(lambda x, k: x * x), [(16, 16)]),
    "matrix powers": (repeat(60)(lambda x, k: x @ x / 9), [(8, 8)]),
    "scales": (repeat(2000)(lambda x, k: x * 1.0001), [(8,)]),
    "exponentials": (repeat(800)(lambda x, k, w: jnp.exp(-x) * w), [(8,), (8,)]),
    "selects": (repeat(800)(lambda x, k: jnp.where(x > k, x, x - 1)), [(8,)]),
    "concatenations": (repeat(150)(lambda x, k: jnp.concatenate([x, x[:2]])), [(8, 2)]),
    "slices": (repeat(200)(lambda x, k: (x * 2)[1:] / 2), [(900,)]),
    "divisions": (repeat(100)(lambda x, k: x / (1 + x.sum())), [(32,)]),
    "attentions": (repeat(30)(lambda x, k: jax.nn.softmax(x @ x.T) @ x), [(16, 8)]),
    "reshapes": (
        repeat(200)(lambda x, k: x.reshape(6, 4, 10).transpose(2, 0, 1).reshape(24, 10).T.ravel()),
        [(240,)],
    ),
    "residual products": (repeat(200)(lambda x, k, w: x + x @ w / 9), [(8, 16), (16, 16)]),
    "nested scans": (nested_scans, [(8, 8)]),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_budget_holds(name):
    """No error, no recursion limit, and less than the emergency clock."""
    f, shapes = PROGRAMS[name]
    args = [np.cos(np.arange(np.prod(s), dtype=np.float32) + k).reshape(s) / 4
            for k, s in enumerate(shapes)]  # fmt: skip
    g = sym_optimize(f, on_unsupported="error")
    report = g.explain(*args)
    assert report.time_s < Budget().seconds
    assert "clock" not in report.stop
    if report.rules or any(route.taken for route in report.routes):
        np.testing.assert_allclose(g(*args), jax.jit(f)(*args), rtol=2e-3, atol=1e-4)
    else:  # then it is the program as written, equation for equation
        inner = g.trace(*args).jaxpr
        if [e.primitive.name for e in inner.jaxpr.eqns] == ["sym_call"]:  # for its gradient
            inner = inner.jaxpr.eqns[0].params["call_jaxpr"]
        assert str(inner.jaxpr) == str(jax.make_jaxpr(f)(*args).jaxpr)


def test_the_clock_keeps_the_original():
    f, shapes = PROGRAMS["attentions"]
    report = sym_optimize(f, budget=Budget(seconds=1e-9)).explain(jnp.ones(shapes[0]))
    assert "clock" in report.stop
    assert not report.rules


def test_plain_layers_of_a_deep_program_are_not_searched():
    def network(x, layers):
        for gain, shift, weight, bias in layers:
            x = jnp.tanh((x * gain + shift) @ weight + bias)
        return x

    widths = (256, 512, 768, 256, 1024, 512)
    shapes = [((n,), (n,), (n, m), (m,)) for n, m in itertools.pairwise(widths)]
    specs = jax.tree.map(lambda s: jax.ShapeDtypeStruct(s, "float32"), shapes, is_leaf=_is_shape)
    x = jax.ShapeDtypeStruct((128, widths[0]), "float32")
    report = sym_optimize(network).explain(x, specs)
    (use,) = [r for r in report.routes if r.name == "search"]
    assert use.reason == "no rule was tried: the order of products is the best"
    assert use.count == len(widths) - 1


def _is_shape(x):
    return isinstance(x, tuple) and all(isinstance(d, int) for d in x)


def repeated(times: int, step: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    def f(x, w):
        y = x
        for _ in range(times):
            y = step(y, w)
        return y @ w, jnp.sum(jnp.exp(y) * y, -1), y[0]

    return f


MANY = {
    "squares": repeated(40, lambda y, w: y * y),
    "squares of matrices": repeated(40, lambda y, w: y @ y),
    "products of sums": repeated(40, lambda y, w: y * (y + 1)),
    "sums of sums": repeated(40, lambda y, w: (y + w) + (y - 2 * w)),
    "positive products": repeated(40, lambda y, w: jnp.exp(y) * (jnp.exp(y) + y * y)),
    "a chain": repeated(500, lambda y, w: y @ w),
    "a long product": repeated(1500, lambda y, w: y * w),
    "a long sum": repeated(1500, lambda y, w: y + w),
    "long maps": repeated(1500, lambda y, w: jnp.exp(y) / w),
    "shared maps": repeated(40, lambda y, w: jnp.sin(y) + jnp.cos(y)),
}


@pytest.mark.parametrize("name", MANY)
def test_shared_subexpressions_are_searched_once(name):
    """Terms shared n times deep have 2ⁿ paths: a search along paths did not end."""
    spec = jax.ShapeDtypeStruct((8, 8), jnp.float32)
    f = sym_optimize(MANY[name], on_unsupported="error", kernels="always")
    report = f.explain(spec, spec)
    assert report.time_s < 60, report.stop
