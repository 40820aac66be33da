"""What follows the pooling: cast, RMSNorm (the latent), rotary position, rounding and storage (the entry).

    latent = cast(x * rsqrt(mean(x^2) + eps) * norm),   x = cast(pooled)
    entry  = store(cast(rotate(latent)))

Norm and rotation are f32; cast is to the compute dtype. `finish` is the exact reference, in separate XLA steps; the functions
below it are pieces that kernels use as they stand: elementwise, without a reshape or a narrowing cast that could be skipped.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax

from kernels_pallas import formats, storage
from kernels_pallas.storage import Packed

Storage = Literal["packed", "rounded", "plain"]
Tail = tuple[jax.Array, jax.Array, jax.Array]  # norm [H], cos and sin [B, E, R/2]


@dataclasses.dataclass(frozen=True)
class Finish:
    """What a call makes of a pooled entry (static)."""

    eps: float
    dtype: jnp.dtype  # compute dtype
    storage: Storage
    entry_dtype: jnp.dtype  # of entries that are stored as numbers


def finish(pooled_BEH: jax.Array, tail: Tail, how: Finish) -> tuple[jax.Array, jax.Array | Packed]:
    """(latent [B, E, H] in the compute dtype, stored entry)."""
    norm_H, cos_BER, sin_BER = tail
    x = formats.round_to(pooled_BEH, how.dtype).astype(jnp.float32)
    scaled = x * lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + jnp.float32(how.eps))
    latent_BEH = formats.round_to(scaled * norm_H.astype(jnp.float32), how.dtype)
    rotated_BEH = rotate(latent_BEH, cos_BER, sin_BER)
    if how.storage == "packed":
        return latent_BEH, storage.pack(rotated_BEH[None], formats.MAIN)
    if how.storage == "rounded":
        rotated_BEH = formats.rounded(rotated_BEH, formats.MAIN)
    return latent_BEH, formats.round_to(rotated_BEH, how.entry_dtype)


def rotate(x_BEH: jax.Array, cos_BER: jax.Array, sin_BER: jax.Array) -> jax.Array:
    """Turn the pairs (2j, 2j + 1) of the last R channels, f32 inside, cast back."""
    width = 2 * cos_BER.shape[-1]
    pairs = x_BEH[..., -width:].astype(jnp.float32).reshape(*x_BEH.shape[:-1], width // 2, 2)
    even, odd = pairs[..., 0], pairs[..., 1]
    turned = jnp.stack([even * cos_BER - odd * sin_BER, even * sin_BER + odd * cos_BER], axis=-1)
    turned = formats.round_to(turned.reshape(*x_BEH.shape[:-1], width), x_BEH.dtype)
    return jnp.concatenate([x_BEH[..., :-width], turned], axis=-1)


# ---- pieces for kernels ----

Segment = tuple[int, Callable[[Any], tuple[jax.Array, jax.Array]]]  # n, and read(i) -> (c, z) for i < n
Collapse = Callable[[jax.Array, Callable[..., jax.Array]], jax.Array]
_HELD_SLOTS = 16


def holds(ratio: int, overlap: bool) -> bool:
    """Whether an entry's slots are few enough to hold at once."""
    return ratio * (2 if overlap else 1) <= _HELD_SLOTS


def pool(segments: Sequence[Segment], held: bool, collapse: Collapse = lambda a, _: a, unroll: int = 1) -> jax.Array:
    """sum_r softmax_r(z_r) c_r over the slots r of all segments.

    Slots that are `held` are read once, others three times: for the maximum, the denominator and the sum; one read may then
    bring several slots, over which `collapse` applies a reduction at the end. Weights are products with the denominator's
    reciprocal, which is also what XLA makes of the reference's quotient.
    """
    if held:
        c_rows, z_rows = zip(*(read(i) for count, read in segments for i in range(count)), strict=True)
        top = functools.reduce(jnp.maximum, z_rows)
        powers = [jnp.exp(z - top) for z in z_rows]
        inverse = 1.0 / functools.reduce(jnp.add, powers)
        return functools.reduce(jnp.add, [power * inverse * c for power, c in zip(powers, c_rows, strict=True)])

    def fold(join: Callable[..., jax.Array], value: Callable[[jax.Array, jax.Array], jax.Array]) -> jax.Array:
        result = value(*segments[0][1](0))
        for which, (count, read) in enumerate(segments):
            step = functools.partial(lambda read, i, so_far: join(so_far, value(*read(i))), read)
            result = lax.fori_loop(1 if which == 0 else 0, count, step, result, unroll=unroll)
        return result

    top = collapse(fold(jnp.maximum, lambda _, z: z), jnp.max)
    inverse = 1.0 / collapse(fold(jnp.add, lambda _, z: jnp.exp(z - top)), jnp.sum)
    return collapse(fold(jnp.add, lambda c, z: jnp.exp(z - top) * inverse * c), jnp.sum)


def cast_value(x: jax.Array, dtype: jax.typing.DTypeLike) -> jax.Array:
    """f32 x rounded to the numbers of `dtype`, still f32: to bf16 on its bits, nearest even, NaN kept."""
    if jnp.dtype(dtype) == jnp.float32:
        return x
    bits = lax.bitcast_convert_type(x, jnp.int32)
    bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & jnp.int32(-(2**16))
    return jnp.where(x == x, lax.bitcast_convert_type(bits, jnp.float32), x)


def main_scale(amax: jax.Array) -> jax.Array:
    """The scale of a group of format "main", an e4m3 number as f32, from the largest magnitude in it.

    `formats.round_e4m3(amax / 6)` for positive numbers, without the rounding primitive that Triton lacks.
    """
    sixth = formats.sixth(jnp.maximum(amax, jnp.float32(formats.MAIN.amax_floor)))
    sixth = jnp.minimum(sixth, formats.E4M3_MAX)
    exponent = jnp.maximum((lax.bitcast_convert_type(sixth, jnp.int32) >> 23) - 127, -6) - 3
    steps = sixth * formats.power_of_two(-exponent)
    whole = steps.astype(jnp.int32)
    rest = steps - whole.astype(jnp.float32)
    up = (rest > 0.5) | ((rest == 0.5) & (whole & 1 == 1))
    return jnp.where(up, whole + 1, whole).astype(jnp.float32) * formats.power_of_two(exponent)


def main_code(x: jax.Array, scale: jax.Array) -> jax.Array:
    """int32 e2m1 codes 0..15 of x in a group of that scale: `formats.quantise` and `formats.e2m1_codes` in one."""
    magnitude = jnp.abs(x)
    code = jnp.where(lax.bitcast_convert_type(x, jnp.int32) < 0, 8, 0)
    for midpoint, up in formats.E2M1_MIDPOINTS:
        bound = midpoint * scale
        code += jnp.where((magnitude >= bound) if up else (magnitude > bound), 1, 0)
    return code
