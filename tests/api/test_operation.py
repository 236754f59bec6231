"""Running it: verification, bisection, switching off, plans, and several devices."""

import gc
import json
import re
import warnings
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from symjax_rewrite import RulePack, bisect, disabled, lemma, packs, sym_optimize
from symjax_rewrite.codegen import emission
from symjax_rewrite.errors import EquivalenceError, PlanError, SymjaxError
from symjax_rewrite.loops import changes

A, B = (np.cos(np.arange(n, dtype=np.float32)).reshape(s) for n, s in ((6400, (80, 80)),) * 2)
C = np.linspace(-1, 1, 80, dtype=np.float32)


@lemma("ij,jk,k", uses=("associativity",), source="a mistake made on purpose")
def twice_too_large(a, b, c):
    return (a @ b) @ c, 2 * (a @ (b @ c))


def chain(a, b, c):
    return (a @ b) @ c


WRONG = packs.default - "contraction_order" + RulePack("wrong", (twice_too_large,))


@pytest.mark.parametrize("mode", ["first", "always"])
def test_a_mismatch_is_an_error_that_names_the_rules(mode):
    f = sym_optimize(chain, rules=WRONG, verify=mode)
    with pytest.raises(EquivalenceError, match="twice_too_large"):
        f(A, B, C)


def test_a_mismatch_can_be_a_warning():
    """The first call warns and gives the original's value; so does every later one, silently."""
    f = sym_optimize(chain, rules=WRONG, verify="warn")
    with pytest.warns(UserWarning, match="twice_too_large"):
        got = f(A, B, C)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for value in (got, f(A, B, C), f(A[:40], B, C)):
            np.testing.assert_allclose(value, chain(A[: len(value)], B, C), rtol=1e-3, atol=1e-3)


def test_methods_are_verified():
    class Model:
        @partial(sym_optimize, verify="first", static_argnums=0)
        def __call__(self, *args):
            return chain(*args)

    np.testing.assert_allclose(Model()(A, B, C), chain(A, B, C), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("mode", ["first", "always", "warn"])
def test_agreement_is_silent(mode):
    f = sym_optimize(chain, verify=mode)
    for _ in range(2):
        np.testing.assert_allclose(f(A, B, C), chain(A, B, C), rtol=1e-3, atol=1e-3)


def test_keys_are_verified():
    """Keys of random numbers are compared beside values that differ by rounding."""
    f = sym_optimize(lambda key, *args: (jax.random.split(key), chain(*args)), verify="always")
    np.testing.assert_allclose(f(jax.random.key(0), A, B, C)[1], chain(A, B, C), atol=1e-3)
    with pytest.raises(EquivalenceError, match="twice_too_large"):
        f.remake(rules=WRONG)(jax.random.key(0), A, B, C)


@pytest.mark.parametrize("rules", [packs.default, WRONG], ids=["right", "wrong"])
def test_functions_that_donate_are_verified_and_bisected(rules):
    """No comparison reads an argument that a call has donated."""
    donating = jax.jit(lambda a, b, c: (chain(a, b, c), a + 1), donate_argnums=0)
    f, donated = sym_optimize(donating, rules=rules), jnp.asarray(A)
    if rules is WRONG:
        with pytest.raises(EquivalenceError, match="twice_too_large"):
            f.remake(verify="first")(donated, B, C)
        assert bisect(f, donated, B, C) == ("twice_too_large",)
    else:
        g = f.remake(verify="first")
        jax.block_until_ready((g(donated, B, C), g(donated, B, C)))
        assert donated.is_deleted()  # by the call that is not compared


def test_bisect_names_the_rule():
    assert bisect(sym_optimize(chain, rules=WRONG), A, B, C) == ("twice_too_large",)
    assert bisect(sym_optimize(chain), A, B, C) == ()


def test_bisect_finds_rules_that_stand_in_for_each_other():
    @lemma("ij,jk,k", uses=("associativity",), source="another mistake")
    def thrice_too_large(a, b, c):
        return (a @ b) @ c, 3 * (a @ (b @ c))

    f = sym_optimize(chain, rules=WRONG + RulePack("more", (thrice_too_large,)))
    assert set(bisect(f, A, B, C)) == {"twice_too_large", "thrice_too_large"}


def tiled(a, b, c):
    return jnp.tile(a, (8, 1)) @ b + c


def twice(a, b, c):
    return (a @ b) * c, (b.T @ a.T) * c


def looped(a, b, c):
    return jax.lax.fori_loop(0, 9, lambda _, y: jnp.sin(y + 0.01 * (a @ b) @ c), c)


PASSED = {"repeated_work": tiled, "common_subexpression": twice, "loop_invariant": looped}


@pytest.fixture
def wrong_passes(monkeypatch):
    """Double the values that passes compute once: a planted bug."""
    right, moved = emission.TermReader.value, changes.run_moved

    def value(self, v):
        once = self.t.view(v).cls in self.part.shared | self.part.own
        return right(self, v) * (2 if once else 1)

    monkeypatch.setattr(emission.TermReader, "value", value)
    monkeypatch.setattr(changes, "run_moved", lambda *a: [2 * x for x in moved(*a)])


@pytest.mark.parametrize("name", PASSED)
def test_bisect_names_passes(name, wrong_passes):
    assert bisect(sym_optimize(PASSED[name], kernels="off"), A, B, C) == (name,)


@pytest.mark.parametrize("name", PASSED)
def test_passes_are_removed_from_a_pack_by_name(name):
    f, less = PASSED[name], packs.default - name + packs.lora
    assert name in [r.name for r in sym_optimize(f).explain(A, B, C).rules]
    assert name not in [r.name for r in sym_optimize(f, rules=less).explain(A, B, C).rules]
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-4),
        sym_optimize(f, rules=less)(A, B, C),
        f(A, B, C),
    )


def test_switching_off_traces_anew():
    """A function that was traced before runs as written inside `disabled()`."""
    traced = []

    def f(a, b, c):
        traced.append(disabled)
        return chain(a, b, c)

    g = sym_optimize(f)
    g(A, B, C)
    text = g.lower(A, B, C).as_text()
    with disabled():
        assert g.lower(A, B, C).as_text() != text
    assert g.lower(A, B, C).as_text() == text
    assert len(traced) == 2


PLAN = sym_optimize(chain).explain(A, B, C).plan


@pytest.mark.parametrize(
    "plan",
    [
        [],
        "plan",
        {},
        {**PLAN, "format": 99},
        {k: v for k, v in PLAN.items() if k != "regions"},
        {**PLAN, "program": "0" * 16},
        {**PLAN, "regions": [*PLAN["regions"], "unheard of"]},
    ],
)
def test_a_corrupt_or_foreign_plan_is_refused(plan):
    with pytest.raises(PlanError) as error:
        sym_optimize(chain, plan=plan)(A, B, C)
    assert isinstance(error.value, SymjaxError)
    assert "got" in str(error.value)


def test_a_plan_survives_json():
    plan = json.loads(json.dumps(PLAN))
    assert [r.name for r in sym_optimize(chain, plan=plan).explain(A, B, C).rules]


COLLECTIVES = re.compile(
    r"= \S+ (all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)"
)


def attention(q, k, v):
    scores = jnp.einsum("bhqd,bhkd->bhqk", q, k) / 4
    return jnp.einsum("bhqk,bhkd->bhqd", jax.nn.softmax(scores), v)


@pytest.mark.parametrize("spec", [("d",), (None, "d"), (None, None, "d")])
def test_no_collectives_are_added(spec):
    """`"auto"` keeps the program where XLA would gather a fold's operands."""
    if jax.device_count() < 8:
        pytest.skip("needs 8 devices: XLA_FLAGS=--xla_force_host_platform_device_count=8")
    mesh = Mesh(np.array(jax.devices()[:8]), ("d",))
    sharding = NamedSharding(mesh, PartitionSpec(*spec))
    shape = jax.ShapeDtypeStruct((8, 8, 1024, 16), jnp.float32, sharding=sharding)

    def count(f):
        text = jax.jit(f).lower(shape, shape, shape).compile().as_text()
        return sorted(COLLECTIVES.findall(text or ""))

    assert count(sym_optimize(attention)) == count(attention)
    assert count(sym_optimize(attention, kernels="xla")) != count(attention)  # avoided


def test_collector_of_garbage_rests_during_optimisation_and_runs_after_it():
    seen = []

    class Witness:
        name = "witness"

        def candidates(self, program, context):
            seen.append(gc.isenabled())
            return ()

    gc.enable()  # tests run without it
    try:
        sym_optimize(chain, rules=packs.default + RulePack("seen", (Witness(),)))(A, B, C)
        assert gc.isenabled()
    finally:
        gc.disable()
    assert seen
    assert not any(seen)
