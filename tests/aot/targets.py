"""The devices that kernels are compiled for without one being there: a TPU topology by name, a CUDA card by description.

A TPU compiler knows its chips by name. The CUDA compiler wants the numbers of the card, which are the table `CARDS` below
(vendor data sheets, and the limits of CUDA's compute capabilities). A `Target` gives devices to lower for; nothing runs.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Final, Literal

import jax
from jax.experimental import topologies
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, Mesh, SingleDeviceSharding

GIB: Final = 1 << 30


@dataclasses.dataclass(frozen=True)
class Target:
    """A device to compile for.

    topology: what `jax.experimental.topologies` calls it (TPU), or the key of its card (CUDA).
    memory: bytes of device memory that one program sees. On a tpu7x chip that is half of 192 GiB, one core's.
    mesh: axis sizes (data, model) where a program is compiled for many devices.
    """

    name: str
    platform: Literal["tpu", "cuda"]
    topology: str
    memory: int
    mesh: tuple[int, int] | None = None

    @property
    def implementation(self) -> str:
        """The kernels meant for it."""
        return "pallas_tpu" if self.platform == "tpu" else "pallas_gpu"


@dataclasses.dataclass(frozen=True)
class Card:
    """A CUDA card as its compiler sees it."""

    description: str
    capability: int  # major; minor is 0 for all of these
    multiprocessors: int
    clock_ghz: float
    l2_bytes: int
    memory_bytes: int
    bandwidth: int  # bytes/s


CARDS: Final = {
    "h100": Card("NVIDIA H100 80GB HBM3", 9, 132, 1.98, 50 << 20, 80 * GIB, 3_352_000_000_000),
    "h200": Card("NVIDIA H200", 9, 132, 1.98, 50 << 20, 141 * 10**9, 4_800_000_000_000),
    "b200": Card("NVIDIA B200", 10, 148, 1.965, 126 << 20, 180 * 10**9, 8_000_000_000_000),
}

SINGLE: Final = (
    Target("v5e", "tpu", "v5e:2x2", 16 * GIB),
    Target("v5p", "tpu", "v5p:2x2x1", 95 * GIB),
    Target("v6e", "tpu", "v6e:2x2", 32 * GIB),
    Target("tpu7x", "tpu", "tpu7x:2x2x1", 96 * GIB),
    Target("h100", "cuda", "h100", CARDS["h100"].memory_bytes),
    Target("h200", "cuda", "h200", CARDS["h200"].memory_bytes),
    Target("b200", "cuda", "b200", CARDS["b200"].memory_bytes),
)
MESHES: Final = (Target("v6e-256", "tpu", "v6e:16x16", 32 * GIB, mesh=(32, 8)),)
TARGETS: Final = {target.name: target for target in SINGLE + MESHES}


def text_proto(card: Card) -> str:
    """XLA's GpuTargetConfigProto of a card, in text form.

    What compute capabilities 9.0 and 10.0 have in common: 227 KiB of shared memory for a block that asks for it, of 228 in a
    multiprocessor, 64Ki registers, 128 lanes, 2,048 threads.
    """
    return f"""
gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  threads_per_core_limit: 2048
  shared_memory_per_block: {48 << 10}
  shared_memory_per_block_optin: {227 << 10}
  shared_memory_per_core: {228 << 10}
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  block_dim_limit_x: {2**31 - 1}
  block_dim_limit_y: {2**16 - 1}
  block_dim_limit_z: {2**16 - 1}
  core_count: {card.multiprocessors}
  fpus_per_core: 128
  clock_rate_ghz: {card.clock_ghz}
  l2_cache_size: {card.l2_bytes}
  memory_bandwidth: {card.bandwidth}
  device_memory_size: {card.memory_bytes}
  cuda_compute_capability {{ major: {card.capability} }}
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 7 }}
runtime_version {{ major: 12 minor: 8 }}
device_description_str: "{card.description}"
"""


@functools.cache
def devices(target: Target) -> tuple[Any, ...]:
    """The described devices."""
    if target.platform == "tpu":
        return tuple(topologies.get_topology_desc(platform="tpu", topology_name=target.topology).devices)
    described = topologies.get_topology_desc(
        platform="cuda", topology_name=target.name, topology="1x1x1", target_config=text_proto(CARDS[target.topology])
    )
    return tuple(described.devices)


def device_mesh(target: Target) -> Mesh:
    """The devices of a large target as a mesh with axes data and model."""
    import numpy as np

    if target.mesh is None:
        raise ValueError(f"{target.name} is one device, not a mesh")
    return Mesh(np.array(devices(target)).reshape(target.mesh), ("data", "model"))


def lower(target: Target, function: Callable[..., Any], args: tuple[Any, ...], donate: tuple[int, ...]) -> Any:
    """`function` lowered for the target's device; args are pytrees of ShapeDtypeStruct, placed there unless they say where."""
    device = devices(target)[0]
    home = SingleDeviceSharding(device)
    args = jax.tree.map(
        lambda x: x if x.sharding is not None else jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=home), args
    )
    jitted = jax.jit(function, donate_argnums=donate)
    if target.mesh is not None:  # its devices come with the arguments' shardings
        return jitted.trace(*args).lower(lowering_platforms=(target.platform,))
    # Lowering a kernel asks the mesh around it which chip it is for, where the process has no such chip.
    cores = getattr(device, "num_cores", None) or getattr(device, "core_count", None)
    kind = AbstractDevice(device.device_kind, cores, platform="gpu" if target.platform == "cuda" else "tpu")
    mesh = AbstractMesh((1,), ("_",), axis_types=(AxisType.Auto,), abstract_device=kind)
    with jax.sharding.use_abstract_mesh(mesh):
        return jitted.trace(*args).lower(lowering_platforms=(target.platform,))
