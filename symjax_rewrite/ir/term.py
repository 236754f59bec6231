"""Index terms: nodes, references and their canonical form.

A value with axes is a function of its indices. A *term* has a small index space of its own: output
indices `0..out-1`, then bound indices `out..`. An *operand* is `(class, axes)`: for each slot of
the class, the index it reads. So a transpose or a broadcast is no operation but another way to
write indices (Mathematics of Arrays calls it psi reduction), and a diagonal is an index read twice.

    y = (a @ b).T  # class 2: contract over k of a[i, k]·b[k, j]; y is class 2 read at (j, i)
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice, permutations
from typing import Any, NamedTuple

from symjax_rewrite.ir.sizes import Dim

Axes = tuple[int, ...]


class Ref(NamedTuple):
    """A value: class `cls`, whose slot s reads index `axes[s]` of the surrounding term.

    Example:
        >>> x = Ref(7, (0, 2))
        >>> x.over({0: 5, 2: 6}), x.moved(2, 9), x.without(1)
        (Ref(cls=7, axes=(5, 6)), Ref(cls=7, axes=(0, 9)), Ref(cls=7, axes=(0, 1)))
    """

    cls: int
    axes: Axes

    def over(self, index: Sequence[int] | Mapping[int, int]) -> Ref:
        """Return the value with every index i renamed `index[i]`."""
        return Ref(self.cls, tuple([index[i] for i in self.axes]))

    def moved(self, old: int, new: int) -> Ref:
        """Return the value with one index renamed."""
        return Ref(self.cls, tuple([new if i == old else i for i in self.axes]))

    def without(self, gone: int) -> Ref:
        """Return the value over the remaining indices after an unread index is removed."""
        return Ref(self.cls, tuple([i - (i > gone) for i in self.axes]))


def over(ref: Ref, arg: Ref) -> Ref:
    """Return an operand of an unbound node of `ref`'s class, read over `ref`'s indices."""
    return Ref(arg.cls, tuple([ref.axes[i] for i in arg.axes]))


class Node(NamedTuple):
    """One e-node.

    op: the kind of term (see `UNORDERED`).
    attr: the parameters of the node: coefficients, function, precision.
    args: operands over the node's index space.
    out: number of output indices; they are the slots of the class, in order.
    bound: sizes of the bound indices `out, out+1, ...`.
    """

    op: str
    attr: Any
    args: tuple[Ref, ...]
    out: int
    bound: tuple[Dim, ...]


CONTRACT = "contract"  # Σ over bound of the product of the operands; attr: precision
ADD = "add"  # Σ coefficient·operand, elementwise; attr: coefficients
MAP = "map"  # f(operands), elementwise; attr: (name, params key)
REDUCE = "reduce"  # max, min, any, all over bound; attr: monoid name
SLICE = "slice"  # attr: per slot None, (start, stride, size), or an int (one element)
CONCAT = "concat"  # along one output index; attr: (index, sizes); one operand per segment
# W[.., x₁[..], x₂[..], ..]: operand 0 reads a bound index for each later operand, which selects.
# attr: the mode out of range ("clip": the nearest, "fill": a constant, "promise_in_bounds"), the
# constant's attr, and per selected index None or the output index of a window that starts there.
TAKE = "take"
DELTA = "delta"  # 1 where its two indices are equal, else 0
CONST = "const"  # one scalar; attr: (value, dtype)
INVERSE = "inverse"  # of a matrix, over the operand slots in attr; (Mᵀ)⁻¹ = (M⁻¹)ᵀ is built in
CONV = "conv"  # a convolution; linear in operand 1, whose output features are output indices
SOLVE = "solve"  # Σ over bound of C·operand 1, C the inverse (as above) of operand 0
CUMSUM = "cumsum"  # prefix sum; attr: (output index, from the end)
IOTA = "iota"  # the index itself
LEAF = "leaf"  # an input of the program or region; attr: its number
NATIVE = "native"  # any other equation, positional; attr: (equation key, output number)
KINDS = (
    CONTRACT, ADD, MAP, REDUCE, SLICE, CONCAT, TAKE, DELTA, CONST, INVERSE, CONV, SOLVE, CUMSUM,
    IOTA, LEAF, NATIVE,
)  # fmt: skip

UNORDERED = frozenset({CONTRACT, ADD})
POSITIONAL = frozenset({LEAF, NATIVE, CONST, DELTA, IOTA, SLICE, CONCAT, TAKE, CUMSUM, CONV})

TIE_CAP = 24  # orders of tied operands tried before the first order is taken unsorted


def is_cast(node: Node) -> bool:
    """Return True if a node converts its operand to a dtype."""
    return node.op == MAP and node.attr[0] == "convert_element_type"


def is_choice(node: Node) -> bool:
    """Return True if a node selects one of two operands by a condition."""
    return node.op == MAP and node.attr[0] == "select_n" and len(node.args) == 3


@functools.cache
def identity(count: int) -> Axes:
    """Return every index in order."""
    return tuple(range(count))


def canonical(
    op: str, attr: Any, args: tuple[Ref, ...], out: int, bound: tuple[Dim, ...]
) -> tuple[Node, Axes]:
    """Return the node in canonical form, and the caller's output index of each of its outputs.

    Operands of unordered terms are sorted by colour refinement of operands and indices; outputs and
    bound indices are numbered by first use. Outputs that no operand reads are dropped: the value
    does not depend on them. Bound indices that no operand reads stay: their size counts.
    """
    if op in POSITIONAL:
        return Node(op, attr, args, out, bound), identity(out)
    if op not in UNORDERED or len(args) == 1:
        return _number(op, attr, args, out, bound)
    if len(args) == 2 and args[0].cls != args[1].cls:
        if args[0].cls > args[1].cls:
            args = (args[1], args[0])
            attr = attr[::-1] if op == ADD else attr
        return _number(op, attr, args, out, bound)
    if op == CONTRACT and args.count(args[0]) == len(args):
        return _number(op, attr, args, out, bound)  # a power: every order is the same
    payload = attr if op == ADD else (0,) * len(args)
    groups = _colour_order(args, payload, out, bound)
    best: tuple[Node, Axes] | None = None
    for flat in islice(_orders(groups), TIE_CAP):
        new_attr = tuple(attr[k] for k in flat) if op == ADD else attr
        found = _number(op, new_attr, tuple(args[k] for k in flat), out, bound)
        if best is None or found[0].args < best[0].args:
            best = found
    assert best is not None
    return best


def _orders(groups: list[list[int]]) -> Iterator[list[int]]:
    """Yield the groups one after the other, each in every order; lazily, as there are many."""
    if not groups:
        yield []
        return
    for head in permutations(groups[0]):
        for tail in _orders(groups[1:]):
            yield [*head, *tail]


def _colour_order(
    args: tuple[Ref, ...], payload: tuple, out: int, bound: tuple[Dim, ...]
) -> list[list[int]]:
    """Return operands in groups, sorted; operands of one group have equal colours."""
    numbers = map(complex, payload)
    keys: list = [(ref.cls, c.real, c.imag) for ref, c in zip(args, numbers, strict=True)]
    if len(set(keys)) == len(keys):
        return [[k] for k in sorted(range(len(args)), key=keys.__getitem__)]
    for _ in range(2):
        colour: dict[int, list] = {}
        for key, ref in zip(keys, args, strict=True):
            for slot, index in enumerate(ref.axes):
                colour.setdefault(index, []).append((key, slot))
        seen = {i: (i >= out, tuple(sorted(c))) for i, c in colour.items()}
        rank = {c: n for n, c in enumerate(sorted(set(seen.values())))}
        keys = [
            (key, tuple(rank[seen[i]] for i in ref.axes), _pattern(ref.axes))
            for key, ref in zip(keys, args, strict=True)
        ]
        order = {key: n for n, key in enumerate(sorted(set(keys)))}
        keys = [(order[key],) for key in keys]
    groups: dict = {}
    for k in sorted(range(len(args)), key=keys.__getitem__):
        groups.setdefault(keys[k], []).append(k)
    return list(groups.values())


def _pattern(axes: Axes) -> Axes:
    seen: dict[int, int] = {}
    return tuple(seen.setdefault(i, len(seen)) for i in axes)


def _is_numbered(args: tuple[Ref, ...], out: int, bound: int) -> bool:
    """Return True if outputs and bound indices stand in the order of their first use."""
    if args and not bound and args[0].axes == identity(out):
        return True  # an elementwise term whose first operand reads every index in order
    next_out, next_bound = 0, out
    for _, axes in args:
        for i in axes:
            if i < out:
                if i == next_out:
                    next_out += 1
                elif i > next_out:
                    return False
            elif i == next_bound:
                next_bound += 1
            elif i > next_bound:
                return False
    return next_out == out and next_bound == out + bound


def _number(
    op: str, attr: Any, args: tuple[Ref, ...], out: int, bound: tuple[Dim, ...]
) -> tuple[Node, Axes]:
    if _is_numbered(args, out, len(bound)):
        return Node(op, attr, args, out, bound), identity(out)
    outs: dict[int, int] = {}
    bounds: dict[int, int] = {}
    for _, axes in args:
        for i in axes:
            if i < out:
                outs.setdefault(i, len(outs))
            else:
                bounds.setdefault(i, len(bounds))
    n = len(outs)
    sizes = [bound[i - out] for i in bounds]
    if len(bounds) < len(bound):
        sizes += [size for k, size in enumerate(bound) if k + out not in bounds]
    to = dict(outs)
    for i, k in bounds.items():
        to[i] = n + k
    new_args = tuple([Ref(cls, tuple([to[i] for i in axes])) for cls, axes in args])
    return Node(op, attr, new_args, n, tuple(sizes)), tuple(outs)
