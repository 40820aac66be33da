"""The forward kernel of sparse attention on a GPU (Triton): one program takes one query, a block of heads, a share of its rows.

    for blocks of R rows k (first the window's, then the selected entries'; read once, keys are the values):
        s = q k * scale
        m' = max(m, max s)    p = exp(s - m')    l = l exp(m - m') + sum p    a = a exp(m - m') + p k
    o = a / (l + exp(sink - m))    lse = log(l exp(m) + exp(sink))

p is rounded to the dtype of the products relative to the running maximum m', not to the final one: within bf16 rounding of the
reference, and the same up to the order of sums in f32. l sums p before it is rounded.

Up to 64 heads share every row that a program reads, so a tile of R rows is loaded (or unpacked) into shared memory once and
multiplied twice: [64, H] x [H, R] and [64, R] x [R, H], 64 being the height of a Hopper tensor core's product. Where queries
are too few to fill the machine, a query's blocks are shared among several programs, and a, m, l of each are combined after.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from kernels_pallas import formats
from kernels_pallas.products import dot
from kernels_pallas.sparse_attention.gpu_rows import Layout, load_rows, load_tile, spread, store_tile

COMBINED_HEADS = 8  # of a program that combines parts


@dataclasses.dataclass(frozen=True)
class Tiles:
    """How the work is cut."""

    heads: int  # of a program
    rows: int  # of a block
    warps: int
    stages: int  # blocks on their way at once
    splits: int = 0  # programs that share the blocks of one query; 0: as few as fill the machine
    parts: int = 1  # of the channels, in the backward


@dataclasses.dataclass(frozen=True)
class Static:
    """Sizes and layouts."""

    batch: int
    tokens: int
    heads: int
    width: int
    topk: int  # 0: no pool
    reach: int  # most window rows that a query reads
    causal: bool
    scale: float
    dtype: Any  # of the products
    interpret: bool
    window: Layout
    pool: Layout | None
    tiles: Tiles

    @property
    def head_blocks(self) -> int:
        """Programs that share the heads of one query."""
        return pl.cdiv(self.heads, self.tiles.heads)

    @property
    def grid(self) -> tuple[int, int]:
        """Queries and their head blocks (neighbours read the same rows), splits."""
        return self.batch * self.tokens * self.head_blocks, self.tiles.splits

    def low(self, x: jax.Array) -> jax.Array:
        """f32 `x` in the dtype of the products. A GPU does the cast as it stands; the interpreter's compiler may drop a narrowing
        cast that a product widens again, but not the reduce_precision of `round_to` (which Triton does not have).
        """
        return formats.round_to(x, self.dtype) if self.interpret else x.astype(self.dtype)

    def exp(self, x: jax.Array) -> jax.Array:
        """e**x; beside bf16 products by the exponential that a GPU has, that of 2, in half the instructions."""
        return jnp.exp2(x * math.log2(math.e)) if self.dtype == jnp.bfloat16 else jnp.exp(x)


@dataclasses.dataclass(frozen=True)
class Place:
    """What a program works on: row b of the batch, token t, heads, and the window rows [start, stop)."""

    b: jax.Array
    t: jax.Array
    heads_N: jax.Array
    mine_N: jax.Array  # False: padding
    start: jax.Array
    stop: jax.Array


def _divide(index: jax.Array, by: int) -> tuple[jax.Array, jax.Array]:
    return lax.div(index, jnp.int32(by)), lax.rem(index, jnp.int32(by))


def count_blocks(rows: jax.Array, size: int) -> jax.Array:
    """Blocks of `size` that cover `rows` >= 0."""
    return lax.div(rows + (size - 1), jnp.int32(size))


def locate(static: Static, first_ref: Any) -> Place:
    """The place of this program; first_ref [B, T]."""
    query, head_block = _divide(pl.program_id(0), static.head_blocks)
    b, t = _divide(query, static.tokens)
    heads_N = head_block * static.tiles.heads + jnp.arange(static.tiles.heads, dtype=jnp.int32)
    rows = static.window.entries
    stop = rows - static.tokens + t + 1 if static.causal else jnp.int32(rows)
    start = jnp.maximum(plt.load(first_ref.at[b, t]), stop - static.reach)
    return Place(b, t, heads_N, heads_N < static.heads, jnp.maximum(start, 0), stop)


def count_slots(static: Static, selection_ref: Any, place: Place) -> jax.Array:
    """Slots up to the last one that is not absent; selection_ref [B, T, K]."""
    slot = jnp.arange(pl.next_power_of_2(static.topk), dtype=jnp.int32)
    picked = plt.load(selection_ref.at[place.b, place.t, slot], mask=slot < static.topk, other=-1)
    return jnp.max(jnp.where(picked >= 0, slot + 1, 0))


def picked_entries(
    static: Static, pool: Layout, selection_ref: Any, place: Place, block: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """(entries, which are not absent) of a block of the selection."""
    slot = block * static.tiles.rows + jnp.arange(static.tiles.rows, dtype=jnp.int32)
    picked = plt.load(selection_ref.at[place.b, place.t, slot], mask=slot < static.topk, other=-1)
    return jnp.clip(picked, 0, pool.entries - 1), picked >= 0


def forward(static: Static, group: jax.Array, arrays: list[jax.Array]) -> tuple[jax.Array, jax.Array]:
    """(o [B, T, N, H], lse [B, T, N]) of arrays: q, first, sink, selection if any, those of the window and of the pool."""
    lead, f32 = (static.batch, static.tokens, static.heads), jnp.float32
    splits = static.tiles.splits
    if splits == 1:
        shapes = [jax.ShapeDtypeStruct((*lead, static.width), static.dtype), jax.ShapeDtypeStruct(lead, f32)]
    else:
        shapes = [
            jax.ShapeDtypeStruct((splits, *lead, static.width), f32),
            *[jax.ShapeDtypeStruct((splits, *lead), f32)] * 2,
        ]
    outputs = pl.pallas_call(
        functools.partial(_kernel, static),
        grid=static.grid,
        out_shape=shapes,
        compiler_params=plt.CompilerParams(num_warps=static.tiles.warps, num_stages=static.tiles.stages),
        interpret=static.interpret,
        name="sparse_attention",
    )(group.reshape(1), *arrays)
    if splits == 1:
        return outputs[0], outputs[1]
    combined_blocks = pl.cdiv(static.heads, COMBINED_HEADS)
    o, lse = pl.pallas_call(
        functools.partial(_combine_kernel, static, combined_blocks),
        grid=(static.batch * static.tokens * combined_blocks,),
        out_shape=[jax.ShapeDtypeStruct((*lead, static.width), static.dtype), jax.ShapeDtypeStruct(lead, f32)],
        compiler_params=plt.CompilerParams(num_warps=4, num_stages=2),
        interpret=static.interpret,
        name="sparse_attention_combine",
    )(arrays[2], *outputs)
    return o, lse


def _combine_kernel(
    static: Static, blocks: int, sink_ref: Any, a_ref: Any, m_ref: Any, l_ref: Any, o_ref: Any, lse_ref: Any
) -> None:
    """One query, a few heads: the sums over Y parts of the rows, each relative to its own maximum, become one.

    Input: sink [N], a [Y, B, T, N, H], m and l [Y, B, T, N].
    Output: o [B, T, N, H], lse [B, T, N].
    """
    query, block = _divide(pl.program_id(0), blocks)
    b, t = _divide(query, static.tokens)
    heads_N = block * COMBINED_HEADS + jnp.arange(COMBINED_HEADS, dtype=jnp.int32)
    mine_N = heads_N < static.heads
    small = (pl.next_power_of_2(static.tiles.splits), COMBINED_HEADS)
    part_YN = lax.broadcasted_iota(jnp.int32, small, 0)
    index = (part_YN, b, t, spread(heads_N, small, 1))
    there_YN = (part_YN < static.tiles.splits) & spread(mine_N, small, 1)
    m_YN = plt.load(m_ref.at[index], mask=there_YN, other=-jnp.inf)
    m_N = jnp.max(m_YN, axis=0)
    floor_N = jnp.where(m_N == -jnp.inf, 0.0, m_N)
    l_YN = plt.load(l_ref.at[index], mask=there_YN, other=0.0)
    total_N = jnp.sum(l_YN * jnp.exp(m_YN - spread(floor_N, small, 1)), axis=0)

    def add_part(part: jax.Array, a_NH: jax.Array) -> jax.Array:
        m_N = plt.load(m_ref.at[part, b, t, heads_N], mask=mine_N, other=-jnp.inf)
        part_NH = load_tile(a_ref, (part, b, t), heads_N, mine_N, static.width)
        return a_NH + part_NH * spread(jnp.exp(m_N - floor_N), part_NH.shape, 0)

    zero_NH = jnp.zeros((COMBINED_HEADS, static.width), jnp.float32)
    a_NH = lax.fori_loop(0, static.tiles.splits, add_part, zero_NH)
    _store_output(static, (b, t), heads_N, mine_N, sink_ref, (m_N, total_N, a_NH), o_ref, lse_ref)


def _store_output(
    static: Static, lead: tuple[Any, ...], heads_N: jax.Array, mine_N: jax.Array, sink_ref: Any, sums: Any, o_ref: Any,
    lse_ref: Any,
) -> None:  # fmt: skip
    """o and lse of the sums (m, l, a) over all rows of a query."""
    m_N, total_N, a_NH = sums
    divisor_N, lse_N = _finish(m_N, total_N, plt.load(sink_ref.at[heads_N], mask=mine_N, other=0.0))
    o_NH = static.low(a_NH / spread(divisor_N, a_NH.shape, 0))
    store_tile(o_ref, lead, heads_N, mine_N, o_NH)
    plt.store(lse_ref.at[(*lead, heads_N)], lse_N, mask=mine_N)


def _finish(m: jax.Array, total: jax.Array, sink: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(what a is divided by, lse); without entries m is -inf: the sink is left out, so that no value of it makes 0 / 0."""
    empty = m == -jnp.inf
    divisor = total + jnp.exp(jnp.where(empty, 0.0, sink) - jnp.where(empty, 0.0, m))
    peak = jnp.where(empty, sink, m)
    ceiling = jnp.maximum(jnp.maximum(peak, sink), -1e30)  # a sink of -inf is no sink
    return divisor, ceiling + jnp.log(total * jnp.exp(peak - ceiling) + jnp.exp(sink - ceiling))


def _kernel(static: Static, group_ref: Any, *refs: Any) -> None:
    """One query, a block of heads, one part of its rows.

    Input: group [1], q [B, T, N, H], first [B, T], sink [N], selection [B, T, K] if there is a pool, the arrays of the window
        [B, S, X] and of the pool [G, B, P, X].
    Output: o [B, T, N, H] and lse [B, T, N], or of every part Y: a [Y, B, T, N, H], m and l [Y, B, T, N].
    """
    refs_left = list(refs)
    q_ref, first_ref, sink_ref = refs_left[:3]
    outputs = refs_left[-2:] if static.tiles.splits == 1 else refs_left[-3:]
    selection_ref = refs_left[3] if static.pool else None
    stored = refs_left[4 if static.pool else 3 :]
    window_refs, pool_refs = stored[: static.window.arrays], stored[static.window.arrays :]

    place = locate(static, first_ref)
    b, t, rows = place.b, place.t, static.tiles.rows
    group = group_ref[0]
    q_NH = load_tile(q_ref, (b, t), place.heads_N, place.mine_N, static.width)
    # The part's blocks, counted through the window's and then the selection's.
    window_blocks = count_blocks(jnp.maximum(place.stop - place.start, 0), rows)
    slots = count_slots(static, selection_ref, place) if static.pool else jnp.int32(0)
    pool_blocks = count_blocks(slots, rows)
    share = count_blocks(window_blocks + pool_blocks, static.tiles.splits)
    begin = pl.program_id(1) * share
    end = begin + share

    def window_block(i: jax.Array, sums: Any) -> Any:
        row = place.start + i * rows + jnp.arange(rows, dtype=jnp.int32)
        there = row < place.stop
        k_RH = load_rows(static.window, tuple(window_refs), (b,), row, there, static.dtype)
        return _add_block(static, sums, q_NH, k_RH, there, i < window_blocks)

    def pool_block(i: jax.Array, sums: Any) -> Any:
        assert static.pool is not None
        entry, there = picked_entries(static, static.pool, selection_ref, place, i)
        k_RH = load_rows(static.pool, tuple(pool_refs[: static.pool.arrays]), (group, b), entry, there, static.dtype)
        return _add_block(static, sums, q_NH, k_RH, there, i < pool_blocks)

    heads, f32 = static.tiles.heads, jnp.float32
    sums = jnp.full(heads, -jnp.inf, f32), jnp.zeros(heads, f32), jnp.zeros((heads, static.width), f32)
    sums = lax.fori_loop(jnp.minimum(begin, window_blocks), jnp.minimum(end, window_blocks), window_block, sums)
    if static.pool:
        begin, end = (jnp.clip(block - window_blocks, 0, pool_blocks) for block in (begin, end))
        sums = lax.fori_loop(begin, end, pool_block, sums)

    if static.tiles.splits == 1:
        _store_output(static, (b, t), place.heads_N, place.mine_N, sink_ref, sums, *outputs)
        return
    part = pl.program_id(1)
    m_N, l_N, a_NH = sums
    store_tile(outputs[0], (part, b, t), place.heads_N, place.mine_N, a_NH)
    for ref, value_N in zip(outputs[1:], (m_N, l_N), strict=True):
        plt.store(ref.at[part, b, t, place.heads_N], value_N, mask=place.mine_N)


def _add_block(static: Static, sums: Any, q_NH: jax.Array, k_RH: jax.Array, there_R: jax.Array, live: jax.Array) -> Any:
    """The sums (m, l, a) with a block of rows added."""
    m_N, l_N, a_NH = sums
    raw_NR = dot(q_NH, k_RH, 1, 1)
    shape = raw_NR.shape

    def weigh() -> tuple[jax.Array, ...]:
        s_NR = jnp.where(spread(there_R, shape, 1), raw_NR * static.scale, -jnp.inf)
        peak = jnp.maximum(m_N, jnp.max(s_NR, axis=1))
        floor = jnp.where(peak == -jnp.inf, 0.0, peak)
        old = static.exp(m_N - floor)
        p_NR = static.exp(s_NR - spread(floor, shape, 0))
        return peak, l_N * old + jnp.sum(p_NR, axis=1), old, static.low(p_NR)

    def keep() -> tuple[jax.Array, ...]:
        return m_N, l_N, jnp.ones_like(m_N), jnp.zeros(shape, static.dtype)

    # `live` always holds. The branch is for the compiler: it gives all warps to the heads of a product that another product
    # follows in the same region, and with 8 warps on 64 heads every score would be computed twice.
    m_N, l_N, old_N, p_NR = lax.cond(live, weigh, keep)
    return m_N, l_N, a_NH * spread(old_N, a_NH.shape, 0) + dot(p_NR, k_RH, 1, 0)
