"""`sym_optimize`: its arguments, its result, and their errors."""

import functools
import logging
import threading
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from symjax_rewrite import Budget, RulePack, bisect, disabled, errors, keep, packs, sym_optimize
from symjax_rewrite.testing.assertions import (
    assert_equivalent,
    assert_no_intermediate,
    assert_optimized,
)
from tests.programs import A, B, M, V, W, X, chain, lora, normal, run_python

ROOT = Path(__file__).parents[2]


# Arguments.

TAKEN = {
    "plain": lambda: sym_optimize(lora),
    "called with options": lambda: sym_optimize(rules="lora")(lora),
    "above jit": lambda: sym_optimize(jax.jit(lora)),
    "below jit": lambda: jax.jit(sym_optimize(lora)),
    "twice": lambda: sym_optimize(sym_optimize(lora)),
    "a lambda": lambda: sym_optimize(lambda *args: lora(*args)),
    "a partial": lambda: sym_optimize(functools.partial(lambda s, *xs: s * lora(*xs), 1)),
    "a method": lambda: sym_optimize(_Layer().apply),
    "a callable object": lambda: sym_optimize(_Layer()),
    "every pack": lambda: sym_optimize(lora, rules=packs.lora + packs.linear_algebra),
    "a list of rules": lambda: sym_optimize(lora, rules=list(packs.default.rules)),
    "on another device's model": lambda: sym_optimize(lora, device="h200"),
}


class _Layer:
    def apply(self, x, w, a, b):
        return lora(x, w, a, b)

    __call__ = apply


@pytest.mark.parametrize("name", TAKEN)
def test_decorator_forms_are_accepted(name):
    assert_equivalent(TAKEN[name](), lora, X, W, A, B)


NOT_REWRITTEN = {
    "below jit": "no .explain there",
    "twice": "the inner one did it",
    "on another device's model": "one launch is worth more than these FLOPs there",
}


@pytest.mark.parametrize("name", [n for n in TAKEN if n not in NOT_REWRITTEN])
def test_rewrites(name):
    assert_optimized(TAKEN[name](), X, W, A, B, uses="lora", times_fewer_flops=1.4)


def test_the_update_is_never_merged():
    assert_no_intermediate(sym_optimize(chain), M, M, V, shape=(256, 256))
    with pytest.raises(errors.CliffError, match="dot_general makes an intermediate"):
        assert_no_intermediate(chain, M, M, V, shape=(256, 256))


def branch(x, mode, *, power=1):
    return x @ x if mode == "square" else x**power


STATICS = {
    "here, by name": lambda: sym_optimize(branch, static_argnames=("mode", "power")),
    "here, by number": lambda: sym_optimize(branch, static_argnums=1, static_argnames="power"),
    "lifted from jit, by name": lambda: sym_optimize(
        jax.jit(branch, static_argnames=("mode", "power"))
    ),
    "lifted from jit, by number": lambda: sym_optimize(
        jax.jit(branch, static_argnums=(1,), static_argnames=("power",))
    ),
    "in jit above": lambda: jax.jit(
        sym_optimize(branch, static_argnames=("mode", "power")), static_argnames=("mode", "power")
    ),
}


@pytest.mark.parametrize("name", STATICS)
def test_static_arguments(name):
    f = STATICS[name]()
    np.testing.assert_allclose(f(M, "square"), M @ M, rtol=1e-3, atol=1e-3)
    np.testing.assert_allclose(f(M, "power", power=3), M**3, rtol=1e-4)


def test_donation_is_lifted():
    f = sym_optimize(jax.jit(lambda x, y: x + y @ y, donate_argnums=0))
    x = normal(16, 16) + 0
    assert "donat" in f.lower(x, x).as_text() or "alias" in f.lower(x, x).as_text()
    f(x, normal(16, 16))
    assert x.is_deleted()


def test_donation_of_a_keyword_is_lifted():
    f = sym_optimize(jax.jit(lambda x, *, buffer: buffer + x @ x, donate_argnames="buffer"))
    x = normal(16, 16) + 0
    f(normal(16, 16), buffer=x)
    assert x.is_deleted()


# Results.


def test_result_is_a_jit_object():
    f: Any = sym_optimize(lora)
    jitted: Any = type(jax.jit(lora))
    assert type(f) is jitted
    assert f.__wrapped__ is lora
    assert (f.__name__, f.__doc__) == ("lora", "Return the program as written.")
    assert f.lower(X, W, A, B).compile()(X, W, A, B).shape == (8, 512)
    assert len(f.trace(X, W, A, B).jaxpr.eqns) > 0
    assert f.eval_shape(X, W, A, B).shape == (8, 512)


WRAPPERS: dict[str, Any] = {
    "gradient": jax.grad,
    "mapped": jax.vmap,
    "doubled": lambda f: functools.wraps(f)(lambda x: 2 * f(x)),
}


def total(x):
    return jnp.sin(x).sum()


@pytest.mark.parametrize(
    "made", [jax.jit, sym_optimize, functools.partial(sym_optimize, verify="first")]
)
@pytest.mark.parametrize("name", WRAPPERS)
def test_wrapper_of_a_jit_object_is_run_itself(name, made):
    """`functools.wraps` copies the attributes in which a `jax.jit` object holds its function."""
    want, wrapped = (WRAPPERS[name](f) for f in (total, made(total)))
    for f in (sym_optimize(wrapped), sym_optimize(jax.jit(wrapped))):
        np.testing.assert_allclose(f(M), want(M), 1e-5, 1e-5)
    assert bisect(wrapped, M) == ()
    assert sym_optimize(wrapped).explain(M).before.jaxpr.out_avals[0].shape == want(M).shape


def test_one_trace_per_shape():
    traces = []

    @sym_optimize
    def f(x):
        traces.append(x.shape)
        return x @ x

    for x in (M, M + 1, normal(4, 4)):
        f(x)
    assert traces == [(256, 256), (4, 4)]


def test_explain_runs_nothing_and_takes_specs():
    spec = jax.ShapeDtypeStruct((100_000, 100_000), jnp.float32)
    report = sym_optimize(lambda a, b: (a @ b)[0, 0]).explain(spec, spec)
    assert report.before.flops == 2 * 10**15
    assert report.after.flops <= 2 * 10**5
    assert report.rules[0].where[0].startswith(__file__)


def test_report():
    report = sym_optimize(lora).explain(X, W, A, B)
    (rule,) = report.rules
    assert (rule.name, rule.property, rule.count) == ("lora", "distributivity", 1)
    assert "programs.py" in rule.where[0]
    text = str(report)
    assert "lora" in text
    assert "FLOPs" in text
    assert report.before.peak_bytes > report.after.peak_bytes
    assert report.before.largest_intermediate == 512 * 512 * 4
    assert report.stop
    assert report.time_s > 0
    assert "lora (distributivity)" in report._repr_html_()


def test_report_is_saved(tmp_path):
    import json

    report = sym_optimize(lora).explain(X, W, A, B)
    report.save(tmp_path / "r.json")
    report.save(tmp_path / "r.html")
    assert json.loads((tmp_path / "r.json").read_text())["rules"][0]["name"] == "lora"
    assert (tmp_path / "r.html").read_text().startswith("<")


# Fences and switches.


def test_keep_is_a_fence():
    def f(a, b, v):
        return keep(a @ b) @ v

    report = sym_optimize(f).explain(M, M, V)
    assert not report.rules
    assert_equivalent(sym_optimize(f), f, M, M, V)


def test_keep_takes_a_pytree():
    got = keep({"a": X, "b": (W, None)})
    assert got["b"][1] is None
    np.testing.assert_array_equal(got["a"], X)


def test_disabled_traces_the_original():
    with disabled():
        inside = sym_optimize(chain).trace(M, M, V).jaxpr
    assert str(inside) == str(jax.make_jaxpr(chain)(M, M, V))
    outside = sym_optimize(chain).trace(M, M, V).jaxpr
    assert str(outside) != str(inside)


def test_explain_says_that_nothing_is_rewritten_where_rewriting_is_off():
    f = sym_optimize(chain)
    for off in (disabled, jax.disable_jit):
        with off():
            report = f.explain(M, M, V)
        assert report.rules == []
        assert "rewriting is off" in report.stop
        assert str(report.after.jaxpr) == str(report.before.jaxpr)
    assert f.explain(M, M, V).rules


def test_environment_switches_it_off():
    code = """
print(str(sym_optimize(chain).trace(M, M, V).jaxpr) == str(jax.make_jaxpr(chain)(M, M, V)))
"""
    assert run_python(code, SYMJAX_DISABLE="1")[0].strip() == "True"


def test_log_topics():
    code = "sym_optimize(chain).explain(M, M, V)"
    _, noisy = run_python(code, SYMJAX_LOG="rules,cost")
    assert "contraction_order" in noisy
    assert "predicted " in noisy and "× as fast" in noisy


def test_library_logger_is_silent_by_default(caplog):
    with caplog.at_level(logging.DEBUG, logger="symjax_rewrite"):
        sym_optimize(chain).explain(M, M, V)
    assert not caplog.records


# Plans.


def test_plan_is_replayed():
    plan = sym_optimize(lora).explain(X, W, A, B).plan
    again = sym_optimize(lora, plan=plan)
    assert_optimized(again, X, W, A, B, uses="lora")
    assert_equivalent(again, lora, X, W, A, B)


def test_plan_of_nothing_keeps_the_original():
    plan = {**sym_optimize(lora).explain(X, W, A, B).plan, "regions": []}
    assert not sym_optimize(lora, plan=plan).explain(X, W, A, B).rules


# Determinism and threads.


def test_same_program_in_every_process():
    code = """
def f(x, U, W, D, g): return sum(g[:, e, None] * (x @ U @ W[e] @ D) for e in range(4))
s = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
specs = s(64, 128), s(128, 32), s(4, 32, 32), s(32, 128), s(64, 4)
print(sym_optimize(f).explain(*specs).after.jaxpr)
"""
    first, second = (run_python(code, PYTHONHASHSEED=seed)[0] for seed in ("1", "2"))
    assert first == second
    assert "dot_general" in first


def test_threads_share_one_function():
    f = sym_optimize(chain)
    results, failures = {}, []

    def work(k):
        try:
            a = normal(64 + 8 * (k % 4), 64 + 8 * (k % 4), seed=k)
            results[k] = np.abs(f(a, a, a[0]) - chain(a, a, a[0])).max()
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(k,)) for k in range(12)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not failures
    assert max(results.values()) < 1e-2


# Budgets.


def wide(*xs: Any) -> Any:
    out = xs[0]
    for _ in range(6):
        out = sum((x @ out for x in xs), jnp.zeros(())) @ sum(xs)
    return out


@pytest.mark.parametrize(
    "budget",
    [Budget(nodes=1), Budget(rounds=1), Budget(pairs=1), Budget(equations=1), Budget(seconds=1e-9)],
    ids=["nodes", "rounds", "pairs", "equations", "seconds"],
)
def test_a_small_budget_keeps_the_program_right(budget):
    xs = [normal(16, 16, seed=k) / 16 for k in range(4)]
    f = sym_optimize(wide, budget=budget)
    assert_equivalent(f, wide, *xs, rtol=1e-3)
    assert f.explain(*xs).stop


def test_stop_reason_is_reported():
    stop = sym_optimize(chain, budget=Budget(equations=1)).explain(M, M, V).stop
    assert stop == "2 equations exceed the budget of 1"
    stop = sym_optimize(chain, budget=Budget(seconds=1e-9)).explain(M, M, V).stop
    assert "clock" in stop


def test_every_pack_has_the_name_it_has_in_its_module():
    named = {k: v for k, v in vars(packs).items() if isinstance(v, RulePack)}
    assert packs.by_name() == named
    assert {"locality", "inverses", "distributivity", "separability", "folding"} <= named.keys()


@pytest.mark.parametrize(
    "rules",
    [["lora"], [packs.lora], ("locality", packs.lora), packs.lora.rules[0], {"lora", "locality"}],
    ids=["name", "pack", "both", "rule", "set"],
)
def test_rules_are_packs_names_of_packs_or_rules(rules):
    assert assert_optimized(sym_optimize(lora, rules=rules), X, W, A, B, uses="lora")


def test_joined_packs_keep_their_exclusions():
    less = packs.lora - "repeated_work"
    f = sym_optimize(lora, rules=[less, "locality"])
    assert f.remake.args[1].rules.without == ("repeated_work",)
    assert f.remake.args[1].rules.rules == (less + packs.locality).rules


def test_packs_limit_the_rules_that_are_used():
    only = RulePack("only order", packs.associativity.rules)
    assert [r.name for r in sym_optimize(lora, rules=only).explain(X, W, A, B).rules] == []
    assert assert_optimized(sym_optimize(chain, rules=only), M, M, V, uses="contraction_order")
    less = packs.default - ["lora", "lora_scaled", "lora_pair"]
    assert assert_optimized(sym_optimize(lora, rules=less), X, W, A, B, uses="distribute")


def test_tuning_measures_under_every_transformation():
    f = sym_optimize(lambda x: lora(x, W, A, B), tune=True)
    assert_equivalent(f, lambda x: lora(x, W, A, B), X)
    assert jax.jit(jax.vmap(f))(X[None]).shape == (1, *f(X).shape)
    assert jax.grad(lambda x: f(x).sum())(X).shape == X.shape


def test_unmeasurable_programs_are_decided_by_the_model():
    def f(x):
        jax.debug.print("{}", x[0, 0])
        return lora(x, W, A, B)

    report = sym_optimize(f, tune=True).explain(X)
    (use,) = (r for r in report.routes if r.name == "tune")
    assert use.reason == "not measured: it has effects"
    assert report.rules


def test_plan_replays_shared_products():
    def f(x, w):
        return jnp.tile(x, (4, 1)) @ w

    x, w = normal(64, 512), normal(512, 512)
    made = sym_optimize(f).explain(x, w)
    again = sym_optimize(f, plan=made.plan).explain(x, w)
    assert [r.name for r in again.rules] == ["repeated_work"]
    assert str(again.after.jaxpr) == str(made.after.jaxpr)


@pytest.mark.parametrize("key", [False, True])
def test_loops_that_end_by_their_data_are_not_measured(key):
    def f(x, k):
        y = lora(x, W, A, B)
        noise = jax.random.uniform(k) if key else k
        return jax.lax.while_loop(lambda c: (c > noise).all(), lambda c: c, y)

    k = jax.random.key(0) if key else jnp.zeros(())
    report = sym_optimize(f, tune=True, on_unsupported="error").explain(X, k)
    (use,) = (r for r in report.routes if r.name == "tune")
    assert use.reason == "not measured: how often its loops run depends on the inputs"
