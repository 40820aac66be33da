"""Rows for the TPU kernels: how stored entries are fetched row by row into VMEM, and how they become numbers there.

An array of entries is held as [G, B, U, R, L]: U units of R * L numbers or bytes that one DMA fetches, each holding `share`
entries. Plain numbers: one entry per unit. Packed fp4 of 512 channels: two entries' codes, or sixteen entries' scales.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kernels_pallas import formats, storage
from kernels_pallas.dispatch import tuned
from kernels_pallas.formats import Format
from kernels_pallas.products import dot
from kernels_pallas.storage import LANES, Entries, Packed

UNROLL = 8  # row copies started per loop turn


@dataclasses.dataclass(frozen=True)
class Layout:
    """Static description of the arrays behind stored entries."""

    shares: tuple[int, ...]  # entries per unit, for each array
    units: tuple[tuple[int, ...], ...]  # (R, L) of each array
    dtypes: tuple[Any, ...]
    width: int
    fmt: Format | None  # None: plain numbers

    def buffers(self, *lead: int) -> list[Any]:
        """VMEM for rows of every array."""
        return [pltpu.VMEM((*lead, *unit), dtype) for unit, dtype in zip(self.units, self.dtypes, strict=True)]


def lay_out(entries: Entries) -> tuple[Layout, list[jax.Array]]:
    """The layout and the arrays [G, B, U, R, L]; free for what `check` lets through, a copy otherwise (interpreter only)."""
    if isinstance(entries, Packed):
        arrays, shares = [], []
        for a, size in ((entries.codes, entries.code_bytes), (entries.scales, entries.scale_bytes)):
            if a.ndim == 4:  # one entry per unit
                a = a[:, :, :, None, :]
            arrays.append(a)
            shares.append(math.prod(a.shape[3:]) // size)
        fmt: Format | None = entries.fmt
    else:
        arrays = [entries if entries.ndim == 5 else in_rows(entries)]
        shares, fmt = [1], None
    units = tuple((a.shape[3], a.shape[4]) for a in arrays)
    width = storage.shape(entries)[3]
    return Layout(tuple(shares), units, tuple(a.dtype for a in arrays), width, fmt), arrays


def in_rows(a: jax.Array) -> jax.Array:
    """[..., H] with the width cut in rows of 128 where that is possible, [..., R, L]."""
    lanes = LANES if a.shape[-1] % LANES == 0 else a.shape[-1]
    return a.reshape(*a.shape[:-1], a.shape[-1] // lanes, lanes)


# ---- moving rows ----


def start_rows(sources: list[Any], buffers: list[Any], slot: Any, sems: Any, shares: tuple[int, ...], ids: Any) -> None:
    """Start fetching the unit of every id into its row of the buffers; the row of an absent one (-1) becomes zero.

    sources: refs [U, R, L] in HBM. buffers: refs [2, K, R, L] in VMEM. ids: SMEM ref [1, 1, K].
    """

    def start(j: jax.Array, carry: None) -> None:
        entry = ids[0, 0, j]

        @pl.when(entry >= 0)
        def _() -> None:
            for a, (source, buffer) in enumerate(zip(sources, buffers, strict=True)):
                unit = entry if shares[a] == 1 else entry // shares[a]
                pltpu.make_async_copy(source.at[unit], buffer.at[slot, j], sems.at[slot, a]).start()

        @pl.when(entry < 0)
        def _() -> None:
            for buffer in buffers:
                buffer[slot, j] = jnp.zeros(buffer.shape[2:], buffer.dtype)

        return carry

    rows = ids.shape[2]
    lax.fori_loop(0, rows, start, None, unroll=unrolled(rows))


def unrolled(rows: int) -> int:
    """Of a loop over so many rows."""
    turns = tuned("sparse_attention", "unroll", UNROLL)
    return turns if rows % turns == 0 else 1


def wait_rows(buffers: list[Any], slot: Any, sems: Any, count: jax.Array) -> None:
    """Wait for `count` rows of every buffer. A semaphore counts bytes: one wait per power of two takes them all."""
    for a, buffer in enumerate(buffers):
        wait_bytes(buffer.at[slot], sems.at[slot, a], count)


def wait_bytes(rows: Any, sem: Any, count: jax.Array) -> None:
    """Wait until `count` copies, each of one row of `rows` [K, ...], have signalled `sem`."""
    for bit in range(rows.shape[0].bit_length()):

        @pl.when((count >> bit) & 1 == 1)
        def _(size: int = 1 << bit) -> None:
            some = rows.at[pl.ds(0, size)]
            pltpu.make_async_copy(some, some, sem).wait()


# ---- rows as numbers ----


def numbers(layout: Layout, rows: list[jax.Array], ids: jax.Array | None, dtype: Any) -> jax.Array:
    """Entries [K, H] in `dtype` from fetched rows [K, R, L]; ids int32 [1, K] say which share of its unit an entry is."""
    if layout.fmt is None:
        return rows[0].reshape(rows[0].shape[0], layout.width).astype(dtype)
    assert ids is not None
    codes, scales = (
        _share(flat, _column_of(ids), share)
        for flat, share in zip((_flat(row) for row in rows), layout.shares, strict=True)
    )
    fmt = layout.fmt
    if fmt.element == "e2m1":
        elements = jnp.concatenate([formats.e2m1_values(codes & 15), formats.e2m1_values(codes >> 4)], axis=1)
    else:
        elements = formats.e4m3_values(codes)
    # Each scale is spread over its group by a 0/1 product, exact for numbers of at most 8 bits.
    group = lax.broadcasted_iota(jnp.int32, (scales.shape[1], layout.width), 0)
    channel = lax.broadcasted_iota(jnp.int32, group.shape, 1)
    spread = (channel // fmt.group == group).astype(jnp.float32)
    if fmt.power_of_two:
        exponent = dot(scales.astype(jnp.float32), spread, 1, 0).astype(jnp.int32) - 127
        return formats.scale_exactly(elements, exponent).astype(dtype)
    return (elements * dot(formats.e4m3_values(scales), spread, 1, 0)).astype(dtype)


def _flat(row: jax.Array) -> jax.Array:
    return row.astype(jnp.int32).reshape(row.shape[0], row.shape[1] * row.shape[2])


def _column_of(ids: jax.Array) -> jax.Array:
    return column(ids.astype(jnp.float32)).astype(jnp.int32)


def _share(flat: jax.Array, ids: jax.Array, share: int) -> jax.Array:
    """[K, X] of unit bytes [K, share * X]: entry `id` is number id % share of its unit."""
    if share == 1:
        return flat
    size = flat.shape[1] // share
    place = jnp.where(ids < 0, 0, lax.rem(ids, share))
    picked = flat[:, :size]
    for s in range(1, share):
        picked = jnp.where(place == s, flat[:, s * size : (s + 1) * size], picked)
    return picked


# ---- small pieces of kernels ----


def column(row: jax.Array) -> jax.Array:
    """[N, 1] of f32 [1, N], exactly, without a transposition: the diagonal of the row repeated downwards."""
    size = row.shape[1]
    return jnp.sum(jnp.where(_eye(size), jnp.broadcast_to(row, (size, size)), 0), axis=1, keepdims=True)


def row(column: jax.Array) -> jax.Array:
    """[1, N] of f32 [N, 1]; the inverse of `column`."""
    size = column.shape[0]
    return jnp.sum(jnp.where(_eye(size), jnp.broadcast_to(column, (size, size)), 0), axis=0, keepdims=True)


def _eye(size: int) -> jax.Array:
    return lax.broadcasted_iota(jnp.int32, (size, size), 0) == lax.broadcasted_iota(jnp.int32, (size, size), 1)
