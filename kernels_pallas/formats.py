"""Number formats: the roundings that are part of the forward, and the packed codes behind them.

    name        element  group  amax floor   scale
    operand     e4m3     32     1e-4         2**ceil(log2(amax * f32(1/448)))   operand of a quantised linear
    window      e4m3     32     1e-4         the same                           window KV
    main        e2m1     16     6 * 2**-9    e4m3(amax / 6), nearest even       pool KV
    index       e2m1     32     6 * 2**-126  2**ceil(log2(amax * f32(1/6)))     index query and key
    mixed(R)    e4m3     64     1e-4         as window's                        V4: window and pool KV, but for the last R
                                                                                channels, which are rotated and stay bf16

A value becomes nearest-even(clamp(x / scale, +-max)) times scale. All of it is exact arithmetic on f32 bits: compilers flush
f32 subnormals to zero, turn divisions into products with a reciprocal, and may drop a narrowing cast that is widened again.
So powers of two are built from exponents, and roundings from `round` or comparisons, never from a cast. Everything is
elementwise but the maximum over a group, so that kernels use it as it stands.
Source: arXiv 2609.19969 (number formats); OCP MX for e8m0, e4m3 and e2m1.
"""

from __future__ import annotations

import dataclasses
from typing import Final

import jax
import jax.numpy as jnp
from jax import lax

E4M3_MAX: Final = 448.0
E2M1_MAX: Final = 6.0


@dataclasses.dataclass(frozen=True)
class Format:
    """One row of the table above."""

    element: str  # "e4m3" | "e2m1"
    group: int
    amax_floor: float
    power_of_two: bool
    tail: int = 0  # channels at the end that are bf16 numbers

    @property
    def head(self) -> Format:
        """The same without a tail: what holds for the channels before it."""
        return dataclasses.replace(self, tail=0)

    @property
    def max(self) -> float:
        """Largest element magnitude."""
        return E4M3_MAX if self.element == "e4m3" else E2M1_MAX


OPERAND = Format("e4m3", 32, 1e-4, True)
WINDOW = OPERAND
MAIN = Format("e2m1", 16, 6.0 * 2.0**-9, False)
INDEX = Format("e2m1", 32, 6.0 * 2.0**-126, True)


def mixed(group: int, tail: int) -> Format:
    """e4m3 in groups, the last `tail` channels bf16."""
    return Format("e4m3", group, OPERAND.amax_floor, True, tail)


def round_to(x: jax.Array, dtype: jax.typing.DTypeLike) -> jax.Array:
    """Cast f32 `x` to `dtype` with a rounding that the compiler may not skip (bf16 goes through reduce_precision)."""
    dtype = jnp.dtype(dtype)
    if dtype == jnp.bfloat16 and x.dtype == jnp.float32:
        x = lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)
    return x.astype(dtype)


def power_of_two(exponent: jax.Array) -> jax.Array:
    """2.0**exponent as f32 for integer exponents in [-126, 127], built from bits."""
    return lax.bitcast_convert_type(((exponent + 127) << 23).astype(jnp.int32), jnp.float32)


def times_power_of_two(x: jax.Array, exponent: jax.Array) -> jax.Array:
    """x * 2**exponent for |exponent| <= 250: two normal factors, so that 2**-127 itself is never formed (it would flush to 0)."""
    half = exponent >> 1
    return x * power_of_two(half) * power_of_two(exponent - half)


def ceil_log2(v: jax.Array) -> jax.Array:
    """Smallest integer e with 2**e >= v, for positive normal f32 v; an exact power is its own."""
    bits = lax.bitcast_convert_type(v.astype(jnp.float32), jnp.int32)
    return (bits >> 23) - 127 + ((bits & 0x7FFFFF) != 0)


def round_e4m3(x: jax.Array) -> jax.Array:
    """Nearest-even e4m3 value of f32 x, clamped to +-448 (a plain cast gives NaN above 464)."""
    return _round_grid(jnp.clip(x, -E4M3_MAX, E4M3_MAX), smallest_exponent=-6, mantissa_bits=3)


def round_e2m1(x: jax.Array) -> jax.Array:
    """Nearest-even e2m1 value of f32 x, clamped to +-6: the grid 0, .5, 1, 1.5, 2, 3, 4, 6."""
    return _round_grid(jnp.clip(x, -E2M1_MAX, E2M1_MAX), smallest_exponent=0, mantissa_bits=1)


def _round_grid(x: jax.Array, smallest_exponent: int, mantissa_bits: int) -> jax.Array:
    bits = lax.bitcast_convert_type(x, jnp.int32)
    exponent = jnp.maximum(((bits >> 23) & 0xFF) - 127, smallest_exponent) - mantissa_bits
    return jnp.round(x * power_of_two(-exponent)) * power_of_two(exponent)


def quantise(x: jax.Array, fmt: Format) -> tuple[jax.Array, jax.Array]:
    """Elements (f32, on the element grid) and scales of the last axis in groups (of a format with a tail: without it).

    Returns (elements [..., K/group, group], scale [..., K/group]); the scale is an int32 exponent when `fmt.power_of_two`,
    else an f32 value. ValueError when the axis is no multiple of the group.
    """
    width = x.shape[-1]
    if width % fmt.group:
        raise ValueError(
            f"last axis of {x.shape} must be a multiple of the group of {fmt.group} that this rounding uses"
        )
    x = x.astype(jnp.float32).reshape(*x.shape[:-1], width // fmt.group, fmt.group)
    amax = jnp.maximum(jnp.max(jnp.abs(x), axis=-1), jnp.float32(fmt.amax_floor))
    grid = round_e4m3 if fmt.element == "e4m3" else round_e2m1
    if fmt.power_of_two:
        exponent = ceil_log2(amax * jnp.float32(1.0 / fmt.max))
        return grid(_divide_by_power(x, exponent[..., None])), exponent
    scale = round_e4m3(sixth(amax))
    return _round_e2m1_of_quotient(x, scale[..., None]), scale


def sixth(amax: jax.Array) -> jax.Array:
    """amax / 6 for positive normal amax, exact as far as rounding it to e4m3 goes.

    The 24-bit mantissa is divided as an integer, with any remainder kept as a last sticky bit: the quotient then lies on the
    right side of every midpoint, which a product with 1/6 does not guarantee.
    """
    bits = lax.bitcast_convert_type(amax, jnp.int32)
    mantissa = (bits & 0x7FFFFF) | 0x800000
    sticky = 2 * (mantissa // 3) + (mantissa % 3 != 0)
    return times_power_of_two(sticky.astype(jnp.float32), (bits >> 23) - 127 - 25)


# Midpoints of the e2m1 grid, and whether the tie goes up (to the even code).
E2M1_MIDPOINTS = ((0.25, False), (0.75, True), (1.25, False), (1.75, True), (2.5, False), (3.5, True), (5.0, False))


def _round_e2m1_of_quotient(x: jax.Array, scale: jax.Array) -> jax.Array:
    """Nearest-even e2m1 of x / scale for an e4m3 scale, by comparing |x| with midpoint * scale, which f32 holds exactly.

    A written division may be compiled to a product with the reciprocal, which moves ties.
    """
    magnitude = jnp.abs(x)
    code = jnp.zeros(x.shape, jnp.int32)
    for midpoint, up in E2M1_MIDPOINTS:
        bound = midpoint * scale
        code += (magnitude >= bound) if up else (magnitude > bound)
    value = e2m1_values(code)
    return jnp.where(lax.bitcast_convert_type(x, jnp.int32) < 0, -value, value)


def rounded(x: jax.Array, fmt: Format) -> jax.Array:
    """f32 values of x after the rounding `fmt`, in x's shape."""
    if fmt.tail:
        values = [rounded(x[..., : -fmt.tail], fmt.head), round_to(x[..., -fmt.tail :], jnp.bfloat16)]
        return jnp.concatenate([values[0], values[1].astype(jnp.float32)], axis=-1)
    elements, scale = quantise(x, fmt)
    if fmt.power_of_two:
        values = scale_exactly(elements, scale[..., None])
    else:
        values = elements * scale[..., None]
    return values.reshape(x.shape)


def _divide_by_power(x: jax.Array, exponent: jax.Array) -> jax.Array:
    """x / 2**exponent, subnormal x included: those are taken from their bits as integer * 2**-149."""
    bits = lax.bitcast_convert_type(x, jnp.int32)
    tiny = ((bits >> 23) & 0xFF) == 0
    mantissa = (bits & 0x7FFFFF).astype(jnp.float32)
    small = times_power_of_two(mantissa, jnp.maximum(-149 - exponent, -200))
    small = lax.bitcast_convert_type(
        lax.bitcast_convert_type(small, jnp.int32) | (bits & jnp.int32(-(2**31))), jnp.float32
    )
    return jnp.where(tiny, small, times_power_of_two(x, -exponent))


def scale_exactly(element: jax.Array, exponent: jax.Array) -> jax.Array:
    """element * 2**exponent for e4m3 or e2m1 elements and exponents from -127 up, f32 subnormal products included.

    Those are integers times 2**-149 and are put together from bits, because a product would flush to zero.
    """
    product = times_power_of_two(element, exponent)
    # No element is below 2**-9, so that from exponent -117 up no product is subnormal, and below it the integer is exact.
    magnitude = times_power_of_two(jnp.abs(element), jnp.clip(exponent + 149, 0, 31))
    tiny = (exponent < -117) & (magnitude < 2.0**23)
    sign = lax.bitcast_convert_type(element, jnp.int32) & jnp.int32(-(2**31))
    subnormal = lax.bitcast_convert_type(jnp.where(tiny, magnitude, 0.0).astype(jnp.int32) | sign, jnp.float32)
    return jnp.where(tiny, subnormal, product)


# ---- stored codes ----


def e2m1_codes(elements: jax.Array) -> jax.Array:
    """uint8 codes 0..15 of e2m1 grid values: magnitude index, plus 8 for the sign (-0 included)."""
    magnitude = jnp.abs(elements)
    code = jnp.where(magnitude < 2, magnitude * 2, jnp.where(magnitude < 4, magnitude + 2, magnitude / 2 + 4))
    negative = lax.bitcast_convert_type(elements, jnp.int32) < 0
    return code.astype(jnp.uint8) + 8 * negative.astype(jnp.uint8)


def e2m1_values(codes: jax.Array) -> jax.Array:
    """f32 values of e2m1 codes 0..15."""
    code = codes.astype(jnp.int32)
    magnitude = code & 7
    # Codes 2..7 are ordinary floats with one mantissa bit; 0 and 1 are 0 and 0.5.
    normal = lax.bitcast_convert_type(((126 + (magnitude >> 1)) << 23) | ((magnitude & 1) << 22), jnp.float32)
    value = jnp.where(magnitude < 2, magnitude.astype(jnp.float32) * 0.5, normal)
    return jnp.where(code >= 8, -value, value)


def unpack_e2m1(packed: jax.Array) -> jax.Array:
    """f32 values [..., 2n] of packed uint8 [..., n]: the even element sits in the low nibble."""
    pair = jnp.stack([packed & 15, packed >> 4], axis=-1)
    return e2m1_values(pair).reshape(*packed.shape[:-1], 2 * packed.shape[-1])


def pack_e2m1(elements: jax.Array) -> jax.Array:
    """Packed uint8 [..., n/2] of grid values [..., n]; ValueError on an odd width."""
    if elements.shape[-1] % 2:
        raise ValueError(f"an odd width of {elements.shape[-1]} cannot be packed two to a byte")
    codes = e2m1_codes(elements)
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def e8m0_exponent(scale: jax.Array) -> jax.Array:
    """int32 exponents of e8m0 bytes: byte b means 2**(b - 127)."""
    return scale.astype(jnp.int32) - 127


def e4m3_codes(elements: jax.Array) -> jax.Array:
    """uint8 codes of e4m3 grid values (finite): sign, 4 bits of exponent biased by 7, 3 of mantissa."""
    bits = lax.bitcast_convert_type(elements, jnp.int32)
    magnitude = jnp.abs(elements)
    normal = ((bits >> 20) & 0x7FF) - (120 << 3)  # exponent and the upper mantissa bits, rebased from 127 to 7
    subnormal = (magnitude * 512.0).astype(jnp.int32)  # multiples of 2**-9
    code = jnp.where(magnitude < 2.0**-6, subnormal, normal)
    return (code | ((bits >> 24) & 0x80)).astype(jnp.uint8)


def e4m3_values(codes: jax.Array) -> jax.Array:
    """f32 values of e4m3 codes; the NaN codes 0x7F and 0xFF become NaN."""
    code = codes.astype(jnp.int32)
    magnitude = code & 0x7F
    normal = lax.bitcast_convert_type((magnitude << 20) + (120 << 23), jnp.float32)
    value = jnp.where(magnitude < 8, magnitude.astype(jnp.float32) * 2.0**-9, normal)
    value = jnp.where(magnitude == 0x7F, jnp.nan, value)
    return jnp.where(code >= 0x80, -value, value)


def scale_codes(scale: jax.Array, fmt: Format) -> jax.Array:
    """uint8 codes of the scales that `quantise` gives: e8m0 of exponents, e4m3 of values."""
    return (scale + 127).astype(jnp.uint8) if fmt.power_of_two else e4m3_codes(scale)
