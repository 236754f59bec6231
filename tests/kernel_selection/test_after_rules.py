"""Kernels that are recognised only after rules have rewritten the program."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from symjax_rewrite import RulePack, packs, sym_optimize

inv, solve, diag = jnp.linalg.inv, jnp.linalg.solve, jnp.diag


def scaled_logsumexp(q: Any, k: Any, tau: Any) -> Any:
    return jax.nn.logsumexp(solve(diag(tau), q @ k.T), -1)


def scaled_attention(q: Any, k: Any, tau: Any) -> Any:
    e = jnp.exp(solve(diag(tau), q @ k.T))
    return (e @ k) / e.sum(-1, keepdims=True)


def scaled_kernel_sum(x: Any, y: Any, width: Any) -> Any:
    return jnp.exp(-solve(diag(width), ((x[:, None] - y) ** 2).sum(-1))).sum(1)


def rms_norm_by_inverse(x: Any, w: Any) -> Any:
    return inv(diag(jnp.sqrt((x**2).mean(-1) + 1e-6))) @ x @ w


def decay_by_diagonal(a: Any, b: Any) -> Any:
    return lax.scan(lambda h, ab: ((h := diag(ab[0]) @ h + ab[1]), h), b[0], (a, b))[1]


def decay_by_solve(a: Any, b: Any) -> Any:
    return lax.scan(lambda h, ab: ((h := solve(diag(ab[0]), h) + ab[1]), h), b[0], (a, b))[1]


def normal(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).normal(size=shape).astype("float32")


def positive(*shape: int) -> np.ndarray:
    return np.abs(normal(*shape)) + 1


PAIRS = normal(96, 4), normal(80, 4), positive(96)
# A program, its arguments, its kernel, and rules without each of which the kernel is not found.
FOUND = [
    (scaled_logsumexp, PAIRS, "fold", ["solve_is_inverse", "contraction_order"]),
    (scaled_attention, PAIRS, "fold", ["solve_is_inverse", "contraction_order"]),
    (scaled_kernel_sum, PAIRS, "fold", ["solve_is_inverse"]),
    (rms_norm_by_inverse, (normal(96, 64), normal(64, 64)), "norm_linear", ["contraction_order"]),
    (decay_by_diagonal, (1 / positive(40, 8), normal(40, 8)), "scan", ["contraction_order"]),
    (decay_by_solve, (positive(40, 8), normal(40, 8)), "scan", ["solve_is_inverse"]),
]
IDS = [fun.__name__ for fun, *_ in FOUND]


def kernels(fun: Callable, args: tuple, rules: RulePack) -> list[str]:
    report = sym_optimize(fun, kernels="always", rules=rules).explain(*args)
    return [r.name for r in report.routes if r.taken]


@pytest.mark.parametrize(("fun", "args", "kernel", "needed"), FOUND, ids=IDS)
def test_kernel_is_found_after_the_rules(
    fun: Callable, args: tuple, kernel: str, needed: list[str]
) -> None:
    assert kernels(fun, args, packs.default) == [kernel]
    assert kernel not in kernels(fun, args, RulePack("none", ()))
    for name in needed:
        assert kernel not in kernels(fun, args, packs.default - name), name


@pytest.mark.parametrize(("fun", "args", "kernel", "needed"), FOUND, ids=IDS)
def test_values_are_the_originals(
    fun: Callable, args: tuple, kernel: str, needed: list[str]
) -> None:
    got = sym_optimize(fun, kernels="always")(*args)
    np.testing.assert_allclose(got, jax.jit(fun)(*args), rtol=3e-5, atol=3e-5)


def test_matrix_that_is_not_diagonal_leaves_the_norm() -> None:
    def fun(x: Any, w: Any) -> Any:
        return inv(diag(jnp.sqrt((x**2).mean(-1) + 1e-6)) + jnp.ones((96, 96))) @ x @ w

    assert "norm_linear" not in kernels(fun, (normal(96, 64), normal(64, 64)), packs.default)
