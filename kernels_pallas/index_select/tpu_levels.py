"""Inside TPU kernels: the K best of many scores that lie in VMEM, exactly, without sort, scan, gather or scatter.

Scores are held as levels, int32 numbers in the order of the scores (`levels_of`), ABSENT where nothing may be selected. Row
`piece * queries + t` of the [pieces * queries, 128] scratch holds 128 of query t's entries, so that a vector register holds
eight queries, or eight pieces of one, and every pass works on full registers. Which entry of its piece a lane holds is the
`order` of the lanes: their own, or what the storage of the keys makes convenient.

    threshold   tau = the K-th best level: its bits from the highest down, each by counting the levels that reach it.
                Above tau all are selected, at tau the first `need` in position.
    compact     slot k's entry. With G, E the numbers above and at tau in the pieces up to one, upto = G + min(E, need) of
                the selected are in or before it. Slot k lies in the first piece with upto > k: the pieces that it passed
                are counted, its own piece's marks come by a one-hot matrix product, and a triangular product ranks them.

All numbers in bf16 products are whole and at most 256, so that these are exact; sums are f32, exact up to 2**24.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

LANES = 128
ABSENT = -(2**31)
FORCED = 0x7FFF0000  # above every number; one more than it does not overflow
PIECES = 128  # pieces of one step of `compact` and `allow`; the scratch holds a multiple of them
_SUBLANES = 8
_NEGATIVE_INFINITY = float("-inf")


def whole_lanes(n: int) -> int:
    """n rounded up to whole lanes."""
    return pl.cdiv(n, LANES) * LANES


def levels_of(scores: jax.Array, seen: jax.Array, bf16: bool) -> jax.Array:
    """int32 in the order of f32 scores, ABSENT where not seen; -0.0 is 0.0. Of bf16 scores only the upper half differs."""
    bits = lax.bitcast_convert_type(scores, jnp.int32)
    level = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    level = jnp.where(level == -1, 0, level)  # bits of -0.0
    if bf16:
        level &= ~0xFFFF
    return jnp.where(seen & (scores > _NEGATIVE_INFINITY), level, ABSENT)


def iota(shape: tuple[int, ...], axis: int) -> jax.Array:
    """int32 positions along an axis."""
    return lax.broadcasted_iota(jnp.int32, shape, axis)


def threshold(
    level_ref: Any, blocks: jax.Array, *, rows: int, queries: int, count: int, bf16: bool
) -> tuple[jax.Array, jax.Array]:
    """(tau, need), int32 [8, 1], sublane s for query s % queries: see above. Only the first blocks * rows rows are read."""

    def reaching(bound_81: jax.Array) -> jax.Array:
        def add(i: jax.Array, total: jax.Array) -> jax.Array:
            x = level_ref[pl.ds(pl.multiple_of(i * rows, rows), rows), :].reshape(rows // _SUBLANES, _SUBLANES, LANES)
            return total + jnp.sum((x >= bound_81).astype(jnp.int32), axis=0)

        total = lax.fori_loop(0, blocks, add, jnp.zeros((_SUBLANES, LANES), jnp.int32))
        number = jnp.sum(total, axis=1, keepdims=True)
        if queries == 1:
            number = jnp.broadcast_to(jnp.sum(number, axis=0, keepdims=True), number.shape)
        return number

    present = reaching(jnp.full((_SUBLANES, 1), ABSENT + 1, jnp.int32))

    def is_open(state: tuple[jax.Array, ...]) -> jax.Array:
        bit, _, number = state
        undecided = (present > count) & (number != count)
        return (bit >= (16 if bf16 else 0)) & (jnp.max(undecided.astype(jnp.int32)) > 0)

    def halve(state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        bit, tau, number = state
        # Adding to ABSENT, the lowest number, sets bits from the top; only the first, the sign, wraps round.
        bound = tau + lax.shift_left(jnp.int32(1), bit)
        reached = reaching(bound)
        keep = (reached >= count) & (present > count)
        return bit - 1, jnp.where(keep, bound, tau), jnp.where(keep, reached, number)

    lowest = jnp.full((_SUBLANES, 1), ABSENT, jnp.int32)
    _, tau, _ = lax.while_loop(is_open, halve, (jnp.int32(31), lowest, present))
    return tau, count - reaching(tau + 1)


def compact(
    level_ref: Any,
    mark_ref: Any,
    slot_ref: Any,
    t: jax.Array | int,
    tau_81: jax.Array,
    need_81: jax.Array,
    pieces: jax.Array,
    order_lanes: jax.Array,
    *,
    queries: int,
    slots: int,
) -> list[jax.Array]:
    """Query t's selected positions, ascending, -1 behind them: int32 [1, 128] each, `slots` in all.

    mark_ref f32 [128, >= slots] and slot_ref f32 [3, >= slots] are scratch, order_lanes int32 [1, 128] the places of the lanes.
    """
    chosen = iota(tau_81.shape, 0) == t
    tau = jnp.sum(jnp.where(chosen, tau_81, 0), axis=0, keepdims=True)
    need = jnp.sum(jnp.where(chosen, need_81, 0), axis=0, keepdims=True).astype(jnp.float32)
    lane = iota((1, LANES), 1)
    tiles = [(pl.ds(first, LANES), (lane + first).astype(jnp.float32)) for first in range(0, slots, LANES)]
    ones = jnp.ones((LANES, LANES), jnp.bfloat16)
    upto_self = (iota((PIECES, PIECES), 0) >= iota((PIECES, PIECES), 1)).astype(jnp.bfloat16)
    mark_ref[...] = jnp.zeros_like(mark_ref)
    slot_ref[...] = jnp.zeros_like(slot_ref)

    def step(i: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        above, equal = carry  # [1, 128], the same in every lane, as are the [pieces, 128] below
        x = level_ref[rows_of(i * PIECES, t, queries), :]
        x = jnp.where(i * PIECES + iota((PIECES, 1), 0) < pieces, x, ABSENT)
        is_above, is_equal = x > tau, (x == tau) & (x > ABSENT)
        here_above = _dot(is_above.astype(jnp.bfloat16), ones)
        here_equal = _dot(is_equal.astype(jnp.bfloat16), ones)
        upto_above = _dot(upto_self, here_above.astype(jnp.bfloat16)) + above
        upto_equal = _dot(upto_self, here_equal.astype(jnp.bfloat16)) + equal
        taken = jnp.minimum(upto_equal, need)
        upto = upto_above + taken
        before = upto_above - here_above + jnp.minimum(upto_equal - here_equal, need)
        mark = jnp.where(is_above, 2.0, jnp.where(is_equal, 1.0, 0.0)).astype(jnp.bfloat16)
        for at, slot in tiles:
            passed = upto <= slot
            holds = (before <= slot) & ~passed
            mark_ref[:, at] += _dot(mark, holds.astype(jnp.bfloat16), contract=(0, 0))
            slot_ref[0:1, at] += jnp.sum(passed.astype(jnp.float32), axis=0, keepdims=True)
            for row, value in ((1, upto), (2, taken)):
                last = jnp.max(jnp.where(passed, value, 0.0), axis=0, keepdims=True)
                slot_ref[row : row + 1, at] = jnp.maximum(slot_ref[row : row + 1, at], last)
        return upto_above[PIECES - 1 :], upto_equal[PIECES - 1 :]

    none = jnp.zeros((1, LANES), jnp.float32)
    above, equal = lax.fori_loop(0, pl.cdiv(pieces, PIECES), step, (none, none))
    total = above + jnp.minimum(equal, need)

    order_column = column(order_lanes)
    upto_lane = (order_column >= order_lanes).astype(jnp.bfloat16)
    found = []
    for at, slot in tiles:
        piece, base, taken = (slot_ref[row : row + 1, at] for row in range(3))
        mark = mark_ref[:, at]
        ranked_above = _dot(upto_lane, (mark > 1.5).astype(jnp.bfloat16))
        ranked_equal = _dot(upto_lane, ((mark > 0.5) & (mark < 1.5)).astype(jnp.bfloat16))
        rank = ranked_above + jnp.minimum(taken + ranked_equal, need) - taken
        place = jnp.sum((rank <= slot - base).astype(jnp.float32), axis=0, keepdims=True)
        position = piece.astype(jnp.int32) * LANES + place.astype(jnp.int32)
        found.append(jnp.where(slot < total, position, -1))
    return found


def take(
    level_ref: Any,
    scratch: tuple[Any, Any],
    out_ref: Any,
    pieces: jax.Array,
    order_lanes: jax.Array,
    *,
    queries: int,
    rows: int,
    count: int,
    bf16: bool,
) -> None:
    """Write the `count` best of every query to out_ref [queries, K], K >= count in whole lanes. rows: of one pass of a loop."""
    tau, need = threshold(
        level_ref, pl.cdiv(pieces * queries, rows), rows=rows, queries=queries, count=count, bf16=bf16
    )
    row = iota((queries, 1), 0)

    def one(t: jax.Array, carry: None) -> None:
        found = compact(level_ref, *scratch, t, tau, need, pieces, order_lanes, queries=queries, slots=out_ref.shape[1])
        for at, positions in enumerate(found):  # one row cannot be stored at a place known at run time only
            lanes = pl.ds(at * LANES, LANES)
            out_ref[:, lanes] = jnp.where(row == t, positions, out_ref[:, lanes])

    lax.fori_loop(0, queries, one, None)


def allow(
    level_ref: Any, blocks_ref: Any, pieces: jax.Array, order_lanes: jax.Array, *, queries: int, block: int
) -> None:
    """Make ABSENT whatever lies in none of the blocks of its query, blocks_ref int32 [queries, C], -1 for none.

    Which blocks a row names, times which lanes these cover: a product over C that is 1 where an entry is allowed.
    """
    per_piece = LANES // block
    place_L1 = column(order_lanes) // block

    def query(t: jax.Array, carry: None) -> None:
        blocks_1C = blocks_ref[pl.ds(t, 1), :]
        covers_LC = (place_L1 == (blocks_1C & (per_piece - 1))).astype(jnp.bfloat16)
        piece_1C = blocks_1C >> (per_piece.bit_length() - 1)

        def step(i: jax.Array, carry: None) -> None:
            rows = rows_of(i * PIECES, t, queries)
            names_PC = (piece_1C == i * PIECES + iota((PIECES, 1), 0)).astype(jnp.bfloat16)
            allowed = _dot(names_PC, covers_LC, contract=(1, 1)) > 0.5
            level_ref[rows, :] = jnp.where(allowed, level_ref[rows, :], ABSENT)

        lax.fori_loop(0, pl.cdiv(pieces, PIECES), step, None)

    lax.fori_loop(0, queries, query, None)


def order_of_entries(ways: int) -> jax.Array:
    """int32 [1, 128], the place within its piece of each lane's entry: every ways-th lies in the same part of the lanes."""
    lane, part = iota((1, LANES), 1), LANES // ways
    return ways * (lane % part) + lane // part


def order_of_blocks(ways: int, block: int) -> jax.Array:
    """int32 [1, 128], the place of each lane's block among the 128 blocks of a row that `combine` made."""
    lane, part, span = iota((1, LANES), 1), LANES // ways, block // ways
    piece = lane % span + span * (lane // part)
    return piece * (LANES // block) + lane % part // span


def combine(level_ref: Any, seen_ref: Any, pieces: jax.Array, ways: int, *, queries: int, block: int) -> None:
    """Put the best level of every block of entries where the levels were, 128 blocks a row, the newest visible one FORCED.

    `block` pieces make a row. Each block's best comes to the first of its lanes by rotation, and the j-th piece moves on by j
    lanes into the room that the others leave; `order_of_blocks` says where that is.
    """
    lane, part, span = iota((1, LANES), 1), LANES // ways, block // ways
    newest = (seen_ref[0:_SUBLANES, 0:1] - 1) // block
    order = order_of_blocks(ways, block)
    together = 1 if queries == _SUBLANES else _SUBLANES  # rows of blocks in a register

    def step(i: jax.Array, carry: None) -> None:
        first = i * together
        row = first + (0 if together == 1 else iota((_SUBLANES, 1), 0))
        total = jnp.full((_SUBLANES, LANES), ABSENT, jnp.int32)
        for j in range(block):
            source = pl.ds((first * block + j) * queries, _SUBLANES, stride=1 if together == 1 else block)
            best = jnp.where(row * block + j < pieces, level_ref[source, :], ABSENT)
            for shift in [1 << n for n in range((span - 1).bit_length())]:
                best = jnp.maximum(best, pltpu.roll(best, LANES - shift, 1))
            for shift in [part << n for n in range((ways - 1).bit_length())]:
                best = jnp.maximum(best, pltpu.roll(best, shift, 1))
            if j % span:
                best = pltpu.roll(best, j % span, 1)
            total = jnp.where((lane % span == j % span) & (lane // part == j // span), best, total)
        total = jnp.where(row * LANES + order == newest, FORCED, total)
        level_ref[pl.ds(pl.multiple_of(i * _SUBLANES, _SUBLANES), _SUBLANES), :] = total

    lax.fori_loop(0, pl.cdiv(pl.cdiv(pieces, block), together), step, None)


def rows_of(piece: jax.Array, t: jax.Array | int, queries: int) -> Any:
    """Rows of PIECES pieces of query t from `piece` on."""
    if queries == 1:
        return pl.ds(pl.multiple_of(piece, PIECES), PIECES)
    return pl.ds(piece * queries + t, PIECES, stride=queries)


def column(row: jax.Array) -> jax.Array:
    """[1, n] -> [n, 1]."""
    n = row.shape[1]
    return jnp.sum(jnp.where(iota((n, n), 0) == iota((n, n), 1), row, jnp.zeros_like(row)), axis=1, keepdims=True)


def _dot(a: jax.Array, b: jax.Array, contract: tuple[int, int] = (1, 0)) -> jax.Array:
    dimensions = (((contract[0],), (contract[1],)), ((), ()))
    return lax.dot_general(a, b, dimensions, preferred_element_type=jnp.float32)
