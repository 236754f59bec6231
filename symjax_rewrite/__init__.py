"""A tensor-program optimiser for JAX: `@sym_optimize` rewrites traced programs to cheaper ones.

Public names are imported on first access (PEP 562), so that `import symjax_rewrite` adds almost
nothing to the import time of JAX. The package's README.md is the map of the code.
"""

from importlib import import_module as _import_module
from typing import TYPE_CHECKING as _TYPE_CHECKING

if _TYPE_CHECKING:
    from symjax_rewrite import errors as errors
    from symjax_rewrite import testing as testing
    from symjax_rewrite.api.sym_optimize import bisect as bisect
    from symjax_rewrite.api.sym_optimize import keep as keep
    from symjax_rewrite.api.sym_optimize import sym_optimize as sym_optimize
    from symjax_rewrite.auditing.audit import audit as audit
    from symjax_rewrite.auditing.guard import guard as guard
    from symjax_rewrite.options import Budget as Budget
    from symjax_rewrite.options import Options as Options
    from symjax_rewrite.options import disabled as disabled
    from symjax_rewrite.proofs.proving import prove_equal as prove_equal
    from symjax_rewrite.reports.report import Report as Report
    from symjax_rewrite.rewriting.route import route as route
    from symjax_rewrite.rewriting.rule import RulePack as RulePack
    from symjax_rewrite.rewriting.rule import axiom as axiom
    from symjax_rewrite.rewriting.rule import lemma as lemma
    from symjax_rewrite.rules import packs as packs

    __version__: str

# The public names by the module that defines them, and the public modules.
_HOMES = {
    "reports.report": ("Report",),
    "api.sym_optimize": ("bisect", "keep", "sym_optimize"),
    "auditing.audit": ("audit",),
    "auditing.guard": ("guard",),
    "options": ("Budget", "Options", "disabled"),
    "proofs.proving": ("prove_equal",),
    "rewriting.route": ("route",),
    "rewriting.rule": ("RulePack", "axiom", "lemma"),
}
_MODULES = {"errors": "errors", "packs": "rules.packs", "testing": "testing"}

__all__ = [
    "Budget", "Options", "Report", "RulePack", "__version__", "audit", "axiom", "bisect",
    "disabled", "errors", "guard", "keep", "lemma", "packs", "prove_equal", "route",
    "sym_optimize", "testing",
]  # fmt: skip


def __getattr__(name: str) -> object:
    """Import a public name on its first access."""
    home = next((module for module, names in _HOMES.items() if name in names), None)
    if name == "__version__":
        found: object = _version()
    elif name in _MODULES:
        found = _imported(_MODULES[name])
    elif home is not None:
        found = getattr(_imported(home), name)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = found
    return found


def _imported(name: str) -> object:
    """Import a module of the package."""
    from symjax_rewrite.collector import collector_paused

    with collector_paused():
        return _import_module(f"{__name__}.{name}")


def __dir__() -> list[str]:
    return sorted(__all__)


def _version() -> str:
    """Return the version of the installed distribution."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(__name__)
    except PackageNotFoundError:  # a checkout that is not installed
        return "0+uninstalled"
