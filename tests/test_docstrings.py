"""Every example in a docstring runs and prints what it says."""

import doctest
import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def _modules() -> list[str]:
    folders = ("symjax_rewrite", "rules", "pallas_kernels")
    out = []
    for folder in folders:
        package = "symjax_rewrite" if folder == "symjax_rewrite" else f"symjax_rewrite.{folder}"
        for path in sorted((ROOT / folder).glob("*.py")):
            out.append(f"{package}.{path.stem}".removesuffix(".__init__"))
    return [name for name in out if not name.endswith("__main__")]


@pytest.mark.parametrize("name", _modules())
def test_examples_run(name: str) -> None:
    module = importlib.import_module(name)
    outcome = doctest.testmod(module, optionflags=doctest.NORMALIZE_WHITESPACE)
    assert outcome.failed == 0, "run: python -m doctest, the output above says which"
