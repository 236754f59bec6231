"""Step programs: elementwise terms in the order in which a kernel computes them.

Recognisers write the computation of a kernel on one tile, row or state as steps. Equal steps are
one step. Specs compare programs by `key_of`: functions made of equal steps are equal.

    p = StepProgram()
    x = p.add("value", 0, (), "float32")
    p.add("apply", ("map", ("exp", ())), (x,), "float32")
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

from symjax_rewrite.ir.dataflow import cone

Item = TypeVar("Item")


class Step(NamedTuple):
    """One step: its kind, the data that the kind needs, the numbers of earlier steps, a dtype."""

    kind: str
    data: Any
    args: tuple[int, ...]
    dtype: str


Handler = Callable[[Any, list[Any], str], Any]  # of a step's data, its arguments' values, its dtype
Handlers = Mapping[str, Handler]


@dataclass(slots=True)
class StepProgram:
    """Steps under construction.

    known: the number of each step, by its key. The text of data tells 0.0 from -0.0.
    """

    steps: list[Step] = field(default_factory=list, init=False)
    known: dict[tuple, int] = field(default_factory=dict, init=False)

    def add(self, kind: str, data: Any = None, args: tuple[int, ...] = (), dtype: str = "") -> int:
        """Return the number of a step; a new step is added."""
        step = Step(kind, data, args, dtype)
        number = self.known.setdefault(step_key(step), len(self.steps))
        if number == len(self.steps):
            self.steps.append(step)
        return number

    def cast(self, step: int, dtype: str) -> int:
        """Return the step that casts a step; the step itself where it has the dtype."""
        return step if self.steps[step].dtype == dtype else self.add("cast", None, (step,), dtype)


def place_in(items: list[Item], item: Item) -> int:
    """Return the place of an item in a list; a new item is added."""
    if item not in items:
        items.append(item)
    return items.index(item)


def step_key(step: Step) -> tuple:
    """Return a hashable key that is equal for equal steps."""
    return (step.kind, repr(step.data), step.args, step.dtype)


def key_of(steps: Iterable[Step]) -> tuple:
    """Return a hashable key that is equal for equal programs."""
    return tuple([step_key(step) for step in steps])


def pruned(steps: Sequence[Step], roots: Iterable[int]) -> tuple[tuple[Step, ...], tuple[int, ...]]:
    """Return the steps that some roots need, renumbered, and the roots' new numbers."""
    roots = tuple(roots)
    live = cone(roots, lambda n: steps[n].args)
    to = {old: new for new, old in enumerate(sorted(live))}
    kept = [steps[n]._replace(args=tuple([to[a] for a in steps[n].args])) for n in to]
    return tuple(kept), tuple([to[n] for n in roots])


def run(steps: Iterable[Step], handlers: Handlers) -> list[Any]:
    """Return the value of every step; `handlers` holds a function for every kind of step."""
    made: list[Any] = []
    for kind, data, args, dtype in steps:
        made.append(handlers[kind](data, [made[a] for a in args], dtype))
    return made
