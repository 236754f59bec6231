"""Solves with a multiple of the identity plus a low-rank product, and what reads them.

Errors are measured against elimination in extended precision. Both programs may be off by what
rounding the data makes of the result; beyond that, the optimised one by a few times what the
written one is off, at condition numbers up to some 10⁶.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from symjax_rewrite import sym_optimize
from symjax_rewrite.testing.numpy_evaluator import evaluate
from tests.rewriting.families import specs

N, RANK = 160, 4
WIDE = np.longdouble
TIMES = 4  # the error of what is written
DRAWS = 4  # of the data; the errors are those of all draws together
RULES = {"low_rank_solve", "low_rank_readout"}


def covariance(s, u):
    return s * jnp.eye(len(u), dtype=u.dtype) + u @ u.T


def general(s, u, b):
    return jnp.linalg.solve(covariance(s, u), b)


def positive(s, u, b):
    return jax.scipy.linalg.solve(covariance(s, u), b, assume_a="pos")


def inverted(s, u, b):
    return jnp.linalg.inv(covariance(s, u)) @ b


def _likelihood(s, u, y):
    return y @ general(s, u, y)


# What reads the solution z of y (or v of U): the program, and the same of exact z and v.
READS = {
    "itself": (lambda s, u, y: general(s, u, y), lambda z, v, s, u, y: z),
    "of an inverse": (lambda s, u, y: inverted(s, u, y), lambda z, v, s, u, y: z),
    "through U": (lambda s, u, y: u.T @ general(s, u, y), lambda z, v, s, u, y: u.T @ z),
    "through U, positive": (lambda s, u, y: u.T @ positive(s, u, y), lambda z, v, s, u, y: u.T @ z),
    "through U, inverted": (lambda s, u, y: u.T @ inverted(s, u, y), lambda z, v, s, u, y: u.T @ z),
    "through the inverse first": (
        lambda s, u, y: u.T @ jnp.linalg.inv(covariance(s, u)) @ y,
        lambda z, v, s, u, y: u.T @ z,
    ),
    "through UUᵀ": (
        lambda s, u, y: u @ u.T @ general(s, u, y),
        lambda z, v, s, u, y: u @ (u.T @ z),
    ),
    "through the kernel": (
        lambda s, u, y: (k := u @ u.T) @ jnp.linalg.solve(k + s * jnp.eye(N, dtype=u.dtype), y),
        lambda z, v, s, u, y: u @ (u.T @ z),
    ),
    "through some of U": (
        lambda s, u, y: u[:, :3].T @ general(s, u, y),
        lambda z, v, s, u, y: u[:, :3].T @ z,
    ),
    "through scaled U": (
        lambda s, u, y: (3 * u.T) @ general(s, u, y),
        lambda z, v, s, u, y: 3 * (u.T @ z),
    ),
    "by y": (_likelihood, lambda z, v, s, u, y: y @ z),
    "what is left": (
        lambda s, u, y: y - u @ (u.T @ general(s, u, y)),
        lambda z, v, s, u, y: s * z,
    ),
    "solution and readout": (
        lambda s, u, y: jnp.concatenate([(z := general(s, u, y)) * s, u.T @ z]),
        lambda z, v, s, u, y: np.concatenate([s * z, u.T @ z]),
    ),
    "gradient of y": (jax.grad(_likelihood, 2), lambda z, v, s, u, y: 2 * z),
    "gradient of U": (jax.grad(_likelihood, 1), lambda z, v, s, u, y: -2 * np.outer(z, z @ u)),
    "gradient of s": (jax.grad(_likelihood, 0), lambda z, v, s, u, y: -(z @ z)),
    "log-likelihood by U": (
        jax.grad(lambda s, u, y: _likelihood(s, u, y) + jnp.linalg.slogdet(covariance(s, u))[1], 1),
        lambda z, v, s, u, y: 2 * v - 2 * np.outer(z, z @ u),
    ),
    "of U": (lambda s, u, y: general(s, u, u), lambda z, v, s, u, y: v),
    "of U, through U": (
        lambda s, u, y: u.T @ general(s, u, u),
        lambda z, v, s, u, y: u.T @ v,
    ),
    "of a product with U": (
        lambda s, u, y: general(s, u, u @ y[:RANK]),
        lambda z, v, s, u, y: v @ y[:RANK],
    ),
}


def _eliminated(matrix, b):
    """The solution in the dtype of the operands (NumPy's own has no extended precision)."""
    n = len(matrix)
    a = np.concatenate([matrix, b.reshape(n, -1)], 1)
    for k in range(n):
        p = k + int(np.argmax(np.abs(a[k:, k])))
        a[[k, p]] = a[[p, k]]
        a[k + 1 :, k:] -= np.outer(a[k + 1 :, k] / a[k, k], a[k, k:])
    x = a[:, n:]
    for k in reversed(range(n)):
        x[k] = (x[k] - a[k, k + 1 : n] @ x[k + 1 :]) / a[k, k]
    return x.reshape(b.shape)


def _data(seed, dtype, condition, where):
    """s, U and y at a condition number; y anywhere, in the range of U, or near it."""
    rng = np.random.default_rng(seed)
    u = rng.standard_normal((N, RANK)) * np.logspace(0, -1.5 * (seed % 2), RANK)
    s = np.linalg.norm(u, 2) ** 2 / condition
    y = u @ rng.standard_normal(RANK)
    if where != "in the range":
        noise = rng.standard_normal(N)
        y = noise if where == "anywhere" else y + np.sqrt(s) * noise
    return [np.asarray(x, dtype) for x in (s, u, y)]


def _unrounded(args, rng):
    """Other data that round to these."""
    eps = np.finfo(args[0].dtype).eps / 2
    return [np.asarray(x, WIDE) * (1 + eps * rng.choice([-1, 1], x.shape)) for x in args]


def _solved(s, u, y):
    """The solutions for y and for U, and the data, in extended precision."""
    s, u, y = (np.asarray(x, WIDE) for x in (s, u, y))
    both = _eliminated(s * np.eye(N) + u @ u.T, np.concatenate([y[:, None], u], 1))
    return both[:, 0], both[:, 1:], s, u, y


@functools.cache
def _case(*key):
    """Data, and what is exact of them and of others that round to them."""
    args = _data(*key)
    return args, _solved(*args), _solved(*_unrounded(args, np.random.default_rng(key[0])))


def _errors(report, exact, *kind):
    """The errors of what is written, of what is emitted, and of the data; of all draws together."""
    squares = np.zeros(3)
    for args, solved, other in (_case(k, *kind) for k in range(DRAWS)):
        value = exact(*solved)
        results = [evaluate(form.jaxpr, args)[0] for form in (report.before, report.after)]
        off = [_norm(x - value) / _norm(value) for x in (*results, exact(*other))]
        squares += np.square(off)
    return np.sqrt(squares / DRAWS)


def _norm(x):
    return np.linalg.norm(np.asarray(x, float).ravel())


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", READS)
def test_reading_a_low_rank_solve_is_as_accurate_as_elimination(name, dtype):
    program, exact = READS[name]
    with jax.enable_x64(dtype == "float64"):
        avals = specs(",nr,n", {"n": N, "r": RANK}, dtype)
        report = sym_optimize(program).explain(*avals)
        assert RULES & {r.name for r in report.rules}, str(report)
        for condition in (1e3, 1e6):
            for where in ("anywhere", "in the range", "near the range"):
                plain, ours, data = _errors(report, exact, dtype, condition, where)
                allowed = TIMES * (plain + data + np.finfo(dtype).eps)
                assert ours <= allowed, (condition, where, plain, ours, data)


def test_sums_are_not_formed_before_a_solve():
    def twice(c, a, b):
        return jnp.linalg.inv(c) @ a - jnp.linalg.inv(c) @ b

    avals = specs("ii,ij,ij", {"i": N, "j": 8})
    report = sym_optimize(twice).explain(*avals)
    assert "factor" not in [r.name for r in report.rules]
    assert "a solve magnifies the rounding of a sum before it" in str(report)
    report = sym_optimize(twice, numerics="cancels").explain(*avals)
    assert "factor" in [r.name for r in report.rules]
