"""Data classes of the library are those of the standard library, to all who use them."""

import copy
import dataclasses
import pickle
import re
from dataclasses import FrozenInstanceError, field, fields, replace
from typing import Any, ClassVar

import pytest

from symjax_rewrite import data_classes
from tests.test_layers import MODULES

# Looked up at run time: type checkers read `dataclass` as the standard library's.
BOTH = {"standard": dataclasses.dataclass, "ours": vars(data_classes)["dataclass"]}


def classes(dataclass: Any) -> dict[str, type]:
    @dataclass
    class Plain:
        x: int
        y: int = 2

    @dataclass(frozen=True, slots=True)
    class Frozen:
        name: str
        kind: ClassVar[str] = "kind"
        shape: tuple[int, ...] = ()
        fun: Any = field(default=None, compare=False, repr=False)
        sizes: dict = field(default_factory=dict, hash=False)

        def __post_init__(self):
            if not self.name:
                raise ValueError("no name")

    @dataclass(frozen=True, slots=True)
    class Further(Frozen):
        more: int = 1

    @dataclass(slots=True)
    class Counted:
        x: float
        made: list = field(default_factory=list)
        count: int = field(default=0, init=False)
        found: dict = field(default_factory=dict, init=False)
        later: int = field(init=False)

        def __post_init__(self):
            self.later = self.count + 1

    @dataclass(eq=False, slots=True)
    class Known:
        x: int

    @dataclass(slots=True)
    class Own:
        x: int

        def __eq__(self, other):
            return self.x % 2 == other.x % 2

        def __hash__(self):
            return self.x % 2

        def __repr__(self):
            return f"<{self.x}>"

    @dataclass(slots=True, init=False, repr=False)
    class Empty:
        pass

    return {c.__name__: c for c in (Plain, Frozen, Further, Counted, Known, Own, Empty)}


def seen(call: Any) -> Any:
    """Return what a call gives, as text, or the type of its error."""
    try:
        return repr(call()).replace("ours", "standard")
    except Exception as error:
        return type(error)


CALLS = {
    "Plain": [lambda c: c(1), lambda c: c(), lambda c: c(1, z=3), lambda c: vars(c(1))],
    "Frozen": [
        lambda c: c("a"),
        lambda c: c(""),
        lambda c: c("a", fun=max) == c("a", fun=min),
        lambda c: c("a", (1,)) == c("a"),
        lambda c: hash(c("a", sizes={1: 2})) == hash(c("a")),
        lambda c: setattr(c("a"), "name", "b"),
        lambda c: delattr(c("a"), "name"),
        lambda c: replace(c("a"), shape=(3,)),
        lambda c: copy.copy(c("a", (1,))) == copy.deepcopy(c("a", (1,))),
        lambda c: c("a").sizes is not c("a").sizes,
        lambda c: [f.name for f in fields(c)],
        lambda c: (c.__match_args__, c.__slots__, c.kind),
        lambda c: dataclasses.asdict(c("a")),
    ],
    "Further": [
        lambda c: c("a", more=2),
        lambda c: c("a") == c("a"),
        lambda c: {c("a"): 1}[c("a")],
    ],
    "Counted": [lambda c: c(1.0), lambda c: hash(c(1.0)), lambda c: c(1.0) != c(2.0)],
    "Known": [lambda c: c(1) == c(1), lambda c: len({c(1), c(1)}), lambda c: setattr(c(1), "x", 2)],
    "Own": [lambda c: c(1) == c(3), lambda c: {c(1), c(3)}, lambda c: c(1)],
    "Empty": [lambda c: c() == c(), lambda c: c(1)],
}


@pytest.mark.parametrize("name", CALLS)
def test_the_same_as_of_the_standard_library(name):
    standard, ours = (classes(dataclass)[name] for dataclass in BOTH.values())
    for call in CALLS[name]:
        assert seen(lambda c=call: c(ours)) == seen(lambda c=call: c(standard))


def test_frozen_instances_are_pickled():
    from symjax_rewrite.pallas_kernels.fold.spec import TopK

    made = TopK(3)
    assert pickle.loads(pickle.dumps(made)) == made
    with pytest.raises(FrozenInstanceError):
        made.k = 4  # pyright: ignore[reportAttributeAccessIssue]


def test_every_module_defines_data_classes_in_this_way():
    sources = {name: path.read_text(encoding="utf-8") for name, path in MODULES.items()}
    found = re.compile(r"^from dataclasses import .*\bdataclass\b", re.MULTILINE)
    assert [name for name, text in sources.items() if found.search(text)] == []
