"""Exact sparse attention in plain JAX: the reference, the CPU path and the fallback.

Queries go in blocks: a block reads the window rows it can see and gathers its selected pool rows, so that temporary memory
is one block's, whatever T and P are.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from kernels_pallas import formats, storage
from kernels_pallas.products import einsum, settled
from kernels_pallas.storage import Entries
from kernels_pallas.tiling import cut_query_blocks, map_query_blocks

_GATHER_ELEMENTS = 1 << 23  # pool numbers gathered at once
# On CPUs what stays in a cache: 1,024 queries of 8 x 128 and their 128 entries took 22 ms in blocks of 32, 53 in blocks of 128.
_CACHED_ELEMENTS = 1 << 19
_CACHED_QUERIES = 8  # that a block has at least


Span = tuple[jax.Array, jax.Array]  # first entry that a query sees, and the one behind the last, [B, T] each


class _Place(NamedTuple):
    """Static and shared arguments of every block."""

    window_BSH: jax.Array
    pool_GBPH: Entries | None
    group: jax.Array | int
    scale: float
    window: int
    all_BPH: jax.Array | None  # the pool as numbers, where queries read all of it that they see


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
    span: Span | None = None,
) -> tuple[jax.Array, jax.Array]:
    """(o_BTNH, lse_BTN); see the door."""
    del interpret
    pool = (pool_GBPH, group, selection_BTK, span)
    place, size, arrays = _prepare(q_BTNH, window_BSH, first_BT, *pool, window, scale, causal)
    o_BTNH, lse_BTN = map_query_blocks(functools.partial(_attend, place, sink_N), size, *arrays)
    return o_BTNH, lse_BTN


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
    span: Span | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """Cotangents (dq in q's dtype, dwindow f32 [B, S, H], dpool f32 [G, B, P, H] or None).

    shift_BTN: dlse - do . o, so that d loss / d s = p (do . k + shift).
    """
    del interpret, sink_N
    pool = (pool_GBPH, group, selection_BTK, span)
    place, size, arrays = _prepare(q_BTNH, window_BSH, first_BT, *pool, window, scale, causal)
    sums = (
        jnp.zeros(place.window_BSH.shape, jnp.float32),
        None if pool_GBPH is None else jnp.zeros(storage.shape(pool_GBPH), jnp.float32),
    )
    # A padding query's p is exp(-inf - 0) = 0: it adds nothing.
    blocks, join = cut_query_blocks(size, do_BTNH, lse_BTN, shift_BTN, *arrays)
    (dwindow_BSH, dpool_GBPH), dq = lax.scan(functools.partial(_backward_block, place), sums, blocks)
    return join(dq), dwindow_BSH, dpool_GBPH


def _prepare(
    q_BTNH: jax.Array,
    window_BSH: Entries,
    first_BT: jax.Array,
    pool_GBPH: Entries | None,
    group: jax.Array | int,
    selection_BTK: jax.Array | None,
    span: Span | None,
    window: int,
    scale: float,
    causal: bool,
) -> tuple[_Place, int, tuple[jax.Array, ...]]:
    """What every block reads, the queries in a block, and what is cut into blocks."""
    if isinstance(window_BSH, storage.Packed):
        window_BSH = storage.unpack(window_BSH)[0]
    batch, tokens, _, width = q_BTNH.shape
    rows = window_BSH.shape[1]
    if causal:
        end_BT = jnp.broadcast_to(rows - tokens + 1 + jnp.arange(tokens, dtype=jnp.int32), first_BT.shape)
        first_BT = jnp.maximum(first_BT, end_BT - window)
    else:
        end_BT = jnp.full(first_BT.shape, rows, jnp.int32)
    size = max(window, 64) if causal else tokens
    if selection_BTK is not None:
        per_query = batch * selection_BTK.shape[2] * width
        size = min(size, max(1, _GATHER_ELEMENTS // per_query))
        if jax.default_backend() == "cpu":
            size = min(size, max(_CACHED_QUERIES, _CACHED_ELEMENTS // per_query))
    all_BPH = None
    if span is not None and pool_GBPH is not None:
        entries = storage.shape(pool_GBPH)[2]
        all_BPH = storage.chunk(pool_GBPH, group, 0, entries).astype(q_BTNH.dtype)
        size = min(size, max(1, _GATHER_ELEMENTS // (batch * q_BTNH.shape[2] * entries)))
    place = _Place(window_BSH, pool_GBPH, group, scale, window if causal else rows, all_BPH)
    pool = ()
    if selection_BTK is not None:
        pool = (selection_BTK + 1,)  # a padding query's 0 then means absent
    elif span is not None:
        pool = (jnp.stack(span, axis=-1),)  # a padding query's entries end at 0
    return place, size, (q_BTNH, first_BT, end_BT, *pool)


class _Read(NamedTuple):
    """What one block of queries reads, and its scores: -inf where absent."""

    start: jax.Array | int  # first window row
    window_BSH: jax.Array
    scores_BTNS: jax.Array
    pool_BTKH: jax.Array | None  # [B, P, H] where all of the pool is read
    scores_BTNK: jax.Array | None


def _read(
    place: _Place, q_BTNH: jax.Array, first_BT: jax.Array, end_BT: jax.Array, slot_BTK: jax.Array | None
) -> _Read:
    tokens = first_BT.shape[1]
    window_BSH = place.window_BSH
    rows, reach = window_BSH.shape[1], place.window + tokens - 1
    start: jax.Array | int = 0
    if reach < rows:  # the rows a causal block can see lie together and end with its last query's own
        start = jnp.clip(end_BT[0, 0] - place.window, 0, rows - reach)
        window_BSH = lax.dynamic_slice_in_dim(window_BSH, start, reach, axis=1)
    row = start + jnp.arange(window_BSH.shape[1])
    # A block's padding queries have end 0: they read nothing.
    seen_BTS = (row >= first_BT[:, :, None]) & (row < end_BT[:, :, None])
    # A row may hold anything, NaN included, which would leak through 0 * NaN to queries that must not read it: such rows become
    # zero, and NaN for those that do read them.
    broken_BS = ~jnp.all(jnp.isfinite(window_BSH), axis=-1)
    keys_BSH = jnp.where(broken_BS[..., None], 0, window_BSH.astype(q_BTNH.dtype))
    scores_BTNS = einsum("btnh,bsh->btns", q_BTNH, keys_BSH) * place.scale
    scores_BTNS = _masked(jnp.where(broken_BS[:, None, None], jnp.nan, scores_BTNS), seen_BTS[:, :, None, :])
    if place.pool_GBPH is None or slot_BTK is None:
        return _Read(start, keys_BSH, scores_BTNS, None, None)
    if place.all_BPH is not None:
        entry = jnp.arange(place.all_BPH.shape[1])
        seen_BTP = (entry >= slot_BTK[..., :1]) & (entry < slot_BTK[..., 1:])
        # What nobody wrote yet may be anything, and must not leak through 0 * NaN.
        all_BPH = jnp.where(jnp.any(seen_BTP, axis=1)[..., None], place.all_BPH, 0)
        scores_BTNP = einsum("btnh,bph->btnp", q_BTNH, all_BPH) * place.scale
        return _Read(start, keys_BSH, scores_BTNS, all_BPH, _masked(scores_BTNP, seen_BTP[:, :, None, :]))
    selection_BTK = slot_BTK - 1
    picked_BTKH = storage.gather(place.pool_GBPH, place.group, jnp.maximum(selection_BTK, 0)).astype(q_BTNH.dtype)
    # An absent slot reads entry 0; whatever lies there, NaN included, must not leak through 0 * NaN.
    picked_BTKH = jnp.where((selection_BTK >= 0)[..., None], picked_BTKH, 0)
    picked = jnp.swapaxes(settled(einsum("btkh,btnh->btkn", picked_BTKH, q_BTNH)), 2, 3) * place.scale
    return _Read(start, keys_BSH, scores_BTNS, picked_BTKH, _masked(picked, (selection_BTK >= 0)[:, :, None, :]))


def _attend(place: _Place, sink_N: jax.Array, q_BTNH: jax.Array, *rows: jax.Array) -> tuple[jax.Array, jax.Array]:
    read = _read(place, q_BTNH, rows[0], rows[1], rows[2] if len(rows) > 2 else None)
    scores = [s for s in (read.scores_BTNS, read.scores_BTNK) if s is not None]
    peak = functools.reduce(jnp.maximum, [jnp.max(s, axis=-1) for s in scores])
    # A query without entries gets 0: its sink is left out, so that no value of it makes 0 / 0.
    empty = peak == -jnp.inf
    peak = jnp.where(empty, 0.0, peak)
    weights = [jnp.exp(s - peak[..., None]) for s in scores]
    total = functools.reduce(jnp.add, [jnp.sum(w, axis=-1) for w in weights])
    numerator = einsum("btns,bsh->btnh", formats.round_to(weights[0], q_BTNH.dtype), read.window_BSH)
    if read.pool_BTKH is not None:
        numerator += _over_pool(formats.round_to(weights[1], q_BTNH.dtype), read.pool_BTKH)
    sink = jnp.broadcast_to(sink_N.astype(jnp.float32), peak.shape)
    o_BTNH = numerator / (total + jnp.exp(jnp.where(empty, 0.0, sink) - peak))[..., None]
    peak = jnp.where(empty, sink, peak)
    ceiling = jnp.maximum(jnp.maximum(peak, sink), -1e30)  # a sink of -inf is no sink
    lse_BTN = ceiling + jnp.log(total * jnp.exp(peak - ceiling) + jnp.exp(sink - ceiling))
    return formats.round_to(o_BTNH, q_BTNH.dtype), lse_BTN


def _backward_block(
    place: _Place, sums: tuple[jax.Array, jax.Array | None], block: tuple[jax.Array, ...]
) -> tuple[tuple[jax.Array, jax.Array | None], jax.Array]:
    do_BTNH, lse_BTN, shift_BTN, q_BTNH, first_BT, end_BT = block[:6]
    slot_BTK = block[6] if len(block) > 6 else None
    read = _read(place, q_BTNH, first_BT, end_BT, slot_BTK)
    dwindow_BSH, dpool_GBPH = sums
    p_BTNS, ds_BTNS = _weights(
        read.scores_BTNS, einsum("btnh,bsh->btns", do_BTNH, read.window_BSH), lse_BTN, shift_BTN, place.scale
    )
    low = q_BTNH.dtype
    dq_BTNH = einsum("btns,bsh->btnh", ds_BTNS.astype(low), read.window_BSH)
    new_BSH = einsum("btns,btnh->bsh", ds_BTNS.astype(low), q_BTNH) + einsum(
        "btns,btnh->bsh", p_BTNS.astype(low), do_BTNH.astype(low)
    )
    old_BSH = lax.dynamic_slice_in_dim(dwindow_BSH, read.start, new_BSH.shape[1], axis=1)
    dwindow_BSH = lax.dynamic_update_slice_in_dim(dwindow_BSH, old_BSH + new_BSH, read.start, axis=1)
    if read.pool_BTKH is not None and read.scores_BTNK is not None and slot_BTK is not None:
        if read.pool_BTKH.ndim == 3:
            dp_BTNK = einsum("btnh,bph->btnp", do_BTNH, read.pool_BTKH)
        else:
            dp_BTNK = jnp.swapaxes(einsum("btkh,btnh->btkn", read.pool_BTKH, do_BTNH), 2, 3)
        p_BTNK, ds_BTNK = _weights(read.scores_BTNK, dp_BTNK, lse_BTN, shift_BTN, place.scale)
        dq_BTNH += _over_pool(ds_BTNK.astype(low), read.pool_BTKH)
        if isinstance(place.pool_GBPH, storage.Packed) or dpool_GBPH is None:
            return (dwindow_BSH, dpool_GBPH), dq_BTNH.astype(low)
        if read.pool_BTKH.ndim == 3:
            new_BPH = einsum("btnp,btnh->bph", ds_BTNK.astype(low), q_BTNH)
            new_BPH += einsum("btnp,btnh->bph", p_BTNK.astype(low), do_BTNH.astype(low))
            dpool_GBPH = dpool_GBPH.at[place.group].add(new_BPH)
        else:
            new_BTKH = einsum("btnk,btnh->btkh", ds_BTNK.astype(low), q_BTNH) + einsum(
                "btnk,btnh->btkh", p_BTNK.astype(low), do_BTNH.astype(low)
            )
            b = jnp.arange(slot_BTK.shape[0])[:, None, None]
            entry_BTK = jnp.where(slot_BTK == 0, dpool_GBPH.shape[2], slot_BTK - 1)  # out of range: dropped
            dpool_GBPH = dpool_GBPH.at[place.group, b, entry_BTK].add(new_BTKH, mode="drop")
    return (dwindow_BSH, dpool_GBPH), dq_BTNH.astype(low)


def _over_pool(weights_BTNK: jax.Array, pool_BTKH: jax.Array) -> jax.Array:
    """Weighted sums of entries: of each query's own, or of all [B, P, H]."""
    of = "btnk,bkh->btnh" if pool_BTKH.ndim == 3 else "btnk,btkh->btnh"
    return einsum(of, weights_BTNK, pool_BTKH)


def _weights(
    scores: jax.Array, dp: jax.Array, lse_BTN: jax.Array, shift_BTN: jax.Array, scale: float
) -> tuple[jax.Array, jax.Array]:
    """(p, d loss / d (q . k)), both f32."""
    p = jnp.exp(scores - lse_BTN[..., None])
    return p, p * (dp + shift_BTN[..., None]) * scale


def _masked(scores: jax.Array, seen: jax.Array) -> jax.Array:
    return jnp.where(seen, scores, -jnp.inf)
