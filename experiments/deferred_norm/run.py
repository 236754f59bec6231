"""Deferred normalisation: a norm and the linear layer after it, before and after `sym_optimize`.

python experiments/deferred_norm/run.py            # layers, a block, MiniLM: prints
python experiments/deferred_norm/run.py --write    # and writes the files beside it
python experiments/deferred_norm/run.py --quick    # few sizes, few rounds: a smoke test
"""

import dataclasses
import itertools
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent / "minilm"), str(HERE.parent)]

import harness
import jax
import jax.numpy as jnp
import model
import numpy as np
import weights

from symjax_rewrite import sym_optimize
from symjax_rewrite.cost.device_profiles import DEVICES
from symjax_rewrite.pallas_kernels.norm.tiling import norm_blocks
from symjax_rewrite.pallas_kernels.norm.layer import NormLinear, forward
from symjax_rewrite.pallas_kernels.norm.spec import NormGroup

ROWS = (1, 4, 16, 64, 256, 1024, 4096)
SIDES = (1024, 4096)
ASKED = 1.03  # of plain's time, at most
DRAWS = ((256, 30, 7), (4096, 6, 2))  # of a layer: rows at most, processes, pairs in each
BLOCK_DRAWS = (14, 9)  # of a block and MiniLM
MULTIPROCESSOR_BYTES = 233472  # of shared memory, H200
DECODING = (
    "Decoding on an H200, bf16, K = 4096: programs of the table's cut, what their pipelines have "
    "on the way from memory, and the latency which that covers at full bandwidth. Sums over K in "
    "parts take a second kernel: its launch would pay only if memory answered as late as the "
    "last column says, and it answers in less than 1 µs."
)
DECODE = ["rows", "N", "block", "programs", "on the way", "floor", "covers", "a split pays from"]
COUNTED_ROWS, COUNTED_OUTPUTS = (1, 16, 64, 256, 4096), (4096, 14336)


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("--draw", type=int, help="run the N-th draw alone and print its seconds")
    chosen = parser.parse_args()
    quick = chosen.quick
    contests = [
        *layer_contests((1, 16) if quick else ROWS, SIDES[:1] if quick else SIDES),
        *block_contests((1,) if quick else (1, 4, 16, 64), 256 if quick else 1024),
        *minilm_contests(2 if quick else 6),
    ]
    if chosen.draw is not None:
        harness.tell_draw(one_draw(contests, chosen.draw))
        return
    draws = all_draws(contests, quick)
    layers, above = tell_layers(contests, draws)
    blocks, minilm = (tell_frozen(contests, draws, kind) for kind in ("block", "MiniLM"))
    moved = tell_bytes()
    decode = tell_decode()
    if not chosen.write:
        return
    header = ["rows", "K", "N", "as called / plain", "prepared / plain"]
    told = ", ".join(f"{draws} processes up to {rows} rows" for rows, draws, _ in DRAWS)
    parts = [
        "RMSNorm with gain, then a linear layer, f32: seconds against plain `jax.jit`. Where "
        "arrays lie in memory makes up to a factor of two, and differs between processes more than "
        f"within one: the median over {told}, and the interval it lies in at 95 %. Where the "
        "emitted program is the plain one its ratio is the noise of the machine.",
        harness.markdown_table(header, layers),
        above,
        "A block (norm, Q K V, output, norm, gated MLP; width 1024, hidden 4096), weights frozen: "
        "prepared against plain `jax.jit` with the same arrays closed over, "
        f"in {BLOCK_DRAWS[0]} processes.",
        harness.markdown_table(["rows", "prepared / plain"], blocks),
        harness.markdown_table(["MiniLM forward", "prepared / plain"], minilm),
        "Bytes an H200 moves, bf16, K = 4096: two kernels (norm, then product) against one.",
        harness.markdown_table(["rows", "N", "two kernels", "one kernel", "ratio"], moved),
        DECODING,
        harness.markdown_table(DECODE, decode),
    ]
    harness.write_table(HERE / "README.md", *parts)
    record = {
        "layers": layers,
        "blocks": blocks,
        "minilm": minilm,
        "bytes": moved,
        "decode": decode,
    }
    harness.write_json(HERE / "results.json", record)


@dataclasses.dataclass(frozen=True, slots=True)
class Contest:
    """Programs that are timed in turn, with arrays drawn anew in every process."""

    kind: str
    cells: tuple  # the first of its row
    make: Callable[[], dict[str, Callable[[], Any]]]
    draws: int
    pairs: int

    @property
    def name(self) -> str:
        return " ".join(map(str, (self.kind, *self.cells)))


def one_draw(contests: list[Contest], number: int) -> dict[str, harness.Samples]:
    """Every contest that has so many draws, in this process."""
    out = {}
    for contest in contests:
        if number < contest.draws:
            calls = contest.make()
            out[contest.name] = harness.interleave(calls, contest.pairs, seed=number)
            del calls
            jax.clear_caches()  # programs hold the weights they close over
    return out


def all_draws(contests: list[Contest], quick: bool) -> dict[str, harness.Draws]:
    """Every contest in as many processes as it has draws; in one if quick."""
    most = 1 if quick else max(contest.draws for contest in contests)
    runs: dict[str, list[harness.Samples]] = {contest.name: [] for contest in contests}
    for number, told in enumerate(harness.draw_anew(Path(__file__), most, *["--quick"] * quick)):
        for name, samples in told.items():
            runs[name].append(samples)
        print(f"draw {number + 1} of {most}", file=sys.stderr)
    return {name: harness.Draws(each) for name, each in runs.items()}


def draw(*shape: int, seed: int = 0) -> jax.Array:
    scale = 1 / np.sqrt(shape[0]) if len(shape) > 1 else 1
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape) * scale, jnp.float32)


def rms_norm(x: jax.Array, gain: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6) * gain


def layer(x: jax.Array, gain: jax.Array, weight: jax.Array) -> jax.Array:
    return rms_norm(x, gain) @ weight


def layer_contests(rows: tuple, sides: tuple) -> list[Contest]:
    """Every shape with and without frozen weights, in turn with the plain program."""
    out = []
    for k, n, m in itertools.product(sides, sides, rows):
        draws, pairs = next(how for most, *how in DRAWS if m <= most)
        out.append(Contest("layer", (m, k, n), partial(_layer_calls, m, k, n), draws, pairs))
    return out


def tell_layers(contests: list[Contest], draws: dict[str, harness.Draws]) -> tuple[list[list], str]:
    """The cells, and how many ratios stand above what is asked: of one program with itself too."""
    out, ratios = [], {"the same program": [], "prepared": []}
    for contest in contests:
        if contest.kind != "layer":
            continue
        m, k, n = contest.cells
        runs = draws[contest.name]
        called, frozen = (runs.ratio(name, "plain") for name in ("called", "prepared"))
        specs = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((m, k), (k,), (k, n))]
        report = sym_optimize(layer).explain(*specs)
        same = str(report.before.jaxpr) == str(report.after.jaxpr)
        out.append([m, k, n, f"{called}{' (the same program)' * same}", str(frozen)])
        ratios["prepared"].append(frozen)
        ratios["the same program"] += [called] * same
        print(*out[-1], sep="\t")
    told = (
        f"{name}, {sum(r.median > ASKED for r in found)} of {len(found)} medians (at most "
        f"{max(r.median for r in found):.2f}) and {sum(r.low > ASKED for r in found)} intervals"
        for name, found in ratios.items()
        if found
    )
    return out, f"Above {ASKED}: {'; '.join(told)}."


def _layer_calls(m: int, k: int, n: int) -> dict[str, Callable]:
    """The layer as written, as called and prepared."""
    x, gain, weight = draw(m, k) * np.sqrt(m), 1 + draw(k), draw(k, n)
    plain, ours = jax.jit(layer), sym_optimize(layer)
    prepared = sym_optimize(layer, frozen=("gain", "weight")).prepare(gain=gain, weight=weight)
    return {
        "plain": lambda: plain(x, gain, weight),
        "called": lambda: ours(x, gain, weight),
        "prepared": lambda: prepared(x),
    }


def block(x: jax.Array, params: dict) -> jax.Array:
    """Pre-norm: projections and a mixing of them per row, then a gated MLP."""
    y = rms_norm(x, params["norm1"])
    q, k, v = (y @ params[name] for name in ("q", "k", "v"))
    h = x + (q * jax.nn.sigmoid(k) + v) @ params["out"]
    z = rms_norm(h, params["norm2"])
    return h + (jax.nn.silu(z @ params["gate"]) * (z @ params["up"])) @ params["down"]


def block_contests(rows: tuple, width: int) -> list[Contest]:
    """The block with its weights frozen."""
    return [Contest("block", (m,), partial(_block_calls, m, width), *BLOCK_DRAWS) for m in rows]


def _block_calls(m: int, width: int) -> dict[str, Callable]:
    """The block as written and prepared, both with one copy of the weights closed over."""
    hidden = 4 * width
    shapes = dict.fromkeys(("q", "k", "v", "out"), (width, width))
    shapes |= {"gate": (width, hidden), "up": (width, hidden), "down": (hidden, width)}
    # Each its own numbers: XLA would compute products with equal constants once.
    params = {name: draw(*shape, seed=n) for n, (name, shape) in enumerate(shapes.items())}
    params |= {"norm1": 1 + 0.1 * draw(width), "norm2": 1 + 0.1 * draw(width)}
    x = draw(m, width)
    prepared = sym_optimize(block, frozen="params").prepare(params=params)
    closed = jax.jit(lambda x: block(x, params))
    return {"plain": lambda: closed(x), "prepared": lambda: prepared(x)}


def minilm_contests(depth: int) -> list[Contest]:
    """The encoder with its weights frozen, one sentence and twelve."""
    out = []
    for count in (1, 12):
        cells = (f"{count} × 32 tokens, {depth} layers",)
        out.append(Contest("MiniLM", cells, partial(_minilm_calls, count, depth), *BLOCK_DRAWS))
    return out


def _minilm_calls(count: int, depth: int) -> dict[str, Callable]:
    """The encoder as written and prepared, both with one copy of the weights closed over."""
    params = weights.load().params
    params = jax.device_put({**params, "layers": params["layers"][:depth]})
    drawn = np.random.default_rng(0).integers(1000, 20_000, size=(count, 32))
    ids = jnp.asarray(drawn, jnp.int32)
    mask = jnp.ones_like(ids)

    def encode(params: dict, ids: jax.Array, mask: jax.Array) -> jax.Array:
        return model.encode(params, None, ids, mask)

    prepared = sym_optimize(encode, frozen="params").prepare(params=params)
    closed = jax.jit(lambda ids, mask: encode(params, ids, mask))
    return {"plain": lambda: closed(ids, mask), "prepared": lambda: prepared(ids, mask)}


def tell_frozen(contests: list[Contest], draws: dict[str, harness.Draws], kind: str) -> list[list]:
    """Prepared against plain with the same arrays closed over."""
    out = []
    for contest in contests:
        if contest.kind == kind:
            out.append([*contest.cells, str(draws[contest.name].ratio("prepared", "plain"))])
            print(*out[-1], sep="\t")
    return out


def tell_bytes() -> list[list]:
    """Return the bytes that both forms move, counted from the shapes, not measured."""
    out, k = [], 4096
    for n in COUNTED_OUTPUTS:
        for m in COUNTED_ROWS:
            one = forward(NormLinear(m, k, n, dtype="bfloat16")).bytes_moved
            two = one + 2 * 2 * m * k  # the normalised value, written and read
            cells = (harness.quantity(two, "B"), harness.quantity(one, "B"))
            out.append([m, n, *cells, f"{two / one:.3f}"])
    return out


def tell_decode() -> list[list]:
    """Return True if the blocks for few rows fill a GPU; counted from the table, not measured."""
    out, k, device = [], 4096, DEVICES["h200"]
    for n in (512, 1024, 4096, 6144, 14336):
        for m in (1, 16):
            group = NormGroup((forward(NormLinear(m, k, n, dtype="bfloat16")),))
            cut = norm_blocks(group, "h200")
            programs = -(-m // cut.rows) * -(-n // cut.outputs)
            stage = 2 * cut.step * (cut.rows + cut.outputs)
            fit = max(1, MULTIPROCESSOR_BYTES // (cut.stages * stage))
            flying = min(programs, fit * device.multiprocessors) * (cut.stages - 1) * stage
            covered = flying / device.bytes_per_s
            floor = group.bytes_moved / device.bytes_per_s
            pays = covered * (floor + device.launch_s) / floor
            cells = (harness.quantity(flying, "B"), *map(harness.duration, (floor, covered, pays)))
            out.append([m, n, f"{cut.rows} × {cut.outputs}", programs, *cells])
            print(*out[-1], sep="\t")
    return out


if __name__ == "__main__":
    main()
