"""`guard`: the programs that it refuses, with line and form, and those that pass."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

from symjax_rewrite import errors, guard, sym_optimize
from symjax_rewrite.auditing.intermediates import largest_intermediate
from symjax_rewrite.reports.units import duration, parse_bytes, ratio, size
from symjax_rewrite.testing import assert_no_cliff
from tests.profiles import use_on_cpu
from tests.programs import spec


def lora(x: Any, w: Any, a: Any, b: Any) -> Any:
    merged = w + a @ b
    return x @ merged


def attention(q: Any, k: Any, v: Any) -> Any:
    scores = q @ jnp.swapaxes(k, -1, -2) / np.sqrt(q.shape[-1])
    visible = jnp.tril(jnp.ones(scores.shape[-2:], bool))
    return jax.nn.softmax(jnp.where(visible, scores, -jnp.inf)) @ v


def gain() -> float:
    """The predicted gain of the form that is found, by its report."""
    report = sym_optimize(lora, device="cpu").explain(*LORA)
    assert report.before.seconds is not None and report.after.seconds is not None
    return report.before.seconds / report.after.seconds


LORA = (spec(8, 2048), spec(2048, 2048), spec(2048, 16), spec(16, 2048))
HEADS = (spec(8, 1024, 64),) * 3


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["plain", "jitted"])
def test_cliff_names_line_form_ratio_and_remedy(wrap: Any) -> None:
    with pytest.raises(errors.CliffError) as found:
        guard(wrap(lora), *LORA, device="cpu")
    error = found.value
    assert "test_guard.py" in str(error.where) and "(lora)" in str(error.where)
    assert f"an equal form of lora is predicted {ratio(gain())} as fast on cpu" in str(error)
    assert "by lora (distributivity): x @ (W + A @ B) = x @ W + (x @ A) @ B" in str(error.got)
    assert "@sym_optimize" in str(error.remedy)


def test_guard_judges_the_emitted_program() -> None:
    assert guard(sym_optimize(lora), *LORA, device="cpu").regret == 1.0
    with pytest.raises(errors.CliffError, match="leave out rules= and kernels="):
        guard(sym_optimize(lora, rules=()), *LORA, device="cpu")


def test_form_of_a_loop_names_its_rewrite(monkeypatch: pytest.MonkeyPatch) -> None:
    use_on_cpu(monkeypatch, loops={"hoists_invariants": False})

    def recurrent(w: Any, u: Any, xs: Any) -> Any:
        return jax.lax.scan(lambda h, x: (jnp.tanh(h @ (w @ u) + x), None), xs[0], xs)[0]

    with pytest.raises(errors.CliffError, match="run once, before the loop"):
        guard(recurrent, spec(128, 128), spec(128, 128), spec(64, 128), device="cpu")


def test_regret_within_the_limit_is_returned() -> None:
    found = guard(lora, *LORA, device="cpu", max_regret=10)
    assert found.regret == pytest.approx(gain())
    assert found.largest_intermediate == 4 * 2048 * 2048
    assert "test_guard.py" in found.where
    assert guard(lora, *LORA, device="cpu", max_regret=None) == found


def hand_written(x: Any, w: Any, a: Any, b: Any) -> Any:
    return x @ w + (x @ a) @ b


PASSES = {
    "the cheap form, by hand": (hand_written, LORA),
    "many rows: the merged weight is cheap": (
        lora, (spec(65536, 512), spec(512, 512), spec(512, 256), spec(256, 512))),
    "one product": (lambda a, b: a @ b, (spec(64, 64), spec(64, 64))),
    "nothing": (lambda x: x, (spec(3),)),
    "a number": (lambda x, n: x * n, (spec(3), 2)),
}  # fmt: skip


@pytest.mark.parametrize("name", PASSES)
def test_no_cliff(name: str) -> None:
    fun, specs = PASSES[name]
    found = guard(fun, *specs, device="cpu")
    assert found.regret is not None and 1.0 <= found.regret <= 1.5


def test_large_intermediate_names_line_and_remedy(one_device: None) -> None:
    with pytest.raises(errors.CliffError) as found:
        guard(attention, *HEADS, device="cpu", max_regret=None, max_intermediate="8 MB")
    error = found.value
    assert "33.6 MB: f32[8,1024,1024]" in str(error)
    assert "(attention)" in str(error.where)
    assert "@sym_optimize holds" in str(error.remedy)
    folded = sym_optimize(attention)
    assert guard(folded, *HEADS, device="cpu", max_intermediate="8 MB").largest_intermediate < 8e6


def test_remedy_is_no_promise_that_is_not_kept() -> None:
    with pytest.raises(errors.CliffError, match="compute it in blocks"):
        guard(lambda x: jnp.sin(jnp.cos(x)), spec(1024, 1024), device="cpu", max_intermediate=1e6)


def test_arguments_and_results_are_no_intermediates() -> None:
    found = guard(lambda a, b: a @ b, spec(512, 8), spec(8, 512), max_intermediate=0, device="cpu")
    assert found.largest_intermediate == 0


def test_intermediates_in_loops_count() -> None:
    def loop(x: Any) -> Any:
        return jax.lax.scan(lambda c, _: (c + jnp.outer(x, x).sum(), None), 0.0, length=3)[0]

    with pytest.raises(errors.CliffError, match=r"4.00 MB: f32\[1000,1000\]"):
        guard(loop, spec(1000), device="cpu", max_regret=None, max_intermediate="1 MB")


def test_lines_inside_nested_functions_are_the_users() -> None:
    closed = jax.jit(lambda x: jnp.tril(x) @ x).trace(spec(64, 64)).jaxpr
    assert "test_guard.py" in largest_intermediate(closed, {}).where


def test_named_sizes_are_priced_at_the_sample() -> None:
    n, d, r = export.symbolic_shape("n, d, r")
    found = guard(lora, spec(n, d), spec(d, d), spec(d, r), spec(r, d), max_regret=None)
    assert found.largest_intermediate > 0


def test_program_without_a_price_has_no_regret() -> None:
    def until(x: Any) -> Any:
        return jax.lax.while_loop(lambda c: c.sum() < 9, lambda c: c @ c, x)

    found = guard(until, spec(8, 8), device="cpu")
    assert found.regret is None
    assert found.note == "without a price: while"


def test_static_arguments_of_a_jit() -> None:
    power = jax.jit(lambda x, n: x**n, static_argnums=1)
    assert guard(power, spec(8), 3, device="cpu").regret == 1.0


WRONG: dict[str, Any] = {
    "no function": lambda: guard(3),
    "a regret below 1": lambda: guard(lora, *LORA, max_regret=0.5),
    "a regret that is no number": lambda: guard(lora, *LORA, max_regret=True),
    "no size": lambda: guard(lora, *LORA, max_intermediate="2 parsecs"),
    "no size at all": lambda: guard(lora, *LORA, max_intermediate="big"),
    "no device": lambda: guard(lora, *LORA, device="abacus"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_use_is_refused(name: str) -> None:
    with pytest.raises(errors.UsageError):
        WRONG[name]()


def test_assert_no_cliff_is_a_guard() -> None:
    assert assert_no_cliff(hand_written, *LORA, device="cpu").regret == 1.0
    with pytest.raises(AssertionError, match="as fast on cpu"):
        assert_no_cliff(lora, *LORA, device="cpu")


@pytest.mark.parametrize(
    ("text", "count"),
    [("2 GB", 2e9), ("1.5kb", 1500), ("3 MiB", 3 * 2**20), ("12", 12), (1e6, 1e6), ("2e9", 2e9)],
)
def test_sizes_are_read(text: Any, count: float) -> None:
    assert parse_bytes(text) == count


def test_quantities_have_units_that_suit_them() -> None:
    seconds = ["0 s", "3.00 ns", "250 µs", "90.0 s"]
    assert [duration(s) for s in (0.0, 3e-9, 2.5e-4, 90.0)] == seconds
    assert [size(b) for b in (0, 999, 1e3, 5e12)] == ["0 B", "999 B", "1.00 kB", "5.00 TB"]
