"""Attention kernels that `kernels="auto"` takes on GPUs, by their profiles; no GPU is needed."""

import math
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from symjax_rewrite import jax_internals, sym_optimize
from symjax_rewrite.cost.device_profiles import CPU, DEVICES, device_profile, known_device
from symjax_rewrite.pallas_kernels.backend import gpu_at_hand, planning_for

pytestmark = pytest.mark.usefixtures("one_device")

KERNELS = ("b200", "h200", "h100", "a100", "l4")
NO_KERNELS = ("t4", "v100")
B, H, T = 4, 16, 4096


def stable(s):
    return jax.nn.softmax(s, axis=-1)


def naive(s):
    e = jnp.exp(s - s.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def attention(softmax=stable, causal=True):
    def attend(q, k, v):
        s = jnp.einsum("bhtd,bhsd->bhts", q, k) / math.sqrt(q.shape[-1])
        if causal:
            s = jnp.where(jnp.tril(jnp.ones(s.shape[-2:], bool)), s, -jnp.inf)
        return jnp.einsum("bhts,bhsd->bhtd", softmax(s), v)

    return attend


def gradients(fun):
    def both(q, k, v, out):
        made, pull = jax.vjp(fun, q, k, v)
        return made, pull(out)

    return both


def arrays(width, count, t=T, dtype=jnp.bfloat16):
    return [jax.ShapeDtypeStruct((B, H, t, width), dtype)] * count


def folds(fun, args, device):
    """The report's fold entries, and the kernels of the emitted program."""
    optimised = sym_optimize(fun, device=device)
    report = optimised.explain(*args)
    with planning_for(DEVICES[device]):
        emitted = jax.make_jaxpr(optimised)(*args)
    return [r for r in report.routes if r.name == "fold"], kernels_of(emitted.jaxpr), report


def kernels_of(jaxpr):
    count = 0
    for eqn in jaxpr.eqns:
        count += eqn.primitive.name == "pallas_call"
        branches = eqn.primitive.name == "cond"  # of platforms: one of them runs
        inner = [kernels_of(b.jaxpr) for b in jax_internals.bodies(eqn)]
        count += max(inner, default=0) if branches else sum(inner)
    return count


def kernels_in(jaxpr):
    """Yield the kernels of a program, without the loops beside them."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "pallas_call":
            yield eqn.params["jaxpr"]
        for body in jax_internals.bodies(eqn):
            yield from kernels_in(body.jaxpr)


def products_in(jaxpr):
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "dot_general":
            yield eqn
        for body in jax_internals.bodies(eqn):
            yield from products_in(body.jaxpr)


@pytest.mark.parametrize("device", KERNELS)
@pytest.mark.parametrize("width", [64, 128, 256])
@pytest.mark.parametrize("causal", [True, False])
def test_attention_is_one_kernel(device, width, causal):
    softmax = stable if width != 128 else naive
    routes, count, report = folds(attention(softmax, causal), arrays(width, 3), device)
    assert [r.taken for r in routes] == [True], report
    assert count == 1
    assert report.after.largest_intermediate < 2e8 < 1e9 < report.before.largest_intermediate


@pytest.mark.parametrize("device", KERNELS)
@pytest.mark.parametrize(
    ("width", "softmax", "causal"),
    [(64, stable, True), (64, naive, True), (128, stable, True), (128, stable, False)],
)
def test_the_gradient_of_attention_is_three_kernels(device, width, softmax, causal):
    routes, count, report = folds(gradients(attention(softmax, causal)), arrays(width, 4), device)
    assert [r.taken for r in routes] == [True], report
    assert count == 3  # forward, dQ, and dK with dV
    assert report.after.peak_bytes < 2e9 < 1e10 < report.before.peak_bytes


def test_the_gradient_of_the_librarys_attention_is_folds():
    """Its products of float32 scores by bfloat16 operands ask for bfloat16's rate."""

    def loss(q, k, v):
        return jnp.sum(jax.nn.dot_product_attention(q, k, v).astype(jnp.float32) ** 2)

    args = [jax.ShapeDtypeStruct((B, T, H, 128), jnp.bfloat16)] * 3
    routes, _, report = folds(jax.grad(loss, (0, 1, 2)), args, "h200")
    assert [r.taken for r in routes] == [True], report


def banded(q, k, v):
    far = jnp.arange(T // 4)[:, None] - jnp.arange(T // 4)
    s = jnp.where((far >= 0) & (far < 256), jnp.einsum("bhtd,bhsd->bhts", q, k), -jnp.inf)
    return jnp.einsum("bhts,bhsd->bhtd", stable(s), v)


def capped(q, k, v):
    """Attention of which half of the weights are dropped after the softmax."""
    wide = {"preferred_element_type": jnp.float32}
    s = 20 * jnp.tanh(jnp.einsum("bhtd,bhsd->bhts", q, k, **wide) / 160)
    kept = (jnp.arange(T // 4)[:, None] + jnp.arange(T // 4)) % 2
    return jnp.einsum("bhts,bhsd->bhtd", (stable(s) * kept).astype(v.dtype), v)


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize(
    ("fun", "dtype", "numerics", "kernels"),
    [
        (banded, "bfloat16", "reassoc", 3),
        (capped, "bfloat16", "reassoc", 3),
        (banded, "float32", "reassoc", 3),
        (banded, "float16", "reassoc", 4),  # TF32 would round its weights
        (banded, "float16", "cancels", 3),
    ],
)
def test_no_kernel_sums_the_derivative_of_the_normaliser(fun, dtype, numerics, kernels, inside):
    """Σ_n p·(Σ_d dO·v) is Σ_d dO·(Σ_n p·v), of the result of the forward pass."""
    options = {"device": "h200", "numerics": numerics}
    attend = sym_optimize(fun, **options) if inside else fun

    def loss(q, k, v):
        return jnp.sum(attend(q, k, v).astype(jnp.float32) ** 2)

    made = jax.grad(loss, (0, 1, 2))
    made = made if inside else sym_optimize(made, **options)
    with planning_for(DEVICES["h200"]):
        args = arrays(128, 3, t=T // 4, dtype=jnp.dtype(dtype))
        assert kernels_of(jax.make_jaxpr(made)(*args).jaxpr) == kernels


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_sum_for_the_normaliser_is_the_product_of_the_result(dtype):
    """The forward pass has one product by values, in bfloat16 in two parts, at their precision."""

    def loss(q, k, v):
        with jax.default_matmul_precision("highest"):
            return jnp.sum(capped(q, k, v).astype(jnp.float32) ** 2)

    with planning_for(DEVICES["h200"]):
        made = sym_optimize(jax.grad(loss, (0, 1, 2)), device="h200", kernels="always")
        closed = jax.make_jaxpr(made)(*arrays(128, 3, t=T // 4, dtype=jnp.dtype(dtype)))
    (forward, *_) = kernels_in(closed.jaxpr)
    highest = [e.params["precision"] is not None for e in products_in(forward)]
    assert highest == ([True, True] if dtype == "float32" else [True, False, False])


@pytest.mark.parametrize("device", NO_KERNELS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("count", [3, 4])
def test_gpus_without_kernels_keep_xlas_form(device, dtype, causal, count):
    fun = attention(causal=causal)
    fun = fun if count == 3 else gradients(fun)
    args = arrays(64, count, t=1024, dtype=jnp.dtype(dtype))
    routes, made, report = folds(fun, args, device)
    assert routes and not any(r.taken for r in routes), report
    assert made == 0


@pytest.mark.parametrize("device", NO_KERNELS)
def test_reports_price_a_fold_as_its_device_runs_it(device):
    """Without kernels the price of a fold that is taken is that of loops."""
    routes, _, report = folds(attention(), arrays(64, 3, t=16384), device)
    assert [r.taken for r in routes] == [True], report
    flops = report.after.flops / DEVICES[device].peak("bfloat16")
    assert report.after.seconds > 4 * flops


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("device", ["h200", "l4"])
def test_the_gradient_of_a_sum_of_attention_stores_no_pairs(device, causal):
    """Its upstream derivative is a constant: a product with it is a sum, of a size of the keys."""

    def loss(q, k, v):
        return jnp.sum(attention(causal=causal)(q, k, v))

    args = arrays(64, 3, t=1024)
    routes, count, report = folds(jax.grad(loss, (0, 1, 2)), args, device)
    assert [r.taken for r in routes] == [True], report
    assert count == 3
    assert report.after.peak_bytes < 1e8 < B * H * 1024**2 * 2, report


def test_where_memory_is_short_loops_are_taken():
    """32 GB of scores do not fit into 16 GB."""
    routes, made, report = folds(attention(), arrays(64, 3, t=16384), "t4")
    assert [r.taken for r in routes] == [True], report
    assert made == 0


@pytest.mark.parametrize("device", KERNELS)
def test_decoding_costs_no_more_than_written(device):
    """One query over a filled cache is bound by the cache's bytes; a kernel spares launches."""
    q, k, v = (jax.ShapeDtypeStruct((B, H, t, 128), jnp.bfloat16) for t in (1, T, T))
    routes, count, report = folds(attention(causal=False), (q, k, v), device)
    assert [r.name for r in routes] == ["fold"], report  # taken or refused, it is seen
    assert count == routes[0].taken >= (device == "h200")
    assert report.after.bytes <= report.before.bytes
    assert report.after.seconds <= report.before.seconds


@pytest.mark.parametrize("copied", [False, True])
def test_queries_of_a_group_are_rows_of_one_block(copied):
    """A step of decoding reads the keys of a group once."""
    groups = 4

    def decode(q, k, v):
        if copied:
            return jax.nn.dot_product_attention(q, *(jnp.repeat(x, groups, 2) for x in (k, v)))
        return jax.nn.dot_product_attention(q, k, v)

    shapes = (B, 1, H, 128), *[(B, T, H // groups, 128)] * 2
    args = [jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in shapes]
    with planning_for(DEVICES["h200"]):
        closed = jax.make_jaxpr(sym_optimize(decode, device="h200"))(*args)
    equations = jax_internals.all_equations(closed)
    (kernel,) = (e for e in equations if e.primitive.name == "pallas_call")
    first, *_ = kernel.params["grid_mapping"].grid
    assert first == B * H // groups


@pytest.mark.parametrize("kernels", ["auto", "always"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_values_of_one_fold_share_one_run(kernels, dtype):
    """A value that waits for the maximum of a fold does not make the fold run twice."""
    args = arrays(64, 4, dtype=jnp.dtype(dtype))
    optimised = sym_optimize(gradients(attention()), device="h200", kernels=kernels)
    with planning_for(DEVICES["h200"]):
        assert kernels_of(jax.make_jaxpr(optimised)(*args).jaxpr) == 3


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA L4", "l4"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA A100-SXM4-40GB", "a100"),
        ("NVIDIA GeForce RTX 4090", "4090"),
        ("Tesla T4", "t4"),
        ("Tesla V100-SXM2-16GB", "v100"),
    ],
)
def test_device_kinds(kind, name):
    assert known_device(kind) is DEVICES[name]


def test_an_unknown_gpu_is_scaled_from_one_of_its_generation():
    device = SimpleNamespace(
        device_kind="NVIDIA GeForce RTX 4070", platform="gpu", compute_capability="8.9",
        core_count=46, memory_stats=lambda: {"bytes_limit": 11 << 30},
    )  # fmt: skip
    found, like = device_profile(None, device), DEVICES["4090"]
    assert found.peak("bfloat16") == pytest.approx(46 / 128 * like.peak("bfloat16"))
    assert found.memory_bytes == 11 << 30
    assert found.runs_pallas
    old = SimpleNamespace(
        device_kind="Tesla P100", platform="gpu", compute_capability="6.0", core_count=56,
        memory_stats=lambda: None,
    )  # fmt: skip
    assert not device_profile(None, old).runs_pallas
    assert device_profile(None) is CPU


def test_products_are_priced_by_their_operands():
    h200 = DEVICES["h200"]
    assert h200.peak("bfloat16") > 1.5 * h200.peak("float32") > 5 * h200.peak("float32", "highest")
    for algorithm in ("BF16_BF16_F32", jax.lax.DotAlgorithmPreset.BF16_BF16_F32):
        assert h200.peak("float32", algorithm) == h200.peak("bfloat16")
    assert h200.peak("float32", "TF32_TF32_F32_X3") == h200.peak("float32") / 3
    assert h200.peak("float32", "F32_F32_F32") == h200.peak("float32", "highest")
    assert DEVICES["t4"].peak("float32") == DEVICES["t4"].peak("float32", "highest")


def test_kernels_are_planned_for_the_profile():
    with planning_for(DEVICES["l4"]):
        assert gpu_at_hand().shared_bytes == 101_376
        assert gpu_at_hand().multiprocessors == 58
    with planning_for(DEVICES["t4"]):
        assert gpu_at_hand().capability == 7.5
