"""Imports only go down, JAX internals stay behind one door, and nothing grows too long."""

import ast
import graphlib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = "symjax_rewrite"
FOLDERS = {
    PACKAGE: ROOT / PACKAGE,
    f"{PACKAGE}.rules": ROOT / "rules",
    f"{PACKAGE}.pallas_kernels": ROOT / "pallas_kernels",
}

# Layer by layer, lowest first. A module may import its own layer and those `MAY_IMPORT` names.
LAYERS = {
    "ground": "errors config compat",
    "terms": "dims ir monoid",
    "graph": "egraph device",
    "knowledge": "record site ops indexing analysis cost equation_cost product contract_order "
    "rule order",
    "passes": "trace loops loop_cleaning accumulation loop_motion stepping loop_fusion loop_pairs "
    "entry_moves prefixes prefix_gradients prefix_loops unrolled rerolling recurrence loop_pass "
    "loop_parts axes canonical match saturate "
    "regions single extract solve spread lower emit routing pipeline",
    "kernels": "pallas_kernels",
    "rules": "rules",
    "faces": "reference "
    "band gathers ranks pairs exits ties pieces zeros fold_forms tile_program fold_rows fold_plan "
    "fold_route choice_route sparse_route worth matrix_form matrix_route scan_route split_route "
    "route norm_form norm_program norm_epilogue norm_call norm_route norm_frozen selection_route "
    "banded report summary "
    "prepare "
    "call "
    "verify tune "
    "specimens rulecheck testing",
    "door": "api __main__ __init__",
}
_ORDER = list(LAYERS)
MAY_IMPORT = {layer: {*_ORDER[: _ORDER.index(layer) + 1]} for layer in _ORDER} | {
    "kernels": {"ground", "kernels"},
    "rules": {"ground", "terms", "graph", "knowledge", "kernels", "rules"},
}
# Modules a layer may import although their layer is not among those above.
ALSO = {"kernels": {f"{PACKAGE}.monoid"}}

# JAX's internals, and the one module that may touch them.
INTERNALS = ("jax._src", "jax.extend", "jax.interpreters", "jaxlib")
INTERNALS_DOOR = f"{PACKAGE}.compat"

MAX_FILE_LINES = 600
MAX_FUNCTION_LINES = 60
FORBIDDEN_NAMES = {"utils.py", "helpers.py"}


def _package_files() -> dict[str, Path]:
    """Module name to file, for every module of the package; the links are not followed."""
    out = {}
    for package, folder in FOLDERS.items():
        for path in sorted(folder.rglob("*.py")):
            parts = path.relative_to(folder).with_suffix("").parts
            if folder == ROOT / PACKAGE and parts[0] in ("rules", "pallas_kernels"):
                continue
            out[".".join((package, *parts)).removesuffix(".__init__")] = path
    return out


MODULES = _package_files()
SOURCES = sorted(
    path
    for folder in ("symjax_rewrite", "rules", "pallas_kernels", "tests", "experiments")
    for path in (ROOT / folder).rglob("*.py")
    if path.relative_to(ROOT).parts[:2] not in {(PACKAGE, "rules"), (PACKAGE, "pallas_kernels")}
)


def layer_of(module: str) -> str | None:
    """The layer of a module of the package; None where the table has no place for it."""
    name = module.removeprefix(PACKAGE).lstrip(".").split(".")[0] or "__init__"
    return next((layer for layer, names in LAYERS.items() if name in names.split()), None)


def imported_modules(module: str, tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, absolute name) of every import, wherever it stands in the file.

    `from package import name` gives `package.name` where that is a module, else `package`.
    """
    package = module if MODULES[module].name == "__init__.py" else module.rpartition(".")[0]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1]
            base = ".".join((*above, node.module or "")).rstrip(".") if node.level else node.module
            for alias in node.names:
                full = f"{base}.{alias.name}"
                is_module = full in MODULES or full.startswith(INTERNALS)
                yield node.lineno, full if is_module else str(base)


def dotted_names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, `a.b.c`) of every attribute chain that starts at a name."""
    for node in ast.walk(tree):
        names, inner = [], node
        while isinstance(inner, ast.Attribute):
            names.append(inner.attr)
            inner = inner.value
        if names and isinstance(inner, ast.Name):
            yield getattr(node, "lineno", 0), ".".join((inner.id, *reversed(names)))


def upward_imports(module: str, tree: ast.AST) -> list[str]:
    """What a module imports from above its layer, as lines to read."""
    layer = layer_of(module)
    assert layer is not None
    out = []
    for line, name in imported_modules(module, tree):
        if name != PACKAGE and not name.startswith(f"{PACKAGE}."):
            continue
        target = layer_of(name)
        if target not in MAY_IMPORT[layer] and name not in ALSO.get(layer, ()):
            out.append(f"{MODULES[module]}:{line}: {layer} imports {name} ({target})")
    return out


def internal_uses(module: str, tree: ast.AST) -> list[str]:
    """Where a module reaches into JAX's internals, by import or by attribute."""
    found = [*imported_modules(module, tree), *dotted_names(tree)]
    return sorted(
        f"{MODULES[module]}:{line}: {name}"
        for line, name in set(found)
        if any(name == inner or name.startswith(f"{inner}.") for inner in INTERNALS)
    )


def _parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def _name(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("module", MODULES)
def test_module_has_a_layer(module: str) -> None:
    assert layer_of(module) is not None, f"{module}: give it a place in LAYERS"


@pytest.mark.parametrize("module", MODULES)
def test_imports_only_go_down(module: str) -> None:
    if layer_of(module) is not None:
        assert upward_imports(module, _parse(MODULES[module])) == []


def test_every_name_of_the_table_is_a_module() -> None:
    assert [n for n in " ".join(LAYERS.values()).split() if _module(n) not in MODULES] == []


def test_no_module_imports_itself_through_others() -> None:
    graph = {
        module: {name for _, name in imported_modules(module, _parse(path)) if name in MODULES}
        for module, path in MODULES.items()
    }
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError, which names the cycle


@pytest.mark.parametrize("module", [m for m in MODULES if m != INTERNALS_DOOR])
def test_only_compat_touches_internals(module: str) -> None:
    assert internal_uses(module, _parse(MODULES[module])) == []


@pytest.mark.parametrize("path", SOURCES, ids=_name)
def test_file_is_short(path: Path) -> None:
    lines = path.read_text(encoding="utf-8").count("\n")
    assert lines <= MAX_FILE_LINES, f"{lines} lines: a file has one subject"
    assert path.name not in FORBIDDEN_NAMES, "name a module after its subject"


@pytest.mark.parametrize("path", SOURCES, ids=_name)
def test_functions_are_short(path: Path) -> None:
    long = [
        f"{node.name} (line {node.lineno}): {(node.end_lineno or 0) - node.lineno + 1} lines"
        for node in ast.walk(_parse(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (node.end_lineno or 0) - node.lineno + 1 > MAX_FUNCTION_LINES
    ]
    assert long == [], f"more than {MAX_FUNCTION_LINES} lines"


# The checks above pass on a clean tree whatever they do; these show that each can fail.
BAD = [
    ("ir", "from symjax_rewrite import api", "upward"),
    ("ir", "from symjax_rewrite.pipeline import Optimiser", "upward"),
    ("ir", "def f():\n    from .egraph import EGraph", "upward"),
    ("ir", "import symjax_rewrite.rules.associativity", "upward"),
    ("ir", "from symjax_rewrite import __version__", "upward"),
    ("pallas_kernels", "from symjax_rewrite import ir", "upward"),
    ("rules", "from symjax_rewrite.pipeline import Optimiser", "upward"),
    ("ir", "import jax._src.core", "internal"),
    ("ir", "from jax._src import core", "internal"),
    ("ir", "from jax import _src", "internal"),
    ("ir", "from jax.extend import core", "internal"),
    ("ir", "import jax\njax._src.core.Var", "internal"),
]
GOOD = [
    ("ir", "import jax\nfrom . import errors\nfrom .dims import Size"),
    ("pallas_kernels", "from symjax_rewrite import errors\nimport symjax_rewrite.monoid"),
    ("__init__", "from symjax_rewrite import rules\nfrom .api import sym_optimize"),
    ("compat", "import numpy"),
]


def _module(name: str) -> str:
    return PACKAGE if name == "__init__" else f"{PACKAGE}.{name}"


@pytest.mark.parametrize(("name", "source", "kind"), BAD)
def test_bad_import_is_found(name: str, source: str, kind: str) -> None:
    check = upward_imports if kind == "upward" else internal_uses
    assert len(check(_module(name), ast.parse(source))) >= 1


@pytest.mark.parametrize(("name", "source"), GOOD)
def test_good_import_passes(name: str, source: str) -> None:
    tree = ast.parse(source)
    assert upward_imports(_module(name), tree) == []
    assert internal_uses(_module(name), tree) == []
