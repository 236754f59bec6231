"""Compiling for GPUs without one; descriptions of the devices lie beside this file.

`l4.txtpb` is `h200.txtpb` with what differs on an L4: compute capability 8.9, 58 multiprocessors of
1,536 threads with 100 KB of shared memory, of which a block may have 99; 24 GB at 300 GB/s, 48 MiB
of L2 (NVIDIA's data sheet; CUDA C++ Programming Guide, technical specifications). A10, L40S and the
GeForce cards of these generations have as much shared memory for a block.
"""

import functools
import importlib.util
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import pytest
from jax.experimental import topologies
from jax.sharding import AbstractDevice, AbstractMesh, NamedSharding, PartitionSpec

DEVICES = Path(__file__).parent
TO_RUN = (
    "needs the CUDA compiler: make test-aot, or pip install jax-cuda12-plugin jax-cuda12-pjrt "
    "(both of jax's version) nvidia-cuda-nvcc-cu12"
)


def lower(jitted: Any, avals: Sequence[Any], platform: str = "cuda", kind: str = "H200") -> Any:
    """Lowered as for a GPU; from jax 0.11 on Pallas wants to be told of the device."""
    with described(kind):
        return jitted.trace(*avals).lower(lowering_platforms=(platform,))


def described(kind: str) -> Any:
    """Return a context in which traces know the GPU that they are for."""
    cores = int(re.findall(r"core_count: (\d+)", target(kind))[0])
    device = AbstractDevice(device_kind=f"NVIDIA {kind}", num_cores=cores, platform="cuda")
    return jax.sharding.use_abstract_mesh(AbstractMesh((), (), (), abstract_device=device))


def target(kind: str) -> str:
    """The description of a GPU that XLA compiles for."""
    return DEVICES.joinpath(f"{kind.lower()}.txtpb").read_text()


@pytest.fixture(scope="session", name="lower")
def lower_fixture() -> Callable[..., Any]:
    """`lower(jitted, avals, platform, kind)`."""
    return lower


@pytest.fixture(scope="session", name="described")
def described_fixture() -> Callable[..., Any]:
    """`with described(kind):`."""
    return described


def compiler(kind: str, shared_bytes: int | None = None) -> Callable[..., Any]:
    """`compiled(f, *avals)` for a GPU, with some bytes of shared memory for a block if given."""
    if not any(importlib.util.find_spec(f"jax_cuda{n}_plugin") for n in (12, 13)):
        pytest.skip(TO_RUN)
    text = target(kind)
    if shared_bytes is not None:
        text = re.sub(r"(shared_memory_per_block(_optin)?): \d+", rf"\1: {shared_bytes}", text)
    topology = topologies.get_topology_desc(
        platform="cuda", topology_name="", topology="1x1x1", target_config=text
    )
    sharding = NamedSharding(topologies.make_mesh(topology, (1,), ("x",)), PartitionSpec())

    def compiled(
        f: Callable, *avals: Any, may_spill: bool = False, dump_to: Path | None = None
    ) -> Any:
        placed = [jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding) for a in avals]
        options: dict[str, Any] = {
            "xla_gpu_fail_ptx_compilation_on_register_spilling": not may_spill
        }
        if dump_to is not None:
            options |= {"xla_dump_to": str(dump_to), "xla_dump_emitter_re": "ptx"}  # no other text
        return lower(jax.jit(f), placed, kind=kind).compile(compiler_options=options)

    return compiled


@pytest.fixture(scope="session")
def compiler_of() -> Callable[..., Any]:
    """`compiler_of(kind)(f, *avals)`: `f` for a GPU; an error if a kernel spills registers."""
    return functools.cache(compiler)


@pytest.fixture(scope="session")
def compile_h200() -> Callable[..., Any]:
    """`compile_h200(f, *avals)`: `f` for an H200; an error if a kernel spills registers."""
    return compiler("H200")


@pytest.fixture(scope="session")
def compile_l4() -> Callable[..., Any]:
    """`compile_l4(f, *avals)`: `f` for an L4; an error if a kernel spills registers."""
    return compiler("L4")


@pytest.fixture(scope="session")
def shared_memory() -> Callable[..., int]:
    """`shared_memory(kind, f, *avals)`: bytes that a kernel asks for, 0 if a few are enough."""
    compilers = {}

    def asked(kind: str, f: Callable, *avals: Any) -> int:
        if kind not in compilers:
            compilers[kind] = compiler(kind, shared_bytes=1)
        try:
            compilers[kind](f, *avals, may_spill=True)
        except jax.errors.JaxRuntimeError as error:
            found = re.search(r"[Ss]hared memory.*?(\d{3,})", str(error))
            if found is None:
                raise
            return int(found[1])
        return 0

    return asked
