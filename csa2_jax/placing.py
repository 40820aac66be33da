"""Stacks from files onto the devices of a mesh, with host memory for one device's part or less.

A part that several devices hold is read once for all of them. Parts of a table that differ in their columns alone, which lie side
by side in the file, are filled together: rows are read once, a block at a time, and each device gets its columns of the block.
(Columns of smaller arrays are cut out of rows that are read again for every device, from the system's page cache.)
"""

from __future__ import annotations

import collections
import functools
from collections.abc import Mapping
from typing import Any, Final

import jax
import numpy as np
from jax import lax

from csa2_jax.conversion.stacks import Advance, Files, Stack

BLOCK_BYTES: Final = 256 << 20
_Device = Any  # jax.Device, which type checkers do not take for a type
_Bounds = tuple[tuple[int, int], ...]  # (start, stop) of every axis


def place(
    stack: Stack, files: Files, sharding: jax.sharding.Sharding, advance: Advance, block_bytes: int = BLOCK_BYTES
) -> jax.Array:
    """The whole stack as one array of this sharding; this process reads what its own devices hold."""
    holders: dict[_Bounds, list[_Device]] = collections.defaultdict(list)
    order: Mapping[_Device, Any] = sharding.addressable_devices_indices_map(stack.shape)
    for device, region in order.items():
        holders[_bounds(region, stack.shape)].append(device)
    parts: dict[_Device, jax.Array] = {}
    if stack.axes == 0 and len(stack.shape) == 2 and len({columns for _, columns in holders}) > 1:
        by_rows: dict[tuple[int, int], list[tuple[slice, _Device]]] = collections.defaultdict(list)
        for (rows, columns), devices in holders.items():
            by_rows[rows] += [(slice(*columns), device) for device in devices]
        for (start, stop), columns in by_rows.items():
            parts |= _columns(stack, files, start, stop, columns, advance, block_bytes)
    else:
        for bounds, devices in holders.items():
            values = stack.read(files, tuple(slice(*b) for b in bounds), advance)
            parts |= {device: jax.device_put(values, device, may_alias=False) for device in devices}
    return jax.make_array_from_single_device_arrays(stack.shape, sharding, [parts[device] for device in order])


def _columns(
    stack: Stack,
    files: Files,
    first: int,
    last: int,
    columns: list[tuple[slice, _Device]],
    advance: Advance,
    block_bytes: int,
) -> dict[_Device, jax.Array]:
    """Each device's columns of these rows, filled in place on the device, block by block."""
    height = last - first
    step = max(1, min(block_bytes // (stack.shape[1] * stack.dtype.itemsize), height))
    parts: dict[_Device, jax.Array] = {}
    for start in range(first, last, step):
        stop = min(start + step, last)
        block = stack.read(files, (slice(start, stop), slice(0, stack.shape[1])), advance)
        for held, device in columns:
            piece = jax.device_put(np.ascontiguousarray(block[:, held]), device, may_alias=False)
            if start == first:
                parts[device] = _room(piece, height)
            parts[device] = _put(parts[device], piece, start - first)
    return parts


@functools.partial(jax.jit, static_argnums=1)
def _room(piece: jax.Array, height: int) -> jax.Array:
    return jax.numpy.zeros((height, piece.shape[1]), piece.dtype)


@functools.partial(jax.jit, donate_argnums=0)
def _put(part: jax.Array, piece: jax.Array, row: Any) -> jax.Array:
    return lax.dynamic_update_slice_in_dim(part, piece, row, axis=0)


def _bounds(region: tuple[slice, ...], shape: tuple[int, ...]) -> _Bounds:
    return tuple(s.indices(n)[:2] for s, n in zip(region, shape, strict=True))
