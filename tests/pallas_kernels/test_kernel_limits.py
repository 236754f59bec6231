"""Specs that a backend cannot run are refused with a reason before lowering."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from symjax_rewrite import sym_optimize
from symjax_rewrite.errors import KernelError
from symjax_rewrite.pallas_kernels.fold import triton as fold_triton
from symjax_rewrite.pallas_kernels.fold import xla as fold_xla
from symjax_rewrite.pallas_kernels.fold.fold import fold
from symjax_rewrite.pallas_kernels.fold.spec import (
    FoldSpec,
    KeyedSums,
    Operand,
    Sums,
    Tile,
    WeightedTerm,
)
from symjax_rewrite.pallas_kernels.norm import triton as norm_triton
from symjax_rewrite.pallas_kernels.norm.layer import NormLinear, forward
from symjax_rewrite.pallas_kernels.norm.norm_linear import norm_linear
from symjax_rewrite.pallas_kernels.norm.spec import NormGroup
from symjax_rewrite.pallas_kernels.scan import triton as scan_triton
from symjax_rewrite.pallas_kernels.scan.scan import scan
from symjax_rewrite.pallas_kernels.scan.spec import Readout, ScanProgram
from tests.pallas_kernels.scan.cases import plain

DECAYS = {
    "erf": lax.erf,
    "lgamma": lambda x: lax.lgamma(jnp.abs(x) + 1),
    "round": lambda x: lax.round(x, lax.RoundingMethod.TO_NEAREST_EVEN),
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
}
deprecated = pytest.mark.filterwarnings("ignore:.*[Tt]riton.*:DeprecationWarning")


def moving(decay):
    """h ← decay(x)·h + x over 64 steps of 8."""

    def f(x):
        return lax.scan(lambda h, x: ((h := decay(x) * h + x), h), jnp.zeros(8), x)[1]

    return f


@deprecated
@pytest.mark.lowering
@pytest.mark.parametrize("name", DECAYS)
def test_a_scan_with_operations_that_triton_lacks_stays_a_loop(name, lower, one_device):
    optimised = sym_optimize(moving(DECAYS[name]), device="h200")
    aval = jax.ShapeDtypeStruct((64, 8), jnp.float32)
    text = lower(jax.jit(optimised), [aval]).as_text()
    assert "triton" not in text
    routes = optimised.explain(aval).routes
    assert any("Triton cannot lower" in r.reason for r in routes), [r.reason for r in routes]


@deprecated
@pytest.mark.lowering
def test_a_scan_with_operations_that_triton_has_is_a_kernel(lower, one_device):
    optimised = sym_optimize(moving(jnp.tanh), device="h200")
    text = lower(jax.jit(optimised), [jax.ShapeDtypeStruct((64, 8), jnp.float32)]).as_text()
    assert "triton" in text


@pytest.mark.parametrize("where", ["coefficients", "program", "finish"])
def test_every_program_of_a_scan_is_asked(where):
    spec = plain(8, (4, 2), ("t", "0", "1"), ("t", "0", "1"))
    assert scan_triton.supports(spec)
    if where == "coefficients":
        program = ScanProgram(lambda v, t: (lax.erf(v[0]), v[1]), (0, 1))
        spec = replace(spec, coefficients=program)
    elif where == "program":
        spec = replace(spec, readouts=(Readout(ScanProgram(lambda h, v, t: lax.erf(h[1]))),))
    else:
        finish = ScanProgram(lambda total, v, t: lax.erf(total))
        spec = replace(spec, readouts=(Readout(None, over=("1",), finish=finish),))
    assert str(scan_triton.supports(spec)) == "Triton cannot lower erf"
    xs = [np.full(spec.shape(k), 0.5, np.float32) for k in range(2)]
    assert np.isfinite(scan(spec, *xs)[0]).all()


def pairs(rows, columns, batch=1):
    """Row sums of x_i·y_j for each of `batch` y; x has no batch, so that results are larger."""
    return FoldSpec(
        sizes=(("b", batch), ("m", rows), ("n", columns)),
        batch=("b",),
        row="m",
        col="n",
        operands=(Operand(("m",)), Operand(("b", "n"))),
        contractions=(),
        tile=Tile(lambda dots, values, i, j: values[0] * values[1], reads=(0, 1)),
        outputs=(Sums((WeightedTerm(None),)),),
    )


def test_folds_of_more_elements_than_addresses_are_refused():
    assert fold_triton.supports(pairs(2**16, 64, 2**14))
    assert "a result has" in str(fold_triton.supports(pairs(2**16, 64, 2**16)))
    assert "an operand has" in str(fold_triton.supports(pairs(64, 2**16, 2**16)))
    unread = replace(pairs(64, 2**31), operands=(Operand(("m",)), Operand(("b", "m"))))
    assert "an axis of" in str(fold_triton.supports(unread))


def test_sums_by_key_of_more_elements_than_numbers_are_refused():
    spec = replace(
        pairs(64, 64),
        tile=Tile(lambda dots, values, i, j: (values[0] * values[1], i, j), reads=(0, 1)),
        outputs=(KeyedSums((1, 2), (2**10, 2**10)),),
    )
    assert fold_xla.supports(spec)
    big = replace(spec, outputs=(KeyedSums((1, 2), (2**16, 2**16)),))
    assert "sums by key" in str(fold_xla.supports(big))
    assert "an axis of" in str(fold_xla.supports(pairs(64, 2**31)))


def test_scans_of_more_elements_than_addresses_are_refused():
    axes = ("t", "0", "1")
    assert scan_triton.supports(plain(2**10, (2**10, 2**10), axes, axes))
    big = plain(2**12, (2**10, 2**10), axes, axes)
    assert "2^31" in str(scan_triton.supports(big))
    results = plain(2**12, (2**10, 2**10), ("t", "0"), ("t", "1"))
    assert "2^31" in str(scan_triton.supports(results))


def test_norms_of_more_elements_than_addresses_are_refused():
    assert norm_triton.supports(NormGroup((forward(NormLinear(2**16, 64, 2**14)),)))
    big = NormGroup((forward(NormLinear(2**16, 64, 2**16)),))
    assert "2^31" in str(norm_triton.supports(big))


def fold_here():
    fold(pairs(32, 32), jnp.ones(32), jnp.ones((1, 32)), backend="triton")


def scan_here():
    spec = plain(8, (4,), ("t", "0"), ("t", "0"))
    scan(spec, jnp.ones((8, 4)), jnp.ones((8, 4)), backend="triton")


def norm_here():
    norm_linear(forward(NormLinear(16, 16, 16)), *[jnp.ones((16, 16))] * 2, backend="triton")


def optimised_here():
    f = sym_optimize(lambda x, y: jnp.sum(jnp.exp(-((x[:, None] - y) ** 2)), 1), kernels="triton")
    f(jnp.ones(64), jnp.ones(64))


def mapped_here():
    jax.vmap(lambda x: fold(pairs(32, 32), x, jnp.ones((1, 32)), backend="triton"))(
        jnp.ones((3, 32))
    )


HERE = [fold_here, scan_here, norm_here, optimised_here, mapped_here]


@deprecated
@pytest.mark.skipif(jax.default_backend() != "cpu", reason="needs a CPU alone: JAX_PLATFORMS=cpu")
@pytest.mark.parametrize("run", HERE, ids=lambda f: f.__name__)
def test_a_gpu_kernel_by_name_on_a_cpu_is_a_kernel_error(run):
    with pytest.raises(KernelError, match="cuda") as caught:
        run()
    assert caught.value.expected is not None
    assert 'kernels="auto"' in str(caught.value.remedy)
    assert caught.value.got == "cpu"


@deprecated
@pytest.mark.lowering
def test_a_gpu_kernel_by_name_is_lowered_for_a_gpu(lower):
    spec = pairs(32, 32)
    avals = [jax.ShapeDtypeStruct(spec.shape(k), jnp.float32) for k in range(2)]
    jitted = jax.jit(lambda *xs: fold(spec, *xs, backend="triton"))
    assert "triton" in lower(jitted, avals).as_text()
