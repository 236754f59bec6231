"""Arguments that the emitted program does not read are no parameters of the compiled program."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from symjax_rewrite import jax_internals, sym_optimize
from symjax_rewrite.testing.assertions import assert_equivalent
from tests.programs import A, B, W, X, lora, normal

MANY = [normal(3, seed=k) for k in range(20)]


def parameters(f: Any, *args: Any, **kwargs: Any) -> int:
    """Count the parameters of the compiled program."""
    text = f.lower(*args, **kwargs).as_text()
    main = re.search(r"func.func public @main\((.*?)\) ->", text, re.S)
    assert main is not None
    return len(re.findall(r"%arg\d+:", main[1]))


def beside(x, w, a, b, many):
    return lora(x, w, a, b)


def dead(x, w, a, b, many):
    sum(jnp.sin(m).sum() for m in many)
    return lora(x, w, a, b)


def unread_inside(x, w, a, b, many):
    return jax.jit(beside)(x, w, a, b, many)


def result_unread(x, w, a, b, many):
    f = sym_optimize(lambda x, w, a, b, many: (lora(x, w, a, b), [m * 2 for m in many]))
    return jax.jit(f)(x, w, a, b, many)[0]


def result_of_a_call(x, w, a, b, many):
    return sym_optimize(lambda *args: (lora(*args[:4]), sum(args[4])))(x, w, a, b, many)[0]


def in_a_loop(x, w, a, b, many):
    f = sym_optimize(lambda x, many: (lora(x, w, a, b), many))
    return lax.fori_loop(0, 2, lambda _, x: jnp.tanh(f(x, many)[0]), x)


def in_a_tree(x, w, a, b, many):
    return beside(x, w, a, b, {"read": many[0], "unread": many[1:]}) * many[0][0]


PROGRAMS = {
    "unused": (beside, 4),
    "read by dead code": (dead, 4),
    "unused by an inner jit": (unread_inside, 4),
    "of an unread result of an inner jit": (result_unread, 4),
    "of an unread result of an inner call": (result_of_a_call, 4),
    "in a loop": (in_a_loop, 4),
    "one of many is read": (in_a_tree, 5),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_unread_arguments_are_no_parameters(name):
    f, count = PROGRAMS[name]
    args = X, W, A, B, MANY
    assert parameters(jax.jit(f), *args) == count
    for g in (sym_optimize(f), jax.jit(lambda *args: sym_optimize(f)(*args))):
        assert parameters(g, *args) == count
        assert_equivalent(g, f, *args)


def _sum_gradient(f):
    return jax.grad(lambda *args: f(*args).sum(), argnums=(0, 2))


TRANSFORMS = {
    "grad": lambda f: _sum_gradient(f),
    "vjp": lambda f: lambda *args: jax.vjp(lambda x: f(x, *args[1:]), args[0])[1](args[0])[0],
    "jvp": lambda f: lambda *args: jax.jvp(lambda x: f(x, *args[1:]), args[:1], args[:1])[1],
    "vmap": lambda f: jax.vmap(f, (0, None, None, None, None)),
    "vmap of unread": lambda f: lambda *args: jax.vmap(f, (None, None, None, None, 0))(
        *args[:4], [jnp.stack([m, m]) for m in args[4]]),
    "vmap of grad": lambda f: jax.vmap(_sum_gradient(f), (0, None, None, None, None)),
    "checkpoint": lambda f: _sum_gradient(jax.checkpoint(f)),
    "grad of grad": lambda f: jax.grad(lambda *args: sum(
        (jnp.sin(g) ** 2).sum() for g in _sum_gradient(jax.checkpoint(f))(*args))),
}  # fmt: skip


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("name", PROGRAMS)
def test_transformed_program_has_no_unread_parameters(name, transform):
    f, count = PROGRAMS[name]
    args = X, W, A, B, MANY
    plain = TRANSFORMS[transform](f)
    count = parameters(jax.jit(plain), *args)
    g = TRANSFORMS[transform](sym_optimize(f))
    assert parameters(jax.jit(g), *args) == count
    ours, theirs = jax.jit(g)(*args), jax.jit(plain)(*args)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(a, b, 1e-3, 1e-2)


def upper(a, b, w):
    return (jnp.concatenate([a, b]) @ w)[: a.shape[0]]


def bent(a, b, w):
    return (jnp.tanh(jnp.concatenate([jnp.sin(a), 2 * b])) @ w)[: a.shape[0]]


def stacked(a, b, w):
    return (jnp.stack([a, b]) @ w)[0] * jnp.cos(a)


S = normal(128, 128), normal(128, 128, seed=1), normal(128, 128, seed=2)


@pytest.mark.parametrize("f", [upper, bent, stacked], ids=lambda f: f.__name__)
def test_arguments_that_become_unread_by_a_rewrite_are_no_parameters(f):
    g = sym_optimize(f)
    assert (parameters(jax.jit(f), *S), parameters(g, *S)) == (3, 2)
    assert_equivalent(g, f, *S)


SECOND = jnp.stack([S[1], S[1] + 1])


def _squares(f):
    return lambda *args: (f(*args) ** 2).sum()


def _second_order(f):
    first = jax.grad(_squares(f), (0, 1, 2))
    return jax.grad(lambda *args: sum((g * g).sum() for g in first(*args)), (0, 1, 2))


DERIVED = {
    "grad": lambda f: jax.grad(_squares(f), (0, 1, 2)),
    "jvp": lambda f: lambda *args: jax.jvp(f, args, (args[1], args[2], args[0])),
    "grad of grad": _second_order,
    "grad of checkpoint": lambda f: jax.grad(_squares(jax.checkpoint(f)), (0, 1, 2)),
    "vmap of unread": lambda f: lambda a, b, w: jax.vmap(f, (None, 0, None))(a, SECOND, w),
    "vmap of grad": lambda f: lambda a, b, w: jax.vmap(
        jax.grad(_squares(f), (0, 1)), (None, 0, None))(a, SECOND, w),
}  # fmt: skip


@pytest.mark.parametrize("name", DERIVED)
@pytest.mark.parametrize("f", [upper, bent, stacked], ids=lambda f: f.__name__)
def test_derivatives_by_arguments_that_become_unread(f, name):
    ours, theirs = jax.jit(DERIVED[name](sym_optimize(f)))(*S), jax.jit(DERIVED[name](f))(*S)
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(a, b, 1e-3, 1e-4 * float(jnp.abs(b).max()))


@jax.custom_jvp
def jvp_of_its_own(a, b, w):
    return upper(a, b, w)


@jvp_of_its_own.defjvp
def _tangent(primals, tangents):
    return upper(*primals), primals[1] @ tangents[0] + 5 * tangents[1]


@jax.custom_vjp
def vjp_of_its_own(a, b, w):
    return upper(a, b, w)


vjp_of_its_own.defvjp(
    lambda a, b, w: (upper(a, b, w), (a, b, w)),
    lambda kept, c: (kept[1] @ c, 5 * c, c),
)


@pytest.mark.parametrize("f", [jvp_of_its_own, vjp_of_its_own], ids=["jvp", "vjp"])
def test_arguments_that_derivatives_read_by_convention_stay(f):
    optimised = sym_optimize(lambda a, b, w: f(a, b, w))
    emitted = optimised.explain(*S).after.jaxpr
    assert jax_internals.read_inputs(jax_internals.without_dead(emitted)) == (True, False, True)
    ours, theirs = (jax.grad(_squares(g), (0, 1)) for g in (optimised, f))
    for a, b in zip(jax.jit(ours)(*S), theirs(*S), strict=True):
        np.testing.assert_allclose(a, b, 1e-3, 1e-4 * float(jnp.abs(b).max()))
        assert np.abs(b).max() > 1


def test_unread_arguments_are_kept_and_donated_as_by_jit():
    f = lambda x, many: x @ (W + A @ B)  # noqa: E731
    keeps = sym_optimize(jax.jit(f, keep_unused=True))
    assert parameters(keeps, X, MANY) == 1 + len(MANY)
    gives = sym_optimize(jax.jit(f, donate_argnums=0))
    assert parameters(gives, X, MANY) == 1
    assert "tf.aliasing_output" in gives.lower(X, MANY).as_text()
    x = X + 0
    gives(x, MANY)
    assert x.is_deleted()
    assert not any(m.is_deleted() for m in MANY)


def test_effects_of_unread_results_stay(capfd):
    def f(x, w, a, b, many):
        jax.debug.print("seen {}", many[0][0] * 0)
        return lora(x, w, a, b), many[1]

    assert parameters(jax.jit(lambda *args: sym_optimize(f)(*args)[0]), X, W, A, B, MANY) == 5
    jax.jit(lambda *args: sym_optimize(f)(*args)[0])(X, W, A, B, MANY).block_until_ready()
    jax.effects_barrier()
    assert capfd.readouterr().out.count("seen") == 1
