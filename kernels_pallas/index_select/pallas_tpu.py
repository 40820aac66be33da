"""Index selection on TPUs: which kernel, in what tiles, for which arguments.

`tpu_dense` scores all visible entries, masked to the candidate blocks if there are any. `tpu_gather` fetches the blocks instead:
less to read, but each block is a copy of its own and serves one query, where dense scoring reads the keys once for eight.
Compiled for v5e, v5p, v6e and tpu7x; not run on a TPU.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from kernels_pallas import formats, storage
from kernels_pallas.dispatch import Unsupported
from kernels_pallas.index_select import tpu_dense, tpu_gather
from kernels_pallas.index_select.tpu_dense import Tiles
from kernels_pallas.index_select.tpu_levels import LANES
from kernels_pallas.index_select.tpu_scores import Keys
from kernels_pallas.storage import Entries, Packed

_ONE_QUERY = Tiles(queries=1, chunk=8192, tile=1024)
_EIGHT_QUERIES = Tiles(queries=8, chunk=2048, tile=512)
_LEVEL_BYTES = 40 << 20  # of VMEM for the scores of a block of queries; the smallest VMEM (tpu7x) has 64 MiB
_OTHER_BYTES = 20 << 20  # of VMEM for everything else: two chunks of keys, dots of a tile, marks of the slots
# Gather where the pool has more than this many times the candidates' entries. One copy of 2 KB takes about as long as
# streaming a few times that, and eight queries share what is streamed.
_GATHER_ONE = 2
_GATHER_MANY = 16


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
    interpret: Any = False,
) -> None:
    """Refuse what the kernels cannot do: blocks that do not fill a piece evenly and, off the interpreter, other layouts."""
    if first_BT is not None:
        raise Unsupported(
            "the kernels score from entry 0 on: documents that share a row (first_BT) need implementation='xla'"
        )
    keys = Keys.of(keys_GBPJ)
    blocks = bool(make_candidates) or candidates_BTC is not None
    if blocks and (block_size & (block_size - 1) or not keys.ways <= block_size <= LANES):
        raise Unsupported(f"{block_size=} must be a power of two from {keys.ways} to {LANES}")
    if interpret:
        return
    *_, entries, width = storage.shape(keys_GBPJ)
    if isinstance(keys_GBPJ, Packed):
        if not keys.units:
            raise Unsupported(
                f"packed keys must be {LANES} wide, of format {formats.INDEX} and in units (storage.to_units), found "
                f"{width} wide, {keys_GBPJ.fmt}, codes {keys_GBPJ.codes.shape}"
            )
    elif width % LANES or keys_GBPJ.dtype not in (jnp.float32, jnp.bfloat16):
        raise Unsupported(f"keys of {width=}, {keys_GBPJ.dtype}: the width must be a multiple of {LANES}, f32 or bf16")
    if blocks and block_size < 8:
        raise Unsupported(f"{block_size=} must be at least 8, the rows of a tile")
    if entries * 4 > _LEVEL_BYTES:
        raise Unsupported(f"{entries} entries of scores do not fit VMEM; at most {_LEVEL_BYTES // 4} do")


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
    tokens, entries = q_BTIJ.shape[1], storage.shape(keys_GBPJ)[2]
    keys, group = Keys.of(keys_GBPJ), jnp.asarray(group, jnp.int32)
    arrays = keys.arrays(keys_GBPJ)
    bf16 = q_BTIJ.dtype == jnp.bfloat16
    visible_BT = jnp.minimum(visible_BT, entries)
    if candidates_BTC is not None and _gathers(keys, tokens, entries, candidates_BTC.shape[2], block_size):
        call = tpu_gather.Call(keys, topk, block_size, bf16)
        return tpu_gather.run(q_BTIJ, w_BTI, arrays, group, visible_BT, candidates_BTC, call, interpret), None
    obeys = candidates_BTC is not None
    call = tpu_dense.Call(_tiles(tokens, entries), keys, entries, topk, block_size, make_candidates, obeys, bf16)
    levels = entries * call.tiles.queries * 4
    selection_BTK, *made = tpu_dense.run(
        q_BTIJ, w_BTI, arrays, group, visible_BT, candidates_BTC, call, levels + _OTHER_BYTES, interpret
    )
    return selection_BTK, made[0] if made else None


def _gathers(keys: Keys, tokens: int, entries: int, candidates: int, block: int) -> bool:
    whole = entries % block == 0 and (not keys.units or block == 8)  # a last block cut short cannot be fetched whole
    return whole and entries > (_GATHER_ONE if tokens == 1 else _GATHER_MANY) * candidates * block


def _tiles(tokens: int, entries: int) -> Tiles:
    tiles = _ONE_QUERY if tokens == 1 or entries * 8 * 4 > _LEVEL_BYTES else _EIGHT_QUERIES
    whole = max(tiles.tile, 8 * LANES // tiles.queries)  # no part of a register of levels
    return Tiles(tiles.queries, min(tiles.chunk, -(-entries // whole) * whole), tiles.tile)
