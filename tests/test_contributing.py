"""CONTRIBUTING.md: its examples run, its glossary is sorted."""

import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")


def test_examples_run(capsys: pytest.CaptureFixture[str]) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```$", TEXT, flags=re.MULTILINE | re.DOTALL)
    assert len(blocks) == 3
    for source in blocks:
        namespace: dict[str, Any] = {}
        exec(source, namespace)
    printed = capsys.readouterr().out
    assert "log_of_exp" in printed and "short_loops" in printed


def test_words_of_the_glossary_are_sorted() -> None:
    section = TEXT.split("## Glossary\n")[1].split("\n## ")[0]
    words = re.findall(r"^\| ([\w, -]+) \|", section, flags=re.MULTILINE)[1:]
    assert words == sorted(words, key=str.lower)
