"""Symbols of classes that are elementwise in the results of folds."""

from __future__ import annotations

from collections.abc import Mapping
from functools import reduce

import numpy as np

from symjax_rewrite.ir.dataflow import node_of
from symjax_rewrite.ir.term import ADD, CONST, CONTRACT, MAP, Node
from symjax_rewrite.ir.term_graph import TermGraph
from symjax_rewrite.pallas_kernels.fold.attention_symbols import Rules, Symbol, multiplied

RowSymbol = tuple[Symbol, tuple[str, ...]]  # with the axis of each slot of the class


class RowSymbols:
    """Symbols of classes that are elementwise in the results of folds, and the axes of their slots.

    known: symbols and axes of classes; at first of these results.
    """

    def __init__(self, t: TermGraph, rules: Rules, known: Mapping[int, RowSymbol]) -> None:
        self.t, self.rules, self.known = t, rules, dict(known)

    def of(self, cls: int) -> RowSymbol:
        """Return the symbol of a class, None for none, and the axis of each of its slots."""
        if cls not in self.known:
            self.known[cls] = self._made(cls)
        return self.known[cls]

    def extend(self, more: Mapping[int, RowSymbol]) -> None:
        """Add known classes; classes without a symbol so far may have one then."""
        self.known = {c: x for c, x in self.known.items() if x[0] is not None} | dict(more)

    def _made(self, cls: int) -> RowSymbol:
        node, count = node_of(self.t.graph, cls), len(self.t.graph.classes[cls].sizes)
        if node.op == CONST:
            return np.asarray(node.attr[0]), ()
        if node.bound or node.op not in (ADD, CONTRACT, MAP):
            return None, ()
        args = [self.of(a.cls) for a in node.args]
        names: dict[int, str] = {}
        for a, (symbol, axes) in zip(node.args, args, strict=True):
            if symbol is None or len(a.axes) != len(axes):
                return None, ()
            if any(names.setdefault(i, n) != n for i, n in zip(a.axes, axes, strict=True)):
                return None, ()
        if len({*names.values()}) < len(names) or {*names} != {*range(count)}:
            return None, ()
        return self._applied(node, [s for s, _ in args]), tuple(names[i] for i in range(count))

    def _applied(self, node: Node, args: list[Symbol]) -> Symbol:
        if node.op == MAP:
            rule = self.rules.get(node.attr[0])
            return rule(*args, **dict(node.attr[1])) if rule else None
        if node.op == CONTRACT:
            return reduce(lambda x, y: None if x is None else multiplied(x, y), args)
        terms = [multiplied(x, float(c)) for x, c in zip(args, node.attr, strict=True)]
        if any(x is None for x in terms):
            return None
        return reduce(lambda x, y: None if x is None else self.rules["add"](x, y), terms)
