"""Index scores of a chunk of entries, for GPU kernels: stored bytes in, f32 scores out.

    score[l, q] = sum_i relu(key[l] . query[q, i]) * w[q, i]         entries l, queries q of one program, heads i

Entries are the rows and (query, head) pairs the columns of one matrix product, so that the sum over heads stays inside a
thread and its neighbours, and a key read once serves every query of the program.

A packed key of J channels is J/4 words of 16 bits; word v holds in its four nibbles, from the lowest, the channels

    2v,   J/2 + 2v,   2v + 1,   J/2 + 2v + 1

A dot product does not mind the order of its channels, so nibble n of a run of words is one operand, and the queries are laid
out to match (`lay_queries`). A run is as long as one scale covers. Viewing bytes as wider words moves nothing on a GPU.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import triton as plt

from kernels_pallas import formats, storage
from kernels_pallas.storage import Entries, Packed

_NIBBLES = 4  # of one 16-bit word
_WORDS = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}

# bf16 bits of the e2m1 value in nibble n of a 16-bit word x: its sign, and its two bits of exponent and one of mantissa, moved to
# where bf16 has its sign, the last bits of its exponent and the first of its mantissa. That is the value times 2**-126, exactly
# (0.5 becomes a subnormal); a product with 2**126 (0x7E80) makes it whole, and one with the scale ends it. Two channels at a
# time, in one register.
_SIGN_AND_MAGNITUDE = (
    "shl.b32 s, $1, 12; shl.b32 m, $1, 6;",
    "shl.b32 s, $1, 8; shl.b32 m, $1, 2;",
    "shl.b32 s, $1, 4; shr.b32 m, $1, 2;",
    "mov.b32 s, $1; shr.b32 m, $1, 6;",
)
DEQUANTISE = tuple(
    "{ .reg .b32 s, m, c; mov.b32 c, 0x7E807E80; "
    + move
    + " and.b32 s, s, 0x80008000; and.b32 m, m, 0x01C001C0; or.b32 m, m, s;"
    + " mul.rn.bf16x2 m, m, c; mul.rn.bf16x2 $0, m, $2; }"
    for move in _SIGN_AND_MAGNITUDE
)


@dataclasses.dataclass(frozen=True)
class Scorer:
    """What is static about the scoring of one call."""

    packed: bool
    entries: int  # P
    width: int  # J
    queries: int  # of one program
    heads: int
    dtype: jnp.dtype  # of the queries: decides the dots and the rounding
    interpret: bool
    group: int = 0  # packed: channels under one scale

    @property
    def bits(self) -> int:
        """Significant bits of a score."""
        return 16 if self.dtype == jnp.bfloat16 else 32

    @property
    def run(self) -> int:
        """Packed: 16-bit words in a run, all channels of one nibble of which share a scale."""
        return math.gcd(self.group // 2, self.width // _NIBBLES)

    @property
    def runs(self) -> int:
        """Packed: runs of a key."""
        return self.width // (_NIBBLES * self.run)

    @property
    def scale_word(self) -> int:
        """Packed: bytes of scales that are read as one word."""
        return math.gcd(self.width // self.group, 4)

    def lay_queries(self, q_BTIJ: jax.Array) -> jax.Array:
        """[B, T/queries, operands, queries*heads, channels of an operand]: one operand for plain keys, runs * 4 for packed."""
        b, t = q_BTIJ.shape[:2]
        rows = self.queries * self.heads
        if not self.packed:
            return q_BTIJ.reshape(b, t // self.queries, 1, rows, self.width)
        q = q_BTIJ.reshape(b, t // self.queries, rows, 2, self.runs, self.run, 2)  # half, run, word, byte
        return q.transpose(0, 1, 4, 6, 3, 2, 5).reshape(b, t // self.queries, -1, rows, self.run)

    def lay_keys(self, keys_GBPJ: Entries) -> tuple[jax.Array, ...]:
        """The stack as the kernel reads it, without a copy: [G, B, P, J], or codes and scales as words."""
        if not isinstance(keys_GBPJ, Packed):
            return (keys_GBPJ.reshape(storage.shape(keys_GBPJ)),)
        g, b, p, _ = keys_GBPJ.shape
        return _view(keys_GBPJ.codes, (g, b, p), 2), _view(keys_GBPJ.scales, (g, b, p), self.scale_word)

    # ---- inside the kernel ----

    def load(
        self, key_refs: tuple[Any, ...], group: jax.Array, row: jax.Array, id_L: jax.Array
    ) -> tuple[jax.Array, ...]:
        """Raw entries `id_L` (not in the pool: zeros) of `[group, row]`."""
        there_L = (id_L >= 0) & (id_L < self.entries)
        id_L = jnp.where(there_L, id_L, 0)

        def columns(ref: Any, start: int, size: int) -> jax.Array:
            column_X = start + jnp.arange(size, dtype=jnp.int32)
            at = jnp.broadcast_arrays(group, row, id_L[:, None], column_X[None, :])
            there = jnp.broadcast_to(there_L[:, None], at[0].shape)
            return plt.load(ref.at[tuple(at)], mask=there, other=jnp.zeros((), ref.dtype))

        if not self.packed:
            return (columns(key_refs[0], 0, self.width),)
        scales = (
            plt.load(
                key_refs[1].at[tuple(jnp.broadcast_arrays(group, row, id_L, word))],
                mask=there_L,
                other=jnp.zeros((), key_refs[1].dtype),
            )
            for word in range(key_refs[1].shape[3])
        )
        return *(columns(key_refs[0], i * self.run, self.run) for i in range(self.runs)), *scales

    def scores(self, raw: tuple[jax.Array, ...], queries: tuple[jax.Array, ...], w_R: jax.Array) -> jax.Array:
        """f32 [L, Q] of raw entries; `queries` are the operands, transposed to [channels, rows]."""
        dots_LR = jnp.zeros((raw[0].shape[0], w_R.shape[0]), jnp.float32)
        for key_LX, query_XR in zip(self._operands(raw), queries, strict=True):
            dots_LR += self._dot(key_LX, query_XR)
        terms_LR = self._round(jnp.maximum(self._round(dots_LR), 0.0) * w_R[None, :])
        if self.queries == 1:
            return self._round(jnp.sum(terms_LR, axis=1, keepdims=True))
        return self._round(jnp.sum(terms_LR.reshape(-1, self.queries, self.heads), axis=2))

    def _operands(self, raw: tuple[jax.Array, ...]) -> Iterator[jax.Array]:
        """Key operands [L, channels] in the order of `lay_queries`, each made when its product is due: they are in registers."""
        if not self.packed:
            yield raw[0].astype(self.dtype)
            return
        for i, word_LX in enumerate(raw[: self.runs]):
            for nibble in range(_NIBBLES):
                channel = (nibble & 1) * self.width // 2 + 2 * i * self.run
                byte = channel // self.group
                scale_L = raw[self.runs + byte // self.scale_word].astype(jnp.int32)
                scale_L = (scale_L >> (8 * (byte % self.scale_word))) & 255
                yield self._dequantise(word_LX, nibble, scale_L)

    def _dequantise(self, word_LX: jax.Array, nibble: int, scale_L: jax.Array) -> jax.Array:
        if self.dtype == jnp.bfloat16 and not self.interpret:
            pattern_L = jnp.where(scale_L == 0, 0x40, scale_L << 7)  # 2**(scale - 127), a subnormal at 0
            power_L = lax.bitcast_convert_type(pattern_L.astype(jnp.int16), jnp.bfloat16)
            (value_LX,) = plt.elementwise_inline_asm(
                DEQUANTISE[nibble],
                args=[word_LX, jnp.broadcast_to(power_L[:, None], word_LX.shape)],
                constraints="=r,r,r",
                pack=2,
                result_shape_dtypes=[jax.ShapeDtypeStruct(word_LX.shape, jnp.bfloat16)],
            )
            return value_LX
        code_LX = (word_LX.astype(jnp.int32) >> (4 * nibble)) & 15
        return formats.scale_exactly(formats.e2m1_values(code_LX), scale_L[:, None] - 127).astype(self.dtype)

    def _dot(self, a: jax.Array, b: jax.Array) -> jax.Array:
        precision = lax.Precision.HIGHEST if self.dtype == jnp.float32 else None
        contract = (((1,), (0,)), ((), ()))
        return lax.dot_general(a, b, contract, precision=precision, preferred_element_type=jnp.float32)

    def _round(self, x: jax.Array) -> jax.Array:
        """f32 values as the queries' dtype would hold them."""
        if self.dtype != jnp.bfloat16:
            return x
        if self.interpret:
            return lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)
        return x.astype(jnp.bfloat16).astype(
            jnp.float32
        )  # Triton keeps the pair; XLA, which may drop it, never sees it


def _view(a: jax.Array, lead: tuple[int, int, int], size: int) -> jax.Array:
    """Bytes [..., X] per entry as words of `size` bytes, [G, B, P, X / size], the low byte first."""
    per_entry = math.prod(a.shape) // math.prod(lead)
    if size == 1:
        return a.reshape(*lead, per_entry)
    return lax.bitcast_convert_type(a.reshape(*lead, per_entry // size, size), _WORDS[size])
