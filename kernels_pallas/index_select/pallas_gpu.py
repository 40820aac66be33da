"""Index selection on GPUs: one pass over the keys, exact, without a row of scores in memory.

    program (query block, split, row):   for chunk of the split's entries, ascending:
                                             key[l, q] = sortable score of entry l, EMPTY where not visible to q
                                             best[q]  <- (key[:, q], ids)              `gpu_best`: append, compact when full
                                             blocks[q] <- (max of each block, ids)     only where candidates are made
    merge (only when there are splits):  the survivors of all splits, in order, through the same compaction, tile by tile

Short calls split the visible entries over many programs, so that one query fills a GPU; long ones give every program a block
of queries, which share what is read and dequantised. Obeying candidates is the same loop over another stream of ids: those
that the query's own blocks name, whose entries are gathered. Memory is queries * splits * (K + C) numbers; the splits of a call
times its queries are bounded, or the queries alone. While a chunk is scored, the next ones are in flight (num_stages): nothing
that a run of chunks reads is written in it.

Compiled for H100, H200 and B200, where the products become wgmma and tcgen05 instructions, and interpreted; not run on a GPU.
The constants below follow from register counts and arithmetic, not from measurements.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from kernels_pallas import formats, storage
from kernels_pallas.dispatch import Unsupported, tuned
from kernels_pallas.index_select.gpu_best import Best, sortable
from kernels_pallas.index_select.gpu_scores import Scorer
from kernels_pallas.storage import Entries, Packed

_QUERIES = 4  # of one program, at most
_ROWS = 128  # queries * heads of one program, at most
_STEP = {"bfloat16": (64, 4), "float32": (32, 8)}  # entries of a step and warps of a program, by the queries' dtype
_RUN = 8  # steps between two looks at whether a buffer needs compaction, at least
_STAGES = 3  # steps in flight
_PROGRAMS = 528  # of 4 warps, four for every multiprocessor of an H100 or H200
_WAVES = 4  # so many times _PROGRAMS where splits stay long
_LONG = 32  # a long split has this many times K entries; the shortest has twice K
_MERGE_TILE = 1 << 14  # survivors that one program of a merge compacts, at least
_MERGE_WARPS = 16
_MAX_KEPT = 1 << 12  # K and C: one compaction's registers
_POSITIVE_INFINITY = 0x7F800000


def check(
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
    interpret: Any,
) -> None:
    """Refuse what a GPU cannot take: operands of a tensor core are powers of two from 16 up."""
    if first_BT is not None:
        raise Unsupported(
            "the kernels score from entry 0 on: documents that share a row (first_BT) need implementation='xla'"
        )
    del w_BTI, group, visible_BT
    heads, width = q_BTIJ.shape[2:]
    if isinstance(keys_GBPJ, Packed) and keys_GBPJ.fmt != formats.INDEX:
        raise Unsupported(f"index keys packed as {keys_GBPJ.fmt} cannot be read here; pack them as {formats.INDEX}")
    if interpret:
        return
    least = 64 if isinstance(keys_GBPJ, Packed) else 16
    if not (_power_of_two(heads) and 16 <= heads <= 128 and _power_of_two(width) and least <= width <= 256):
        raise Unsupported(
            f"{heads=} must be a power of two from 16 to 128 and {width=} one from {least} to 256 on a GPU; "
            "implementation='xla' takes any"
        )
    if max(topk, make_candidates) > _MAX_KEPT:
        raise Unsupported(f"{topk=} and {make_candidates=} may not exceed {_MAX_KEPT}; implementation='xla' takes any")
    blocks = make_candidates or candidates_BTC is not None
    if blocks and not (_power_of_two(block_size) and block_size <= 64):
        raise Unsupported(f"{block_size=} must be a power of two up to 64 on a GPU; implementation='xla' takes any")


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
    batch, tokens, heads, width = q_BTIJ.shape
    entries, packed = storage.shape(keys_GBPJ)[2], isinstance(keys_GBPJ, Packed)
    obey = candidates_BTC is not None
    queries = 1 if obey else _queries(tokens, heads)
    scorer = Scorer(
        packed=packed,
        entries=entries,
        width=width,
        queries=queries,
        heads=heads,
        dtype=q_BTIJ.dtype,
        interpret=bool(interpret),
        group=keys_GBPJ.fmt.group if isinstance(keys_GBPJ, Packed) else 0,
    )
    pad = -tokens % queries
    q_BTIJ, w_BTI, visible_BT = (
        jnp.pad(a, [(0, pad if i == 1 else 0) for i in range(a.ndim)]) for a in (q_BTIJ, w_BTI, visible_BT)
    )
    blocks = (tokens + pad) // queries
    arrays = [jnp.asarray(group, jnp.int32).reshape(1), visible_BT]
    specs = [pl.BlockSpec((1,), lambda i, s, b: (0,)), pl.BlockSpec((None, queries), lambda i, s, b: (b, i))]
    if candidates_BTC is not None:
        arrays.append(candidates_BTC)
        specs.append(pl.BlockSpec((None, None, candidates_BTC.shape[2]), lambda i, s, b: (b, i, 0)))
    arrays += [scorer.lay_queries(q_BTIJ), w_BTI.reshape(batch, blocks, queries * heads)]
    specs += [
        pl.BlockSpec((None, None, *arrays[-2].shape[2:]), lambda i, s, b: (b, i, 0, 0, 0)),
        pl.BlockSpec((None, None, queries * heads), lambda i, s, b: (b, i, 0)),
    ]
    pools = scorer.lay_keys(keys_GBPJ)
    arrays += pools
    specs += [pl.BlockSpec(a.shape, lambda i, s, b: (0, 0, 0, 0)) for a in pools]

    chunk, warps = _STEP[q_BTIJ.dtype.name]
    if block_size:
        chunk = block_size * max(1, chunk // block_size)
    positions = candidates_BTC.shape[2] * block_size if candidates_BTC is not None else entries
    splits = _splits(batch * blocks, positions, topk, chunk)
    share = pl.cdiv(pl.cdiv(positions, chunk), splits) * chunk  # positions of a split, at most
    kept = [(topk, min(topk, share), chunk)]
    if make_candidates:
        kept.append((make_candidates, min(make_candidates, share // block_size), chunk // block_size))
    outs: list[jax.ShapeDtypeStruct] = []
    bests = []
    for count, slots, step in kept:
        best = Best(count, scorer.bits, pl.next_power_of_2(count + _RUN * step), barriers=not interpret)
        bests.append(best)
        for size in (slots, slots, best.capacity, best.capacity):
            outs.append(jax.ShapeDtypeStruct((batch, tokens + pad, splits, size), jnp.int32))
    found = pl.pallas_call(
        functools.partial(_stream, scorer, tuple(bests), chunk, splits, block_size, obey),
        grid=(blocks, splits, batch),
        in_specs=specs,
        out_specs=[pl.BlockSpec((None, queries, None, o.shape[3]), lambda i, s, b: (b, i, s, 0)) for o in outs],
        out_shape=outs,
        compiler_params=plt.CompilerParams(num_warps=warps, num_stages=tuned("index_select", "stages", _STAGES)),
        interpret=interpret,
        name="index_select",
    )(*arrays)
    results = []
    for i, best in enumerate(bests):
        ids, keys = (a[:, :tokens] for a in found[4 * i : 4 * i + 2])
        results.append(_merge(best, ids, keys, interpret))
    return results[0], results[1] if make_candidates else None


def _stream(
    scorer: Scorer, bests: tuple[Best, ...], chunk: int, splits: int, block_size: int, obey: bool, *refs: Any
) -> None:
    """One program: a split of the stream of entries that a block of queries may see.

    Input:   group [1], visible [Q], (candidates [C], Q = 1), queries [operands, Q*I, X], weights [Q*I],
             pool [G, B, P, J] or codes [G, B, P, J/4] and scales [G, B, P, words]
    Output:  ids, keys [Q, slots] of the split's best entries; the same of its best blocks where candidates are made
    Scratch: keys, ids [Q, capacity] behind each of the two (outputs that are dropped: Triton has no other global scratch)
    """
    ref = iter(refs)
    group_ref, visible_ref = next(ref), next(ref)
    candidate_ref = next(ref) if obey else None
    query_ref, w_ref = next(ref), next(ref)
    pools = tuple(next(ref) for _ in range(2 if scorer.packed else 1))
    kept = [(next(ref), next(ref), next(ref), next(ref)) for _ in bests]

    split, row = pl.program_id(1), pl.program_id(2)
    group, visible_Q = group_ref[0], visible_ref[...]
    queries = tuple(query_ref[i, :, :].T for i in range(query_ref.shape[0]))
    limit = jnp.minimum(jnp.max(visible_Q), scorer.entries)
    if candidate_ref is not None:  # the blocks that hold anything visible come first, being ascending
        block_C = _load(candidate_ref, jnp.arange(pl.next_power_of_2(candidate_ref.shape[0]), dtype=jnp.int32))
        limit = block_size * jnp.sum(((block_C >= 0) & (block_C * block_size < limit)).astype(jnp.int32))
    share = lax.div(lax.div(limit + (chunk - 1), chunk) + (splits - 1), splits)
    first = split * share
    last = jnp.minimum(first + share, lax.div(limit + (chunk - 1), chunk))
    limit = jnp.minimum(limit, last * chunk)

    def fetch(step: jax.Array) -> tuple[jax.Array, ...]:
        position_L = step * chunk + jnp.arange(chunk, dtype=jnp.int32)
        id_L = jnp.where(position_L < limit, position_L, -1)
        if candidate_ref is not None:
            block_L = plt.load(candidate_ref.at[lax.div(position_L, block_size)], mask=position_L < limit, other=-1)
            id_L = jnp.where(block_L < 0, -1, block_L * block_size + lax.rem(position_L, block_size))
        return id_L, *scorer.load(pools, group, row, id_L)

    def body(step: jax.Array, states: tuple[Any, ...]) -> tuple[Any, ...]:
        id_L, *raw = fetch(step)
        score_LQ = scorer.scores(tuple(raw), queries, w_ref[...].astype(jnp.float32))
        seen_LQ = (id_L[:, None] >= 0) & (id_L[:, None] < visible_Q[None, :]) & (score_LQ != -jnp.inf)
        key_LQ = jnp.where(seen_LQ, sortable(score_LQ, scorer.bits), bests[0].empty)
        stream = [(key_LQ, id_L)]
        if len(bests) > 1:
            count = chunk // block_size
            block_L = step * count + jnp.arange(count, dtype=jnp.int32)
            newest_Q = jnp.where(visible_Q > 0, lax.div(visible_Q - 1, block_size), -1)
            best_LQ = jnp.max(key_LQ.reshape(count, block_size, scorer.queries), axis=1)
            forced = block_L[:, None] == newest_Q[None, :]
            stream.append((jnp.where(forced, _POSITIVE_INFINITY >> (32 - scorer.bits), best_LQ), block_L))
        return tuple(
            best.push(key_ref, id_ref, state, *part)
            for best, (_, _, key_ref, id_ref), state, part in zip(bests, kept, states, stream, strict=True)
        )

    # A run is as many steps as fit into every buffer behind what a compaction leaves; after the last, all are compacted.
    steps = (chunk, chunk // max(block_size, 1))
    run = min((best.capacity - best.count) // step for best, step in zip(bests, steps, strict=False))
    runs = lax.div(jnp.maximum(last - first, 0) + (run - 1), run)

    def many(i: jax.Array, states: tuple[Any, ...]) -> tuple[Any, ...]:
        more = (i < runs).astype(jnp.int32)
        states = tuple(
            best.compact(key_ref, id_ref, state, best.count + more * (best.capacity - run * step - best.count))
            for best, (_, _, key_ref, id_ref), state, step in zip(bests, kept, states, steps, strict=False)
        )
        start = first + i * run
        return lax.fori_loop(start, jnp.minimum(start + run, last), body, states)

    states = lax.fori_loop(0, runs + 1, many, tuple(best.start(scorer.queries) for best in bests))
    for best, (ids_ref, keys_ref, key_ref, id_ref), state in zip(bests, kept, states, strict=True):
        best.copy(key_ref, id_ref, state, ids_ref, keys_ref if splits > 1 else None)


def _merge(best: Best, ids_BTSX: jax.Array, keys_BTSX: jax.Array, interpret: Any) -> jax.Array:
    """The best of all splits, int32 [B, T, count]: every tile of survivors is compacted, until there is one."""
    batch, tokens = ids_BTSX.shape[:2]
    tile = max(_MERGE_TILE, 4 * pl.next_power_of_2(best.count))
    while ids_BTSX.shape[2] > 1:
        ids_BTL, keys_BTL = (a.reshape(batch, tokens, -1) for a in (ids_BTSX, keys_BTSX))
        length = ids_BTL.shape[2]
        size = min(tile, pl.next_power_of_2(length))
        tiles = pl.cdiv(length, size)
        slots = min(best.count, size)
        out = jax.ShapeDtypeStruct((batch, tokens, tiles, slots), jnp.int32)
        whole = pl.BlockSpec((None, None, length), lambda m, t, b: (b, t, 0))
        part = pl.BlockSpec((None, None, None, slots), lambda m, t, b: (b, t, m, 0))
        ids_BTSX, keys_BTSX = pl.pallas_call(
            functools.partial(_merge_tile, best, size),
            grid=(tiles, tokens, batch),
            in_specs=[whole, whole],
            out_specs=[part, part],
            out_shape=[out, out],
            compiler_params=plt.CompilerParams(num_warps=_MERGE_WARPS, num_stages=1),
            interpret=interpret,
            name="index_select_merge",
        )(ids_BTL, keys_BTL)
    found_BTK = ids_BTSX[:, :, 0]
    missing = best.count - found_BTK.shape[2]
    return jnp.pad(found_BTK, ((0, 0), (0, 0), (0, missing)), constant_values=-1)


def _merge_tile(best: Best, size: int, ids_ref: Any, keys_ref: Any, best_ids_ref: Any, best_keys_ref: Any) -> None:
    """One tile of one query's survivors.

    Input:  ids, keys [L], in stream order
    Output: ids, keys [slots]
    """
    slot_N = pl.program_id(0) * size + jnp.arange(size, dtype=jnp.int32)
    id_N, key_N = _load(ids_ref, slot_N), _load(keys_ref, slot_N, other=best.empty)
    best.merge(key_N, id_N, best_ids_ref, best_keys_ref)


def _load(ref: Any, at_N: jax.Array, other: int = -1) -> jax.Array:
    """ref[at], `other` behind its end."""
    return plt.load(ref.at[at_N], mask=at_N < ref.shape[0], other=other)


def _queries(tokens: int, heads: int) -> int:
    """Queries of one program: as many as there are, up to what one product holds."""
    return max(1, min(_QUERIES, _ROWS // heads, pl.next_power_of_2(tokens)))


def _splits(programs: int, positions: int, topk: int, chunk: int) -> int:
    """How many programs share the entries of one block of queries: enough to fill a GPU, but every split leaves K survivors."""
    least = tuned("index_select", "programs", _PROGRAMS)
    wanted = pl.cdiv(least, programs)
    if wanted > 1:
        wanted = max(wanted, min(pl.cdiv(_WAVES * least, programs), positions // (_LONG * topk)))
    return max(1, min(wanted, positions // (2 * topk), pl.cdiv(positions, chunk)))


def _power_of_two(n: int) -> bool:
    return n > 0 and n & (n - 1) == 0
