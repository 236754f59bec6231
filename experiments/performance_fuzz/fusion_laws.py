"""Laws of the CPU's prices about what XLA fuses: sums and products in one call, or stored between.

`laws.py` runs them.

*Squares*: products of sums over features with as many columns as rows; `square_repeats` of
`FusionFacts`. *Square products*: the same with a product in the right operand and a reader;
`square_product` and `square_tile`. *Batched sums*: batches of products of sums over features;
`batch_pages` of `FusionFacts`. *Repeated*: sums of rows, copied along an inner axis; `repeated_s`
of `FusionFacts`. *Fusions*: differences of a product and points, reduced, with the product in the
fusion and stored; `piece_bytes` and `written_s` of `FusionFacts`. *Repeated products*: the same
with a function of the sums; `repeats_followed`. *Followed*: sums of differences with a function in
their call and after it; `tile_s`, `tile_bytes`, `tile_pages` and `tasks` of `FusionFacts`. *Rows*:
sums over arrays with short rows, and with joined axes; `row_s` and `one_step` of `FusionFacts`.
*Columns*: sums of rows, as a call and written out; `narrow_row`, `followed_row`, `scalar_row`,
`least_columns` and `column_functions`. *Broadcast sums*: sums over the first axis of products with
an array of fewer axes, fused, stored and as products; `broadcast_first_s` and `broadcast_second_s`.
*Transposed*: arrays, and a function of them, in another order of axes; `mapped_s` and `mapped_rows`
of `ProductLayouts`.
*Layers*: two products with a function between them, by themselves and with their rows normalised,
which is one call that stores no product; `product_share` of `FoldFacts`.
"""

from __future__ import annotations

import functools
import itertools
import math
import random
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from performance_fuzz.timing import array, free_large_block, seconds_of

from symjax_rewrite.cost import call_tiles
from symjax_rewrite.cost.device_profiles import device_profile
from symjax_rewrite.reports.program_cost import traffic

BATCHED_SIZES = ((1, 5), (6, 9.5), (6, 9), (3, 6.6), (1, 7.6))  # logarithms
REPEATED_SIZES = ((5, 9), (5, 9), (4, 7), (5, 7))
LAYERS = (  # rows and features
    (466_033, 9, 48, 9), (100_000, 9, 48, 48), (20_000, 9, 48, 9), (200_000, 16, 64, 16),
    (50_000, 64, 256, 64), (8000, 64, 256, 64), (4500, 256, 1024, 256),
)  # fmt: skip


def measure() -> None:
    """Print all of them."""
    fused_products()
    repeated_products()
    followed()
    batched_sums()
    squares()
    square_products()
    repeated()
    rows()
    columns()
    layers()
    broadcast_sums()
    transposed()


def stored(x: Any) -> Any:
    """Return a value that XLA computes in a call of its own."""
    return lax.reduce_precision(x, 8, 23)


def distances(x: Any, y: Any) -> Any:
    """Return the squared distances of points."""
    return jnp.sum((x[:, None] - y) ** 2, -1)


def followed(count: int = 60, seed: int = 1) -> None:
    """Print how much longer sums of differences take with a function in their call.

    Beside the seconds stands the law's prediction (`call_tiles` of the costs).
    """
    rng, found = random.Random(seed), list[tuple[float, float, float]]()
    free_large_block()
    while len(found) < count:
        n, m, width = (int(2 ** rng.uniform(3, top)) for top in (12, 12, 11))
        size = n * m * width
        if n * m > 1 << 16 and 8e6 < size < 6e7:
            x, y = array(n, width), array(m, width)
            fused, apart = (
                seconds_of(lambda x, y, f=f: jnp.exp(-f(jnp.sum((x[:, None] - y) ** 2, -1))), x, y)
                for f in (lambda x: x, stored)
            )
            law_s = call_tiles.written_seconds((n, m), width, device_profile("cpu"))
            found.append((law_s / size, (fused - apart) / size, fused / apart))
    for least, most in itertools.pairwise((-1, 1e-12, 5e-11, 1e-10, 2e-10, 1e-9, 1)):
        some = [f for f in found if least <= f[0] < most]
        if some:
            law_s, longer_s, times = (sum(column) / len(some) for column in zip(*some, strict=True))
            print(
                f"{len(some)} sums: predicted {1e9 * law_s:.2f}, measured {1e9 * longer_s:.2f} ns"
                f" an element longer; {times:.1f} times as long"
            )


def batched_sums(count: int = 100, seed: int = 1) -> None:
    """Print the pages that batches of products of sums of differences write, as shares of all."""
    rng, found = random.Random(seed), list[tuple[float, float, float]]()
    while len(found) < count:
        batch, n, m, width, out = (int(2 ** rng.uniform(*r)) for r in BATCHED_SIZES)
        pages_s = 4 * batch * n * m * width / 2e9
        if 0.01 < pages_s < 0.15 and n != out:
            args = array(batch, n, width), array(batch, m, width), array(batch, m, out)
            fused, apart = (
                seconds_of(
                    lambda x, y, v, f=f: f(jnp.sum((x[:, :, None] - y[:, None]) ** 2, -1)) @ v,
                    *args,
                )
                for f in (lambda x: x, stored)
            )
            found.append((pages_s, fused - apart, fused / apart))
    for least in (32, 48, 64, 96, 128, 192):
        some = [f for f in found if least <= f[0] * 2e9 / (1 << 20) < least * 1.5]
        pages_s, longer_s, times = (sum(column) for column in zip(*some, strict=True))
        most = max(t for *_, t in some)
        print(
            f"rows of {least:3} MiB and more: {longer_s / pages_s:.2f} of the pages,"
            f" {times / len(some):.1f} times as long, at most {most:.0f}"
        )


def fused_products(width: int = 64) -> None:
    """Print how many times slower fusions are that hold a product, by the side it is read from."""

    def differences(x: Any, y: Any) -> Any:
        return jnp.max(jnp.abs(x[:, None] - y), -1)

    y = array(800, 32)
    sizes = [*[(n, width) for n in (200, 700, 1000, 1050, 2000)], (2000, 4), (2100, 4)]
    for count, summed in sizes:
        x, w = array(count, summed), array(summed, 32)
        sides = {
            "rows": lambda x, w, y, f: differences(f(x @ w), y),
            "columns": lambda x, w, y, f: differences(y, f(x @ w)),
            "both": lambda x, w, y, f: differences(f(x @ w), f(x @ w)),
        }
        for side, reduced in sides.items():
            fused, apart = (
                seconds_of(functools.partial(reduced, f=f), x, w, y) for f in (lambda x: x, stored)
            )
            size = 4 * count * max(summed, 32) >> 10
            print(f"{size:4} KiB as {side}: {fused / apart:.1f} times as long")
    x, w = array(3500, 8), array(8, 64)
    for others in (14, 32, 64, 128, 256):
        y = array(others, 64)
        fused, apart = (
            seconds_of(lambda x, w, y, f=f: differences(f(x @ w), y), x, w, y)
            for f in (lambda x: x, stored)
        )
        each = (fused - apart) / (len(x) * others * 64) * 1e9
        print(f"rows in pieces, each repeated to {others / 4} MiB: {each:.2f} ns an element longer")


def repeated_products(count: int = 300, seed: int = 1) -> None:
    """Print the times that a product is computed again in a call that goes on."""
    rng, found = random.Random(seed), dict[str, list[float]]()
    for _ in range(count):
        n, m, width, summed = (int(2 ** rng.uniform(*r)) for r in REPEATED_SIZES)
        once_s, pairs_s = 2e-11 * n * width * summed, 1.25e-10 * n * m * width
        args = array(n, summed), array(summed, width), array(m, width)
        fused, apart = (
            seconds_of(lambda x, w, y, f=f: jnp.exp(-distances(y, f(x @ w))), *args)
            for f in (lambda x: x, stored)
        )
        share = "short" if once_s < pairs_s / 8 else "long" if once_s < 3 * pairs_s else "longest"
        found.setdefault(share, []).append((fused - apart) / once_s)
    for share, times in found.items():
        print(f"{share} products: {sum(times) / len(times):.1f} times more, of {len(times)}")


def squares(width: int = 8) -> None:
    """Print how often products with square results compute again the sums that they are fused with.

    The seconds beyond those with a stored left operand are those of so many operands.
    """
    for rows, terms in ((400, 300), (600, 400), (700, 500)):
        x, y = array(rows, width), array(terms, width)
        once = seconds_of(distances, x, y)
        for columns in (rows, rows - 100):
            b = array(terms, columns)
            fused = seconds_of(lambda x, y, b: distances(x, y) @ b, x, y, b)
            apart = seconds_of(lambda x, y, b: stored(distances(x, y)) @ b, x, y, b)
            times = (fused - apart) / once
            print(f"{rows} × {terms} times {terms} × {columns}: {times:.1f} times again")


def square_products(width: int = 32) -> None:
    """Print how often a product that a sum reads computes again the product in its right operand.

    The seconds beyond those with a stored result are those of so many operands.
    """
    for rows in (200, 400, 500, 600, 800, 1200):
        x, y, b = array(rows, width), array(rows, width), array(rows, rows)
        for name, f in {"tanh": jnp.tanh, "exp": lambda z: jnp.exp(-abs(z) - 1)}.items():
            once = seconds_of(lambda x, y, f=f: f(x @ y.T), x, y)
            fused, apart = (
                seconds_of(
                    lambda x, y, b, f=f, kept=kept: jnp.sum(kept(b @ f(x @ y.T)) ** 2), x, y, b
                )
                for kept in (lambda z: z, stored)
            )
            print(f"{rows} × {rows}, {name}: {(fused - apart) / once:.1f} times again")


def repeated() -> None:
    """Print the times of a sum of rows and its copies, in one call beside a sum stored first."""

    def rows(x: Any, width: int, stored: Any) -> Any:
        return jnp.broadcast_to(stored(jnp.sum(x, 1))[:, None], (len(x), width))

    for count, width in itertools.product((2_000, 16_000, 60_000), (8, 64, 256)):
        x = array(count, 20)
        fused, apart = (
            seconds_of(functools.partial(rows, width=width, stored=f), x)
            for f in (lambda y: y, lambda y: lax.reduce_precision(y, 8, 23))
        )
        print(f"{count} repeated {width} times: {1e9 * (fused - apart) / count:.0f} ns a sum")


def broadcast_sums() -> None:
    """Print the times of sums of products whose one operand lacks an outer axis of the result."""
    sums = {
        "a·x": lambda a, x: (a[:, None] * x).sum(0),
        "x·a": lambda a, x: (x * a[:, None]).sum(0),
        "stored": lambda a, x: stored(a[:, None] * x).sum(0),
        "as products": lambda a, x: jnp.einsum("kb,knb->nb", a, x),
    }
    for terms, outer, last in ((64, 40, 100), (100, 50, 300), (8, 100, 1000), (300, 300, 16)):
        a, x = array(terms, last), array(terms, outer, last)
        times = ", ".join(f"{n} {1e9 * seconds_of(f, a, x) / x.size:.2f}" for n, f in sums.items())
        print(f"{terms} × {outer} × {last}: {times} ns an element")


def transposed() -> None:
    """Print the times of arrays in another order of axes, and of a function of them."""
    shapes = (
        (500, 8000), (2000, 500), (2000, 2000), (8000, 500), (16_000, 64), (50_000, 64),
        (50_000, 16), (50_000, 8), (64, 50_000), (50_000, 8, 8), (8, 8, 50_000),
    )  # fmt: skip
    for shape in shapes:
        x = array(*shape)
        moved, mapped, alone = (
            1e9 * seconds_of(f, x) / x.size
            for f in (jnp.transpose, lambda x: 2 * x.T, jnp.negative)
        )
        each = f"moved in {moved:.1f} ns an element, a function of it in {mapped:.1f} ns"
        print(f"{shape}: {each}, in order in {alone:.1f} ns")


def rows(count: int = 1_000_000) -> None:
    """Print the times of sums over short rows, beside those of the same numbers in one row."""
    kinds: dict[str, Any] = {
        "one operation": lambda x, y: x * y,
        "two operations": lambda x, y: jnp.square(x - y),
        "a function": lambda x, y: jnp.tanh(x),
        "four operations": lambda x, y: ((x + 0.7) * 0.3 + 1.7) * y,
        "functions": lambda x, y: jnp.log1p(jnp.exp(-jnp.abs(x))) - x * y,
    }

    def joined(x: Any) -> Any:
        return lax.optimization_barrier(jnp.reshape(x, -1))

    for width, (name, f) in itertools.product((1, 2, 3, 4, 8, 16, 32), kinds.items()):
        x, y = array(count, width), array(count, width)
        short = seconds_of(lambda x, y, f=f: jnp.sum(f(x, y)), x, y)
        long = seconds_of(lambda x, y, f=f: jnp.sum(f(joined(x), joined(y))), x, y)
        each = f"{1e9 * (short - long) / count:.1f} ns a row"
        print(f"rows of {width}, {name}: {short / long:.1f} times as long, {each}")


def columns() -> None:
    """Print the times of sums of short rows in a call, beside those of their columns in a loop."""
    kinds: dict[str, Any] = {"squares": jnp.square, "exponentials": jnp.exp, "sines": jnp.sin}

    def called(f: Any, x: Any) -> Any:
        return jnp.sum(f(x), -1)

    def written(f: Any, x: Any) -> Any:
        made = sum([f(x[:, k]) for k in range(1, x.shape[1])], f(x[:, 0]))
        return lax.optimization_barrier(stored(made))

    def divided(total: Any, f: Any, x: Any) -> Any:
        return x / total(f, x)[:, None]

    widths, sizes = (2, 3, 4, 5, 6, 7, 8, 12), (100_000, 400_000, 2_000_000)
    for width, size, (name, f) in itertools.product(widths, sizes, kinds.items()):
        x = array(size // width, width)
        parts = functools.partial
        alone = [seconds_of(parts(total, f), x) for total in (called, written)]
        after = [seconds_of(parts(divided, total, f), x) for total in (called, written)]
        shares = [f"{by_columns / by_rows:.2f}" for by_rows, by_columns in (alone, after)]
        print(f"{size} numbers in rows of {width}, {name}: written out {shares[0]} of the call's")
        print(f"    with rows divided by them: {shares[1]}")


def layers() -> None:
    """Print the seconds of two layers, as results and with their rows normalised, and the price."""
    device = device_profile("cpu")

    def alone(x: Any, w: Any, v: Any) -> Any:
        return jnp.tanh(x @ w) @ v

    def normalised(x: Any, w: Any, v: Any) -> Any:
        y = alone(x, w, v)
        return y / (2 + jnp.max(y, axis=1, keepdims=True))

    print("layers: rows, features, as results, normalised ms; normalised / predicted")
    for n, k, m, e in LAYERS:
        args = array(n, k), array(k, m), array(m, e)
        apart, called = (seconds_of(f, *args) for f in (alone, normalised))
        priced = traffic(jax.make_jaxpr(normalised)(*args), device, {}).seconds or math.inf
        print(n, (k, m, e), f"{apart * 1e3:.2f} {called * 1e3:.2f} {called / priced:.2f}")
