"""Rows of a batched cache as slots: the compiled programs that fill, empty, save and restore one row and touch no other.

What a row leaves behind comes in two parts. A `Block` is the pool entries of a run of tokens, the same whoever brings these
tokens: requests share it. A `Snapshot` is all else at one place (windows, open groups, n-gram history), of constant size.
Restoring blocks and a snapshot gives the row bit for bit, at any place, in the middle of a group too.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from csa2_jax.model import ForwardOutput
from csa2_jax.state import Cache, Pool, pool_name, put_row, take_row
from csa2_jax.structure import Structure
from kernels_pallas import empty_half, storage

Block = dict[str, tuple[Any, Any]]  # by ratio: entries and index keys, [G, 1, block / m, ...]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Snapshot:
    """A row at one place, without its pools."""

    length_B: jax.Array
    decoder_from_B: jax.Array
    ngram_BE: jax.Array
    window_LBWH: Any
    draft_window_LBWH: Any
    halves: dict[
        str, tuple[jax.Array | None, jax.Array | None]
    ]  # of entries, and of keys that are compressed by themselves


@functools.partial(jax.jit, static_argnames=("structure", "feed_structure", "full"), donate_argnames=("cache",))
def fill(
    structure: Structure,
    feed_structure: Structure | None,
    state: Any,
    feed_state: Any,
    cache: Cache,
    row: jax.Array,
    tokens_BT: jax.Array,
    count_B: jax.Array,
    *,
    full: bool,
) -> tuple[jax.Array | None, Cache]:
    """Append `count` of the tokens [1, T] to one row, by all layers (and its last logits [1, V]) or by the encoder alone."""
    model = structure.merge(state)
    one = take_row(cache, row)
    if not full:
        return None, put_row(cache, row, model.encode_only(tokens_BT, one, count_B))
    feed = None if feed_structure is None else feed_structure.merge(feed_state)
    out, one = model(tokens_BT, one, count_B, all_logits=False, feed=feed)
    assert isinstance(out, ForwardOutput)
    return out.logits, put_row(cache, row, one)


@functools.partial(jax.jit, donate_argnames=("cache",))
def clear(cache: Cache, row: jax.Array) -> Cache:
    """Make a row one that has consumed nothing. What lies in its arrays stays there, out of every query's reach.

    Except for what entries pool over without knowing whether it was there: the group before the first.
    """
    return dataclasses.replace(
        cache,
        length_B=cache.length_B.at[row].set(0),
        decoder_from_B=cache.decoder_from_B.at[row].set(0),
        ngram_BE=cache.ngram_BE.at[row].set(-1),
        pools={name: _first_group(pool, _ratio(name), row) for name, pool in cache.pools.items()},
    )


def _first_group(pool: Pool, ratio: int, row: jax.Array) -> Pool:
    """The pool with no group before a row's first: where entries overlap, what waits there counts."""

    def none(half_YGBMW: jax.Array | None) -> jax.Array | None:
        if half_YGBMW is None or half_YGBMW.shape[3] < ratio:  # no more than an open group waits
            return half_YGBMW
        fresh = empty_half(1, half_YGBMW.shape[4] // 2, ratio, overlap=True)
        return half_YGBMW.at[:, :, row].set(jnp.stack(fresh))

    return dataclasses.replace(pool, half_YGBMH=none(pool.half_YGBMH), key_half_YGBMJ=none(pool.key_half_YGBMJ))


@functools.partial(jax.jit, static_argnames=("tokens",))
def cut_block(cache: Cache, row: jax.Array, start: jax.Array, *, tokens: int) -> Block:
    """The pool entries of `tokens` tokens from `start` on, both multiples of every ratio. Open groups are no entries."""

    def cut(ratio: int, a: jax.Array, entries: int) -> jax.Array:
        size, place = (_in_pieces(a, entries, n // ratio) for n in (tokens, start))
        return lax.dynamic_slice_in_dim(lax.dynamic_slice_in_dim(a, row, 1, 1), place, size, 2)

    return {name: _parts(functools.partial(cut, _ratio(name)), pool) for name, pool in cache.pools.items()}


@functools.partial(jax.jit, donate_argnames=("cache",))
def put_block(cache: Cache, row: jax.Array, start: jax.Array, block: Block) -> Cache:
    """Inverse of `cut_block`."""
    pools = {}
    for name, pool in cache.pools.items():
        ratio, entries = _ratio(name), storage.shape(pool.kv_GBPH)[2]

        def put(a: jax.Array, b: jax.Array, ratio: int = ratio, entries: int = entries) -> jax.Array:
            place: list[Any] = [0] * a.ndim
            place[1], place[2] = row, _in_pieces(a, entries, start // ratio)
            return lax.dynamic_update_slice(a, b, place)

        kv, key = (
            jax.tree.map(put, old, new) for old, new in zip((pool.kv_GBPH, pool.key_GBPJ), block[name], strict=True)
        )
        pools[name] = dataclasses.replace(pool, kv_GBPH=kv, key_GBPJ=key)
    return dataclasses.replace(cache, pools=pools)


@jax.jit
def cut_snapshot(cache: Cache, row: jax.Array) -> Snapshot:
    """Everything of a row but its pools."""
    one = take_row(dataclasses.replace(cache, pools={n: _without_entries(p) for n, p in cache.pools.items()}), row)
    halves = {name: (pool.half_YGBMH, pool.key_half_YGBMJ) for name, pool in one.pools.items()}
    names = ("length_B", "decoder_from_B", "ngram_BE", "window_LBWH", "draft_window_LBWH")
    return Snapshot(**{name: getattr(one, name) for name in names}, halves=halves)


@functools.partial(jax.jit, donate_argnames=("cache",))
def put_snapshot(cache: Cache, row: jax.Array, saved: Snapshot) -> Cache:
    """Inverse of `cut_snapshot`."""
    bare = dataclasses.replace(cache, pools={n: _without_entries(p) for n, p in cache.pools.items()})
    pools = {n: _with_halves(p, saved.halves[n]) for n, p in take_row(bare, row).pools.items()}
    names = ("length_B", "decoder_from_B", "ngram_BE", "window_LBWH", "draft_window_LBWH")
    one = Cache(**{name: getattr(saved, name) for name in names}, pools=pools, max_length=cache.max_length)
    filled = put_row(bare, row, one)
    pools = {
        n: _with_halves(p, (filled.pools[n].half_YGBMH, filled.pools[n].key_half_YGBMJ)) for n, p in cache.pools.items()
    }
    return dataclasses.replace(filled, pools=pools)


def block_multiple(ratios: tuple[int, ...], cache: Cache) -> int:
    """Blocks must be whole multiples of so many tokens: whole groups, and whole units where bytes are held in units."""
    multiple = 1
    for ratio in ratios:
        pool = cache.pools[pool_name(ratio)]
        entries = storage.shape(pool.kv_GBPH)[2]
        for a in jax.tree.leaves((pool.kv_GBPH, pool.key_GBPJ)):
            multiple = math.lcm(multiple, ratio * max(entries // a.shape[2], 1))
    return multiple


def _without_entries(pool: Pool) -> Pool:
    nothing = jnp.zeros((1, storage.shape(pool.kv_GBPH)[1], 0, 0))
    return dataclasses.replace(pool, kv_GBPH=nothing, key_GBPJ=None if pool.key_GBPJ is None else nothing)


def _with_halves(pool: Pool, halves: tuple[jax.Array | None, jax.Array | None]) -> Pool:
    return dataclasses.replace(pool, half_YGBMH=halves[0], key_half_YGBMJ=halves[1])


def _ratio(name: str) -> int:
    return int(name[1:])


def _parts(cut: Any, pool: Pool) -> tuple[Any, Any]:
    entries = storage.shape(pool.kv_GBPH)[2]
    return tuple(jax.tree.map(lambda a: cut(a, entries), part) for part in (pool.kv_GBPH, pool.key_GBPJ))  # type: ignore[return-value]


def _in_pieces(a: jax.Array, entries: int, count: Any) -> Any:
    """A count of entries as one of the pieces in which an array holds `entries` of them on axis 2 (units of bytes, perhaps)."""
    held = a.shape[2]
    return count // (entries // held) if entries >= held else count * (held // entries)
