"""Candidates are taken as far as they stand together in the program as it will be emitted."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from symjax_rewrite import Options, packs, policy, sym_optimize
from symjax_rewrite.candidates import Candidate, Context, Replacement
from symjax_rewrite.codegen.emission import run
from symjax_rewrite.cost.device_profiles import CPU
from symjax_rewrite.cost.joined_calls import kept_bytes
from symjax_rewrite.cost.placed_products import layout_seconds
from symjax_rewrite.cost.term_cost import Cost
from symjax_rewrite.cost.transposed_copies import transposed_seconds
from symjax_rewrite.ir.flat_program import Program, flatten
from symjax_rewrite.ir.sizes import Assumptions
from symjax_rewrite.optimizer import Optimiser
from symjax_rewrite.reports.program_cost import ProgramTerms


@dataclass(eq=False)
class Ones:
    """Gives ones for some values, whatever the values are that it waits for."""

    gives: tuple[int, ...]
    reads: tuple[int, ...] = ()
    opens: bool = False
    source: Any = None

    def needs(self, value: int) -> tuple[int, ...]:
        return self.reads

    def emit(self, wanted: Sequence[int], read: Any) -> list[Any]:
        return [jnp.ones(3) + 0 * sum(read(v) for v in self.reads) for _ in wanted]


@pytest.fixture
def chain() -> tuple[Program, list[int]]:
    """A program `x -> a -> b -> c -> d`, which gives b and d, and its five values."""

    def fun(x):
        b = jnp.cos(jnp.sin(x))
        return b, jnp.tanh(jnp.exp(b))

    program = flatten(jax.make_jaxpr(fun)(jnp.zeros(3)))
    return program, [program.inputs[0], *(e.outvals[0] for e in program.equations)]


def taken(program: Program, *found: Candidate) -> tuple[Program, list[str], list[str]]:
    what = Options(rules=packs.default), packs.default, CPU, Assumptions({})
    context = Context(*what, frozenset(), None, 0.0, lambda *_: None, {})
    made, kept, refused = policy.chosen(program, found, context)
    return made, [c.name for c in kept], [r.name for r in refused]


def candidate(name: str, *parts: Ones, hidden: tuple[int, ...] = ()) -> Candidate:
    return Candidate(name, parts, hidden=frozenset(hidden))


@pytest.mark.parametrize("opens", [False, True])
def test_candidates_in_order_are_taken(chain, opens):
    program, (x, a, b, _c, d) = chain
    first = candidate("first", Ones((b,), (x,), opens), hidden=(a,))
    made, names, refused = taken(program, first, candidate("second", Ones((d,), (b,), opens)))
    assert (names, refused) == (["first", "second"], [])
    assert len(chain[0].equations) == 4, "the program that was given is as it was"
    for out in run(made, [jnp.zeros(3)]):
        np.testing.assert_array_equal(out, np.ones(3))


def test_a_gain_that_is_little_of_what_it_replaces_is_refused_without_the_price_of_the_program(
    chain,
):
    program, (x, _a, b, _c, _d) = chain
    costs = Cost(seconds=1.0), Cost(seconds=0.999)
    small = replace(
        candidate("small", Ones((b,), (x,))), before=costs[0], after=costs[1], share=True
    )
    yes = lambda *_: True  # noqa: E731
    prices_nothing = SimpleNamespace(device=CPU, admits=yes, selects=yes, is_light=lambda _: False)
    _, kept, refused = policy.chosen(program, [small], prices_nothing)  # pyright: ignore[reportArgumentType]
    assert not kept
    assert "of the program's predicted time" in refused[0].reason


@pytest.mark.parametrize("opens", [False, True])
def test_values_of_one_part_may_wait_for_each_other(chain, opens):
    """Each is made by itself where together they would wait for themselves."""
    program, (x, a, _b, c, d) = chain

    class Both(Ones):
        def needs(self, value):
            return (x,) if value == a else (c,)

    made, names, _ = taken(program, candidate("both", Both((a, d), (), opens)))
    assert names == ["both"]
    np.testing.assert_array_equal(run(made, [jnp.zeros(3)])[1], np.ones(3))


def test_refused_candidate_is_not_taken(chain):
    program, (x, a, b, _c, _d) = chain
    found = candidate("first", Ones((b,), (x,))), candidate("second", Ones((a,), (x,)))
    admits = lambda c: c.name == "second"  # noqa: E731
    only = Optimiser(Options(rules=packs.default), packs.default, CPU, admits=admits)
    _, kept, refused = policy.chosen(program, found, only)  # pyright: ignore[reportArgumentType]
    assert [c.name for c in kept] == ["second"]
    assert [(r.name, r.reason) for r in refused] == [("first", "not admitted")]


def test_a_candidate_that_waits_for_itself_is_refused(chain):
    program, (_x, a, b, _c, _d) = chain
    assert taken(program, candidate("early", Ones((a,), (b,))))[1:] == ([], ["early"])


def test_candidates_that_wait_for_each_other_are_refused(chain):
    program, (_x, a, b, c, _d) = chain
    first, second = candidate("first", Ones((a,), (c,))), candidate("second", Ones((b,), (a,)))
    assert taken(program, first, second)[1] == []
    assert taken(program, second)[1] == ["second"]


def test_candidate_that_hides_a_needed_value_is_refused(chain):
    program, (_x, a, b, c, _d) = chain
    assert taken(program, candidate("hides", Ones((c,), (a,)), hidden=(b,)))[1:] == ([], ["hides"])


def test_first_of_two_candidates_for_a_value_is_taken(chain):
    program, (x, _a, b, c, _d) = chain
    first, second = candidate("first", Ones((c,), (b,))), candidate("second", Ones((c,), (x,)))
    assert taken(program, first, second)[1:] == (["first"], ["second"])


def test_part_with_an_undefined_operand_is_refused(chain):
    program, (x, _a, b, _c, d) = chain
    lost = program.new_value(program.avals[x])
    giver = candidate("giver", Ones((lost, b), (x,)))
    reader = candidate("reader", Ones((d,), (lost,)))
    assert taken(program, reader)[1:] == ([], ["reader"])
    assert taken(program, giver, reader)[1] == ["giver", "reader"]


def test_a_part_is_staged_out_once(chain):
    """Its equations are checked for transposed copies, and put into the program later."""

    class Counted(Ones):
        runs = 0

        def emit(self, wanted: Sequence[int], read: Any) -> list[Any]:
            Counted.runs += 1
            return super().emit(wanted, read)

    program, (_, a, *_) = chain
    costs = Cost(seconds=2.0), Cost(seconds=1.0)
    part = Counted((a,), opens=True)
    found = Candidate("copied", (part,), before=costs[0], after=costs[1], leaves_copies=True)
    assert taken(program, found)[1] == ["copied"]
    assert Counted.runs == 1


@pytest.mark.parametrize(("copies_s", "priced"), [(0.1, 2), (3.0, 4)])
def test_copies_are_priced_by_candidate_only_if_one_might_not_pay(
    chain, monkeypatch, copies_s, priced
):
    """A program has many candidates, and each price needs a program of its own."""
    program, (_, a, _, c, _) = chain
    seen = []

    def seconds(program, device, within=None):
        seen.append(program)
        return 0.0 if len(seen) == 1 else copies_s

    monkeypatch.setattr(policy, "layout_seconds", seconds)
    costs = Cost(seconds=2.0), Cost(seconds=1.0)
    found = [
        Candidate("rewrite", (Ones((v,)),), before=costs[0], after=costs[1], leaves_copies=True)
        for v in (a, c)
    ]
    assert taken(program, *found)[1] == (["rewrite"] * 2 if copies_s < 1 else [])
    assert len(seen) == priced


@pytest.mark.parametrize("turned", [True, False])
def test_a_small_gain_counts_with_the_transposed_copies_that_go_with_it(turned):
    """A product whose result is transposed is refused for its price alone, and written turned."""

    def fun(a, b):
        c = jax.lax.dot_general(a, b, (((1,), (0,)), ((), ())))
        return jnp.exp(c.T if turned else c + 1), c

    shapes = jax.ShapeDtypeStruct((2000, 8), "float32"), jax.ShapeDtypeStruct((8, 500), "float32")
    program = flatten(jax.make_jaxpr(fun)(*shapes))
    last = program.equations[-2]  # what exp reads
    other = Replacement(
        last.outvals, tuple(program.inputs), lambda a, b: b.T @ a.T if turned else a @ b
    )
    costs = Cost(seconds=1.1e-3), Cost(seconds=1e-3)
    found = Candidate("turned", (other,), before=costs[0], after=costs[1], short="gains too little")
    _, names, refused = taken(program, found)
    assert names == (["turned"] if turned else [])
    assert refused == ([] if turned else ["turned"])


@pytest.mark.skipif(CPU.columns is None, reason="this XLA sums columns fast")
@pytest.mark.parametrize("copied", [False, True])
def test_a_small_gain_counts_with_the_sums_down_columns_that_go_with_it(copied):
    """Not beside copies that it adds: their prices are less certain."""

    def fun(x):
        s = jnp.sum(x, 0)
        return jnp.exp(s), s + 1

    def other(x):
        x = (x * jnp.sin(x)).T if copied else x
        return (jnp.sin(x) if copied else x).reshape(64, -1)[0]

    program = flatten(jax.make_jaxpr(fun)(jax.ShapeDtypeStruct((64, 20_000), "float32")))
    part = Replacement(program.equations[0].outvals, tuple(program.inputs), other)
    costs = Cost(seconds=1.1e-3), Cost(seconds=1e-3)
    found = Candidate("other", (part,), before=costs[0], after=costs[1], short="gains too little")
    _, names, _ = taken(program, found)
    assert names == ([] if copied else ["other"])


def test_a_sum_of_products_that_is_stored_for_two_readers_is_not_left_to_the_library():
    """The library makes the other sum element by element once it computes the products itself."""

    def step(total, x, a):
        weighted = a[:, None] * x
        return total + jnp.sum(weighted, 0), jnp.sum(weighted, 2)

    shapes = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((32, 32), (8, 32, 32), (8, 32))]
    assert not sym_optimize(step, device="cpu").explain(*shapes).rules


@pytest.mark.parametrize("goes_on", [False, True])
def test_a_call_that_reduces_again_is_not_cut_for_one_of_its_sums(goes_on):
    """The gradient of a kernel of distances as a product stores the pairs, 6 to 10 times slower."""

    def energy(x, y):
        return jnp.sum(jnp.exp(-jnp.sum((x[:, None] - y[None]) ** 2, -1)))

    device = replace(CPU, folds=replace(CPU.folds, calls_go_on=goes_on))
    f = sym_optimize(jax.grad(energy), device=device, kernels="off")
    points = jax.ShapeDtypeStruct((500, 64), jnp.float32)
    assert bool(f.explain(points, points).rules) is not goes_on


@pytest.mark.parametrize(
    "goes_on, heads, rows, features, divides",
    [
        (False, 8, 512, 64, False),
        (False, 6, 1365, 16, False),
        (False, 16, 256, 64, True),
        (True, 24, 256, 8, False),
    ],
)
def test_a_call_that_would_store_its_weights_is_kept(goes_on, heads, rows, features, divides):
    """Divided behind its product, attention stores its weights for the product and the sum."""

    def attention(q, k, v):
        weights = jax.nn.softmax(jnp.einsum("nhe,mhe->hnm", q, k) / 8)
        return jnp.einsum("hnm,mhe->nhe", weights, v)

    memory = replace(CPU.memory, scratch_bytes=8 << 20)
    folds = replace(CPU.folds, calls_go_on=goes_on)
    f = sym_optimize(attention, device=replace(CPU, memory=memory, folds=folds), kernels="off")
    x = jax.ShapeDtypeStruct((rows, heads, features), jnp.float32)
    assert bool(f.explain(x, x, x).rules) is divides


@pytest.mark.parametrize("points, is_kept", [(300, True), (50, False)])
def test_a_call_that_goes_on_is_not_cut(points, is_kept):
    """Both gradients read one array; the call that computes it stores no differences.

    Fewer than 4,096 distances end their call, which reads differences that are stored.
    """

    def energy(x, y):
        return jnp.sum(jnp.exp(-jnp.sum((x[:, None] - y[None]) ** 2, -1)))

    x = jax.ShapeDtypeStruct((points, 64), jnp.float32)
    terms = ProgramTerms.of(flatten(jax.make_jaxpr(jax.grad(energy, (0, 1)))(x, x)))
    assert (kept_bytes(terms.t, terms.need, terms.model(CPU, {})) > 0) is is_kept
    if is_kept:
        f = sym_optimize(jax.grad(energy, (0, 1)), device=CPU, kernels="off")
        assert not f.explain(x, x).rules


def test_two_transposes_are_none():
    """The product in between is read across the rows of its large operand."""

    def seconds(fun):
        program = flatten(jax.make_jaxpr(fun)(jnp.ones((5000, 64)), jnp.ones((5000, 4))))
        return layout_seconds(program, CPU)

    as_written = seconds(lambda x, y: x.T @ y)
    assert seconds(lambda x, y: (x.T @ y).T.T) == as_written
    assert as_written == seconds(lambda x, y: (y.T @ x).T) > 2 * seconds(lambda x, y: y.T @ x) > 0


def test_a_transposed_function_of_a_product_is_a_copy():
    """The product in the other order would read a large operand across its rows."""

    def seconds(chain):
        program = flatten(
            jax.make_jaxpr(lambda x, y: jnp.sin(chain(y.T @ x).T))(
                jnp.ones((5000, 64)), jnp.ones((5000, 4))
            )
        )
        return layout_seconds(program, CPU)

    assert 2 * seconds(jnp.negative) < seconds(lambda c: c)


def test_operands_of_a_transposed_value_are_moved_once():
    """A chain reads one product several times; the transposed chain reads one copy of it."""

    def seconds(chain):
        def fun(a, b):
            return jnp.exp(chain(c := a @ b).T), c

        return transposed_seconds(flatten(jax.make_jaxpr(fun)(jnp.ones((900, 8)), b)), CPU)

    b = jnp.ones((8, 700))
    assert seconds(lambda c: c * jnp.sin(c) + c) == seconds(lambda c: c) > 0


def test_a_product_with_a_literal_has_no_transposed_copy():
    """`jnp.tensordot(1.0, x, 0)` is a product of a literal, which no equation makes."""
    program = flatten(jax.make_jaxpr(lambda x: jnp.tensordot(1.0, x, 0))(jnp.ones((64, 32))))
    assert [e.name for e in program.equations].count("dot_general") == 1
    assert transposed_seconds(program, CPU) == 0
