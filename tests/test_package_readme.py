"""The README of the package: its lists are those of the code."""

import re
from pathlib import Path

import pytest

from symjax_rewrite.passes import PASSES

FOLDER = Path(__file__).parents[1] / "symjax_rewrite"
README = (FOLDER / "README.md").read_text(encoding="utf-8")


def section(title: str) -> str:
    return README.split(f"## {title}\n")[1].split("\n## ")[0]


def test_passes_are_listed_in_their_order() -> None:
    listed = re.findall(r"^\| `(\w+)` \|", section("The passes"), flags=re.MULTILINE)
    assert listed == [type(each).__name__ for each in PASSES]


def test_every_folder_is_listed() -> None:
    named = set(re.findall(r"\]\((?:\.\./)?([\w.]+)/?\)", section("Folders")))
    folders = {p.parent.name for p in FOLDER.glob("*/__init__.py")}
    assert folders <= named


@pytest.mark.parametrize("name", ["ir", "rewriting", "loops", "kernel_selection/folds", "proofs"])
def test_every_module_of_a_large_folder_is_in_its_docstring(name: str) -> None:
    """A folder with more modules than a listing explains says which does what."""
    text = (FOLDER / name / "__init__.py").read_text(encoding="utf-8")
    modules = {path.stem for path in (FOLDER / name).glob("*.py")} - {"__init__"}
    assert {module for module in modules if f"`{module}`" not in text} == set()


def test_every_module_of_kernels_is_listed() -> None:
    kernels = FOLDER / "pallas_kernels"
    text = (kernels / "README.md").read_text(encoding="utf-8")
    modules = {path.name for path in kernels.glob("*.py")} - {"__init__.py"}
    assert {name for name in modules if f"`{name}`" not in text} == set()
