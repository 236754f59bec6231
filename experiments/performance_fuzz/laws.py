"""Laws of the CPU's prices, measured by small programs: products, steps of loops, fresh memory.

python experiments/performance_fuzz/laws.py [--products 200] [--seed 1]

*Products*: random sizes in four layouts. Fitted: seconds = call + max(flops / rate + operands /
packed, bytes / bandwidth), by least squares of logarithms; `packed_bytes_per_s` of `MemoryFacts`.
*Steps*: a recurrent cell with its input's product inside the loop, before the loop, and left out;
`product_s` and `step_s` of `LoopFacts`. *Scheduling*: cells by the number of their products;
`scheduled_s` and `sequential_kernels` of `LoopFacts`. *Pages*: a sum of arrays around the size that
the allocator keeps; `kept_bytes` and `fresh_bytes_per_s` of `MemoryFacts`. *Search*: a fold's top-k
of short rows; `fold_search` of `FoldFacts`. *Features*: squared distances by the number of
features; `row_sum` and `features_at_once` of `FoldFacts`. *Ties*: sums of the places of a row's
least entry, along and down a fold's blocks; `down_tile` of `FoldFacts`. *Blocks*: sums of
differences in batches of short rows; `threaded_pairs` of `FoldFacts`. *Rows*: products of long
matrices with few columns, and of vectors with matrices of many rows; `product_row_s`,
`short_row_bytes` and `cached_rows` of `MemoryFacts`. *Tiles*: folds of sums over features, many in
loops; `chained` and `looped` of `FoldFacts`. *Pieces*: slices of an array along its last axis, read
and written in a loop; `piece_s` of `FoldFacts`. *Conflicts*: Xᵀ Y by the length of X's rows;
`conflict_bytes` and `conflict_s` of `ProductLayouts`. *Batches*: products of small matrices, the
left one stored transposed; `batched_s` of `ProductLayouts`. *Heads*: products of small and of large
matrices in a batch; `batch_share`, `batch_small` and `batch_large` of `FoldFacts`. *Functions*:
tanh of short rows, with a row added to each and by themselves; `unrolled` and `unrolled_row` of
`FunctionSteps`. *Streams*: weighted means by a function of pairs, by the features of a value, and
sums of squares of products by the features of a point; `library_features`, `library_shifted` and
`square_features` of `FoldFacts`. *Lookups*: rows of a table, read and added by key; `row_term` of
`FoldFacts`. *Copies*: a vector, repeated; `spread_bytes_per_s` of `MemoryFacts`. *Sums*: small
arrays, summed and multiplied by ones; `vector_sum_bytes` of `FusionFacts`. *Crossings*: the
transpose added to a function of a product; `crossed_s` of `ProductLayouts`. *Orders*: scores read
in two orders of axes, which are written and read once more in each. *Places*: argmin beside
min; `argmax` of `FoldFacts`. *Columns*: cumulative maxima as a tree and row by row; `tree_s`,
`element_s` and `step_s` of `ColumnScanFacts`. *Scratch*: attention divided behind its product,
beside before; `scratch_bytes` of `MemoryFacts` and `kept_features` of `FoldFacts`. *Weights*:
attention in heads with values of their own, and of all heads; `batch_terms` and `heads_at_once` of
`FoldFacts`. What XLA fuses: `fusion_laws`.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import math
import os
import random
import resource
import sys
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).parent
os.environ.setdefault("JAX_PLATFORMS", "cpu")
sys.path[:0] = [str(HERE.parents[1]), str(HERE.parent)]

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from performance_fuzz import fusion_laws
from performance_fuzz.timing import array, seconds_of

from symjax_rewrite import sym_optimize

BANDWIDTH = 2e10  # bytes/s, of the profile


class Product(NamedTuple):
    """A product of m × k and k × n, in a batch, and its seconds."""

    batch: int
    m: int
    n: int
    k: int
    layout: str
    seconds: float

    @property
    def flops(self) -> float:
        return 2.0 * self.batch * self.m * self.n * self.k

    @property
    def read(self) -> float:
        """Return the bytes of the operands."""
        return 4.0 * self.batch * self.k * (self.m + self.n)

    @property
    def moved(self) -> float:
        return self.read + 4.0 * self.batch * self.m * self.n


def random_product(rng: random.Random) -> Product:
    """Measure a product of matrices of random sizes in a random layout."""

    def size(least: float, most: float) -> int:
        return round(math.exp(rng.uniform(math.log(least), math.log(most))))

    while True:
        batch = 1 if rng.random() < 0.6 else size(2, 256)
        m, n, k = size(2, 4096), size(2, 4096), size(2, 16384)
        p = Product(batch, m, n, k, rng.choice(("NN", "NT", "TN", "TT")), 0.0)
        if 1e4 < p.flops < 8e9 and p.moved < 1e8:
            break
    lead = () if batch == 1 else (batch,)
    d = len(lead)
    left = array(*lead, *((m, k) if p.layout[0] == "N" else (k, m)))
    right = array(*lead, *((k, n) if p.layout[1] == "N" else (n, k)))
    summed = ((d + (p.layout[0] == "N"),), (d + (p.layout[1] == "T"),))
    dims = (summed, (tuple(range(d)), tuple(range(d))))
    return p._replace(seconds=seconds_of(lambda a, b: lax.dot_general(a, b, dims), left, right))


def predicted(p: Product, call_s: float, rate: float, packed: float) -> float:
    """Return the seconds of a product by the law."""
    return call_s + max(p.flops / rate + p.read / packed, p.moved / BANDWIDTH)


def errors(found: list[Product], *constants: float) -> np.ndarray:
    return np.array([math.log(p.seconds / predicted(p, *constants)) for p in found])


def fitted(found: list[Product]) -> tuple[float, float, float]:
    """Return the constants with the least median of absolute errors, by coordinates."""
    best, step = (3e-5, 1e11, 1e10), 2.0
    while step > 1.02:
        tried = itertools.product((1 / step, 1.0, step), repeat=3)
        options = [tuple(c * f for c, f in zip(best, factors, strict=True)) for factors in tried]
        better = min(options, key=lambda c: float(np.mean(np.abs(errors(found, *c)))))
        if better == best:
            step = step**0.5
        best = (better[0], better[1], better[2])
    return best


def products(count: int, seed: int) -> None:
    """Print the fitted law of products, by layout."""
    rng = random.Random(seed)
    found = [random_product(rng) for _ in range(count)]
    for layout in ("", "NN", "NT", "TN", "TT"):
        mine = [p for p in found if layout in p.layout]
        if len(mine) < 10:
            continue
        constants = fitted(mine)
        off = np.exp(np.quantile(np.abs(errors(mine, *constants)), (0.5, 0.9)))
        print(
            f"{layout or 'all':4} {len(mine):4} call {constants[0] * 1e6:5.1f} µs, rate"
            f" {constants[1]:.2g} FLOP/s, packed {constants[2]:.2g} bytes/s; off by a factor of"
            f" {off[0]:.2f} in the middle, {off[1]:.2f} at 90 %"
        )


def steps(length: int = 200) -> None:
    """Print the times of a recurrent cell with the product of its input in and before the loop."""
    for rows, width in itertools.product((1, 8, 64), (8, 16, 32, 64, 128, 256)):
        x, w, u = array(length, rows, width), array(width, width), array(width, width)
        h = jnp.zeros((rows, width))

        def cell(x: Any, w: Any, u: Any, h: Any = h, inside: bool = True) -> Any:
            def step(h: Any, t: Any) -> Any:
                h = jnp.tanh((t @ w if inside else t) + h @ u)
                return h, h

            return lax.scan(step, h, x)[1]

        def before(x: Any, w: Any, u: Any, cell: Any = cell) -> Any:
            return cell((x.reshape(-1, x.shape[2]) @ w).reshape(x.shape), w, u, inside=False)

        def bare(x: Any, w: Any, u: Any, cell: Any = cell) -> Any:
            return cell(x, w, u, inside=False)

        a, b, c = (seconds_of(f, x, w, u) / length * 1e6 for f in (cell, before, bare))
        print(f"{rows:3} × {width:3}: {a:.3f} µs a step, before {b:.3f}, product {a - c:.3f}")


def scheduling(length: int = 2000, width: int = 8) -> None:
    """Print the times of steps by the number of small products in them, a kernel each."""
    before = 0.0
    for count in range(1, 10):
        x, *ws = array(length, width), *[array(width, width) for _ in range(count)]

        def states(x: Any, *ws: Any) -> Any:
            step = lambda h, t: (jnp.tanh(sum(h @ w for w in ws) + t), None)  # noqa: E731
            return lax.scan(step, x[0], x)[0]

        took = seconds_of(states, x, *ws) / length
        print(f"{count + 3:2} kernels: {took * 1e9:.0f} ns a step, {(took - before) * 1e9:+.0f}")
        before = took


def pages() -> None:
    """Print the rate of a sum of two arrays by the size of the result."""
    for mib in (4, 16, 24, 31, 33, 48, 96):
        x = jnp.ones(mib << 18)
        took = seconds_of(lambda a, b: a + b, x, x)
        print(f"{mib:3} MiB: {took * 1e3:.2f} ms, {(mib << 20) / took:.2g} bytes/s")


def search() -> None:
    """Print the steps per pair of a fold's top-k of short rows."""
    for rows, columns in ((65536, 8), (32768, 32), (8192, 128), (2048, 1024)):
        x, y = array(rows, 4), array(columns, 4)
        f = sym_optimize(lambda x, y: lax.top_k(x @ y.T, 2)[0], kernels="xla")
        per_pair = seconds_of(f, x, y) / (rows * columns)
        print(f"{rows} × {columns}: {per_pair * 16e9:.0f} steps of 1/16 ns a pair")


def features(points: int = 600) -> None:
    """Print the steps per pair of a sum over features of differences of points."""
    for width in (2, 4, 8, 16, 32, 64, 128):
        x, y = array(points, width), array(points, width)
        took = seconds_of(lambda x, y: jnp.sum((x[:, None] - y[None]) ** 2, -1), x, y)
        print(f"{width:3} features: {took / points**2 * 16e9:.0f} steps of 1/16 ns a pair")


def rows(count: int = 200_000) -> None:
    """Print the times of long matrices of few columns, times small matrices.

    Then the rates of products with vectors that sum down rows, and of weighted sums of these.
    """
    for width, out in itertools.product((2, 3, 4, 5, 7, 8, 12, 16), (2, 3, 8)):
        took = seconds_of(lambda x, w: x @ w, array(count, width), array(width, out))
        print(f"{width:2} by {out}: {took / count * 1e9:.2f} ns a row")
    for size, width in itertools.product(
        (1 << 20, 5_000_000, 15_000_000), (16, 64, 256, 1024, 8192)
    ):
        v, x = array(size // width), array(size // width, width)
        product, weighted = (
            seconds_of(f, v, x) for f in (jnp.matmul, lambda v, x: jnp.sum(v[:, None] * x, 0))
        )
        rates = (x.nbytes / took / 1e9 for took in (product, weighted))
        print(f"{size} in rows of {width}: {' and '.join(f'{r:.1f}' for r in rates)} GB/s")


def vector_sums() -> None:
    """Print the times of sums of small arrays, and of their products with ones."""
    for size, width in itertools.product((1 << 14, 1 << 16, 1 << 18, 1 << 20), (2, 16, 64, 512)):
        x, ones = array(size // width, width), jnp.ones(max(width, size // width), jnp.float32)
        for axis in (0, 1):
            v = ones[: x.shape[axis]]
            took = seconds_of(lambda x, k=axis: jnp.sum(x, k), x)
            product = seconds_of(lambda x, v, k=axis: x @ v if k else v @ x, x, v)
            name = "rows" if axis else "columns"
            print(f"{x.shape} by {name}: {took * 1e6:.0f} and {product * 1e6:.0f} µs")


def tiles(points: int = 2000) -> None:
    """Print the steps per operation of a fold of sums over features; many are summed in loops."""
    for width in (4, 8, 16, 64, 256):
        x, y = array(points, width), array(points, width)
        fold = sym_optimize(
            lambda x, y: jnp.sum(jnp.sum(jnp.abs(x[:, None] - y[None]), -1), 1), kernels="always"
        )
        each = seconds_of(fold, x, y) / (points**2 * 3 * width) * 16e9
        print(f"{width:2} features: {each:.2f} of a step an operation")


def ties(columns: int = 2048) -> None:
    """Print the steps per pair of folds that compare a term with its extremum, both ways."""
    for points, width in itertools.product((1024, 2048, 3000, 4096), (1, 3, 16)):
        x, y = array(columns, 3), array(points, 3)

        def places(x: Any, y: Any) -> Any:
            s = x @ y.T
            return jnp.where(s == jnp.min(s, 1, keepdims=True), 1.0, 0.0)

        along = sym_optimize(lambda x, y, w: places(x, y) @ w, kernels="always")
        down = sym_optimize(lambda x, y, w: places(x, y).T @ w, kernels="always")
        a = seconds_of(along, x, y, array(points, width))
        b = seconds_of(down, x, y, array(columns, width))
        steps = [16e9 * s / (points * columns) for s in (a, b)]
        print(f"{points} by {width}: {steps[0]:.0f} steps a pair along, {steps[1]:.0f} down")


def blocks() -> None:
    """Print the times of folds of short rows in batches, which have a block for each."""
    for side in (48, 64, 96, 128, 180, 256):
        count = 4_000_000 // side**2
        x, y = array(count, side), array(count, side)
        fold = sym_optimize(
            lambda x, y: jnp.sum(jnp.abs(x[:, :, None] - y[:, None]), 1), kernels="always"
        )
        print(f"{side} by {side}: {seconds_of(fold, x, y) / count * 1e6:.2f} µs a block")


def pieces() -> None:
    """Print the times of the pieces of memory that slices along the last axis read and write.

    A piece takes under 1 ns where the next step finds its cache line again, and 3 to 8 ns where it
    does not: a stride that is a multiple of 2 KiB leaves few sets of the cache to the lines, and a
    block of more than 2048 pages has no place in the table of addresses.
    """

    def reading(x: Any, width: int) -> Any:
        def step(k: Any, total: Any) -> Any:
            part = lax.optimization_barrier(lax.dynamic_slice_in_dim(x, k * width, width, 2))
            return total + part

        count = x.shape[2] // width
        return lax.fori_loop(0, count, step, jnp.zeros((*x.shape[:2], width)))

    def writing(x: Any, width: int) -> Any:
        def step(k: Any, made: Any) -> Any:
            part = lax.optimization_barrier(jnp.full((*x.shape[:2], width), 1.0) * k)
            return lax.dynamic_update_slice_in_dim(made, part, k * width, 2)

        return lax.fori_loop(0, x.shape[2] // width, step, 2 * x)

    strides = [
        (1, rows, columns) for rows in (512, 4096) for columns in (250, 500, 512, 1000, 1024)
    ]
    shapes = [(8, 512, 512), (8, 500, 496), *strides]
    for shape, width in itertools.product(shapes, (1, 4)):
        x = array(*shape)
        count = x.size / width
        for move in (reading, writing):
            took = seconds_of(functools.partial(move, width=width), x) / count
            print(f"{shape} by {width}, {move.__name__}: {took * 1e9:.1f} ns a piece")


def conflicts(count: int = 512) -> None:
    """Print the times of reading across rows of many lengths, beside those of the swapped product.

    The lines of a column share few places in a cache of 4 KiB a way if rows lie 2 KiB apart.
    """
    for row in (256, 500, 512, 768, 1000, 1024, 1500, 1536, 2048):
        x, y = array(count, row), array(count, 4)
        across = seconds_of(lambda x, y: x.T @ y, x, y)
        along = seconds_of(lambda x, y: lax.optimization_barrier(y.T @ x).T, x, y)
        print(f"rows of {row:4}: {1e9 * (across - along) / x.size:.2f} ns an element")


def batches() -> None:
    """Print the times of transposed matrices on the left of products in a batch, beside others.

    XLA's fast library computes products in a batch unless a left matrix is transposed.
    """
    for count, m, k, n in itertools.product((64, 512), (8, 32), (16,), (8, 32)):
        right = array(count, k, n)
        fast = seconds_of(lambda a, b: a @ b, array(count, m, k), right)
        slow = seconds_of(lambda a, b: a.swapaxes(1, 2) @ b, array(count, k, m), right)
        print(f"{count:3} of {m} x {k} x {n}: {1e9 * (slow - fast) / count:.0f} ns a matrix")


def heads(features: int = 32) -> None:
    """Print the rates of batches of products, by the rows of both operands."""
    for count, rows in itertools.product((4, 16), (32, 64, 128, 256, 512)):
        a, b = array(count, rows, features), array(count, rows, features)
        seconds = seconds_of(lambda a, b: a @ b.swapaxes(1, 2), a, b)
        rate = 2e-9 * count * rows * rows * features / seconds
        print(f"{count:2} products of {rows:3} x {features} x {rows:3}: {rate:.0f} GFLOP/s")


def scratch() -> None:
    """Print the times of attention divided before and behind its product, by bytes of its weights.

    Behind it, one call stores the weights. `faults` are pages of 4 KiB that a call is given anew.
    """

    def attention(q: Any, k: Any, v: Any, behind: bool) -> Any:
        scores = jnp.einsum("nhe,mhe->hnm", q, k) / 8
        weights = jnp.exp(scores - scores.max(-1, keepdims=True))
        shares = 1 / weights.sum(-1, keepdims=True)
        weights = weights if behind else weights * shares
        out = jnp.einsum("hnm,mhe->hne", weights, v)
        return jnp.swapaxes(out * shares if behind else out, 0, 1)

    sizes = [*itertools.product((32, 64), (8, 12, 16), (256, 384, 512, 640)), (16, 6, 1365)]
    for width, count, rows in sizes:
        x, times = array(rows, count, width), []
        for behind in (False, True):
            f = jax.jit(functools.partial(attention, behind=behind))
            seconds, before = seconds_of(f, x, x, x), faults()
            jax.block_until_ready([f(x, x, x) for _ in range(10)][-1])
            times.append(f"{1e3 * seconds:.2f} ms, {(faults() - before) / 10:.0f} faults")
        weights = f"{4e-6 * count * rows**2:.1f} MB of weights, {width} features"
        print(f"{weights}: {times[0]}; behind {times[1]}")


def weights() -> None:
    """Print the times and fresh memory of attention in heads with values of their own, and shared.

    At once each call is given memory for so many terms of one head, or of all.
    """

    def attention(q: Any, k: Any, v: Any, behind: bool) -> Any:
        scores = q @ jnp.swapaxes(k, 1, 2) / 8
        weights = jnp.exp(scores - scores.max(-1, keepdims=True))
        shares = 1 / weights.sum(-1, keepdims=True)
        return (weights @ v) * shares if behind else (weights * shares) @ v

    for (count, rows), width in itertools.product(((27, 660), (12, 1000), (8, 3000)), (8, 32)):
        x, one = array(count, rows, width), 4 * rows**2
        for v, behind in itertools.product((x, x[0]), (False, True)):
            f = jax.jit(functools.partial(attention, behind=behind))
            seconds, before = seconds_of(f, x, x, v), faults()
            jax.block_until_ready([f(x, x, v) for _ in range(10)][-1])
            given = (faults() - before) / 10 * os.sysconf("SC_PAGE_SIZE")
            name = f"{'own' if v is x else 'shared'}, divided {'behind' if behind else 'before'}"
            share = f"{given / one:.1f} heads or {given / one / count:.1f} terms at once"
            heads = f"{count} of {rows}, {width:2} features"
            print(f"{heads}, values {name}: {1e3 * seconds:.1f} ms, {share}")


def faults() -> int:
    """Return how many pages this process has been given."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def functions(elements: int = 2_000_000) -> None:
    """Print the times of a function of rows, with broadcasts, without them, and in a reduction."""
    forms = {
        "plus a row": lambda x, w: jnp.tanh(x + w),
        "alone": lambda x, w: jnp.tanh(x),
        "reduced": lambda x, w: jnp.max(jnp.tanh(x + w), -1),
    }
    for width, dtype in itertools.product((8, 12, 16, 32, 40, 64), ("float32", "bfloat16")):
        x, w = (a.astype(dtype) for a in (array(elements // width, width), array(width)))
        times = (f"{name} {1e9 * seconds_of(f, x, w) / x.size:.2f}" for name, f in forms.items())
        print(f"rows of {width:2}, {dtype}: {', '.join(times)} ns an element")


def streams(rows: int = 8192, columns: int = 2232) -> None:
    """Print the times of weighted means whose weights the library stores, or computes in blocks."""

    def means(p: Any, v: Any) -> Any:
        return (p @ v) / jnp.sum(p, axis=1, keepdims=True)

    forms = {
        "powers": lambda x, y, v: means((x * y + 1) ** 3, v),
        "softmax": lambda x, y, v: jax.nn.softmax(x * y, axis=1) @ v,
    }
    for width, (name, f) in itertools.product((1, 2, 4, 5, 8, 16), forms.items()):
        took = seconds_of(f, array(rows, 1), array(1, columns), array(columns, width))
        print(f"{name}, {width:2} features: {1e9 * took / (rows * columns):.2f} ns a pair")
    for width, count in itertools.product((4, 5, 7, 12, 16, 40), (rows, rows - 1)):
        x, y = array(rows, width), array(count, width)
        took = seconds_of(lambda x, y: jnp.sum((x @ y.T) ** 2), x, y)
        print(f"{count}, {width:2} features: {1e9 * took / (rows * count):.2f} ns a pair")


def lookups(count: int = 10_000, table: int = 128) -> None:
    """Print the times of rows that are looked up, and of rows that are added by key."""
    place = jnp.asarray(np.random.default_rng(0).integers(0, table, count))

    def added(x: Any) -> Any:
        return jnp.zeros((table, x.shape[1])).at[place].add(x, mode="promise_in_bounds")

    for width in (1, 4, 16, 64, 256):
        read = seconds_of(lambda x: x.at[place].get(mode="promise_in_bounds"), array(table, width))
        keyed = seconds_of(added, array(count, width))
        each = (f"{1e9 * took / (count * width):.2f}" for took in (read, keyed))
        print(f"rows of {width:3}: {' and '.join(each)} ns an element")


def inlined(length: int = 2000) -> None:
    """Print the times of a step by its carry, and where XLA compiles step and loop as one."""
    for width, operations in itertools.product((1, 8, 32, 64, 256, 1024), (1, 4, 16)):

        def recurrence(h: Any, xs: Any, operations: int = operations) -> Any:
            def step(h: Any, x: Any) -> Any:
                for _ in range(operations):
                    h = 0.9 * h + jnp.abs(h - x)
                return h, h

            return lax.scan(step, h, xs)[1]

        h, xs = array(width), array(length, width)
        text = jax.jit(recurrence).lower(h, xs).compile().as_text() or ""
        kind = "one function" if "xla_cpu_small_call" in text else "kernels"
        each = 1e9 * seconds_of(recurrence, h, xs) / length
        print(f"{width:4} numbers, {operations:2} operations: {each:4.0f} ns a step, {kind}")


def copies(width: int = 2000) -> None:
    """Print the rates at which the elements of a vector are repeated as rows and as columns."""
    for rows in (200, 800, 1500, 3000):
        x = array(rows)
        for name, axis in (("rows", 1), ("columns", 0)):
            shape = (rows, width) if axis else (width, rows)
            took = seconds_of(lambda x, s=shape, k=1 - axis: lax.broadcast_in_dim(x, s, (k,)), x)
            print(f"{4e-6 * rows * width:4.1f} MB as {name}: {4e-9 * rows * width / took:.0f} GB/s")


def crossings() -> None:
    """Print the times of adding the transpose to a function of products and arrays."""

    def function(f: Any, p: Any, q: Any) -> Any:
        made = (p @ q.T) * (1 - f)
        return made + made * f

    def crossed(f: Any, p: Any, q: Any) -> Any:
        made = function(f, p, q)
        return made + made.T

    for rows in (250, 400, 700, 1024, 1500, 2048, 3000):
        made = array(rows, rows), array(rows, 16), array(rows, 16)
        took = seconds_of(crossed, *made) - seconds_of(function, *made)
        print(f"{rows} rows: {1e9 * took / rows**2:.1f} ns an element")


def orders() -> None:
    """Print the times of scores that a softmax reads in two orders of their axes, beside one."""

    def read(scores: Any, turned: bool) -> Any:
        scores = 10 * scores
        most = scores.max(-1)
        if turned:
            scores, most = jnp.swapaxes(scores, 0, 1), most.T
        return jnp.exp(scores - most[..., None]).sum(-1)

    for rows, count in ((200, 4), (300, 8), (487, 4), (487, 12), (700, 4), (1000, 4)):
        x = array(rows, count, rows)
        one, two = (seconds_of(functools.partial(read, turned=k), x) for k in (False, True))
        print(f"{count} of {rows} rows: {1e9 * (two - one) / x.size:.2f} ns an element")


def places() -> None:
    """Print the times of the places of least entries, along rows and down columns."""
    for shape in ((4500, 142), (1000, 1000), (20_000, 50), (300, 5000), (200_000, 8)):
        x = array(*shape)
        for name, axis in (("row", 1), ("column", 0)):
            place, least = (
                seconds_of(functools.partial(f, axis=axis), x) for f in (jnp.argmin, jnp.min)
            )
            each = 1e9 * (place - least) / x.size
            print(f"{shape}, least of a {name}: {each:.1f} ns an element for its place")


def columns() -> None:
    """Print the times of maxima down an array, as a tree over its rows and row by row."""

    def by_rows(x: Any) -> Any:
        return lax.scan(lambda h, row: (jnp.maximum(h, row),) * 2, x[0], x)[1]

    for shape in ((50_000, 2), (50_000, 5), (50_000, 16), (5000, 64), (5000, 256), (3_000_000, 5)):
        x = array(*shape)
        tree, loop = seconds_of(lambda x: lax.cummax(x, axis=0), x), seconds_of(by_rows, x)
        each = f"{1e9 * tree / x.size:.1f} ns an element as a tree"
        print(f"{shape}: {each}, row by row {1e9 * loop / len(x):.0f} ns a row")


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure the laws of the CPU's prices.")
    parser.add_argument("--products", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="a smoke test")
    a = parser.parse_args()
    products(12 if a.quick else a.products, a.seed)
    if not a.quick:
        steps()
        scheduling()
        pages()
        search()
        features()
        rows()
        vector_sums()
        fusion_laws.measure()
        tiles()
        ties()
        blocks()
        pieces()
        conflicts()
        batches()
        heads()
        scratch()
        weights()
        functions()
        streams()
        lookups()
        inlined()
        copies()
        crossings()
        orders()
        places()
        columns()


if __name__ == "__main__":
    main()
