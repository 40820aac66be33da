"""The gradient of sparse attention on a TPU: one query per step, sums kept in HBM.

    p = exp(s - lse),  ds = p (do . k + shift) scale,  dq = sum ds k,  dk = sum over heads of ds q + p do

dk belongs to rows that other queries read as well. Steps run one after the other, so the sums of window and pool rows stay in
HBM as f32 and each step adds to the rows it read: fetch their sums while the products run, add, write back, and wait for the
writes before the next step fetches. No sums are lost, and their order is that of the queries.

A row that a selection lists twice would be written twice. The selection is sorted first (its order means nothing here), so that
such rows are neighbours: their dk are added up and only the last of them is written.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kernels_pallas.products import dot
from kernels_pallas.sparse_attention.tpu_plan import COUNT, START, UNIQUE, Static, fetch, make_plan, read
from kernels_pallas.sparse_attention.tpu_rows import column, unrolled, wait_bytes
from kernels_pallas.storage import Entries

_WINDOW, _POOL = 0, 1  # semaphores


def backward(
    q_BTNH: jax.Array,
    window_BSH: Entries,
    first_BT: jax.Array,
    sink_N: jax.Array,
    pool_GBPH: Entries | None,
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
    """Cotangents (dq in q's dtype, dwindow f32 [B, S, R, L], dpool f32 [G, B, P, R, L] or None); see `vjp`."""
    del sink_N
    if selection_BTK is not None:
        selection_BTK = jnp.sort(selection_BTK, axis=-1)
    static, scalars, sources = make_plan(
        q_BTNH, window_BSH, first_BT, pool_GBPH, selection_BTK, window=window, scale=scale, causal=causal
    )
    queries, heads, width = static.queries, static.heads, static.width
    sums = [jnp.zeros(source.shape, jnp.float32) for source in sources]
    rows, numbers_of_heads = static.per_query(heads, width), static.per_query(1, heads)
    held = [pltpu.VMEM((static.reach, *static.window.units[0]), jnp.float32)]
    if static.pool is not None:
        held += [pltpu.VMEM((static.topk, *static.pool.units[0]), jnp.float32)] * 2
    in_specs = [
        *static.scalar_specs(),
        rows,
        rows,
        numbers_of_heads,
        numbers_of_heads,
        *static.source_specs(),
        *static.source_specs(),
    ]
    dq, *sums = pl.pallas_call(
        functools.partial(_kernel, static),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=static.grid,  # one part: every step waits for the writes of the one before
            in_specs=in_specs,
            out_specs=[rows, *static.source_specs()],
            scratch_shapes=[*static.scratch(), *held, pltpu.SemaphoreType.DMA((2,)), pltpu.SMEM((2,), jnp.int32)],
        ),
        out_shape=[jax.ShapeDtypeStruct((queries, heads, width), q_BTNH.dtype)]
        + [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in sums],
        # The prefetched group is operand 0.
        input_output_aliases={1 + len(in_specs) - len(sums) + a: 1 + a for a in range(len(sums))},
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary", "arbitrary")),
        interpret=interpret,
        name="sparse_attention_backward",
    )(
        jnp.asarray(group, jnp.int32).reshape(1),
        *scalars,
        q_BTNH.reshape(queries, heads, width),
        do_BTNH.astype(q_BTNH.dtype).reshape(queries, heads, width),
        lse_BTN.reshape(queries, 1, heads),
        shift_BTN.reshape(queries, 1, heads),
        *sources,
        *sums,
    )
    return dq.reshape(q_BTNH.shape), sums[0], sums[1] if len(sums) > 1 else None


def _kernel(static: Static, group_ref: Any, *refs: Any) -> None:
    """One query.

    Prefetch: group [1].
    Input: scalars and selection of this step and the next; q, do [N, H]; lse, shift [1, N]; in HBM window [B, S, R, L],
        pool [G, B, P, R, L] and the sums of both.
    Output: dq [N, H]; in HBM the sums again (the same memory).
    Scratch: rows of window and pool, two buffers each, and their semaphores; sums of window rows [W, R, L], sums and gradients of
        pool rows [K, R, L], their semaphores, and how many writes are under way [2].
    """
    left = list(refs)
    scalars = static.take(left)
    q_ref, do_ref, lse_ref, shift_ref = left[:4]
    count = len(static.source_specs())
    sources = left[4 : 4 + count]
    dq_ref, *sums = left[4 + 2 * count : 5 + 3 * count]
    scratch = left[5 + 3 * count :]
    *held, sems, under_way = scratch[count + 1 :]
    step, group = pl.program_id(1), group_ref[0]

    def place(query: Any, meta: Any) -> Any:
        return sums[0].at[query // static.tokens, pl.ds(meta[0, 0, START], static.reach)]

    @pl.when(step > 0)
    def _() -> None:  # the sums may be read again once the last step's have arrived; any window is as long as this one
        pltpu.make_async_copy(held[0], place(step, scalars.meta), sems.at[_WINDOW]).wait()
        if static.pool is not None:
            wait_bytes(held[1], sems.at[_POOL], under_way[0])

    pltpu.make_async_copy(place(step, scalars.meta), held[0], sems.at[_WINDOW]).start()
    if static.pool is not None:
        pool_sums = sums[1].at[group, step // static.tokens]
        _start_sums(pool_sums, held[1], sems.at[_POOL], scalars.ids)

    slot = fetch(static, group, scalars, sources, scratch[: count + 1])
    rows = read(static, scalars, slot, scratch[: count + 1])
    q_NH, do_NH = q_ref[...], do_ref[...]
    lse_N1, shift_N1 = column(lse_ref[...]), column(shift_ref[...])

    def weights(rows_WH: jax.Array, there_1W: jax.Array) -> tuple[jax.Array, jax.Array]:
        s = jnp.where(there_1W, dot(q_NH, rows_WH, 1, 1) * static.scale, -jnp.inf)
        p = jnp.exp(s - lse_N1)
        ds = p * (dot(do_NH, rows_WH, 1, 1) + shift_N1) * static.scale
        return p.astype(static.dtype), ds.astype(static.dtype)

    def of_rows(p: jax.Array, ds: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        return (dot(ds, q_NH, 0, 0) + dot(p, do_NH, 0, 0)).reshape(shape)

    p, ds = weights(rows.window_WH, rows.seen_1W)
    dq_NH = dot(ds, rows.window_WH, 1, 0)
    pltpu.make_async_copy(place(step, scalars.meta), held[0], sems.at[_WINDOW]).wait()
    held[0][...] += of_rows(p, ds, held[0].shape)
    pltpu.make_async_copy(held[0], place(step, scalars.meta), sems.at[_WINDOW]).start()
    if static.pool is not None and rows.pool_KH is not None and rows.picked_1K is not None:
        p, ds = weights(rows.pool_KH, rows.picked_1K)
        dq_NH += dot(ds, rows.pool_KH, 1, 0)
        held[2][...] = of_rows(p, ds, held[2].shape)

        @pl.when(scalars.meta[0, 0, UNIQUE] < scalars.meta[0, 0, COUNT])
        def _() -> None:
            _join_repeated(held[2], scalars.ids)

        wait_bytes(held[1], sems.at[_POOL], scalars.meta[0, 0, COUNT])
        held[1][...] += held[2][...]
        _store_sums(held[1], pool_sums, sems.at[_POOL], scalars.ids)
        under_way[0] = scalars.meta[0, 0, UNIQUE]
    dq_ref[...] = dq_NH.astype(dq_ref.dtype)

    @pl.when(step + 1 == static.queries)
    def _() -> None:
        pltpu.make_async_copy(held[0], place(step, scalars.meta), sems.at[_WINDOW]).wait()
        if static.pool is not None:
            wait_bytes(held[1], sems.at[_POOL], under_way[0])


def _loop(ids: Any, body: Any) -> None:
    """body(j, id, next id or -1) for every slot."""
    slots = ids.shape[2]

    def turn(j: jax.Array, carry: None) -> None:
        following = jnp.where(j + 1 < slots, ids[0, 0, jnp.minimum(j + 1, slots - 1)], -1)
        body(j, ids[0, 0, j], following)
        return carry

    lax.fori_loop(0, slots, turn, None, unroll=unrolled(slots))


def _start_sums(sums: Any, held: Any, sem: Any, ids: Any) -> None:
    """Fetch the sums of all rows listed; a row listed twice comes twice."""

    def body(j: jax.Array, entry: jax.Array, _: jax.Array) -> None:
        @pl.when(entry >= 0)
        def _() -> None:
            pltpu.make_async_copy(sums.at[entry], held.at[j], sem).start()

    _loop(ids, body)


def _store_sums(held: Any, sums: Any, sem: Any, ids: Any) -> None:
    """Write the sums of all rows listed, of repeated ones the last."""

    def body(j: jax.Array, entry: jax.Array, following: jax.Array) -> None:
        @pl.when((entry >= 0) & (entry != following))
        def _() -> None:
            pltpu.make_async_copy(held.at[j], sums.at[entry], sem).start()

    _loop(ids, body)


def _join_repeated(gradients: Any, ids: Any) -> None:
    """Where the next slot holds the same entry, hand this slot's gradient on to it."""

    def body(j: jax.Array, entry: jax.Array, following: jax.Array) -> None:
        @pl.when((entry >= 0) & (entry == following))
        def _() -> None:
            gradients[j + 1] += gradients[j]

    _loop(ids, body)
