"""Sparse attention on a GPU (Pallas Triton): forward in `gpu_forward`, backward in `gpu_backward`; here what is chosen per call.

Compiled for sm_90 (H100, H200) and sm_100 (B200), not run on either. The tiles are the largest that fit there: on sm_90 a tile
of 64 rows of 512 channels takes 64 KiB of shared memory, twice, beside 64 KiB of queries; on sm_100 the tensor memory holds
the sums of 64 heads and the scores of 32 rows.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from kernels_pallas import checks, dispatch
from kernels_pallas.dispatch import Unsupported
from kernels_pallas.sparse_attention import gpu_backward, gpu_forward
from kernels_pallas.sparse_attention.gpu_forward import Static, Tiles
from kernels_pallas.sparse_attention.gpu_rows import lay_out
from kernels_pallas.storage import Entries, Packed

PROGRAMS = 132  # that a GPU takes at once (its multiprocessors): calls with fewer share the rows of a query
MAX_WIDTH = 512  # of a row, whose sums are held in registers
HOPPER = ("H100", "H200", "H800", "H20", "GH200")
HOPPER_ROWS, OTHER_ROWS = 64, 32  # of a block
WARPS = 8
INTERPRETED = Tiles(heads=16, rows=16, warps=4, stages=1)
INTERPRETED_PROGRAMS = 2  # few, so that only single queries are split, which takes a second kernel


def check(
    q_BTNH: jax.Array,
    window_BSH: Entries,
    first_BT: jax.Array,
    sink_N: jax.Array,
    pool_GBPH: Entries | None,
    group: jax.Array | int,
    selection_BTK: jax.Array | None,
    *,
    window: int,
    scale: float,
    causal: bool,
    interpret: Any,
) -> None:
    """Unsupported for widths and byte arrays that the hardware path cannot take."""
    del first_BT, sink_N, group, selection_BTK, window, scale, causal
    checks.without_tail(window_BSH, pool_GBPH)
    if interpret:
        return
    width = q_BTNH.shape[3]
    if width != pl.next_power_of_2(width) or not 16 <= width <= MAX_WIDTH:
        raise Unsupported(f"{width=} must be a power of two from 16 to {MAX_WIDTH} on a GPU: pad the heads with zeros")
    for entries in (window_BSH, pool_GBPH):
        if not isinstance(entries, Packed):
            continue
        bytes_ = [entries.scales, *([entries.codes] if entries.fmt.element == "e4m3" else [])]
        for a in bytes_:
            if (
                2**31 < a.size <= 2**32
            ):  # Pallas would index it by signed 32 bits; below they suffice, above it takes 64
                raise Unsupported(f"{a.shape=} holds {a.size} bytes; from 2 to 4 GiB are out of reach: split the stack")


def run(
    q_BTNH: jax.Array,
    window_BSH: Entries,
    first_BT: jax.Array,
    sink_N: jax.Array,
    pool_GBPH: Entries | None,
    group: jax.Array | int,
    selection_BTK: jax.Array | None,
    *,
    window: int,
    scale: float,
    causal: bool,
    interpret: Any = False,
) -> tuple[jax.Array, jax.Array]:
    """(o_BTNH, lse_BTN); see the door."""
    static, stored = _plan(
        q_BTNH, window_BSH, pool_GBPH, selection_BTK, window=window, scale=scale, causal=causal, interpret=interpret
    )
    picks = [] if selection_BTK is None else [selection_BTK]
    arrays = [q_BTNH, first_BT, sink_N.astype(jnp.float32), *picks, *stored]
    return gpu_forward.forward(static, jnp.asarray(group, jnp.int32), arrays)


def backward(
    q_BTNH: jax.Array,
    window_BSH: jax.Array,
    first_BT: jax.Array,
    sink_N: jax.Array,
    pool_GBPH: jax.Array | None,
    group: jax.Array | int,
    selection_BTK: jax.Array | None,
    do_BTNH: jax.Array,
    lse_BTN: jax.Array,
    shift_BTN: jax.Array,
    *,
    window: int,
    scale: float,
    causal: bool,
    interpret: Any = False,
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """Cotangents (dq in q's dtype, dwindow f32 [B, S, H], dpool f32 [G, B, P, H] or None) of plain rows; see `vjp`."""
    del sink_N
    static, stored = _plan(
        q_BTNH, window_BSH, pool_GBPH, selection_BTK,
        window=window, scale=scale, causal=causal, interpret=interpret, forward=False,
    )  # fmt: skip
    picks = [] if selection_BTK is None else [selection_BTK]
    arrays = [q_BTNH, do_BTNH, first_BT, lse_BTN, shift_BTN, *picks, *stored]
    return gpu_backward.backward(static, jnp.asarray(group, jnp.int32), arrays)


def _plan(
    q_BTNH: jax.Array,
    window_BSH: Entries,
    pool_GBPH: Entries | None,
    selection_BTK: jax.Array | None,
    *,
    window: int,
    scale: float,
    causal: bool,
    interpret: Any,
    forward: bool = True,
) -> tuple[Static, list[jax.Array]]:
    """Sizes, layouts and tiles, and the arrays of window and pool."""
    batch, tokens, heads, width = q_BTNH.shape
    rows, window_arrays = lay_out(window_BSH if isinstance(window_BSH, Packed) else window_BSH[None])
    pool, pool_arrays = lay_out(pool_GBPH) if pool_GBPH is not None else (None, [])
    if interpret:
        programs, tiles = INTERPRETED_PROGRAMS, dataclasses.replace(INTERPRETED, parts=1 if forward or width % 2 else 2)
    else:
        programs, tiles = PROGRAMS, _tiles(heads, q_BTNH.dtype, window_arrays + pool_arrays, forward)
    static = Static(
        batch=batch,
        tokens=tokens,
        heads=heads,
        width=width,
        topk=0 if selection_BTK is None else selection_BTK.shape[2],
        reach=min(window, rows.entries) if causal else rows.entries,
        causal=causal,
        scale=scale,
        dtype=q_BTNH.dtype,
        interpret=bool(interpret),
        window=rows,
        pool=pool,
        tiles=tiles,
    )
    blocks = pl.cdiv(static.reach, static.tiles.rows) + pl.cdiv(static.topk, static.tiles.rows)
    if tiles.splits == 0:
        splits = max(1, min(programs // static.grid[0], blocks))
        static = dataclasses.replace(static, tiles=dataclasses.replace(tiles, splits=splits))
    return static, [*[a.reshape(a.shape[1:]) for a in window_arrays], *pool_arrays]


def _tiles(heads: int, dtype: Any, stored: list[jax.Array], forward: bool) -> Tiles:
    """Tiles for the device at hand: those of its tuned record (fields of `Tiles` under sparse_attention, forward or backward)
    or what fits.
    """
    kind = dispatch.device_kind()
    tuned = dispatch.records().get(kind, {}).get("sparse_attention", {})
    if (tile := tuned.get("forward" if forward else "backward")) is not None:
        return Tiles(**tile)
    if dtype == jnp.float32:  # exact products run outside the tensor cores, on twice the bytes
        return Tiles(heads=16, rows=16, warps=WARPS, stages=2)
    heads = min(max(pl.next_power_of_2(heads), 16), 64)
    if any(a.dtype == jnp.float32 for a in stored):  # fetched at twice the bytes, straight into registers
        return Tiles(heads, OTHER_ROWS, WARPS, stages=1)
    if any(name in kind for name in HOPPER):
        return Tiles(heads, HOPPER_ROWS, WARPS, stages=2 if forward else 1, parts=1 if forward else 2)
    return Tiles(heads, OTHER_ROWS, WARPS, stages=2 if forward else 1)
