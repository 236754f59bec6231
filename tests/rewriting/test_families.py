"""Every family is found in every spelling; the emitted program has the same value and is best.

Nothing is compiled: FLOPs come from the report, values from both jaxprs, evaluated by NumPy.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from symjax_rewrite import jax_internals, sym_optimize
from symjax_rewrite.testing.numpy_evaluator import evaluate
from tests.profiles import use_on_cpu
from tests.rewriting import awareness, parts
from tests.rewriting.families import FAMILIES as KNOWN
from tests.rewriting.families import MATRICES, random, same_values, specs

FAMILIES = KNOWN | parts.FAMILIES | awareness.FAMILIES


@pytest.fixture(autouse=True)
def _every_region_is_judged(monkeypatch):
    """Programs of few regions are searched in any case: here none is, if it looks hopeless."""
    use_on_cpu(monkeypatch, search={"few_regions": 0})


CASES = [
    pytest.param(
        family,
        spelling,
        id=f"{name}: {spelling}",
        marks=pytest.mark.xfail(strict=True, reason=why)
        if (why := family.missing.get(spelling))
        else (),
    )
    for name, family in FAMILIES.items()
    for spelling in family.spellings
]


@pytest.mark.parametrize(("family", "spelling"), CASES)
def test_every_spelling_is_rewritten(family, spelling):
    avals = specs(family.shapes, family.sizes)
    report = sym_optimize(family.spellings[spelling], on_unsupported="error").explain(*avals)
    before, after = (float(getattr(s, family.cost)) for s in (report.before, report.after))
    assert before >= family.times * after, str(report)
    same_values(report, random(avals))


def in_float64(fun, *args):
    """The value of a function of float32 arrays, traced and computed in float64."""
    wide = [np.asarray(a, np.float64) for a in args]
    with jax.enable_x64(True):
        return evaluate(jax.make_jaxpr(fun)(*wide), wide)[0]


# Distances at an offset: the unshifted form has no correct digit in float32 there.


@pytest.mark.parametrize(
    "spelling", ["broadcast", "row sums", "column sums", "to each other", "by dimension"]
)
@pytest.mark.parametrize("offset", [0.0, 1e2, 1e4])
def test_distances_are_accurate_at_an_offset(offset, spelling):
    avals = specs("nd,md", {"n": 512, "m": 384, "d": 16})
    report = sym_optimize(FAMILIES["squared distances"].spellings[spelling]).explain(*avals)
    args = random(avals, offset=offset)
    exact = in_float64(FAMILIES["squared distances"].spellings[spelling], *args)
    (got,) = evaluate(report.after.jaxpr, args)
    assert report.rules
    assert (np.abs(got - exact) <= 1e-5 * exact).all()


@pytest.mark.parametrize("name", [k for k in FAMILIES if k != "common subexpression"])
def test_result_is_a_fixed_point(name):
    """Optimising an emitted program again changes nothing."""
    family = FAMILIES[name]
    fun = next(iter(family.spellings.values()))
    once = sym_optimize(fun).explain(*specs(family.shapes, family.sizes)).after.jaxpr
    again = sym_optimize(partial(jax_internals.eval_jaxpr, once)).explain(
        *specs(family.shapes, family.sizes)
    )
    assert again.before.seconds <= 1.05 * again.after.seconds, str(again)


DTYPES = [jnp.float32, jnp.float16, jnp.bfloat16, jnp.int32, jnp.complex64]


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: d.__name__)
def test_dtypes_are_kept(dtype):
    def f(a, b, v):
        return (a @ b) @ v

    # In float16 either order may pass 65504 where the other does not.
    numerics = "finite" if dtype is jnp.float16 else "reassoc"
    report = sym_optimize(f, numerics=numerics).explain(*specs("ij,jk,k", MATRICES, dtype))
    assert report.rules
    assert [v.aval.dtype for v in report.after.jaxpr.jaxpr.outvars] == [dtype]


def test_the_users_line_is_named_inside_library_functions():
    report = sym_optimize(lambda a, b: jnp.trace(a @ b)).explain(*specs("ij,ji", MATRICES))
    (rule,) = report.rules
    assert all("test_families.py" in line for line in rule.where)


def test_integers_are_exact():
    def f(x, W, A, B):
        return x @ (W - A @ B) + x @ W

    avals = specs("nd,do,dr,ro", {"n": 8, "d": 256, "o": 256, "r": 4}, jnp.int32)
    report = sym_optimize(f).explain(*avals)
    info = np.iinfo(np.int32)
    rng = np.random.default_rng(0)
    args = [rng.integers(info.min, info.max, a.shape, np.int32) for a in avals]
    assert report.rules
    for x, y in zip(
        evaluate(report.after.jaxpr, args), evaluate(report.before.jaxpr, args), strict=True
    ):
        np.testing.assert_array_equal(x, y)


# Inverses and solves.

inv = jnp.linalg.inv
INVERSES = {
    "inverse times a vector": (lambda a, b, v: inv(a) @ v, 1.3),
    "inverse of a transpose": (lambda a, b, v: inv(a.T) @ v, 1.3),
    "transpose of an inverse": (lambda a, b, v: inv(a).T @ v, 1.3),
    "vector times an inverse": (lambda a, b, v: v @ inv(a), 1.3),
    "inverse times a matrix": (lambda a, b, v: inv(a) @ b[:, :8], 1.3),
    "einsum with an inverse": (lambda a, b, v: jnp.einsum("ij,j->i", inv(a), v), 1.3),
    "inverse of a product on a vector": (lambda a, b, v: inv(a @ b) @ v, 1.3),
    "inverse of a scaled matrix": (lambda a, b, v: inv(2 * a) @ v, 1.3),
    "scaled inverse": (lambda a, b, v: 3 * inv(a) @ v, 1.3),
    "inverse of an inverse": (lambda a, b, v: inv(inv(a)) @ v, 5),
    "inverse twice": (lambda a, b, v: inv(a) @ (inv(b) @ v), 1.3),
    "inverse between": (lambda a, b, v: b @ inv(a) @ v, 1.3),
    "solve for a matrix, on a vector": (lambda a, b, v: jnp.linalg.solve(a, b) @ v, 1.3),
    "inverse of a diagonal": (lambda a, b, v: inv(jnp.diag(v)) @ b, 5),
    "solve with a diagonal": (lambda a, b, v: jnp.linalg.solve(jnp.diag(v), b[0]), 10),
    "low rank and identity, on a vector": (
        lambda a, b, v: jnp.linalg.solve(0.5 * jnp.eye(128) + a[:, :8] @ a[:, :8].T, v), 1.25,
    ),
    "low rank and identity, inverted": (
        lambda a, b, v: inv(a[:4].T @ a[:4] + jnp.eye(128)) @ b[:, :3], 1.5,
    ),
    "ridge regression, more features than rows": (
        lambda a, b, v: jnp.linalg.solve(a[:8].T @ a[:8] + 9 * jnp.eye(128), a[:8].T @ v[:8]), 1.3,
    ),
    "low rank and an unknown number": (
        lambda a, b, v: jnp.linalg.solve((1 + v[0] ** 2) * jnp.eye(128) + a[:, :8] @ a[:, :8].T, v),
        1.25,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", INVERSES)
def test_inverse(name):
    fun, times = INVERSES[name]
    avals = specs("ii,ii,i", {"i": 128})
    report = sym_optimize(fun, on_unsupported="error").explain(*avals)
    assert report.before.seconds >= times * report.after.seconds, str(report)
    a, b, v = random(avals)
    well = np.eye(128, dtype=np.float32) * 40
    with jax.default_matmul_precision("highest"):
        same_values(report, [a + well, b + well, v], rtol=1e-3)


@pytest.mark.parametrize("scale", [0.1, 1.0, 10.0])
@pytest.mark.parametrize("shift", [10.0, 0.1])
@pytest.mark.parametrize("inside", [False, True], ids=["anywhere", "in the range of U"])
def test_low_rank_solve_is_as_accurate_as_elimination(scale, shift, inside):
    def ridge(u, b):
        return jnp.linalg.solve(u @ u.T + shift * jnp.eye(len(u)), b)

    rng = np.random.default_rng(0)
    u = (scale * rng.standard_normal((256, 8)) * np.logspace(0, -2, 8)).astype(np.float32)
    b = (u @ rng.standard_normal(8) if inside else rng.standard_normal(256)).astype(np.float32)
    report = sym_optimize(ridge).explain(u, b)
    assert "low_rank_solve" in [r.name for r in report.rules]
    wide = u.astype(np.float64)
    exact = np.linalg.solve(wide @ wide.T + shift * np.eye(256), b.astype(np.float64))
    errors = [
        np.linalg.norm(evaluate(form.jaxpr, [u, b])[0] - exact)
        for form in (report.before, report.after)
    ]
    assert errors[1] <= 2 * errors[0] + 1e-6 * np.linalg.norm(exact)


def test_masked_rows_stay_hidden():
    def masked(a, b, x, m):
        return jnp.where(m[:, None] > 0, a @ b, 0) @ x

    a, b, x, m = random(specs("ij,jk,k,i", {"i": 64, "j": 48, "k": 40}))
    m[3], a[3] = -1, np.nan
    report = sym_optimize(masked).explain(a, b, x, m)
    assert "masked_product" in [r.name for r in report.rules]
    assert np.isfinite(evaluate(report.before.jaxpr, [a, b, x, m])[0]).all()
    same_values(report, [a, b, x, m])


@pytest.mark.parametrize("form", ["both sides", "trace"])
def test_centred_kernels_are_as_accurate_at_an_offset(form):
    """Centring before a product stays before it: the centred values are small."""

    def measure(k, m):
        c = jnp.eye(64) - jnp.ones((64, 64)) / 64
        return c @ k @ c if form == "both sides" else jnp.trace(k @ c @ m @ c)

    x, m = random(specs("nd,nn", {"n": 64, "d": 16}), offset=10.0)
    k = x @ x.T
    report = sym_optimize(measure).explain(k, m)
    assert "distribute" in [r.name for r in report.rules]
    exact = in_float64(measure, k, m)
    errors = [
        np.abs(evaluate(f.jaxpr, [k, m])[0] - exact).max() for f in (report.before, report.after)
    ]
    assert errors[1] <= 4 * errors[0] + 2e-4 * np.abs(exact).max()


@pytest.mark.parametrize("form", ["one by one", "apart"])
def test_terms_beside_a_product_are_added_before_they_are_summed(form):
    """A mean of (P + b) − s is a mean of P and one of b − s, which is exact for close b and s."""

    def mean(x, w, b, s):
        return jnp.mean((x @ w + b) - s if form == "one by one" else b - (s - x @ w), 1)

    x, w, b = random(specs("nd,do,o", {"n": 96, "d": 64, "o": 80}))
    b = 1e4 * b
    s = b * np.float32(1 + 1e-6)
    report = sym_optimize(mean).explain(x, w, b, s)
    assert "distribute" in [r.name for r in report.rules]
    exact = in_float64(mean, x, w, b, s)
    before, after = (evaluate(f.jaxpr, [x, w, b, s])[0] for f in (report.before, report.after))
    assert np.abs(after - exact).max() <= np.abs(before - exact).max()

    def of_pairs(x, w, b, s):
        return jnp.mean((x @ w + b) - s[:, None], 1)

    assert not sym_optimize(of_pairs).explain(x, w, b, x[:, 0]).rules


def test_means_are_not_rounded_to_half_precision():
    def centred(x):
        return (jnp.eye(64, dtype=x.dtype) - jnp.ones((64, 64), x.dtype) / 64) @ x

    report = sym_optimize(centred).explain(jax.ShapeDtypeStruct((64, 512), jnp.bfloat16))
    assert "distribute" not in [r.name for r in report.rules]
