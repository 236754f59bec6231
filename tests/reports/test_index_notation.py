"""Programs in index notation, and the derivations of their rewritten forms."""

import json
import pickle

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from symjax_rewrite import sym_optimize
from symjax_rewrite.obstacles import Obstacle, obstacle_of
from symjax_rewrite.reports.remedies import remedy
from symjax_rewrite.usage_records import RouteUse
from tests.reports.examples import EXAMPLES, f32, report_of


def written(fun, *specs):
    return [s.text for s in sym_optimize(fun, device="cpu").explain(*specs).details.before]


def test_arguments_results_and_assignments_keep_their_names():
    def f(x, p):
        hidden = jnp.tanh(x @ p["w"])
        return {"y": hidden @ p["v"][0], "h": hidden}

    lines = written(f, f32(3, 4), {"w": f32(4, 5), "v": [f32(5, 2)]})
    assert lines == [
        "out.h[i,k] = tanh(Σ_j x[i,j]·p.w[j,k])",
        "out.y[i,k] = Σ_j out.h[i,j]·p.v₀[j,k]",
    ]


def test_value_that_a_call_takes_does_not_get_the_name_of_its_result():
    def square(x):
        return x @ x

    def f(x):
        y = square(x + 1)
        return y, jnp.exp(y)

    assert "y" not in "".join(written(f, f32(3, 3)))


FORMULAS = {
    "product": (lambda x, W: x @ W, ((2, 3), (3, 4)), "out[i,k] = Σ_j x[i,j]·W[j,k]"),
    "chain": (
        lambda a, b, c: a @ b @ c,
        ((2, 3), (3, 4), (4, 5)),
        "out[i,l] = Σ_k (Σ_j a[i,j]·b[j,k])·c[k,l]",
    ),
    "transpose": (lambda x: x.T, ((2, 3),), "out[j,i] = x[i,j]"),
    "heads": (
        lambda x, w: (x @ w).reshape(2, 3, 4).transpose(1, 0, 2),
        ((2, 5), (5, 12)),
        "out[j,l,k] = Σ_i w[i,(j,k)]·x[l,i]",
    ),
    "square": (lambda x: x * x - 1, ((3,),), "out[i] = x[i]² − 1"),
    "slice": (lambda x: x[1::2] + 3 * x[0], ((8,),), "out[i] = x[2·i+1] + 3·x[0]"),
    "maximum": (lambda x: x.max(-1), ((2, 3),), "out[i] = max_j(x[i,j])"),
    "constant": (lambda x: jnp.exp(-x / 7), ((3,),), "out[i] = exp(0.142857·(−x[i]))"),
    "select": (
        lambda x: jnp.where(x > 0, x, 0.1 * x),
        ((3,),),
        "out[i] = where(x[i] > 0, x[i], 0.1·x[i])",
    ),
    "number": (lambda x: jnp.sum(x), ((2, 3),), "out = Σ_{i,j} x[i,j]"),
}


@pytest.mark.parametrize("name", FORMULAS)
def test_formula(name):
    fun, shapes, formula = FORMULAS[name]
    assert written(fun, *(f32(*s) for s in shapes)) == [formula]


def test_letters_of_arguments_are_no_indices():
    (line,) = written(lambda i, j: i @ j, f32(2, 3), f32(3, 4))
    assert line == "out[k,m] = Σ_l i[k,l]·j[l,m]"


def test_loop_is_followed_by_its_body():
    lines = report_of("recurrence").details.before
    assert [(s.depth, s.text) for s in lines][:2] == [
        (0, "_, out = scan(0, a, x)"),
        (1, "h′[i] = given₁[i] + h[i]·given₀[i]"),
    ]


def test_branches_and_unknown_operations_are_calls_by_name():
    def f(flag, x):
        y = lax.cond(flag, lambda x: jnp.linalg.cholesky(x), lambda x: x + 1, x)
        return lax.sort(y)

    text = "\n".join(written(f, jax.ShapeDtypeStruct((), bool), f32(3, 3)))
    assert "cond(" in text and "cholesky(" in text and "sort(" in text


def test_kernel_is_a_call_by_the_name_of_its_candidate(one_device):
    (line,) = report_of("attention").details.after
    assert line.text == "out = fold(q, k, v)"


def test_derivation_names_rule_law_and_both_forms():
    report = report_of("lora")
    (change,) = report.changes
    (step,) = report.details.steps(change)
    assert (step.rule, step.property) == ("lora", "distributivity")
    assert step.law == "x @ (W + A @ B) = x @ W + (x @ A) @ B"
    assert step.before == "Σ_j x[i,j]·(W[j,k] + Σ_l A[j,l]·B[l,k])"
    assert step.after == "(Σ_j x[i,j]·W[j,k]) + Σ_m (Σ_l x[i,l]·A[l,m])·B[m,k]"


@pytest.mark.parametrize("name", EXAMPLES)
def test_every_rewrite_has_a_derivation(name):
    report = report_of(name)
    rules = {rule.name for rule in report.rules}
    steps = [s for c in report.changes for s in report.details.steps(c)]
    assert {s.rule for s in steps} <= rules
    assert bool(steps) == bool(rules)
    assert all(s.before != s.after for s in steps)


def test_sides_of_a_gradient_agree_with_the_derivation():
    """Terms that a derivation opens are written in full; other terms are names of the program."""
    report = report_of("gradient")
    texts = {s.after for c in report.changes for s in report.details.steps(c)}
    assert any("(Σ_j x[i,j]·p₀[j,k]) + Σ_m (Σ_l x[i,l]·p₁[l,m])·p₂[m,k]" in t for t in texts)


def test_undecided_sizes_come_with_facts_that_decide():
    report = report_of("symbolic")
    (advice,) = report.details.crossovers
    assert advice.equal_at == "T = d/2"
    assert "2*T <= d (no more FLOPs)" in advice.undecided
    assert advice.facts and f"assume={advice.facts!r}" in str(report)
    decided = report_of("symbolic", assume=advice.facts)
    assert [r.name for r in decided.rules] == ["lora"]
    assert not decided.crossovers


def test_text_has_each_crossover_once_and_one_sign_for_powers():
    text = str(report_of("symbolic"))
    assert text.count("equal at") == 1
    assert "^" not in text and "d**2" in text


REFUSED = [
    ("fold", 1.1, Obstacle.COST, "kernels='always'"),
    ("selection", None, Obstacle.COST, "kernels='always'"),
    ("rewrite", 1.1, Obstacle.COST, "write that form yourself"),
    ("fold", 0.4, Obstacle.COST, ""),
    ("distribute", None, Obstacle.NUMERICS, "numerics"),
    ("factor", None, Obstacle.FORM, ""),
]


@pytest.mark.parametrize(("name", "ratio", "obstacle", "start"), REFUSED)
def test_remedy(name, ratio, obstacle, start):
    text = remedy(RouteUse(name, False, obstacle("some words"), ratio=ratio))
    assert bool(text) == bool(start) and start in text


def kept_scores(q, k, v):
    scores = q @ k.T
    return jax.nn.softmax(scores) @ v, scores


def squared_norm(x, w):
    return (x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)) @ w


def top_pairs(x, y):
    distances = jnp.sum(x * x, -1)[:, None] - 2 * x @ y.T + jnp.sum(y * y, -1)
    return lax.top_k(-distances, 4)


OBSTACLES = {
    "pairs that are a result": (kept_scores, [f32(1024, 16)] * 3, "fold", Obstacle.READER),
    "a kernel of GPUs": (squared_norm, [f32(64, 64)] * 2, "norm_linear", Obstacle.DEVICE),
    "a loop of no known kernel": (
        EXAMPLES["recurrence"][0],
        [f32(4, 4)] * 2,
        "scan",
        Obstacle.DEVICE,
    ),
    "a fold that gains little": (top_pairs, [f32(1024, 16)] * 2, "fold", Obstacle.COST),
}


@pytest.mark.parametrize("name", OBSTACLES)
def test_obstacle_of_a_refusal(name, one_device):
    fun, specs, route, obstacle = OBSTACLES[name]
    report = sym_optimize(fun, device="cpu").explain(*specs)
    (use,) = (u for u in report.routes if u.name == route)
    assert (obstacle_of(use.reason), use.taken) == (obstacle, False)
    (saved,) = (u for u in json.loads(report.to_json())["routes"] if u["name"] == route)
    assert saved["obstacle"] == obstacle and saved["reason"] == use.reason
    assert pickle.loads(pickle.dumps(use.reason)).obstacle is obstacle


@pytest.mark.usefixtures("one_device")
def test_numbers_of_python_stand_without_their_type():
    report = sym_optimize(lambda x: jnp.cumsum(x, 0), device="cpu").explain(
        jax.ShapeDtypeStruct((2000, 300), jnp.float32)
    )
    texts = [s["text"] for s in json.loads(report.to_json())["after"]["terms"]]
    assert any("scan(x, 1, " in text for text in texts), texts
    assert not any("Typed" in text for text in texts)
