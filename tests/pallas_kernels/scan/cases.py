"""Scans with their naive formulas in NumPy: one list for every backend's tests."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

from symjax_rewrite.pallas_kernels.fold.spec import Operand
from symjax_rewrite.pallas_kernels.scan.selective_scan import SelectiveScan, forward
from symjax_rewrite.pallas_kernels.scan.spec import Readout, ScanProgram, ScanSpec

Arrays = tuple[np.ndarray, ...]


def plain(
    length: int,
    state: tuple[int, ...],
    a: tuple[str, ...],
    b: tuple[str, ...],
    *,
    dtype: str = "float32",
    start: bool = False,
    states: bool = True,
    last: bool = False,
    **options: Any,
) -> ScanSpec:
    """Build the scan whose operands are `a` and `b`, and the initial state with `start`.

    Args:
        length: number of steps; the axis is called "t".
        state: the shape of a state; its axes are called "0", "1", ...
        a: axes of `a`.
        b: axes of `b`.
        states: True if all states are returned.
        options: `kind` and `reverse` of the `ScanSpec`.

    Example:
        >>> plain(8, (4,), ("t", "0"), ("t", "0"), start=True).shape(2)
        (4,)
    """
    axes = tuple(map(str, range(len(state))))
    operands = [Operand(a, dtype), Operand(b, dtype), *[Operand(axes, dtype)] * start]
    return ScanSpec(
        sizes=(("t", length), *zip(axes, state, strict=True)),
        time="t",
        state=axes,
        operands=tuple(operands),
        coefficients=ScanProgram(_pair, (0, 1), key="pair"),
        readouts=(Readout(),) if states else (),
        last=last,
        start=2 if start else None,
        dtype=dtype,
        **options,
    )


def _pair(values: Any, t: Any) -> Any:
    del t
    return values


@dataclass(frozen=True)
class ScanCase:
    """A scan, the draw of its operands, and its results, flat and in f64."""

    name: str
    spec: ScanSpec
    naive: Callable[..., list[np.ndarray]]
    make: Callable[[ScanSpec], Arrays] = lambda spec: draw(spec)

    def __str__(self) -> str:
        return self.name


def draw(spec: ScanSpec, seed: int = 0) -> Arrays:
    """Random operands; the first, a decay in most cases, between -1 and 1."""
    rng = np.random.default_rng(seed)
    out = []
    for k, operand in enumerate(spec.operands):
        shape = spec.shape(k)
        x = rng.normal(size=shape)
        if np.issubdtype(operand.dtype, np.complexfloating):
            x = x + 1j * rng.normal(size=shape)
        if np.issubdtype(operand.dtype, np.integer):
            x = rng.integers(-3, 4, shape)
        elif k == 0:
            x = x / (0.3 + np.abs(x))
            x = x / np.maximum(1, np.abs(x))
        out.append(np.asarray(x, operand.dtype))
    return tuple(out)


def draw_selective(spec: ScanSpec, seed: int = 0) -> Arrays:
    """x, Δ > 0, A < 0 and the rest as Mamba has them."""
    rng = np.random.default_rng(seed)
    out = [np.asarray(rng.normal(size=spec.shape(k)), "float64") for k in range(len(spec.operands))]
    out[1] = np.exp(out[1] - 2)
    out[2] = -np.exp(out[2])
    return tuple(
        np.asarray(jnp.asarray(x, jnp.dtype(o.dtype)))
        for x, o in zip(out, spec.operands, strict=True)
    )


def wide(x: np.ndarray) -> np.ndarray:
    """In the widest dtype of its kind."""
    x = np.asarray(x)
    if np.issubdtype(x.dtype, np.complexfloating):
        return x.astype(np.complex128)
    return x if np.issubdtype(x.dtype, np.integer) else x.astype(np.float64)


def states(length: int, step: Callable, h: Any, reverse: bool = False) -> tuple[Any, Any]:
    """All states, and the last, of `h = step(t, h)`."""
    out: list[Any] = [None] * length
    for t in reversed(range(length)) if reverse else range(length):
        out[t] = h = step(t, h)
    return np.stack(out), h


def naive_plain(**options: Any) -> Callable[..., list[np.ndarray]]:
    """Both operands with time leading and all axes; all states and the last."""

    def run(a: Any, b: Any, h: Any = None) -> list[np.ndarray]:
        a, b = wide(a), wide(b)
        kind = options.get("kind", "affine")
        empty = {"affine": 0.0, "max-plus": -np.inf, "min-plus": np.inf}[kind]
        h = np.full(b.shape[1:], empty, b.dtype) if h is None else wide(h)
        step = {
            "affine": lambda t, h: a[t] * h + b[t],
            "max-plus": lambda t, h: np.maximum(h + a[t], b[t]),
            "min-plus": lambda t, h: np.minimum(h + a[t], b[t]),
        }[kind]
        return list(states(len(b), step, h, options.get("reverse", False)))

    return run


def plain_case(name: str, length: int = 23, state: tuple[int, ...] = (5,), **options: Any):
    axes = ("t", *map(str, range(len(state))))
    spec = plain(length, state, axes, axes, last=True, **options)
    options = {k: v for k, v in options.items() if k in ("kind", "reverse")}
    return ScanCase(name, spec, naive_plain(**options))


def naive_selective(s: SelectiveScan) -> Callable[..., list[np.ndarray]]:
    def run(*operands: Any) -> list[np.ndarray]:
        p = dict(zip(s.parts, map(wide, operands), strict=True))
        dt = p["dt"] + p.get("bias", 0)
        dt = np.logaddexp(0, dt) if s.softplus else dt
        h = p.get("start", np.zeros((s.batch, s.groups, s.channels // s.groups, s.states)))
        y = np.zeros(p["x"].shape)
        for t in range(s.length):
            a = np.exp(dt[:, t, ..., None] * p["A"])
            h = a * h + (dt[:, t] * p["x"][:, t])[..., None] * p["B"][:, t, :, None]
            y[:, t] = np.einsum("bgen,bgn->bge", h, p["C"][:, t])
        y = y + p.get("D", 0) * p["x"]
        y = y * p["z"] / (1 + np.exp(-p["z"])) if s.gate else y
        return [y, h] if s.last else [y]

    return run


def selective_case(name: str, *sizes: Any, **options: Any) -> ScanCase:
    s = SelectiveScan(*sizes, **options)
    return ScanCase(name, forward(s), naive_selective(s), draw_selective)


def _shared_decay() -> ScanCase:
    """A constant decay per channel, time last in both operand and result, read as |h before|²."""
    spec = ScanSpec(
        sizes=(("t", 25), ("b", 3), ("d", 4)),
        time="t",
        state=("b", "d"),
        operands=(Operand(("d",)), Operand(("b", "d", "t"))),
        coefficients=ScanProgram(lambda values, t: (values[0], values[1] * (t % 2)), (0, 1)),
        readouts=(
            Readout(ScanProgram(lambda h, values, t: h[0] * h[1]), axes=("b", "d", "t")),
            Readout(over=("b", "d")),
        ),
    )

    def naive(a: Any, b: Any) -> list[np.ndarray]:
        a, b = wide(a), wide(b) * (np.arange(25) % 2)
        h, _ = states(25, lambda t, h: a * h + b[..., t], np.zeros((3, 4)))
        before = np.concatenate([np.zeros((1, 3, 4)), h[:-1]])
        return [np.moveaxis(before * h, 0, 2), h.sum((1, 2))]

    return ScanCase("shared decay", spec, naive)


def _sums() -> ScanCase:
    """Sums over each axis of the state and over two of them, as in the gradient of a scan."""
    over = (("b",), ("d",), ("n",), ("d", "n"), ())
    spec = ScanSpec(
        sizes=(("t", 21), ("b", 2), ("d", 300), ("n", 3)),
        time="t",
        state=("b", "d", "n"),
        operands=(Operand(("t", "b", "d")), Operand(("t", "b", "n"))),
        coefficients=ScanProgram(lambda values, t: values, (0, 1)),
        readouts=tuple(
            Readout(ScanProgram(lambda h, values, t: (h[0] + values[0]) * h[1], (1,)), axes)
            for axes in over
        ),
        reverse=True,
    )

    def naive(a: Any, b: Any) -> list[np.ndarray]:
        a, b = wide(a)[..., None], np.repeat(wide(b)[:, :, None], 300, 2)
        h, _ = states(21, lambda t, h: a[t] * h + b[t], np.zeros((2, 300, 3)), True)
        made = (np.concatenate([h[1:], np.zeros_like(h[:1])]) + b) * h
        return [made.sum(tuple(1 + "bdn".index(a) for a in axes)) for axes in over]

    return ScanCase("sums over every axis", spec, naive)


def _unit() -> ScanCase:
    """A linear recurrent unit: complex states, real outputs."""
    spec = ScanSpec(
        sizes=(("t", 33), ("b", 2), ("n", 6)),
        time="t",
        state=("b", "n"),
        operands=(
            Operand(("n",), "complex64"),
            Operand(("b", "t", "n"), "complex64"),
            Operand(("n",), "complex64"),
        ),
        coefficients=ScanProgram(lambda values, t: values, (0, 1)),
        readouts=(
            Readout(
                ScanProgram(lambda h, values, t: (h[1] * values[0]).real, (2,)),
                ("n",),
                dtype="float32",
            ),
        ),
        dtype="complex64",
    )

    def naive(a: Any, b: Any, c: Any) -> list[np.ndarray]:
        a, b, c = wide(a), wide(b), wide(c)
        h, _ = states(33, lambda t, h: a * h + b[:, t], np.zeros((2, 6), complex))
        return [(h * c).real.sum(-1)]

    return ScanCase("complex unit", spec, naive)


def _resetting() -> ScanCase:
    """A state that some steps drop, where it may be infinite or NaN."""

    def make(spec: ScanSpec) -> Arrays:
        a, b = draw(spec)
        a[4::5], b[7], b[11] = 0, np.inf, np.nan
        return a, b

    def naive(a: Any, b: Any) -> list[np.ndarray]:
        step = lambda t, h: a[t] * np.where(a[t] == 0, 0, h) + wide(b[t])  # noqa: E731
        return list(states(len(b), step, np.zeros(b.shape[1:])))

    axes = ("t", "0")
    spec = plain(23, (5,), axes, axes, kind="resetting", last=True)
    return ScanCase("resetting", spec, naive, make)


CASES = [
    plain_case("plain"),
    plain_case("scalar state", state=()),
    plain_case("long", length=1000, state=(3,)),
    plain_case("one step", length=1),
    plain_case("matrix state, given start", state=(4, 3), start=True),
    plain_case("reverse", reverse=True, start=True),
    plain_case("max-plus", kind="max-plus"),
    plain_case("min-plus, reverse", kind="min-plus", reverse=True, start=True),
    plain_case("integers", dtype="int32", start=True),
    plain_case("complex", dtype="complex64", start=True),
    _resetting(),
    _shared_decay(),
    _sums(),
    _unit(),
    selective_case("selective", 2, 26, 12, 4),
    selective_case("selective, groups", 1, 17, 12, 5, groups=3, last=True, start=True),
    selective_case(
        "selective, all parts",
        2, 30, 24, 16,
        skip=True, gate=True, bias=True, softplus=True, start=True, last=True,
    ),
]  # fmt: skip
