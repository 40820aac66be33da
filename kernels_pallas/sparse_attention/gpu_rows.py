"""Rows for the GPU kernels: what is common to loading queries and gathering stored entries, and how bytes become numbers there.

Everything is addressed by whole arrays of indices (one per element of the tile), the form of a load that both Triton and the
interpreter take with a mask: an element that is masked off is neither fetched nor seen, whatever lies there.

A packed row is unpacked in registers, eight fp4 codes from a word, and put in order by joins: no number moves between threads.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import triton as plt

from kernels_pallas import formats, storage
from kernels_pallas.formats import Format
from kernels_pallas.storage import Entries, Packed

_TINY = 2.0**-14  # smallest normal float16


@dataclasses.dataclass(frozen=True)
class Layout:
    """Static description of the arrays behind stored entries: one of numbers, or codes and scales."""

    entries: int
    width: int
    fmt: Format | None  # None: plain numbers

    @property
    def arrays(self) -> int:
        """How many arrays hold the entries."""
        return 1 if self.fmt is None else 2


def lay_out(entries: Entries) -> tuple[Layout, list[jax.Array]]:
    """The layout and the arrays [G, B, P, X] of stored entries; every form reshapes to it for free on a GPU.

    Codes of e2m1 are seen as int32 words: eight codes are taken apart at a time, and an array of bytes beyond 2 GiB would be
    addressed by indices that Pallas keeps in 32 bits with a sign.
    """
    _, _, count, width = storage.shape(entries)
    if not isinstance(entries, Packed):
        return Layout(count, width, None), [entries.reshape(storage.shape(entries))]
    codes = storage.from_units(entries.codes, entries.code_bytes)
    if entries.fmt.element == "e2m1":
        codes = lax.bitcast_convert_type(codes.reshape(*codes.shape[:3], -1, 4), jnp.int32)
    return Layout(count, width, entries.fmt), [codes, storage.from_units(entries.scales, entries.scale_bytes)]


def spread(a: jax.Array, shape: tuple[int, ...], axis: int) -> jax.Array:
    """A vector along one axis of `shape`."""
    return lax.broadcast_in_dim(a, shape, (axis,))


def load_tile(
    ref: Any, lead: tuple[Any, ...], rows_R: jax.Array, there_R: jax.Array, width: int, first: int = 0
) -> jax.Array:
    """[R, width] of ref[*lead, row, first:], zero where a row is not there."""
    shape = (rows_R.shape[0], width)
    index = (spread(rows_R, shape, 0), first + lax.broadcasted_iota(jnp.int32, shape, 1))
    return plt.load(ref.at[(*lead, *index)], mask=spread(there_R, shape, 0), other=jnp.zeros((), ref.dtype))


def store_tile(
    ref: Any, lead: tuple[Any, ...], rows_R: jax.Array, there_R: jax.Array, tile: jax.Array, first: int = 0
) -> None:
    """Store a tile [R, width] at ref[*lead, row, first:], except rows that are not there."""
    index = (spread(rows_R, tile.shape, 0), first + lax.broadcasted_iota(jnp.int32, tile.shape, 1))
    plt.store(ref.at[(*lead, *index)], tile, mask=spread(there_R, tile.shape, 0))


def load_rows(
    layout: Layout, refs: tuple[Any, ...], lead: tuple[Any, ...], rows_R: jax.Array, there_R: jax.Array, dtype: Any
) -> jax.Array:
    """Entries [R, H] in `dtype`, of ref[*lead, row]; those that are not there are zero, and never read."""
    if layout.fmt is None:
        return load_tile(refs[0], lead, rows_R, there_R, layout.width).astype(dtype)
    fmt, width = layout.fmt, layout.width
    fp4 = fmt.element == "e2m1"
    part = width // 2 if fp4 else width  # channels that lie in order
    run = math.gcd(part, fmt.group)  # channels of a part that share a scale; less than a group only in tiny widths
    shape = (rows_R.shape[0], part // run, run // 4 if fp4 else run)

    def load(ref: Any, shape: tuple[int, ...], place: jax.Array) -> jax.Array:
        mask = spread(there_R, shape, 0)
        return plt.load(ref.at[(*lead, spread(rows_R, shape, 0), place)], mask=mask, other=jnp.zeros((), ref.dtype))

    def scales(first: int, unit: float) -> list[jax.Array]:
        """Factors [R, runs, 1] of channels from `first` on, whose elements are given in multiples of `unit`."""
        place = (first + lax.broadcasted_iota(jnp.int32, shape[:2], 1) * run) // fmt.group
        factors = _factors(load(refs[1], shape[:2], place), fmt, unit)
        return [lax.broadcast_in_dim(factor, shape, (0, 1)) for factor in factors]

    place = lax.broadcasted_iota(jnp.int32, shape, 1) * shape[2] + lax.broadcasted_iota(jnp.int32, shape, 2)
    codes = load(refs[0], shape, place)
    if not fp4:
        return _scaled(_e4m3(codes), scales(0, 1.0), dtype).reshape(shape[0], width)
    halves = []
    for half in range(2):
        factors = scales(half * part, _TINY)
        even, odd = (
            jnp.stack(
                [_scaled(x, factors, dtype) for x in _e2m1_pair(codes, nibble)], axis=-1
            )  # bytes 0 and 2, 1 and 3
            for nibble in (half, half + 2)
        )
        halves.append(jnp.stack([even, odd], axis=-1).reshape(shape[0], part))
    return jnp.swapaxes(jnp.stack(halves, axis=-1), 1, 2).reshape(shape[0], width)


def _scaled(x: jax.Array, factors: list[jax.Array], dtype: Any) -> jax.Array:
    for factor in factors:
        x = x * factor
    return x.astype(dtype)


def _e4m3(codes: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(codes, jnp.float8_e4m3fn).astype(jnp.float32)


def _e2m1_pair(words: jax.Array, nibble: int) -> list[jax.Array]:
    """f32 of codes `nibble` and `nibble + 4` of int32 words, in multiples of 2**-14.

    The exponent and mantissa bits of e2m1 are read as those of a float16, whose subnormals are alike; both halves of a word at
    once. Converting a float16 is exact everywhere, also where float32 subnormals are flushed.
    """
    magnitude, sign = _shift(words, 9 - 4 * nibble) & 0x0E000E00, _shift(words, 12 - 4 * nibble) & -0x7FFF8000
    bits = magnitude | sign
    halves = bits.astype(jnp.int16), (bits >> 16).astype(jnp.int16)
    return [lax.bitcast_convert_type(half, jnp.float16).astype(jnp.float32) for half in halves]


def _shift(words: jax.Array, left: int) -> jax.Array:
    return words << left if left >= 0 else words >> -left


def _factors(scale: jax.Array, fmt: Format, unit: float) -> list[jax.Array]:
    """What elements in multiples of `unit` are multiplied with. A power of two comes in two normal factors, because 2**-127
    itself would be flushed to zero; products below 2**-126 may be.
    """
    if not fmt.power_of_two:
        return [_e4m3(scale) / unit]
    exponent = formats.e8m0_exponent(scale)
    half = exponent >> 1
    return [formats.power_of_two(half) / unit, formats.power_of_two(exponent - half)]
