"""A run on several devices: parameters and what the optimizer keeps of them split by `csa2_jax.sharding`, rows over "data".

The step itself knows nothing of this: arrays arrive placed, and the compiler follows. A checkpoint does not know it either, so
that a run may go on on another mesh than the one it began on (with the numbers of another order of summation).
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from csa2_jax.sharding import named_sharding, parse_mesh
from train.parameters import Parts
from train.step import Batch, TrainState


@dataclasses.dataclass(frozen=True)
class Placement:
    """Where arrays go; without a mesh, wherever they are."""

    mesh: Mesh | None = None

    @classmethod
    def parse(cls, text: str, rows: int) -> Placement:
        """From "data=2,model=4" ("" for one device). ValueError where devices or rows of a micro-batch do not suffice."""
        if not text:
            return cls()
        sizes = parse_mesh(text)
        count, devices = math.prod(sizes.values()), jax.devices()
        if count > len(devices):
            raise ValueError(f"run.mesh={text!r} takes {count} devices, this process has {len(devices)}")
        if rows % sizes.get("data", 1):
            raise ValueError(f"data.rows={rows} do not divide over data={sizes['data']} of run.mesh={text!r}")
        axes = (AxisType.Auto,) * len(sizes)
        return cls(jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=axes, devices=devices[:count]))

    def parts(self, parts: Parts) -> Parts:
        """The parameters, each where the rules put it."""
        if self.mesh is None:
            return parts
        mesh = self.mesh

        def put(arrays: dict[str, jax.Array]) -> dict[str, jax.Array]:
            return {name: jax.device_put(a, named_sharding(name, a.shape, mesh)) for name, a in arrays.items()}

        return Parts(put(parts.trained), put(parts.loads), put(parts.frozen))

    def state(self, state: TrainState) -> TrainState:
        """A fresh state: what the optimizer keeps of a parameter goes where the parameter is, all else everywhere."""
        if self.mesh is None:
            return state
        everywhere = NamedSharding(self.mesh, PartitionSpec())

        def put(path: Any, leaf: jax.Array) -> jax.Array:
            names = [key.key for key in path if isinstance(key, jax.tree_util.DictKey)]
            like = next((state.trained[name] for name in names if name in state.trained), None)
            return jax.device_put(leaf, everywhere if like is None or like.shape != leaf.shape else like.sharding)

        optimizer = jax.tree.map_with_path(put, state.optimizer)
        return dataclasses.replace(state, step=jax.device_put(state.step, everywhere), optimizer=optimizer)

    def batch(self, batch: Batch) -> Batch:
        """Rows [..., B, T] split over "data", if the mesh has that axis."""
        if self.mesh is None:
            return batch
        axis = "data" if "data" in self.mesh.shape else None

        def put(a: Any) -> jax.Array:
            assert self.mesh is not None
            return jax.device_put(a, NamedSharding(self.mesh, PartitionSpec(*[None] * (a.ndim - 2), axis, None)))

        return jax.tree.map(put, batch)

    def shardings(self, state: TrainState) -> Any:
        """Where the next state is to be: where this one is."""
        return None if self.mesh is None else jax.tree.map(lambda a: a.sharding, state)
