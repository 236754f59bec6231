"""Rates, thresholds and margins stand in `cost/` alone, each with unit, meaning and source."""

import ast
import dataclasses
from collections.abc import Iterator
from typing import Any, get_args

import pytest

from symjax_rewrite.cost import margins, profile_fields, profile_groups
from symjax_rewrite.cost.device_profiles import CPU, DEVICES, Device
from tests.test_layers import MODULES, PACKAGE, ROOT, parse

pytestmark = pytest.mark.gate

SOURCES = {
    profile_fields.DATASHEET,
    profile_fields.FACT,
    profile_fields.JUDGED,
    profile_fields.NO_SCRIPT,
}

# Numbers by module, in upper case, that are no figures of a device; each with the reason.
SEARCH = "bounds a search or a recognition, so that a program costs no more than a known time"
SHAPE = "how a kernel is cut, or how many places its code has"
EXACT = "beyond it a number or an address is not exact"
NUMERICS = "a tolerance of values"
CODE = "a name for a number that has a meaning in the code only"
KEPT = "bounds what is kept between two calls"
SHOWN = "decides what a person is shown, and no form of a program"
TIMING = "how often, and how long, programs are timed"
TIMED = "the size of a program that is timed"
SURE = "steps that nearly all loops run whose number of steps is not known"
EXCEPTIONS: dict[str, dict[str, str]] = {
    "api.autotuning": dict.fromkeys(
        ("ROUNDS", "SAMPLE_S", "MOST_TRIALS", "MOST_S", "SHORT_S", "AT_ROOFLINE", "OFF"), TIMING
    ),
    "api.tuning_cache": {"FORMAT": CODE, "MOST_HASHED": KEPT},
    "api.decision_cache": {"MOST_PROGRAMS": KEPT},
    "ir.program_key": {"MOST_BYTES": KEPT},
    "api.rounding": {"RUNS": SEARCH, "TENSOR_CORES": NUMERICS},
    "api.size_plans": {"MOST_RANGES": SEARCH},
    "api.tolerance": dict.fromkeys(("MEAN", "LARGEST", "ENTRIES", "INFORMATIVE"), NUMERICS),
    "auditing.audit": {"SHOWN": SHOWN},
    "auditing.index_masks": {"ROWS": SEARCH, "MOST_COLUMNS": SEARCH},
    "auditing.findings": {"MOST_PRICED": SEARCH},
    "auditing.symmetry": {"MOST_PERMUTED": SEARCH, "MOST_TERMS": SEARCH},
    "auditing.traits": {"DENSE": SHOWN, "NARROW": SHOWN},
    "command_line.demo": {"CALLS": TIMING},
    "command_line.main": dict.fromkeys(("OK", "FOUND", "UNKNOWN"), CODE),
    "command_line.terminal": {"PAUSE_S": SHOWN},
    "calibration.command": dict.fromkeys(
        ("MOST_SPREAD", "TRIES", "MOST_NOISY", "MOST_TAKEN"), TIMING
    ),
    "calibration.elementwise": dict.fromkeys(("ELEMENTS", "ROWS", "SIDE", "LIGHT_STEPS"), TIMED),
    "calibration.loops": dict.fromkeys(("TRIPS", "WIDE", "NARROW", "ENTRIES", "STATE"), TIMED),
    "calibration.machine_load": {"WAIT_S": TIMING},
    "calibration.measurement": dict.fromkeys(("ROUNDS", "SAMPLE_S"), TIMING),
    "calibration.memory": {"MIB": TIMED},
    "calibration.products": dict.fromkeys(("SECONDS", "MOST_SIDE", "LEAST_SIDE"), TIMED),
    "calibration.progress": {"QUIET_S": TIMING},
    "calibration.reductions": dict.fromkeys(("COLUMNS", "KEYS"), TIMED),
    "ir.indexing_primitives": {"_INT32": EXACT},
    "ir.index_constants": dict.fromkeys(("MOST_ELEMENTS", "MOST_COPIED", "MOST_DIAGONALS"), SEARCH),
    "ir.products": {"MAX_FACTORS": SEARCH, "_LEVEL": CODE},
    "ir.sizes": {"NARROW": "the sizes for which those at the ends of their range stand"},
    "ir.term": {"TIE_CAP": SEARCH},
    "ir.term_graph": {"SCAN_LIMIT": SEARCH},
    "ir.value_numbering": {"LARGEST_CONSTANT": SEARCH},
    "ir.value_analysis": {"MAX_DEPTH": SEARCH},
    "kernel_selection.banded_products": {"BLOCKS": SEARCH},
    "kernel_selection.far_fields.cells": {
        "LEAST_SIDE": EXACT,
        "SPARE": SHAPE,
        "CHUNK": SHAPE,
        "TOGETHER": SHAPE,
    },
    "kernel_selection.far_fields.chebyshev": {"SAFETY": EXACT},
    "kernel_selection.far_fields.evaluation": {"SAMPLED": SHAPE, "ROUNDING": EXACT},
    "kernel_selection.far_fields.radial_terms": {"MOST_TERMS": SEARCH, "MOST_PARTS": SEARCH},
    "kernel_selection.far_fields.selection": {
        "SIDES": SEARCH,
        "MOST_NODES": SEARCH,
        "MOST_ORDER": SEARCH,
        "DRAWN": SEARCH,
    },
    "kernel_selection.folds.fold_price": {"MOST_PAIRS": SEARCH},
    "kernel_selection.folds.named_sizes": {"MOST_DOUBLINGS": SEARCH},
    "kernel_selection.folds.pairwise_terms": {
        "UNROLL": SHAPE,
        "PIECE": SHAPE,
        "LONGEST": SEARCH,
        "LEAST_DOT": SHAPE,
        "MOST_JOINED": SEARCH,
        "LARGEST_TILE": SEARCH,
        "MOST_STEPS": SEARCH,
    },
    "kernel_selection.folds.slices": {"MOST_DEPTH": SEARCH},
    "kernel_selection.folds.sparse_reductions": {"MOST_ELEMENTS": EXACT},
    "kernel_selection.folds.vanishing_gradients": {
        "POINTS": SEARCH,
        "MOST_ELEMENTS": SEARCH,
        "STEEPEST": NUMERICS,
        "NOISE": NUMERICS,
    },
    "kernel_selection.index_numbers": {
        "MOST": SEARCH,
        "LARGEST": EXACT,
        "LEAST_CORNER": SHAPE,
    },
    "kernel_selection.mask_bounds": {"SCAN_LIMIT": SEARCH, "LOW": NUMERICS, "INTEGERS": EXACT},
    "kernel_selection.norms.epilogue": {"MAX_INSIDE": SEARCH},
    "kernel_selection.norms.normalized_operand": dict.fromkeys(
        ("MAX_DEPTH", "MAX_PARTS", "MAX_FACTORS"), SEARCH
    ),
    "kernel_selection.norms.selection": {"MOST_PARTS": SHAPE, "STARTS": SEARCH},
    "kernel_selection.partial_sort": {"MAX_LENGTH": EXACT},
    "kernel_selection.scans.carry_partition": {"EARLY": CODE},
    "kernel_selection.scans.matrix_scan": {"TIME": CODE, "STATES_WRITTEN": SHAPE},
    "kernel_selection.scans.selection": {"MAX_PARTS": SEARCH},
    "kernel_selection.scans.matrix_state": {"MAX_TERMS": SEARCH},
    "loops.associative_scan_detection": {"MIN_LENGTH": SEARCH, "POINTS": CODE},
    "loops.associative_scan_gradients": {"MAX_CANDIDATES": SEARCH},
    "loops.differentiated_loops": {"MOST_CHOICES": SEARCH, "MOST_SUNK": SEARCH},
    "loops.exact_steps": {"POINTS": EXACT, "RANKS": EXACT, "END": CODE, "NAN": CODE},
    "loops.fusion": {"MAX_DEPTH": SEARCH},
    "loops.joined_invariants": {"FEW_STEPS": SURE},
    "loops.loop_reading": {"MAX_COUNTED": SEARCH},
    "loops.monoid_carries": {"COUNT": CODE, "MOST_EQUATIONS": SEARCH},
    "loops.prime_field": {"BITS": CODE},
    "loops.product_splitting": {"MAX_PARTS": SEARCH},
    "loops.rerolling": {"MAX_READ": SEARCH, "MAX_APART": SEARCH},
    "loops.stream_folds": {"KERNELS": SHAPE},
    "loops.unrolled_detection": dict.fromkeys(
        ("MIN_STEPS", "MAX_DISTANCES", "MULTIPLES", "MAX_DEPTH"), SEARCH
    ),
    "loops.program_partition": {
        "MEMORY": "a promise: what a gradient keeps against plain reverse mode"
    },
    "loops.sunk_operands": {"MAX_DEPTH": SEARCH, "LEAST_RATIO": SEARCH},
    "proofs.algebra.arithmetic": dict.fromkeys(("MOST_CASES", "MOST_POWER", "MOST_TERMS"), SEARCH),
    "proofs.algebra.power_sums": {"MOST_POWER": SEARCH},
    "proofs.algebra.trigonometry": {"MOST_ANGLES": SEARCH, "MOST_MULTIPLE": SEARCH},
    "proofs.checks": {"MOST_INPUTS": SEARCH, "READING_TOLERANCE": NUMERICS},
    "proofs.evaluation": {
        "MOST_ELEMENTS": SEARCH,
        "MOST_STEPS": SEARCH,
        "POINTS": SEARCH,
        "TOLERANCE": NUMERICS,
    },
    "proofs.algebra.exact_numbers": dict.fromkeys(
        ("DIGITS", "EXACT", "LARGEST_ROOT", "ROUNDING"), NUMERICS
    ),
    "proofs.algebra.forms": {"FIRST_NAME": CODE, "ONE": CODE, "TIES": SEARCH},
    "proofs.reading.lifting": {"_CONDITIONED": CODE},
    "proofs.notation": {"MOST_CHARACTERS": "the length of a text"},
    "proofs.reading.opened_loops": {"MOST_LOOPS": SEARCH},
    "proofs.reading.normal_forms": {"ROUNDS": SEARCH},
    "proofs.proving": {"LAWS_PER_NODE": SEARCH},
    "proofs.algebra.reductions": {"MOST_ENTRIES": SEARCH, "MOST_OPENED": SEARCH},
    "proofs.algebra.sign_cases": {"MOST_BOUNDS": SEARCH, "MOST_CELLS": SEARCH},
    "proofs.samples": {"MOST_WORK": SEARCH},
    "rewriting.contraction_order": {"MAX_SQUARED": SEARCH, "ORDERS": SEARCH},
    "rewriting.lemma_matching": {"SUMMED": CODE, "PRIMES": CODE, "MAX_MATCHES": SEARCH},
    "rewriting.rational_powers": {"MOST_QUARTERS": NUMERICS, "GUARD_STEPS": SHAPE},
    "rewriting.route_matching": {"MOST_SINGLE": SEARCH},
    "rewriting.scales": {"NOISE": NUMERICS},
    "rewriting.search_bounds": {
        "FIRST_BOUND": CODE,
        **dict.fromkeys(("MOST_FACTORS", "MOST_PAIRS", "MOST_SHARED"), SEARCH),
    },
    "rules.cancellation": {"MOST_MEETINGS": SEARCH},
    "rules.distributivity": {"MAX_SHARED": SEARCH, "MOST_OPENED": SEARCH},
    "pallas_kernels.backend": {"MOST_ELEMENTS": EXACT, "LEAST_SIDE": SHAPE},
    "pallas_kernels.fold.array_blocks": {"MOST_PLACES": EXACT},
    "pallas_kernels.fold.spec": {"FLUSHED": EXACT},
    "pallas_kernels.fold.tile": {"MOST_COLUMNS": EXACT},
    "pallas_kernels.fold.tiling": dict.fromkeys(
        (
            *("NARROWEST", "NARROW_COLUMNS", "WIDE", "MOST_SPLITS", "COMBINED_COLUMNS"),
            *("ONE_BLOCK", "LOOP_PAIRS"),
        ),
        SHAPE,
    ),
    "pallas_kernels.fold.mosaic": dict.fromkeys(
        ("OLDEST_JAX", "WIDE", "MOST_AXES", "LINE_BYTES", "LEAST_COLS"), SHAPE
    ),
    "pallas_kernels.fold.mosaic_kernel": dict.fromkeys(("ROWS", "STEP", "TILED"), SHAPE),
    "pallas_kernels.fold.triton_kernel": {"LEAST_INNER_BLOCKS": SHAPE},
    "pallas_kernels.index_bounds": {"LARGEST_OFFSET": EXACT, "_LINEAR": CODE},
    "pallas_kernels.norm.cost": dict.fromkeys(("SPLITS", "LEAST_STEPS"), SHAPE),
    "pallas_kernels.positive_factors": {"LEAST_FACTOR": EXACT},
    "pallas_kernels.scan.cost": dict.fromkeys(
        ("BLOCK_BYTES", "LEAST_STEPS", "MOST_STEPS", "TREE_BYTES"), SHAPE
    ),
    "pallas_kernels.scan.matrix_scan": {"CHUNK": SHAPE, "TAME": NUMERICS},
    "pallas_kernels.scan.one_pass": dict.fromkeys(
        ("MOST_STATES", "MOST_LANES", "MOST_WARPS", "RESIDENT"), SHAPE
    ),
    "pallas_kernels.triton_source": {"POINT": SHAPE},
    "pallas_kernels.scan.triton": {"MOST_SUMMED": SHAPE, "TILE": SHAPE},
    "pallas_kernels.triton_memory": {
        "ALIGNMENT": EXACT,
        "SWIZZLED": EXACT,
        "WARP": EXACT,
        "MOST_REGISTERS": SHAPE,
    },
    "text_tables": {"PREFIXES": SHOWN},
}
# Modules that ask for the backend at hand: a kernel runs there or not.
ASK_FOR_BACKEND = {
    "pallas_kernels.backend",
    "pallas_kernels.fold.cudnn",
    "pallas_kernels.norm.tiling",
}
DECIDE = ("reports.program_cost", "reports.builder")  # the other reports show decisions
OUTSIDE = {
    name.removeprefix(f"{PACKAGE}."): path
    for name, path in MODULES.items()
    if not name.removeprefix(f"{PACKAGE}.").startswith(("cost", "testing", "reports"))
    or name.endswith(DECIDE)
}


def constants(tree: ast.Module) -> Iterator[str]:
    """Names in upper case that a module binds to numbers, alone or in tables and tuples."""
    for node in tree.body:
        if not isinstance(node, ast.Assign | ast.AnnAssign) or node.value is None:
            continue
        inner = list(ast.walk(node.value))
        if any(isinstance(n, ast.Name | ast.Attribute | ast.Lambda) for n in inner):
            continue
        if any(isinstance(n, ast.Constant) and _is_number(n.value) for n in inner):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names = (n for t in targets for n in ast.walk(t) if isinstance(n, ast.Name))
            yield from (n.id for n in names if n.id == n.id.upper())


def _is_number(x: object) -> bool:
    return isinstance(x, int | float) and not isinstance(x, bool)


def device_questions(tree: ast.Module) -> list[str]:
    """Comparisons with the name of a device or platform."""
    names = {*DEVICES, "gpu", "cuda"}
    compared = [n for n in ast.walk(tree) if isinstance(n, ast.Compare)]
    return [
        f"line {n.lineno}: {ast.unparse(n)}"
        for n in compared
        for side in (n.left, *n.comparators)
        if any(isinstance(c, ast.Constant) and c.value in names for c in ast.walk(side))
    ]


def margin_literals(tree: ast.Module) -> list[str]:
    """Comparisons with a literal times another value; `abs` says that no prices are compared."""
    found = []
    for n in (n for n in ast.walk(tree) if isinstance(n, ast.Compare)):
        sides = [s for s in (n.left, *n.comparators) if isinstance(s, ast.BinOp)]
        factors = [f for s in sides if isinstance(s.op, ast.Mult) for f in (s.left, s.right)]
        literal = any(isinstance(f, ast.Constant) and isinstance(f.value, float) for f in factors)
        names = {c.id for c in ast.walk(n) if isinstance(c, ast.Name)}
        if literal and "abs" not in names:
            found.append(f"line {n.lineno}: {ast.unparse(n)}")
    return found


def test_no_module_holds_a_figure_of_a_device() -> None:
    found = {module: set(constants(parse(path))) for module, path in OUTSIDE.items()}
    added = {m: names - EXCEPTIONS.get(m, {}).keys() for m, names in found.items()}
    assert {m: names for m, names in added.items() if names} == {}, "see cost/profile_groups"
    unused = {m: EXCEPTIONS[m].keys() - names for m, names in found.items() if m in EXCEPTIONS}
    assert {m: names for m, names in unused.items() if names} == {}, "no exception is needed"


def test_exceptions_are_of_modules() -> None:
    assert EXCEPTIONS.keys() - OUTSIDE.keys() == set()
    assert ASK_FOR_BACKEND - OUTSIDE.keys() == set()


def test_no_module_asks_which_device_it_is() -> None:
    asked = {module: device_questions(parse(path)) for module, path in OUTSIDE.items()}
    assert {m: lines for m, lines in asked.items() if lines}.keys() == ASK_FOR_BACKEND, asked


def test_no_module_compares_with_a_margin_of_its_own() -> None:
    found = {module: margin_literals(parse(path)) for module, path in OUTSIDE.items()}
    assert {m: lines for m, lines in found.items() if lines} == {}


def groups(part: Any) -> Iterator[Any]:
    """A profile and its groups."""
    yield part
    for f in dataclasses.fields(part):
        if dataclasses.is_dataclass(value := getattr(part, f.name)):
            yield from groups(value)


@pytest.mark.parametrize("device", DEVICES.values(), ids=lambda d: d.name)
def test_every_figure_has_unit_meaning_and_source(device: Device) -> None:
    for group in groups(device):
        for f in dataclasses.fields(group):
            where, about = f"{type(group).__name__}.{f.name}", f.metadata
            assert about.get("unit") and about.get("meaning"), where
            source = about["source"]
            assert source in SOURCES or (ROOT / source).is_file(), f"{where}: {source}"
            value = getattr(group, f.name)
            if about["unit"] == "yes/no":
                assert isinstance(value, bool), where
            if isinstance(value, bool):
                assert about["unit"] == "yes/no", where


def test_every_kind_has_a_margin() -> None:
    for kind in get_args(profile_groups.Kind):
        assert margins.margin(kind, CPU) >= 1


def test_margins_decide() -> None:
    assert margins.pays(1.3, 1.0, "rewrite", CPU)
    assert not margins.pays(1.2, 1.0, "rewrite", CPU)
    assert margins.gains_share(3.1, 100.0, "program", CPU)
    assert not margins.gains_share(2.9, 100.0, "program", CPU)


# The checks of sources pass on a clean tree whatever they do; these show that each can fail.
def test_figures_are_found() -> None:
    source = "RATE = 4e9\nA, B = 1, 2\nT: dict = {'x': 3}\nnames = 3\nF = g(3)\nS = 'text'\n_E = -1"
    assert list(constants(ast.parse(source))) == ["RATE", "A", "B", "T", "_E"]


@pytest.mark.parametrize(
    "source",
    ["device.name == 'cpu'", "device != 'h200'", "x if d.name in ('cpu', 'l4') else y"],
)
def test_device_questions_are_found(source: str) -> None:
    assert device_questions(ast.parse(source))


@pytest.mark.parametrize("source", ["before < 1.25 * after", "0.8 * whole >= folded"])
def test_margin_literals_are_found(source: str) -> None:
    assert margin_literals(ast.parse(source))
