"""Every example in a docstring runs and prints what it says."""

import doctest
import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def _modules_with_examples() -> list[str]:
    """Names of the modules with a doctest; links are not followed."""
    out = []
    for folder in ("symjax_rewrite", "rules", "pallas_kernels"):
        package = "symjax_rewrite" if folder == "symjax_rewrite" else f"symjax_rewrite.{folder}"
        for path in sorted((ROOT / folder).rglob("*.py")):
            linked = path.relative_to(ROOT / folder).parts[0] in ("rules", "pallas_kernels")
            if not linked and ">>> " in path.read_text(encoding="utf-8"):
                parts = path.relative_to(ROOT / folder).with_suffix("").parts
                out.append(".".join((package, *parts)).removesuffix(".__init__"))
    return out


@pytest.mark.parametrize("name", _modules_with_examples())
def test_docstring_examples_run(name: str) -> None:
    module = importlib.import_module(name)
    outcome = doctest.testmod(module, optionflags=doctest.NORMALIZE_WHITESPACE)
    assert outcome.failed == 0, "run: python -m doctest, the output above says which"
