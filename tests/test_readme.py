"""The README does what it says: its examples run, its tables are complete."""

import importlib.util
import inspect
import re
import sys
from pathlib import Path
from typing import Any

import symjax_rewrite
from symjax_rewrite import errors, options, sym_optimize
from symjax_rewrite.command_line.main import COMMANDS

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def python_blocks(text: str) -> list[tuple[int, str]]:
    """(first line, source) of every ```python block."""
    found = re.finditer(r"^```python\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)
    return [(text[: m.start(1)].count("\n"), m.group(1)) for m in found]


def test_examples_run() -> None:
    """In order, as a reader would type them into one session."""
    blocks = python_blocks(README)
    assert blocks
    namespace: dict[str, Any] = {"__name__": "readme"}
    for line, source in blocks:
        exec(compile("\n" * line + source, str(ROOT / "README.md"), "exec"), namespace)


def section(title: str) -> str:
    return README.split(f"\n## {title}\n")[1].split("\n## ")[0]


def first_cells(title: str) -> list[str]:
    """The names in the first cells of a section's tables."""
    cells = re.findall(r"^\| (`.*?) \|", section(title), flags=re.MULTILINE)
    return [name for cell in cells for name in re.findall(r"`(\w+)", cell)]


def test_every_error_is_explained() -> None:
    table = set(first_cells("Errors"))
    defined = {
        name
        for name, value in vars(errors).items()
        if isinstance(value, type) and issubclass(value, errors.SymjaxError)
    }
    assert table == defined - {"SymjaxError"}


def test_every_numerics_level_is_explained() -> None:
    table = re.findall(r'^\| `"(\w+)', section("Numerics levels"), flags=re.MULTILINE)
    assert tuple(table) == options.NUMERICS


def test_every_option_is_explained() -> None:
    given = [n for n, p in inspect.signature(sym_optimize).parameters.items() if n != "fun"]
    named = first_cells("Options")
    assert set(given) == {name for name in named if name.islower()}
    read = set(re.findall(r"SYMJAX_\w+", inspect.getsource(options)))
    assert read == {name for name in named if name.isupper()}


def test_every_command_is_explained() -> None:
    table = re.findall(r"^\| `([a-z-]+)", section("Reports, audits, guards, proofs"), re.MULTILINE)
    assert sorted(table) == sorted(COMMANDS)


def test_every_public_name_is_there() -> None:
    names = set(symjax_rewrite.__all__) - {"__version__", "Options", "Report"}
    assert [name for name in names if not re.search(rf"\b{name}\b", README)] == []


def test_every_experiment_and_notebook_is_listed() -> None:
    listed = re.findall(r"\]\(experiments/(\w+)", section("Experiments"))
    there = [p.parent.name for p in (ROOT / "experiments").glob("*/run.py")]
    assert set(there) <= set(listed)
    notebooks = [p.name for p in (ROOT / "notebooks").glob("*.ipynb")]
    assert [name for name in notebooks if f"| `{name}` |" not in section("Quickstart")] == []


def test_gains_are_those_of_the_committed_results() -> None:
    path = ROOT / "experiments" / "gains" / "run.py"
    spec = importlib.util.spec_from_file_location("experiment_gains", path)
    assert spec is not None and spec.loader is not None
    gains = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = gains  # for its dataclass
    spec.loader.exec_module(gains)
    for part in gains.tell():
        assert part in README, "run: python experiments/gains/run.py --write"
