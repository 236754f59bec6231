"""Random programs as data: printable, runnable, and small enough to cut apart when they fail."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


@dataclasses.dataclass(frozen=True, slots=True)
class Input:
    """An argument. kind: how its values are drawn (see `draw`)."""

    shape: tuple[int, ...]
    dtype: str
    kind: str = "normal"


@dataclasses.dataclass(frozen=True, slots=True)
class Step:
    """One line. text: a template over `{0}`, `{1}`, ... (operands), `{body0}`, ... (functions)."""

    text: str
    args: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: str
    bodies: tuple[Program, ...] = ()


Node = Input | Step
FORMS = ("single", "tuple", "dict", "nested")


@dataclasses.dataclass(frozen=True, slots=True)
class Program:
    """Nodes in order (inputs may stand anywhere), and the numbers of those returned."""

    nodes: tuple[Node, ...]
    outputs: tuple[int, ...]
    form: str = "tuple"

    @property
    def inputs(self) -> list[int]:
        """Numbers of the arguments."""
        return [k for k, n in enumerate(self.nodes) if isinstance(n, Input)]

    @property
    def size(self) -> int:
        """Count the lines, bodies included."""
        steps = [n for n in self.nodes if isinstance(n, Step)]
        return len(steps) + sum(b.size for s in steps for b in s.bodies)

    def source(self, name: str = "program", indent: str = "") -> str:
        """Python source of a function of the inputs."""
        names = [f"{'x' if isinstance(n, Input) else 'v'}{k}" for k, n in enumerate(self.nodes)]
        lines = [f"{indent}def {name}({', '.join(names[k] for k in self.inputs)}):"]
        inner = indent + "    "
        for k, n in enumerate(self.nodes):
            if isinstance(n, Input):
                lines.append(f"{inner}# {names[k]}: {n.dtype}{list(n.shape)} {n.kind}")
                continue
            called = {f"body{j}": f"f{k}_{j}" for j in range(len(n.bodies))}
            for j, body in enumerate(n.bodies):
                lines.append(body.source(f"f{k}_{j}", inner))
            text = n.text.format(*(names[a] for a in n.args), **called)
            lines.append(f"{inner}{names[k]} = {text}  # {n.dtype}{list(n.shape)}")
        lines.append(f"{inner}return {_result(self.form, [names[k] for k in self.outputs])}")
        return "\n".join(lines)

    def function(self) -> Callable[..., Any]:
        """The program as a Python function."""
        space: dict[str, Any] = {"jax": jax, "jnp": jnp, "lax": lax, "np": np}
        exec(compile(self.source(), "<program>", "exec"), space)
        return space["program"]

    def specs(self) -> list[jax.ShapeDtypeStruct]:
        """Shapes, dtypes and weak types of the inputs."""
        return [
            jax.ShapeDtypeStruct(n.shape, n.dtype, weak_type=n.kind == "python")
            for n in self.nodes
            if isinstance(n, Input)
        ]

    def arguments(self, seed: int = 0) -> list[np.ndarray]:
        """Values for the inputs."""
        rng = np.random.default_rng(seed)
        return [draw(rng, n) for n in self.nodes if isinstance(n, Input)]


def _result(form: str, names: list[str]) -> str:
    if form == "single" and len(names) == 1:
        return names[0]
    if form == "dict":
        return "{" + ", ".join(f"'{chr(122 - k)}': {n}" for k, n in enumerate(names)) + "}"
    if form == "nested":
        return f"([{', '.join(names)}], None, {{'first': {names[0]}}})"
    return "(" + "".join(f"{n}, " for n in names) + ")"


def draw(rng: np.random.Generator, n: Input) -> np.ndarray:
    """Values of an input."""
    dtype = np.dtype(n.dtype)
    if dtype == np.bool_:
        return np.asarray(rng.random(n.shape) < 0.6)
    if dtype.kind in "iu" and n.kind == "wild":
        return np.asarray(rng.integers(0 if dtype.kind == "u" else -9, 12, n.shape)).astype(dtype)
    if dtype.kind in "iu" and n.kind == "wide":
        info = np.iinfo(dtype)
        return np.asarray(rng.integers(info.min, info.max, n.shape, dtype, endpoint=True))
    if dtype.kind in "iu":
        return np.asarray(rng.integers(0 if dtype.kind == "u" else -3, 5, n.shape)).astype(dtype)
    x: Any = rng.standard_normal(n.shape)
    if dtype.kind == "c":
        x = x + 1j * rng.standard_normal(n.shape)
    if n.kind == "ints":
        x = np.round(2 * x)
    elif n.kind == "positive":
        x = 0.5 + np.abs(x)
    elif n.kind == "offset":
        x = 100 + x
    elif n.kind == "far":
        x = 1e4 + x
    elif n.kind == "large":
        x = 300 * x
    elif n.kind == "ties":
        x = np.round(x)
    elif n.kind == "small":
        x = 1e-3 * x
    elif n.kind == "special":
        odd = rng.choice([np.nan, np.inf, -np.inf, 0.0, -0.0], n.shape)
        x = np.where(rng.random(n.shape) < 0.3, odd, x)
    return np.asarray(x).astype(dtype)


def tidy(p: Program) -> Program:
    """The program without what its outputs do not need."""
    live: set[int] = set()
    stack = list(p.outputs)
    while stack:
        k = stack.pop()
        if k not in live:
            live.add(k)
            n = p.nodes[k]
            stack.extend(n.args if isinstance(n, Step) else ())
    to = {k: j for j, k in enumerate(sorted(live))}
    nodes = []
    for k in sorted(live):
        n = p.nodes[k]
        if isinstance(n, Step):
            n = dataclasses.replace(n, args=tuple(to[a] for a in n.args))
        nodes.append(n)
    return Program(tuple(nodes), tuple(to[k] for k in p.outputs), p.form)


def smaller(p: Program) -> Iterator[Program]:
    """Simpler programs, the most drastic cuts first; each must still be checked to run."""
    if len(p.outputs) > 1:
        for k in p.outputs:
            yield tidy(dataclasses.replace(p, outputs=(k,)))
        if len(p.outputs) > 2:
            for k in range(len(p.outputs)):
                yield tidy(dataclasses.replace(p, outputs=p.outputs[:k] + p.outputs[k + 1 :]))
    if p.form != "tuple":
        yield dataclasses.replace(p, form="tuple")
    steps = [k for k, n in enumerate(p.nodes) if isinstance(n, Step)]
    last = set(p.outputs)
    for k in reversed(steps):
        n = p.nodes[k]
        assert isinstance(n, Step)
        if k in last:
            for a in n.args:
                yield tidy(
                    dataclasses.replace(
                        p, outputs=tuple(dict.fromkeys(a if o == k else o for o in p.outputs))
                    )
                )
            continue
        yield tidy(_with(p, k, Input(n.shape, n.dtype)))
    for k in reversed(steps):
        n = p.nodes[k]
        assert isinstance(n, Step)
        for a in n.args:
            other = p.nodes[a]
            if (other.shape, other.dtype) == (n.shape, n.dtype) and a != k:
                yield tidy(_renamed(p, k, a))
        for j, body in enumerate(n.bodies):
            for cut in _smaller_body(body):
                bodies = (*n.bodies[:j], cut, *n.bodies[j + 1 :])
                yield _with(p, k, dataclasses.replace(n, bodies=bodies))
    for k, n in enumerate(p.nodes):
        if isinstance(n, Input) and n.kind != "normal":
            yield _with(p, k, dataclasses.replace(n, kind="normal"))


def _smaller_body(body: Program) -> Iterator[Program]:
    """Bodies keep their inputs: operands are exchanged, dead lines dropped."""
    for k, n in reversed(list(enumerate(body.nodes))):
        if not isinstance(n, Step):
            continue
        for a, other in enumerate(body.nodes[:k]):
            if (other.shape, other.dtype) == (n.shape, n.dtype):
                yield _drop_dead(_renamed(body, k, a))


def _drop_dead(p: Program) -> Program:
    live: set[int] = set(p.inputs)
    stack = list(p.outputs)
    while stack:
        k = stack.pop()
        n = p.nodes[k]
        live.add(k)
        stack.extend(n.args if isinstance(n, Step) else ())
    keep = dataclasses.replace(p, outputs=(*p.outputs, *(k for k in p.inputs)))
    out = tidy(keep)
    return dataclasses.replace(out, outputs=out.outputs[: len(p.outputs)])


def _with(p: Program, k: int, node: Node) -> Program:
    return dataclasses.replace(p, nodes=(*p.nodes[:k], node, *p.nodes[k + 1 :]))


def _renamed(p: Program, old: int, new: int) -> Program:
    nodes = tuple(
        dataclasses.replace(n, args=tuple(new if a == old else a for a in n.args))
        if isinstance(n, Step)
        else n
        for n in p.nodes
    )
    return Program(nodes, tuple(new if k == old else k for k in p.outputs), p.form)
