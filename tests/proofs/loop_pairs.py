"""Further pairs of equal functions: loops without a closed form, chosen entries, casts."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from tests.proofs.equal_pairs import PAIRS as PAIRS
from tests.proofs.equal_pairs import equal, merge

# ---------------------------------------------------------------- loops without a closed form


def recurrent(cell):
    """Return the last state of h' = cell(h, x, w)."""
    return lambda h, x, w: lax.scan(lambda h, x: (cell(h, x, w), None), h, x)[0]


RECURRENT = ("f32[n]", "f32[t,n]", "f32[n,n]")


def gated(h, x, w):
    kept = jax.nn.sigmoid(w @ h + x)
    return kept * h + (1 - kept) * jnp.tanh(x)


@equal(*RECURRENT)
def two_spellings_of_a_recurrent_network():
    def other(h, x, w):
        new = jnp.tanh(x)
        return new + (h - new) * jax.nn.sigmoid(x + jnp.einsum("ij,j->i", w, h))

    return recurrent(gated), recurrent(other)


def leapfrog(turned):
    """Return a pendulum after n steps, with its carries in either order."""

    def run(q, p, force):
        def step(state, push):
            q, p = state[::-1] if turned else state
            p = p - 0.1 * jnp.sin(q) + push
            q = q + 0.1 * p
            return ((p, q) if turned else (q, p)), None

        end = lax.scan(step, (p, q) if turned else (q, p), force)[0]
        return end[::-1] if turned else end

    return run


@equal("f32[n]", "f32[4,n]", "f32[n,n]")
def unrolled_recurrent_network():
    def unrolled(h, x, w):
        for k in range(4):
            h = jnp.tanh(w @ h + x[k])
        return h

    return unrolled, recurrent(lambda h, x, w: jnp.tanh(x + h @ w.T))


@equal("f32[n]", "f32[5,n]")
def unrolled_states_of_a_loop():
    def unrolled(h, x):
        out = []
        for k in range(5):
            h = jnp.sin(h) * x[k]
            out.append(h)
        return jnp.stack(out)

    return unrolled, lambda h, x: lax.scan(lambda h, x: ((y := x * jnp.sin(h)), y), h, x)[1]


@equal("f32[6,d]", "f32[d]")
def unrolled_sum_of_squares():
    def unrolled(x, w):
        total = 0.0
        for k in range(6):
            total = total + (x[k] * w).sum() ** 2
        return jnp.sqrt(total)

    return unrolled, lambda x, w: jnp.sqrt(((x @ w) ** 2).sum())


@equal("f32[n]")
def unrolled_loop_with_a_counter():
    def unrolled(x):
        for k in range(3):
            x = x + jnp.sin((k + 1) * x)
        return x

    return unrolled, lambda x: lax.fori_loop(0, 3, lambda k, y: jnp.sin(y * (k + 1)) + y, x)


def matrix_scan(a, b):
    """Return the states of h' = A(t)·h + b(t), from zero."""
    step = lambda h, ab: ((new := ab[0] @ h + ab[1]), new)  # noqa: E731
    return lax.scan(step, jnp.zeros(b.shape[1:]), (a, b))[1]


def matrix_tree(a, b):
    def combine(left, right):
        moved = jnp.einsum("tij,tj->ti", right[0], left[1])
        return right[0] @ left[0], moved + right[1]

    return lax.associative_scan(combine, (a, b))[1]


@equal("f32[t,n,n]", "f32[t,n]")
def two_spellings_of_a_matrix_recurrence():
    def other(a, b):
        step = lambda h, ab: ((new := ab[1] + jnp.einsum("ij,j->i", ab[0], h)), new)  # noqa: E731
        return lax.scan(step, jnp.zeros(b.shape[1]), (a, b))[1]

    return matrix_scan, other


@equal("f32[4,n]", "f32[4,n,d]")
def parallel_and_sequential_online_softmax():
    def tree(s, v):
        _, l, acc = lax.associative_scan(jax.vmap(merge), (s, jnp.ones_like(s), v))
        return acc[-1] / l[-1][:, None]

    return tree, lambda s, v: jnp.einsum("tn,tnd->nd", jax.nn.softmax(s, 0), v)


# ---------------------------------------------------------------- entries that are chosen


@equal("i32[n]", "f32[v,d]")
def one_hot_product_and_lookup():
    def product(i, w):
        return jax.nn.one_hot(jnp.clip(i, 0, w.shape[0] - 1), w.shape[0]) @ w

    return product, lambda i, w: w[jnp.clip(i, 0, w.shape[0] - 1)]


@equal("i32[n]", "f32[v,d]")
def one_hot_product_and_take_with_zeros():
    def take(i, w):
        return jnp.take(w, jnp.maximum(i, 0), axis=0, mode="fill", fill_value=0)

    return lambda i, w: jax.nn.one_hot(jnp.maximum(i, 0), w.shape[0]) @ w, take


@equal("f32[n,v]", "f32[v,d]")
def one_hot_of_the_largest():
    def product(x, w):
        return jnp.exp(jax.nn.one_hot(x.argmax(-1), w.shape[0]) @ w)

    return product, lambda x, w: jnp.exp(w)[x.argmax(-1)]


# ---------------------------------------------------------------- casts


@equal("f32[n]", "f32[n]")
def product_in_a_wider_type():
    def wide(x, y):
        return (x.astype(jnp.float32) * y).astype(jnp.bfloat16)

    return wide, lambda x, y: (y * x).astype(jnp.bfloat16)


PAIRS |= {
    "carries_in_another_order": (leapfrog(False), leapfrog(True), ("f32[d]", "f32[d]", "f32[t,d]")),
    "parallel_and_sequential_matrix_recurrences": (
        matrix_scan, matrix_tree, ("f32[6,n,n]", "f32[6,n]")),
    "parallel_and_sequential_matrix_recurrences_of_an_odd_length": (
        matrix_tree, matrix_scan, ("f32[5,3,3]", "f32[5,3]")),
    "one_hot_of_a_byte": (
        lambda i, w: jax.nn.one_hot(i, 256) @ w,
        lambda i, w: jnp.take(w, i, axis=0), ("u8[n]", "f32[256,d]")),
    "cast_there_and_back": (
        lambda x: x.astype(jnp.float32).astype(jnp.bfloat16), lambda x: x, ("bf16[n]",)),
}  # fmt: skip
