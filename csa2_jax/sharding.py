"""How parameters are split over devices: logical axes of every parameter, and rules from logical axes to axes of a mesh.

A rule names the mesh axes that a logical axis may be split over, in the order they are tried; an axis of the mesh is used once
per array, and only where it divides the dimension evenly. What no rule splits is replicated. Pure Python but for
`named_sharding`, so that a plan for any mesh can be printed without devices.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import jax

Rules = Mapping[str, tuple[str, ...]]
Axes = tuple[str | None, ...]

DEFAULT_RULES: Final[Rules] = {
    "experts": ("expert", "model"),
    "expert_hidden": ("model",),
    "heads": ("model",),
    "output_groups": ("model",),
    "index_heads": ("model",),
    "vocab": ("model",),
    "table_rows": ("model", "expert", "data"),
    "table_width": ("model", "expert", "data"),
}
"""Tensor and expert parallelism over "model" (or experts over an axis of their own); n-gram tables over every device there is."""

# Of the axes behind the stack axes; scales have the axes of their weights. The first match counts.
_AXES: Final[tuple[tuple[str, Axes], ...]] = (
    (r"(^|\.)embed\.weight$", ("vocab", "model")),
    (r"(^|\.)head\.weight$", ("vocab", "model")),
    (r"\.markov_(embed|head)\.weight$", ("vocab", None)),
    (r"^engram_tables\.\d+\.", ("table_rows", "table_width")),
    (r"\.attn\.wq_b\.", ("heads", "query_rank")),
    (r"\.attn\.wo_a\.", ("output_groups", None)),
    (r"\.attn\.wo_b\.", ("model", "output_groups")),
    (r"\.attn\.attn_sink$", ("heads",)),
    (r"^indexers\.wq_b\.", ("index_heads", "query_rank")),
    (r"^indexers\.weights_proj\.", ("index_heads", "model")),
    (r"\.shared_experts\.w[13]\.", ("expert_hidden", "model")),
    (r"\.shared_experts\.w2\.", ("model", "expert_hidden")),
    (r"\.experts\.w[13]\.", ("experts", "expert_hidden", "model")),
    (r"\.experts\.w2\.", ("experts", "model", "expert_hidden")),
)


def logical_axes(path: str, ndim: int) -> Axes:
    """Logical axis of every dimension of a stacked parameter; None where it has no name that rules speak about."""
    for pattern, axes in _AXES:
        if re.search(pattern, path):
            return (*("layers",) * (ndim - len(axes)), *axes)
    return (None,) * ndim


def partition(
    path: str, shape: tuple[int, ...], mesh: Mapping[str, int], rules: Rules | None = None
) -> tuple[tuple[str, ...], ...]:
    """Mesh axes that each dimension is split over, () where it is not; `mesh` gives the size of each of its axes."""
    rules = DEFAULT_RULES if rules is None else rules
    used: set[str] = set()
    found = []
    for size, axis in zip(shape, logical_axes(path, len(shape)), strict=True):
        chosen: list[str] = []
        pieces = 1
        for name in rules.get(axis, ()) if axis is not None else ():
            if name in mesh and name not in used and mesh[name] > 1 and size % (pieces * mesh[name]) == 0:
                chosen.append(name)
                pieces *= mesh[name]
                if axis not in ("table_rows", "table_width"):
                    break  # one axis of the mesh is enough, except for tables, which are as large as all the rest
        used.update(chosen)
        found.append(tuple(chosen))
    return tuple(found)


def pieces(axes: tuple[tuple[str, ...], ...], mesh: Mapping[str, int]) -> tuple[int, ...]:
    """Into how many pieces `partition`'s axes split each dimension."""
    counts = []
    for names in axes:
        count = 1
        for name in names:
            count *= mesh[name]
        counts.append(count)
    return tuple(counts)


def named_sharding(
    path: str, shape: tuple[int, ...], mesh: jax.sharding.Mesh, rules: Rules | None = None
) -> jax.sharding.NamedSharding:
    """Where one parameter goes on a mesh."""
    from jax.sharding import NamedSharding, PartitionSpec

    axes = partition(path, shape, dict(mesh.shape), rules)
    return NamedSharding(mesh, PartitionSpec(*(names or None for names in axes)))


def parse_mesh(text: str) -> dict[str, int]:
    """`data=2,model=8` as axis sizes; ValueError naming what cannot be read."""
    mesh: dict[str, int] = {}
    for part in text.split(","):
        name, _, size = part.strip().partition("=")
        if not name.isidentifier() or not size.isdigit() or int(size) < 1 or name in mesh:
            raise ValueError(
                f"mesh {text!r}: {part!r} must be axis=size with a size from 1, each axis once, as in data=2,model=8"
            )
        mesh[name] = int(size)
    known = {name for names in DEFAULT_RULES.values() for name in names}
    if unknown := [name for name in mesh if name not in known]:
        raise ValueError(f"mesh {text!r}: no rule speaks of axis {unknown[0]!r}; axes are {', '.join(sorted(known))}")
    return mesh
