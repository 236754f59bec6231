"""The builder of random programs: sizes, inputs and lines, and random choices among them."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import TypeVar

from performance_fuzz.program import Input, Line, Shape

T = TypeVar("T")


class Builder:
    """A program under construction. Blocks add lines; `shape` tells the shape of every value."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.sizes: dict[str, int] = {}
        self.inputs: list[Input] = []
        self.lines: list[Line] = []
        self.shape: dict[str, Shape] = {}
        self.used: list[str] = []  # names of blocks

    def pick(self, *options: T) -> T:
        """Return one of the options."""
        return self.rng.choice(options)

    def chance(self, p: float) -> bool:
        """Return True with a probability."""
        return self.rng.random() < p

    def number(self, least: float, most: float) -> int:
        """Return a number, log-uniform; half of them are powers of two or multiples of eight."""
        value = math.exp(self.rng.uniform(math.log(least), math.log(most)))
        kind = self.rng.random()
        if kind < 0.3:
            value = 2 ** round(math.log2(value))
        elif kind < 0.6 and value >= 8:
            value = 8 * round(value / 8)
        return int(min(max(round(value), least), most))

    def size(self, letter: str, least: float, most: float) -> str:
        """Return the name of a new size."""
        name = letter
        while name in self.sizes:
            name += letter
        self.sizes[name] = self.number(least, most)
        return name

    def given(self, letter: str, shape: Sequence[str], kind: str = "normal", below="1") -> str:
        """Return the name of a new input."""
        name = f"{letter}{len(self.inputs)}"
        self.inputs.append(Input(name, tuple(shape), kind, below))
        self.shape[name] = tuple(shape)
        return name

    def weight(self, *shape: str) -> str:
        """Return a new matrix of weights."""
        return self.given("W", shape, "weight")

    def let(self, text: str, *shape: str) -> str:
        """Return the name of a new line."""
        name = f"t{len(self.lines)}"
        self.lines.append(Line(name, text, shape))
        self.shape[name] = shape
        return name
