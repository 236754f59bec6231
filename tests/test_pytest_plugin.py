"""The pytest plugin in runs of its own: the fixture, its settings, xdist, and no JAX at start."""

import tomllib
from pathlib import Path

import pytest

pytest_plugins = ["pytester"]
ROOT = Path(__file__).parents[1]
PLUGIN = "symjax_rewrite.pytest_plugin"

MODEL = """
    import jax, jax.numpy as jnp

    def spec(*shape):
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    SPECS = spec(8, 2048), spec(2048, 2048), spec(2048, 16), spec(16, 2048)

    def written(x, w, a, b):
        return x @ (w + a @ b)

    def cheap(x, w, a, b):
        return x @ w + (x @ a) @ b

    def test_cheap(symjax_guard):
        assert symjax_guard(cheap, *SPECS, device="cpu").regret == 1.0

    def test_written(symjax_guard):
        symjax_guard(written, *SPECS, device="cpu")

    def test_limit_of_one_test(symjax_guard):
        symjax_guard(written, *SPECS, device="cpu", max_regret=9)
"""


@pytest.fixture(autouse=True)
def _found(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    """The package of this checkout, in new processes too."""
    pytester.syspathinsert(ROOT)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


def run(pytester: pytest.Pytester, *args: str) -> pytest.RunResult:
    """Run the tests in a process of its own; nothing but this plugin is loaded."""
    monkeypatch = pytest.MonkeyPatch()
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    try:
        return pytester.runpytest_subprocess("-p", PLUGIN, *args)
    finally:
        monkeypatch.undo()


def test_fixture_guards_programs(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(MODEL)
    result = run(pytester)
    result.assert_outcomes(passed=2, failed=1)
    result.stdout.fnmatch_lines(
        ["*CliffError: an equal form of written is predicted ?.??× as fast*"]
    )
    result.stdout.no_fnmatch_line("*auditing/guard.py:*")  # the traceback ends in the test


def test_limits_stand_in_the_ini_file(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(MODEL)
    pytester.makeini("[pytest]\nsymjax_max_regret = 5\nsymjax_max_intermediate = 1 MB")
    result = run(pytester)
    result.assert_outcomes(passed=1, failed=2)
    result.stdout.fnmatch_lines(["*an intermediate of written has 16.8 MB*"])


def test_limit_that_is_no_number_names_the_setting(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(MODEL)
    pytester.makeini("[pytest]\nsymjax_max_regret = much")
    result = run(pytester, "-k", "test_cheap")
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(["*symjax_max_regret: expected a number, * got 'much'*"])


@pytest.mark.slow
def test_plugin_works_under_xdist(pytester: pytest.Pytester) -> None:
    pytest.importorskip("xdist")
    pytester.makepyfile(MODEL)
    run(pytester, "-p", "xdist", "-n", "2").assert_outcomes(passed=2, failed=1)


def test_start_imports_no_jax(pytester: pytest.Pytester) -> None:
    pytester.makeconftest(
        """
        import sys

        def pytest_sessionstart(session):
            assert "symjax_rewrite.pytest_plugin" in sys.modules
            assert not {"jax", "numpy", "rich"} & sys.modules.keys()
        """
    )
    pytester.makepyfile("def test_nothing(): pass")
    run(pytester).assert_outcomes(passed=1)


def test_plugin_is_an_entry_point() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["entry-points"]["pytest11"] == {"symjax_rewrite": PLUGIN}
    module, _, function = project["scripts"]["symjax-rewrite"].partition(":")
    assert callable(getattr(__import__(module, fromlist=[function]), function))
