"""Passes from outside: in reports, in values, under transformations; errors that name them."""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from symjax_rewrite import RulePack, bisect, optimizer, packs, sym_optimize
from symjax_rewrite.candidates import Candidate, Context, Refusal, Replacement
from symjax_rewrite.errors import PassError, RuleError
from symjax_rewrite.ir.flat_program import Program
from symjax_rewrite.rewriting.equation_forms import EquationForms

X = jnp.linspace(-2.0, 2.0, 12, dtype=jnp.float32).reshape(3, 4)


class PythagoreanIdentity:
    """sin(x)² + cos(x)² → 1 for finite x."""

    name = "pythagorean_identity"

    def candidates(self, program: Program, context: Context) -> Iterator[Candidate | Refusal]:
        made_by = {v: e for e in program.equations for v in e.outvals}

        def squared(value: object) -> Any:
            """The equation whose result a value is the square of."""
            e = made_by.get(value) if isinstance(value, int) else None
            if e is None or not (e.name == "square" or e.eqn.params.get("y") == 2):
                return None
            return made_by.get(e.invals[0]) if isinstance(e.invals[0], int) else None

        for e in program.equations:
            sides = [s for v in e.invals if e.name == "add" and (s := squared(v))]
            if {s.name for s in sides} != {"sin", "cos"} or sides[0].invals != sides[1].invals:
                continue
            if not context.options.numerics.permits("finite"):
                yield Refusal(self.name, "sin(inf) is NaN", e.where())
                continue
            one = Replacement(e.outvals, sides[0].invals, jnp.ones_like)
            yield Candidate(self.name, (one,), e.where())


class FusedSums:
    """Two sums of one array over one axis each → the second from the first; stays one equation."""

    name = "fused_sums"

    def candidates(self, program: Program, context: Context) -> Iterator[Candidate]:
        sums = [e for e in program.equations if e.name == "reduce_sum"]
        for total in sums:
            for rows in sums:
                given = rows.invals == total.invals and rows is not total
                if given and total.eqn.params["axes"] == (0, 1):
                    fun = lambda r: r.sum()  # noqa: E731
                    yield Candidate(
                        self.name, (Replacement(total.outvals, rows.outvals, fun, opens=False),)
                    )


def identity(x: jax.Array) -> jax.Array:
    return x * (jnp.sin(x) ** 2 + jnp.cos(x) ** 2) + x


def two_sums(x: jax.Array) -> jax.Array:
    return x.sum(1) / x.sum()


MINE = RulePack("mine", (PythagoreanIdentity(), FusedSums()))


def optimized(fun: Callable, rules: Any = packs.default + MINE, **options: Any) -> Any:
    return sym_optimize(fun, rules=rules, numerics="finite", **options)


def names(fun: Any, *args: Any) -> list[str]:
    return [r.name for r in fun.explain(*args).rules]


PROGRAMS = [(identity, "pythagorean_identity"), (two_sums, "fused_sums")]
TRANSFORMS: dict[str, Callable[[Callable], Callable]] = {
    "call": lambda f: f,
    "jit": jax.jit,
    "grad": lambda f: jax.grad(lambda x: jnp.square(f(x)).sum()),
    "vmap": jax.vmap,
    "jacobian": jax.jacrev,
    "remat": jax.checkpoint,
}


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize(("fun", "name"), PROGRAMS)
def test_values_are_the_originals(fun: Callable, name: str, transform: str) -> None:
    x = X + 3 if transform != "vmap" else jnp.stack([X + 3, X + 4])
    change = TRANSFORMS[transform]
    got = jax.jit(change(optimized(fun)))(x)
    np.testing.assert_allclose(got, change(fun)(x), rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize(("fun", "name"), PROGRAMS)
def test_report_names_the_pass(fun: Callable, name: str) -> None:
    report = optimized(fun).explain(X)
    (use,) = [r for r in report.rules if r.name == name]
    assert "test_added_passes.py" in use.where[0]
    assert name in str(report)


@pytest.mark.parametrize("wrap", [jax.grad, lambda f: jax.vmap(f)])
def test_pass_sees_transformed_programs(wrap: Callable) -> None:
    fun = wrap(lambda x: identity(x).sum()) if wrap is jax.grad else wrap(identity)
    assert "pythagorean_identity" in names(optimized(fun), X)


def test_pass_changes_the_program() -> None:
    report = optimized(identity).explain(X)
    primitives = {e.primitive.name for e in report.after.jaxpr.eqns}
    assert not primitives & {"sin", "cos"}


def test_later_passes_see_the_equations_of_an_open_replacement() -> None:
    def fun(x: jax.Array, a: jax.Array, b: jax.Array) -> jax.Array:
        return (a @ b) @ (x * (jnp.sin(x) ** 2 + jnp.cos(x) ** 2))

    shapes = [jax.ShapeDtypeStruct(s, "float32") for s in ((64, 1), (64, 64), (64, 64))]
    assert {"contraction_order", "pythagorean_identity"} <= set(names(optimized(fun), *shapes))


def test_pass_refuses_under_stricter_numerics() -> None:
    report = sym_optimize(identity, rules=packs.default + MINE).explain(X)
    assert [(r.name, r.reason) for r in report.routes if r.name == "pythagorean_identity"] == [
        ("pythagorean_identity", "sin(inf) is NaN")
    ]


def test_look_alike_is_left_alone() -> None:
    look_alike = lambda x: jnp.sin(x) ** 2 + jnp.cos(2 * x) ** 2  # noqa: E731
    assert "pythagorean_identity" not in names(optimized(look_alike), X)


def test_pass_runs_in_bodies_of_loops() -> None:
    def fun(x: jax.Array) -> jax.Array:
        body = lambda h, _: (jnp.tanh(identity(h)), None)  # noqa: E731
        return jax.lax.scan(body, x, None, length=3)[0]

    f = optimized(fun)
    assert "pythagorean_identity" in names(f, X)
    np.testing.assert_allclose(f(X), fun(X), rtol=1e-5)


@pytest.mark.parametrize(
    "rules",
    [
        PythagoreanIdentity(),
        [packs.lora, PythagoreanIdentity()],
        RulePack("a", (), added=(PythagoreanIdentity(),)),
        packs.default + MINE - "fused_sums",
    ],
    ids=["a pass", "a list", "by keyword", "a difference"],
)
def test_pass_is_added_in_every_form(rules: Any) -> None:
    assert names(optimized(identity, rules), X) == ["pythagorean_identity"]


def test_pass_is_removed_by_name() -> None:
    pack = packs.default + MINE - "pythagorean_identity"
    assert [p.name for p in pack.added] == ["fused_sums"]
    assert names(optimized(identity, pack), X) == []


def test_packs_with_passes_compose() -> None:
    twice = MINE + packs.default + MINE
    assert twice.added == MINE.added
    assert twice.rules == packs.default.rules


def test_plan_replays_a_pass() -> None:
    plan = optimized(identity).explain(X).plan
    assert names(optimized(identity, plan=plan), X) == ["pythagorean_identity"]
    empty = {**plan, "regions": []}
    assert names(optimized(identity, plan=empty), X) == []


class Wrong:
    """Replaces the first sin by `fun` of its operand."""

    name = "wrong"

    def __init__(self, fun: Callable[[Any], Any], opens: bool = True) -> None:
        self.fun, self.opens = fun, opens

    def candidates(self, program: Program, context: Context) -> Iterator[Candidate]:
        for e in program.equations:
            if e.name == "sin":
                part = Replacement(e.outvals, e.invals, self.fun, self.opens)
                yield Candidate(self.name, (part,))


def test_bisect_names_a_pass() -> None:
    f = sym_optimize(
        lambda x: jnp.sin(x) + 1, rules=packs.default + RulePack("", (Wrong(jnp.cos),))
    )
    assert bisect(f, X) == ("wrong",)


class Proposes:
    """Yields given findings."""

    name = "proposes"

    def __init__(self, make: Callable[[Program], Any]) -> None:
        self.make = make

    def candidates(self, program: Program, context: Context) -> Any:
        yield self.make(program)


def _raises(_: Any) -> Any:
    raise ValueError("boom")


def _last(program: Program) -> tuple[int, ...]:
    """The values that the last equation makes."""
    return program.equations[-1].outvals


ERRORS = [
    (Proposes(_raises), "'proposes' raised", "ValueError: boom"),
    (Proposes(lambda p: 3), "yields something that is no candidate", "int"),
    (Proposes(lambda p: Candidate("c", ())), "without parts", "correct the pass"),
    (
        Proposes(lambda p: Candidate("c", (Replacement((p.inputs[0],), (), jnp.ones_like),))),
        "gives a value that no equation",
        "(0,)",
    ),
    (
        Proposes(lambda p: Candidate("c", (Replacement(_last(p), (99,), jnp.ones_like),))),
        "reads a value that the program does not have",
        "test_added_passes.py",
    ),
    (Wrong(_raises), "'wrong' raised where its replacement", "ValueError: boom"),
    (Wrong(_raises, opens=False), "'wrong' raised where its replacement", "ValueError: boom"),
    (Wrong(lambda x: x[0]), "of other shapes or dtypes", "f32[3,4]"),
    (Wrong(lambda x: x.T, opens=False), "of other shapes or dtypes", "f32[4,3]"),
    (Wrong(lambda x: x > 0), "of other shapes or dtypes", "bool[3,4]"),
    (Wrong(lambda x: (x, x)), "'wrong' raised where its replacement", "zip"),
]


@pytest.mark.parametrize(("added", "what", "detail"), ERRORS)
def test_error_names_the_pass(added: Any, what: str, detail: str) -> None:
    f = sym_optimize(lambda x: jnp.sin(x) + 1, rules=[packs.default, added])
    with pytest.raises(PassError) as error:
        f(X)
    text = str(error.value)
    assert f"pass {added.name!r}" in text
    assert what in text
    assert detail in text


def test_pass_that_waits_for_itself_is_refused() -> None:
    added = Proposes(
        lambda p: Candidate("c", (Replacement(p.equations[0].outvals, (p.outputs[0],), jnp.abs),))
    )
    f = sym_optimize(lambda x: jnp.sin(x) + 1, rules=[packs.default, added])
    np.testing.assert_array_equal(f(X), jnp.sin(X) + 1)
    (use,) = [r for r in f.explain(X).routes if r.name == "c"]
    assert not use.taken


@pytest.mark.parametrize(
    ("rules", "what"),
    [
        (lambda: RulePack("a", (PythagoreanIdentity,)), "not a rule"),
        (lambda: RulePack("a", (object(),)), "not a rule"),
        (lambda: RulePack("a", (PythagoreanIdentity(), PythagoreanIdentity())), "has the name"),
        (lambda: MINE + RulePack("a", (PythagoreanIdentity(),)), "has the name"),
    ],
    ids=["a class", "no pass", "twice", "twice by +"],
)
def test_malformed_pack_is_refused(rules: Callable[[], RulePack], what: str) -> None:
    with pytest.raises(RuleError, match=what):
        rules()


def test_pass_with_a_name_of_the_optimisers_is_refused() -> None:
    class Mine(PythagoreanIdentity):
        name = "fold"

    with pytest.raises(RuleError, match="has the name of an added pass"):
        optimized(identity, Mine())(X)


def test_repr_has_a_line_per_rule_and_pass() -> None:
    lines = repr(packs.lora + MINE - "loop_fusion").splitlines()
    assert lines[0] == "RulePack 'lora+distributivity+mine': 6 rules"
    assert lines[1].split() == ["lora", "distributivity", "nd,do,dr,ro"]
    assert "x·(W + A·B) = x·W + (x·A)·B" in lines[5]
    assert lines[7].split()[:2] == ["pythagorean_identity", "pass"]
    assert lines[7].endswith("sin(x)² + cos(x)² → 1 for finite x.")
    assert lines[-1] == "  without loop_fusion"
    assert len(lines) == 1 + 6 + 2 + 1


def test_repr_of_an_empty_pack() -> None:
    assert repr(RulePack("none", ())) == "RulePack 'none': 0 rules"


class SignByComparisons(EquationForms):
    """sign(x) → the sign by comparisons, at an assumed gain."""

    rule, margin = ("sign_by_comparisons", "redundancy"), "dominating"
    primitives, dtypes = frozenset({"sign"}), ("float32",)

    def form(self, e: Any, context: Context, unstored: Any) -> tuple[Any, tuple[float, float]]:
        return lambda x: (x > 0).astype(x.dtype) - (x < 0), (2.0, 1.0)


def test_pass_of_the_list_needs_no_other_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optimizer, "PASSES", (SignByComparisons(), *optimizer.PASSES))
    x = jax.ShapeDtypeStruct((1000, 1000), jnp.float32)
    report = sym_optimize(jnp.sign).explain(x)
    assert [r.name for r in report.rules] == ["sign_by_comparisons"]
