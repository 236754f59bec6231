"""Norms and linear layers as people write them, and their training, compiled for an H200.

Needs the CUDA compiler (see `compile_h200`), no GPU.
"""

import re

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from symjax_rewrite import sym_optimize

pytestmark = [
    pytest.mark.usefixtures("one_device"),
    pytest.mark.lowering,
    # Pallas-Triton is deprecated from jax 0.11 on, and still there
    pytest.mark.filterwarnings("ignore:.*[Tt]riton.*:DeprecationWarning"),
]

K, H, HEADS = 1024, 4096, 256  # width, hidden units, width of the shared keys and values


def norm(x, g):
    f = x.astype(jnp.float32)
    return (f * lax.rsqrt(jnp.mean(f * f, -1, keepdims=True) + 1e-6)).astype(x.dtype) * g


def qkv(p, x):
    y = norm(x, p["g"])
    return y @ p["q"], y @ p["k"], y @ p["v"]


def qkv_stored_by_outputs(p, x):
    y = norm(x, p["g"])
    return tuple(jnp.einsum("...k,nk->...n", y, p[n]) for n in ("qT", "kT", "vT"))


def parallel_block(p, x):
    y = norm(x, p["g"])
    return (*qkv(p, x), jax.nn.silu(y @ p["a"]) * (y @ p["b"]))


def widened(p, x):
    f, g = x.astype(jnp.float32), p["g"].astype(jnp.float32)
    y = (f * lax.rsqrt(jnp.mean(f * f, -1, keepdims=True) + 1e-6) * g).astype(x.dtype)
    return x.astype(jnp.float32) + (y @ p["o"]).astype(jnp.float32)


def halves(p, x):
    y = norm(x, p["g"])
    return jnp.tanh((y @ p["a"]) / (1 + jax.nn.sigmoid(y @ p["b"])))


def block(p, x):
    q, k, v = qkv(p | {"k": p["q2"], "v": p["v2"]}, x)
    x = x + (jax.nn.sigmoid(q * k) * v) @ p["o"]
    y = norm(x, p["g"])
    return x + (jax.nn.silu(y @ p["a"]) * (y @ p["b"])) @ p["c"]


def loss(p, x):
    return jnp.mean(block(p, x).astype(jnp.float32) ** 2)


def arguments(rows, dtype="bfloat16"):
    shapes = {"g": (K,), "q": (K, K), "k": (K, HEADS), "v": (K, HEADS), "o": (K, K), "a": (K, H)}
    shapes |= {"b": (K, H), "c": (H, K), "qT": (K, K), "kT": (HEADS, K), "vT": (HEADS, K)}
    shapes |= {"q2": (K, K), "v2": (K, K)}
    p = {name: jax.ShapeDtypeStruct(s, dtype) for name, s in shapes.items()}
    return p, jax.ShapeDtypeStruct((rows, K) if rows else (K,), dtype)


def compiled(compile_h200, f, p, x):
    """`f` for an H200, its arguments one by one."""
    leaves, tree = jax.tree.flatten((p, x))
    return compile_h200(lambda *xs: f(*jax.tree.unflatten(tree, xs)), *leaves)


def launches(made) -> list[str]:
    """Return the launches of the entry computation, without bookkeeping."""
    entry = made.as_text().split("ENTRY")[1]
    kinds = "fusion|custom-call|reduce|transpose|copy|convert|while|dot|broadcast"
    return re.findall(rf" ({kinds})\(", entry)


@pytest.mark.parametrize("rows", [0, 1, 16, 300])
@pytest.mark.parametrize(
    "f", [qkv, qkv_stored_by_outputs, parallel_block, widened, halves], ids=lambda f: f.__name__
)
def test_products_of_one_norm_are_one_kernel(f, rows, compile_h200):
    """Beside it are products with γ before it, and sums of parts of k after it, if any."""
    made = compiled(compile_h200, sym_optimize(f, kernels="always"), *arguments(rows))
    assert launches(made).count("custom-call") == 1 and {*launches(made)} <= {
        "custom-call",
        "fusion",
    }


def test_64_bit_numbers_change_nothing(compile_h200):
    with jax.enable_x64(True):
        made = compiled(compile_h200, sym_optimize(qkv, kernels="always"), *arguments(16))
        assert launches(made) == ["custom-call"]


@pytest.mark.parametrize("rows", [16, pytest.param(256, marks=pytest.mark.sweep), 4096])
def test_a_step_of_training_is_no_more_work(rows, compile_h200):
    plain = jax.value_and_grad(loss)
    inside = jax.value_and_grad(sym_optimize(loss, device="h200"))
    outside = sym_optimize(plain, device="h200")
    made = [compiled(compile_h200, f, *arguments(rows)) for f in (plain, inside, outside)]
    counts = [len(launches(m)) for m in made]
    temporaries = [m.memory_analysis().temp_size_in_bytes for m in made]
    assert max(counts[1:]) <= counts[0]
    assert max(temporaries[1:]) <= 1.05 * temporaries[0]  # as for any rewrite
