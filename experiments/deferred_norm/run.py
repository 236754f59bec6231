"""Deferred normalisation: a norm and the linear layer after it, before and after `sym_optimize`.

python experiments/deferred_norm/run.py            # layers, a block, MiniLM, a GPU if any
python experiments/deferred_norm/run.py --quick    # few sizes, few rounds: a smoke test
"""

import argparse
import functools
import sys
from collections.abc import Callable
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent / "minilm"), str(HERE.parent)]

import harness
import jax
import jax.numpy as jnp
import model
import numpy as np
import weights

from symjax_rewrite import sym_optimize
from symjax_rewrite.device import DEVICES
from symjax_rewrite.pallas_kernels.fold_blocks import MULTIPROCESSORS
from symjax_rewrite.pallas_kernels.norm_blocks import norm_blocks
from symjax_rewrite.pallas_kernels.norm_layer import NormLinear, forward
from symjax_rewrite.pallas_kernels.norm_linear import norm_linear, supports
from symjax_rewrite.pallas_kernels.norm_spec import NormGroup

ROWS = (1, 4, 16, 64, 256, 1024, 4096)
SIDES = (1024, 4096)
ASKED = 1.03  # of plain's time, at most
WITHIN = 0.015  # arrays are drawn anew until half a ratio's interval is as narrow as this
LEAST_DRAWS, BLOCK_DRAWS = 8, (8, 30)  # of a layer at least, of a block and MiniLM
DRAWS = ((256, 60, 7), (4096, 20, 3))  # rows at most, times that is done at most, pairs of each
MOST_BYTES = 1 << 30  # of the copies of a weight that are kept; programs hold several of each
MULTIPROCESSOR_BYTES = 233472  # of shared memory, H200
DECODING = (
    "Decoding on an H200, bf16, K = 4096: programs of the table's cut, what their pipelines have "
    "on the way from memory, and the latency which that covers at full bandwidth. Sums over K in "
    "parts take a second kernel: its launch would pay only if memory answered as late as the "
    "last column says, and it answers in less than 1 µs."
)
DECODE = ["rows", "N", "block", "programs", "on the way", "floor", "covers", "a split pays from"]
GPU_ROWS, GPU_OUTPUTS = (1, 16, 64, 256, 4096), (4096, 14336)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="few sizes, few rounds")
    parser.add_argument("--rounds", type=int, default=21, help="samples of each program on a GPU")
    chosen = parser.parse_args()
    quick = chosen.quick
    blocks = tell_blocks((1,) if quick else (1, 4, 16, 64), 256 if quick else 1024, quick)
    minilm = tell_minilm(2 if quick else 6, quick)
    shapes = ((1, 16), SIDES[:1]) if quick else (ROWS, SIDES)
    layers, above = tell_layers(*shapes, quick)
    moved = tell_bytes()
    decode = tell_decode()
    gpu = tell_gpu(chosen.rounds)
    if quick:
        return
    header = ["rows", "K", "N", "as called / plain", "prepared / plain"]
    told = ", ".join(f"{most} times up to {rows} rows" for rows, most, _ in DRAWS)
    parts = [
        "RMSNorm with gain, then a linear layer, f32: seconds against plain `jax.jit`. Where "
        "arrays lie in memory makes up to a factor of two, so all are drawn anew till the interval "
        f"of the median (95 %, in brackets) is ±{WITHIN} or narrower, at most {told}. "
        "Where the emitted program is the plain one its ratio is the noise of the machine.",
        harness.markdown_table(header, layers),
        above,
        "A block (norm, Q K V, output, norm, gated MLP; width 1024, hidden 4096), weights frozen: "
        "prepared against plain `jax.jit` with the same arrays closed over; drawn anew likewise.",
        harness.markdown_table(["rows", "prepared / plain"], blocks),
        harness.markdown_table(["MiniLM forward", "prepared / plain"], minilm),
        "Bytes an H200 moves, bf16, K = 4096: two kernels (norm, then product) against one.",
        harness.markdown_table(["rows", "N", "two kernels", "one kernel", "ratio"], moved),
        DECODING,
        harness.markdown_table(DECODE, decode),
        f"On a GPU: {gpu if isinstance(gpu, str) else ''}",
    ]
    if not isinstance(gpu, str):
        parts.append(harness.markdown_table(["rows", "N", "XLA / kernel"], gpu))
    harness.write_table(HERE / "README.md", *parts)
    record = {
        "layers": layers,
        "blocks": blocks,
        "minilm": minilm,
        "bytes": moved,
        "decode": decode,
        "gpu": gpu,
    }
    harness.write_json(HERE / "results.json", record)


def draw(*shape: int, seed: int = 0) -> jax.Array:
    scale = 1 / np.sqrt(shape[0]) if len(shape) > 1 else 1
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape) * scale, jnp.float32)


def rms_norm(x: jax.Array, gain: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6) * gain


def layer(x: jax.Array, gain: jax.Array, weight: jax.Array) -> jax.Array:
    return rms_norm(x, gain) @ weight


def tell_layers(rows: tuple, sides: tuple, quick: bool) -> tuple[list[list], str]:
    """Every shape with and without frozen weights, in turn with the plain program.

    Args:
        rows: of x.
        sides: of the weights.
        quick: one draw of each.

    Returns:
        The cells, and how many ratios stand above what is asked: of one program with itself too.
    """
    out, ratios = [], {"the same program": [], "prepared": []}
    for k in sides:
        for n in sides:
            plain, ours = jax.jit(layer), sym_optimize(layer)
            gain, weight = 1 + draw(k), draw(k, n)
            kept = min(20, MOST_BYTES // weight.nbytes)
            for m in rows:
                x = draw(m, k) * np.sqrt(m)
                make = functools.partial(_layer_calls, plain, ours, x, gain, weight)
                most, pairs = next(how for rows, *how in DRAWS if m <= rows)
                draws = (1, 1) if quick else (LEAST_DRAWS, most)
                runs = harness.interleave_anew(make, WITHIN, pairs, draws, kept)
                called, frozen = (runs.ratio(name, "plain") for name in ("called", "prepared"))
                report = ours.explain(x, gain, weight)
                same = str(report.before.jaxpr) == str(report.after.jaxpr)
                out.append([m, k, n, f"{called}{' (the same program)' * same}", str(frozen)])
                ratios["prepared"].append(frozen)
                ratios["the same program"] += [called] * same
                print(*out[-1], len(runs.runs), sep="\t")
                jax.clear_caches()  # programs hold the weights they close over
    told = (
        f"{name}, {sum(r.median > ASKED for r in found)} of {len(found)} medians (at most "
        f"{max(r.median for r in found):.2f}) and {sum(r.low > ASKED for r in found)} intervals"
        for name, found in ratios.items()
        if found
    )
    return out, f"Above {ASKED}: {'; '.join(told)}."


def _layer_calls(plain: Callable, ours: Callable, *arrays: jax.Array) -> dict[str, Callable]:
    """The layer as written, as called and prepared, on copies of their own."""
    x, gain, weight = (jnp.array(array) for array in arrays)
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


def tell_blocks(rows: tuple, width: int, quick: bool) -> list[list]:
    """The block with its weights frozen."""
    hidden = 4 * width
    shapes = dict.fromkeys(("q", "k", "v", "out"), (width, width))
    shapes |= {"gate": (width, hidden), "up": (width, hidden), "down": (hidden, width)}
    # Each its own numbers: XLA would compute products with equal constants once.
    params = {name: draw(*shape, seed=n) for n, (name, shape) in enumerate(shapes.items())}
    params |= {"norm1": 1 + 0.1 * draw(width), "norm2": 1 + 0.1 * draw(width)}
    out = []
    for m in rows:
        make = functools.partial(_block_calls, params, draw(m, width))
        runs = harness.interleave_anew(make, WITHIN, 9, (1, 1) if quick else BLOCK_DRAWS, 7)
        out.append([m, str(runs.ratio("prepared", "plain"))])
        print(*out[-1], len(runs.runs), sep="\t")
        jax.clear_caches()
    return out


def _block_calls(params: dict, x: jax.Array) -> dict[str, Callable]:
    """The block as written and prepared, both with one copy of the weights closed over."""
    params, x = jax.tree.map(jnp.array, (params, x))
    prepared = sym_optimize(block, frozen="params").prepare(params=params)
    closed = jax.jit(lambda x: block(x, params))
    return {"plain": lambda: closed(x), "prepared": lambda: prepared(x)}


def tell_minilm(depth: int, quick: bool) -> list[list]:
    """The encoder with its weights frozen, one sentence and twelve."""
    params = weights.load().params
    params = jax.device_put({**params, "layers": params["layers"][:depth]})
    draw_ids = np.random.default_rng(0).integers(1000, 20_000, size=(12, 32))
    out = []
    for count in (1, 12):
        make = functools.partial(_minilm_calls, params, draw_ids[:count].astype(np.int32))
        runs = harness.interleave_anew(make, WITHIN, 9, (1, 1) if quick else BLOCK_DRAWS, 5)
        name = f"{count} × 32 tokens, {depth} layers"
        out.append([name, str(runs.ratio("prepared", "plain"))])
        print(*out[-1], len(runs.runs), sep="\t")
        jax.clear_caches()
    return out


def _minilm_calls(params: dict, ids: np.ndarray) -> dict[str, Callable]:
    """The encoder as written and prepared, both with one copy of the weights closed over."""

    def encode(params: dict, ids: jax.Array, mask: jax.Array) -> jax.Array:
        return model.encode(params, None, ids, mask)

    params, tokens = jax.tree.map(jnp.array, (params, ids))
    mask = jnp.ones_like(tokens)
    prepared = sym_optimize(encode, frozen="params").prepare(params=params)
    closed = jax.jit(lambda ids, mask: encode(params, ids, mask))
    return {"plain": lambda: closed(tokens, mask), "prepared": lambda: prepared(tokens, mask)}


def tell_bytes() -> list[list]:
    """What both forms read and write; counted from the shapes, not measured."""
    out, k = [], 4096
    for n in GPU_OUTPUTS:
        for m in GPU_ROWS:
            one = forward(NormLinear(m, k, n, dtype="bfloat16")).bytes_moved
            two = one + 2 * 2 * m * k  # the normalised value, written and read
            cells = (harness.quantity(two, "B"), harness.quantity(one, "B"))
            out.append([m, n, *cells, f"{two / one:.3f}"])
    return out


def tell_decode() -> list[list]:
    """Whether the cuts for few rows fill a GPU; counted from the table, not measured."""
    out, k, device = [], 4096, DEVICES["h200"]
    for n in (512, 1024, 4096, 6144, 14336):
        for m in (1, 16):
            group = NormGroup((forward(NormLinear(m, k, n, dtype="bfloat16")),))
            cut = norm_blocks(group, "h200")
            programs = -(-m // cut.rows) * -(-n // cut.outputs)
            stage = 2 * cut.step * (cut.rows + cut.outputs)
            fit = max(1, MULTIPROCESSOR_BYTES // (cut.stages * stage))
            flying = min(programs, fit * MULTIPROCESSORS) * (cut.stages - 1) * stage
            covered = flying / device.bytes_per_s
            floor = group.bytes_moved / device.bytes_per_s
            pays = covered * (floor + device.launch_s) / floor
            cells = (harness.quantity(flying, "B"), *map(harness.duration, (floor, covered, pays)))
            out.append([m, n, f"{cut.rows} × {cut.outputs}", programs, *cells])
            print(*out[-1], sep="\t")
    return out


def tell_gpu(rounds: int) -> list[list] | str:
    """The kernel against XLA's two, where a GPU is at hand."""
    if jax.default_backend() != "gpu":
        print("GPU: not measured")
        return "not measured (none at hand)."
    out, k = [], 4096
    for n in GPU_OUTPUTS:
        weight = draw(k, n).astype(jnp.bfloat16)
        for m in GPU_ROWS:
            spec = forward(NormLinear(m, k, n, dtype="bfloat16"))
            if not supports(NormGroup((spec,))):
                continue
            x = draw(m, k).astype(jnp.bfloat16)
            kernel = jax.jit(lambda x, w, spec=spec: norm_linear(spec, x, w))
            written = jax.jit(_as_written)
            calls = {
                "xla": lambda f=written, x=x, w=weight: f(x, w),
                "kernel": lambda f=kernel, x=x, w=weight: f(x, w),
            }
            out.append([m, n, str(harness.interleave(calls, rounds).ratio("xla", "kernel"))])
            print(*out[-1], sep="\t")
    return out


def _as_written(x: jax.Array, weight: jax.Array) -> jax.Array:
    return rms_norm(x.astype(jnp.float32), jnp.float32(1)).astype(x.dtype) @ weight


if __name__ == "__main__":
    main()
