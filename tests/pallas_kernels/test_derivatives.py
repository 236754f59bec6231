"""Every derivative of every kernel is that of its definition in plain JAX, on every device."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from symjax_rewrite.pallas_kernels.fold import xla as fold_xla
from symjax_rewrite.pallas_kernels.fold.attention import Attention, forward
from symjax_rewrite.pallas_kernels.fold.fold import fold
from symjax_rewrite.pallas_kernels.fold.reference import fold_reference
from symjax_rewrite.pallas_kernels.fold.tiling import Blocks
from symjax_rewrite.pallas_kernels.norm import layer as norm_layer
from symjax_rewrite.pallas_kernels.norm.norm_linear import norm_linear
from symjax_rewrite.pallas_kernels.norm.xla import norm_xla
from symjax_rewrite.pallas_kernels.scan.scan import scan
from symjax_rewrite.pallas_kernels.scan.selective_scan import SelectiveScan, selective_scan
from symjax_rewrite.pallas_kernels.scan.selective_scan import forward as selective
from symjax_rewrite.pallas_kernels.scan.sequential import scan_reference

# Pallas-Triton is deprecated from jax 0.11 on, and still there
pytestmark = pytest.mark.filterwarnings("ignore:.*[Tt]riton.*:DeprecationWarning")

SELECTIVE = SelectiveScan(1, 20, 2, 3, softplus=True, last=True)
NORM = norm_layer.forward(norm_layer.NormLinear(3, 8, 4))
CAUSAL = forward(Attention(1, 130, 130, 1, 4, causal=True))


def whole_selective(*xs):
    x, A, spec = xs[0], xs[2], selective(SELECTIVE)
    shapes = [spec.shape(k) for k in range(5)]
    y, last = scan_reference(spec, *(v.reshape(s) for v, s in zip(xs, shapes, strict=True)))
    return y.reshape(x.shape), last.reshape(1, *A.shape)


def draw(*shapes, least=-1.0):
    """Uniform between `least` and 1; as a third operand, the A of a selective scan, negative."""
    rng = np.random.default_rng(0)
    drawn = [jnp.asarray(rng.uniform(least, 1, s), jnp.float32) for s in shapes]
    return [-abs(x) if k == 2 and len(shapes) == 5 else x for k, x in enumerate(drawn)]


KERNELS = {
    "selective_scan": (
        lambda *xs: selective_scan(*xs, softplus=True, return_last=True),
        whole_selective,
        draw((1, 20, 2), (1, 20, 2), (2, 3), (1, 20, 3), (1, 20, 3)),
    ),
    "scan": (
        lambda *xs: scan(selective(SELECTIVE), *xs),
        lambda *xs: scan_reference(selective(SELECTIVE), *xs),
        draw(*(selective(SELECTIVE).shape(k) for k in range(5))),
    ),
    "fold": (
        lambda *xs: fold(CAUSAL, *xs),
        lambda *xs: fold_reference(CAUSAL, *xs),
        draw(*(CAUSAL.shape(k) for k in range(3))),
    ),
    "norm_linear": (
        lambda *xs: norm_linear(NORM, *xs),
        lambda *xs: norm_xla(NORM, *xs),
        draw(*(a.shape for a in NORM.avals), least=0.5),
    ),
}


def derivatives(run, operands):
    """First and second derivatives in both modes and both orders, and those under vmap."""

    def loss(*xs):
        return sum(jnp.sum(jnp.sin(y)) for y in jax.tree.leaves(run(*xs)))

    def slope(*xs):
        return sum(jnp.sum(jnp.sin(x)) for x in jax.grad(loss, tuple(range(len(xs))))(*xs))

    def push(f):
        return lambda *xs: jax.jvp(f, xs, xs)[1]

    def both(f):
        return lambda *xs: jax.vmap(lambda x: f(x, *xs[1:]))(jnp.stack([xs[0], 2 * xs[0]]))

    return {
        "forward": push(loss)(*operands),
        "backward": slope(*operands),
        "backward twice": jax.grad(slope)(*operands),
        "forward over backward": push(slope)(*operands),
        "backward over forward": jax.grad(push(loss))(*operands),
        "vmap of backward": both(jax.grad(loss))(*operands),
        "backward of vmap": jax.grad(lambda *xs: jnp.sum(both(loss)(*xs)))(*operands),
        "forward of vmap": push(both(loss))(*operands),
    }


@pytest.mark.slow
@pytest.mark.parametrize("name", KERNELS)
def test_derivatives_are_those_of_the_definition(name):
    run, definition, operands = KERNELS[name]
    got = jax.jit(lambda *xs: derivatives(run, xs))(*operands)
    want = jax.jit(lambda *xs: derivatives(definition, xs))(*operands)
    for mode, x in want.items():
        scale = np.abs(x).max() + 1e-6
        np.testing.assert_allclose(got[mode] / scale, x / scale, atol=1e-4, err_msg=mode)


@pytest.mark.parametrize("name", KERNELS)
def test_derivatives_lower_for_a_gpu(name, lower):
    run, _, operands = KERNELS[name]
    if name != "selective_scan":  # its derivatives are those of the scan
        lower(jax.jit(lambda *xs: derivatives(run, xs)), operands)  # raises without Pallas' rules
    assert "triton" in lower(jax.jit(run), operands).as_text()


def test_a_kernel_asked_for_by_name_is_differentiated_like_any():
    operands = draw(*(CAUSAL.shape(k) for k in range(3)))

    def loss(backend):
        return lambda *xs: jnp.sum(jnp.sin(fold(CAUSAL, *xs, backend=backend)[0]))

    names = ("reference", "xla", "triton")
    want, *found = jax.jit(lambda *xs: [jax.grad(loss(name))(*xs) for name in names])(*operands)
    for got in found:
        np.testing.assert_allclose(got, want, atol=1e-5)


def test_results_of_a_kernel_need_no_cotangents():
    """The last state is not differentiated: its cotangent is absent, not an array of zeros."""
    kernel, whole, operands = KERNELS["selective_scan"]
    ours, theirs = (jax.grad(lambda x, f=f: f(x, *operands[1:])[0].sum()) for f in (kernel, whole))
    got, want = jax.jit(lambda x: (ours(x), theirs(x)))(operands[0])
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


def test_a_band_that_decides_how_long_a_loop_is_has_a_reverse_mode(monkeypatch):
    """Several blocks of columns, of which each block of rows reads its own."""
    monkeypatch.setattr(fold_xla, "xla_blocks", lambda spec: Blocks(32, 32, spec.batch))
    run, definition, operands = KERNELS["fold"]
    with pytest.raises(ValueError, match="while_loop"):
        jax.grad(lambda *xs: jnp.sum(fold_xla.fold_xla(CAUSAL, *xs)[0]))(*operands)
    ours, theirs = (jax.grad(lambda *xs, f=f: jnp.sum(f(*xs)[0] ** 2)) for f in (run, definition))
    got, want = jax.jit(lambda *xs: (ours(*xs), theirs(*xs)))(*operands)
    np.testing.assert_allclose(got, want, atol=1e-5)


def test_gradients_of_many_scans_at_once_keep_no_states():
    shapes = [(1, 4096, 64), (1, 4096, 64), (64, 16), (1, 4096, 16), (1, 4096, 16)]
    many = [jax.ShapeDtypeStruct((2, *s), jnp.float32) for s in shapes]
    scans = jax.vmap(lambda *xs: jnp.sum(jnp.asarray(selective_scan(*xs))))
    grad = jax.grad(lambda *xs: jnp.sum(scans(*xs)), argnums=(0, 1, 2, 3, 4))
    memory = jax.jit(grad).lower(*many).compile().memory_analysis()
    assert memory is not None
    assert memory.temp_size_in_bytes < 0.25 * 2 * 4 * 4096 * 64 * 16


@pytest.mark.parametrize("transform", [lambda f: f, jax.jit], ids=["plain", "jit"])
def test_scan_is_transposed_in_its_linear_operands(transform):
    run, definition, (x, *rest) = KERNELS["selective_scan"]
    given = jax.jit(definition)(x, *rest)
    (got,) = jax.linear_transpose(transform(lambda x: run(x, *rest)), x)(given)
    theirs = lambda ys: jax.vjp(lambda x: definition(x, *rest), x)[1](ys)  # noqa: E731
    (want,) = jax.jit(theirs)(given)
    np.testing.assert_allclose(got, want, atol=1e-4)
