"""`prove_equal`: functions that it proves equal, functions that it never does, and its verdicts."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

from symjax_rewrite import packs, prove_equal
from symjax_rewrite.errors import UsageError
from symjax_rewrite.ir.sizes import Assumptions
from symjax_rewrite.options import Budget
from symjax_rewrite.proofs import Different, Proof, Unknown
from symjax_rewrite.proofs.algebra.arithmetic import operation
from symjax_rewrite.proofs.evaluation import TOLERANCE
from symjax_rewrite.proofs.problems import Problem, scope_of, specs_of
from symjax_rewrite.proofs.proving import decided
from symjax_rewrite.proofs.samples import Sampled, sample
from symjax_rewrite.rewriting.rule import Lemma
from tests.proofs import case_pairs, guard_pairs, order_pairs, series_pairs
from tests.proofs.equal_pairs import naive_softmax, stable_softmax
from tests.proofs.loop_pairs import PAIRS
from tests.proofs.near_misses import NEAR_MISSES as SLIPS

TABLES = (case_pairs, order_pairs, guard_pairs, series_pairs)
EQUAL = PAIRS | {name: pair for table in TABLES for name, pair in table.EQUAL.items()}
NEAR_MISSES = SLIPS | {name: pair for table in TABLES for name, pair in table.UNEQUAL.items()}
MOST_NODES, LEMMA_NODES = 200, 40  # a proof applies at most ten laws per node
LEMMAS = {rule.name: rule for rule in packs.default.rules if isinstance(rule, Lemma)}


@pytest.mark.parametrize("name", EQUAL)
def test_equal_functions_are_proved(name: str) -> None:
    f, g, specs = EQUAL[name]
    proof = prove_equal(f, g, *specs, budget=Budget(nodes=MOST_NODES))
    assert isinstance(proof, Proof), proof
    assert proof
    assert all(s.error <= TOLERANCE for s in proof.steps)


@pytest.mark.parametrize("name", LEMMAS)
def test_every_lemma_is_proved(name: str) -> None:
    rule = LEMMAS[name]
    specs = [f"f32[{','.join(word)}]" for word in rule.shapes]
    f, g = lambda *xs: rule.sides(*xs)[0], lambda *xs: rule.sides(*xs)[1]
    proof = prove_equal(f, g, *specs, budget=Budget(nodes=LEMMA_NODES))
    assert isinstance(proof, Proof), proof
    assert proof.steps
    assert proof.replay()


UNDECIDED = {
    "not a number is kept",
    "infinity is kept",
    "rounding to bfloat16",
    "cast to fewer digits and back",
    "cast to a smaller range and back",
    "cast to a smaller integer and back",
    "sum rounded after each product",
    "guard that drops an argument",
    "guard of the next entry",
    "running mean with weights of any sign",
}


@pytest.mark.parametrize("name", NEAR_MISSES)
def test_near_misses_are_shown_to_differ_and_not_proved_without_it(name: str) -> None:
    f, g, specs = NEAR_MISSES[name]
    args = specs_of(specs, scope_of(specs))
    problem = Problem.of(f, g, args, {}, Assumptions(), "reassoc", Budget())
    different = problem.structure()
    if different is None:
        different = sample(problem).different
        assert not decided(problem, Sampled(None), started=0)
    if name in UNDECIDED:
        assert different is None
    else:
        assert isinstance(different, Different)
        assert different.replay()


def test_near_misses_are_many() -> None:
    assert len(NEAR_MISSES) >= 100


# ---------------------------------------------------------------- verdicts


@pytest.fixture(scope="module")
def proof() -> Proof:
    found = prove_equal(stable_softmax, naive_softmax, "f32[n,d]")
    assert isinstance(found, Proof)
    return found


def test_steps_of_a_proof_have_laws_and_both_sides(proof: Proof) -> None:
    assert [s.name for s in proof.steps][:2] == ["exp_of_sum", "sum"]
    assert all(s.law and s.before != s.after and s.instances for s in proof.steps)
    assert "naive" not in str(proof)
    assert proof.normal_forms == ("[i,j] ↦ exp(x0[i,j])/(Σ_k exp(x0[i,k]))",)
    assert any("rounding" in text for text in proof.modulo)


def test_proof_prints_as_text_html_and_json(proof: Proof) -> None:
    assert str(proof).startswith(f"proved equal in {len(proof.steps)} steps")
    assert proof._repr_html_().startswith("<pre>proved")
    made = json.loads(proof.to_json())
    assert made["verdict"] == "Proof"
    assert [s["name"] for s in made["steps"]] == [s.name for s in proof.steps]


def test_proof_is_replayed_at_other_numbers(proof: Proof) -> None:
    assert proof.replay()
    assert proof.replay(seed=7)


def test_step_that_fails_its_check_is_no_proof(monkeypatch: pytest.MonkeyPatch) -> None:
    from symjax_rewrite.proofs.reading import lifting

    monkeypatch.setitem(lifting._ROWS, "exp", _wrong_exp)
    verdict = prove_equal(lambda x: jnp.exp(x + 1), lambda x: jnp.exp(x + 1), "f32[n]")
    assert isinstance(verdict, Unknown)
    assert "failed its check" in verdict.reason


def _wrong_exp(a, p):
    return a.record("exp_of_sum", operation("exp", p), p)


def test_reading_with_another_value_is_no_proof(monkeypatch: pytest.MonkeyPatch) -> None:
    from symjax_rewrite.proofs.reading import lifting

    monkeypatch.setitem(lifting._ROWS, "exp", lambda a, p: p)  # records no law
    verdict = prove_equal(jnp.exp, jnp.exp, "f32[n]")
    assert isinstance(verdict, Unknown)
    assert "another value" in verdict.reason


def test_counterexample_has_inputs_outputs_place_and_sizes() -> None:
    found = prove_equal(lambda x, b: x + b, lambda x, b: x + b[:, None], "f32[n,n]", "f32[n]")
    assert isinstance(found, Different)
    n = found.sizes["n"]
    x, b = found.inputs
    assert (x.shape, b.shape) == ((n, n), (n,))
    np.testing.assert_allclose(found.left, x + b)
    np.testing.assert_allclose(found.right, x + b[:, None])
    assert found.left[found.index] != found.right[found.index]
    assert f"n = {n}" in str(found)
    assert json.loads(found.to_json())["index"] == list(found.index)


def test_difference_at_one_size_alone_is_found() -> None:
    found = prove_equal(
        lambda x: x.sum(-1) / x.shape[1], lambda x: x.sum(-1) / x.shape[0], "f32[n,d]"
    )
    assert isinstance(found, Different)
    assert found.sizes["n"] != found.sizes["d"]


def test_unknown_gives_both_normal_forms_and_their_difference() -> None:
    found = prove_equal(lambda x: jnp.fft.ifft(jnp.fft.fft(x)).real, lambda x: x, "f32[8]")
    assert isinstance(found, Unknown)
    assert "fft" in found.left[0]
    assert found.missing == ("conj", "fft")
    assert "no law takes apart: conj, fft" in str(found)
    assert len(found.left) == len(found.right) == len(found.remains) == 1
    assert "proves nothing" in str(found)
    assert json.loads(found.to_json())["verdict"] == "Unknown"


def test_budget_that_ends_the_proof_is_named() -> None:
    f, g, specs = PAIRS["deferred_layer_norm"]
    found = prove_equal(f, g, *specs, budget=Budget(nodes=1))
    assert isinstance(found, Unknown)
    assert "budget" in found.reason


def test_structure_of_results_is_compared_first() -> None:
    other = [
        (lambda x: (x, x), lambda x: [x, x]),
        (lambda x: x, lambda x: x[None]),
        (lambda x: x, lambda x: x.astype(jnp.float16)),
    ]
    for f, g in other:
        found = prove_equal(f, g, "f32[n]")
        assert isinstance(found, Different)
        assert not found.inputs
        assert found.replay()


# ---------------------------------------------------------------- arguments


def test_specs_are_arrays_structs_texts_and_trees() -> None:
    n, d = export.symbolic_shape("n, d")
    for x in (np.ones((3, 4), np.float32), jax.ShapeDtypeStruct((n, d), "float32"), "f32[3,d]"):
        assert prove_equal(stable_softmax, naive_softmax, x)
    tree = {"x": jax.ShapeDtypeStruct((n, d), "float32"), "w": "f32[d,4]"}
    assert prove_equal(
        lambda p: p["x"] @ p["w"], lambda p: jnp.einsum("de,nd->ne", p["w"], p["x"]), tree
    )


def test_keyword_arguments_and_numbers() -> None:
    def f(x, *, scale):
        return scale * x + x

    def g(x, *, scale):
        return x * (1 + scale)

    assert prove_equal(f, g, "f32[n]", kwargs={"scale": "f32[]"})
    assert prove_equal(f, g, "f32[n]", kwargs={"scale": 2.5})


def test_double_precision_is_traced_as_such() -> None:
    assert prove_equal(stable_softmax, naive_softmax, "f64[n,d]")


def test_facts_about_sizes_decide_tests() -> None:
    def f(x):
        return jnp.where(jnp.arange(x.shape[0]) < x.shape[1], x[:, 0], 0.0)

    assert not prove_equal(f, lambda x: x[:, 0], "f32[n,d]")
    assert prove_equal(f, lambda x: x[:, 0], "f32[n,d]", assume=["n <= d"])


def test_finite_numerics_permit_cancelled_divisions() -> None:
    f, g = lambda x, y: x * y / y, lambda x, y: x
    strict = prove_equal(f, g, "f32[n]", "f32[n]")
    assert isinstance(strict, Different | Unknown)
    assert not prove_equal(f, lambda x, y: x + y, "f32[n]", "f32[n]", numerics="finite")


def test_same_conditions_on_both_sides_are_told() -> None:
    found = prove_equal(lambda x, y: (x + 1) / y, lambda x, y: x / y + 1 / y, "f32[n]", "f32[n]")
    assert isinstance(found, Proof)
    assert found.conditions == ("x1[i] ≠ 0",)


@pytest.mark.parametrize(
    ("specs", "options", "message"),
    [
        (["f32[n"], {}, "not an argument spec"),
        (["f32[n]"], {"numerics": "exact"}, "unknown numerics"),
        (["f32[n]"], {"assume": ["n is small"]}, "not a fact"),
        ([], {}, "no arguments"),
    ],
)
def test_wrong_use_is_told(specs: list, options: dict, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        prove_equal(lambda x: x, lambda x: x, *specs, **options)
