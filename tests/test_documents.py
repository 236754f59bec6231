"""Documents: their links lead somewhere, the files and targets that they name are there."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MAIN = ("README.md", "CONTRIBUTING.md", "symjax_rewrite/README.md", "pallas_kernels/README.md")
EXPERIMENTS = [str(p.relative_to(ROOT)) for p in sorted(ROOT.glob("experiments/*/README.md"))]


def read(path: str) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


@pytest.mark.parametrize("path", [*MAIN, *EXPERIMENTS])
def test_links_lead_somewhere(path: str) -> None:
    targets = re.findall(r"\]\((?!https?://|#)([^)#]+)", read(path))
    assert [t for t in targets if not ((ROOT / path).parent / t).exists()] == []


@pytest.mark.parametrize("path", MAIN[1:3])
def test_files_named_exist(path: str) -> None:
    named = set(re.findall(r"`((?:[\w.]+/)*\w+\.py)`", read(path)))
    folders = ("symjax_rewrite", "rules", "pallas_kernels", "tests", "experiments")
    there = [f"/{p.relative_to(ROOT)}" for folder in folders for p in (ROOT / folder).rglob("*.py")]
    assert named
    assert [n for n in named if not any(p.endswith(f"/{n}") for p in there)] == []


@pytest.mark.parametrize("path", MAIN[:2])
def test_make_targets_exist(path: str) -> None:
    targets = set(re.findall(r"(?:`|^ {4})make ([a-z-]+)", read(path), flags=re.MULTILINE))
    assert targets
    for target in targets:
        assert re.search(rf"^{target}:", read("Makefile"), flags=re.MULTILINE), target


@pytest.mark.parametrize("path", MAIN[:3])
def test_anchors_are_headings(path: str) -> None:
    for target, anchor in re.findall(r"\]\((?!https?://)([^)#]*)#([^)]+)\)", read(path)):
        file = (ROOT / path).parent / target if target else ROOT / path
        headings = re.findall(r"^#+ (.+)$", file.read_text(encoding="utf-8"), flags=re.MULTILINE)
        slugs = [re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings]
        assert anchor in slugs, (path, target, anchor)
