"""Programs as data: named sizes, inputs and lines, that can be printed, run and made smaller.

A shape is a tuple of expressions of named sizes (`"n"`, `"h*e"`), so that halving one size gives a
valid program again.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

Shape = tuple[str, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Input:
    """An argument. kind: how its values are drawn (`draw`); an integer input says below what."""

    name: str
    shape: Shape
    kind: str = "normal"
    below: str = "1"

    @property
    def dtype(self) -> str:
        return {"index": "int32", "mask": "bool"}.get(self.kind, "float32")


@dataclasses.dataclass(frozen=True, slots=True)
class Line:
    """The value `name = text`."""

    name: str
    text: str
    shape: Shape


@dataclasses.dataclass(frozen=True, slots=True)
class Wrap:
    """A transformation of the function made so far.

    kind: grad, vmap, or a loop (scan, outputs, fori, while). over: the inputs it differentiates,
    maps, or carries. size: the name of the size of a mapped axis or of a trip count.
    """

    kind: str
    over: tuple[str, ...]
    size: str = ""


LOOPS = {
    "scan": "lax.scan(lambda h, _: ({f}, None), {x}, None, length={T})[0]",
    "outputs": "lax.scan(lambda h, _: ({f}, jnp.sum(h)), {x}, None, length={T})",
    "fori": "lax.fori_loop(0, {T}, lambda _, h: {f}, {x})",
    "while": "lax.while_loop(lambda s: (s[0] < {T}) & (jnp.sum(s[1]) != 1e30), "
    "lambda s: (s[0] + 1, {g}), (0, {x}))[1]",
}


@dataclasses.dataclass(frozen=True, slots=True)
class Program:
    """A function of its inputs: lines, then transformations of them, innermost first."""

    sizes: tuple[tuple[str, int], ...]
    inputs: tuple[Input, ...]
    lines: tuple[Line, ...]
    result: str
    wraps: tuple[Wrap, ...] = ()
    family: str = ""

    def size(self, expression: str) -> int:
        """Return the number that an expression of named sizes stands for."""
        return eval(expression, {}, dict(self.sizes))

    def shape_of(self, x: Input) -> tuple[int, ...]:
        """Return the shape of an argument: its own, behind the axes it is mapped over."""
        mapped = [w.size for w in reversed(self.wraps) if w.kind == "vmap" and x.name in w.over]
        return tuple(self.size(s) for s in (*mapped, *x.shape))

    def specs(self) -> list[jax.ShapeDtypeStruct]:
        """Return shapes and dtypes of the arguments."""
        return [jax.ShapeDtypeStruct(self.shape_of(x), x.dtype) for x in self.inputs]

    def arguments(self, seed: int = 0) -> list[jax.Array]:
        """Return values for the arguments."""
        rng = np.random.default_rng(seed)
        return [
            jnp.asarray(draw(rng, x.kind, self.shape_of(x), self.size(x.below)))
            for x in self.inputs
        ]

    def source(self) -> str:
        """Return the program as Python text."""
        names = ", ".join(x.name for x in self.inputs)
        out = [f"def program({names}):"]
        for x in self.inputs:
            out.append(f"    # {x.name}: {x.dtype}{list(self.shape_of(x))} {x.kind}")
        used = "".join(str(part) for part in (self.lines, self.wraps, self.inputs))
        sizes = [(k, v) for k, v in self.sizes if re.search(rf"\b{k}\b", used)]
        if sizes:
            left, right = (", ".join(map(str, side)) for side in zip(*sizes, strict=True))
            out.append(f"    {left} = {right}")
        out.append(f"    def f0({names}):")
        out += [f"        {line.name} = {line.text}" for line in self.lines]
        out.append(f"        return {self.result}")
        for k, wrap in enumerate(self.wraps):
            out.append(f"    def f{k + 1}({names}):")
            out.append(f"        return {self._wrapped(wrap, f'f{k}')}")
        out.append(f"    return f{len(self.wraps)}({names})")
        return "\n".join(out)

    def _wrapped(self, wrap: Wrap, f: str) -> str:
        names = [x.name for x in self.inputs]
        arguments = ", ".join(names)
        if wrap.kind == "grad":
            places = tuple(names.index(name) for name in wrap.over)
            leaves = f"jax.tree.leaves({f}({arguments}))"
            scalar = f"lambda {arguments}: sum(jnp.sum(1.0 * y) for y in {leaves})"
            return f"jax.grad({scalar}, {places})({arguments})"
        if wrap.kind == "vmap":
            axes = ", ".join("0" if name in wrap.over else "None" for name in names)
            return f"jax.vmap({f}, ({axes},))({arguments})"
        call = lambda h: f"{f}({', '.join(h if n in wrap.over else n for n in names)})"  # noqa: E731
        return LOOPS[wrap.kind].format(f=call("h"), g=call("s[1]"), x=wrap.over[0], T=wrap.size)

    def function(self) -> Callable[..., Any]:
        """Return the program as a Python function."""
        return function_of(self.source())

    def with_size(self, name: str, value: int) -> Program:
        """Return the program with another number for a size."""
        sizes = tuple((k, value if k == name else v) for k, v in self.sizes)
        return dataclasses.replace(self, sizes=sizes)

    def pruned(self) -> Program:
        """Return the program without lines, inputs and sizes that its result does not need."""
        need, lines = {self.result}, []
        for line in reversed(self.lines):
            if line.name in need:
                need |= {*_names(line.text)}
                lines.append(line)
        over = {name for w in self.wraps for name in w.over}
        loops = {name for w in self.wraps if w.kind in LOOPS for name in w.over}
        inputs = tuple(x for x in self.inputs if x.name in need | loops)
        kept = {x.name for x in inputs}
        wraps = tuple(
            dataclasses.replace(w, over=tuple(n for n in w.over if n in kept)) for w in self.wraps
        )
        wraps = tuple(w for w in wraps if w.over or not over)
        texts = [line.text for line in lines] + [w.size for w in wraps]
        texts += [s for line in lines for s in line.shape]
        texts += [s for x in inputs for s in (*x.shape, x.below)]
        read = {name for text in texts for name in _names(text)}
        sizes = tuple((k, v) for k, v in self.sizes if k in read)
        return dataclasses.replace(
            self, lines=tuple(reversed(lines)), inputs=inputs, wraps=wraps, sizes=sizes
        )

    def smaller(self) -> Iterator[Program]:
        """Yield programs with a part removed, then those with a size halved."""
        for k in range(len(self.wraps)):
            wraps = self.wraps[:k] + self.wraps[k + 1 :]
            yield dataclasses.replace(self, wraps=wraps).pruned()
        for line in reversed(self.lines[:-1]):
            yield dataclasses.replace(self, result=line.name).pruned()
        floats = [x for x in self.inputs if x.dtype == "float32"]
        shapes = {x.name: x.shape for x in (*floats, *self.lines)}
        for line in self.lines:
            for name in dict.fromkeys(_names(line.text)):
                if shapes.get(name) == line.shape:
                    yield self._bypassed(line, name).pruned()
        for name, value in sorted(self.sizes, key=lambda item: -item[1]):
            if value > 1:
                yield self.with_size(name, value // 2)

    def _bypassed(self, gone: Line, by: str) -> Program:
        """Return the program that reads another value in place of a line's."""
        swap = functools.partial(re.sub, rf"\b{gone.name}\b", by)
        lines = tuple(
            dataclasses.replace(x, text=swap(x.text)) for x in self.lines if x is not gone
        )
        result = by if self.result == gone.name else self.result
        return dataclasses.replace(self, lines=lines, result=result)


def _names(text: str) -> list[str]:
    return re.findall(r"\b[A-Za-z_]\w*\b", text)


def function_of(source: str) -> Callable[..., Any]:
    """Return the function `program` of a Python text."""
    space: dict[str, Any] = {"jax": jax, "jnp": jnp, "lax": lax, "np": np}
    exec(compile(source, "<program>", "exec"), space)
    return space["program"]


def draw(rng: np.random.Generator, kind: str, shape: Sequence[int], below: int) -> np.ndarray:
    """Return the values of an argument."""
    if kind == "index":
        return rng.integers(0, max(below, 1), shape, dtype=np.int32)
    if kind == "mask":
        return rng.random(shape) < 0.7
    values = rng.standard_normal(shape, dtype=np.float32)
    if kind == "weight":  # keeps the scale of what it multiplies
        return values / np.float32(max(shape[-2] if len(shape) > 1 else 1, 1) ** 0.5)
    if kind == "positive":
        return np.abs(values) + np.float32(0.1)
    return values
