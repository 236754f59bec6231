"""Parts of a term at index values: numbers, arrays of them, clamped, filled and from a value on."""

import jax
import jax.numpy as jnp
from jax import lax

from tests.rewriting.families import Family

PARTS = {"i": 256, "j": 320, "n": 4}

FAMILIES = {
    "product at indices": Family("ij,ji,n!", PARTS, 20, {
        "rows": lambda a, b, x: (a @ b)[x],
        "columns": lambda a, b, x: (a @ b)[:, x],
        "elements": lambda a, b, x: (a @ b)[x, x],
        "an element": lambda a, b, x: (a @ b)[x[0], x[1]],
        "a row": lambda a, b, x: (a @ b)[x[0]],
        "rows, cut": lambda a, b, x: (a @ b)[x, 3:9],
        "a block of elements": lambda a, b, x: (a @ b)[x[:, None], x[None]],
        "take": lambda a, b, x: jnp.take(a @ b, x, 0),
        "take, clipped": lambda a, b, x: jnp.take(a @ b, x, 1, mode="clip"),
        "at, filled": lambda a, b, x: (a @ b).at[x].get(mode="fill", fill_value=7),
        "at, promised": lambda a, b, x: (a @ b).at[x].get(mode="promise_in_bounds"),
        "vmap": lambda a, b, x: jax.vmap(lambda k: (a @ b)[k])(x),
        "dynamic_slice": lambda a, b, x: lax.dynamic_slice(a @ b, (x[0], x[1]), (3, 5)),
        "rows from one on": lambda a, b, x: lax.dynamic_slice_in_dim(a @ b, x[0], 3),
        "windows": lambda a, b, x: jax.vmap(lambda k: lax.dynamic_slice_in_dim(a @ b, k, 2))(x),
        "of a sum": lambda a, b, x: (a @ b + 1)[x],
        "of a map": lambda a, b, x: jnp.tanh(a @ b)[x],
        "index of an index": lambda a, b, x: (a @ b)[x][:, x],
        "transposed": lambda a, b, x: (b.T @ a.T)[:, x].T,
        "a chain": lambda a, b, x: (a @ b @ a)[x],
        "known": lambda a, b, x: lax.dynamic_slice_in_dim(a @ b, 5, 2),
        "known array": lambda a, b, x: (a @ b)[jnp.array([3, 1])],
    }),
    "an element of each row": Family("ij,jk,i!", {"i": 256, "j": 320, "k": 512}, 4, {
        "take_along_axis": lambda a, b, x: jnp.take_along_axis(a @ b, x[:, None], 1)[:, 0],
        "two index arrays": lambda a, b, x: (a @ b)[jnp.arange(256), x],
        "vmap": lambda a, b, x: jax.vmap(lambda row, k: (row @ b)[k])(a, x),
    }, cost="seconds"),
    "last token": Family("btd,dv,b!", {"b": 4, "t": 32, "d": 64, "v": 256}, 16, {
        "take_along_axis": lambda x, w, n: jnp.take_along_axis(x @ w, n[:, None, None], 1),
        "vmap": lambda x, w, n: jax.vmap(lambda y, k: y[k])(x @ w, n),
        "two index arrays": lambda x, w, n: (x @ w)[jnp.arange(4), n],
        "last": lambda x, w, n: (x @ w)[:, -1],
    }),
    "shifted diagonals": Family("ij,ji", {"i": 256, "j": 320}, 20, {
        "above": lambda a, b: jnp.diagonal(a @ b, 3),
        "below": lambda a, b: jnp.diagonal(a @ b, -3),
        "part of one": lambda a, b: jnp.diagonal(a @ b, 3)[2:9],
        "rolled": lambda a, b: jnp.roll(jnp.diagonal(a @ b, 3), 1),
        "of a batch": lambda a, b: jnp.diagonal(
            jnp.stack([a, b.T]) @ jnp.stack([b, a.T]), axis1=1, axis2=2
        ),
    }),
    "gathered adapters": Family(
        "btd,do,edr,ero,b!",
        {"b": 4, "t": 8, "d": 256, "o": 256, "e": 16, "r": 4},
        1.4,
        {
            "gathered, then multiplied": lambda x, W, A, B, n: x @ (W + A[n] @ B[n]),
            "multiplied, then gathered": lambda x, W, A, B, n: x @ (W + (A @ B)[n]),
            "scaled": lambda x, W, A, B, n: x @ (W + 0.5 * (A @ B)[n]),
            "einsum": lambda x, W, A, B, n: jnp.einsum(
                "btd,bdo->bto", x, W + jnp.einsum("bdr,bro->bdo", A[n], B[n])
            ),
            "vmap": lambda x, W, A, B, n: jax.vmap(lambda t, k: t @ (W + A[k] @ B[k]))(x, n),
        },
    ),
}  # fmt: skip
