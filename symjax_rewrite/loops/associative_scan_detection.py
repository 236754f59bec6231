"""Detection of scans that `lax.associative_scan` unrolled into a tree of equations.

The detection does not depend on how the tree is cut. For steps h ← a·h + b, every array entry
denotes either the product a_lo…a_hi or the state that the steps lo…hi compute from h = 0.
`a_hi·b_lo + b_hi` joins neighbouring ranges. Slices, pads, sums with zeros and concatenations move
entries. An array is the result of the scan if its entry i denotes the range 0…i for every i.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from jax import lax

from symjax_rewrite import jax_internals
from symjax_rewrite.ir.flat_program import Equation, Program, flatten
from symjax_rewrite.loops.axis_moves import entry_moves
from symjax_rewrite.loops.fusion import Surroundings, graft
from symjax_rewrite.loops.loop import Carry, Loop, Source

MIN_LENGTH = 8  # no shorter tree is faster as a loop

NOTHING = -1  # marks an entry that is a padded zero


class Entries(NamedTuple):
    """The ranges of steps that the entries of an array denote along an axis.

    kind: "a" for a product of the steps' factors; "b" for the state that the steps compute from
    zero; "ab" for the factor of the steps after `mid` times the state of the steps up to `mid`;
    "input" for either of the first two. factors, added: the values a and b of the steps. layout:
    for every axis, the corresponding axis of the inputs.
    """

    kind: str
    factors: int | None
    added: int | None
    axis: int
    layout: tuple[int, ...]
    lo: np.ndarray
    mid: np.ndarray
    hi: np.ndarray

    @property
    def is_whole(self) -> bool:
        """Return True if the entries denote 0…i at every i, and are not an input."""
        count = len(self.lo)
        whole = count and (self.lo == 0).all() and (self.hi == np.arange(count)).all()
        return bool(whole) and self.kind in ("a", "b")


@dataclass(frozen=True, slots=True)
class Prefix:
    """A tree that is a scan: `out[i]` is the state that the steps 0…i compute from zero.

    factors, added: the values a and b of the steps. products: the value of all products a_0…a_i, if
    the program has this value. axis: the axis of the steps in a and b. layouts: of `out` and
    `products`, see `Entries`. equations: the equations of the tree.
    """

    factors: int
    added: int
    axis: int
    length: int
    out: int
    products: int | None
    layouts: tuple[tuple[int, ...], ...]
    equations: tuple[Equation, ...]

    def states_alone(self) -> Prefix:
        """Return the part of the tree that computes `out`."""
        own = _made_for(list(self.equations), {self.out}, {self.factors, self.added})
        return replace(self, products=None, layouts=self.layouts[:1], equations=tuple(own))


def find_prefixes(program: Program) -> list[Prefix]:
    """Find the trees of a program that are scans of affine steps."""
    seeds = _seeds(program)
    if len(seeds) < 2:
        return []
    entries: dict[int, Entries] = dict(seeds)
    whole: dict[tuple[int | None, int | None], tuple[int, Entries]] = {}
    made: list[Equation] = []
    for e in program.equations:
        if len(e.outvals) != 1 or e.eqn.effects:
            continue
        found = _follow(e, entries)
        if found is None:
            continue
        made.append(e)
        (v,) = e.outvals
        if found.is_whole:
            whole.setdefault((found.factors, found.added), (v, found))
        if not (found.is_whole and v in seeds):  # the seeds are the steps of another tree
            entries[v] = found
    return list(_complete(entries, whole, made))


def _seeds(program: Program) -> dict[int, Entries]:
    """Return the arrays whose even and odd entries are both read."""
    parities: dict[tuple[int, int], set[int]] = {}
    for e in program.equations:
        p = e.eqn.params
        if e.name != "slice" or p["strides"] is None:
            continue
        axes = [k for k, s in enumerate(p["strides"]) if s != 1]
        v = e.invals[0]
        if len(axes) == 1 and p["strides"][axes[0]] == 2 and isinstance(v, int):
            parities.setdefault((v, axes[0]), set()).add(p["start_indices"][axes[0]])
    seeds = {}
    for (v, axis), starts in parities.items():
        length = getattr(program.avals[v], "shape", ())[axis]
        if {0, 1} <= starts and isinstance(length, int) and length >= MIN_LENGTH:
            steps = np.arange(length)
            layout = tuple(range(len(program.avals[v].shape)))
            seeds[v] = Entries("input", v, v, axis, layout, steps, steps, steps)
    return seeds


def _complete(
    entries: dict[int, Entries],
    whole: dict[tuple[int | None, int | None], tuple[int, Entries]],
    made: list[Equation],
) -> Iterator[Prefix]:
    """Return the arrays that denote 0…i at every i, as trees."""
    for (a, b), (out, x) in whole.items():
        if a is None or b is None:
            continue
        length, axis = len(entries[a].lo), entries[a].axis
        if {len(x.lo), len(entries[b].lo)} != {length} or axis != entries[b].axis:
            continue
        products, y = whole.get((a, None), (None, None))
        layouts = (x.layout,) if y is None else (x.layout, y.layout)
        tree = tuple(_made_for(made, {out, products}, {a, b}))
        yield Prefix(a, b, axis, length, out, products, layouts, tree)


def _made_for(made: list[Equation], values: set[Any], given: set[int]) -> list[Equation]:
    """Return the equations that compute `values` from given values, in order."""
    found = []
    for e in reversed(made):
        if e.outvals[0] in values:
            found.append(e)
            values = values | {v for v in e.invals if isinstance(v, int) and v not in given}
    return found[::-1]


def _follow(e: Equation, entries: dict[int, Entries]) -> Entries | None:
    known = [entries.get(v) if isinstance(v, int) else None for v in e.invals]
    if not any(known):
        return None
    row = _ROWS.get(e.name)
    if row is not None:
        return row(e, known)
    return None


def _transpose(e: Equation, known: list[Entries | None]) -> Entries | None:
    x, order = known[0], e.eqn.params["permutation"]
    if x is None:
        return None
    return x._replace(axis=order.index(x.axis), layout=tuple(x.layout[i] for i in order))


def _picked(x: Entries, pick: Callable[[np.ndarray], np.ndarray]) -> Entries:
    return x._replace(lo=pick(x.lo), mid=pick(x.mid), hi=pick(x.hi))


def _moved(e: Equation, known: list[Entries | None]) -> Entries | None:
    x = known[0]
    moves = None if x is None else entry_moves(e, x.axis)
    if x is None or moves is None:
        return None
    return _picked(x, lambda n: moves[0](n, NOTHING))


def _same_kind(
    x: Entries, y: Entries, join: Callable[[list[np.ndarray]], np.ndarray]
) -> Entries | None:
    """Join two arrays of one kind; an input of the tree takes the kind of the other array."""
    if x.layout != y.layout:
        return None
    if x.kind == "input" and y.kind in ("a", "b"):
        x, y = y, x
    if y.kind == "input" and x.kind in ("a", "b"):
        if y.factors != (x.factors if x.kind == "a" else x.added):
            return None
    elif (x.kind, x.factors, x.added) != (y.kind, y.factors, y.added):
        return None
    return x._replace(lo=join([x.lo, y.lo]), mid=join([x.mid, y.mid]), hi=join([x.hi, y.hi]))


def _concatenate(e: Equation, known: list[Entries | None]) -> Entries | None:
    parts = [x for x in known if x is not None]
    if len(parts) != len(known) or any(x.axis != e.eqn.params["dimension"] for x in parts):
        return None
    kinds = [x for x in parts if x.kind != "input"] or parts
    head = kinds[0]
    for x in parts:
        if _same_kind(head, x, lambda arrays: arrays[0]) is None:
            return None
    columns = (np.concatenate([getattr(x, name) for x in parts]) for name in ("lo", "mid", "hi"))
    lo, mid, hi = columns
    return head._replace(lo=lo, mid=mid, hi=hi)


def _add(e: Equation, known: list[Entries | None]) -> Entries | None:
    x, y = known
    if x is None or y is None or (x.axis, x.layout) != (y.axis, y.layout) or len(x.lo) != len(y.lo):
        return None
    if len(x.lo) and ((x.lo == NOTHING) | (y.lo == NOTHING)).all():
        return _same_kind(x, y, lambda pair: np.maximum(pair[0], pair[1]))
    if y.kind == "ab":
        x, y = y, x
    if x.kind != "ab" or y.kind not in ("input", "b") or y.added != x.added:
        return None
    if y.kind == "b" and y.factors != x.factors:
        return None
    if (x.mid + 1 != y.lo).any() or (x.hi != y.hi).any():
        return None
    return x._replace(kind="b", mid=x.hi)


def _mul(e: Equation, known: list[Entries | None]) -> Entries | None:
    x, y = known
    if x is None or y is None or (x.axis, x.layout) != (y.axis, y.layout) or len(x.lo) != len(y.lo):
        return None
    if (x.lo == NOTHING).any() or (y.lo == NOTHING).any():
        return None
    for late, early in ((x, y), (y, x)):
        if (early.hi + 1 != late.lo).any() or late.kind not in ("input", "a"):
            continue
        if early.kind in ("input", "a") and early.factors == late.factors:
            return late._replace(kind="a", added=None, lo=early.lo, mid=late.hi)
        if early.kind == "input" or (early.kind == "b" and early.factors == late.factors):
            return late._replace(kind="ab", added=early.added, lo=early.lo, mid=early.hi)
    return None


_ROWS: dict[str, Callable[[Equation, list[Entries | None]], Entries | None]] = {
    "slice": _moved,
    "pad": _moved,
    "transpose": _transpose,
    "concatenate": _concatenate,
    "add": _add,
    "mul": _mul,
}


def refusal(around: Surroundings, prefix: Prefix) -> str | None:
    """Return the reason why a tree must stay a tree, or None."""
    inner = {v for e in prefix.equations for v in e.outvals} - {prefix.out, prefix.products}
    if any(is_read(around, prefix, v) for v in inner):
        return "another equation reads a value inside the tree"
    a, b = (around.program.avals[v] for v in (prefix.factors, prefix.added))
    if a.shape != b.shape or a.dtype != b.dtype:
        return "the factors have another shape or dtype than the terms that are added"
    return None


def is_read(around: Surroundings, prefix: Prefix, v: int) -> bool:
    """Return True if a value is read outside the tree."""
    own = {id(e) for e in prefix.equations}
    users = around.users.get(v, ())
    return v in around.outputs or any(id(e) not in own for e in users)


def as_loop(around: Surroundings, prefix: Prefix) -> tuple[Loop, list[Equation]]:
    """Return a tree as a loop, and the equations that the loop replaces.

    The first state is b alone: a product with a zero start would be NaN for a factor that is not
    finite. A tree between two reversals becomes a loop that runs backwards.
    """
    program = around.program
    products = prefix.products is not None and is_read(around, prefix, prefix.products)
    body = flatten(_step(prefix, program, products))
    *carried, a, b, first = body.inputs
    reversals = [reversal(around, v, prefix.axis) for v in (prefix.factors, prefix.added)]
    backwards = None not in reversals
    loop = Loop(prefix.equations[-1].eqn, body, prefix.length, reverse=backwards)
    for v, outer, e in zip((a, b), (prefix.factors, prefix.added), reversals, strict=True):
        value = e.invals[0] if backwards and e is not None else outer
        loop.sources[v] = Source(value, prefix.axis, kept=True)
    flags = np.arange(prefix.length) == (prefix.length - 1 if backwards else 0)
    loop.counters[first] = flags
    own = list(prefix.equations)
    outs = [prefix.out, *[prefix.products] * products]
    for k, (inner, out, layout) in enumerate(zip(carried, outs, prefix.layouts, strict=False)):
        assert out is not None
        zero = jax_internals.Literal(
            np.zeros((), body.avals[inner].dtype), _scalar(body.avals[inner])
        )
        loop.carries.append(Carry(inner, zero, body.outputs[k]))
        turned = graft(loop, lambda x, to=layout: lax.transpose(x, to), [body.outputs[k]])
        loop.ys.append(turned)
        axis = layout.index(prefix.axis)
        loop.makes.append(out)
        loop.results.append(("kept", (k, axis, backwards)))
        for e in program.equations if backwards else ():
            if (
                e.name == "rev"
                and e.invals[0] == out
                and e.eqn.params["dimensions"] == (prefix.axis,)
            ):
                own.append(e)
                loop.makes.append(e.outvals[0])
                loop.results.append(("kept", (k, axis, False)))
    return loop, own


def reversal(around: Surroundings, v: int, axis: int) -> Equation | None:
    """Return the equation that computes a value by reversing another value along an axis."""
    e = around.makers.get(v)
    return e if e is not None and is_reversal(e, axis) else None


def is_reversal(e: Equation, axis: int) -> bool:
    """Return True if an equation reverses this axis and no other axis."""
    return e.name == "rev" and tuple(e.eqn.params["dimensions"]) == (axis,)


def _scalar(aval: Any) -> Any:
    return aval.update(shape=())


def _step(prefix: Prefix, program: Program, products: bool) -> jax_internals.ClosedJaxpr:
    """Return one step as a jaxpr of (h, a, b, is_first), or of (h, p, a, b, is_first)."""

    def step(h: Any, *rest: Any) -> list[Any]:
        *p, a, b, first = rest  # one flag: reverse mode would store an array of flags per step
        outs = [lax.select_n(first, lax.add(lax.mul(a, h), b), b)]
        return outs + [lax.select_n(first, lax.mul(a, x), a) for x in p]

    def one(v: int) -> Any:
        aval, k = program.avals[v], prefix.axis
        return aval.update(shape=(*aval.shape[:k], 1, *aval.shape[k + 1 :]), weak_type=False)

    a, b = one(prefix.factors), one(prefix.added)
    flag = b.update(shape=(), dtype=np.dtype(bool))
    return jax_internals.make_avals_jaxpr(step, [b, *[a] * products, a, b, flag])
