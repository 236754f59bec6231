"""The API reference lists the public names, and nothing else. `make docs` builds it."""

import re
from pathlib import Path

import symjax_rewrite
from symjax_rewrite import testing

FOLDER = Path(__file__).parents[1] / ".ci" / "docs"
PAGES = sorted((FOLDER / "pages").glob("*.md"))


def listed() -> list[str]:
    text = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
    return re.findall(r"^::: symjax_rewrite\.(\S+)$", text, flags=re.MULTILINE)


def test_public_names_are_listed_once() -> None:
    names = [name for name in listed() if not name.startswith("testing.")]
    assert sorted(names) == sorted(set(symjax_rewrite.__all__) - {"__version__", "testing"})


def test_names_for_tests_are_listed_once() -> None:
    names = [name for name in listed() if name.startswith("testing.")]
    defined = (n for n, v in vars(testing).items() if hasattr(v, "__module__") and n[0] != "_")
    assert sorted(names) == sorted(f"testing.{name}" for name in defined)


def test_every_page_is_in_the_menu() -> None:
    menu = (FOLDER / "mkdocs.yml").read_text(encoding="utf-8").split("\nnav:\n")[1]
    assert sorted(re.findall(r": (\S+\.md)$", menu, re.MULTILINE)) == [p.name for p in PAGES]
