"""Loops over an inner axis: kernels read and write their arrays as they are stored."""

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from symjax_rewrite import sym_optimize
from symjax_rewrite.cost.device_profiles import DEVICES
from symjax_rewrite.kernel_selection.scans import scan_builder
from symjax_rewrite.pallas_kernels.scan.spec import result_axes
from symjax_rewrite.pallas_kernels.scan.triton import scan_triton
from tests.profiles import changed
from tests.programs import assert_close

BATCH, LENGTH, WIDTH, STATES = 2, 24, 4, 3


def step(A: Any, h: Any, now: Any) -> Any:
    x, dt, b, c = now
    h = jnp.exp(dt[..., None] * A) * h + (dt * x)[..., None] * b[..., None, :]
    return h, jnp.einsum("...dn,...n->...d", h, c)


def batch_first(x, dt, A, b, c, reverse=False):
    """A selective scan of [batch, time, channels]."""
    xs = [jnp.moveaxis(v, 1, 0) for v in (x, dt, b, c)]
    start = jnp.zeros((x.shape[0], *A.shape), x.dtype)
    return jnp.moveaxis(lax.scan(lambda *s: step(A, *s), start, xs, reverse=reverse)[1], 0, 1)


def of_sequences(x, dt, A, b, c):
    """The same of one sequence, for `vmap`."""
    return lax.scan(lambda *s: step(A, *s), jnp.zeros(A.shape), (x, dt, b, c))[1]


def by_index(x, dt, A, b, c):
    """The same by indices of a loop."""

    def turn(t, carried):
        h, out = carried
        h, y = step(A, h, (x[:, t], dt[:, t], b[:, t], c[:, t]))
        return h, out.at[:, t].set(y)

    start = jnp.zeros((x.shape[0], *A.shape)), jnp.zeros_like(x)
    return lax.fori_loop(0, LENGTH, turn, start)[1]


def in_half(x, *args):
    return batch_first(x, *args).astype(jnp.bfloat16)


def from_half(x, dt, A, b, c):
    """Steps of arrays in half precision, which are widened after their axes were moved."""
    xs = [jnp.moveaxis(v.astype(jnp.bfloat16), 1, 0) for v in (x, dt, b, c)]
    start, wide = jnp.zeros((x.shape[0], *A.shape)), [v.astype(jnp.float32) for v in xs]

    def turn(h, now):
        h, y = step(A, h, now)
        return h, y + now[0]

    return jnp.moveaxis(lax.scan(turn, start, wide)[1], 0, 1).astype(jnp.bfloat16)


def read_both_ways(x, *args):
    y = jnp.moveaxis(batch_first(x, *args), 1, 0)
    return y, jnp.sin(jnp.moveaxis(y, 0, 1))


def channels_first(x, dt, A, b, c):
    """The channels of every step change places with the batch: their arrays are transposed."""
    xs = [v.transpose(1, 2, 0) for v in (x, dt)], [v.transpose(1, 0, 2) for v in (b, c)]

    def turn(h, now):
        (x, dt), rest = now
        return step(A, h, (x.T, dt.T, *rest))

    return lax.scan(turn, jnp.zeros((x.shape[0], *A.shape)), xs)[1].transpose(1, 0, 2)


FORMS: dict[str, tuple[Callable, int]] = {  # the place of the steps in x, and in the result
    "batch first": (batch_first, 1),
    "reversed": (lambda *args: batch_first(*args, reverse=True), 1),
    "vmap": (jax.vmap(of_sequences, (0, 0, None, 0, 0)), 1),
    "by index": (by_index, 1),
    "rounded": (in_half, 1),
    "widened": (from_half, 1),
    "read both ways": (read_both_ways, 0),
    "channels first": (channels_first, 1),
}


@pytest.fixture
def specs(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The scans that run, in Pallas' interpreter."""

    def interpreted(spec, *operands, backend):
        made.append(spec)
        return scan_triton(spec, *operands, interpret=True)

    made: list[Any] = []
    monkeypatch.setattr(scan_builder, "scan", interpreted)
    small = changed(DEVICES["h200"], loops={"least_unwritten_bytes": 1})
    monkeypatch.setitem(DEVICES, "h200", small)
    return made


@pytest.mark.parametrize("name", FORMS)
def test_arrays_are_read_as_they_are_stored(name: str, specs: list[Any]) -> None:
    fun, place = FORMS[name]
    rng = np.random.default_rng(0)
    shapes = (BATCH, LENGTH, WIDTH), (WIDTH, STATES), (BATCH, LENGTH, STATES)
    x, dt, A, b, c = (rng.uniform(0.1, 1, shapes[k]).astype("float32") for k in (0, 0, 1, 2, 2))
    args = (x, dt, -A, b, c)
    ours = sym_optimize(fun, kernels="triton", device="h200", on_unsupported="error")
    assert_close(jax.jit(fun)(*args), ours(*args), 1e-2 if fun in (in_half, from_half) else 1e-5)
    spec = specs[0]
    read = [o.axes.index(spec.time) for o in spec.operands if spec.time in o.axes]
    stored = [1, 1, 0, 0] if fun is channels_first else [1] * 4
    assert sorted(read) == sorted(stored)
    assert result_axes(spec)[0].index(spec.time) == place


@pytest.mark.lowering
@pytest.mark.filterwarnings("ignore:.*[Tt]riton.*:DeprecationWarning")
def test_nothing_is_transposed_around_a_kernel(one_device: None, lower: Callable) -> None:
    wide, shared = (2, 256, 64), (2, 256, 16)
    avals = [jax.ShapeDtypeStruct(s, "float32") for s in (wide, wide, (64, 16), shared, shared)]
    text = lower(jax.jit(sym_optimize(batch_first, device="h200")), avals).as_text()
    assert "triton" in text
    moved = re.findall(r"stablehlo\.transpose (%\S+),.*dims = (\[.*?\])", text)
    assert [order for _, order in moved] in ([], ["[1, 0, 2]"] * 2), moved  # there and back
