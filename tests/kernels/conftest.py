"""Compiling for an H200 without one (the description of the device lies beside this file)."""

import importlib.util
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import pytest
from jax.experimental import topologies
from jax.sharding import AbstractDevice, AbstractMesh, NamedSharding, PartitionSpec

DEVICE = Path(__file__).with_name("h200.txtpb")
TO_RUN = (
    "needs the CUDA compiler: make test-aot, or pip install jax-cuda12-plugin jax-cuda12-pjrt "
    "(both of jax's version) nvidia-cuda-nvcc-cu12"
)


def lower(jitted: Any, avals: Sequence[Any], platform: str = "cuda") -> Any:
    """Lowered as for an H200; from jax 0.11 on Pallas wants to be told of the device."""
    device = AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="cuda")
    with jax.sharding.use_abstract_mesh(AbstractMesh((), (), (), abstract_device=device)):
        return jitted.trace(*avals).lower(lowering_platforms=(platform,))


@pytest.fixture(scope="session", name="lower")
def lower_fixture() -> Callable[..., Any]:
    """`lower(jitted, avals, platform)`."""
    return lower


@pytest.fixture(scope="session")
def compile_h200() -> Callable[..., Any]:
    """`compile_h200(f, *avals)`: `f` for an H200; an error if a kernel spills registers."""
    if not any(importlib.util.find_spec(f"jax_cuda{n}_plugin") for n in (12, 13)):
        pytest.skip(TO_RUN)
    topology = topologies.get_topology_desc(
        platform="cuda", topology_name="", topology="1x1x1", target_config=DEVICE.read_text()
    )
    sharding = NamedSharding(topologies.make_mesh(topology, (1,), ("x",)), PartitionSpec())

    def compiled(f: Callable, *avals: Any, may_spill: bool = False) -> Any:
        placed = [jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding) for a in avals]
        return lower(jax.jit(f), placed).compile(
            compiler_options={"xla_gpu_fail_ptx_compilation_on_register_spilling": not may_spill}
        )

    return compiled
