"""What a conversion would do, from config.json alone: every tensor of the release, where it goes, and what each device holds."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from csa2_jax.config import ModelConfig
from csa2_jax.conversion.converted import Weights, layout
from csa2_jax.conversion.stacks import Stack, stacks_of
from csa2_jax.manifest import TensorSpec, absent_slots, release_tensors
from csa2_jax.sharding import Rules, logical_axes, partition, pieces


@dataclasses.dataclass(frozen=True)
class Parameter:
    """One stacked parameter (or a tensor that is carried along) and how a mesh splits it."""

    stack: Stack
    axes: tuple[str | None, ...]
    partition: tuple[tuple[str, ...], ...]
    device_bytes: int
    built: bool  # False: carried along for the way back, not part of the text model

    @property
    def tensors(self) -> int:
        """Of the release that fill it."""
        return sum(1 if source.scale is None else 2 for source in self.stack.sources.values())


@dataclasses.dataclass(frozen=True)
class Budget:
    """The whole plan. Bytes are those of storage; a model that computes in f32 widens some small parameters when it loads."""

    config: ModelConfig
    weights: Weights
    mesh: Mapping[str, int]
    tensors: tuple[TensorSpec, ...]
    parameters: tuple[Parameter, ...]

    @property
    def source_bytes(self) -> int:
        """Of the release."""
        return sum(spec.nbytes for spec in self.tensors)

    @property
    def target_bytes(self) -> int:
        """Of the converted checkpoint."""
        return sum(p.stack.nbytes for p in self.parameters)

    @property
    def device_bytes(self) -> int:
        """On each device: the parameters of the text model."""
        return sum(p.device_bytes for p in self.parameters if p.built)

    @property
    def devices(self) -> int:
        """Of the mesh."""
        return math.prod(self.mesh.values())

    def rows(self) -> list[dict[str, Any]]:
        """One JSON value per tensor of the release."""
        of = {}
        for p in self.parameters:
            for source in p.stack.sources.values():
                for spec in (source.weight, source.scale):
                    if spec is not None:
                        of[spec.name] = p
        rows = []
        for spec in self.tensors:
            p = of[spec.name]
            rows.append(
                {
                    "name": spec.name,
                    "dtype": spec.dtype,
                    "shape": list(spec.shape),
                    "bytes": spec.nbytes,
                    "parameter": p.stack.path,
                    "index": list(spec.index),
                    "parameter_shape": list(p.stack.shape),
                    "parameter_dtype": p.stack.dtype.name,
                    "partition": [list(names) for names in p.partition],
                    "parameter_bytes_per_device": p.device_bytes,
                }
            )
        return rows


def budget(
    config: ModelConfig,
    *,
    weights: Weights = "stored",
    mesh: Mapping[str, int] | None = None,
    rules: Rules | None = None,
) -> Budget:
    """Plan the conversion of `config` for a mesh of these axis sizes, one device by default."""
    mesh = dict(mesh or {})
    specs = tuple(release_tensors(config))
    built = {spec.path for spec in specs if spec.path is not None}
    parameters = []
    for path, stack in stacks_of(
        specs, {spec.name: spec for spec in layout(config, weights)}, absent_slots(config)
    ).items():
        split = partition(path, stack.shape, mesh, rules)
        parts = math.prod(pieces(split, mesh))
        parameters.append(
            Parameter(stack, logical_axes(path, len(stack.shape)), split, stack.nbytes // parts, path in built)
        )
    return Budget(config, weights, mesh, specs, tuple(parameters))
