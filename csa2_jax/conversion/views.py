"""Tensors of one storage seen as those of another: dequantised, rounded or quantised again, a few rows at a time."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import ml_dtypes
import numpy as np

from csa2_jax.conversion.stacks import Files, Region, Source, Stack
from csa2_jax.manifest import TensorSpec, scale_tile
from csa2_jax.safetensors_io import DTYPES, CheckpointError, Entries, TensorEntry

_FP8_MAX, _FP4_MAX = 448.0, 6.0


class _View(Entries):
    """Tensors as `specs` describe them, made from `files`."""

    def __init__(self, files: Files, specs: Sequence[TensorSpec]) -> None:
        self.source, self.directory, self.remedy = files, Path(files.directory), files.remedy
        self._of = {spec.name: spec for spec in specs}
        self._entries = {
            spec.name: TensorEntry(spec.name, spec.dtype, spec.shape, self.directory, 0, spec.nbytes) for spec in specs
        }


class Widened(_View):
    """Quantised weights as bf16 or f32, everything else as it is; f32 becomes bf16 by rounding to nearest even."""

    def __init__(self, files: Files, stored: Sequence[TensorSpec], wanted: Sequence[TensorSpec]) -> None:
        super().__init__(files, wanted)
        self._stored = {spec.name: spec for spec in stored}

    def part(self, name: str, region: Region = ()) -> np.ndarray:
        """A region of a tensor in the wanted dtype."""
        wanted, stored = self._of[name], self._stored[name]
        if wanted.dtype == stored.dtype:
            return self.source.part(name, region)
        if (stored.dtype, wanted.dtype) in (("F32", "BF16"), ("BF16", "F32")):
            return self.source.part(name, region).astype(DTYPES[wanted.dtype])
        scale = self._stored.get(name.removesuffix(".weight") + ".scale")
        if scale is None:
            raise CheckpointError(f"{name} is stored as {stored.dtype} and cannot become {wanted.dtype}")
        stored, scale = (_unplaced(spec) for spec in (stored, scale))
        whole = (*region, *(slice(None),) * (len(wanted.shape) - len(region)))
        return Stack(name, wanted.shape, DTYPES[wanted.dtype], [Source(stored, scale)]).read(self.source, whole)


class Requantised(_View):
    """bf16 or f32 weights as fp8 and fp4 with scales that are powers of two, as the release stores them.

    scale = 2**ceil(log2(amax / max)), one per tile (fp8, max 448) or per 32 along a row (fp4, max 6); a tile of zeros has
    scale 1. Elements are rounded to nearest even. What was dequantised from such a storage comes back with the same values.
    """

    def part(self, name: str, region: Region = ()) -> np.ndarray:
        """A region of a tensor in the wanted dtype."""
        spec = self._of[name]
        weight = name.removesuffix(".scale") + ".weight" if name.endswith(".scale") else name
        held = self.source[weight].dtype if weight in self._of else spec.dtype
        if spec.dtype not in ("F8_E4M3", "I8", "F8_E8M0") or held == self._of[weight].dtype:
            return self.source.part(name, region)
        rows, *rest = (*region, *(slice(None),) * (len(spec.shape) - len(region)))
        kind = "fp8" if self._of[weight].dtype == "F8_E4M3" else "fp4"
        scales = self._of[weight.removesuffix(".weight") + ".scale"]
        tile, across = scale_tile(self._of[weight].logical_shape, scales.shape)
        start, stop, _ = rows.indices(spec.shape[0])
        if spec.dtype == "F8_E8M0":
            first, last = start * tile, min(stop * tile, self._of[weight].shape[0])
        else:
            first, last = start // tile * tile, min(-(-stop // tile) * tile, spec.shape[0])
        values = self.source.part(weight, (slice(first, last),)).astype(np.float32)
        if not np.isfinite(values).all():
            i, j = (int(n) for n in np.argwhere(~np.isfinite(values))[0])
            raise CheckpointError(
                f"{weight}[{first + i}, {j}] is {values[i, j]}, which fp8 and fp4 cannot hold: export as bf16"
            )
        codes, scale = quantise(values, (tile, across), kind)
        found = scale if spec.dtype == "F8_E8M0" else codes[start - first : stop - first]
        return found[(slice(None), *rest)]


def quantise(values: np.ndarray, tile: tuple[int, int], kind: Literal["fp8", "fp4"]) -> tuple[np.ndarray, np.ndarray]:
    """(codes, e8m0 scales as bytes) of finite f32 [rows, width], one scale per `tile` rows and columns; see `Requantised`."""
    exponent = tile_exponents(values, tile, _FP8_MAX if kind == "fp8" else _FP4_MAX)
    grown = np.repeat(np.repeat(exponent, tile[0], axis=0), tile[1], axis=1)[: values.shape[0], : values.shape[1]]
    scaled = np.ldexp(values, -grown)
    codes = scaled.astype(ml_dtypes.float8_e4m3fn) if kind == "fp8" else _pack(scaled)
    return codes, (exponent + 127).astype(np.uint8)


def tile_exponents(values: np.ndarray, tile: tuple[int, int], largest: float) -> np.ndarray:
    """Exponent e of the smallest power of two with amax <= largest * 2**e, int32, of every tile of [rows, width]."""
    (rows, width), (down, across) = values.shape, tile
    padded = np.zeros((-(-rows // down) * down, -(-width // across) * across), np.float32)
    padded[:rows, :width] = np.abs(values)
    tiles = padded.reshape(len(padded) // down, down, padded.shape[1] // across, across)
    amax = tiles.max(axis=(1, 3)).astype(np.float64)
    fraction, exponent = np.frexp(amax / largest)  # amax / largest = fraction * 2**exponent, fraction in [1/2, 1)
    exponent = np.where(fraction == 0.5, exponent - 1, exponent)
    return np.clip(np.where(amax == 0, 0, exponent), -127, 127).astype(np.int32)


def _pack(values: np.ndarray) -> np.ndarray:
    """f32 [rows, 2n] -> int8 [rows, n]: e2m1, the even element in the low nibble."""
    codes = values.astype(ml_dtypes.float4_e2m1fn).view(np.uint8) & 15
    return (codes[:, 0::2] | codes[:, 1::2] << 4).view(np.int8)


def _unplaced(spec: TensorSpec) -> TensorSpec:
    return dataclasses.replace(spec, index=())
