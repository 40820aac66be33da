"""Number formats of the oracle, in plain NumPy: fp8 / fp4 rounding, weight storage, and reading it back.

Every rounding works on groups of channels along the last axis. A group has one scale; an element becomes
RNE(clamp(x / scale, +-max)) on its grid, with a true division, and is returned as element * scale in float32.

    format        grid   group  floor under the group maximum  scale
    window KV     e4m3   32     1e-4                           P2(amax * f32(1/448))
    GEMM operand  e4m3   32     1e-4                           P2(amax * f32(1/448))
    main KV       e2m1   16     6 * 2^-9                       e4m3(amax / 6), nearest even, at most 448
    index key     e2m1   32     6 * 2^-126                     P2(amax * f32(1/6))

P2(v) is the smallest power of two that is not below v, read from the float32 bits. Weights carry their scales as
e8m0 bytes: byte b means 2^(b - 127), byte 255 is NaN and refused.
"""

from __future__ import annotations

from dataclasses import dataclass

import ml_dtypes
import numpy as np

E4M3 = ml_dtypes.float8_e4m3fn
E4M3_MAX = np.float32(448.0)
E2M1_MAX = np.float32(6.0)
E2M1_GRID = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], np.float32)
E2M1_MIDPOINTS = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], np.float32)
WEIGHT_TILE = 32


@dataclass(frozen=True)
class Rounded:
    """A rounded tensor: its values, one scale per group, and the stored codes (all float32 / uint8)."""

    values: np.ndarray
    scales: np.ndarray
    codes: np.ndarray


# --- elements -----------------------------------------------------------------------------------------------------


def power_of_two_at_least(v: np.ndarray) -> np.ndarray:
    """P2: 2^ceil(log2 v) for positive float32 v, from the bits; an exact power stays itself, subnormals included."""
    v = np.asarray(v, np.float32)
    mantissa, exponent = np.frexp(v)  # v = mantissa * 2^exponent, mantissa in [0.5, 1)
    exponent = np.where(mantissa == 0.5, exponent - 1, exponent)
    with np.errstate(over="ignore"):
        return np.ldexp(np.float32(1.0), exponent).astype(np.float32)


def nearest_e4m3(x: np.ndarray) -> np.ndarray:
    """Codes of the e4m3 values nearest to x (ties to even), clamped to +-448."""
    return np.clip(x, -E4M3_MAX, E4M3_MAX).astype(np.float32).astype(E4M3).view(np.uint8)


def e4m3_values(codes: np.ndarray) -> np.ndarray:
    """Float32 values of e4m3 codes."""
    return codes.view(E4M3).astype(np.float32)


def nearest_e2m1(x: np.ndarray) -> np.ndarray:
    """Codes (0..7, plus 8 for a negative sign) of the e2m1 values nearest to x; ties go to the even code."""
    magnitude = np.minimum(np.abs(x), E2M1_MAX)
    code = np.zeros(x.shape, np.uint8)
    for lower, midpoint in enumerate(E2M1_MIDPOINTS):
        tie_goes_up = lower % 2 == 1  # the upper neighbour has code lower + 1
        code += (magnitude >= midpoint) if tie_goes_up else (magnitude > midpoint)
    return code + np.where(np.signbit(x), np.uint8(8), np.uint8(0))


def e2m1_values(codes: np.ndarray) -> np.ndarray:
    """Float32 values of unpacked e2m1 codes (bit 3 is the sign, so code 8 is -0)."""
    magnitude = E2M1_GRID[codes & 7]
    return np.where(codes & 8, -magnitude, magnitude)


# --- rounding of activations and caches ---------------------------------------------------------------------------


def _in_groups(x: np.ndarray, width: int) -> np.ndarray:
    """[..., H] -> [..., groups, width] in float32; a channel count that is no multiple of the group is refused."""
    x = np.asarray(x).astype(np.float32)
    if x.shape[-1] % width:
        raise ValueError(f"last axis of {x.shape} is not a multiple of the scale group {width}")
    return x.reshape(*x.shape[:-1], x.shape[-1] // width, width)


def _rounded(groups: np.ndarray, scale: np.ndarray, nearest, values) -> Rounded:
    shape = (*groups.shape[:-2], groups.shape[-2] * groups.shape[-1])
    codes = nearest(groups / scale[..., None])
    with np.errstate(over="ignore"):
        out = values(codes) * scale[..., None]
    return Rounded(out.reshape(shape), scale, codes.reshape(shape))


def _amax(groups: np.ndarray, floor: float) -> np.ndarray:
    return np.maximum(np.abs(groups).max(axis=-1, initial=0.0), np.float32(floor))


def quantise_window_fp8(x: np.ndarray) -> Rounded:
    """Window KV (and the operand of a quantised linear): e4m3 in groups of 32, power-of-two scale."""
    groups = _in_groups(x, 32)
    scale = power_of_two_at_least(_amax(groups, 1e-4) * np.float32(1.0 / 448.0))
    return _rounded(groups, scale, nearest_e4m3, e4m3_values)


def quantise_main_fp4(x: np.ndarray) -> Rounded:
    """Main (pool) KV: e2m1 in groups of 16, with an e4m3 scale that is not a power of two."""
    groups = _in_groups(x, 16)
    scale = e4m3_values(nearest_e4m3(_amax(groups, 6.0 * 2.0**-9) / np.float32(6.0)))
    return _rounded(groups, scale, nearest_e2m1, e2m1_values)


def quantise_index_fp4(x: np.ndarray) -> Rounded:
    """Index query and index key: e2m1 in groups of 32, power-of-two scale."""
    groups = _in_groups(x, 32)
    scale = power_of_two_at_least(_amax(groups, 6.0 * 2.0**-126) * np.float32(1.0 / 6.0))
    return _rounded(groups, scale, nearest_e2m1, e2m1_values)


def round_window_fp8(x: np.ndarray) -> np.ndarray:
    """Values of `quantise_window_fp8`, float32."""
    return quantise_window_fp8(x).values


def round_operand_fp8(x: np.ndarray) -> np.ndarray:
    """Operand of a quantised linear: the same rounding as window KV."""
    return quantise_window_fp8(x).values


def round_main_fp4(x: np.ndarray) -> np.ndarray:
    """Values of `quantise_main_fp4`, float32."""
    return quantise_main_fp4(x).values


def round_index_fp4(x: np.ndarray) -> np.ndarray:
    """Values of `quantise_index_fp4`, float32."""
    return quantise_index_fp4(x).values


# --- weights ------------------------------------------------------------------------------------------------------


def e8m0_values(codes: np.ndarray, name: str = "scale") -> np.ndarray:
    """Float32 values of e8m0 bytes; byte 0 is the subnormal 2^-127, byte 255 (NaN) is refused by name."""
    codes = np.ascontiguousarray(codes).view(np.uint8)
    if (codes == 255).any():
        raise ValueError(f"{name}: e8m0 byte 255 is NaN")
    return np.ldexp(np.float32(1.0), codes.astype(np.int32) - 127).astype(np.float32)


def e8m0_codes(scales: np.ndarray) -> np.ndarray:
    """Bytes of exact powers of two in 2^-127 .. 2^127."""
    mantissa, exponent = np.frexp(np.asarray(scales, np.float32))
    if (mantissa != 0.5).any():
        raise ValueError("an e8m0 scale must be a power of two")
    return (exponent - 1 + 127).astype(np.uint8)


def _weight_scale(amax: np.ndarray, largest: np.float32) -> np.ndarray:
    """Smallest power of two with amax / scale <= largest, inside the e8m0 range; an all-zero tile gets 1."""
    scale = power_of_two_at_least(np.where(amax > 0, amax, largest).astype(np.float32) / largest)
    return np.clip(scale, np.float32(2.0**-127), np.float32(2.0**127))


def quantise_weight_fp8(weight: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """[out, in] -> (e4m3 [out, in], e8m0 bytes [ceil(out/32), ceil(in/32)]): one scale per 32 x 32 tile."""
    weight = np.asarray(weight).astype(np.float32)
    rows, columns = weight.shape
    tiles = (-(-rows // WEIGHT_TILE), -(-columns // WEIGHT_TILE))
    padded = np.zeros((tiles[0] * WEIGHT_TILE, tiles[1] * WEIGHT_TILE), np.float32)
    padded[:rows, :columns] = weight
    amax = np.abs(padded).reshape(tiles[0], WEIGHT_TILE, tiles[1], WEIGHT_TILE).max(axis=(1, 3))
    scale = _weight_scale(amax, E4M3_MAX)
    codes = nearest_e4m3(weight / _spread_tiles(scale, weight.shape))
    return codes.view(E4M3), e8m0_codes(scale)


def quantise_rows_fp8(table: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """[rows, width] -> (e4m3, e8m0 bytes [rows, width/32]): the Engram table, one scale per row per 32."""
    groups = _in_groups(table, 32)
    scale = _weight_scale(np.abs(groups).max(axis=-1), E4M3_MAX)
    codes = nearest_e4m3(groups / scale[..., None]).reshape(table.shape)
    return codes.view(E4M3), e8m0_codes(scale)


def quantise_expert_fp4(weight: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """[out, in] -> (int8 [out, in/2], e8m0 bytes [out, in/32]): two e2m1 codes a byte, even index in the low nibble."""
    groups = _in_groups(weight, 32)
    scale = _weight_scale(np.abs(groups).max(axis=-1), E2M1_MAX)
    codes = nearest_e2m1(groups / scale[..., None]).reshape(weight.shape)
    return (codes[:, 0::2] | (codes[:, 1::2] << 4)).view(np.int8), e8m0_codes(scale)


def quantised_matmul(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """x [.., K] in e4m3 steps times dequantised weight [out, K]: f32 dots of 32, summed in ascending block order.

    The scales are powers of two, so multiplying them into the operands first changes no bit.
    """
    x = round_operand_fp8(x)
    total = np.zeros((*x.shape[:-1], weight.shape[0]), np.float32)
    for start in range(0, weight.shape[1], 32):
        total += x[..., start : start + 32] @ weight[:, start : start + 32].T
    return total


def _spread_tiles(scale: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """One scale per 32 x 32 tile -> one per element of `shape`."""
    wide = np.repeat(np.repeat(scale, WEIGHT_TILE, axis=0), WEIGHT_TILE, axis=1)
    return wide[: shape[0], : shape[1]]


def dequantise_weight_fp8(codes: np.ndarray, scale_codes: np.ndarray, name: str = "weight") -> np.ndarray:
    """Float32 values of an e4m3 weight [out, in] with e8m0 bytes per 32 x 32 tile (ceil in both axes)."""
    scale = e8m0_values(scale_codes, f"{name} scale")
    expected = tuple(-(-extent // WEIGHT_TILE) for extent in codes.shape)
    if scale.shape != expected:
        raise ValueError(f"{name}: scale shape {scale.shape}, {expected} expected for weight {codes.shape}")
    return e4m3_values(codes.view(np.uint8)) * _spread_tiles(scale, codes.shape)


def dequantise_rows_fp8(codes: np.ndarray, scale_codes: np.ndarray, name: str = "table") -> np.ndarray:
    """Float32 values of an e4m3 table [rows, width] with e8m0 bytes [rows, width/32]."""
    scale = e8m0_values(scale_codes, f"{name} scale")
    groups = e4m3_values(codes.view(np.uint8)).reshape(codes.shape[0], -1, 32)
    if scale.shape != groups.shape[:2]:
        raise ValueError(f"{name}: scale shape {scale.shape}, {groups.shape[:2]} expected")
    return (groups * scale[..., None]).reshape(codes.shape)


def dequantise_expert_fp4(packed: np.ndarray, scale_codes: np.ndarray, name: str = "expert") -> np.ndarray:
    """Float32 [out, in] of packed e2m1 [out, in/2] with e8m0 bytes [out, in/32], low nibble first."""
    packed = packed.view(np.uint8)
    codes = np.empty((packed.shape[0], 2 * packed.shape[1]), np.uint8)
    codes[:, 0::2] = packed & 15
    codes[:, 1::2] = packed >> 4
    scale = e8m0_values(scale_codes, f"{name} scale")
    if codes.shape[1] % 32 or scale.shape != (codes.shape[0], codes.shape[1] // 32):
        raise ValueError(f"{name}: scale shape {scale.shape} does not fit weight {codes.shape}")
    groups = e2m1_values(codes).reshape(codes.shape[0], -1, 32)
    return (groups * scale[..., None]).reshape(codes.shape)
