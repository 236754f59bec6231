"""Programs cut in two: the kept values are the fewest bytes that the rest needs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from symjax_rewrite.cost.equation_cost import aval_bytes
from symjax_rewrite.loops.program_partition import FUSED, split

X, Y = np.linspace(-1, 1, 64, dtype=np.float32).reshape(8, 8), np.ones(8, np.float32)


def spread(x, y):
    """A broadcast is recomputed from its operand, a sum."""
    return jnp.broadcast_to(jnp.sin(x).sum(0), x.shape) * y


def chain(x, y):
    """One value of a chain of cheap steps behind a product is kept."""
    p = x @ x
    return (p * 2 + 1) * (p - 3) * y


def masked(x, y):
    """A mask without operands is recomputed."""
    return jnp.where(lax.iota(np.int32, 8) < 3, jnp.exp(x), 0) * y


def narrowed(x, y):
    """The narrow form of a value is kept, not the wide one."""
    return jnp.exp(x).astype(jnp.bfloat16).astype(jnp.float32) * y


@pytest.mark.parametrize(
    ("fun", "kept"),
    [(spread, 4 * 8), (chain, 4 * 64), (masked, 4 * 64), (narrowed, 2 * 64)],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_minimum_cut_is_kept(fun, kept):
    closed = jax.make_jaxpr(fun)(X, Y)
    parts = split(closed, 1, FUSED)
    assert parts is not None
    assert sum(aval_bytes(v.aval) for v in parts.kept) == kept
    once = parts.run_first([X])
    np.testing.assert_allclose(parts.run_last(once, [Y])[0], fun(X, Y), rtol=1e-5)


def test_equations_unneeded_by_results_move_to_the_backward_half():
    def fun(x, y):
        return x @ x, jnp.sin(x) @ x * y

    parts = split(jax.make_jaxpr(fun)(X, Y), 1, (), results=1)
    assert parts is not None
    assert parts.kept == parts.closed.jaxpr.invars[:1]
    assert [e.primitive.name for e in parts.first] == ["dot_general"]


def test_a_result_of_the_other_inputs_cannot_come_first():
    closed = jax.make_jaxpr(lambda x, y: (x * y, y))(X, Y)
    assert split(closed, 1, FUSED, results=1) is None


def test_results_are_kept_as_residuals():
    def fun(x, y):
        made = jnp.sin(x) + 1
        return made, made * y

    closed = jax.make_jaxpr(fun)(X, Y)
    parts = split(closed, 1, FUSED, 1, [closed.jaxpr.outvars[0]])
    assert parts is not None
    assert len(parts.kept) == 1
    assert all(e.primitive.name != "sin" for e in parts.last)
