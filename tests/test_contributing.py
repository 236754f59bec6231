"""CONTRIBUTING.md: its examples run, its links lead somewhere, what it names is there."""

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


def test_links_lead_somewhere() -> None:
    targets = re.findall(r"\]\((?!https?://|#)([^)#]+)", TEXT)
    assert targets
    assert [t for t in targets if not (ROOT / t).exists()] == []


def test_files_named_exist() -> None:
    named = set(re.findall(r"`((?:[\w.]+/)*\w+\.py)`", TEXT))
    folders = ("symjax_rewrite", "rules", "pallas_kernels", "tests", "experiments")
    there = [f"/{p.relative_to(ROOT)}" for folder in folders for p in (ROOT / folder).rglob("*.py")]
    assert named
    assert [n for n in named if not any(p.endswith(f"/{n}") for p in there)] == []


def test_make_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"(?:`|^ {4})make ([a-z-]+)", TEXT, flags=re.MULTILINE))
    assert targets
    for target in targets:
        assert re.search(rf"^{target}:", makefile, flags=re.MULTILINE), target


def test_words_of_the_glossary_are_sorted() -> None:
    section = TEXT.split("## Glossary\n")[1].split("\n## ")[0]
    words = re.findall(r"^\| ([\w, -]+) \|", section, flags=re.MULTILINE)[1:]
    assert words == sorted(words, key=str.lower)
