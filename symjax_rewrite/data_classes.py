"""`dataclass`, as in the standard library, but cheap to define.

The standard library compiles up to six methods of every class, half a millisecond for a frozen one:
that was half of the CPU time of the first call of a process. Here `__init__` alone is compiled, and
the other methods are closures over the names of the fields. Inheritance, `field`, `replace`,
`fields` and `copy` work as usual; order, keywords-only and `InitVar` are left out.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from operator import attrgetter
from reprlib import recursive_repr
from typing import TYPE_CHECKING, Any, NoReturn

_MISSING = dataclasses.MISSING
_set = object.__setattr__


def _define(
    cls: type | None = None,
    /,
    *,
    init: bool = True,
    repr: bool = True,
    eq: bool = True,
    frozen: bool = False,
    slots: bool = False,
) -> Any:
    """Make a class a dataclass; the options mean what they mean in the standard library."""
    options = {"init": init, "repr": repr, "eq": eq, "frozen": frozen, "slots": slots}
    if cls is None:
        return functools.partial(_define, **options)
    made: Any = dataclasses.dataclass(cls, init=False, repr=False, eq=False, slots=slots)
    written = dict(vars(cls))
    if written.get("__hash__") is None:  # none is written, or `__eq__` has removed it
        written.pop("__hash__", None)
    methods: dict[str, Any] = {}
    if init:
        methods["__init__"] = _init(made, frozen)
    if repr:
        methods["__repr__"] = _repr
    if eq:
        methods |= {"__eq__": _eq(made), "__hash__": _hash(made) if frozen else None}
    if frozen:
        methods |= {"__setattr__": _refuse, "__delattr__": _refuse}
        methods |= {"__getstate__": _state, "__setstate__": _restore}
    for name in methods.keys() - written.keys():
        setattr(made, name, methods[name])
    return made


def _init(cls: Any, frozen: bool) -> Callable[..., None]:
    """Compile `__init__`; a default factory is called where its argument is left out."""
    known: dict[str, Any] = {"_set": _set, "_MISSING": _MISSING}
    head, body = ["self"], []
    for f in dataclasses.fields(cls):
        value, name = f.name, f.name
        if f.default is not _MISSING:
            known[f"_of_{name}"] = f.default
            default = f"_of_{name}"
        elif f.default_factory is not _MISSING:
            known[f"_of_{name}"] = f.default_factory
            default = "_MISSING"
            value = f"_of_{name}() if {name} is _MISSING else {name}" if f.init else f"_of_{name}()"
        else:
            default = ""
        if f.init:
            head.append(f"{name}={default}" if default else name)
        elif not default:
            continue
        elif f.default is not _MISSING:
            value = default
        body.append(f"_set(self, {name!r}, {value})" if frozen else f"self.{name} = {value}")
    if hasattr(cls, "__post_init__"):
        body.append("self.__post_init__()")
    exec(f"def __init__({', '.join(head)}):\n " + "\n ".join(body or ["pass"]), known)
    return known["__init__"]


def _values(names: list[str]) -> Callable[[Any], tuple]:
    """Return a function that gives the values of some attributes as a tuple."""
    if not names:
        return lambda self: ()
    return attrgetter(*names, *(names if len(names) == 1 else ()))


def _eq(cls: Any) -> Callable[[Any, Any], bool]:
    values = _values([f.name for f in dataclasses.fields(cls) if f.compare])

    def equal(self: Any, other: Any) -> bool:
        if other.__class__ is not self.__class__:
            return NotImplemented
        return values(self) == values(other)

    return equal


def _hash(cls: Any) -> Callable[[Any], int]:
    found = dataclasses.fields(cls)
    values = _values([f.name for f in found if (f.compare if f.hash is None else f.hash)])
    return lambda self: hash(values(self))


@recursive_repr()
def _repr(self: Any) -> str:
    shown = [f"{f.name}={getattr(self, f.name)!r}" for f in dataclasses.fields(self) if f.repr]
    return f"{self.__class__.__qualname__}({', '.join(shown)})"


def _refuse(self: Any, name: str, *value: Any) -> NoReturn:
    raise dataclasses.FrozenInstanceError(f"cannot change field {name!r}")


def _state(self: Any) -> list[Any]:
    return [getattr(self, f.name) for f in dataclasses.fields(self)]


def _restore(self: Any, state: list[Any]) -> None:
    for f, value in zip(dataclasses.fields(self), state, strict=True):
        _set(self, f.name, value)


if TYPE_CHECKING:
    from dataclasses import dataclass as dataclass
else:
    dataclass = _define
