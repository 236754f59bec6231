"""Derivations: the rules by which a region was rewritten, step by step, in index notation."""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from symjax_rewrite.codegen.emission import RegionForm, TermPart
from symjax_rewrite.ir.dataflow import CycleError, postorder
from symjax_rewrite.ir.egraph import ORIGINAL
from symjax_rewrite.ir.term import LEAF, Node, Ref
from symjax_rewrite.reports.index_notation import Name, TermWriter
from symjax_rewrite.rewriting.rule import Axiom, Lemma
from symjax_rewrite.usage_records import Change, RouteUse

LONGEST = 400  # characters of one side


@dataclass(frozen=True, slots=True)
class DerivationStep:
    """One use of a rule: its name, property and law, and a value before and after."""

    rule: str
    property: str
    law: str
    before: str
    after: str


class Derivations:
    """Writes derivations.

    rules: by name. names: the names of the program's values, by value number.
    """

    def __init__(self, rules: Mapping[str, Axiom | Lemma], names: Mapping[int, str]) -> None:
        self.rules, self.names = rules, names

    def steps(self, change: Change | RouteUse) -> list[DerivationStep]:
        """Return the steps of a form that rules derive; none for a kernel or a loop."""
        out: dict[DerivationStep, None] = {}
        for part in change.parts:
            for form, roots in _forms(part):
                out.update(dict.fromkeys(self._of_form(part, form, roots)))
        return list(out)

    def _of_form(
        self, part: TermPart, form: RegionForm, roots: list[int]
    ) -> Iterator[DerivationStep]:
        g, names = form.g, _LeafNames(part, form, self.names)

        def first(cls: int) -> Node:
            return g.classes[cls].first

        def chosen(cls: int) -> Node:
            return form.choice.get(cls) or first(cls)

        try:
            order = postorder(roots, lambda c: [g.find(a).cls for a in chosen(c).args])
        except CycleError:  # a class that became one of its own operands has no order
            return
        for cls in reversed(order):
            node, written = chosen(cls), first(cls)
            reason = g.classes[cls].nodes.get(node, ORIGINAL)
            if node == written or reason == ORIGINAL or node.op == LEAF:
                continue
            here = lambda c, cls=cls, node=node: node if c == cls else first(c)  # noqa: E731
            opened = {g.find(a).cls for a in written.args} - names.leaves
            closed = lambda c, o=opened: None if c in o else names.of(c)  # noqa: E731
            before = TermWriter(g, first, closed, taken=names.letters)
            after = TermWriter(g, here, names.of, taken=names.letters)
            left = names.order(cls)
            texts = [_cut(w.formula(g.ref(cls), left)) for w in (before, after)]
            if texts[0] != texts[1]:
                yield self._step(reason.rule, *texts)

    def _step(self, name: str, before: str, after: str) -> DerivationStep:
        rule = self.rules.get(name)
        return DerivationStep(name, rule.property if rule else "", law_of(rule), before, after)


def _forms(part: object) -> Iterator[tuple[RegionForm, list[int]]]:
    """Yield the solved regions of a part, with the classes that the part takes from each."""
    found: dict[int, tuple[RegionForm, list[int]]] = {}
    for form, ref in part.forms.values() if isinstance(part, TermPart) else ():
        cls = form.g.find(ref).cls
        roots = found.setdefault(id(form), (form, []))[1]
        roots += [cls] * (cls not in roots)
    yield from found.values()


class _LeafNames:
    """The names of a region's classes that a derivation does not open, by the program's values.

    These are the leaves, and values that are computed as written and have a name in the program.
    """

    def __init__(self, part: TermPart, form: RegionForm, names: Mapping[int, str]) -> None:
        self.part, self.form, self.names = part, form, names
        self.known: dict[int, Name | None] = {}
        used = (self.of(cls) for cls in form.g.live())
        self.letters = frozenset(n.text for n in used if n is not None and len(n.text) == 1)
        self.leaves = {c for c in form.g.live() if _leaf(form, c) is not None}

    def of(self, cls: int) -> Name | None:
        """Return the name of a region's class, or None."""
        if cls not in self.known:
            self.known[cls] = self._find(cls)
        return self.known[cls]

    def _find(self, cls: int) -> Name | None:
        form = self.form
        if (leaf := _leaf(form, cls)) is not None:
            found = form.leaves[leaf.attr]
            return self._of_program(found) or self._unnamed(found)
        node, origin = form.choice.get(cls), form.origin.get(cls)
        if node is None or origin is None or form.g.classes[cls].nodes.get(node) != ORIGINAL:
            return None
        return self._of_program(origin)

    def order(self, cls: int) -> list[int]:
        """Return the slots of a region's class in the order of the axes of the user's array."""
        slots = range(len(self.form.g.classes[cls].sizes))
        origin, t = self.form.origin.get(cls), self.part.t
        if origin is None or not (held := t.values_of(origin.cls)):
            return list(slots)
        axes = t.view(held[0]).axes
        return sorted(slots, key=lambda s: axes[origin.axes[s]])

    def _of_program(self, ref: Ref) -> Name | None:
        """Return the name of a class of the program, over the slots of the region's class."""
        t, cls = self.part.t, ref.cls
        for v in [t.leaf_value[cls]] if cls in t.leaf_value else t.values_of(cls):
            slots = t.slots_of(v)
            if v in self.names and slots is not None:
                place = {s: k for k, s in enumerate(ref.axes)}
                return Name(self.names[v], [[place[s] for s in group] for group in slots])
        return None

    def _unnamed(self, ref: Ref) -> Name:
        """Return a number as the name of a value that an earlier pass made."""
        t, cls = self.part.t, ref.cls
        held = [t.leaf_value[cls]] if cls in t.leaf_value else t.values_of(cls)
        slots = map(ref.axes.index, range(len(ref.axes)))
        return Name(f"v{held[0] if held else cls}", [(s,) for s in slots])


def _leaf(form: RegionForm, cls: int) -> Node | None:
    return next((n for n in form.g.classes[cls].nodes if n.op == LEAF), None)


def _cut(text: str) -> str:
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}…"


@functools.cache
def law_of(rule: Axiom | Lemma | None) -> str:
    """Return a rule's law as text: an axiom's own, or both sides of a lemma from its source."""
    if isinstance(rule, Axiom):
        return rule.law
    if rule is None:
        return ""
    try:
        source = textwrap.dedent(inspect.getsource(rule.sides))
        nodes = list(ast.walk(ast.parse(source)))
    except (OSError, SyntaxError, TypeError):  # typed at a prompt, a lambda, or a callable object
        return ""
    found = [n.value for n in nodes if isinstance(n, ast.Return)]
    if len(found) != 1 or not isinstance(found[0], ast.Tuple) or len(found[0].elts) != 2:
        return ""
    named = {ast.unparse(n.targets[0]): n.value for n in nodes if isinstance(n, ast.Assign)}
    sides = (named.get(ast.unparse(side), side) for side in found[0].elts)
    texts = (ast.get_source_segment(source, side) or "" for side in sides)
    return " = ".join(" ".join(text.split()) for text in texts)
