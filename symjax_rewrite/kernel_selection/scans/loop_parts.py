"""Loops in parts that run one after the other: kernels, loops, equations for all steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import jax.numpy as jnp

from symjax_rewrite import jax_internals
from symjax_rewrite.ir.flat_program import Equation, Value
from symjax_rewrite.loops.loop import Loop, Read, get, run_equations, stage
from symjax_rewrite.loops.motion import all_steps


@dataclass(slots=True)
class LoopValues:
    """Values of a loop while its parts run.

    known: loop-invariant values. steps: values of every step, stacked. finals: last states, by
    number of the carry.
    """

    loop: Loop
    read: Read
    known: dict[int, Any] = field(init=False)
    steps: dict[int, Any] = field(init=False)
    finals: dict[int, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.known, self.steps = self.loop.constants(self.read), self.loop.stacks(self.read)

    def run_all(self, equations: list[Equation]) -> None:
        """Run loop-invariant equations once, and other equations for all steps."""
        moving = []
        for e in equations:
            if e.outvals and all(v in self.known or v in self.steps for v in e.outvals):
                continue  # an earlier part has run it
            if all(not isinstance(v, int) or v in self.known for v in e.invals):
                with jax_internals.equation_scope(self.loop.eqn):
                    run_equations([e], self.known)
            else:
                moving.append(e)
        with jax_internals.equation_scope(self.loop.eqn):
            self.steps.update(all_steps(moving, self.known, self.steps))

    def run_steps(self, part: CarryPart) -> None:
        """Run the steps of some carries."""
        loop = self.loop
        carries = [loop.carries[k] for k in part.carries]
        body = replace(loop.body, equations=part.equations)
        inner = replace(loop, body=body, ys=list(part.ys), carries=carries)
        reads = [v for e in part.equations for v in e.invals]
        inside = {v for v in (*reads, *(c.out for c in carries), *part.ys) if isinstance(v, int)}
        given = {v: x for v, x in self.steps.items() if v in inside}
        made, ys = stage(inner, self.known, given, self.read)
        self.finals.update(zip(part.carries, made, strict=True))
        self.steps.update(zip(part.ys, ys, strict=True))

    def stacked(self, v: Value) -> Any:
        """Return a result of every step, stacked."""
        if isinstance(v, int) and v in self.steps:
            return self.steps[v]
        value = jnp.asarray(get(self.known, v))
        return jnp.broadcast_to(value, (self.loop.length, *value.shape))


class CarryKernel(Protocol):
    """Kernel that runs all steps of one carry."""

    def advance(self, values: LoopValues) -> Any:
        """Add the values of all steps that others read to `values`; return the last state."""
        ...


@dataclass(slots=True)
class CarryPart:
    """Part of a loop: its carries by number, its equations, and its values that later parts read.

    kernel: runs its only carry; None for a loop over the steps. before, after: equations that run
    for all steps before and after the carries.
    """

    carries: tuple[int, ...]
    equations: list[Equation] = field(default_factory=list)
    ys: list[int] = field(default_factory=list)
    kernel: CarryKernel | None = None
    before: list[Equation] = field(default_factory=list)
    after: list[Equation] = field(default_factory=list)


@dataclass(slots=True)
class LoopParts:
    """Loop in parts. seconds: predicted on a CPU, of the loop and of its parts."""

    loop: Loop
    parts: Sequence[CarryPart]
    seconds: tuple[float, float] | None = None

    def run(self, read: Read) -> list[Any]:
        """Return the results of the loop."""
        values = LoopValues(self.loop, read)
        for part in self.parts:
            values.run_all(part.before)
            if part.kernel is None:
                values.run_steps(part)
            else:
                values.finals[part.carries[0]] = part.kernel.advance(values)
            values.run_all(part.after)
        finals = [values.finals[k] for k in range(len(self.loop.carries))]
        return self.loop.finish(finals, [values.stacked(v) for v in self.loop.ys], read)
