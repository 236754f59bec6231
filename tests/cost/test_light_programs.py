"""A large program that takes its time in launches is light: no pass reads its terms."""

import jax
import jax.numpy as jnp
import pytest

from symjax_rewrite import optimizer, sym_optimize
from symjax_rewrite.cost import light_programs
from symjax_rewrite.cost.device_profiles import DEVICES
from symjax_rewrite.cost.light_programs import LITTLE_WORK, is_light
from symjax_rewrite.ir.flat_program import flatten
from symjax_rewrite.passes import OF_LOOPS, PASSES
from symjax_rewrite.rewriting.algebra import Algebra

CPU = DEVICES["cpu"]


def _turned(x, count=120):
    """Many turns of an array of three rows: nine equations each."""
    for _ in range(count):
        a, b, c = x[0], x[1], x[2]
        x = jnp.stack([a * c - b, b * a, c + a * b])
    return x


def _program(*shape, count=120):
    traced = jax.jit(lambda x: _turned(x, count)).trace(jax.ShapeDtypeStruct(shape, jnp.float32))
    return flatten(traced.jaxpr)


@pytest.mark.parametrize(
    ("shape", "count", "device", "light"),
    [((3,), 120, "cpu", True), ((3, 9000), 120, "cpu", False), ((3,), 2, "cpu", False)]
    + [((3,), 120, "h100", False)],
    ids=["small arrays", "large arrays", "few equations", "on a GPU"],
)
def test_small_arrays_on_a_cpu_are_light(shape, count, device, light):
    assert is_light(_program(*shape, count=count), DEVICES[device]) is light


def test_a_few_large_products_tell_that_a_program_is_not_light(monkeypatch):
    """Neither its launches nor the products after them are counted."""

    def layers(x, ws):
        for w in ws:
            x = _turned(jnp.tanh(x @ w), 1)
        return x

    counted, of = [], light_programs.work_seconds
    monkeypatch.setattr(light_programs, "launch_seconds", lambda *_: pytest.fail("counted"))
    monkeypatch.setattr(
        light_programs, "work_seconds", lambda e, d: (counted.append(e), of(e, d))[1]
    )
    x, ws = jnp.ones((3, 2048)), [jax.ShapeDtypeStruct((2048, 2048), jnp.float32)] * 40
    program = flatten(jax.jit(layers).trace(x, ws).jaxpr)
    assert not is_light(program, CPU) and len(counted) < 40


def test_a_light_program_stays_as_written_unless_kernels_are_asked_for(monkeypatch):
    programs = []

    def counted(self, program, context):
        programs.append(program)
        return iter(())

    monkeypatch.setattr(Algebra, "candidates", counted)
    x = jax.ShapeDtypeStruct((3,), jnp.float32)
    report = sym_optimize(_turned).explain(x)
    assert not programs
    assert [r.name for r in report.routes if "arithmetic and traffic" in r.reason] == ["search"]
    assert "of loops alone (arithmetic and traffic take little" in str(report)
    sym_optimize(_turned, kernels="always").explain(x)
    assert len(programs) == 1


def test_a_body_of_many_small_operations_is_light_as_a_program_is(monkeypatch):
    """Kernels in a step cost less than a launch, and XLA fuses them as it chooses there too."""
    programs = []

    def counted(self, program, context):
        programs.append(len(program.equations))
        return iter(())

    monkeypatch.setattr(Algebra, "candidates", counted)
    x = jax.ShapeDtypeStruct((3,), jnp.float32)
    sym_optimize(lambda x: jax.lax.fori_loop(0, 9, lambda _, x: _turned(x), x)).explain(x)
    assert max(programs, default=0) < CPU.search.large_program


def test_loops_in_light_programs_are_still_improved():
    """A product leaves the loop of a program that has many equations on small arrays."""

    def run(x, rows, w):
        step = lambda s, row: (jnp.sin(s) + jnp.max(row @ w), None)  # noqa: E731
        return _turned(jax.lax.scan(step, x, rows)[0])

    shapes = (3,), (64, 512), (512, 512)
    report = sym_optimize(run).explain(*[jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes])
    assert [r.name for r in report.rules] == ["loop_batching"]


@pytest.mark.parametrize(("inner", "stays"), [("none", 1), ("carried", 1), ("invariant", 0)])
def test_a_loop_of_a_light_body_stays_unless_a_loop_may_leave_it(inner, stays):
    last = lambda x: jax.lax.scan(lambda s, r: (jnp.sin(s + r), None), x[0], x)[0]  # noqa: E731
    added = {
        "none": lambda x, w: w,
        "carried": lambda x, w: last(x),
        "invariant": lambda x, w: last(w),
    }

    def run(x, w):
        return jax.lax.fori_loop(0, 9, lambda _, x: _turned(x) + added[inner](x, w), x)

    x = jax.ShapeDtypeStruct((3,), jnp.float32)
    report = sym_optimize(run).explain(x, x)
    assert len([r for r in report.routes if r.reason == LITTLE_WORK]) == stays


@pytest.mark.parametrize("inner", ["none", "branches"])
def test_a_light_body_is_a_program_of_its_own_only_if_it_holds_others(inner, monkeypatch):
    programs, flat = [], optimizer.flat
    monkeypatch.setattr(optimizer, "flat", lambda *args: programs.append(args) or flat(*args))
    last = (lambda x: x) if inner == "none" else _branched
    x = jax.ShapeDtypeStruct((3,), jnp.float32)
    run = lambda x: jax.lax.fori_loop(0, 9, lambda _, x: last(_turned(x)), x)  # noqa: E731
    sym_optimize(run).explain(x)
    assert (len(programs) == 1) is (inner == "none")


def _branched(x):
    return jax.lax.cond(x[0] > 0, jnp.sin, jnp.cos, x)


def test_the_passes_that_run_on_light_programs_are_those_of_loops():
    assert {p.name for p in PASSES if ".loops." in type(p).__module__} == OF_LOOPS
