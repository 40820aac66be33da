"""Inside TPU kernels: stored index keys as numbers, and their scores.

Plain keys are read as they stand. Packed keys come in units (`storage`): eight entries of 64 bytes are one row of 128 words,
byte k of which holds entries 2k and 2k + 1 of the unit, half a row each. They become bf16, which holds them exactly, two to a
word and without arithmetic on floats: a magnitude ee|m of a group with scale byte b is the bf16 with exponent ee + b - 1 and
mantissa m, except that 0 is 0 and 1/2 has exponent b - 1 and no mantissa. (A scale below 2**-126, byte 0, counts as 2**-126;
the format makes none.) The two numbers of a word are four entries apart, and lane l of a piece's scores then is entry
4 (l % 32) + l // 32: moving lanes back would cost more than remembering this order.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kernels_pallas import formats, storage
from kernels_pallas.formats import Format
from kernels_pallas.index_select.tpu_levels import LANES, column, iota, levels_of, order_of_entries
from kernels_pallas.storage import Entries, Packed

_HALF = LANES // 2
_UNIT = 8  # entries of a unit of codes
_SCALE_UNIT = 128  # entries of a unit of scales
_PAIR = 0x00010001  # one in each half of a word


@dataclasses.dataclass(frozen=True)
class Keys:
    """How a call's keys are held.

    fmt: None for plain ones. units: in units of 512 bytes, of eight entries' codes and of 128 entries' scales.
    """

    fmt: Format | None
    units: bool

    @classmethod
    def of(cls, keys_GBPJ: Entries) -> Keys:
        if not isinstance(keys_GBPJ, Packed):
            return cls(None, False)
        whole = keys_GBPJ.in_units and keys_GBPJ.width == LANES and keys_GBPJ.fmt == formats.INDEX
        return cls(keys_GBPJ.fmt, whole)

    def arrays(self, keys_GBPJ: Entries) -> list[jax.Array]:
        """What the kernel is given, entries (or units of them) on axis 2."""
        if not isinstance(keys_GBPJ, Packed):
            return [keys_GBPJ]
        if self.units:
            return [keys_GBPJ.codes, keys_GBPJ.scales]
        sizes = (keys_GBPJ.code_bytes, keys_GBPJ.scale_bytes)
        return [storage.from_units(a, n) for a, n in zip((keys_GBPJ.codes, keys_GBPJ.scales), sizes, strict=True)]

    @property
    def arrays_held(self) -> int:
        """How many arrays `arrays` gives."""
        return 1 if self.fmt is None else 2

    @property
    def ways(self) -> int:
        """The order of entries in a piece: `tpu_levels.order_of_entries`."""
        return 4 if self.units else 1

    def block_shapes(self, arrays: list[jax.Array], entries: int) -> list[tuple[int, ...]]:
        """Shape of `entries` neighbours in each array, from axis 2 on; of scales at least a unit."""
        per_row = (_UNIT, _SCALE_UNIT) if self.units else (1, 1)
        return [(max(1, entries // n), *a.shape[3:]) for a, n in zip(arrays, per_row, strict=False)]

    def first_rows(self, entry: jax.Array) -> tuple[jax.Array, ...]:
        """Where on axis 2 of each array an entry (the first of a unit) lies."""
        return (entry // _UNIT, entry // _SCALE_UNIT) if self.units else (entry, entry)

    def numbers(self, stored: list[jax.Array]) -> jax.Array:
        """Keys [P, J] of what is stored of whole pieces, rows in the order of lanes."""
        if self.fmt is None:
            return stored[0]
        if not self.units:
            return storage.decode(stored[0], stored[1], self.fmt)
        codes, scales = stored
        pieces = [jnp.broadcast_to(words(scales[piece]), (LANES // _UNIT, LANES)) for piece in range(scales.shape[0])]
        place = iota((LANES // _UNIT, 1), 0)
        return of_units(words(codes), jnp.concatenate(pieces), jnp.concatenate([place] * len(pieces)))

    def numbers_of_blocks(self, stored: list[jax.Array], blocks_U1: jax.Array) -> jax.Array:
        """The same of units from anywhere, which are the blocks named and come with a unit of scales each."""
        codes, scales = stored
        return of_units(words(codes), words(scales), blocks_U1 % (_SCALE_UNIT // _UNIT))


def words(units: jax.Array) -> jax.Array:
    """Bytes [.., 4, 128] as int32 words [.., 128]; byte k of a word is from row k."""
    return pltpu.bitcast(units.reshape(-1, LANES), jnp.int32)


def of_units(codes_UL: jax.Array, scales_UL: jax.Array, place_U1: jax.Array) -> jax.Array:
    """bf16 [8 U, 128] of units of codes and, for each, the words of its unit of scales and its place there (of 16).

    A unit of scales has byte r of lane 4 e + g for group g of entry 32 r + e.
    """
    lane = iota(codes_UL.shape, 1)
    turned = pltpu.roll(codes_UL, _HALF, 1)
    # Low nibbles of the words are channels 0 to 63, high ones 64 to 127: both halves of an entry side by side again.
    even = jnp.where(lane < _HALF, codes_UL, turned >> 4)
    odd = jnp.where(lane < _HALF, turned, codes_UL >> 4)
    scale = jnp.maximum((scales_UL >> (8 * (place_U1 // 4))) & 0xFF, 1) - 1
    keys = []  # entries 4 row + 0 to 3
    for first in range(4):
        at = 32 * (place_U1 % 4) + 4 * first + lane // 32
        exponent = jnp.take_along_axis(scale, at, axis=1) << 7 | jnp.take_along_axis(scale, at + 16, axis=1) << 23
        code = (odd if first % 2 else even) >> (8 * (first // 2))
        magnitude = code & (7 * _PAIR)
        some = (magnitude + 7 * _PAIR) & (8 * _PAIR)  # 8 from 1 on
        whole = (magnitude + 6 * _PAIR) & (8 * _PAIR)  # 8 from 2 on
        mask = (some << 13) - (some >> 3)
        bits = (exponent & mask) + (magnitude << 6) - ((some ^ whole) << 3)
        keys.append(pltpu.bitcast(bits | ((code & (8 * _PAIR)) << 12), jnp.bfloat16))
    size = LANES // len(keys)
    return jnp.concatenate([k[at : at + size] for at in range(0, keys[0].shape[0], size) for k in keys])


def scores(q_RJ: jax.Array, weight_ref: Any, keys_PJ: jax.Array, queries: int) -> jax.Array:
    """f32 [queries, P]. Rows of q are head by head, `queries` in each; weight_ref f32 [R, 128] has the rows' weights."""
    bf16 = q_RJ.dtype == jnp.bfloat16
    precision = None if bf16 else lax.Precision.HIGHEST
    dots_RP = lax.dot_general(
        q_RJ,
        keys_PJ.astype(q_RJ.dtype),
        (((1,), (1,)), ((), ())),
        precision=precision,
        preferred_element_type=jnp.float32,
    )
    rows, entries = dots_RP.shape
    size = rows if queries == 1 else queries  # rows weighed at once: all heads of one query, or a head of all queries
    total = jnp.zeros((queries, entries), jnp.float32)
    for head in range(0, rows, size):
        dots = _round(jnp.maximum(dots_RP[head : head + size], 0.0), bf16)
        weight = jnp.concatenate([weight_ref[head : head + size, :]] * (entries // LANES), axis=1)
        terms = _round(dots * weight, bf16)
        total += jnp.sum(terms, axis=0, keepdims=True) if queries == 1 else terms
    return _round(total, bf16)


def write_weights(weight_ref: Any, w_QI: jax.Array) -> None:
    """Weights of the rows that `scores` has, f32 in every lane of [I * queries, 128]."""
    queries, heads = w_QI.shape
    w_QI = w_QI.astype(jnp.float32)
    if queries == 1:
        weight_ref[...] = jnp.broadcast_to(column(w_QI), weight_ref.shape)
        return
    for head in range(heads):
        weight_ref[head * queries : (head + 1) * queries, :] = jnp.broadcast_to(
            w_QI[:, head : head + 1], (queries, LANES)
        )


def _round(x: jax.Array, bf16: bool) -> jax.Array:
    """f32 x as bf16 would hold it, nearest even. From the bits: a narrowing cast that is widened again may be dropped."""
    if not bf16:
        return x
    bits = lax.bitcast_convert_type(x, jnp.int32)
    return lax.bitcast_convert_type((bits + 0x7FFF + ((bits >> 16) & 1)) & ~0xFFFF, jnp.float32)


def write_levels(
    level_ref: Any, scores_QP: jax.Array, entry: jax.Array, seen_Q1: jax.Array, ways: int, *, bf16: bool
) -> None:
    """Scores of whole pieces from `entry` on as levels, where they belong in [pieces * queries, 128]."""
    queries = scores_QP.shape[0]
    order = order_of_entries(ways)
    for first in range(0, scores_QP.shape[1], LANES):
        row = (entry + first) // LANES * queries
        row = row if queries == 1 else pl.multiple_of(row, queries)
        seen = entry + first + order < seen_Q1
        level_ref[pl.ds(row, queries), :] = levels_of(scores_QP[:, first : first + LANES], seen, bf16)
