"""Rules, and the context in which a rule is applied.

There are three kinds of rules. All are values, and none is registered at import. Axioms are laws of
the calculus. Lemmas are pairs of JAX functions, derivable from the axioms. Routes have a pattern on
the left and a kernel on the right (see `route`). Packs of rules compose with `+`.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from symjax_rewrite.candidates import OutOfTimeError, Pass
from symjax_rewrite.cost.term_cost import CostModel
from symjax_rewrite.errors import RuleError, SymjaxError, choice
from symjax_rewrite.ir.egraph import ORIGINAL, EGraph, Justification
from symjax_rewrite.ir.primitives import dtype_kind
from symjax_rewrite.ir.products import Product, ends_early, expand_node
from symjax_rewrite.ir.sizes import Dim
from symjax_rewrite.ir.term import KINDS, SLICE, TAKE, Node, Ref
from symjax_rewrite.ir.value_analysis import is_zero
from symjax_rewrite.obstacles import Obstacle
from symjax_rewrite.options import NUMERICS, Numerics
from symjax_rewrite.rewriting.contraction_order import Pairs, Tree
from symjax_rewrite.rewriting.laws import Sides
from symjax_rewrite.text_tables import aligned

ASSOCIATIVITY = "associativity"
DISTRIBUTIVITY = "distributivity"
SEPARABILITY = "separability"
LOCALITY = "locality"
SPARSITY = "sparsity"
REDUNDANCY = "redundancy"
SYMMETRY = "symmetry"
COMMON = "common_subexpression"
REPEATED = "repeated_work"
ORIENTATION = "orientation"
COLUMNS = "column_reductions"
PLACES = "extremum_places"
SCANS = "column_scans"
POWERS = "rational_powers"
STORED = "fusion_limits"
ROWS = "short_rows"
INVARIANT = "loop_invariant"
BATCHING = "loop_batching"
FUSION = "loop_fusion"
PARTS = "loop_parts"
PACKING = "loop_packing"
RECOMPUTATION = "loop_recomputation"
# What packs permit besides rules, and its effect; `pack - name` leaves one out. A name is that of a
# pass, or of one of the changes that the passes of loops make.
TRANSFORMATIONS = {
    COMMON: "a product that is written twice is computed once",
    REPEATED: "a product is computed once for all copies of an operand",
    ORIENTATION: "a product reads its operands along their rows",
    COLUMNS: "a reduction down long rows reads row by row",
    PLACES: "the place of an extremum is the first place that has its value",
    POWERS: "a power of quarters is a product of square roots",
    SCANS: "cumulative operations down long rows are a loop over the rows",
    ROWS: "short rows of a reduction are joined, split or written out",
    STORED: "a value is stored where fused code would be slow",
    INVARIANT: "loop-invariant operations run once, before the loop",
    BATCHING: "what depends on no other step runs for all steps at once",
    FUSION: "the loop and operations around it are one loop",
    PARTS: "a product that a step reads in parts is a product for each part",
    PACKING: "results in small floats are stacked as their bits",
    RECOMPUTATION: "the derivative computes states again instead of storing them",
}
PROPERTIES = (ASSOCIATIVITY, DISTRIBUTIVITY, SEPARABILITY, LOCALITY, SPARSITY, REDUNDANCY, SYMMETRY)


@dataclass(slots=True)
class RuleContext:
    """The context of a rule: the e-graph, sizes as numbers, use counts, and permitted numerics.

    uses: the number of consumers of a class in the traced program (1 for classes that rules added).
    frozen: True if a class depends on frozen arguments alone. has_frozen: False if none does.
    refused: reasons why a rule that matched did not fire, for the report. ordered: products whose
    cheapest order is known. trees: the cheapest trees of products by shape, of other regions too.
    whole: sums that rules added and that lose digits if they are distributed, flattened or
    factored.
    """

    g: EGraph
    model: CostModel
    numerics: Numerics
    uses: Callable[[int], int]
    frozen: Callable[[int], bool]
    storage: Callable[[int], str]
    pairs: Pairs
    has_frozen: bool = True
    refused: dict[tuple[str, str], int] = field(default_factory=dict)
    ordered: dict[tuple, Ref | None] = field(default_factory=dict)
    trees: dict[tuple, Tree] = field(default_factory=dict)
    whole: set[int] = field(default_factory=set)

    def refuse(self, rule: str, reason: str, cls: int) -> None:
        """Record that a rule matched at a class and was not applied."""
        self.refused.setdefault((rule, reason), cls)

    def permits(self, level: str, dtype: str) -> bool:
        """Return True if a step of a numerics level is permitted on values of a dtype.

        Integer arithmetic is exactly a ring, so every level is permitted for integers.
        """
        return dtype_kind(dtype) in "iub" or self.numerics.permits(level)

    def may_overflow(self, cls: int) -> bool:
        """Return True if a product that a rule added may overflow although no written value does.

        This is possible in dtypes with a small range, unless the product or a product that contains
        it is written in the program. In float16 (A·B)·x may exceed 65504 although A·(B·x) does not.
        """
        c = self.g.classes[cls]
        if not ends_early(c.dtype) or self.permits("finite", c.dtype):
            return False
        return not any(r == ORIGINAL or n.op in (SLICE, TAKE) for n, r in c.nodes.items())

    def has(self, cls: int, op: str) -> bool:
        """Return True if a class has a node of some kind."""
        return any(n.op == op for n in self.g.classes[cls].nodes)

    def opened(self, cls: int, node: Node) -> Product:
        """Return a product in which the factors that nothing else reads are opened."""
        return expand_node(self.g, cls, node, lambda d: self.uses(d) <= 1)

    def is_whole(self, cls: int) -> bool:
        """Return True if a sum would lose digits if another sum or product opened it."""
        g = self.g
        return any(g.find(g.ref(w)).cls == cls for w in self.whole)

    def is_zero(self, cls: int) -> bool:
        """Return True if a class is the constant zero."""
        return is_zero(self.g, cls)

    def count(self, sizes: Iterable[Dim]) -> float:
        """Return the number of elements of an index space, at the sample sizes."""
        out = 1.0
        for s in sizes:
            out *= s if isinstance(s, int) else self.model.at(s)
        return out

    def elements(self, cls: int) -> float:
        """Return the number of elements of a class."""
        return self.count(self.g.classes[cls].sizes)


class NotBuiltError(Exception):
    """A right side is given up: a product of it has no order, or the rule refuses (internal)."""


def built(make: Callable[..., Ref | None], *args: Any, **kwargs: Any) -> Iterator[Ref]:
    """Yield the right side that a function makes of some arguments, unless it gives it up."""
    try:
        made = make(*args, **kwargs)
    except NotBuiltError:
        return
    if made is not None:
        yield made


def too_large(dtype: str) -> str:
    """Return the reason for a refusal by `RuleContext.may_overflow`."""
    return Obstacle.RANGE(
        f"may be infinite in {dtype} where the original is not; numerics='finite' permits it"
    )


Apply = Callable[[RuleContext, int, Node], Iterator[Ref]]


@dataclass(frozen=True, slots=True)
class Axiom:
    """A law of the calculus.

    name: its name in mathematics.
    law: the equations as text, separated by `;`.
    property: one of `PROPERTIES`.
    on: kinds of nodes that the function receives.
    apply: the function `(context, class, node) -> equal references`.
    numerics: the level it needs (`exact`, `reassoc`, `finite`, `cancels`).
    source: its source, if it is not arithmetic.
    again: True if it reads every node of its operands, so that new nodes matter.
    everywhere: True if it also applies to products that their user opens anyway.
    not_after: rules whose results it would only undo.
    needs: kinds of nodes, one of which the e-graph must hold for the law to apply.
    sides: the equations as programs, which `check_rule` compares.
    """

    name: str
    law: str
    property: str
    on: tuple[str, ...]
    apply: Apply
    numerics: str = "reassoc"
    source: str = ""
    again: bool = False
    everywhere: bool = False
    not_after: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    sides: tuple[Sides, ...] = ()

    def forms(self, ctx: RuleContext, cls: int, node: Node) -> Iterator[Ref]:
        """Yield the equal forms of a node, until a right side is given up outside `built`."""
        try:
            yield from self.apply(ctx, cls, node)
        except NotBuiltError:
            return

    def reason(self, cls: int) -> Justification:
        """Return the explanation of a node that this rule adds at a class."""
        return Justification(self.name, cls)


def axiom(
    *laws: str | Sides, property: str, on: tuple[str, ...] | str, **options: Any
) -> Callable[[Apply], Axiom]:
    """Make an axiom of a function `(context, class, node) -> equal references`.

    Args:
        laws: the equations: text that `check_rule` evaluates (`laws.law`), or text alone.
        property: one of `PROPERTIES`.
        on: kinds of nodes that the function receives, such as `("contract", "add")`.
        options: further fields of `Axiom`.

    Raises:
        RuleError: a law is neither text nor of `law`, or a property, a kind or a level is unknown.
    """
    check_properties((property,))
    check_level(options.get("numerics", "reassoc"))
    kinds = (on,) if isinstance(on, str) else tuple(on)
    if unknown := [kind for kind in kinds if kind not in KINDS]:
        raise RuleError("unknown kind of nodes", **choice(unknown[0], KINDS))
    if not all(isinstance(x, str | Sides) for x in laws):
        raise RuleError("an axiom needs laws", expected="texts or law(...)", got=repr(laws))
    text = "; ".join([x if isinstance(x, str) else x.text for x in laws])
    sides = tuple(x for x in laws if isinstance(x, Sides))

    def make(apply: Apply) -> Axiom:
        name = apply.__name__
        return Axiom(name, text, property, kinds, _checked(apply), sides=sides, **options)

    return make


def _checked(apply: Apply) -> Apply:
    """Return the function of an axiom; that of a user raises `RuleError` in place of its errors."""
    if (apply.__module__ or "").startswith("symjax_rewrite."):
        return apply

    @functools.wraps(apply)
    def checked(context: RuleContext, cls: int, node: Node) -> Iterator[Ref]:
        try:
            for ref in apply(context, cls, node):
                if not isinstance(ref, Ref):
                    raise TypeError(f"yields {type(ref).__name__}, which is no reference")
                yield ref
        except (OutOfTimeError, NotBuiltError, SymjaxError):
            raise
        except Exception as error:  # code of users, which may raise anything
            got = f"{type(error).__name__}: {error}"
            remedy = "correct the axiom; check_rule applies it to examples"
            where, what = line_of_function(apply), f"axiom {apply.__name__!r} raised"
            raise RuleError(what, where=where, got=got, remedy=remedy) from error

    return checked


@dataclass(frozen=True, slots=True)
class Lemma:
    """A named identity: two JAX functions of the same arguments, with equal values.

    sides: a function of arrays that returns (left, right). shapes: named sizes per argument.
    """

    name: str
    shapes: tuple[str, ...]
    sides: Callable[..., tuple[Any, Any]]
    uses: tuple[str, ...]
    source: str
    numerics: str = "reassoc"
    proof: str = ""
    small: tuple[str, ...] = ()

    @property
    def property(self) -> str:
        """Return the main property on which the lemma depends."""
        return self.uses[0]


def lemma(
    shapes: str,
    *,
    uses: tuple[str, ...] | str,
    source: str,
    numerics: str = "reassoc",
    proof: str = "",
    small: str = "",
) -> Callable[[Callable[..., tuple[Any, Any]]], Lemma]:
    """Make a lemma of a function that returns both sides.

    Args:
        shapes: one word per argument, one letter per axis: `"nd,do,dr,ro"`.
        uses: the properties its derivation depends on, the main one first.
        source: its source.
        numerics: the level it needs, as of an axiom.
        proof: required if it cannot be derived from the axioms: where the proof is.
        small: letters of sizes that are much smaller than the others (ranks).

    Raises:
        RuleError: shapes are malformed, no property is named, or one or the level is unknown.

    Examples:
        >>> @lemma("ij,jk,kl", uses=(ASSOCIATIVITY,), source="folklore")
        ... def chain(a, b, c):
        ...     return (a @ b) @ c, a @ (b @ c)
        >>> chain.name
        'chain'
    """
    words = words_of(shapes)
    rests_on = (uses,) if isinstance(uses, str) else tuple(uses)
    check_properties(rests_on)
    check_level(numerics)

    def make(sides: Callable[..., tuple[Any, Any]]) -> Lemma:
        name = getattr(sides, "__name__", "lemma")
        return Lemma(name, words, sides, rests_on, source, numerics, proof, tuple(small))

    return make


def words_of(shapes: str) -> tuple[str, ...]:
    """Return the words of named sizes, one for each argument.

    Raises:
        RuleError: a word is no letters.
    """
    words = tuple(w.strip() for w in shapes.split(","))
    if not all(w.isalpha() or w == "" for w in words):
        raise RuleError("malformed shapes", expected="'nd,do,dr,ro'", got=repr(shapes))
    return words


def check_properties(names: tuple[str, ...]) -> None:
    """Raise `RuleError` unless these are properties, at least one."""
    if not names or any(name not in PROPERTIES for name in names):
        what = "unknown property" if names else "a lemma rests on at least one property"
        raise RuleError(what, expected=", ".join(PROPERTIES), got=", ".join(map(repr, names)))


def check_level(numerics: str) -> None:
    """Raise `RuleError` unless this is a numerics level that a rule may need."""
    if numerics not in NUMERICS:
        expected = ", ".join(NUMERICS)
        raise RuleError("unknown numerics level of a rule", expected=expected, got=repr(numerics))


def line_of(rule: Axiom | Lemma) -> str:
    """Return `file.py:12 (name)` of the function from which a rule was made."""
    return line_of_function(rule.sides if isinstance(rule, Lemma) else rule.apply) or rule.name


def line_of_function(fun: Callable[..., Any]) -> str:
    """Return `file.py:12 (name)` of a function; empty if it has no source."""
    code = getattr(inspect.unwrap(fun), "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno} ({fun.__name__})" if code else ""


def _is_pass(given: Any) -> bool:
    """Return True if an object is a pass and not a class."""
    named = isinstance(getattr(given, "name", None), str)
    return not isinstance(given, type) and named and callable(getattr(given, "candidates", None))


def _check_rule_names(rules: tuple[Axiom | Lemma, ...]) -> None:
    """Raise `RuleError` if two rules have one name."""
    named: dict[str, Axiom | Lemma] = {}
    for rule in rules:
        if named.setdefault(rule.name, rule) is not rule:
            lines = f"{line_of(named[rule.name])} and {line_of(rule)}"
            remedy = "give each rule a name of its own: pack - name and bisect go by names"
            raise RuleError("two rules of a pack have one name", got=lines, remedy=remedy)


def _check_pass_names(rules: tuple[Axiom | Lemma, ...], added: tuple[Pass, ...]) -> None:
    """Raise `RuleError` if a pass has the name of a rule or of another pass."""
    taken = {*TRANSFORMATIONS, *(r.name for r in rules)}
    for each in added:
        if each.name in taken:
            what = "a rule or another pass has the name of this pass"
            raise RuleError(what, got=repr(each.name), remedy="give the pass a name of its own")
        taken.add(each.name)


def _row(each: Any) -> tuple[str, str, str]:
    """Return name, property and law of a rule (a lemma's shapes), or a pass and its docstring."""
    if isinstance(each, Axiom):
        return each.name, each.property, each.law
    if isinstance(each, Lemma):
        return each.name, each.property, ",".join(each.shapes)
    return each.name, "pass", (type(each).__doc__ or "").strip().partition("\n")[0]


def _union(a: tuple, b: tuple) -> tuple:
    """Return the elements of two tuples, each object once."""
    return tuple({id(x): x for x in (*a, *b)}.values())


@dataclass(frozen=True, slots=True, repr=False)
class RulePack:
    """A named set of rules and passes; packs compose with `+` and lose rules with `-`.

    `rules` are axioms and lemmas. `added` are passes: objects with `name` and `candidates(program,
    context)` (see `candidates.Pass` and `candidates.Replacement`). They run before the optimiser's
    own passes and may be given among the rules. `without` are the `TRANSFORMATIONS` that were
    removed from the pack. Every other one belongs to the pack, even if the pack has no rules.
    Adding another pack does not restore a removed one.

    Raises:
        RuleError: an element is neither a rule nor a pass, or two elements have one name.

    Examples:
        >>> (RulePack("a", ()) + RulePack("b", ())).name
        'a+b'
        >>> (RulePack("a", ()) - "repeated_work" + RulePack("b", ())).without
        ('repeated_work',)
    """

    name: str
    rules: tuple[Any, ...]
    without: tuple[str, ...] = ()
    added: tuple[Pass, ...] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not isinstance(self.rules, Iterable):
            expected = 'RulePack("its name", (rule, ...))'
            raise RuleError("not a pack", expected=expected, got=repr((self.name, self.rules)))
        given = _union(tuple(self.rules), self.added)
        for each in given:
            if not isinstance(each, (Axiom, Lemma)) and not _is_pass(each):
                raise RuleError(
                    "not a rule",
                    expected="an axiom, a lemma or a pass; in rules=[...] also a pack or its name",
                    got=f"{type(each).__name__} {each!r}",
                    remedy="make a rule of a function with @lemma(...) or @axiom(...); "
                    "a pass is an instance with .name and .candidates(program, context)",
                )
        rules = tuple(r for r in given if isinstance(r, (Axiom, Lemma)))
        added = tuple(p for p in given if not isinstance(p, (Axiom, Lemma)))
        _check_rule_names(rules)
        _check_pass_names(rules, added)
        object.__setattr__(self, "rules", rules)
        object.__setattr__(self, "added", added)

    def __repr__(self) -> str:
        lines = [f"RulePack {self.name!r}: {len(self.rules)} rules"]
        rows = [_row(each) for each in (*self.rules, *self.added)]
        lines += [f"  {line}" for line in aligned(rows)]
        if self.without:
            lines.append(f"  without {', '.join(self.without)}")
        return "\n".join(lines)

    def __add__(self, other: RulePack) -> RulePack:
        if not isinstance(other, RulePack):
            remedy = "packs.lora names a pack; RulePack('mine', (rule,)) makes one of rules"
            raise RuleError("packs are added to packs", got=repr(other), remedy=remedy)
        without = tuple(p for p in TRANSFORMATIONS if p in (*self.without, *other.without))
        rules, added = _union(self.rules, other.rules), _union(self.added, other.added)
        _check_pass_names(rules, added)
        return self._changed(f"{self.name}+{other.name}", rules, without, added)

    def __sub__(self, names: str | Iterable[str]) -> RulePack:
        if not isinstance(names, Iterable):
            return NotImplemented
        gone = {names} if isinstance(names, str) else set(names)
        known = {*TRANSFORMATIONS, *(r.name for r in self.rules), *(p.name for p in self.added)}
        if unknown := gone - known:
            fields = choice(min(unknown), sorted(known))
            fields.setdefault("remedy", "kernels are no rules: kernels='off' takes none")
            raise RuleError("no such rule in this pack", **fields)
        without = tuple(p for p in TRANSFORMATIONS if p in gone or p in self.without)
        rules = tuple(r for r in self.rules if r.name not in gone)
        added = tuple(p for p in self.added if p.name not in gone)
        return self._changed(self.name, rules, without, added)

    def _changed(self, *values: Any) -> RulePack:
        """Return a pack of other fields; rules of several packs may share a name."""
        pack = copy.copy(self)
        for name, value in zip(self.__slots__, values, strict=True):
            object.__setattr__(pack, name, value)
        return pack

    @property
    def passes(self) -> tuple[str, ...]:
        """Return the names of the transformations and added passes of the pack."""
        return (
            *(p for p in TRANSFORMATIONS if p not in self.without),
            *(p.name for p in self.added),
        )

    @property
    def axioms(self) -> tuple[Axiom, ...]:
        """Return the axioms of the pack."""
        return tuple(r for r in self.rules if isinstance(r, Axiom))

    @property
    def lemmas(self) -> tuple[Lemma, ...]:
        """Return the lemmas of the pack."""
        return tuple(r for r in self.rules if isinstance(r, Lemma))
