"""Attention as written against what `sym_optimize` makes of it: time and temporaries over length.

python experiments/attention/run.py            # prints the rows
python experiments/attention/run.py --write    # and writes the files beside it
python experiments/attention/run.py --quick    # one short length: a smoke test
"""

import dataclasses
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent)]

import harness
import jax
import jax.numpy as jnp
import numpy as np

from symjax_rewrite import sym_optimize

HEADS, WIDTH = 4, 64
LENGTHS = (128, 256, 512, 1024, 2048, 4096, 8192, 16384)
NO_SLOWER, FASTER, FASTER_FROM = 1.05, 0.9, 4096  # asked of the time, as a share of plain jit's
MEMORY, GRADIENT, MEMORY_AT = 0.05, 0.08, 8192  # asked of the temporaries


def plain(q: Any, k: Any, v: Any) -> Any:
    """Softmax attention of [b, t, h, d], as everyone writes it."""
    s = jnp.einsum("bthd,bshd->bhts", q, k) * q.shape[-1] ** -0.5
    return jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(s, axis=-1), v)


def causal(q: Any, k: Any, v: Any) -> Any:
    """The same with a causal mask."""
    s = jnp.einsum("bthd,bshd->bhts", q, k) * q.shape[-1] ** -0.5
    s = jnp.where(jnp.tril(jnp.ones(s.shape[-2:], bool)), s, -jnp.inf)
    return jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(s, axis=-1), v)


def gradient(fun: Callable) -> Callable:
    """The gradients of a sum over the result."""
    return jax.grad(lambda q, k, v: jnp.sum(fun(q, k, v) ** 2), (0, 1, 2))


@dataclasses.dataclass(frozen=True)
class Row:
    """One program at one length.

    ratio: time of ours by plain jit's, round by round; None where plain jit's temporaries do not
    fit. temporaries in bytes: ours, plain, and those of the gradients.
    """

    program: str
    length: int
    ratio: harness.Ratio | None
    plain_s: float | None
    ours_bytes: int
    plain_bytes: int
    ours_gradient_bytes: int
    plain_gradient_bytes: int
    quadratic: bool

    def missed(self) -> list[str]:
        """Return the acceptance criteria that are not met."""
        out = []
        if self.ratio is not None:
            limit = FASTER if self.length >= FASTER_FROM else NO_SLOWER
            out += [f"time > {limit}"] if self.ratio.median > limit else []
        if self.length >= 1024 and self.quadratic:
            out.append("T×T held")
        if self.length == MEMORY_AT and self.ours_bytes > MEMORY * self.plain_bytes:
            out.append(f"memory > {MEMORY:.0%}")
        limit = GRADIENT * self.plain_gradient_bytes
        if self.length == MEMORY_AT and self.ours_gradient_bytes > limit:
            out.append(f"gradient > {GRADIENT:.0%}")
        return out


def compiled(fun: Any, length: int) -> Any:
    """A function compiled for f32 [1, length, HEADS, WIDTH]."""
    spec = jax.ShapeDtypeStruct((1, length, HEADS, WIDTH), jnp.float32)
    return jax.jit(fun).lower(spec, spec, spec).compile()


def temporaries(program: Any) -> int:
    """Bytes XLA sets aside beside arguments and results."""
    return int(program.memory_analysis().temp_size_in_bytes)


def measure(fun: Callable, length: int, rounds: int) -> Row:
    """Compile both, compare memory, and time them in turn where plain jit's fits."""
    ours, theirs = compiled(sym_optimize(fun), length), compiled(fun, length)
    grads = [compiled(gradient(f), length) for f in (sym_optimize(fun), fun)]
    ratio = plain_s = None
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    if temporaries(theirs) < 0.3 * memory:
        draw = np.random.default_rng(0).standard_normal
        shape = (1, length, HEADS, WIDTH)
        args = [jnp.asarray(draw(shape), jnp.float32) for _ in range(3)]
        difference = jnp.abs(ours(*args) - theirs(*args)).max()
        assert difference < 1e-4, difference
        calls = {"plain": lambda: theirs(*args), "ours": lambda: ours(*args)}
        samples = harness.interleave(calls, rounds)
        ratio, plain_s = samples.ratio("ours", "plain"), samples.median("plain")
    return Row(
        fun.__name__,
        length,
        ratio,
        plain_s,
        *(temporaries(x) for x in (ours, theirs, *grads)),
        quadratic=f"{length},{length}" in ours.as_text(),
    )


HEADER = [
    "program", "T", "time / plain", "plain", "temporaries", "/ plain", "of the gradient", "/ plain",
    "holds T×T", "",
]  # fmt: skip


def line(row: Row) -> list[str]:
    return [
        row.program,
        str(row.length),
        "not run: does not fit" if row.ratio is None else str(row.ratio),
        "–" if row.plain_s is None else harness.duration(row.plain_s),
        megabytes(row.ours_bytes),
        f"{row.ours_bytes / max(row.plain_bytes, 1):.1%}",
        megabytes(row.ours_gradient_bytes),
        f"{row.ours_gradient_bytes / max(row.plain_gradient_bytes, 1):.1%}",
        "yes" if row.quadratic else "no",
        ", ".join(row.missed()) and "missed: " + ", ".join(row.missed()),
    ]


def megabytes(size: float) -> str:
    return f"{size / 1e6:.3g} MB"


def main() -> None:
    options = harness.parser(__doc__).parse_args()
    lengths = (256,) if options.quick else LENGTHS
    rows = []
    for fun in (plain, causal):
        for length in lengths:
            rounds = 1 if options.quick else max(3, options.rounds * 1024 // max(length, 1024))
            rows.append(measure(fun, length, rounds))
            print(*line(rows[-1]), sep="  ", flush=True)
    if options.write:
        tables = harness.markdown_table(HEADER, [line(r) for r in rows])
        harness.write_json(HERE / "results.json", {"cpu": rows})
        harness.write_table(HERE / "README.md", tables)


if __name__ == "__main__":
    main()
