"""Imports only go down, JAX internals stay behind one door, and nothing grows too long."""

import ast
import functools
import graphlib
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.gate

ROOT = Path(__file__).parents[1]
PACKAGE = "symjax_rewrite"
FOLDERS = {
    PACKAGE: ROOT / PACKAGE,
    f"{PACKAGE}.rules": ROOT / "rules",
    f"{PACKAGE}.pallas_kernels": ROOT / "pallas_kernels",
}

# Lowest first. A module may import from its own layer and from those below. A layer is a folder, or
# single modules of the package's root.
LAYERS = {
    "ground": (
        "errors",
        "collector",
        "options",
        "obstacles",
        "jax_internals",
        "jax_axes",
        "jax_calls",
        "jax_kernels",
        "jax_sizes",
        "literal_folding",
        "spec_texts",
        "text_tables",
        "usage_records",
    ),
    "pallas_kernels": ("pallas_kernels",),
    "ir": ("ir",),
    "cost": ("cost",),
    "calibration": ("calibration",),
    "choice": ("candidates", "policy", "signatures"),
    "codegen": ("codegen",),
    "rewriting": ("rewriting",),
    "rules": ("rules",),
    "loops": ("loops",),
    "kernel_selection": ("kernel_selection",),
    "driver": ("passes", "added_passes", "optimizer"),
    "reports": ("reports",),
    "api": ("api",),
    "auditing": ("auditing",),
    "testing": ("testing",),
    "proofs": ("proofs",),
    "command_line": ("command_line",),
    "door": ("__main__", "__init__", "pytest_plugin"),
}
# Layers inside a folder, lowest first; modules that lie beside these folders are above them.
INSIDE = {"proofs": ("proofs.algebra", "proofs.reading")}
_ORDER = list(LAYERS)
MAY_IMPORT = {layer: {*_ORDER[: _ORDER.index(layer) + 1]} for layer in _ORDER}
# A kernel fits the device: it reads its profile, which imports nothing but errors.
PROFILES = {
    f"{PACKAGE}.cost.{name}"
    for name in ("device_profiles", "fusion_facts", "loop_facts", "profile_groups")
}
ALSO = {"pallas_kernels": PROFILES}
# A rule is a law with conditions: the search is no matter of its own.
RULES_MAY_IMPORT = (
    "rewriting.rule",
    "rewriting.laws",
    "rewriting.right_side",
    "rewriting.contraction_order",
    "rewriting.product_trees",
    "rewriting.scales",
)

# JAX's internals, and the modules that may touch them.
INTERNALS = ("jax._src", "jax.extend", "jax.interpreters", "jaxlib")
INTERNALS_DOORS = tuple(
    f"{PACKAGE}.jax_{name}" for name in ("internals", "axes", "calls", "kernels")
)

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
    return next((layer for layer, names in LAYERS.items() if name in names), None)


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
    """Return the imports of a module from above its layer, as lines to read."""
    layer = layer_of(module)
    assert layer is not None
    out = []
    for line, name in imported_modules(module, tree):
        if name != PACKAGE and not name.startswith(f"{PACKAGE}."):
            continue
        target = layer_of(name)
        searches = target == "rewriting" and not name.endswith(RULES_MAY_IMPORT)
        if name in ALSO.get(layer, ()):
            continue
        if target not in MAY_IMPORT[layer] or (layer == "rules" and searches):
            out.append(f"{MODULES[module]}:{line}: {layer} imports {name} ({target})")
    return out


def internal_uses(module: str, tree: ast.AST) -> list[str]:
    """Return the places where a module uses JAX's internals, by import or by attribute."""
    found = [*imported_modules(module, tree), *dotted_names(tree)]
    return sorted(
        f"{MODULES[module]}:{line}: {name}"
        for line, name in set(found)
        if any(name == inner or name.startswith(f"{inner}.") for inner in INTERNALS)
    )


@functools.cache
def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


# A check walks all files in one test: as many tests as files took ten times as long.


def test_every_module_has_a_layer() -> None:
    assert [m for m in MODULES if layer_of(m) is None] == [], "give it a place in LAYERS"


def test_imports_only_go_down() -> None:
    placed = [m for m in MODULES if layer_of(m) is not None]
    assert [line for m in placed for line in upward_imports(m, parse(MODULES[m]))] == []


def test_imports_inside_a_folder_only_go_down() -> None:
    wrong = [
        f"{module} imports {name}"
        for whole, parts in INSIDE.items()
        for number, part in enumerate(parts)
        for module, path in MODULES.items()
        if module.startswith(f"{PACKAGE}.{part}")
        for _, name in imported_modules(module, parse(path))
        if name.startswith(f"{PACKAGE}.{whole}")
        and not name.startswith(tuple(f"{PACKAGE}.{p}" for p in parts[: number + 1]))
    ]
    assert wrong == []


def test_every_name_of_the_table_is_a_module() -> None:
    names = [n for names in LAYERS.values() for n in names]
    assert [n for n in names if _module(n) not in MODULES] == []


def test_no_module_imports_itself_through_others() -> None:
    graph = {
        module: {name for _, name in imported_modules(module, parse(path)) if name in MODULES}
        for module, path in MODULES.items()
    }
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError, which names the cycle


def test_only_jax_modules_touch_internals() -> None:
    others = [m for m in MODULES if m not in INTERNALS_DOORS]
    assert [use for m in others for use in internal_uses(m, parse(MODULES[m]))] == []


def test_files_are_short() -> None:
    lines = {str(path): path.read_text(encoding="utf-8").count("\n") for path in SOURCES}
    long = {path: count for path, count in lines.items() if count > MAX_FILE_LINES}
    assert long == {}, f"more than {MAX_FILE_LINES} lines: a file has one subject"
    vague = [str(path) for path in SOURCES if path.name in FORBIDDEN_NAMES]
    assert vague == [], "name a module after its subject"


def long_functions(tree: ast.Module) -> list[str]:
    """Return the functions with too many lines, as lines to read."""
    return [
        f"{node.name} (line {node.lineno}): {(node.end_lineno or 0) - node.lineno + 1} lines"
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (node.end_lineno or 0) - node.lineno + 1 > MAX_FUNCTION_LINES
    ]


def test_functions_are_short() -> None:
    found = [f"{path}: {line}" for path in SOURCES for line in long_functions(parse(path))]
    assert found == [], f"more than {MAX_FUNCTION_LINES} lines"


# The checks above pass on a clean tree whatever they do; these show that each can fail.
BAD = [
    ("ir.term", "from symjax_rewrite import api", "upward"),
    ("ir.term", "from symjax_rewrite.optimizer import Optimiser", "upward"),
    ("ir.egraph", "def f():\n    from ..cost import term_cost", "upward"),
    ("ir.term", "import symjax_rewrite.rules.associativity", "upward"),
    ("ir.term", "from symjax_rewrite import __version__", "upward"),
    ("pallas_kernels.fold.spec", "from symjax_rewrite.ir import term", "upward"),
    ("rules.lemmas", "from symjax_rewrite.optimizer import Optimiser", "upward"),
    ("rules.lemmas", "from symjax_rewrite.rewriting.saturation import saturate", "upward"),
    ("ir.term", "import jax._src.core", "internal"),
    ("ir.term", "from jax._src import core", "internal"),
    ("ir.term", "from jax import _src", "internal"),
    ("ir.term", "from jax.extend import core", "internal"),
    ("ir.term", "import jax\njax._src.core.Var", "internal"),
]
GOOD = [
    ("ir.term", "import jax\nfrom .. import errors\nfrom .sizes import Size"),
    ("pallas_kernels.fold.spec", "from symjax_rewrite import errors\nfrom .. import monoid"),
    ("rules.lemmas", "from symjax_rewrite.rewriting.rule import lemma"),
    ("__init__", "from symjax_rewrite import rules\nfrom .api.sym_optimize import sym_optimize"),
    ("jax_internals", "import numpy"),
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


def test_long_function_is_found() -> None:
    body = "    pass\n" * MAX_FUNCTION_LINES
    assert len(long_functions(ast.parse(f"def f():\n{body}"))) == 1
    assert long_functions(ast.parse(f"def f():\n{body.removesuffix('    pass' + chr(10))}")) == []


def test_a_class_name_occurs_once() -> None:
    where: dict[str, list[str]] = {}
    for module, path in MODULES.items():
        for node in ast.walk(parse(path)):
            if isinstance(node, ast.ClassDef):
                where.setdefault(node.name, []).append(module)
    assert {name: found for name, found in where.items() if len(found) > 1} == {}
