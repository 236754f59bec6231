"""Attention by layout, scale, cast and surroundings: the second half of the table."""

import jax
import jax.numpy as jnp

from tests.kernel_selection.folds.spellings import FUNCTIONS, B, D, H, T, dot, out, spelling

# ------------------------------------------------------------------ layouts


@spelling
def two_dimensions(q, k, v):
    q, k, v = (x[0, :, 0] for x in (q, k, v))
    return jax.nn.softmax(q @ k.T / 3) @ v


@spelling
def three_dimensions(q, k, v):
    q, k, v = (x.reshape(B, T, H * D) for x in (q, k, v))
    return jnp.matmul(jax.nn.softmax(jnp.matmul(q, k.mT) / 4), v)


@spelling
def five_dimensions(q, k, v):
    q, k, v = (x.reshape(B, 1, T, H, D) for x in (q, k, v))
    p = jax.nn.softmax(jnp.einsum("xbthd,xbshd->xbhts", q, k))
    return jnp.einsum("xbhts,xbshd->xbthd", p, v)


@spelling
def merged_heads(q, k, v):
    q, k, v = (x.transpose(0, 2, 1, 3).reshape(B * H, T, D) for x in (q, k, v))
    o = jax.lax.batch_matmul(jax.nn.softmax(jax.lax.batch_matmul(q, k.swapaxes(1, 2)) / 3), v)
    return o.reshape(B, H, T, D).transpose(0, 2, 1, 3)


@spelling
def time_first(q, k, v):
    q, k, v = (x.transpose(1, 0, 2, 3) for x in (q, k, v))
    p = jax.nn.softmax(jnp.einsum("tbhd,sbhd->bhts", q, k) / 3)
    return jnp.einsum("bhts,sbhd->tbhd", p, v)


@spelling
def keys_as_rows(q, k, v):
    s = jnp.einsum("bshd,bthd->bhst", k, q) / 3
    return jnp.einsum("bhst,bshd->bthd", jax.nn.softmax(s, axis=-2), v)


@spelling
def middle_axis(q, k, v):
    s = jnp.einsum("bthd,bshd->btsh", q, k) / 3
    return jnp.einsum("btsh,bshd->bthd", jax.nn.softmax(s, axis=2), v)


@spelling
def dot_generals(q, k, v):
    s = jax.lax.dot_general(q, k, (((3,), (3,)), ((0, 2), (0, 2))))
    return jax.lax.dot_general(jax.nn.softmax(s / 3), v, (((3,), (1,)), ((0, 1), (0, 2))))


@spelling
def mapped(q, k, v):
    one = lambda q, k, v: jax.nn.softmax(q @ k.T / 3) @ v  # noqa: E731
    return jax.vmap(jax.vmap(one, (1, 1, 1), 1))(q, k, v)


@spelling
def mapped_queries(q, k, v):
    one = lambda q, k, v: jax.nn.softmax(k @ q) @ v  # noqa: E731
    rows = jax.vmap(one, (0, None, None))
    return jax.vmap(jax.vmap(rows, (1, 1, 1), 1))(q, k, v)


@spelling
def products_and_sums(q, k, v):
    s = (q[:, :, None] * k[:, None]).sum(-1)
    return (jax.nn.softmax(s, axis=2)[..., None] * v[:, None]).sum(2)


# ------------------------------------------------------------------ scales and casts


@spelling
def scale_split(q, k, v):
    scale = D**-0.25
    return out(jax.nn.softmax(dot(q * scale, k * scale)), v)


@spelling
def learnt_scale(q, k, v):
    scale = jnp.exp(jnp.asarray([0.1, -0.3], jnp.float32))[:, None, None]
    return out(jax.nn.softmax(dot(q, k) * scale), v)


@spelling
def scale_per_query(q, k, v):
    scale = jnp.log(2.0 + jnp.arange(T, dtype=jnp.float32))[:, None]
    return out(jax.nn.softmax(dot(q, k) * scale), v)


@spelling
def half(q, k, v):
    q, k, v = (x.astype(jnp.bfloat16) for x in (q, k, v))
    return out(jax.nn.softmax(dot(q, k) / 3), v)


@spelling
def half_softmax_in_f32(q, k, v):
    q, k, v = (x.astype(jnp.bfloat16) for x in (q, k, v))
    p = jax.nn.softmax(dot(q, k).astype(jnp.float32) / 3).astype(jnp.bfloat16)
    return out(p, v)


@spelling
def half_kept_in_f32(q, k, v):
    q, k, v = (x.astype(jnp.float16) for x in (q, k, v))
    s = jnp.einsum("bthd,bshd->bhts", q, k, preferred_element_type=jnp.float32)
    return out(jax.nn.softmax(s / 3), v.astype(jnp.float32)).astype(jnp.float16)


@spelling
def highest_precision(q, k, v):
    s = jnp.einsum("bthd,bshd->bhts", q, k, precision="highest")
    return jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(s), v, precision="highest")


# ------------------------------------------------------------------ around it


@spelling
def in_nested_jit(q, k, v):
    softmax = jax.jit(jax.nn.softmax)
    return jax.jit(out)(softmax(jax.jit(dot)(q, k)), v)


@spelling
def with_custom_softmax(q, k, v):
    @jax.custom_jvp
    def softmax(s):
        e = jnp.exp(s - s.max(-1, keepdims=True))
        return e / e.sum(-1, keepdims=True)

    softmax.defjvp(lambda p, t: jax.jvp(jax.nn.softmax, p, t))
    return out(softmax(dot(q, k)), v)


@spelling
def named_scopes(q, k, v):
    with jax.named_scope("scores"):
        s = dot(q, k)
    with jax.named_scope("values"):
        return out(jax.nn.softmax(s), v)


@spelling
def residual_and_gate(q, k, v):
    o = out(jax.nn.softmax(dot(q, k)), v)
    return q + jax.nn.silu(o) * jnp.tanh(v)


@spelling
def two_layers(q, k, v):
    x = out(jax.nn.softmax(dot(q, k)), v)
    return out(jax.nn.softmax(dot(x, x)), x)


@spelling
def head_gates(q, k, v):
    gate = jax.nn.sigmoid(jnp.asarray([0.4, 1.3], jnp.float32))
    return out(jax.nn.softmax(dot(q, k)) * gate[:, None, None], v)


INSIDE = {  # in bodies of their own: the report of the whole program names the fold
    "remat": lambda q, k, v: jax.checkpoint(FUNCTIONS["shifted"])(q, k, v),
    "scan_over_layers": lambda q, k, v: jax.lax.scan(
        lambda x, w: (FUNCTIONS["shifted"](x * w, k, v), None), q, jnp.arange(3.0)
    )[0],
    "fori_loop": lambda q, k, v: jax.lax.fori_loop(
        0, 2, lambda _, x: FUNCTIONS["gpt2"](x, k, v), q
    ),
    "branch": lambda q, k, v: jax.lax.cond(
        q[0, 0, 0, 0] > 0, FUNCTIONS["unshifted"], FUNCTIONS["shifted"], q, k, v
    ),
}
FOLDS = {
    "merged_caches": 2,
    "beside_global_keys": 2,
    "two_layers": 2,
    "branch": 2,
}  # one where not said
