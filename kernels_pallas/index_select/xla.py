"""Exact index selection in plain JAX: the reference, the CPU path and the fallback.

Work goes in blocks of queries against chunks of keys, so that temporary memory is queries-in-a-block x P, whatever T is. Cost
follows the visible context and not the capacity: the key loop stops at the last chunk any query of the block can see, and what
is done per entry of the pool (masks, top-k) is done on the shortest of a few prefixes that holds what is visible.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from kernels_pallas import storage
from kernels_pallas.products import einsum
from kernels_pallas.storage import Entries
from kernels_pallas.tiling import map_query_blocks

_KEY_CHUNK = 2048
_FEW_CHUNK = 8192  # where few queries share a chunk
_SCORE_ELEMENTS = 1 << 25  # scores held at once
_GATHER_ELEMENTS = (
    1 << 21
)  # candidate key numbers gathered at once: what a core's cache holds (measured 66 ms against 138 at 2^24)
_FEW = 8  # queries that are scored against all their keys at once
_FEW_ELEMENTS = 5 << 17  # products of those, at most
_HEADS = 8  # whose products are held at once
_PREFIX = 4096  # the shortest


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
    first_BT: jax.Array | None = None,
    interpret: Any = False,
) -> tuple[jax.Array, jax.Array | None]:
    """(selection_BTK, candidates_BTC or None); see the door."""
    del interpret
    bounds = (visible_BT,) if first_BT is None else (visible_BT, first_BT)
    batch, tokens, heads, width = q_BTIJ.shape
    groups, _, entries, _ = storage.shape(keys_GBPJ)
    if groups == 1:
        group = 0  # a constant place lets the compiler read the keys where they lie
    if candidates_BTC is not None:
        bound = (1 if tokens == 1 else 2) * candidates_BTC.shape[2] * block_size
        if entries > bound and entries % block_size == 0:
            per_query = candidates_BTC.shape[2] * block_size * max(width, heads)
            select = functools.partial(_select_gathered, keys_GBPJ, group, topk, block_size)
            size = max(1, _GATHER_ELEMENTS // (per_query * batch))
            (selection_BTK,) = map_query_blocks(select, size, q_BTIJ, w_BTI, candidates_BTC, *bounds)
            return selection_BTK, None
    obeys = candidates_BTC is not None
    rows = (q_BTIJ, w_BTI, *((candidates_BTC,) if obeys else ()), *bounds)

    def among_first(size: int) -> Callable[..., tuple[jax.Array, ...]]:
        select = functools.partial(_select_dense, keys_GBPJ, group, size, topk, block_size, make_candidates, obeys)
        queries = max(1, min(128, _SCORE_ELEMENTS // (size * batch)))
        return lambda *rows: tuple(map_query_blocks(select, queries, *rows))

    # Each length is a program of its own, and compilers of accelerators take seconds for a long top-k.
    step = 8 if jax.default_backend() != "cpu" else 2 if tokens <= _FEW else 4
    sizes = prefixes(entries, step)
    if len(sizes) == 1:
        selection_BTK, *made = among_first(entries)(*rows)
    else:
        last = jnp.max(visible_BT)
        which = sum((last > size).astype(jnp.int32) for size in sizes[:-1])
        selection_BTK, *made = lax.switch(which, [among_first(size) for size in sizes], *rows)
    return selection_BTK, made[0] if made else None


def prefixes(entries: int, step: int) -> list[int]:
    """Lengths of the prefixes of a pool that programs exist for, each `step` times the one before, the whole last."""
    sizes, size = [], _PREFIX
    while size * step <= entries:  # a prefix that is nearly the whole saves nothing
        sizes.append(size)
        size *= step
    return [*sizes, entries]


def index_scores(
    q_BTIJ: jax.Array,
    w_BTI: jax.Array,
    keys_GBPJ: Entries,
    group: jax.Array | int,
    visible_BT: jax.Array,
    first_BT: jax.Array | None = None,
) -> jax.Array:
    """See the door."""
    chunk = storage.shape(keys_GBPJ)[2]
    scores_BTP = _chunk_scores(q_BTIJ, w_BTI, keys_GBPJ, group, 0, chunk)
    bounds = (visible_BT,) if first_BT is None else (visible_BT, first_BT)
    return jnp.where(_within(jnp.arange(chunk), *bounds), scores_BTP, -jnp.inf)


def _within(position: jax.Array, visible_BT: jax.Array, first_BT: jax.Array | None = None) -> jax.Array:
    """Whether an entry [P] or [B, T, P] is one that the query may see."""
    seen = position < visible_BT[:, :, None]
    return seen if first_BT is None else seen & (position >= first_BT[:, :, None])


def _chunk_scores(
    q_BTIJ: jax.Array,
    w_BTI: jax.Array,
    keys_GBPJ: Entries,
    group: jax.Array | int,
    start: jax.Array | int,
    chunk: int,
) -> jax.Array:
    """f32 [B, T, chunk] scores of entries start..start+chunk-1, no visibility applied."""
    tokens, heads, dtype = *q_BTIJ.shape[1:3], q_BTIJ.dtype
    keys_BPJ = storage.chunk(keys_GBPJ, group, start, chunk).astype(dtype)
    w_BTI = w_BTI.astype(jnp.float32)

    # Heads are the outer axis of a product and are added one by one: the keys are read once for all of them, and no sum runs over
    # an inner axis, which CPUs do slowly (measured 3.0 ms against 12.0 for one query and 65,536 entries).
    def add_heads(total_BTP: jax.Array, q_BThJ: jax.Array, w_BTh: jax.Array) -> jax.Array:
        if tokens > _FEW:  # many rows: as the product comes out of them
            dots = _round(einsum("bitj,bpj->bitp", jnp.swapaxes(q_BThJ, 1, 2), keys_BPJ), dtype)
        else:  # few: twice as fast in this order (measured 3.4 ms against 7.1 for one query and 65,536 entries)
            dots = _round(einsum("btij,bpj->bitp", q_BThJ, keys_BPJ), dtype)
        for head in range(w_BTh.shape[2]):
            total_BTP = total_BTP + _round(jax.nn.relu(dots[:, head]) * w_BTh[:, :, head, None], dtype)
        return total_BTP

    total_BTP = jnp.zeros((q_BTIJ.shape[0], tokens, chunk), jnp.float32)
    if heads <= _HEADS or tokens <= _FEW or heads % _HEADS:
        return _round(add_heads(total_BTP, q_BTIJ, w_BTI), dtype)

    def some(i: jax.Array, total_BTP: jax.Array) -> jax.Array:
        q_BThJ, w_BTh = (lax.dynamic_slice_in_dim(a, i * _HEADS, _HEADS, axis=2) for a in (q_BTIJ, w_BTI))
        return add_heads(total_BTP, q_BThJ, w_BTh)

    return _round(lax.fori_loop(0, heads // _HEADS, some, total_BTP), dtype)


def _select_dense(
    keys_GBPJ: Entries,
    group: jax.Array | int,
    entries: int,
    topk: int,
    block_size: int,
    make_candidates: int,
    obeys: bool,
    q_BTIJ: jax.Array,
    w_BTI: jax.Array,
    *rows: jax.Array,
) -> tuple[jax.Array, ...]:
    """Score every visible one of the first `entries` entries, mask to the candidates if there are any, and take the best.

    rows: the candidates if it `obeys` any, then visible_BT and perhaps first_BT.
    """
    candidates_BTC, bounds = (rows[0], rows[1:]) if obeys else (None, rows)
    visible_BT = bounds[0]
    batch, tokens, heads, _ = q_BTIJ.shape
    chunk = _KEY_CHUNK if tokens > _FEW else _FEW_CHUNK
    # Of a stack of one pool the keys are read where they lie; of several, in chunks, because a whole one would be copied.
    in_place = tokens <= _FEW and storage.shape(keys_GBPJ)[0] == 1 and batch * tokens * heads * entries <= _FEW_ELEMENTS
    if in_place or entries <= chunk:
        scores_BTP = _chunk_scores(q_BTIJ, w_BTI, keys_GBPJ, group, 0, entries)
    else:

        def score_chunk(i: jax.Array, scores_BTP: jax.Array) -> jax.Array:
            # The last chunk starts early rather than run over the end; it rewrites equal scores.
            start = jnp.minimum(i * chunk, entries - chunk)
            new = _chunk_scores(q_BTIJ, w_BTI, keys_GBPJ, group, start, chunk)
            return lax.dynamic_update_slice(scores_BTP, new, (0, 0, start))

        chunks = -(-jnp.max(visible_BT) // chunk)
        empty = jnp.full((batch, tokens, entries), -jnp.inf, jnp.float32)
        scores_BTP = lax.fori_loop(0, chunks, score_chunk, empty)
    position = jnp.arange(entries)
    scores_BTP = jnp.where(_within(position, *bounds), scores_BTP, -jnp.inf)
    if candidates_BTC is not None:
        blocks = -(-entries // block_size)
        allowed = jnp.zeros((batch, tokens, blocks + 1), bool)
        b, t = jnp.arange(batch)[:, None, None], jnp.arange(tokens)[None, :, None]
        allowed = allowed.at[b, t, jnp.where(candidates_BTC < 0, blocks, candidates_BTC)].set(True)
        scores_BTP = jnp.where(jnp.take(allowed, position // block_size, axis=2), scores_BTP, -jnp.inf)
    selection_BTK = _best(scores_BTP, topk, None)
    if not make_candidates:
        return (selection_BTK,)
    return selection_BTK, _candidate_blocks(scores_BTP, bounds, block_size, make_candidates)


def _select_gathered(
    keys_GBPJ: Entries,
    group: jax.Array | int,
    topk: int,
    block_size: int,
    q_BTIJ: jax.Array,
    w_BTI: jax.Array,
    candidates_BTC: jax.Array,
    *bounds: jax.Array,
) -> tuple[jax.Array]:
    """Gather and score the candidate blocks alone: the cost does not depend on P."""
    keys_BTCYJ = storage.gather(keys_GBPJ, group, jnp.maximum(candidates_BTC, 0), block_size)
    keys_BTPJ = keys_BTCYJ.reshape(*candidates_BTC.shape[:2], -1, q_BTIJ.shape[3]).astype(q_BTIJ.dtype)
    dots = _round(einsum("btpj,btij->btpi", keys_BTPJ, q_BTIJ), q_BTIJ.dtype)
    terms = _round(jax.nn.relu(dots) * w_BTI.astype(jnp.float32)[:, :, None, :], q_BTIJ.dtype)
    scores_BTP = _round(jnp.sum(terms, axis=-1), q_BTIJ.dtype)
    position = candidates_BTC[..., None] * block_size + jnp.arange(block_size)
    position = jnp.where(candidates_BTC[..., None] < 0, -1, position).reshape(scores_BTP.shape)
    seen = (position >= 0) & _within(position, *bounds)
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


def _candidate_blocks(scores_BTP: jax.Array, bounds: tuple[jax.Array, ...], block_size: int, count: int) -> jax.Array:
    """The `count` blocks of highest maximum, the newest visible entry's block among them whatever its score."""
    entries = scores_BTP.shape[-1]
    blocks = -(-entries // block_size)
    padded = jnp.pad(scores_BTP, ((0, 0), (0, 0), (0, blocks * block_size - entries)), constant_values=-jnp.inf)
    best = jnp.max(padded.reshape(*scores_BTP.shape[:2], blocks, block_size), axis=-1)
    visible_BT, first_BT = bounds[0], bounds[1] if len(bounds) > 1 else 0
    newest = jnp.where(visible_BT > first_BT, (visible_BT - 1) // block_size, -1)
    best = jnp.where(jnp.arange(blocks) == newest[:, :, None], jnp.inf, best)
    return _best(best, count, None)


def _round(x: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """f32 values as the compute dtype would hold them."""
    return lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7) if dtype == jnp.bfloat16 else x
