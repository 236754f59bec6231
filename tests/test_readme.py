"""The README does what it says: its examples run, its links lead somewhere."""

import re
from pathlib import Path
from typing import Any

from symjax_rewrite import errors, options

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


def test_links_lead_somewhere() -> None:
    targets = re.findall(r"\]\((?!https?://|#)([^)#]+)", README)
    assert targets
    assert [target for target in targets if not (ROOT / target).exists()] == []


def test_make_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in set(re.findall(r"(?:`|^ {4})make ([a-z-]+)", README, flags=re.MULTILINE)):
        assert re.search(rf"^{target}:", makefile, flags=re.MULTILINE), target


def test_every_error_is_explained() -> None:
    table = set(re.findall(r"^\| `(\w+)` \|", README, flags=re.MULTILINE))
    defined = {
        name
        for name, value in vars(errors).items()
        if isinstance(value, type) and issubclass(value, errors.SymjaxError)
    }
    assert table == defined - {"SymjaxError"}


def test_every_numerics_level_is_explained() -> None:
    section = README.split("## Numerics levels")[1].split("\n## ")[0]
    assert tuple(re.findall(r'^\| `"(\w+)', section, flags=re.MULTILINE)) == options.NUMERICS
