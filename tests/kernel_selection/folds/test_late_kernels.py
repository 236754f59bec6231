"""Kernels of a program that is planned for a CPU: traced only where it is lowered for a GPU."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

from symjax_rewrite import jax_internals, jax_kernels, sym_optimize
from symjax_rewrite.pallas_kernels.fold import triton, xla
from tests.pallas_kernels import gpu_compiler

pytestmark = pytest.mark.usefixtures("one_device")
LATE, KERNEL = "sym_late_kernel", "pallas_call"


def nearest(x, y):
    return jnp.min(jnp.sum((x[:, None] - y[None]) ** 2, -1), 1)


def specs(rows=6000):
    return [jax.ShapeDtypeStruct((rows, 3), jnp.float32)] * 2


@pytest.mark.filterwarnings("ignore:.*[Tt]riton.*:DeprecationWarning")
def test_late_kernel_is_traced_by_the_lowering():
    with gpu_compiler.described("H200"):
        traced = sym_optimize(nearest, device="cpu").trace(*specs())
        assert jax_internals.has_primitive(traced.jaxpr, LATE)
        assert not jax_internals.has_primitive(traced.jaxpr, KERNEL)
        lowered = {p: traced.lower(lowering_platforms=(p,)).as_text() for p in ("cpu", "cuda")}
    assert ["custom_call" in lowered[p] for p in lowered] == [False, True]


def test_no_kernel_is_traced_for_the_shapes_of_a_fold(monkeypatch):
    """A fold whose results are read before all its operands exist is run as a part of its own."""

    def soft_nearest_and_mean(x, y):
        distances = jnp.sum((x[:, None] - y[None]) ** 2, -1)
        return jax.nn.logsumexp(-distances, 1), distances.mean()

    monkeypatch.setattr(triton, "fold_triton", lambda *_: pytest.fail("a kernel is traced"))
    report = sym_optimize(soft_nearest_and_mean, device="cpu").explain(*specs())
    assert [use.name for use in report.routes if use.taken] == ["fold"]


def _in_a_loop(x, ys):
    for y in ys:
        x = x + nearest(x, y)[:, None]
    return x


def _line_by_line(x, ys):
    x = x + jnp.min(jnp.sum((x[:, None] - ys[0][None]) ** 2, -1), 1)[:, None]
    x = x + jnp.min(jnp.sum((x[:, None] - ys[1][None]) ** 2, -1), 1)[:, None]
    return x + jnp.min(jnp.sum((x[:, None] - ys[2][None]) ** 2, -1), 1)[:, None]


@pytest.mark.parametrize(("fun", "count", "lines"), [(_in_a_loop, 5, 1), (_line_by_line, 3, 3)])
def test_equal_folds_of_one_line_are_staged_once(monkeypatch, fun, count, lines):
    """Their equations keep the user's line. The first reads its points in another order."""
    staged, of = [], xla.fold_xla
    monkeypatch.setattr(xla, "fold_xla", lambda spec, *xs: (staged.append(spec), of(spec, *xs))[1])
    x, y = specs()
    with jax.numpy_rank_promotion("allow"):
        jaxpr = sym_optimize(fun, device="cpu").trace(x, [y] * count).jaxpr
    folds = [e for e in jax_internals.all_equations(jaxpr) if e.primitive.name == LATE]
    assert len(folds) == count and len({*map(jax_internals.source_line, folds)}) == lines
    assert len({*staged}) <= 2 and len(staged) == max(len({*staged}), lines)


@pytest.mark.filterwarnings("ignore:.*[Tt]riton.*:DeprecationWarning")
def test_equal_kernels_for_a_gpu_are_staged_once(monkeypatch):
    staged, of = [], triton.fold_triton
    fold = lambda spec, *xs: (staged.append(spec), of(spec, *xs))[1]  # noqa: E731
    monkeypatch.setattr(triton, "fold_triton", fold)
    x, y = specs()
    with gpu_compiler.described("H200"), jax.numpy_rank_promotion("allow"):
        ours = sym_optimize(_in_a_loop, device="h200", kernels="always")
        jaxpr = ours.trace(x, [y] * 5).jaxpr
    kernels = [e for e in jax_internals.all_equations(jaxpr) if e.primitive.name == KERNEL]
    assert len(kernels) >= 5 and 0 < len(staged) == len({*staged}) <= 2


def test_a_program_is_lowered_for_a_gpu_without_one():
    traced = jax.jit(sym_optimize(nearest)).trace(*specs())
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert ("custom_call" in text) is not jax_kernels.triton_asks_for_device()


@pytest.mark.parametrize("platforms", [("cuda",), ("cpu", "cuda")])
def test_a_program_is_exported_for_gpus_without_one(platforms):
    exported = export.export(jax.jit(sym_optimize(nearest)), platforms=platforms)(*specs())
    assert "custom_call" not in exported.mlir_module()


@pytest.mark.filterwarnings("ignore:.*[Tt]riton.*:DeprecationWarning")
def test_kernel_in_the_jaxpr_is_left_out_of_an_export():
    with gpu_compiler.described("H200"):
        optimised = sym_optimize(nearest, device="h200", kernels="always")
        traced = optimised.trace(*specs())
        assert jax_internals.has_primitive(traced.jaxpr, KERNEL)
        assert "custom_call" in traced.lower(lowering_platforms=("cuda",)).as_text()
        exported = export.export(optimised, platforms=("cuda",))(*specs())
    assert "custom_call" not in exported.mlir_module()


def test_late_kernel_runs_and_is_batched():
    def late(x, w):
        aval = jax.typeof(x)
        product = lambda *xs: [xs[0] * xs[1]]  # noqa: E731
        return jax_kernels.late_kernel(product, product, [aval], x, w)[0]

    x, w = np.arange(6.0, dtype="float32").reshape(2, 3), np.arange(3.0, dtype="float32")
    np.testing.assert_array_equal(late(x[0], w), x[0] * w)
    for fun in (jax.vmap(late, (0, None)), jax.jit(jax.vmap(late, (0, None)))):
        np.testing.assert_array_equal(fun(x, w), x * w)
    np.testing.assert_array_equal(jax.vmap(late, (1, 0), 0)(x, w), (x * w).T)


def test_batched_kernel_stays_in_the_jaxpr():
    x = jnp.ones(3)
    kernel = jax.make_jaxpr(lambda y: [jnp.sin(y)])(x)
    plain = lambda y: [jnp.sin(y)]  # noqa: E731
    run = lambda y: jax_kernels.late_kernel(kernel, plain, kernel.out_avals, y)  # noqa: E731
    assert jax_internals.has_primitive(jax.make_jaxpr(jax.vmap(run))(jnp.ones((2, 3))), "sin")
