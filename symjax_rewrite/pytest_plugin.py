"""A pytest plugin: the fixture `symjax_guard`, and options for its limits.

Installed with the package, it is found by the entry point `pytest11`. It imports JAX when a test
asks for the fixture, never when pytest starts. In an `ini` file:

    symjax_max_regret = 2.0
    symjax_max_intermediate = 2 GB
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

LIMITS = {
    "symjax_max_regret": "times the modelled seconds of the cheapest form; none: any (default 1.5)",
    "symjax_max_intermediate": "most bytes of an intermediate, such as 2 GB (default: any)",
    "symjax_device": "the device profile that prices, such as h200 (default: JAX's device)",
}


def pytest_addoption(parser: pytest.Parser) -> None:
    """Declare the limits as settings of the `ini` file."""
    for name, text in LIMITS.items():
        parser.addini(name, f"symjax_guard: {text}", default="")


@pytest.fixture(scope="session")
def symjax_guard(pytestconfig: pytest.Config) -> Callable[..., Any]:
    """Return `symjax_rewrite.guard` with the limits of the `ini` file as defaults.

    Example:
        def test_model_has_no_cliff(symjax_guard):
            symjax_guard(model, params, batch, max_intermediate="1 GB")
    """
    from symjax_rewrite import guard
    from symjax_rewrite.errors import CliffError

    ini = {name: str(pytestconfig.getini(name)).strip() for name in LIMITS}
    usual: dict[str, Any] = {
        "max_regret": _regret(ini["symjax_max_regret"]),
        "max_intermediate": ini["symjax_max_intermediate"] or None,
        "device": ini["symjax_device"] or None,
    }

    def checked(f: Any, *specs: Any, **limits: Any) -> Any:
        __tracebackhide__ = True
        try:
            return guard(f, *specs, **{**usual, **limits})
        except CliffError as error:  # the frames of the library say nothing about the program
            raise error.with_traceback(None) from None

    return checked


def _regret(text: str) -> float | None:
    if text.lower() == "none":
        return None
    try:
        return float(text or 1.5)
    except ValueError:
        expected = "a number, or none for no limit"
        raise pytest.UsageError(f"symjax_max_regret: expected {expected}, got {text!r}") from None
