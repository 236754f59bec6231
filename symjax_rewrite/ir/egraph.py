"""A slotted e-graph: classes of equal index terms.

It has hash-consing, a union-find whose edges carry axis maps (Schneider et al., "Slotted E-Graphs",
PLDI 2025), deferred rebuilding (Willsey et al., "egg", POPL 2021) and, for every node and union,
the rule that made it. A class that turns out not to depend on an index loses that slot.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from symjax_rewrite.ir.sizes import Dim
from symjax_rewrite.ir.term import (
    CONCAT,
    CONV,
    CUMSUM,
    LEAF,
    NATIVE,
    SLICE,
    TAKE,
    Axes,
    Node,
    Ref,
    canonical,
    identity,
)


class Justification(NamedTuple):
    """The origin of a node or a union: the rule, and the class it was applied to."""

    rule: str
    source: int


ORIGINAL = Justification("original", -1)


@dataclass(slots=True)
class EClass:
    """One value: slot sizes, dtype, and the equal nodes that compute it; the first is original."""

    sizes: tuple[Dim, ...]
    dtype: str
    first: Node
    nodes: dict[Node, Justification]
    symmetric: set[Axes] = field(default_factory=set)


class EGraph:
    """Classes, nodes, and the equalities between them.

    Example:
        >>> g = EGraph()
        >>> a = g.add("leaf", 0, (), (2, 3), (), "float32")
        >>> b = g.add("map", ("exp", ()), (a,), (2, 3), (), "float32")
        >>> c = g.add("map", ("exp", ()), (Ref(a.cls, (1, 0)),), (3, 2), (), "float32")
        >>> b.cls == c.cls, c.axes  # exp of a transpose is the same class, read transposed
        (True, (1, 0))
    """

    def __init__(self) -> None:
        self.classes: list[EClass] = []
        self.parent: list[Ref | None] = []
        self.memo: dict[tuple[Node, tuple[Dim, ...], str], int] = {}
        self.uses: list[list[tuple[int, Node]]] = []
        self.unions: list[tuple[int, int, Justification]] = []
        self.merged = False  # True if some reference may have two spellings
        self.count = 0
        self.kinds: set[str] = set()  # kinds of all nodes ever added
        self._facts: dict[str, dict[int, Any]] = {}
        self._facts_at = 0
        self._dirty: list[int] = []

    def facts(self, name: str) -> dict[int, Any]:
        """Return the facts stored about classes under a name; a union deletes them."""
        if self._facts_at != len(self.unions):
            self._facts.clear()
            self._facts_at = len(self.unions)
        return self._facts.setdefault(name, {})

    def find(self, ref: Ref) -> Ref:
        """Return the canonical reference: same value, canonical class."""
        cls, axes = ref
        edge = self.parent[cls]
        if edge is None:
            return ref
        while edge is not None:
            axes = tuple([axes[m] if m >= 0 else m for m in edge.axes])
            cls = edge.cls
            edge = self.parent[cls]
        return Ref(cls, axes)

    def ref(self, cls: int) -> Ref:
        """Return the value of a class over its own slots."""
        return Ref(cls, identity(len(self.classes[cls].sizes)))

    def nodes(self, cls: int, *ops: str) -> list[Node]:
        """Return the nodes of a class that are of some kinds."""
        return [n for n in self.classes[cls].nodes if n.op in ops]

    def add(
        self,
        op: str,
        attr: object,
        args: tuple[Ref, ...],
        sizes: tuple[Dim, ...],
        bound: tuple[Dim, ...],
        dtype: str,
        reason: Justification = ORIGINAL,
    ) -> Ref:
        """Add a term over output indices of `sizes`; return its value over these indices."""
        if self.merged or op == SLICE:
            attr, args = self.canonical_args(op, attr, args)
        node, outs = canonical(op, attr, args, len(sizes), bound)
        slot_sizes = sizes if outs == identity(len(sizes)) else tuple([sizes[i] for i in outs])
        fresh = len(self.classes)
        cls = self.memo.setdefault((node, slot_sizes, dtype), fresh)
        if cls != fresh:
            found = self.find(Ref(cls, outs))
            if reason == ORIGINAL and found.cls == cls and found.axes == outs:
                self._adopt(cls, node, reason)
            return found
        self.classes.append(EClass(slot_sizes, dtype, node, {node: reason}))
        self.parent.append(None)
        self.uses.append([])
        self.count += 1
        self.kinds.add(op)
        for arg in node.args:
            self.uses[arg.cls].append((cls, node))
        return Ref(cls, outs)

    def term(
        self,
        op: str,
        args: Sequence[Ref],
        sizes: Sequence[Dim] | Mapping[int, Dim],
        dtype: str,
        reason: Justification = ORIGINAL,
        *,
        attr: Any = None,
        out: Iterable[int] | None = None,
        summed: Sequence[int] = (),
    ) -> Ref:
        """Add a term over named indices; return its value over the same names.

        Args:
            op: the kind of term.
            args: operands over indices of any names but -1, which is no index, as in a slice.
            sizes: the size of every name.
            dtype: of the result.
            reason: the justification of the term.
            attr: attribute of the node; an index in it is a name too.
            out: the names of the outputs; default: those that the operands read.
            summed: the names of the bound indices.

        Returns:
            The reference of the term over its output names.

        Example:
            >>> g = EGraph()
            >>> a, b = (g.add("leaf", k, (), (3, 3), (), "float32").cls for k in (0, 1))
            >>> i, k, j = 4, 7, 9  # Σ_k a[i, k]·b[k, j]
            >>> product = [Ref(a, (i, k)), Ref(b, (k, j))]
            >>> g.term("contract", product, {4: 3, 7: 3, 9: 3}, "float32", summed=[k]).axes
            (4, 9)
        """
        if out is None:
            out = sorted({i for a in args for i in a.axes}.difference(summed, (-1,)), key=_order)
        names = tuple(out)
        local = {i: n for n, i in enumerate((*names, *summed))}
        local[-1] = -1
        made = self.add(
            op,
            renamed_attr(op, attr, local),
            tuple([a.over(local) for a in args]),
            tuple([sizes[i] for i in names]),
            tuple([sizes[i] for i in summed]),
            dtype,
            reason,
        )
        return made.over(names)

    def apply(
        self, op: str, attr: Any, args: Sequence[Ref], dtype: str, reason: Justification = ORIGINAL
    ) -> Ref:
        """Add an elementwise term of values; return it over the indices that they read."""
        sizes = {
            i: size for a in args for i, size in zip(a.axes, self.classes[a.cls].sizes, strict=True)
        }
        return self.term(op, args, sizes, dtype, reason, attr=attr)

    def canonical_args(
        self, op: str, attr: Any, args: tuple[Ref, ...]
    ) -> tuple[Any, tuple[Ref, ...]]:
        """Return operands by canonical class, and the attribute with its slots renamed likewise."""
        if op != SLICE:
            return attr, tuple([self._canonical_ref(a) for a in args])
        (ref,) = args
        cls, slots = self.find(Ref(ref.cls, tuple(range(len(ref.axes)))))
        kept = tuple([attr[s] for s in slots])
        return kept, (Ref(cls, tuple([ref.axes[s] for s in slots])),)

    def _canonical_ref(self, ref: Ref) -> Ref:
        ref = self.find(ref)
        symmetric = self.classes[ref.cls].symmetric
        if symmetric:
            axes = min([ref.axes, *(tuple(ref.axes[i] for i in p) for p in symmetric)])
            ref = Ref(ref.cls, axes)
        return ref

    def union(self, a: Ref, b: Ref, reason: Justification) -> bool:
        """Record that two references over the same indices are equal; True if that is new."""
        a, b = self.find(a), self.find(b)
        if a.cls == b.cls:
            return self._self_union(a, b)
        if self.classes[a.cls].dtype != self.classes[b.cls].dtype:
            return False  # a class has one dtype
        if len(a.axes) > len(b.axes) or (len(a.axes) == len(b.axes) and a.cls > b.cls):
            a, b = b, a
        if len(set(a.axes)) != len(a.axes) or not set(a.axes) <= set(b.axes):
            return False
        if len(set(b.axes)) != len(b.axes):
            return False
        if len(a.axes) < len(b.axes) and ORIGINAL in self.classes[b.cls].nodes.values():
            return False  # the written node stays a choice, over the indices it was written with
        if len(a.axes) == len(b.axes) and a.axes != b.axes and self._is_pinned(b.cls):
            if self._is_pinned(a.cls):
                return False
            a, b = b, a
        edge = tuple(b.axes.index(i) for i in a.axes)
        self._merge(a.cls, b.cls, edge)
        self.unions.append((a.cls, b.cls, reason))
        self.merged = True
        return True

    def _is_pinned(self, cls: int) -> bool:
        """Return True for leaves and native equations: their outputs have a fixed order."""
        return any(n.op in (LEAF, NATIVE, CONV) for n in self.classes[cls].nodes)

    def _self_union(self, a: Ref, b: Ref) -> bool:
        if a.axes == b.axes or sorted(a.axes) != sorted(b.axes):
            return False
        if len(set(a.axes)) != len(a.axes):
            return False
        swap = tuple(a.axes.index(i) for i in b.axes)
        known = self.classes[a.cls].symmetric
        if swap in known:
            return False
        self.merged = True
        known.add(swap)
        known.add(tuple(sorted(range(len(swap)), key=swap.__getitem__)))
        self._dirty.append(a.cls)
        return True

    def _merge(self, keep: int, gone: int, edge: Axes) -> None:
        """Merge class `gone` into class `keep`, whose slot t is slot edge[t] of `gone`."""
        self.parent[gone] = Ref(keep, edge)
        old = self.classes[gone]
        back = {slot: t for t, slot in enumerate(edge)}
        if len(back) == len(old.sizes):
            for node, reason in old.nodes.items():
                renamed = _rename_outputs(node, back)
                if renamed is not None:
                    self._adopt(keep, renamed, reason)
                    for arg in node.args:
                        self.uses[arg.cls].append((keep, renamed))
                        if self.parent[arg.cls] is not None:  # merged before, users repaired
                            self._dirty.append(arg.cls)
        old.nodes = {}
        self._dirty.append(gone)
        self._dirty.append(keep)

    def rebuild(self) -> None:
        """Restore congruence: equal operands make equal nodes."""
        while self._dirty:
            todo, self._dirty = self._dirty, []
            for cls in dict.fromkeys(todo):
                uses, self.uses[cls] = self.uses[cls], []
                for user, node in dict.fromkeys(uses):
                    self._repair(cls, user, node)

    def _repair(self, cls: int, user: int, node: Node) -> None:
        """Move a node that reads `cls` to its canonical form."""
        owner = self.classes[user]
        reason = owner.nodes.get(node)
        if reason is None:
            return
        sizes = owner.sizes
        attr, args = self.canonical_args(node.op, node.attr, node.args)
        fresh, outs = canonical(node.op, attr, args, node.out, node.bound)
        if fresh == node:
            self.uses[cls].append((user, node))
            return
        ref = self.add(node.op, attr, args, sizes, node.bound, owner.dtype, reason)
        kept = {n: r for n, r in owner.nodes.items() if n != node}
        owner.nodes = kept
        owner.first = next(iter(kept), fresh)
        whole = Ref(user, identity(len(sizes)))
        if ref.cls != user or ref.axes != whole.axes:
            self.union(whole, ref, Justification("congruence", user))
            return
        mine = _rename_outputs(fresh, dict(enumerate(outs)))  # outputs are the slots of the class
        if mine is not None:
            self._adopt(user, mine, reason)
            for arg in mine.args:
                self.uses[arg.cls].append((user, mine))

    def _adopt(self, cls: int, node: Node, reason: Justification) -> None:
        """Add a node to a class; a node both written and made by a rule counts as written."""
        c = self.classes[cls]
        if not c.nodes:
            c.first = node
        if node not in c.nodes or reason == ORIGINAL:
            c.nodes[node] = reason

    def add_to(self, cls: int, ref: Ref, reason: Justification) -> bool:
        """Unify class `cls` with a reference over its own slots."""
        return self.union(self.ref(cls), ref, reason)

    def live(self) -> list[int]:
        """Return the classes that were not merged into others."""
        return [c for c, edge in enumerate(self.parent) if edge is None]


def _order(name: Any) -> tuple[str, Any]:
    """Return a key that orders names of indices, which may be of several types."""
    return ("", name) if isinstance(name, int) else (type(name).__name__, str(name))


def _rename_outputs(node: Node, to: dict[int, int]) -> Node | None:
    """Return the node with output slot i renamed to[i]."""
    if any(i >= node.out for i in to):
        return None
    order = [to.get(i, i) for i in range(node.out)]
    if order == list(range(node.out)):
        return node
    index = order + list(range(node.out, node.out + len(node.bound)))
    args = tuple(Ref(a.cls, tuple([index[i] if i >= 0 else i for i in a.axes])) for a in node.args)
    return Node(node.op, renamed_attr(node.op, node.attr, order), args, node.out, node.bound)


def renamed_attr(op: str, attr: Any, index: Sequence[int] | Mapping[int, int]) -> Any:
    """Return an attribute with every index in it renamed."""
    if op in (CONCAT, CUMSUM):
        return (index[attr[0]], attr[1])
    if op == TAKE:
        mode, fill, windows = attr
        return (mode, fill, tuple([None if w is None else index[w] for w in windows]))
    return attr
