"""Compiling for an H200 without one (the description of the device lies beside this file)."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import pytest
from jax.experimental import topologies
from jax.sharding import AbstractDevice, AbstractMesh, NamedSharding, PartitionSpec

DEVICE = Path(__file__).with_name("h200.txtpb")
TO_RUN = (
    "needs the CUDA compiler: pip install jax-cuda12-plugin jax-cuda12-pjrt (both of jax's "
    "version) nvidia-cuda-nvcc-cu12"
)


@pytest.fixture(scope="session")
def compile_h200() -> Callable[..., Any]:
    """`compile_h200(f, *avals)`: `f` for an H200; an error if a kernel spills registers."""
    try:
        topology = topologies.get_topology_desc(
            platform="cuda",
            topology_name="",
            topology="1x1x1",
            target_config=DEVICE.read_text(),
        )
    except Exception as error:
        pytest.skip(f"{TO_RUN} ({type(error).__name__})")
    sharding = NamedSharding(topologies.make_mesh(topology, (1,), ("x",)), PartitionSpec())
    device = AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="cuda")
    mesh = AbstractMesh((), (), (), abstract_device=device)

    def compiled(f: Callable, *avals: Any, may_spill: bool = False) -> Any:
        placed = [jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding) for a in avals]
        with jax.sharding.use_abstract_mesh(mesh):  # Pallas from jax 0.11 on needs it
            lowered = jax.jit(f).trace(*placed).lower(lowering_platforms=("cuda",))
        return lowered.compile(
            compiler_options={"xla_gpu_fail_ptx_compilation_on_register_spilling": not may_spill}
        )

    return compiled
