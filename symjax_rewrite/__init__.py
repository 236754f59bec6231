"""A tensor-program optimiser for JAX: `@sym_optimize` makes what is traced cheap to run."""

from importlib.metadata import PackageNotFoundError, version

from symjax_rewrite import errors as errors
from symjax_rewrite import testing as testing
from symjax_rewrite.api.report import Report as Report
from symjax_rewrite.api.sym_optimize import bisect as bisect
from symjax_rewrite.api.sym_optimize import keep as keep
from symjax_rewrite.api.sym_optimize import sym_optimize as sym_optimize
from symjax_rewrite.options import Budget as Budget
from symjax_rewrite.options import Options as Options
from symjax_rewrite.options import disabled as disabled
from symjax_rewrite.rewriting.rule import RulePack as RulePack
from symjax_rewrite.rewriting.rule import axiom as axiom
from symjax_rewrite.rewriting.rule import lemma as lemma
from symjax_rewrite.rules import packs as packs

try:
    __version__ = version("symjax_rewrite")
except PackageNotFoundError:  # a checkout that is not installed
    __version__ = "0+uninstalled"
