"""Trees of `lax.associative_scan` are recognised as scans, run as loops, and others are left."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from symjax_rewrite import jax_internals, sym_optimize
from symjax_rewrite.ir.flat_program import flatten
from symjax_rewrite.loops.associative_scan_detection import find_prefixes
from symjax_rewrite.loops.associative_scan_loops import as_loop, refusal, varying_share
from symjax_rewrite.loops.changes import loop_part, rewritten
from symjax_rewrite.loops.fusion import Fusion, Surroundings
from symjax_rewrite.loops.motion import Motion
from symjax_rewrite.loops.normalization import clean
from tests.programs import assert_close


def affine(left, right):
    return right[0] * left[0], right[0] * left[1] + right[1]


def swapped(left, right):
    a, b = left
    c, d = right
    return a * c, d + b * c


def states(a, b):
    return lax.associative_scan(affine, (a, b))[1]


def both(a, b):
    return lax.associative_scan(swapped, (a, b))


def backwards(a, b):
    return lax.associative_scan(affine, (a, b), reverse=True)[1]


def backwards_both(a, b):
    return lax.associative_scan(affine, (a, b), reverse=True)


def last_axis(a, b):
    return lax.associative_scan(affine, (a.T, b.T), axis=-1)[1].sum(0)


def started(a, b):
    b = b.at[0].add(a[0] * 3)
    return lax.associative_scan(affine, (a, b))[1]


def inside(a, b):
    a, b = (x[:, :, None] * jnp.arange(1, 4).astype(x.dtype) for x in (a, b))
    h = lax.associative_scan(affine, (a, b))[1]
    return (h * h).sum(-1), h[-1]


def vmapped(a, b):
    return jax.vmap(states, in_axes=1, out_axes=1)(a, b)


SCANS = [states, both, backwards, backwards_both, last_axis, started, inside, vmapped]


def arrays(length: int, dtype: Any = "float32") -> tuple[jax.Array, jax.Array]:
    draw = np.random.default_rng(length).uniform(-1, 1, (4, length, 3))
    a, b = (1.1 * draw[k] + 1j * draw[2 + k] for k in range(2))
    if dtype != "complex64":
        a, b = a.real, b.real
    if dtype == "int32":
        a, b = 5 * a, 9 * b
    return jnp.asarray(a).astype(dtype), jnp.asarray(b).astype(dtype)


def run_as_loops(fun: Callable, *args: Any) -> tuple[int, Any]:
    """Return the number of trees, and the results with every tree as a loop at any cost."""
    closed, tree = jax_internals.make_jaxpr(fun, *args)
    program = flatten(jax_internals.without_dead(closed))
    around, changes = Surroundings(program), []
    for prefix in find_prefixes(program):
        assert refusal(around, prefix) is None
        loop, own = as_loop(around, prefix)
        Fusion(loop, around, own).run()
        changes.append(loop_part(clean(loop), Motion()))
    new = rewritten(program, changes)
    assert not any(e.primitive.name == "pad" for e in new.jaxpr.eqns)
    run = jax.jit(lambda *args: jax_internals.eval_jaxpr(new, *args))
    return len(changes), jax.tree.unflatten(tree, run(*args))


TYPED = [(f, "float32") for f in SCANS]
TYPED += [(f, d) for f in (both, inside) for d in ("int32", "complex64", "bfloat16")]


@pytest.mark.parametrize("fun, dtype", TYPED, ids=lambda x: getattr(x, "__name__", x))
def test_tree_becomes_one_equal_loop(fun: Callable, dtype: str) -> None:
    args = arrays(19 if dtype == "float32" else 8, dtype)
    count, got = run_as_loops(fun, *args)
    assert count == 1
    tol = {"int32": 0, "bfloat16": 5e-2}.get(dtype, 1e-4)
    assert_close(jax.jit(fun)(*args), got, tol, scaled=True)


def test_first_factor_is_not_read() -> None:
    a, b = arrays(8, "float32")
    a = a.at[0].set(jnp.inf)
    _, got = run_as_loops(states, a, b)
    assert bool(jnp.isfinite(got).all())
    np.testing.assert_allclose(got, jax.jit(states)(a, b), rtol=1e-5)


def other_pair(left, right):
    return right[0] * left[0], left[0] * right[1] + left[1]


def other_sum(left, right):
    return right[0] * left[0], right[0] * left[1] - right[1]


def maximum(left, right):
    return right[0] + left[0], jnp.maximum(right[0] + left[1], right[1])


def squared(left, right):
    return right[0] * left[0], right[0] * right[0] * left[1] + right[1]


def gated(left, right):
    return right[0] * left[0], jnp.tanh(right[0] * left[1] + right[1])


@pytest.mark.parametrize(
    "combine", [other_pair, other_sum, maximum, squared, gated], ids=lambda f: f.__name__
)
def test_combinations_that_are_not_affine_are_not_found(combine: Callable) -> None:
    args = arrays(16, "float32")
    closed, _ = jax_internals.make_jaxpr(lambda a, b: lax.associative_scan(combine, (a, b)), *args)
    assert find_prefixes(flatten(jax_internals.without_dead(closed))) == []


def test_tree_with_other_slices_is_not_found() -> None:
    def fun(a, b):
        even, odd = b[0:8:2], b[1:9:2]
        return a[1:9:2] * even + odd, a[0:8:2]

    closed, _ = jax_internals.make_jaxpr(fun, *arrays(9, "float32"))
    assert find_prefixes(flatten(closed)) == []


READOUTS: dict[str, Callable] = {
    "of every step": lambda h, a, c: jnp.einsum("bldn,bln->bld", h, c),
    "shared": lambda h, a, c: jnp.einsum("bldn,dn->bld", h, a),
    "of all channels": lambda h, a, c: jnp.einsum("n,bldn->bld", a[0], h),
    "entries": lambda h, a, c: h[..., 0] * jax.nn.silu(h[..., -1]),
}


def mamba(x, dt, a, b, c, read: Callable = READOUTS["of every step"]):
    decay = jnp.exp(dt[..., None] * a)
    added = dt[..., None] * b[:, :, None, :] * x[..., None]
    h = lax.associative_scan(affine, (decay, added), axis=1)[1]
    return read(h, a, c) + x


def mamba_args(length: int = 256) -> list[jax.Array]:
    draw = np.random.default_rng(0).uniform
    shapes = [(1, length, 64), (1, length, 64), (64, 16), (1, length, 16), (1, length, 16)]
    low = [-1.0, 0.01, -2.0, -1.0, -1.0]
    return [jnp.asarray(draw(b, b + 1, s), jnp.float32) for b, s in zip(low, shapes, strict=True)]


@pytest.mark.parametrize("read", READOUTS.values(), ids=READOUTS)
def test_selective_scan_never_makes_the_states(read: Callable) -> None:
    args = mamba_args()
    plain = partial(mamba, read=read)
    optimised = sym_optimize(plain)
    report = optimised.explain(*args)
    assert any(r.name == "scan" and r.taken for r in report.routes)
    assert report.after.largest_intermediate <= report.before.largest_intermediate / 10
    np.testing.assert_allclose(optimised(*args), jax.jit(plain)(*args), rtol=1e-4, atol=1e-4)


def test_trees_stay_if_exact_or_short() -> None:
    args = mamba_args()
    report = sym_optimize(mamba, numerics="exact").explain(*args)
    assert any(r.name == "scan" and "order" in r.reason for r in report.routes)
    narrow = arrays(1 << 18, "float32")  # a loop of one thread, a tree of all
    report = sym_optimize(states).explain(*narrow)
    assert any(r.name == "scan" and not r.taken for r in report.routes)


@pytest.mark.parametrize(("device", "taken"), [("cpu", True), ("cpu-64", False)])
def test_a_tree_that_many_threads_share_stays(device: str, taken: bool) -> None:
    a = jax.ShapeDtypeStruct((1024, 512), jnp.float32)
    report = sym_optimize(states, device=device).explain(a, a)
    assert any(r.name == "scan" and r.taken for r in report.routes) == taken


@pytest.mark.parametrize("width", [4, 32])
def test_trees_of_steps_with_few_numbers_run_as_loops(width: int) -> None:
    """4,096 steps of 8 numbers took 32 µs as a loop, and 109 µs as a tree."""

    def smoothed(x: Any, a: Any) -> Any:
        return lax.associative_scan(affine, (jnp.broadcast_to(a, x.shape), x))[1]

    x, weak = jnp.ones((512, width)), jnp.full(width, 0.9)
    assert weak.aval.weak_type
    for a in (weak, jnp.asarray(np.full(width, 0.9, np.float32))):
        optimised = sym_optimize(smoothed)
        assert any(r.name == "scan" and r.taken for r in optimised.explain(x, a).routes)
        np.testing.assert_allclose(optimised(x, a), jax.jit(smoothed)(x, a), rtol=1e-5)


SHARED = {
    "repeated": (lambda x, a: jnp.broadcast_to(a, x.shape), True),
    "computed after it is repeated": (lambda x, a: jnp.exp(-jnp.broadcast_to(a, x.shape)), True),
    "a product of numbers": (lambda x, a: jnp.ones_like(x) * 0.5 * a, True),
    "of every step": (lambda x, a: jnp.tanh(x) * a, False),
    "repeated along another axis": (lambda x, a: jnp.broadcast_to(x[:, :1], x.shape), False),
}


@pytest.mark.parametrize("factors, shared", SHARED.values(), ids=SHARED)
def test_factors_that_all_steps_share_are_half_a_tree(factors: Callable, shared: bool) -> None:
    def smoothed(x: Any, a: Any) -> Any:
        return states(factors(x, a), x)

    specs = jax.ShapeDtypeStruct((512, 8), jnp.float32), jax.ShapeDtypeStruct((8,), jnp.float32)
    program = flatten(jax.make_jaxpr(smoothed)(*specs))
    (prefix,) = find_prefixes(program)
    assert varying_share(Surroundings(program), prefix) == (0.5 if shared else 1.0)
