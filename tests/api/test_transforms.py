"""Functions × transformations: an optimised function is transformed like the original."""

import dataclasses
import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export, lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from symjax_rewrite import jax_internals, sym_optimize
from symjax_rewrite.ir.sizes import value
from symjax_rewrite.reports import program_cost
from tests.profiles import changed
from tests.programs import Pair, Tagged, normal
from tests.tables import half_swept

N, R = 32, 2


X, W = normal(4, N), normal(N, N, seed=1) / 4
A, B2 = normal(N, R, seed=2), normal(R, N, seed=3) / 4


def lora(x):
    return x @ (W + A @ B2)


def chain(x):
    return ((W @ W) @ (W @ W)) @ x.T


def attention(x):
    return jax.nn.softmax(x @ x.T / 6) @ x


def attention_to(x, y):
    return jax.nn.softmax(x @ y.T) @ y


def rms_linear(x):
    return (x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)) @ W


def looped(x):
    return lax.scan(lambda c, _: (jnp.tanh(c @ (W + A @ B2)), c.sum()), x, None, length=3)


def safe_where(x):
    y = x @ (W + A @ B2)
    return jnp.where(y > 0, jnp.sqrt(jnp.where(y > 0, y, 1.0)), 0.0)


def straight_through(x):
    y = x @ (W + A @ B2)
    return y + lax.stop_gradient(jnp.round(y) - y)


def kink(x):
    return jnp.maximum((x * 0) @ (W + A @ B2), 0)


@jax.custom_jvp
def doubled(x):
    return x @ (W + A @ B2)


doubled.defjvp(lambda p, t: (doubled(p[0]), 2 * t[0] @ W))


@jax.custom_vjp
def halved(x):
    return x @ (W + A @ B2)


halved.defvjp(lambda x: (halved(x), None), lambda _, g: (0.5 * g @ W.T,))


def searched(x):
    y = x @ (W + A @ B2)  # jax 0.12 expands a search when the program is lowered
    return y * (1 + 0.1 * jnp.searchsorted(jnp.linspace(-2.03, 2.0, 9), y))


def trees(x):
    return Pair(Tagged(lora(x), None, "kept"), {"trace": jnp.trace(x @ x.T), "n": 3})


FUNCTIONS = {
    f.__name__: f
    for f in (
        lora,
        chain,
        attention,
        rms_linear,
        looped,
        safe_where,
        straight_through,
        kink,
        searched,
        trees,
    )
} | {"custom_jvp": doubled, "custom_vjp": halved}
GRADIENTS = ["lora", "chain", "attention", "rms_linear", "safe_where", "straight_through", "kink",
             "searched", "custom_jvp", "custom_vjp"]  # fmt: skip


def total(f):
    return lambda x: sum(jnp.sum(jnp.sin(y)) for y in jax.tree.leaves(f(x)))


VALUES = {
    "jit": jax.jit,
    "twice": lambda f: sym_optimize(jax.jit(f)),
    "vmap": lambda f: lambda x: jax.vmap(f)(jnp.stack([x, 2 * x])),
    "vmap out_axes": lambda f: (
        lambda x: jax.vmap(lambda y: jax.tree.leaves(f(y))[0], 2, 1)(jnp.stack([x, 2 * x], 2))
    ),
    "nested vmap": lambda f: lambda x: jax.vmap(jax.vmap(f))(x[None, None]),
    "scan": lambda f: lambda x: lax.scan(lambda c, y: (c, f(y)), 0, jnp.stack([x, x]))[1],
    "map": lambda f: lambda x: lax.map(f, x[None]),
    "cond": lambda f: lambda x: lax.cond(x[0, 0] > 9, lambda y: f(2 * y), f, x),
    "switch": lambda f: lambda x: lax.switch(1, [lambda y: f(-y), f], x),
    "while": lambda f: lambda x: lax.fori_loop(0, 2, lambda i, c: c + total(f)(x + i), 0.0),
    "checkpoint": jax.checkpoint,
    "eval_shape": lambda f: (
        lambda x: jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), jax.eval_shape(f, x))
    ),
    "disable_jit": lambda f: lambda x: _within(jax.disable_jit(), f, x),
    "leaks": lambda f: lambda x: _within(jax.checking_leaks(), f, x),
    "debug_nans": lambda f: lambda x: _within(jax.debug_nans(True), f, x),
    "lowered": lambda f: lambda x: jax.jit(f).lower(x).compile()(x),
    "exported": lambda f: (
        lambda x: export.export(jax.jit(lambda y: jax.tree.leaves(f(y))))(x).call(x)
    ),
}


def _within(context, f, x):
    with context:
        return f(x)


FIRST = {
    "grad": lambda f: jax.grad(total(f)),
    "value_and_grad": lambda f: jax.value_and_grad(total(f)),
    "vjp": lambda f: lambda x: jax.vjp(f, x)[1](f(x)),
    "jacrev": lambda f: jax.jacrev(f),
    "jit grad": lambda f: jax.jit(jax.grad(total(f))),
    "grad checkpoint": lambda f: jax.grad(total(jax.checkpoint(f))),
    "grad vmap": lambda f: jax.grad(lambda x: total(jax.vmap(f))(x[None])),
    "vmap grad": lambda f: lambda x: jax.vmap(jax.grad(total(f)))(x[None]),
}
FORWARD = {
    "jvp": lambda f: lambda x: jax.jvp(f, (x,), (jnp.ones_like(x),)),
    "linearize": lambda f: lambda x: jax.linearize(f, x)[1](x),
    "jacfwd": lambda f: jax.jacfwd(f),
    "hessian": lambda f: lambda x: jax.hessian(total(f))(x[:1]),
    "grad of grad": lambda f: jax.grad(lambda x: jnp.sum(jax.grad(total(f))(x) ** 2)),
}


def check(ours, theirs):
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        a, b = jnp.asarray(a), jnp.asarray(b)
        assert (a.shape, a.dtype, a.weak_type) == (b.shape, b.dtype, b.weak_type)
        a, b = np.asarray(a), np.asarray(b)  # NumPy compiles nothing
        # a small element may be the difference of terms as large as the largest
        largest = np.max(np.where(np.isfinite(b), np.abs(b), 0), initial=0)
        rounding = 16 * 2.0**-23 * float(largest)
        np.testing.assert_allclose(a, b, 2e-4, 2e-4 + rounding)


@pytest.fixture(autouse=True)
def eager(monkeypatch):
    """Take every rewrite that the model says is no worse, and let launches cost nothing."""
    from symjax_rewrite.cost import profile_file

    margins = {"rewrite": 1.0, "dominating": 1.0, "share_of_program": 0.0}
    free = dataclasses.replace(changed(margins=margins), launch_s=0.0)
    monkeypatch.setattr(profile_file, "selected_device", lambda *_: free)


@pytest.mark.parametrize(("name", "transform"), half_swept(FUNCTIONS, VALUES))
def test_values(name, transform):
    f = FUNCTIONS[name]
    if transform == "vmap out_axes" and name == "trees":
        pytest.skip("the trace has no axis to put second")
    theirs = VALUES[transform](f)(X)
    check(VALUES[transform](sym_optimize(f, kernels="always"))(X), theirs)
    if transform in ("jit", "vmap", "nested vmap", "scan", "cond", "checkpoint"):
        check(sym_optimize(VALUES[transform](f), kernels="always")(X), theirs)


@pytest.mark.parametrize(("name", "transform"), half_swept(GRADIENTS, [*FIRST, *FORWARD]))
def test_derivatives_are_the_originals(name, transform):
    f = FUNCTIONS[name]
    make = {**FIRST, **FORWARD}[transform]
    if name == "custom_vjp" and transform in FORWARD:
        pytest.skip("a custom_vjp function has no forward mode")
    theirs = jax.jit(make(f))(X)  # compiled once, not equation by equation
    check(make(sym_optimize(f))(X), theirs)
    if transform in ("grad", "value_and_grad", "jit grad", "hessian"):
        check(sym_optimize(make(f))(X), theirs)


def test_the_functions_are_rewritten():
    """The optimised program differs from the original, so that the tables compare two programs."""
    for name in ("lora", "chain", "looped", "safe_where", "custom_jvp", "trees"):
        assert sym_optimize(FUNCTIONS[name]).explain(X).rules, name


def test_symbolic_export():
    (b,) = export.symbolic_shape("b")
    spec = jax.ShapeDtypeStruct((b, N), jnp.float32)
    exported = export.export(sym_optimize(lora, assume="b <= 8"))(spec)
    check(exported.call(normal(7, N)), lora(normal(7, N)))


@pytest.mark.parametrize("transform", ["jit", "vmap", "scan", "cond", "checkpoint"])
def test_no_tracer_leaks(transform):
    """No tracer outlives its trace, nested in other transformations or differentiated."""
    f = sym_optimize(lora)
    with jax.checking_leaks():
        VALUES[transform](f)(X)
        jax.grad(total(VALUES[transform](f)))(X)
        sym_optimize(jax.grad(total(lora)))(X)


def test_debug_nans_finds_them():
    """The optimised function raises an error exactly where the original raises one."""
    f = sym_optimize(lambda x: jnp.log(lora(x)))
    with jax.debug_nans(True):
        with pytest.raises(FloatingPointError):
            f(X)
        assert np.isfinite(sym_optimize(lambda x: jnp.log(lora(x) ** 2 + 1))(X)).all()


def test_bans_of_implicit_promotion_are_the_users():
    """Code of the library may promote where the user's may not."""
    step = lambda h, xs: (xs[0] * h + xs[1], h)  # noqa: E731
    scanned = lambda xs: lax.scan(step, xs[0, 0], tuple(xs))[1].sum()  # noqa: E731
    xs = normal(2, 9, 3)
    f = sym_optimize(scanned, kernels="always", on_unsupported="error")
    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        assert jax.jit(jax.grad(f)).lower(xs).out_info.shape == xs.shape


WIDE = {
    "value": lambda f: f,
    "grad": lambda f: jax.grad(total(f)),
    "vmap": lambda f: lambda x: jax.vmap(f)(x[None]),
    "integers": lambda f: lambda x: (f(x), f((x * 4).astype(int)), jnp.arange(3) * 2**40),
    "weak": lambda f: lambda x: (f(x) * 2, f(x.astype(jnp.float32)) * 0.5, 3.0, x.sum() * 2**20),
}


@pytest.mark.parametrize("transform", WIDE)
@pytest.mark.parametrize("name", ["lora", "chain", "looped"])
def test_x64(name, transform):
    """In 64 bits as well, and back in 32 with the same function object."""
    if name == "looped" and transform in ("integers", "weak"):
        pytest.skip("its carry has one dtype")
    f = FUNCTIONS[name]
    g = WIDE[transform](sym_optimize(f))
    with jax.enable_x64(True):
        x = jnp.asarray(np.random.default_rng(0).standard_normal((4, N)))
        assert x.dtype == jnp.float64
        theirs = WIDE[transform](f)(x)
        check(g(x), theirs)
        check(sym_optimize(WIDE[transform](f))(x), theirs)
    if transform != "integers":
        check(g(X), WIDE[transform](f)(X))


def test_callbacks():
    def f(x):
        y = jax.pure_callback(np.sin, jax.ShapeDtypeStruct(x.shape, x.dtype), x)
        return y @ (W + A @ B2)

    check(sym_optimize(f)(X), f(X))


class Layer:
    """A module as users bind them: its parameters are attributes."""

    def __init__(self, p):
        self.p = p

    def __call__(self, x):
        return adapted(self.p, x)


def adapted(p, x):
    return jnp.tanh(x @ (W + p["a"] @ p["b"]))


P = {"a": A / 8, "b": B2}
CLOSURES = {
    "function": lambda opt: lambda p, x: opt(lambda y: adapted(p, y))(x),
    "no arguments": lambda opt: lambda p, x: opt(lambda: adapted(p, x))(),
    "bound method": lambda opt: lambda p, x: opt(Layer(p).__call__)(x),
    "object": lambda opt: lambda p, x: opt(Layer(p))(x),
    "nested": lambda opt: lambda p, x: opt(lambda y: opt(lambda: adapted(p, y + x))())(x),
    "jitted": lambda opt: lambda p, x: opt(jax.jit(lambda y: adapted(p, y)))(x),
    "scan body": lambda opt: (
        lambda p, x: lax.scan(lambda c, _: (opt(lambda y: adapted(p, y))(c), None), x, None, 2)[0]
    ),
}
OVER = {
    "jit": jax.jit,
    "grad": lambda f: jax.grad(lambda p, x: jnp.sum(jnp.sin(f(p, x)))),
    "jit grad of both": lambda f: jax.jit(
        jax.grad(lambda p, x: jnp.sum(jnp.sin(f(p, x))), argnums=(0, 1))
    ),
    "checkpoint": lambda f: jax.grad(jax.checkpoint(lambda p, x: jnp.sum(f(p, x) ** 2))),
    "jvp": lambda f: lambda p, x: jax.jvp(lambda p: f(p, x), (p,), (jax.tree.map(jnp.cos, p),)),
    "second order": lambda f: (
        lambda p, x: jax.jvp(jax.grad(lambda p: jnp.sum(jnp.sin(f(p, x)))), (p,), (p,))
    ),
    "grad of grad": lambda f: jax.grad(
        lambda p, x: sum(
            jnp.sum(g**2) for g in jax.tree.leaves(jax.grad(lambda q: f(q, x).sum())(p))
        )
    ),
    "vmap of p": lambda f: (
        lambda p, x: jax.vmap(f, (0, None))(jax.tree.map(lambda v: jnp.stack([v, -v]), p), x)
    ),
    "vmap of both": lambda f: (
        lambda p, x: jax.vmap(f)(
            jax.tree.map(lambda v: jnp.stack([v, -v]), p), jnp.stack([x, 2 * x])
        )
    ),
    "gradients by example": lambda f: (
        lambda p, x: jax.vmap(jax.grad(lambda p, y: jnp.sum(f(p, y))), (None, 0))(p, x[:, None])
    ),
    "whole": lambda f: sym_optimize(jax.grad(lambda p, x: jnp.sum(jnp.sin(f(p, x))))),
}


@pytest.mark.parametrize("over", OVER)
def test_closures_over_traced_values_keep_their_results(over):
    ours, theirs = (OVER[over](CLOSURES["function"](opt)) for opt in (sym_optimize, lambda f: f))
    check(ours(P, X), theirs(P, X))


def flops_of(f, *args):
    found = program_cost.flops(jax.make_jaxpr(f)(*args))
    assert found is not None
    return value(found, {})


@pytest.mark.parametrize("name", CLOSURES)
def test_closures_of_every_kind_are_rewritten(name):
    """Parameters of a loss, bound modules, bodies of loops; and no tracer leaks."""
    ours, theirs = (OVER["grad"](CLOSURES[name](opt)) for opt in (sym_optimize, lambda f: f))
    before, after = (flops_of(f, P, X) for f in (theirs, ours))
    assert after < 0.7 * before
    with jax.checking_leaks():
        check(jax.jit(ours)(P, X), theirs(P, X))


def transposed(opt):
    return lambda p, x: jax.linear_transpose(opt(lambda y: p["a"] @ (p["b"] @ y)), x.T)(x.T)[0]


def within_a_rule(opt):
    """Tangents go through an optimised function, which reverse mode transposes."""

    def run(p, x):
        f = jax.custom_jvp(lambda y: adapted(p, y))
        f.defjvp(lambda at, by: (f(*at), opt(lambda a, t: jnp.cos(a) * (t @ W + t))(*at, *by)))
        return jax.grad(lambda y: f(y).sum())(x)

    return run


def solved(opt):
    def run(p, x):
        matvec = opt(lambda y: y + p["a"] @ (p["a"].T @ y))
        return jax.grad(lambda b: jax.scipy.sparse.linalg.cg(matvec, b)[0].sum())(x[0])

    return run


@pytest.mark.parametrize("make", [transposed, within_a_rule, solved])
def test_linear_functions_are_transposed(make):
    check(make(sym_optimize)(P, X), make(lambda f: f)(P, X))
    check(jax.jit(make(sym_optimize))(P, X), make(lambda f: f)(P, X))


def test_prepared_functions_close_over_traced_values():
    def f(p, x):
        g = sym_optimize(lambda y, w: adapted(p, y @ w), frozen="w")
        return g.prepare(w=W)(x)

    ours = jax.jit(jax.grad(lambda p: f(p, X).sum()))
    for p in (P, jax.tree.map(jnp.cos, P)):
        check(ours(p), jax.grad(lambda p: adapted(p, X @ W).sum())(p))


def test_no_tracer_that_was_closed_over_is_kept():
    seen = []

    def outer(p, x):
        seen.append(weakref.ref(p["a"]))
        return sym_optimize(lambda y: adapted(p, y))(x)

    for x in (X, X[:2]):
        check(jax.jit(outer)(P, x), adapted(P, x))
    gc.collect()
    assert [ref() for ref in seen] == [None, None]


def test_references_may_be_closed_over():
    def counted(f):
        def run(p, x):
            total = jax.new_ref(jnp.zeros(()))

            def body(y):
                total[...] += y.sum()
                return adapted(p, y)

            return f(body)(x), f(body)(2 * x), total[...]

        return run

    check(jax.jit(counted(sym_optimize))(P, X), jax.jit(counted(lambda f: f))(P, X))


def test_closures_over_traced_values_are_not_verified():
    f = lambda p: sym_optimize(lambda y: adapted(p, y), verify="first")(X).sum()  # noqa: E731
    check(jax.grad(f)(P), jax.grad(lambda p: adapted(p, X).sum())(P))


@pytest.fixture
def mesh():
    if jax.device_count() < 8:
        pytest.skip("needs 8 devices: XLA_FLAGS=--xla_force_host_platform_device_count=8")
    return Mesh(np.array(jax.devices()[:8]), ("d",))


def test_shardings(mesh):
    rows = NamedSharding(mesh, PartitionSpec("d"))
    x = jax.device_put(normal(8, N), rows)
    f = sym_optimize(jax.jit(lora, in_shardings=rows, out_shardings=rows))
    assert f(x).sharding == rows
    check(f(x), lora(x))
    g = lambda x: lax.with_sharding_constraint(lora(x), rows)  # noqa: E731
    assert sym_optimize(g)(x).sharding.is_equivalent_to(rows, 2)


def test_shard_map_and_collectives(mesh):
    def local(f):
        return lambda x: lax.psum(f(x), "d")

    def mapped(f):
        spec = PartitionSpec("d")
        return jax.shard_map(local(f), mesh=mesh, in_specs=spec, out_specs=PartitionSpec())

    x = normal(8, N)
    check(mapped(sym_optimize(lora))(x), mapped(lora)(x))
    check(sym_optimize(mapped(lora))(x), mapped(lora)(x))


def affine_steps(x, y):
    start = 0 * x[0]
    return lax.scan(lambda c, v: (0.9 * c + v, c @ y), start, x)[1]


def swapped(x, y):
    made = jax.nn.softmax(lax.psum(x @ y, "d") @ x.T) @ x
    return made + lax.ppermute(made, "d", [(k, 1 - k) for k in range(2)])


def of_replicated(x, y):
    return y @ (y[:, :2] @ y[:2]), (x @ y[:, :2]) @ y[:2]


@pytest.mark.parametrize("f", [attention_to, affine_steps, swapped, of_replicated])
def test_checked_manual_axes(mesh, f):
    """The optimised program has the types of the original: they decide sums of gradients."""
    rows = PartitionSpec("d")
    mesh = Mesh(mesh.devices[:2], ("d",))

    def mapped(f):
        def local(x, y):
            return sum(_summed(jnp.sin(out)) for out in jax.tree.leaves(f(x, y)))

        specs = (rows, PartitionSpec())
        return jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=PartitionSpec())

    args = normal(16, 8), normal(8, 8, seed=1) / 4
    g = sym_optimize(f, kernels="always", on_unsupported="error")
    both = lambda f: jax.jit(jax.value_and_grad(mapped(f), (0, 1)))(*args)  # noqa: E731
    check(both(g), both(f))
    found = jax.make_jaxpr(mapped(g))(*args)
    assert jax_internals.has_primitive(found, "sym_call")


def _summed(x):
    axes = tuple(jax.typeof(x).mat.varying)
    return lax.psum(x.sum(), axes) if axes else x.sum()
