"""TPU kernel: score every visible entry of a block of queries, and select from the scores where they lie.

    grid (B, blocks of queries, chunks of keys). Each step scores one chunk into the levels of the block (VMEM scratch, 4 bytes a
    query and entry), the last one selects: `tpu_levels`. Chunks behind the last visible entry are neither fetched nor scored.

Scores never reach HBM, so memory there is linear in the number of queries.
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


@dataclasses.dataclass(frozen=True)
class Tiles:
    """queries: in a block, 1 or 8. chunk: entries of a grid step. tile: entries scored at once."""

    queries: int
    chunk: int
    tile: int


@dataclasses.dataclass(frozen=True)
class Call:
    """Static values of one call."""

    tiles: Tiles
    keys: tpu_scores.Keys
    entries: int
    topk: int
    block: int
    make: int
    obeys: bool
    bf16: bool

    @property
    def chunks(self) -> int:
        return pl.cdiv(self.entries, self.tiles.chunk)

    @property
    def rows(self) -> int:
        """Rows of levels of one chunk."""
        return self.tiles.chunk // LANES * self.tiles.queries

    @property
    def slots(self) -> int:
        return whole_lanes(max(self.topk, self.make))


def run(
    q_BTIJ: jax.Array,
    w_BTI: jax.Array,
    arrays: list[jax.Array],
    group: jax.Array,
    visible_BT: jax.Array,
    candidates_BTC: jax.Array | None,
    call: Call,
    vmem_bytes: int,
    interpret: Any,
) -> list[jax.Array]:
    """[selection_BTK] or [selection_BTK, candidates_BTC]."""
    batch, tokens, heads, width = q_BTIJ.shape
    n = call.tiles.queries
    blocks = pl.cdiv(tokens, n)

    def cut(a: jax.Array, fill: int = 0) -> jax.Array:
        ragged = [(0, blocks * n - tokens if axis == 1 else 0) for axis in range(a.ndim)]
        return jnp.pad(a, ragged, constant_values=fill).reshape(batch, blocks, n, *a.shape[2:])

    q = jnp.swapaxes(cut(q_BTIJ), 2, 3).reshape(batch, blocks, heads * n, width)
    visible = cut(visible_BT)
    chunks = pl.cdiv(jnp.max(visible, axis=2), call.tiles.chunk).reshape(-1)
    inputs = [q, cut(w_BTI), visible[:, :, None, :]]
    if candidates_BTC is not None:
        lacking = whole_lanes(candidates_BTC.shape[2]) - candidates_BTC.shape[2]
        inputs.append(jnp.pad(cut(candidates_BTC, -1), ((0, 0), (0, 0), (0, 0), (0, lacking)), constant_values=-1))

    def of_block(b: jax.Array, i: jax.Array, c: jax.Array, group: Any, chunks: Any) -> tuple[Any, ...]:
        return b, i, 0, 0

    def of_chunk(b: jax.Array, i: jax.Array, c: jax.Array, group: Any, chunks: Any, rank: int) -> tuple[Any, ...]:
        last = jnp.maximum(chunks[b * blocks + i] - 1, 0)  # no other block is fetched once nothing more is visible
        return group[0], b, jnp.minimum(c, last), *[0] * (rank - 1)

    key_shapes = call.keys.block_shapes(arrays, call.tiles.chunk)
    widths = [call.topk, call.make] if call.make else [call.topk]
    whole = max(PIECES, 8 * call.block)
    pieces = pl.cdiv(call.chunks * call.tiles.chunk, LANES * whole) * whole
    out = pl.pallas_call(
        functools.partial(_kernel, call=call),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(batch, blocks, call.chunks),
            in_specs=[pl.BlockSpec((1, 1, *a.shape[2:]), of_block) for a in inputs]
            + [pl.BlockSpec((1, 1, *shape), functools.partial(of_chunk, rank=len(shape))) for shape in key_shapes],
            out_specs=[pl.BlockSpec((1, 1, n, whole_lanes(k)), of_block) for k in widths],
            scratch_shapes=[
                pltpu.VMEM((heads * n, LANES), jnp.float32),
                pltpu.VMEM((max(n, 8), LANES), jnp.int32),
                pltpu.VMEM((pieces * n, LANES), jnp.int32),
                pltpu.VMEM((LANES, call.slots), jnp.float32),
                pltpu.VMEM((3, call.slots), jnp.float32),
            ],
        ),
        out_shape=[jax.ShapeDtypeStruct((batch, blocks, n, whole_lanes(k)), jnp.int32) for k in widths],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary"), vmem_limit_bytes=vmem_bytes
        ),
        interpret=interpret,
        name="index_select_dense",
    )(group.reshape(1), chunks, *inputs, *arrays)
    return [a.reshape(batch, blocks * n, -1)[:, :tokens, :k] for a, k in zip(out, widths, strict=True)]


def _kernel(group_ref: Any, chunks_ref: Any, *refs: Any, call: Call) -> None:
    """Grid (B, blocks of n queries, chunks).

    Prefetch: group [1], chunks [B * blocks] to score
    Input:    q [1, 1, I * n, J], w [1, 1, n, I], visible [1, 1, 1, n], candidates [1, 1, n, C] if obeyed, keys of one chunk
    Output:   selection [1, 1, n, K], candidates [1, 1, n, C] if made; widths in whole lanes
    Scratch:  weight f32 [I * n, 128], visible [8, 128], level [pieces * n, 128], mark f32 [128, K], slot f32 [3, K]
    """
    del group_ref
    n, chunk, tile = call.tiles.queries, call.tiles.chunk, call.tiles.tile
    given = iter(refs)
    q_ref, w_ref, visible_ref = next(given), next(given), next(given)
    obeyed_ref = next(given) if call.obeys else None
    keys_refs = [next(given) for _ in range(call.keys.arrays_held)]
    selection_ref = next(given)
    made_ref = next(given) if call.make else None
    weight_ref, seen_ref, level_ref, mark_ref, slot_ref = given

    b, i, c = (pl.program_id(axis) for axis in range(3))
    chunks = chunks_ref[b * pl.num_programs(1) + i]
    order = tpu_levels.order_of_entries(call.keys.ways)

    @pl.when(c == 0)
    def _spread_the_rows() -> None:
        tpu_scores.write_weights(weight_ref, w_ref[0, 0])
        seen_ref[...] = jnp.broadcast_to(tpu_levels.column(visible_ref[0, 0]), seen_ref.shape)

    @pl.when(c < chunks)
    def _score_the_chunk() -> None:
        def score_tile(j: jax.Array, carry: None) -> None:
            sizes = [ref.shape[2] * tile // chunk for ref in keys_refs]
            stored = [ref[0, 0, pl.ds(j * size, size)] for ref, size in zip(keys_refs, sizes, strict=True)]
            scores = tpu_scores.scores(q_ref[0, 0], weight_ref, call.keys.numbers(stored), n)
            tpu_scores.write_levels(
                level_ref, scores, c * chunk + j * tile, seen_ref[0:n, 0:1], call.keys.ways, bf16=call.bf16
            )

        lax.fori_loop(0, chunk // tile, score_tile, None)

    @pl.when(c == call.chunks - 1)
    def _select() -> None:
        pieces = chunks * (chunk // LANES)
        if obeyed_ref is not None:
            tpu_levels.allow(level_ref, obeyed_ref.at[0, 0], pieces, order, queries=n, block=call.block)
        take = functools.partial(tpu_levels.take, level_ref, (mark_ref, slot_ref), queries=n, bf16=call.bf16)
        take(selection_ref.at[0, 0], pieces, order, rows=call.rows, count=call.topk)
        if made_ref is not None:
            tpu_levels.combine(level_ref, seen_ref, pieces, call.keys.ways, queries=n, block=call.block)
            order_of_blocks = tpu_levels.order_of_blocks(call.keys.ways, call.block)
            take(made_ref.at[0, 0], pl.cdiv(pieces, call.block), order_of_blocks, rows=8, count=call.make)
