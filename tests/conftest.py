"""Set up every test: one CPU that looks like eight devices, 32 bits, nothing random.

Thousands of small programs are compiled, so XLA compiles them as quickly as it can: it optimises
little, writes loops without MLIR, and leaves a module in one part. XLA_FLAGS that name an
optimisation level are kept, and nothing but the number of devices is added to them.

The environment is set here, before JAX is imported. On a machine with a GPU:
`JAX_PLATFORMS=cuda,cpu python -m pytest -m gpu`.
"""

import collections
import gc
import itertools
import os
import tempfile
from importlib import metadata

DEVICES = 8
TESTS_PER_COLLECTION = 50


def compiler_flags(given: str, jaxlib: str) -> str:
    """Return XLA's flags for the tests, after those given."""
    flags: dict[str, object] = {"xla_force_host_platform_device_count": DEVICES}
    if "xla_backend_optimization_level" not in given:
        flags |= {"xla_backend_optimization_level": 0, "xla_cpu_parallel_codegen_split_count": 1}
        if jaxlib.startswith("0.10."):  # XLA ends the process at a flag that it does not know
            flags["xla_cpu_use_fusion_emitters"] = "false"
        else:  # where loops are always written with MLIR, LLVM's own passes are most of the rest
            flags["xla_backend_extra_options"] = ",".join(
                ["xla_cpu_disable_loop_unrolling", "xla_cpu_disable_slp_vectorizer"]
            )
    added = [f"--{name}={value}" for name, value in flags.items() if name not in given]
    return " ".join([given, *added]).strip()


gc.disable()  # collections took a fifth of the time: garbage is collected between tests
os.environ.setdefault("JAX_PLATFORMS", "cpu")
if os.environ["JAX_PLATFORMS"] == "cpu":  # decisions do not depend on the cores of the machine
    os.environ["SYMJAX_DEVICE"] = "cpu"
_CACHE = tempfile.TemporaryDirectory()  # the user's own is neither read nor written
os.environ["SYMJAX_CACHE_DIR"] = _CACHE.name
os.environ["XLA_FLAGS"] = compiler_flags(
    os.environ.get("XLA_FLAGS", ""), metadata.version("jaxlib")
)

import hypothesis  # noqa: E402
import jax  # noqa: E402
import pytest  # noqa: E402

from symjax_rewrite import jax_internals  # noqa: E402
from symjax_rewrite.api import sym_optimize  # noqa: E402
from tests.pallas_kernels.gpu_compiler import (  # noqa: E402, F401  fixtures of every folder
    compile_h200,
    compile_l4,
    compiler_of,
    described_fixture,
    lower_fixture,
    shared_memory,
)

# Compilation makes deadlines meaningless; the same programs are tried in every run.
hypothesis.settings.register_profile("symjax", deadline=None, derandomize=True)
hypothesis.settings.load_profile("symjax")

_FINISHED = itertools.count(1)


COMPILERS = {"compile_h200", "compile_l4", "shared_memory"}  # fixtures that compile for a GPU


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--share 1/2` (every second test or parameter, from the first on) and `--every`."""
    parser.addoption("--share", default="1/1", help="which part of the tests: K/N")
    parser.addoption("--every", action="store_true", help="sweeps too")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark tests by their needs; leave out sweeps and other shares; put gates first.

    Parameters of a test are shared in turn, and so are tests without parameters of a file. Slow
    tests are not shared: they run at one end of the support range. Nor are tests with a condition,
    which may hold at one end alone.
    """
    part, parts = map(int, str(config.getoption("--share")).split("/"))
    seen: collections.Counter[str] = collections.Counter()
    mine, others = [], []
    for item in items:
        if COMPILERS.intersection(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.compiled)
        if not any(item.get_closest_marker(name) for name in ("cpu", "lowering", "gpu")):
            item.add_marker(pytest.mark.cpu)
        if item.get_closest_marker("sweep") and not config.getoption("--every"):
            others.append(item)
            continue
        test, parameters, _ = item.nodeid.partition("[")
        row = test if parameters else test.partition("::")[0]
        is_shared = not any(item.get_closest_marker(name) for name in ("slow", "skipif"))
        elsewhere = is_shared and seen[row] % parts != part - 1
        (others if elsewhere else mine).append(item)
        seen[row] += 1
    items[:] = sorted(mine, key=lambda item: item.get_closest_marker("gate") is None)
    config.hook.pytest_deselected(items=others)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Exempt modules and collected tests, which live until the end, from garbage collection."""
    collect()


def pytest_runtest_logfinish(nodeid: str) -> None:
    """Collect the garbage of some tests at once."""
    if next(_FINISHED) % TESTS_PER_COLLECTION == 0:
        collect()


def collect() -> None:
    """Collect garbage; objects that are left, mostly caches, are not walked again."""
    gc.collect()
    gc.freeze()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip `gpu` tests where there is none, with the command that runs them."""
    if item.get_closest_marker("gpu") and jax.default_backend() != "gpu":
        pytest.skip("needs an NVIDIA GPU: JAX_PLATFORMS=cuda,cpu python -m pytest -m gpu")


@pytest.fixture(autouse=True)
def _no_internal_errors(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error of ours, of which users see a warning and the original's result, fails a test."""

    def fail(worker: object, error: Exception) -> str:
        raise error

    if not request.node.get_closest_marker("internal_error"):
        monkeypatch.setattr(sym_optimize._Worker, "_keep_or_raise", fail)


@pytest.fixture
def one_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine with one device: XLA partitions no program, so kernels are taken by price."""
    monkeypatch.setattr(jax_internals, "may_be_partitioned", lambda: False)
