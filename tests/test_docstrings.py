"""Docstrings: their examples run, functions open with a verb, and words are those of the field."""

import ast
import doctest
import importlib
import io
import re
import tokenize
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


FOLDERS = ("symjax_rewrite", "rules", "pallas_kernels", "tests", "experiments")
SOURCES = [
    path
    for folder in FOLDERS
    for path in sorted((ROOT / folder).rglob("*.py"))
    if path.relative_to(ROOT).parts[:2]
    not in {("symjax_rewrite", "rules"), ("symjax_rewrite", "pallas_kernels")}
]
CLAUSES = re.compile(
    r"(What|Whether|Where|When|Why|How|Who|Which|That|If|It|Else|Otherwise|Nothing|Whatever)\b"
)
ARTICLES = re.compile(r"(A|An|The|This|These|Its|No|All|Every|Each)\b")
OWN_WORDS = re.compile(r"\b(made again|spare[ds]?|dear(er|ly)?|nobody|somehow|of its own accord)\b")
DEFINED = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Module)


def bad_openings(source: str, has_verbs: bool) -> list[str]:
    """Return docstrings that open with a clause, or, where functions need a verb, an article."""
    out = []
    for node in ast.walk(ast.parse(source)):
        text = ast.get_docstring(node) if isinstance(node, DEFINED) else None
        is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        if text and (CLAUSES.match(text) or (has_verbs and is_function and ARTICLES.match(text))):
            out.append(text.splitlines()[0])
    return out


def own_words(source: str) -> list[str]:
    """Return the comments, docstrings and messages with a word that the glossary lacks."""
    if not OWN_WORDS.search(source):
        return []
    kinds = {tokenize.COMMENT, tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", -1)}
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return [t.string for t in tokens if t.type in kinds and OWN_WORDS.search(t.string)]


@pytest.mark.gate
def test_prose_is_plain() -> None:
    found = {}
    for path in SOURCES:
        source = path.read_text(encoding="utf-8")
        is_library = path.relative_to(ROOT).parts[0] in FOLDERS[:3]
        lines = bad_openings(source, is_library) + (own_words(source) if is_library else [])
        found |= {str(path.relative_to(ROOT)): lines} if lines else {}
    assert found == {}


@pytest.mark.gate
def test_bad_prose_is_found() -> None:
    assert bad_openings('def f():\n    """Whether it holds."""', has_verbs=False)
    assert bad_openings('def f():\n    """The number of rows."""', has_verbs=True)
    assert not bad_openings('def f():\n    """Return the number of rows."""', has_verbs=True)
    assert own_words("x = 1  # states made again") and own_words('y = f"{x} is spared"')


IN_BACKTICKS = re.compile(r"`([^`\n]*)`")
NAME = re.compile(r"[A-Za-z_]\w{2,}(?:\.\w+)*", re.ASCII)
OTHER_NAMES = {"max_n", "min_n", "any_n", "all_n", "InitVar"}  # formulas, and names of Python


def test_names_in_backticks_exist() -> None:
    library = [*SOURCES, *(ROOT / folder / "README.md" for folder in FOLDERS[:3:2])]
    texts = {path: path.read_text(encoding="utf-8") for path in library}
    known = {*OTHER_NAMES, *(path.stem for path in SOURCES)}
    for text in texts.values():
        known.update(re.findall(r"\w+", IN_BACKTICKS.sub("", text)))
    missing = {
        f"{path.name}: {name}"
        for path, text in texts.items()
        for name in IN_BACKTICKS.findall(text)
        if NAME.fullmatch(name) and name.split(".")[-1] not in known
    }
    assert missing == set()
