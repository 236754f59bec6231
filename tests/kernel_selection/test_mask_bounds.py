"""Masks become index ranges, and nothing is skipped that a row might need."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from symjax_rewrite import sym_optimize
from symjax_rewrite.kernel_selection.folds import builder
from symjax_rewrite.pallas_kernels.fold.attention import Attention, forward
from symjax_rewrite.pallas_kernels.fold.reference import fold_reference
from symjax_rewrite.pallas_kernels.fold.spec import (
    Band,
    Contraction,
    ExpSums,
    FoldSpec,
    Sums,
    Tile,
    WeightedTerm,
)
from symjax_rewrite.pallas_kernels.fold.tiling import Blocks, TritonBlocks
from symjax_rewrite.pallas_kernels.fold.triton import fold_triton
from symjax_rewrite.pallas_kernels.fold.xla import fold_xla
from symjax_rewrite.pallas_kernels.named_axes import Operand

T = 64
LEAST = float(np.finfo(np.float32).min)
TRIL = np.tril(np.ones((T, T), bool))
NONE = Band()
CHUNKS = np.arange(T) // 8
EARLIER = Band(None, -1, floor=-1e9)
INF = jnp.inf
CAUSAL_LEAST = Band(None, 0, floor=LEAST)


def row():
    return jnp.arange(T)[:, None]


def col():
    return jnp.arange(T)[None, :]


def small(n):
    return n.astype(jnp.int8)


def top_bit_repeated(n):
    return jax.lax.shift_right_arithmetic(n.astype(jnp.uint8), jnp.uint8(4))


def nested(s):
    return jnp.where(col() <= row(), jnp.where(col() > row() - 8, s, -INF), -INF)


def two_fills(s):
    return jnp.where(col() <= row(), jnp.where(col() > row() - 8, s, LEAST), -INF)


# masks by name: the program, and the range of columns
MASKS = {
    "tril": (lambda s: jnp.where(jnp.tril(jnp.ones((T, T), bool)), s, -INF), Band(None, 0)),
    "array": (lambda s: jnp.where(TRIL, s, -INF), Band(None, 0)),
    "added triu": (lambda s: s + jnp.triu(jnp.full((T, T), -INF), 1), Band(None, 0)),
    "added array": (lambda s: s + np.where(TRIL, 0, -np.inf).astype(np.float32), Band(None, 0)),
    "iota": (lambda s: jnp.where(row() >= col(), s, -INF), Band(None, 0)),
    "not": (lambda s: jnp.where(~(col() > row()), s, -INF), Band(None, 0)),
    "fill first": (lambda s: jnp.where(col() > row(), -INF, s), Band(None, 0)),
    "minimum": (lambda s: jnp.minimum(s, jnp.where(row() >= col(), INF, -INF)), Band(None, 0)),
    "float index": (
        lambda s: jnp.where(row().astype(jnp.float32) >= col().astype(jnp.float32), s, -INF),
        Band(None, 0),
    ),
    "future": (lambda s: jnp.where(col() >= row(), s, -INF), Band(0, None)),
    "window": (lambda s: jnp.where((row() >= col()) & (row() - col() < 8), s, -INF), Band(-7, 0)),
    "abs": (lambda s: jnp.where(abs(row() - col()) <= 5, s, -INF), Band(-5, 5)),
    "nested": (nested, Band(-7, 0)),
    "or": (
        lambda s: jnp.where((col() > row()) | (col() < row() - 7), -INF, s),
        Band(-7, 0),
    ),
    "prefix": (lambda s: jnp.where((col() <= row()) | (col() < 10), s, -INF), Band(None, 9)),
    "late": (lambda s: jnp.where(row() - 8 >= col(), s, -INF), Band(None, -8)),
    "least": (lambda s: jnp.where(row() >= col(), s, LEAST), CAUSAL_LEAST),
    "least window": (
        lambda s: jnp.where((row() >= col()) & (row() - col() < 8), s, LEAST),
        Band(-7, 0, floor=LEAST),
    ),
    "two fills": (two_fills, Band(-7, 0, floor=LEAST)),
    "capped": (lambda s: jnp.where(row() >= col(), 5 * jnp.tanh(s / 5), LEAST), CAUSAL_LEAST),
    # a finite fill that scores may reach, and rows that see nothing
    "-1e9": (lambda s: jnp.where(row() >= col(), s, -1e9), Band(None, 0, floor=-1e9)),
    "reached": (lambda s: jnp.where(row() >= col(), 1e4 * s, -1e4), Band(None, 0, floor=-1e4)),
    "late least": (lambda s: jnp.where(row() - 8 >= col(), s, LEAST), Band(None, -8, floor=LEAST)),
    "biased least": (
        lambda s: jnp.where(row() >= col(), s + 0.1 * jnp.arange(T, dtype=jnp.float32), LEAST),
        CAUSAL_LEAST,
    ),
    # functions of the row and of the column
    "chunks": (lambda s: jnp.where(row() // 8 == col() // 8, s, -INF), Band(-7, 7)),
    "shifted": (lambda s: jnp.where(row() >> 3 == col() >> 3, s, -INF), Band(-7, 7)),
    "causal in chunks": (
        lambda s: jnp.where((row() // 8 == col() // 8) & (row() >= col()), s, LEAST),
        Band(-7, 0, floor=LEAST),
    ),
    "causal by chunks": (lambda s: jnp.where(row() // 8 >= col() // 8, s, -INF), Band(None, 7)),
    "earlier chunks": (lambda s: jnp.where(col() // 8 < row() // 8, s, -1e9), EARLIER),
    "next chunks": (lambda s: jnp.where(abs(row() // 8 - col() // 8) < 2, s, -INF), Band(-15, 15)),
    "this chunk and the last": (
        lambda s: jnp.where(
            (row() // 8 - col() // 8 <= 1) & (row() // 8 - col() // 8 >= 0), s, -INF
        ),
        Band(-15, 7),
    ),
    "first chunks": (lambda s: jnp.where(col() // 8 < 2, s, -INF), Band(None, 15)),
    "chunks made before": (lambda s: jnp.where(CHUNKS[:, None] == CHUNKS, s, -INF), Band(-7, 7)),
    "the highest bit repeated": (
        lambda s: jnp.where((top_bit_repeated(col() + 100) > 99) | (row() >= col()), s, -INF),
        NONE,
    ),
    "a magnitude that wraps": (
        lambda s: jnp.where((abs(small(row()) - small(col()) - 65) < -60) | TRIL, s, -INF),
        NONE,
    ),
    "a class each": (lambda s: jnp.where(row() % 8 == col() % 8, s, -INF), NONE),
    # numbers like any other, and masks that are no range
    "-1e2": (lambda s: jnp.where(row() >= col(), s, -1e2), NONE),
    "added least": (lambda s: s + jnp.where(row() >= col(), 0, LEAST), NONE),
    "other diagonal": (lambda s: jnp.where(row() + col() < T, s, -INF), NONE),
    "every other": (lambda s: jnp.where((row() - col()) % 2 == 0, s, -INF), NONE),
    "zero": (lambda s: jnp.where(row() >= col(), s, 0.0), NONE),
}


def arrays(seed=0):
    draw = np.random.default_rng(seed).standard_normal
    return [jnp.asarray(draw((2, T, 2, 16)), jnp.float32) for _ in range(3)]


def attend(mask):
    def attention(q, k, v, *rest):
        s = jnp.einsum("bthd,bshd->bhts", q, k) / 4
        return jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(mask(s, *rest), -1), v)

    return attention


@pytest.fixture
def bands(monkeypatch):
    """The bands of the folds that are emitted."""
    found = []
    run = builder.fold

    def recorded(spec, *operands, backend):
        found.append(spec.band)
        return run(spec, *operands, backend=backend)

    monkeypatch.setattr(builder, "fold", recorded)
    return found


def check(fun, args, bands):
    routed = sym_optimize(fun, kernels="xla", on_unsupported="error")
    np.testing.assert_allclose(routed(*args), fun(*args), 2e-5, 2e-5)
    return bands[0]


@pytest.mark.parametrize("name", MASKS)
def test_a_mask_is_a_range(name, bands):
    mask, band = MASKS[name]
    assert check(attend(mask), arrays(), bands) == band


LENGTHS = {
    "length": (lambda s, at: jnp.where(col() < at[:, None, None, None], s, -INF), (0, False)),
    "place": (lambda s, at: jnp.where(col() <= at[:, None, None, None], s, -INF), (1, False)),
    "one for all": (lambda s, at: jnp.where(jnp.arange(T) < at[0], s, -INF), (0, False)),
    "filled cache": (
        lambda s, at: jnp.where(col() <= (at[:, None, None, None] + row()), s, -INF),
        (1, True),
    ),
}


@pytest.mark.parametrize("name", LENGTHS)
def test_a_length_is_a_range(name, bands):
    mask, (extra, follows) = LENGTHS[name]
    band = check(attend(mask), (*arrays(), jnp.array([5, 40], jnp.int32)), bands)
    assert band.length is not None
    assert (band.lower, band.upper, band.extra, band.follows) == (None, None, extra, follows)


@pytest.mark.parametrize("name", ["tril", "late", "late least", "window", "least", "zero"])
@pytest.mark.parametrize("keys", [24, 64, 200])
def test_fewer_and_more_keys(name, keys):
    distance = jnp.arange(T)[:, None] - jnp.arange(keys)[None]
    masks = {
        "tril": lambda s: jnp.where(distance >= 0, s, -INF),
        "late": lambda s: jnp.where(distance >= 8, s, -INF),
        "late least": lambda s: jnp.where(distance >= 8, s, LEAST),
        "window": lambda s: jnp.where((distance >= 0) & (distance < 9), s, -INF),
        "least": lambda s: jnp.where((distance >= 0) & (distance < 9), s, LEAST),
        "zero": lambda s: jnp.where(distance >= 0, s, 0.0),
    }
    fun = attend(masks[name])
    q, k, v = arrays()
    k, v = (jnp.concatenate([x] * 4, axis=1)[:, :keys] for x in (k, v))
    for kernels in ("xla", "reference"):
        routed = sym_optimize(fun, kernels=kernels, on_unsupported="error")
        np.testing.assert_allclose(routed(q, k, v), fun(q, k, v), 2e-5, 2e-5)


FLOOR = -2000.0


def low_fill(output, rows="m"):
    """A causal fold of 96 rows by 96 columns whose mask fills with `FLOOR`."""
    turned = rows == "n"

    def tile(dots, values, i, j):
        later = i > j if turned else j > i
        scores = jnp.where(later, FLOOR, dots[0])
        return jnp.exp(scores - values[0]) if values else scores

    against = None if isinstance(output, ExpSums) else 3
    bounds = (0, None) if turned else (None, 0)
    return FoldSpec(
        sizes=(("m", 96), ("n", 96), ("d", 16), ("e", 16)),
        batch=(),
        row=rows,
        col="m" if turned else "n",
        operands=(
            Operand(("m", "d")), Operand(("n", "d")), Operand(("m" if turned else "n", "e")),
            Operand(("m",)),
        )[: 3 if against is None else 4],
        contractions=(Contraction(1, 0, ("d",)) if turned else Contraction(0, 1, ("d",)),),
        tile=Tile(tile, () if against is None else (3,)),
        outputs=(output,),
        band=Band(*bounds, floor=FLOOR, against=against),
    )  # fmt: skip


WEIGHTED = (WeightedTerm(), WeightedTerm(2))
LOW_FILLS = {
    "own maximum": low_fill(ExpSums(WEIGHTED)),
    "maximum of rows": low_fill(Sums(WEIGHTED)),
    "maximum of columns": low_fill(Sums(WEIGHTED), rows="n"),
}
BACKENDS = {
    "xla": functools.partial(fold_xla, blocks=Blocks(32, 16)),
    "triton": functools.partial(fold_triton, blocks=TritonBlocks(32, 16), interpret=True),
    "triton, split": functools.partial(
        fold_triton, blocks=TritonBlocks(32, 16, splits=3), interpret=True
    ),
}


@pytest.mark.parametrize("name", LOW_FILLS)
def test_a_fill_weighs_where_scores_reach_it(name):
    """Scores of the rows from 40 to 50 are about 0, -2000 and -8000."""
    spec = LOW_FILLS[name]

    @jax.jit
    def folded(q, k, v):
        top = jnp.max(jnp.where(jnp.tri(96, dtype=bool), q @ k.T, FLOOR), axis=1)
        operands = [q, k, v, top][: len(spec.operands)]
        whole = fold_reference(dataclasses.replace(spec, band=Band()), *operands)
        return whole, {b: run(spec, *operands) for b, run in BACKENDS.items()}

    q, k, v = np.random.default_rng(0).standard_normal((3, 96, 16)).astype("float32")
    k[:, 0], q[:, 0] = 16, 0
    for shift in (0.0, -125.0, -500.0):
        q[40:50, 0] = shift
        whole, found = folded(q, k, v)
        for backend, made in found.items():
            for x, y in zip(jax.tree.leaves(made), jax.tree.leaves(whole), strict=True):
                # Scores of 8000 round by 5e-4.
                np.testing.assert_allclose(x, y, 1e-3, 1e-3, err_msg=f"{backend} {shift}")


def poisoned(spec, run, shift):
    """True if no value of the later half of the columns is read for the first 16 rows."""
    q = jnp.zeros((96, 16)).at[:, 0].set(shift)
    k, v = jnp.ones((96, 16)), jnp.ones((96, 16)).at[48:].set(jnp.nan)
    return bool(jnp.isfinite(jax.tree.leaves(run(spec, q, k, v))[-1][:16]).all())


@pytest.mark.parametrize("backend", ["xla", "triton"])
def test_columns_below_the_floor_are_skipped(backend):
    spec = LOW_FILLS["own maximum"]
    assert poisoned(spec, BACKENDS[backend], 0.0)
    assert not poisoned(spec, BACKENDS[backend], -3000.0)


def skipped_columns(run):
    """Poisoned values beyond every row's range: NaN where a tile of them is computed."""
    a = Attention(1, 64, 512, 1, 16, causal=True)
    q, k, v = (jnp.ones(forward(a).shape(n)) for n in range(3))
    out, _ = run(forward(a), q, k, v.at[:, 128:].set(jnp.nan))
    return bool(jnp.isfinite(out).all())


def test_tiles_outside_the_range_are_not_computed():
    assert skipped_columns(functools.partial(fold_xla, blocks=Blocks(32, 64)))
    small = TritonBlocks(32, 64)
    assert skipped_columns(functools.partial(fold_triton, blocks=small, interpret=True))
    assert not skipped_columns(fold_reference)
