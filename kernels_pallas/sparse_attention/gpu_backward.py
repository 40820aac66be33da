"""The backward kernel of sparse attention on a GPU (Triton): one program takes one query and a block of heads.

    p  = exp(s - lse)                  ds = p (do . k + shift) * scale,    shift = dlse - do . o
    dq = sum over rows of ds k         dk of a row += sum over heads of ds q + p do

The weights are computed again from lse, so nothing of the forward's size is kept. A row's cotangent is added to f32 sums in
memory by atomic additions, [rows, H] at a time: queries that share a row, and an entry that a query lists twice, simply add.
The order of those additions is not fixed. The channels may go in parts, since the sums of dq and
of all of dk are more than the registers hold.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jax.ref import addupdate

from kernels_pallas.products import dot
from kernels_pallas.sparse_attention.gpu_forward import Static, count_blocks, count_slots, locate, picked_entries
from kernels_pallas.sparse_attention.gpu_rows import load_tile, spread, store_tile


def backward(
    static: Static, group: jax.Array, arrays: list[jax.Array]
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """(dq [B, T, N, H], dwindow f32 [B, S, H], dpool f32 [G, B, P, H] or None).

    arrays: q, do, first, lse, shift, selection if there is a pool, window [B, S, H], pool [G, B, P, H].
    """
    stored = arrays[-2:] if static.pool else arrays[-1:]
    sums = [jnp.zeros(a.shape, jnp.float32) for a in stored]
    dq, *sums = pl.pallas_call(
        functools.partial(_kernel, static),
        grid=static.grid[:1],
        out_shape=[jax.ShapeDtypeStruct(arrays[0].shape, static.dtype), *sums],
        input_output_aliases={1 + len(arrays) + i: 1 + i for i in range(len(sums))},
        compiler_params=plt.CompilerParams(num_warps=static.tiles.warps, num_stages=static.tiles.stages),
        interpret=static.interpret,
        name="sparse_attention_backward",
    )(group.reshape(1), *arrays, *sums)
    return dq, sums[0], sums[1] if static.pool else None


def _kernel(static: Static, group_ref: Any, *refs: Any) -> None:
    """One query, a block of heads.

    Input: group [1], q and do [B, T, N, H], first [B, T], lse and shift [B, T, N], selection [B, T, K] if there is a pool,
        window [B, S, H], pool [G, B, P, H]; zeros that dwindow and dpool start from.
    Output: dq [B, T, N, H], dwindow f32 [B, S, H], dpool f32 [G, B, P, H].
    """
    sources = 2 if static.pool else 1
    outputs = refs[-1 - sources :]
    q_ref, do_ref, first_ref, lse_ref, shift_ref, *rest = refs[: -1 - 2 * sources]
    place = locate(static, first_ref)
    b, t, rows = place.b, place.t, static.tiles.rows
    parts = static.tiles.parts
    width = static.width // parts

    def heads(ref: Any) -> list[jax.Array]:
        return [
            load_tile(ref, (b, t), place.heads_N, place.mine_N, width, i * width).astype(static.dtype)
            for i in range(parts)
        ]

    q, do = heads(q_ref), heads(do_ref)
    lse_N, shift_N = (
        plt.load(ref.at[b, t, place.heads_N], mask=place.mine_N, other=0.0) for ref in (lse_ref, shift_ref)
    )

    def add_block(
        source: Any, target: Any, lead: tuple[Any, ...], row: jax.Array, there: jax.Array, spare: jax.Array, live: jax.Array,
        dq: tuple[jax.Array, ...],
    ) -> tuple[jax.Array, ...]:  # fmt: skip
        """dq with a block of rows added; `spare` are rows for the zeros of those that are not there."""
        k = [load_tile(source, lead, row, there, width, i * width).astype(static.dtype) for i in range(parts)]
        s_parts = [dot(x, y, 1, 1) for x, y in zip(q, k, strict=True)]
        dp_parts = [dot(x, y, 1, 1) for x, y in zip(do, k, strict=True)]
        shape = s_parts[0].shape

        def weigh() -> tuple[jax.Array, jax.Array]:
            s_NR = sum(s * static.scale for s in s_parts)
            p_NR = jnp.where(spread(there, shape, 1), static.exp(s_NR - spread(lse_N, shape, 0)), 0.0)
            ds_NR = p_NR * (sum(dp * static.scale for dp in dp_parts) + spread(shift_N * static.scale, shape, 0))
            return static.low(p_NR), static.low(ds_NR)

        # As in the forward, the branch keeps the compiler from computing every score twice.
        p_NR, ds_NR = lax.cond(live, weigh, lambda: (jnp.zeros(shape, static.dtype),) * 2)
        # First what needs the rows k, whose place in shared memory is free after that.
        dq = tuple(x + dot(ds_NR, y, 1, 0) for x, y in zip(dq, k, strict=True))
        target_row = jnp.where(there, row, spare)
        for i in range(parts):
            dk_RC = (dot(q[i], ds_NR, 0, 0) + dot(do[i], p_NR, 0, 0)).T
            tile = dk_RC.shape
            channel = i * width + lax.broadcasted_iota(jnp.int32, tile, 1)
            addupdate(
                target, (*lead, spread(target_row, tile, 0), channel), jnp.where(spread(there, tile, 0), dk_RC, 0.0)
            )
        return dq

    window_blocks = count_blocks(jnp.maximum(place.stop - place.start, 0), rows)
    lane = jnp.arange(rows, dtype=jnp.int32)

    def window_block(i: jax.Array, dq: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        row = place.start + i * rows + lane
        spare = lane % static.window.entries
        window_ref = rest[-sources]
        return add_block(window_ref, outputs[1], (b,), row, row < place.stop, spare, i < window_blocks, dq)

    dq = tuple(jnp.zeros((static.tiles.heads, width), jnp.float32) for _ in range(parts))
    dq = lax.fori_loop(0, window_blocks, window_block, dq)
    if static.pool:
        pool, group, selection_ref = static.pool, group_ref[0], rest[0]
        pool_blocks = count_blocks(count_slots(static, selection_ref, place), rows)

        def pool_block(i: jax.Array, dq: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            entry, there = picked_entries(static, pool, selection_ref, place, i)
            return add_block(rest[-1], outputs[2], (group, b), entry, there, lane % pool.entries, i < pool_blocks, dq)

        dq = lax.fori_loop(0, pool_blocks, pool_block, dq)
    for i, dq_NC in enumerate(dq):
        store_tile(outputs[0], (b, t), place.heads_N, place.mine_N, static.low(dq_NC), i * width)
