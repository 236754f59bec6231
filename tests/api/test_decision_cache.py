"""Programs that are traced again: optimised once, and never in place of another program."""

from __future__ import annotations

import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from symjax_rewrite import sym_optimize
from symjax_rewrite.api.decision_cache import MOST_PROGRAMS, DecisionCache
from symjax_rewrite.ir.program_key import MOST_BYTES, ProgramKey, program_key
from symjax_rewrite.optimizer import Optimiser

X = jnp.arange(6.0).reshape(2, 3)
CHAIN = [jnp.ones(s) for s in ((64, 64), (64, 64), (64,))]


def chain(a, b, x):
    return jax.nn.relu(a) @ b @ x


@pytest.fixture
def runs(monkeypatch):
    """The programs that the optimiser has run on."""
    seen = []
    run = Optimiser.run
    counted = lambda self, closed, *rest: (seen.append(closed), run(self, closed, *rest))[1]  # noqa: E731
    monkeypatch.setattr(Optimiser, "run", counted)
    return seen


@jax.custom_jvp
def doubled(x):
    return 2 * x


doubled.defjvp(lambda primals, tangents: (doubled(*primals), 2 * tangents[0]))


def looped(a, b, x):
    step = lambda h, _: (jnp.tanh(a @ b @ h), doubled(h))  # noqa: E731
    return lax.scan(step, x, None, length=3)


@pytest.mark.parametrize("fun", [chain, looped], ids=["products", "a loop with a custom rule"])
def test_explain_and_call_optimise_once(runs, fun):
    f = sym_optimize(fun)
    report = f.explain(*CHAIN)
    value = f(*CHAIN)
    again = f.explain(*CHAIN)
    assert len(runs) == 1
    assert str(again) == str(report)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5), value, fun(*CHAIN))


def test_retraces_under_other_transformations_optimise_once(runs):
    f = sym_optimize(chain)
    batched = [jnp.stack([a, a]) for a in CHAIN]
    for _ in range(2):
        jax.jit(lambda *a: f(*a))(*CHAIN)
        jax.jit(lambda *a: jax.vmap(f)(*a))(*batched)
    first = len(runs)
    jax.jit(lambda *a: f(*a) + 1)(*CHAIN)
    jax.jit(lambda *a: jax.vmap(f)(*a) + 1)(*batched)
    assert first == len(runs) == 2


def test_gradients_traced_again_optimise_once(runs):
    f = sym_optimize(lambda a, b, x: jnp.sum(chain(a, b, x) ** 2))
    first = jax.jit(lambda *a: jax.grad(f)(*a))(*CHAIN)
    before = len(runs)
    second = jax.jit(lambda *a: jax.grad(f)(*a))(*CHAIN)
    assert len(runs) == before
    np.testing.assert_array_equal(first, second)


def test_other_constants_are_another_program(runs):
    scale = [1.0]
    f = sym_optimize(lambda x: x * jnp.asarray([scale[0], 2.0, 3.0]))
    first = f(X)
    scale[0] = 5.0
    jax.clear_caches()
    np.testing.assert_array_equal(f(X)[:, 0], 5 * X[:, 0])
    np.testing.assert_array_equal(first[:, 0], X[:, 0])
    assert len(runs) == 2


@pytest.mark.parametrize("numbers", [(0.0, -0.0), (1, 1.0), (1.0, np.float32(1)), (True, 1)])
def test_numbers_that_compare_equal_are_told_apart(numbers):
    first, second = (jax.make_jaxpr(lambda x, n=n: lax.pow(x, 2.0) * n)(X) for n in numbers)
    assert program_key(first) != program_key(second) or str(first) == str(second)


def test_zeros_of_other_signs_are_other_programs():
    first, second = (jax.make_jaxpr(lambda x, n=n: x / n)(X) for n in (0.0, -0.0))
    assert program_key(first) != program_key(second)


def test_settings_of_jax_are_part_of_the_key():
    trace = lambda: program_key(jax.make_jaxpr(lambda x: x @ x.T)(X))  # noqa: E731
    plain = trace()
    assert trace() == plain
    with jax.default_matmul_precision("highest"):
        assert trace() != plain
    with jax.set_mesh(jax.make_mesh((1,), ("rows",))):
        assert trace() != plain


def test_scopes_and_lines_are_part_of_the_key():
    inner = lambda x, name: jax.named_call(jnp.tanh, name=name)(x)  # noqa: E731
    keys = {program_key(jax.make_jaxpr(lambda x, n=n: inner(x, n))(X)) for n in "ab"}
    assert len(keys) == 2
    here = program_key(jax.make_jaxpr(lambda x: x + 1)(X))
    there = program_key(jax.make_jaxpr(lambda x: x + 1)(X))
    assert here != there


@pytest.mark.internal_error
def test_failures_are_not_kept(runs, monkeypatch):
    f = sym_optimize(chain)
    with monkeypatch.context() as broken:
        broken.setattr(Optimiser, "_run", lambda *_: 1 / 0)
        assert "internal error" in f.explain(*CHAIN).stop
    assert "internal error" not in f.explain(*CHAIN).stop
    assert len(runs) == 2


def test_large_constants_and_tracers_are_not_held():
    large = jnp.zeros(MOST_BYTES // 4 + 1)
    assert program_key(jax.make_jaxpr(lambda x: x + large[:1])(X)) is None
    with jax.checking_leaks():
        assert program_key(jax.make_jaxpr(lambda x: x + 1)(X)) is None


def test_the_cache_is_bounded():
    cache = DecisionCache()
    for n in range(MOST_PROGRAMS):
        cache.put(n, str(n))
    assert cache.get(0) == "0"
    cache.put("more", "more")
    assert (cache.get(0), cache.get(1), cache.get("more")) == ("0", None, "more")
    assert cache.get(None) is None


def test_decisions_die_with_the_function():
    table = jnp.arange(3.0)
    f = sym_optimize(lambda x: x * table)
    f.explain(X)
    held = weakref.ref(table)
    del f, table
    jax.clear_caches()
    gc.collect()
    assert held() is None


def test_a_program_that_is_traced_once_is_not_read(monkeypatch):
    read = []
    content = ProgramKey.content
    monkeypatch.setattr(ProgramKey, "content", lambda self: (read.append(self), content(self))[1])
    f = sym_optimize(chain)
    f.explain(*CHAIN)
    assert not read
    f.explain(*CHAIN)
    assert len(read) == 2
