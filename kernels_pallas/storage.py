"""How entries (pool KV, index keys, window rows) are stored, and how stored entries become numbers again.

Plain storage is an array of numbers: [G, B, P, H], or the same with the width cut in rows of 128, [G, B, P, H/128, 128]. A TPU
can fetch one entry of the second without moving any other, so pools that a TPU kernel gathers from are held that way.

Packed storage is `Packed`: codes and scales as bytes. Per entry

    e2m1  H/2 bytes: byte b holds channel b in the low nibble and channel b + H/2 in the high one
    e4m3  H bytes
    tail    2 bytes per channel, bf16, behind the codes
    scales  one byte per group of channels, e4m3 (format "main") or e8m0 (the others); in whole eights where there is a tail

so a main entry of 512 channels takes 256 + 32 bytes, an index key of 128 channels 64 + 4, a mixed entry 448 + 2 * 64 + 8.
(Halves, not neighbours, share a
byte: both nibbles of a row unpack to contiguous channels.) A byte array is [..., P, X], or the same bytes in units of 512,
[..., P X / 512, 4, 128], which is the smallest piece that lies together in a TPU's memory; `to_units` and `from_units` convert.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from kernels_pallas import formats
from kernels_pallas.formats import Format
from kernels_pallas.products import settled

LANES = 128
UNIT = 4 * LANES  # bytes


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Packed:
    """Entries [..., P, H] as codes and scales.

    codes: uint8 [..., P, H/2 or H], or in units of 512 bytes.
    scales: uint8 [..., P, H/group], or in units.
    width: H. fmt: element, group and kind of scale.
    """

    codes: jax.Array
    scales: jax.Array
    width: int = dataclasses.field(metadata={"static": True})
    fmt: Format = dataclasses.field(metadata={"static": True})

    @property
    def code_bytes(self) -> int:
        """Bytes of codes per entry, its tail included."""
        coded = self.width - self.fmt.tail
        return (coded // 2 if self.fmt.element == "e2m1" else coded) + 2 * self.fmt.tail

    @property
    def scale_bytes(self) -> int:
        """Bytes of scales per entry."""
        groups = (self.width - self.fmt.tail) // self.fmt.group
        return -(-groups // 8) * 8 if self.fmt.tail else groups

    @property
    def in_units(self) -> bool:
        """Whether the bytes are held in units of 512 (both arrays are, or neither)."""
        return self.codes.ndim == 5

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """[G, B, P, H] of the entries."""
        g, b = self.codes.shape[:2]
        return g, b, math.prod(self.codes.shape[2:]) // self.code_bytes, self.width

    @property
    def ndim(self) -> int:
        """Axes of the entries: always 4."""
        return 4


Entries = jax.Array | Packed


def shape(entries: Entries) -> tuple[int, int, int, int]:
    """[G, B, P, H] of stored entries, however they are held."""
    if isinstance(entries, Packed):
        return entries.shape
    g, b, p = entries.shape[:3]
    return g, b, p, math.prod(entries.shape[3:])


def nbytes(entries: Any) -> int:
    """Bytes that stored entries take (or any arrays in a tree), also of abstract ones."""
    return sum(math.prod(a.shape) * a.dtype.itemsize for a in jax.tree.leaves(entries))


def empty(shape: tuple[int, int, int, int], fmt: Format, *, units: bool = False) -> Packed:
    """Packed entries [G, B, P, H] of zeros."""
    one = Packed(jnp.zeros(0, jnp.uint8), jnp.zeros(0, jnp.uint8), shape[3], fmt)
    codes, scales = (jnp.zeros((*shape[:3], size), jnp.uint8) for size in (one.code_bytes, one.scale_bytes))
    if units:
        codes, scales = to_units(codes), to_units(scales)
    return dataclasses.replace(one, codes=codes, scales=scales)


def in_rows(a: jax.Array) -> jax.Array:
    """[..., H] with the width cut in rows of 128 where H is a multiple of it (else as it is): how pools are held."""
    if a.shape[-1] % LANES:
        return a
    return a.reshape(*a.shape[:-1], a.shape[-1] // LANES, LANES)


def to_units(a: jax.Array) -> jax.Array:
    """uint8 [G, B, P, X] in units of 512 bytes, [G, B, P X / 512, 4, 128]; ValueError where P X is no multiple of 512."""
    g, b, p, x = a.shape
    if UNIT % x:
        raise ValueError(f"entries of {x} bytes do not divide units of {UNIT} bytes: hold them without units")
    if p * x % UNIT:
        raise ValueError(f"{p} entries of {x} bytes are no whole number of units of {UNIT} bytes")
    return a.reshape(g, b, p * x // UNIT, 4, LANES)


def from_units(a: jax.Array, size: int) -> jax.Array:
    """uint8 [G, B, P, size], whether or not `a` is in units."""
    return a.reshape(*a.shape[:2], -1, size)


def pack(x: jax.Array, fmt: Format, *, units: bool = False) -> Packed:
    """Round numbers [G, B, P, H] to `fmt` and store them: `unpack(pack(x, fmt))` equals the rounding, bit for bit."""
    codes, scales = encode(x, fmt)
    if units:
        codes, scales = to_units(codes), to_units(scales)
    return Packed(codes, scales, x.shape[-1], fmt)


def encode(x: jax.Array, fmt: Format) -> tuple[jax.Array, jax.Array]:
    """Codes and scales, uint8 [..., code bytes] and [..., scale bytes], of numbers [..., H]."""
    if fmt.tail:
        codes, scales = encode(x[..., : -fmt.tail], fmt.head)
        tail = lax.bitcast_convert_type(formats.round_to(x[..., -fmt.tail :], jnp.bfloat16), jnp.uint8)
        filled = [(0, 0)] * (scales.ndim - 1) + [(0, -scales.shape[-1] % 8)]
        return jnp.concatenate([codes, tail.reshape(*x.shape[:-1], -1)], axis=-1), jnp.pad(scales, filled)
    elements, scale = formats.quantise(x, fmt)
    return encode_elements(elements.reshape(x.shape), fmt), formats.scale_codes(scale, fmt)


def encode_elements(elements: jax.Array, fmt: Format) -> jax.Array:
    """uint8 codes [..., H or H/2] of grid values [..., H]."""
    if fmt.element == "e4m3":
        return formats.e4m3_codes(elements)
    codes = formats.e2m1_codes(elements)
    half = codes.shape[-1] // 2
    if codes.shape[-1] % 2:
        raise ValueError(f"an odd width of {codes.shape[-1]} cannot be packed two to a byte")
    return codes[..., :half] | (codes[..., half:] << 4)


def decode(codes: jax.Array, scales: jax.Array, fmt: Format) -> jax.Array:
    """f32 numbers [..., H] of codes [..., H or H/2, and a tail's bytes] and scales [..., H/group], both uint8."""
    if fmt.tail:
        pairs = codes[..., -2 * fmt.tail :].reshape(*codes.shape[:-1], fmt.tail, 2)
        tail = lax.bitcast_convert_type(pairs, jnp.bfloat16).astype(jnp.float32)
        codes = codes[..., : -2 * fmt.tail]
        coded = codes.shape[-1] * (2 if fmt.element == "e2m1" else 1)
        return jnp.concatenate([decode(codes, scales[..., : coded // fmt.group], fmt.head), tail], axis=-1)
    if fmt.element == "e4m3":
        elements = formats.e4m3_values(codes)
    else:
        elements = formats.e2m1_values(jnp.concatenate([codes & 15, codes >> 4], axis=-1))
    width = elements.shape[-1]
    grouped = elements.reshape(*elements.shape[:-1], width // fmt.group, fmt.group)
    if fmt.power_of_two:
        values = formats.scale_exactly(grouped, formats.e8m0_exponent(scales)[..., None])
    else:
        values = grouped * formats.e4m3_values(scales)[..., None]
    return values.reshape(elements.shape)


def unpack(entries: Entries) -> jax.Array:
    """All entries as numbers [G, B, P, H]: f32 of packed ones, plain ones in their own dtype."""
    if isinstance(entries, Packed):
        codes, scales = from_units(entries.codes, entries.code_bytes), from_units(entries.scales, entries.scale_bytes)
        return decode(codes, scales, entries.fmt)
    return entries.reshape(shape(entries))


def chunk(entries: Entries, group: jax.Array | int, start: jax.Array | int, size: int) -> jax.Array:
    """Entries [B, size, H] of one group from `start`, read without copying the rest out of its stack."""

    def cut(a: jax.Array, width: int) -> jax.Array:
        a = a.reshape(*a.shape[:2], -1, width)
        place = [jnp.asarray(i, jnp.int32) for i in (group, 0, start, 0)]
        return lax.dynamic_slice(a, place, (1, a.shape[1], size, width))[0]

    if isinstance(entries, Packed):
        return decode(cut(entries.codes, entries.code_bytes), cut(entries.scales, entries.scale_bytes), entries.fmt)
    return cut(entries, shape(entries)[3])


def gather(entries: Entries, group: jax.Array | int, index: jax.Array, block: int = 1) -> jax.Array:
    """Entries [B, ..., block, H] (block > 1) or [B, ..., H] at `index` [B, ...], in blocks of neighbours, of one group."""
    b = jnp.arange(index.shape[0]).reshape(-1, *[1] * (index.ndim - 1))
    out = (*index.shape, *[block] * (block > 1))

    def take(a: jax.Array, width: int) -> jax.Array:
        if a.ndim == 5 and a.shape[3] * a.shape[4] == block * width:  # whole units, without another layout of the stack
            return a[group, b, index].reshape(*out, width)
        return a.reshape(*a.shape[:2], -1, block * width)[group, b, index].reshape(*out, width)

    if isinstance(entries, Packed):
        return decode(take(entries.codes, entries.code_bytes), take(entries.scales, entries.scale_bytes), entries.fmt)
    return take(entries, shape(entries)[3])


def write(entries: Entries, group: jax.Array | int | slice, slot_BE: jax.Array, rows_BEH: Entries) -> Entries:
    """Store rows [B, E, H] as the entries `slot_BE` of one group ([G, B, E, H] of many groups for a slice), in place under jit.

    Packed storage rounds numbers to its format, or takes rows [1, B, E, H] (of a slice: [G, B, E, H]) that are packed in it.
    Slots beyond the last entry are dropped. No two rows may share a slot.
    """
    if not isinstance(entries, Packed):
        if isinstance(rows_BEH, Packed):
            raise ValueError("packed rows cannot be written into plain storage; unpack them")
        return _write(entries, group, slot_BE, rows_BEH.astype(entries.dtype), shape(entries)[3])
    if isinstance(rows_BEH, Packed):
        if rows_BEH.fmt != entries.fmt or rows_BEH.width != entries.width:
            raise ValueError(
                f"rows packed as {rows_BEH.fmt} of {rows_BEH.width} channels do not fit into {entries.fmt} of {entries.width}"
            )
        codes, scales = (a if isinstance(group, slice) else a[0] for a in (rows_BEH.codes, rows_BEH.scales))
    else:
        codes, scales = encode(rows_BEH, entries.fmt)
    return dataclasses.replace(
        entries,
        codes=_write(entries.codes, group, slot_BE, codes, entries.code_bytes),
        scales=_write(entries.scales, group, slot_BE, scales, entries.scale_bytes),
    )


def _write(a: jax.Array, group: jax.Array | int | slice, slot_BE: jax.Array, rows: jax.Array, size: int) -> jax.Array:
    """Rows of `size` numbers or bytes; several may share a unit of `a`, or one may fill whole rows of it."""
    b = jnp.arange(slot_BE.shape[0])[:, None]
    if a.ndim == 4 or a.shape[3] * a.shape[4] == size:
        rows = rows.reshape(*rows.shape[:-1], *a.shape[3:])
        # Else the few rows are written twice, once for whoever reads the pool next, which takes a copy of all of it.
        return settled(a.at[group, b, slot_BE].set(rows, mode="drop"))
    share = a.shape[3] * a.shape[4] // size
    place = (slot_BE % share)[..., None] * size + jnp.arange(size)  # byte of the unit
    unit = (slot_BE // share)[..., None]
    return a.at[group, b[..., None], unit, place // LANES, place % LANES].set(rows, mode="drop")
