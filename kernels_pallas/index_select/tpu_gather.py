"""TPU kernel: score the entries of each query's candidate blocks alone, so that the cost does not follow the pool.

    grid (B, T). A query's blocks are fetched a buffer at a time by one copy each, the next buffer while one is scored. Blocks
    are ascending, so that of the entries in the order of the slots the visible ones are the first `seen`; no block behind
    them is fetched (the last one again, where a buffer has room left). Selection is as in `tpu_dense`, among slots.

Slots become positions outside, by one small gather.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kernels_pallas.index_select import tpu_levels, tpu_scores
from kernels_pallas.index_select.tpu_levels import LANES, PIECES, whole_lanes

BUFFER = 1024  # entries fetched at once: eight pieces, one register of levels
_UNROLL = 8  # copies started per turn of the loop


@dataclasses.dataclass(frozen=True)
class Call:
    """Static values of one call."""

    keys: tpu_scores.Keys
    topk: int
    block: int
    bf16: bool


def run(
    q_BTIJ: jax.Array,
    w_BTI: jax.Array,
    arrays: list[jax.Array],
    group: jax.Array,
    visible_BT: jax.Array,
    candidates_BTC: jax.Array,
    call: Call,
    interpret: Any,
) -> jax.Array:
    """selection_BTK."""
    batch, tokens, heads, _ = q_BTIJ.shape
    per_buffer = BUFFER // call.block
    lacking = -candidates_BTC.shape[2] % max(per_buffer, LANES)
    blocks_BTC = jnp.pad(candidates_BTC, ((0, 0), (0, 0), (0, lacking)), constant_values=-1)
    room = jnp.clip(visible_BT[:, :, None] - blocks_BTC * call.block, 0, call.block)
    seen_BT = jnp.sum(jnp.where(blocks_BTC < 0, 0, room), axis=2, dtype=jnp.int32)

    def of_query(b: jax.Array, t: jax.Array, group: Any) -> tuple[Any, ...]:
        return b, t, 0, 0

    slots = blocks_BTC.shape[2] * call.block
    pieces = pl.cdiv(slots, LANES * PIECES) * PIECES
    shapes = call.keys.block_shapes(arrays, call.block)
    vectors = [q_BTIJ, w_BTI[:, :, None], blocks_BTC[:, :, None]]
    (slot_BTK,) = pl.pallas_call(
        functools.partial(_kernel, call=call),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(batch, tokens),
            in_specs=[
                pl.BlockSpec((1, 1, 1, 1), of_query, memory_space=pltpu.SMEM),
                pl.BlockSpec((1, 1, 1, blocks_BTC.shape[2]), of_query, memory_space=pltpu.SMEM),
                *[pl.BlockSpec((1, 1, *a.shape[2:]), of_query) for a in vectors],
                *[pl.BlockSpec(memory_space=pl.ANY) for _ in arrays],
            ],
            out_specs=[pl.BlockSpec((1, 1, 1, whole_lanes(call.topk)), of_query)],
            scratch_shapes=[
                *[
                    pltpu.VMEM((2, per_buffer * shape[0], *shape[1:]), a.dtype)
                    for a, shape in zip(arrays, shapes, strict=True)
                ],
                pltpu.SemaphoreType.DMA((2, len(arrays))),
                pltpu.VMEM((heads, LANES), jnp.float32),
                pltpu.VMEM((pieces, LANES), jnp.int32),
                pltpu.VMEM((LANES, whole_lanes(call.topk)), jnp.float32),
                pltpu.VMEM((3, whole_lanes(call.topk)), jnp.float32),
            ],
        ),
        out_shape=[jax.ShapeDtypeStruct((batch, tokens, 1, whole_lanes(call.topk)), jnp.int32)],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel")),
        interpret=interpret,
        name="index_select_gather",
    )(group.reshape(1), seen_BT[:, :, None, None], blocks_BTC[:, :, None], *vectors, *arrays)
    slot_BTK = slot_BTK[:, :, 0, : call.topk]
    block_BTK = jnp.take_along_axis(candidates_BTC, jnp.maximum(slot_BTK, 0) // call.block, axis=2)
    return jnp.where(slot_BTK < 0, -1, block_BTK * call.block + slot_BTK % call.block)


def _kernel(
    group_ref: Any, seen_ref: Any, name_ref: Any, q_ref: Any, w_ref: Any, blocks_ref: Any, *refs: Any, call: Call
) -> None:
    """Grid (B, T).

    Prefetch: group [1]
    Input:    in SMEM seen [1, 1, 1, 1], blocks [1, 1, 1, C]; q [1, 1, I, J], w [1, 1, 1, I], blocks [1, 1, 1, C]; keys in HBM
    Output:   selected slots [1, 1, 1, K]
    Scratch:  keys [2, entries or units of a buffer, ..] each, semaphores [2, arrays], weight f32 [I, 128],
              level [pieces, 128], mark f32 [128, K], slot f32 [3, K]
    """
    given, arrays = iter(refs), call.keys.arrays_held
    keys_refs = [next(given) for _ in range(arrays)]
    out_ref = next(given)
    buffers = [next(given) for _ in range(arrays)]
    semaphores, weight_ref, level_ref, mark_ref, slot_ref = given
    per_buffer = BUFFER // call.block
    b = pl.program_id(0)
    seen = seen_ref[0, 0, 0, 0]
    last = pl.cdiv(seen, call.block) - 1
    turns = pl.cdiv(seen, BUFFER)
    tpu_scores.write_weights(weight_ref, w_ref[0, 0])

    def start(turn: jax.Array) -> None:
        side = turn % 2

        def copy(at: jax.Array, carry: None) -> None:
            block = name_ref[0, 0, 0, jnp.minimum(turn * per_buffer + at, last)]
            for k, row in enumerate(call.keys.first_rows(block * call.block)[:arrays]):
                size = buffers[k].shape[1] // per_buffer
                pltpu.make_async_copy(
                    keys_refs[k].at[group_ref[0], b, pl.ds(row, size)],
                    buffers[k].at[side, pl.ds(at * size, size)],
                    semaphores.at[side, k],
                ).start()

        lax.fori_loop(0, per_buffer, copy, None, unroll=_UNROLL)

    def score(turn: jax.Array) -> None:
        side = turn % 2
        for k in range(arrays):  # one wait for as many bytes as all copies of the buffer bring
            pltpu.make_async_copy(buffers[k].at[side], buffers[k].at[side], semaphores.at[side, k]).wait()
        stored = [buffer[side] for buffer in buffers]
        if call.keys.units:
            blocks_1U = blocks_ref[0, 0, :, pl.ds(pl.multiple_of(turn * per_buffer, per_buffer), per_buffer)]
            keys_PJ = call.keys.numbers_of_blocks(stored, tpu_levels.column(blocks_1U))
        else:
            keys_PJ = call.keys.numbers(stored)
        scores = tpu_scores.scores(q_ref[0, 0], weight_ref, keys_PJ, 1)
        tpu_scores.write_levels(level_ref, scores, turn * BUFFER, seen, call.keys.ways, bf16=call.bf16)

    def step(turn: jax.Array, carry: None) -> None:
        pl.when(turn < turns)(functools.partial(start, turn))
        pl.when(turn > 0)(functools.partial(score, turn - 1))

    lax.fori_loop(0, turns + 1, step, None)
    tpu_levels.take(
        level_ref,
        (mark_ref, slot_ref),
        out_ref.at[0, 0],
        turns * (BUFFER // LANES),
        tpu_levels.order_of_entries(call.keys.ways),
        queries=1,
        rows=BUFFER // LANES,
        count=call.topk,
        bf16=call.bf16,
    )
