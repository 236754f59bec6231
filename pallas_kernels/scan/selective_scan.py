"""The selective scan of Mamba as a scan (imports scan/backward.py).

    h_t = exp(Δ_t·A)·h_{t-1} + Δ_t·B_t·x_t        y_t = (C_t·h_t + D·x_t)·silu(z_t)

with Δ_t possibly softplus(Δ_t + bias). No array of size (batch, length, channels, states) is
stored; exponentials are computed where they are used. Source: Gu & Dao 2023, "Mamba".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from symjax_rewrite import jax_internals
from symjax_rewrite.pallas_kernels.fold.spec import Operand
from symjax_rewrite.pallas_kernels.scan.backward import differentiable_scan
from symjax_rewrite.pallas_kernels.scan.spec import Readout, ScanProgram, ScanSpec, Values

Array = Any

CHANNELS = ("b", "t", "g", "e")  # batch, length, group, channel of the group
STATES = ("b", "t", "g", "n")


@dataclass(frozen=True, slots=True)
class SelectiveScan:
    """Sizes and parts of a selective scan.

    Args:
        batch: sequences.
        length: steps.
        channels: channels of x, over all groups.
        states: states per channel.
        groups: groups of channels that share B and C.
        dtypes: dtypes of the operands, in the order of `parts`; all f32 if empty. y has the dtype
            of x; states have the widest dtype of all, at least f32.
        skip: True if D·x is added.
        gate: True if y is multiplied by silu(z).
        bias: True if Δ has a bias per channel.
        softplus: True if Δ is passed through softplus.
        start: True if an initial state is given.
        last: True if the last state is returned.
    """

    batch: int
    length: int
    channels: int
    states: int
    groups: int = 1
    dtypes: tuple[str, ...] = ()
    skip: bool = False
    gate: bool = False
    bias: bool = False
    softplus: bool = False
    start: bool = False
    last: bool = False

    @property
    def parts(self) -> tuple[str, ...]:
        """Return the operands in order: x, dt, A, B, C, then those present of D, z, bias, start."""
        rest = {"D": self.skip, "z": self.gate, "bias": self.bias, "start": self.start}
        return ("x", "dt", "A", "B", "C", *(name for name, has in rest.items() if has))

    def operand(self, part: str) -> Operand:
        """Return axes and dtype of an operand."""
        axes = {
            **dict.fromkeys(("x", "dt", "z"), CHANNELS),
            **dict.fromkeys(("B", "C"), STATES),
            "A": ("g", "e", "n"),
            "start": ("b", "g", "e", "n"),
        }
        dtype = self.dtypes[self.parts.index(part)] if self.dtypes else "float32"
        return Operand(axes.get(part, ("g", "e")), dtype)

    @property
    def dtype(self) -> str:
        """Return the dtype of the states."""
        return str(jax_internals.joint_dtype("float32", *self.dtypes))

    def reads(self, *parts: str) -> tuple[int, ...]:
        """Return the numbers of those named operands that are present."""
        return tuple(self.parts.index(p) for p in parts if p in self.parts)

    def step_size(self, dt: Array, bias: Values) -> Array:
        """Return Δ from the operands."""
        dt = dt.astype(self.dtype)
        if bias:
            dt = dt + bias[0]
        return jax.nn.softplus(dt) if self.softplus else dt

    def coefficients(self, values: Values, t: Array) -> Values:
        """Return a = exp(Δ·A) and b = (Δ·x)·B."""
        del t
        x, dt, A, B, *bias = values
        dt = self.step_size(dt, tuple(bias))
        return jnp.exp(dt * A), (dt * x.astype(self.dtype)) * B.astype(self.dtype)

    def gated(self, y: Array, values: Values, t: Array) -> Array:
        """Return y with the skip and the gate applied."""
        del t
        rest = list(values)
        if self.skip:
            x, D = rest.pop(0), rest.pop(0)
            y = y + D * x.astype(self.dtype)
        if self.gate:
            y = y * jax.nn.silu(rest.pop(0).astype(self.dtype))
        return y


def forward(s: SelectiveScan) -> ScanSpec:
    """Build the scan, with operands as `s.parts` lists them.

    Results: y [b, t, g, e] and the last state [b, g, e, n].
    """
    finish = None
    if s.skip or s.gate:
        skip = ("x", "D") if s.skip else ()
        finish = ScanProgram(s.gated, s.reads(*skip, "z"), key=("gated", s.skip, s.gate))
    read = ScanProgram(lambda h, values, t: h[1] * values[0].astype(s.dtype), s.reads("C"), "read")
    return ScanSpec(
        sizes=(
            ("b", s.batch),
            ("t", s.length),
            ("g", s.groups),
            ("e", s.channels // max(s.groups, 1)),
            ("n", s.states),
        ),
        time="t",
        state=("b", "g", "e", "n"),
        operands=tuple(s.operand(part) for part in s.parts),
        coefficients=ScanProgram(
            s.coefficients, s.reads("x", "dt", "A", "B", "bias"), key=("selective", s.softplus)
        ),
        readouts=(
            Readout(
                read,
                over=("n",),
                finish=finish,
                axes=CHANNELS,
                dtype=s.operand("x").dtype,
                factor=ScanProgram(lambda values, t: values[0], s.reads("C"), "factor"),
            ),
        ),
        last=s.last,
        start=s.parts.index("start") if s.start else None,
        dtype=s.dtype,
    )


def selective_scan(
    x: Array,
    dt: Array,
    A: Array,
    B: Array,
    C: Array,
    D: Array | None = None,
    z: Array | None = None,
    dt_bias: Array | None = None,
    *,
    softplus: bool = False,
    start: Array | None = None,
    return_last: bool = False,
    backend: str = "auto",
) -> Array | tuple[Array, Array]:
    """Compute Mamba's selective scan; its gradient rematerialises the states in blocks.

    Args:
        x: float[b, l, d].
        dt: float[b, l, d], the step sizes Δ.
        A: float[d, n].
        B: float[b, l, n], or float[b, l, g, n] for g groups of channels.
        C: as B.
        D: float[d], the skip.
        z: float[b, l, d], the gate.
        dt_bias: float[d], added to Δ.
        softplus: True if Δ is passed through softplus.
        start: float[b, d, n], the state before the first step; zero if left out.
        return_last: True if the state after the last step, float32[b, d, n], is returned too.
        backend: as in `scan`.

    Returns:
        y in x's dtype, float[b, l, d]; with `return_last` (y, last state).

    Example:
        >>> x = jnp.ones((1, 3, 2))
        >>> A, B = jnp.zeros((2, 4)), jnp.ones((1, 3, 4))  # no decay: y counts the steps
        >>> selective_scan(x, x, A, B, B)[0, :, 0]
        Array([ 4.,  8., 12.], dtype=float32)
    """
    given = {"x": x, "dt": dt, "A": A, "B": B, "C": C, "D": D, "z": z, "bias": dt_bias}
    given["start"] = start
    batch, length, channels = x.shape
    s = SelectiveScan(
        *(batch, length, channels, A.shape[1]),
        groups=B.shape[2] if B.ndim == 4 else 1,
        dtypes=tuple(str(v.dtype) for v in given.values() if v is not None),
        skip=D is not None,
        gate=z is not None,
        bias=dt_bias is not None,
        softplus=softplus,
        start=start is not None,
        last=return_last,
    )
    spec = forward(s)
    operands = [jnp.reshape(given[p], spec.shape(k)) for k, p in enumerate(s.parts)]
    y, *last = differentiable_scan(spec, backend, *operands)
    y = y.reshape(x.shape)
    return (y, last[0].reshape(*x.shape[::2], A.shape[1])) if return_last else y
