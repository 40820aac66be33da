"""What the forward and the backward kernel for TPUs share: which rows each query reads, and fetching them one query ahead.

Queries are walked one by one, b-major: query i is token i % T of row i // T. The grid is [parts, steps]: on chips with two
cores a part each, one after the other elsewhere. Two buffers alternate, so that the rows of query i + 1 fly in while query i
is computed. The scalars of a step (where its window starts, its selection) come in SMEM blocks; those of the step to come
arrive as a second view of the same array, one block further on.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kernels_pallas import storage
from kernels_pallas.sparse_attention.tpu_rows import Layout, in_rows, lay_out, numbers, start_rows, wait_rows
from kernels_pallas.storage import Entries, Packed

# Columns of the scalars of a step.
START, FIRST, END, COUNT, UNIQUE = range(5)  # window rows [START, START + reach) are fetched, [FIRST, END) are read
_META = 8


@dataclasses.dataclass(frozen=True)
class Static:
    """Sizes and layouts."""

    batch: int
    tokens: int
    heads: int
    width: int
    reach: int  # window rows fetched per query
    topk: int  # 0: no pool
    parts: int
    scale: float
    dtype: Any  # of the products
    window: Layout
    pool: Layout | None

    @property
    def queries(self) -> int:
        """B * T."""
        return self.batch * self.tokens

    @property
    def grid(self) -> tuple[int, int]:
        """Parts, and queries in a part."""
        return self.parts, self.queries // self.parts

    def query(self, part: Any, step: Any) -> Any:
        """The query of a step."""
        return part * self.grid[1] + step

    def per_query(self, rows: int, width: int) -> pl.BlockSpec:
        """A query's [rows, width] of [Q, rows, width]."""
        return pl.BlockSpec((None, rows, width), lambda part, step, *_: (self.query(part, step), 0, 0))

    def scalar_specs(self) -> list[pl.BlockSpec]:
        """Blocks of `Plan.scalars`: this step and the next of the scalars, the same of the selection, and the selection
        once more as a vector.
        """
        last = self.queries - 1

        def smem(size: int, ahead: int) -> pl.BlockSpec:
            def index(part: Any, step: Any, *_: Any) -> tuple[Any, int, int]:
                return jnp.minimum(self.query(part, step) + ahead, last), 0, 0

            return pl.BlockSpec((1, 1, size), index, memory_space=pltpu.SMEM)

        specs = [smem(_META, 0), smem(_META, 1)]
        if self.topk:
            specs += [smem(self.topk, 0), smem(self.topk, 1), self.per_query(1, self.topk)]
        return specs

    def source_specs(self) -> list[pl.BlockSpec]:
        """Blocks of `Plan.sources`: all stay in HBM."""
        return [pl.BlockSpec(memory_space=pl.ANY) for _ in range(1 + (len(self.pool.units) if self.pool else 0))]

    def scratch(self) -> list[Any]:
        """Two buffers for rows of the window and of every array of the pool, and their semaphores."""
        buffers = self.window.buffers(2, self.reach)
        if self.pool:
            buffers += self.pool.buffers(2, self.topk)
        return [*buffers, pltpu.SemaphoreType.DMA((2, len(buffers)))]

    def take(self, refs: list[Any]) -> Scalars:
        """Remove the refs of `Plan.scalars` from the front of `refs`."""
        count = 5 if self.topk else 2
        found, refs[:count] = refs[:count], []
        return Scalars(*found, *[None] * (5 - count))


class Scalars(NamedTuple):
    """Refs of a step's scalars: SMEM [1, 1, ...], and the selection in VMEM."""

    meta: Any
    next_meta: Any
    ids: Any
    next_ids: Any
    picked: Any


class Plan(NamedTuple):
    """Static sizes, and the arrays that the specs describe."""

    static: Static
    scalars: list[jax.Array]
    sources: list[jax.Array]


def make_plan(
    q_BTNH: jax.Array,
    window_BSH: Entries,
    first_BT: jax.Array,
    pool_GBPH: Entries | None,
    selection_BTK: jax.Array | None,
    *,
    window: int,
    scale: float,
    causal: bool,
    parts: int = 1,
) -> Plan:
    """Lay out the arguments of the door.

    A packed window is unpacked first: it is W rows per query, and its scales would cost a TPU's smallest fetch, as many bytes
    as they save.
    """
    batch, tokens, heads, width = q_BTNH.shape
    if isinstance(window_BSH, Packed):
        window_BSH = storage.unpack(window_BSH)[0].astype(q_BTNH.dtype)
    rows = window_BSH.shape[1]
    window_BSRL = in_rows(window_BSH)
    reach = min(window, rows) if causal else rows
    end_T = rows - tokens + 1 + jnp.arange(tokens, dtype=jnp.int32) if causal else jnp.full(tokens, rows, jnp.int32)
    end_BT = jnp.broadcast_to(end_T, first_BT.shape)
    start_BT = jnp.clip(end_BT - reach, 0, rows - reach)
    meta = [start_BT, first_BT, end_BT]
    scalars: list[jax.Array] = []
    sources, pool, topk = [window_BSRL], None, 0
    if pool_GBPH is not None and selection_BTK is not None:
        pool, arrays = lay_out(pool_GBPH)
        topk = selection_BTK.shape[2]
        sources += arrays
        meta += [jnp.sum(selection_BTK >= 0, axis=-1), jnp.sum(is_last(selection_BTK), axis=-1)]
        scalars = [selection_BTK.astype(jnp.int32).reshape(batch * tokens, 1, topk)] * 3
    meta += [jnp.zeros_like(start_BT)] * (_META - len(meta))
    steps = jnp.stack(meta, axis=-1).astype(jnp.int32).reshape(batch * tokens, 1, _META)
    rows_layout = Layout((1,), (window_BSRL.shape[2:],), (window_BSRL.dtype,), width, None)
    static = Static(batch, tokens, heads, width, reach, topk, parts, scale, q_BTNH.dtype, rows_layout, pool)
    return Plan(static, [steps, steps, *scalars], sources)


def is_last(selection_BTK: jax.Array) -> jax.Array:
    """Whether a slot holds an entry that the next slot does not repeat: once per entry of an ascending selection."""
    following = jnp.concatenate([selection_BTK[..., 1:], jnp.full_like(selection_BTK[..., :1], -1)], axis=-1)
    return (selection_BTK >= 0) & (selection_BTK != following)


def fetch(static: Static, group: Any, scalars: Scalars, sources: list[Any], scratch: list[Any]) -> Any:
    """Wait for this step's rows and start fetching the next step's; returns the slot of the buffers that holds this step's."""
    *buffers, sems = scratch
    step = pl.program_id(1)
    query = static.query(pl.program_id(0), step)
    slot = lax.rem(step, 2)

    def window_copy(query: Any, meta: Any, slot: Any) -> Any:
        rows = sources[0].at[query // static.tokens, pl.ds(meta[0, 0, START], static.reach)]
        return pltpu.make_async_copy(rows, buffers[0].at[slot], sems.at[slot, 0])

    def start(query: Any, meta: Any, ids: Any, slot: Any) -> None:
        window_copy(query, meta, slot).start()
        if static.pool is not None:
            units = [source.at[group, query // static.tokens] for source in sources[1:]]
            start_rows(units, buffers[1:], slot, sems, static.pool.shares, ids)

    @pl.when(step == 0)
    def _() -> None:
        start(query, scalars.meta, scalars.ids, slot)

    @pl.when(step + 1 < static.grid[1])
    def _() -> None:
        start(query + 1, scalars.next_meta, scalars.next_ids, 1 - slot)

    window_copy(query, scalars.meta, slot).wait()
    if static.pool is not None:
        wait_rows(buffers[1:], slot, sems, scalars.meta[0, 0, COUNT])
    return slot


class Rows(NamedTuple):
    """What a query reads, as numbers, and what of it is there."""

    window_WH: jax.Array
    seen_1W: jax.Array
    pool_KH: jax.Array | None
    picked_1K: jax.Array | None


def read(static: Static, scalars: Scalars, slot: Any, scratch: list[Any]) -> Rows:
    """The fetched rows; window rows that the query may not read are zero, whatever lies there."""
    *buffers, _ = scratch
    first, end = scalars.meta[0, 0, FIRST], scalars.meta[0, 0, END]

    def seen(shape: tuple[int, ...], axis: int) -> jax.Array:
        row = scalars.meta[0, 0, START] + lax.broadcasted_iota(jnp.int32, shape, axis)
        return (row >= first) & (row < end)

    window_WH = numbers(static.window, [buffers[0][slot]], None, static.dtype)
    window_WH = jnp.where(seen(window_WH.shape, 0), window_WH, jnp.zeros_like(window_WH))
    if static.pool is None:
        return Rows(window_WH, seen((1, static.reach), 1), None, None)
    picked_1K = scalars.picked[...]
    pool_KH = numbers(static.pool, [buffer[slot] for buffer in buffers[1:]], picked_1K, static.dtype)
    return Rows(window_WH, seen((1, static.reach), 1), pool_KH, picked_1K >= 0)
