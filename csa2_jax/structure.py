"""A module taken apart for jit: a static half hashed once, and the arrays, small ones side by side in one.

A call hands every array over by itself, whatever its size, and a decode step has more norms, biases and scales than matrices. So
the small float arrays [L, ...] of equal L and dtype travel as one array [L, sum of their sizes].
"""

from __future__ import annotations

import collections
import dataclasses
import math
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.core import Tracer

SMALL: Final = 1 << 18  # numbers of an array that travels with others: taking it out again is a copy


class Arrays(NamedTuple):
    """The arrays of a module: those that travel alone, and the joined ones."""

    alone: tuple[Any, ...]
    joined: tuple[Any, ...]


class _Part(NamedTuple):
    """Where an array of the module lies: columns of a joined one, or the place among those that travel alone."""

    bundle: int | None
    start: int
    shape: tuple[int, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class Structure:
    """The static half of a split module, hashed once: jit hashes its static arguments on every call."""

    graphdef: nnx.GraphDef[Any]
    tree: Any  # of the module's state
    parts: tuple[_Part, ...]
    _hash: int

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return self is other or (
            isinstance(other, Structure)
            and self._hash == other._hash
            and (self.parts, self.tree, self.graphdef) == (other.parts, other.tree, other.graphdef)
        )

    @classmethod
    def split(cls, module: nnx.Module) -> tuple[Structure, Arrays]:
        """(structure, arrays) of a module; abstract arrays stay abstract."""
        graphdef, state = nnx.split(module)
        leaves, tree = jax.tree.flatten(state)
        bundles = _bundles(leaves)
        parts: list[_Part] = []
        alone: list[Any] = []
        ends = [0] * len(bundles)
        number = {leaf: b for b, members in enumerate(bundles) for leaf in members}
        for i, leaf in enumerate(leaves):
            b = number.get(i)
            if b is None:
                parts.append(_Part(None, len(alone), leaf.shape))
                alone.append(leaf)
            else:
                parts.append(_Part(b, ends[b], leaf.shape))
                ends[b] += math.prod(leaf.shape[1:])
        arrays = Arrays(tuple(alone), tuple(_join([leaves[i] for i in members]) for members in bundles))
        return cls(graphdef, tree, tuple(parts), hash((graphdef, tuple(parts)))), arrays

    def state(self, arrays: Arrays) -> Any:
        """The module's state again."""

        def leaf(part: _Part) -> Any:
            if part.bundle is None:
                return arrays.alone[part.start]
            columns = slice(part.start, part.start + math.prod(part.shape[1:]))
            return arrays.joined[part.bundle][:, columns].reshape(part.shape)

        return jax.tree.unflatten(self.tree, [leaf(part) for part in self.parts])

    def merge(self, arrays: Arrays) -> Any:
        """The module again."""
        return nnx.merge(self.graphdef, self.state(arrays))


def _bundles(leaves: list[Any]) -> list[list[int]]:
    """Which leaves travel together: small ones of several layers that lie on the same devices, each in full."""
    found: dict[Any, list[int]] = collections.defaultdict(list)
    for i, leaf in enumerate(leaves):
        several = leaf.ndim > 1 and leaf.shape[0] > 1 and math.prod(leaf.shape) <= SMALL
        if several and jnp.issubdtype(leaf.dtype, jnp.floating) and leaf.dtype.itemsize > 1:
            sharding = leaf.sharding if isinstance(leaf, jax.Array) and not isinstance(leaf, Tracer) else None
            if sharding is None or sharding.is_fully_replicated:
                devices = None if sharding is None else frozenset(sharding.device_set)
                found[leaf.shape[0], leaf.dtype, devices].append(i)
    return [members for members in found.values() if len(members) > 1]


def _join(leaves: list[Any]) -> Any:
    def join(*leaves: jax.Array) -> jax.Array:
        return jnp.concatenate([a.reshape(a.shape[0], -1) for a in leaves], axis=1)

    if any(isinstance(a, jax.ShapeDtypeStruct) for a in leaves):
        return jax.eval_shape(join, *leaves)
    return join(*leaves)
