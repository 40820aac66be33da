"""Sparse attention on a TPU (Mosaic): one query per step, its rows fetched while the query before is computed.

    step i     wait for the rows of query i          start fetching the rows of query i + 1
               s = q k * scale, joint softmax over window and selection, o, lse

A query's N heads share every row (keys are the values), so its K selected entries are copied once from the pool in HBM into
VMEM, row by row, by DMAs whose addresses come from the selection in SMEM. Two buffers alternate: what query i + 1 needs flies
in while query i is multiplied. Its window is one copy of neighbouring rows. All K + W scores of a query fit in VMEM, hence
the softmax is done at once, as the reference does it, and not in running form.

An absent slot (-1) is not fetched: its row in the buffer is set to zero. Nothing waits for single rows: the semaphore counts
bytes, and one wait per power of two in the number of rows takes them all.

Entries are held as [G, B, P, R, 128], the only layout of bf16 whose rows lie together, or packed in units of 512 bytes; a
width-last pool would be copied whole on every call, so it is refused (the interpreter takes it).
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kernels_pallas import checks
from kernels_pallas.dispatch import Unsupported
from kernels_pallas.products import dot
from kernels_pallas.sparse_attention.tpu_backward import backward
from kernels_pallas.sparse_attention.tpu_plan import Rows, Static, fetch, make_plan, read
from kernels_pallas.sparse_attention.tpu_rows import row
from kernels_pallas.storage import LANES, Entries, Packed

__all__ = ["backward", "check", "run"]


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
    """Unsupported for shapes and storages that the hardware path cannot take."""
    del first_BT, sink_N, group, window, scale, causal
    checks.without_tail(window_BSH, pool_GBPH)
    if interpret:
        return
    heads, width = q_BTNH.shape[2:]
    if width % LANES or heads % 8:
        raise Unsupported(f"{heads=} must be a multiple of 8 and {width=} of {LANES} on a TPU")
    if pool_GBPH is None or selection_BTK is None:
        return
    if selection_BTK.shape[2] % LANES:
        raise Unsupported(f"{selection_BTK.shape=}: the selected entries must be a multiple of {LANES} on a TPU")
    if isinstance(pool_GBPH, Packed):
        if not pool_GBPH.in_units or pool_GBPH.fmt.element != "e2m1" or width != 4 * LANES:
            raise Unsupported(
                "a packed pool on a TPU must hold fp4 entries of 512 channels in units of 512 bytes (storage.pack(..., "
                f"units=True)), found {pool_GBPH.fmt.element} of {width=}, codes {pool_GBPH.codes.shape}"
            )
    elif pool_GBPH.ndim != 5:
        raise Unsupported(
            f"pool_GBPH.shape={pool_GBPH.shape} would be copied whole on every call: hold it as [G, B, P, H // 128, 128]"
        )


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
    static, scalars, sources = make_plan(
        q_BTNH,
        window_BSH,
        first_BT,
        pool_GBPH,
        selection_BTK,
        window=window,
        scale=scale,
        causal=causal,
        parts=2 if q_BTNH.shape[0] * q_BTNH.shape[1] % 2 == 0 else 1,
    )
    queries, heads, width = static.queries, static.heads, static.width
    o, lse = pl.pallas_call(
        functools.partial(_kernel, static),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=static.grid,
            in_specs=[
                *static.scalar_specs(),
                static.per_query(heads, width),
                pl.BlockSpec((heads, 1), lambda i, *_: (0, 0)),
                *static.source_specs(),
            ],
            out_specs=[static.per_query(heads, width), static.per_query(1, heads)],
            scratch_shapes=static.scratch(),
        ),
        out_shape=[
            jax.ShapeDtypeStruct((queries, heads, width), q_BTNH.dtype),
            jax.ShapeDtypeStruct((queries, 1, heads), jnp.float32),
        ],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
        interpret=interpret,
        name="sparse_attention",
    )(
        jnp.asarray(group, jnp.int32).reshape(1),
        *scalars,
        q_BTNH.reshape(queries, heads, width),
        sink_N.astype(jnp.float32).reshape(heads, 1),
        *sources,
    )
    return o.reshape(q_BTNH.shape), lse.reshape(q_BTNH.shape[:3])


def _kernel(static: Static, group_ref: Any, *refs: Any) -> None:
    """One query.

    Prefetch: group [1].
    Input: scalars and selection of this step and the next; q [N, H], sink [N, 1]; in HBM window [B, S, R, L] and
        pool [G, B, U, R, L].
    Output: o [N, H], lse [1, N].
    Scratch: rows of window and pool, two buffers each, and their semaphores.
    """
    refs_left = list(refs)
    scalars = static.take(refs_left)
    q_ref, sink_ref = refs_left[:2]
    count = len(static.source_specs())
    sources, (o_ref, lse_ref), scratch = (
        refs_left[2 : 2 + count],
        refs_left[2 + count : 4 + count],
        refs_left[4 + count :],
    )
    slot = fetch(static, group_ref[0], scalars, sources, scratch)
    rows = read(static, scalars, slot, scratch)
    o_ref[...], lse_ref[...] = attend(static, q_ref[...], sink_ref[...], rows)


def attend(static: Static, q_NH: jax.Array, sink_N1: jax.Array, rows: Rows) -> tuple[jax.Array, jax.Array]:
    """(o [N, H], lse [1, N]): the joint softmax, as the reference does it."""
    scores = [_scores(static, q_NH, rows.window_WH, rows.seen_1W)]
    if rows.pool_KH is not None and rows.picked_1K is not None:
        scores.append(_scores(static, q_NH, rows.pool_KH, rows.picked_1K))
    peak = functools.reduce(jnp.maximum, [jnp.max(s, axis=1, keepdims=True) for s in scores])
    empty = peak == -jnp.inf
    peak = jnp.where(empty, 0.0, peak)
    weights = [jnp.exp(s - peak) for s in scores]
    total = functools.reduce(jnp.add, [jnp.sum(w, axis=1, keepdims=True) for w in weights])
    numerator = dot(weights[0].astype(static.dtype), rows.window_WH, 1, 0)
    if rows.pool_KH is not None:
        numerator += dot(weights[1].astype(static.dtype), rows.pool_KH, 1, 0)
    o_NH = numerator / (total + jnp.exp(jnp.where(empty, 0.0, sink_N1) - peak))
    peak = jnp.where(empty, sink_N1, peak)
    ceiling = jnp.maximum(jnp.maximum(peak, sink_N1), -1e30)
    lse = ceiling + jnp.log(total * jnp.exp(peak - ceiling) + jnp.exp(sink_N1 - ceiling))
    return o_NH.astype(static.dtype), row(lse)


def _scores(static: Static, q_NH: jax.Array, rows_WH: jax.Array, there_1W: jax.Array) -> jax.Array:
    return jnp.where(there_1W, dot(q_NH, rows_WH, 1, 1) * static.scale, -jnp.inf)
