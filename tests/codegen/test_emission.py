"""Emission fails to the original program, and emits pieces in the order they are made in."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from symjax_rewrite import errors, sym_optimize


@pytest.mark.internal_error
def test_an_error_while_emitting_keeps_the_original(monkeypatch):
    from symjax_rewrite.codegen import term_lowering

    def broken(*_):
        raise ZeroDivisionError

    f = lambda a, b, x: (a @ b) @ x  # noqa: E731
    args = (jnp.ones((256, 256)), jnp.ones((256, 256)), jnp.ones(256))
    monkeypatch.setattr(term_lowering, "_contract", broken)
    np.testing.assert_allclose(sym_optimize(f)(*args), f(*args), 1e-6)
    with pytest.raises(errors.UnsupportedError):
        sym_optimize(f, on_unsupported="error")(*args)


def test_pieces_are_joined_in_the_order_they_are_made():
    """Gates of an LSTM were each transposed, joined and transposed back: ten times slower."""

    def f(ws, h, x):
        gates = h @ jnp.concatenate(ws, 1) + x
        i, o = jnp.split(jax.nn.sigmoid(gates), 2, -1)
        return i * h + o

    args = ([jnp.ones((256, 256))] * 2, jnp.ones((8, 256)), jnp.ones((8, 512)))
    report = sym_optimize(f).explain(*args)
    assert [r.name for r in report.rules] == ["block_products"]
    assert "transpose" not in str(report.after.jaxpr)
    np.testing.assert_allclose(sym_optimize(f)(*args), f(*args), 1e-5)


def test_a_transposition_is_emitted_once():
    """XLA copies a product that is transposed twice; once, it computes the transposed product."""

    def scaled(a, b, c, s):
        y = ((a @ b) @ c).T
        return y / s, y * c

    c = np.cos(np.arange(512.0 * 512, dtype=np.float32)).reshape(512, 512)
    args = (c[:, :8], c[:8], c, np.arange(1, 513, dtype=np.float32))
    report = sym_optimize(scaled).explain(*args)
    assert [r.name for r in report.rules] == ["contraction_order"]
    assert str(report.after.jaxpr).count("transpose[") == 1
    for ours, theirs in zip(sym_optimize(scaled)(*args), scaled(*args), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-3, atol=1e-3)


def test_operands_of_a_value_that_is_read_as_written_are_not_read():
    def f(a, b, c, x):
        both = a @ b
        return both, (both.reshape(256, 2, 128) @ c) @ x

    shapes = (256, 256), (256, 256), (128, 512), (512,)
    given = [jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes]
    found = sym_optimize(f, kernels="off").explain(*given)
    assert [r.name for r in found.rules] == ["contraction_order"]
    names = [e.primitive.name for e in found.after.jaxpr.eqns]
    assert names.count("reshape") == 1  # of the product, and not of the right operand
