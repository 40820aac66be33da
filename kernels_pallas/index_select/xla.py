"""Exact index selection in plain JAX: the reference, the CPU path and the fallback.

Work goes in blocks of queries against chunks of keys, so that temporary memory is queries-in-a-block x P, whatever T is,
and the cost follows the visible context: the key loop stops at the last chunk any query of the block can see.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from kernels_pallas import storage
from kernels_pallas.products import einsum
from kernels_pallas.storage import Entries
from kernels_pallas.tiling import map_query_blocks

_KEY_CHUNK = 2048
_SCORE_ELEMENTS = 1 << 25  # scores held at once
_GATHER_ELEMENTS = 1 << 24  # candidate key numbers gathered at once


def run(
    q_BTIJ: jax.Array,
    w_BTI: jax.Array,
    keys_GBPJ: Entries,
    group: jax.Array | int,
    visible_BT: jax.Array,
    *,
    topk: int,
    block_size: int,
    make_candidates: int,
    candidates_BTC: jax.Array | None,
    interpret: Any = False,
) -> tuple[jax.Array, jax.Array | None]:
    """(selection_BTK, candidates_BTC or None); see the door."""
    del interpret
    batch, tokens, _, width = q_BTIJ.shape
    entries = storage.shape(keys_GBPJ)[2]
    if candidates_BTC is not None:
        bound = (1 if tokens == 1 else 2) * candidates_BTC.shape[2] * block_size
        if entries > bound and entries % block_size == 0:
            per_query = candidates_BTC.shape[2] * block_size * max(width, q_BTIJ.shape[2])
            select = functools.partial(_select_gathered, keys_GBPJ, group, topk, block_size)
            size = max(1, _GATHER_ELEMENTS // (per_query * batch))
            (selection_BTK,) = map_query_blocks(select, size, q_BTIJ, w_BTI, visible_BT, candidates_BTC)
            return selection_BTK, None
    select = functools.partial(_select_dense, keys_GBPJ, group, topk, block_size, make_candidates)
    size = max(1, min(128, _SCORE_ELEMENTS // (entries * batch)))
    rows = (q_BTIJ, w_BTI, visible_BT) + (() if candidates_BTC is None else (candidates_BTC,))
    selection_BTK, *made = map_query_blocks(select, size, *rows)
    return selection_BTK, made[0] if made else None


def index_scores(
    q_BTIJ: jax.Array, w_BTI: jax.Array, keys_GBPJ: Entries, group: jax.Array | int, visible_BT: jax.Array
) -> jax.Array:
    """See the door."""
    chunk = storage.shape(keys_GBPJ)[2]
    scores_BTP = _chunk_scores(q_BTIJ, w_BTI, keys_GBPJ, group, 0, chunk)
    return jnp.where(jnp.arange(chunk) < visible_BT[:, :, None], scores_BTP, -jnp.inf)


def _chunk_scores(
    q_BTIJ: jax.Array,
    w_BTI: jax.Array,
    keys_GBPJ: Entries,
    group: jax.Array | int,
    start: jax.Array | int,
    chunk: int,
) -> jax.Array:
    """f32 [B, T, chunk] scores of entries start..start+chunk-1, no visibility applied."""
    batch, tokens, heads, _ = q_BTIJ.shape
    keys_BPJ = storage.chunk(keys_GBPJ, group, start, chunk).astype(q_BTIJ.dtype)
    if tokens <= 8:  # one product over all heads reads the keys once
        dots = _round(einsum("btij,bpj->btip", q_BTIJ, keys_BPJ), q_BTIJ.dtype)
        terms = _round(jax.nn.relu(dots) * w_BTI.astype(jnp.float32)[..., None], q_BTIJ.dtype)
        return _round(jnp.sum(terms, axis=2), q_BTIJ.dtype)

    # Head by head: the [T, I, P] intermediate is never formed (measured 1.5 to 2 times faster on CPUs).
    def add_head(head: jax.Array, total_BTP: jax.Array) -> jax.Array:
        q_BTJ = lax.dynamic_index_in_dim(q_BTIJ, head, axis=2, keepdims=False)
        w_BT = lax.dynamic_index_in_dim(w_BTI, head, axis=2, keepdims=False).astype(jnp.float32)
        dots = _round(einsum("btj,bpj->btp", q_BTJ, keys_BPJ), q_BTIJ.dtype)
        return total_BTP + _round(jax.nn.relu(dots) * w_BT[..., None], q_BTIJ.dtype)

    total_BTP = lax.fori_loop(0, heads, add_head, jnp.zeros((batch, tokens, chunk), jnp.float32))
    return _round(total_BTP, q_BTIJ.dtype)


def _select_dense(
    keys_GBPJ: Entries,
    group: jax.Array | int,
    topk: int,
    block_size: int,
    make_candidates: int,
    q_BTIJ: jax.Array,
    w_BTI: jax.Array,
    visible_BT: jax.Array,
    candidates_BTC: jax.Array | None = None,
) -> tuple[jax.Array, ...]:
    """Score every visible entry, mask to the candidates if there are any, and take the best."""
    batch, tokens = visible_BT.shape
    entries = storage.shape(keys_GBPJ)[2]
    if entries <= _KEY_CHUNK:
        scores_BTP = _chunk_scores(q_BTIJ, w_BTI, keys_GBPJ, group, 0, entries)
    else:

        def score_chunk(i: jax.Array, scores_BTP: jax.Array) -> jax.Array:
            # The last chunk starts early rather than run over the end; it rewrites equal scores.
            start = jnp.minimum(i * _KEY_CHUNK, entries - _KEY_CHUNK)
            new = _chunk_scores(q_BTIJ, w_BTI, keys_GBPJ, group, start, _KEY_CHUNK)
            return lax.dynamic_update_slice(scores_BTP, new, (0, 0, start))

        chunks = -(-jnp.max(visible_BT) // _KEY_CHUNK)
        empty = jnp.full((batch, tokens, entries), -jnp.inf, jnp.float32)
        scores_BTP = lax.fori_loop(0, chunks, score_chunk, empty)
    position = jnp.arange(entries)
    scores_BTP = jnp.where(position < visible_BT[:, :, None], scores_BTP, -jnp.inf)
    if candidates_BTC is not None:
        blocks = -(-entries // block_size)
        allowed = jnp.zeros((batch, tokens, blocks + 1), bool)
        b, t = jnp.arange(batch)[:, None, None], jnp.arange(tokens)[None, :, None]
        allowed = allowed.at[b, t, jnp.where(candidates_BTC < 0, blocks, candidates_BTC)].set(True)
        scores_BTP = jnp.where(jnp.take(allowed, position // block_size, axis=2), scores_BTP, -jnp.inf)
    selection_BTK = _best(scores_BTP, topk, None)
    if not make_candidates:
        return (selection_BTK,)
    return selection_BTK, _candidate_blocks(scores_BTP, visible_BT, block_size, make_candidates)


def _select_gathered(
    keys_GBPJ: Entries,
    group: jax.Array | int,
    topk: int,
    block_size: int,
    q_BTIJ: jax.Array,
    w_BTI: jax.Array,
    visible_BT: jax.Array,
    candidates_BTC: jax.Array,
) -> tuple[jax.Array]:
    """Gather and score the candidate blocks alone: the cost does not depend on P."""
    keys_BTCYJ = storage.gather(keys_GBPJ, group, jnp.maximum(candidates_BTC, 0), block_size)
    keys_BTPJ = keys_BTCYJ.reshape(*candidates_BTC.shape[:2], -1, q_BTIJ.shape[3]).astype(q_BTIJ.dtype)
    dots = _round(einsum("btpj,btij->btpi", keys_BTPJ, q_BTIJ), q_BTIJ.dtype)
    terms = _round(jax.nn.relu(dots) * w_BTI.astype(jnp.float32)[:, :, None, :], q_BTIJ.dtype)
    scores_BTP = _round(jnp.sum(terms, axis=-1), q_BTIJ.dtype)
    position = candidates_BTC[..., None] * block_size + jnp.arange(block_size)
    position = jnp.where(candidates_BTC[..., None] < 0, -1, position).reshape(scores_BTP.shape)
    seen = (position >= 0) & (position < visible_BT[:, :, None])
    return (_best(jnp.where(seen, scores_BTP, -jnp.inf), topk, position),)


def _best(scores_BTP: jax.Array, topk: int, position_BTP: jax.Array | None) -> jax.Array:
    """The topk positions of highest score above -inf, ascending, padded with -1 to width topk."""
    scores_BTP = jnp.where(scores_BTP == 0, 0.0, scores_BTP)  # -0 and +0 are equal here; top_k would order them
    best, index = lax.top_k(scores_BTP, min(topk, scores_BTP.shape[-1]))
    if position_BTP is not None:
        index = jnp.take_along_axis(position_BTP, index, axis=-1)
    last = jnp.iinfo(jnp.int32).max
    index = jnp.sort(jnp.where(best == -jnp.inf, last, index.astype(jnp.int32)), axis=-1)
    index = jnp.where(index == last, -1, index)
    return jnp.pad(index, ((0, 0), (0, 0), (0, topk - index.shape[-1])), constant_values=-1)


def _candidate_blocks(scores_BTP: jax.Array, visible_BT: jax.Array, block_size: int, count: int) -> jax.Array:
    """The `count` blocks of highest maximum, the newest visible entry's block among them whatever its score."""
    entries = scores_BTP.shape[-1]
    blocks = -(-entries // block_size)
    padded = jnp.pad(scores_BTP, ((0, 0), (0, 0), (0, blocks * block_size - entries)), constant_values=-jnp.inf)
    best = jnp.max(padded.reshape(*scores_BTP.shape[:2], blocks, block_size), axis=-1)
    newest = jnp.where(visible_BT > 0, (visible_BT - 1) // block_size, -1)
    best = jnp.where(jnp.arange(blocks) == newest[:, :, None], jnp.inf, best)
    return _best(best, count, None)


def _round(x: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """f32 values as the compute dtype would hold them."""
    return lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7) if dtype == jnp.bfloat16 else x
