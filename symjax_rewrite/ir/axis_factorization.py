"""Axis atoms: the axes of a whole program, factorised so that reshapes vanish.

A union-find *with splitting* divides every axis of the program into atoms. A merged axis is an
ordered group of atoms, and an axis of size 1 is the empty group. Reshapes that split or merge axes
(heads, groups, windows, repeats) then only rename atoms. Where two factorisations conflict (2·3
against 3·2), the equation stays native.

    x[n, 6] → reshape → y[n, 2, 3]  # atoms n, p = 2, q = 3: x has the axes n, (p, q); y has n, p, q
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from symjax_rewrite.ir.flat_program import Equation, Program
from symjax_rewrite.ir.primitives import ELEMENTWISE
from symjax_rewrite.ir.sizes import Dim, divide, from_jax, value
from symjax_rewrite.jax_internals import JaxprEqn

Axes = tuple[int, ...]
Atoms = tuple[int, ...]


class AxisSolver:
    """A union-find over axes whose roots may be split into ordered parts."""

    def __init__(self) -> None:
        self.parent: list[int] = []
        self.size: list[Dim] = []
        self.parts: list[list[int] | None] = []

    def new(self, size: Dim) -> int:
        """Return a new axis; an axis of size 1 is an empty group."""
        self.parent.append(len(self.parent))
        self.size.append(size)
        self.parts.append([] if size == 1 else None)
        return len(self.parent) - 1

    def find(self, a: int) -> int:
        """Return the root of an axis."""
        parent = self.parent
        while parent[a] != a:
            parent[a] = parent[parent[a]]
            a = parent[a]
        return a

    def atoms(self, a: int) -> Atoms:
        """Return the ordered atoms of an axis."""
        a = self.find(a)
        parts = self.parts[a]
        return (a,) if parts is None else tuple([x for p in parts for x in self.atoms(p)])

    def unify(self, a: int, b: int) -> bool:
        """Unify two axes; return False if their factorisations conflict."""
        a, b = self.find(a), self.find(b)
        if a == b:
            return True
        if self.size[a] != self.size[b]:
            return False
        for x, y in ((a, b), (b, a)):
            if self.parts[x] is None:
                self.parent[x] = y
                return True
        return self.align(self.atoms(a), self.atoms(b))

    def align(self, left: Sequence[int], right: Sequence[int]) -> bool:
        """Unify two atom lists of equal product; an atom is split where another atom divides it."""
        xs, ys = list(left)[::-1], list(right)[::-1]
        while xs and ys:
            x, y = self.find(xs.pop()), self.find(ys.pop())
            if self.parts[x] is not None or self.parts[y] is not None:
                xs.extend(self.atoms(x)[::-1])
                ys.extend(self.atoms(y)[::-1])
            elif self.size[x] == self.size[y]:
                self.unify(x, y)
            elif (rest := divide(self.size[y], self.size[x])) is not None:
                ys.append(self._split(y, x, rest))
            elif (rest := divide(self.size[x], self.size[y])) is not None:
                xs.append(self._split(x, y, rest))
            else:
                return False
        return not xs and not ys

    def _split(self, whole: int, lead: int, rest: Dim) -> int:
        tail = self.new(rest)
        self.parts[whole] = [lead, tail]
        return tail


class AxisMap:
    """The solved axes of a program: for every value, for every axis, its atoms.

    An output shares axes with its operands, so most equations make no new axes.
    """

    def __init__(self, program: Program) -> None:
        self.solver = AxisSolver()
        self.axes: list[Axes] = [()] * len(program.avals)
        self._dims: dict[Any, Dim] = {}
        self._avals = program.avals
        for v in (*program.inputs, *program.consts):
            self.axes[v] = self._fresh(v)
        for equation in program.equations:
            self._constrain(equation)

    def _dim(self, size: Any) -> Dim:
        if isinstance(size, int):
            return size
        if size not in self._dims:
            self._dims[size] = from_jax(size)
        return self._dims[size]

    def _fresh(self, v: int) -> Axes:
        shape = getattr(self._avals[v], "shape", ())
        return tuple([self.solver.new(self._dim(d)) for d in shape])

    def groups(self, axes: Axes) -> tuple[Atoms, ...]:
        """Return, for every axis, its atoms."""
        return tuple([self.solver.atoms(a) for a in axes])

    def atom_size(self, atom: int) -> Dim:
        """Return the size of an atom."""
        return self.solver.size[self.solver.find(atom)]

    def _constrain(self, e: Equation) -> None:
        """Assign axes to the outputs of an equation."""
        name, axes = e.name, self.axes
        if name in ELEMENTWISE:
            axes[e.outvals[0]] = self._elementwise(e)
        else:
            ins = [axes[v] if isinstance(v, int) else () for v in e.invals]
            known = not e.invals or isinstance(e.invals[0], int)
            row, relate = _OUTPUTS.get(name), _CONSTRAINTS.get(name)
            made = row(self, e.eqn.params, ins) if row and known else None
            if made is not None:
                axes[e.outvals[0]] = made
            else:
                outs = [self._fresh(v) for v in e.outvals]
                for v, fresh in zip(e.outvals, outs, strict=True):
                    axes[v] = fresh
                if relate and known:
                    relate(self, e.eqn.params, ins, outs)
        if e.same_as:
            for v, same in zip(e.outvals, e.same_as, strict=True):
                if isinstance(same, int):
                    self._zip(axes[same], axes[v])

    def _elementwise(self, e: Equation) -> Axes:
        """Return the axes of the first operand of the output's shape; unify the others with it."""
        shape = getattr(self._avals[e.outvals[0]], "shape", ())
        if not shape:
            return ()
        out: Axes = ()
        others = []
        for v in e.invals:
            if not isinstance(v, int) or not (mine := self.axes[v]) or mine == out:
                continue
            if not out and self._avals[v].shape == shape:
                out = mine
            else:
                others.append(mine)
        out = out or self._fresh(e.outvals[0])
        for mine in others:
            self._zip(mine, out)
        return out

    def _zip(self, xs: Sequence[int], ys: Sequence[int]) -> None:
        for x, y in zip(xs, ys, strict=False):
            if x != y:
                self.solver.unify(x, y)

    def _same_sizes(self, xs: Sequence[int], ys: Sequence[int]) -> None:
        for x, y in zip(xs, ys, strict=True):
            if self.solver.size[x] == self.solver.size[y]:
                self.solver.unify(x, y)


def related_axes(eqn: JaxprEqn) -> tuple[list[Axes], Axes]:
    """Return the axes of an equation's operands and of its result; equal numbers, equal axes."""
    avals = [v.aval for v in (*eqn.invars, *eqn.outvars)]
    operands = tuple(range(len(eqn.invars)))
    equation = Equation(eqn, operands, tuple(range(len(operands), len(avals))))
    m = AxisMap(Program(None, avals, [*operands], equations=[equation]))  # pyright: ignore
    *given, result = [tuple(map(m.solver.find, axes)) for axes in m.axes]
    return given, result


def _dot_general(m: AxisMap, p: dict, ins: list[Axes]) -> Axes | None:
    (lc, rc), (lb, rb) = p["dimension_numbers"]
    left, right = ins[0], ins[1]
    if not left or not right:
        return None
    m._zip([left[i] for i in (*lc, *lb)], [right[i] for i in (*rc, *rb)])
    out = [left[i] for i in lb]
    out += [a for i, a in enumerate(left) if i not in (*lc, *lb)]
    out += [a for i, a in enumerate(right) if i not in (*rc, *rb)]
    return tuple(out)


def _reduce(m: AxisMap, p: dict, ins: list[Axes]) -> Axes:
    return tuple([a for i, a in enumerate(ins[0]) if i not in p["axes"]])


def _squeeze(m: AxisMap, p: dict, ins: list[Axes]) -> Axes:
    gone = {int(d) % len(ins[0]) for d in p["dimensions"]}
    return tuple([a for i, a in enumerate(ins[0]) if i not in gone])


_REDUCTIONS = "reduce_sum reduce_max reduce_min reduce_prod reduce_and reduce_or argmax argmin"
_PREFIXES = "cumsum cumprod cummax cummin cumlogsumexp"
_OUTPUTS: dict[str, Callable[[AxisMap, dict, list[Axes]], Axes | None]] = {
    "dot_general": _dot_general,
    "transpose": lambda m, p, ins: tuple([ins[0][i] for i in p["permutation"]]),
    "squeeze": _squeeze,
    **dict.fromkeys(_PREFIXES.split(), lambda m, p, ins: ins[0]),
    **dict.fromkeys(_REDUCTIONS.split(), _reduce),
}


def _broadcast(m: AxisMap, p: dict, ins: list, outs: list) -> None:
    m._same_sizes(ins[0], [outs[0][int(i)] for i in p["broadcast_dimensions"]])


def _concatenate(m: AxisMap, p: dict, ins: list, outs: list) -> None:
    for operand in ins:
        for i, (x, y) in enumerate(zip(operand, outs[0], strict=False)):
            if i != p["dimension"]:
                m.solver.unify(x, y)


def _same(m: AxisMap, p: dict, ins: list, outs: list) -> None:
    for out in outs:
        m._same_sizes(ins[0], out)  # a single result is the whole operand


def _stack(m: AxisMap, p: dict, ins: list, outs: list) -> None:
    """Unify axes of `stack` and `unstack`: an operand lacks one axis of the result."""
    if not outs:
        return  # the axis is empty
    pieces, whole = (ins, outs[0]) if len(ins) > 1 or len(ins[0]) < len(outs[0]) else (outs, ins[0])
    for piece in pieces:
        m._same_sizes(piece, (*whole[: p["axis"]], *whole[p["axis"] + 1 :]))


def _tile(m: AxisMap, p: dict, ins: list, outs: list) -> None:
    """Factor the output axis: an axis of n repeated r times is the product (r, n)."""
    for r, x, y in zip(p["reps"], ins[0], outs[0], strict=True):
        if r == 1:
            m.solver.unify(x, y)
        elif m.solver.size[x] not in (0, 1) and r > 1:
            m.solver.align((m.solver.new(m._dim(r)), *m.solver.atoms(x)), m.solver.atoms(y))


def _solve(m: AxisMap, p: dict, ins: list, outs: list) -> None:
    if len(outs) == 1 and len(ins[-1]) == len(outs[0]):
        m._same_sizes(ins[-1], outs[0])


def _gather(m: AxisMap, p: dict, ins: list, outs: list) -> None:
    """Unify the output's axes with the index array's and with operand axes of equal size."""
    d = p["dimension_numbers"]
    batch = [a for i, a in enumerate(outs[0]) if i not in set(d.offset_dims)]
    gone = {*d.collapsed_slice_dims, *d.operand_batching_dims}
    m._same_sizes(ins[1][:-1], batch)
    for i, k in zip(d.operand_batching_dims, d.start_indices_batching_dims, strict=True):
        m._same_sizes([ins[0][i]], [batch[k]])
    kept = [a for i, a in enumerate(ins[0]) if i not in gone]
    m._same_sizes(kept, [outs[0][i] for i in d.offset_dims])


def _conv(m: AxisMap, p: dict, ins: list, outs: list) -> None:
    spec = p["dimension_numbers"]
    m._same_sizes([ins[1][spec.rhs_spec[0]]], [outs[0][spec.out_spec[1]]])


def _reshape(m: AxisMap, p: dict, ins: list, outs: list) -> None:
    """Align the smallest segments of equal product."""
    if p.get("dimensions") is not None or not ins[0]:
        return
    size = m.solver.size
    xs = [a for a in ins[0] if size[a] != 1][::-1]
    ys = [a for a in outs[0] if size[a] != 1][::-1]
    if any(size[a] == 0 for a in xs + ys):
        return
    while xs and ys:
        left, right = [xs.pop()], [ys.pop()]
        wl, wr = size[left[0]], size[right[0]]
        while wl != wr:
            if value(wl, {}) < value(wr, {}) and xs:
                left.append(xs.pop())
                wl = wl * size[left[-1]]
            elif ys:
                right.append(ys.pop())
                wr = wr * size[right[-1]]
            else:
                return
        if len(left) == len(right) == 1:
            m.solver.unify(left[0], right[0])
        else:
            m.solver.align(
                [b for a in left for b in m.solver.atoms(a)],
                [b for a in right for b in m.solver.atoms(a)],
            )


_CONSTRAINTS: dict[str, Callable[[AxisMap, dict, list, list], None]] = {
    "broadcast_in_dim": _broadcast,
    "reshape": _reshape,
    "concatenate": _concatenate,
    "stack": _stack,
    "unstack": _stack,
    "tile": _tile,
    "gather": _gather,
    **dict.fromkeys("slice split dynamic_slice dynamic_update_slice pad rev".split(), _same),
    "conv_general_dilated": _conv,
    "custom_linear_solve": _solve,
}
