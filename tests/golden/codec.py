"""How the recordings are packed: lossless, small, and readable without PyTorch.

Random weights hardly compress: the sign and mantissa bits of a Gaussian are noise. Three facts make the folder small
all the same.

* The exponents are not noise. Rotating the sign bit to the bottom and storing each byte position of all numbers as a
  plane of its own lets xz take a third off bf16 numbers and a fifth off float32 ones.
* Some checkpoints are another checkpoint with its residual writes scaled down, or the same one quantised. Such a set
  stores only the difference between what `predict` computes from its base and what was recorded.
* Where there is no base, the random numbers themselves can be drawn again (see draws.py), and again only the difference
  is stored.
* A float32 array that holds bf16 values is stored as bf16.

A pack is one xz stream: the length of a JSON header (8 bytes, little endian), the header, then the planes in the
header's order.
"""

from __future__ import annotations

import json
import lzma
import math
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from tests.golden import draws

__all__ = ["STORAGE", "pack_trace", "pack_weights", "read_safetensors", "unpack_trace", "unpack_weights"]

# safetensors dtype names. E8M0 scales stay bytes: byte b means 2^(b - 127), and 255 is not a number.
STORAGE: dict[str, Any] = {
    "F32": np.float32,
    "BF16": ml_dtypes.bfloat16,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "F8_E8M0": np.uint8,
    "I8": np.int8,
}
_FILTERS = [{"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME, "lc": 0, "lp": 0, "pb": 0}]
Tensors = dict[str, tuple[str, np.ndarray]]  # name -> (safetensors dtype, values), in file order
Layout = Mapping[str, tuple[str, list[int]]]  # name -> (safetensors dtype, shape), in file order
Coded = tuple[
    str, np.ndarray
]  # (code, unsigned integers): r = sign rotated to the bottom, z = zigzag difference; then the byte width


# --- safetensors ------------------------------------------------------------------------------------------------------


def parse_safetensors(data: bytes) -> tuple[str, Tensors]:
    """Header text and tensors of a safetensors file's bytes, in the order in which the data lies."""
    size = struct.unpack("<Q", data[:8])[0]
    text = data[8 : 8 + size].decode()
    entries = {name: entry for name, entry in json.loads(text).items() if name != "__metadata__"}
    tensors: Tensors = {}
    for name, entry in sorted(entries.items(), key=lambda item: item[1]["data_offsets"]):
        start, stop = (8 + size + offset for offset in entry["data_offsets"])
        values = np.frombuffer(data[start:stop], STORAGE[entry["dtype"]]).reshape(entry["shape"])
        tensors[name] = (entry["dtype"], values)
    return text, tensors


def read_safetensors(path: Path) -> dict[str, np.ndarray]:
    """All tensors of a file by name; bf16 and e4m3 as ml_dtypes, E8M0 scales as uint8."""
    return {name: values for name, (_, values) in parse_safetensors(path.read_bytes())[1].items()}


# --- planes -----------------------------------------------------------------------------------------------------------


def _unsigned(values: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(values).reshape(-1).view(f"<u{values.dtype.itemsize}")


def _rotate(bits: np.ndarray, by: int) -> np.ndarray:
    width = 8 * bits.dtype.itemsize
    return (bits << bits.dtype.type(by % width)) | (bits >> bits.dtype.type(-by % width))


def _zigzag(difference: np.ndarray) -> np.ndarray:
    """Small differences of either sign become small unsigned numbers: 0, -1, 1, -2 -> 0, 1, 2, 3."""
    signed = difference.view(f"<i{difference.dtype.itemsize}")
    return ((signed << 1) ^ (signed >> (8 * signed.dtype.itemsize - 1))).view(difference.dtype)


def _unzigzag(bits: np.ndarray) -> np.ndarray:
    one = bits.dtype.type(1)
    return (bits >> one) ^ (-(bits & one).view(f"<i{bits.dtype.itemsize}")).view(bits.dtype)


def _code(values: np.ndarray, predicted: np.ndarray | None) -> Coded:
    bits = _unsigned(values)
    if predicted is not None:
        return f"z{bits.itemsize}", _zigzag(bits - _unsigned(predicted))
    if values.dtype == np.float32 and not (bits & 0xFFFF).any():
        return "r2", _rotate((bits >> 16).astype("<u2"), 1)
    if np.issubdtype(values.dtype, np.integer):
        return f"z{bits.itemsize}", _zigzag(bits)
    return f"r{bits.itemsize}", _rotate(bits, 1)


def _decode(code: str, bits: np.ndarray, dtype: Any, shape: list[int], predicted: np.ndarray | None) -> np.ndarray:
    if code.startswith("z"):
        bits = _unzigzag(bits)
        if predicted is not None:
            bits = bits + _unsigned(predicted)
    else:
        bits = _rotate(bits, -1)
        if bits.itemsize == 2 and np.dtype(dtype) == np.float32:
            bits = bits.astype("<u4") << np.uint32(16)
    return bits.view(dtype).reshape(shape)


def _write(header: dict[str, Any], coded: list[Coded]) -> bytes:
    sizes: dict[str, int] = {}
    planes: list[bytes] = []
    for code in sorted({code for code, _ in coded}):
        together = np.concatenate([bits for other, bits in coded if other == code])
        sizes[code] = together.size
        by_byte = together.view(np.uint8).reshape(-1, int(code[1:]))
        planes += [np.ascontiguousarray(by_byte[:, column]).tobytes() for column in reversed(range(by_byte.shape[1]))]
    text = json.dumps(header | {"sizes": sizes, "codes": [code for code, _ in coded]}, separators=(",", ":")).encode()
    return lzma.compress(
        b"".join([struct.pack("<Q", len(text)), text, *planes]), check=lzma.CHECK_SHA256, filters=_FILTERS
    )


def _read(data: bytes) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    data = lzma.decompress(data)
    start = 8 + struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8:start])
    groups: dict[str, np.ndarray] = {}
    for code, size in header["sizes"].items():
        width = int(code[1:])
        planes = np.frombuffer(data, np.uint8, size * width, start).reshape(width, size)
        groups[code] = np.ascontiguousarray(planes[::-1].T).reshape(-1).view(f"<u{width}")
        start += size * width
    return header, groups


class _Cursor:
    """Hands out consecutive pieces of each code's numbers."""

    def __init__(self, groups: Mapping[str, np.ndarray]) -> None:
        self._groups = groups
        self._at = dict.fromkeys(groups, 0)

    def take(self, code: str, size: int) -> np.ndarray:
        start = self._at[code]
        self._at[code] = start + size
        return self._groups[code][start : start + size]


# --- traces -----------------------------------------------------------------------------------------------------------


def pack_trace(arrays: Mapping[str, np.ndarray]) -> bytes:
    """Named arrays to one pack, lossless."""
    entries = [[name, values.dtype.str, list(values.shape)] for name, values in arrays.items()]
    return _write({"arrays": entries}, [_code(np.asarray(values), None) for values in arrays.values()])


def unpack_trace(data: bytes) -> dict[str, np.ndarray]:
    """The inverse of `pack_trace`."""
    header, groups = _read(data)
    cursor = _Cursor(groups)
    return {
        name: _decode(code, cursor.take(code, math.prod(shape)), dtype, shape, None)
        for (name, dtype, shape), code in zip(header["arrays"], header["codes"], strict=True)
    }


# --- weights ----------------------------------------------------------------------------------------------------------


def _power_of_two_above(values: np.ndarray) -> np.ndarray:
    mantissa, exponent = np.frexp(values)
    return np.where(mantissa == 0.5, exponent - 1, exponent)


def _fp8_tiles(weight: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """float32 [O, I] -> e4m3 codes and one E8M0 byte per 32x32 tile."""
    rows, columns = weight.shape
    padded = np.zeros((-(-rows // 32) * 32, -(-columns // 32) * 32), np.float32)
    padded[:rows, :columns] = weight
    tiles = padded.reshape(padded.shape[0] // 32, 32, padded.shape[1] // 32, 32)
    amax = np.maximum(np.abs(tiles).max((1, 3)), np.float32(1e-4))
    exponent = _power_of_two_above(amax * np.float32(1 / 448))
    scaled = np.clip(tiles / np.ldexp(np.float32(1), exponent)[:, None, :, None], -448, 448)
    codes = scaled.reshape(padded.shape)[:rows, :columns].astype(ml_dtypes.float8_e4m3fn)
    return codes, (exponent + 127).astype(np.uint8)


def _fp4_rows(weight: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """float32 [O, I] -> two e2m1 codes per byte along I, the even one in the low half, and one E8M0 byte per row per
    32."""
    rows, columns = weight.shape
    groups = weight.reshape(rows, columns // 32, 32)
    amax = np.maximum(np.abs(groups).max(-1), np.float32(6 * 2.0**-126))
    exponent = _power_of_two_above(amax * np.float32(1 / 6))
    scaled = np.clip(groups / np.ldexp(np.float32(1), exponent)[..., None], -6, 6)
    codes = scaled.astype(ml_dtypes.float4_e2m1fn).view(np.uint8).reshape(rows, columns)
    return (codes[:, 0::2] | codes[:, 1::2] << 4).view(np.int8), (exponent + 127).astype(np.uint8)


def predict(layout: Layout, base: Mapping[str, np.ndarray], factors: Mapping[str, float]) -> dict[str, np.ndarray]:
    """What a checkpoint of this layout would hold if it were `base` with some weights scaled, then quantised.

    layout: name -> (safetensors dtype, shape) of the checkpoint wanted. factors: end of a weight's name -> its factor.
    A name that the base lacks and that quantisation does not explain is left out: it has no prediction.
    """
    result: dict[str, np.ndarray] = {}
    for name, (dtype, _) in layout.items():
        if name in result or name not in base:
            continue
        factor = next((factor for end, factor in factors.items() if name.endswith(end)), None)
        values = base[name]
        quantised = values.dtype == ml_dtypes.bfloat16 and dtype in ("F8_E4M3", "I8")
        if factor is None and not quantised:
            result[name] = values
            continue
        scaled = values.astype(np.float32) * np.float32(1 if factor is None else factor)
        if quantised:
            scale_name = name.removesuffix(".weight") + ".scale"
            result[name], result[scale_name] = (_fp4_rows if dtype == "I8" else _fp8_tiles)(scaled)
        else:
            result[name] = scaled.astype(values.dtype)
    return result


def _predictions(layout: Layout, base: Path | None, header: Mapping[str, Any]) -> dict[str, np.ndarray]:
    predicted = {} if base is None else predict(layout, read_safetensors(base), header["factors"])
    for name, (start, factor, boosted) in header["draws"].items():
        dtype, shape = layout[name]
        predicted[name] = draws.draw(draws.Draw(start, factor, tuple(boosted)), tuple(shape), np.dtype(STORAGE[dtype]))
    return predicted


def pack_weights(data: bytes, base: Path | None = None, factors: Mapping[str, float] | None = None) -> bytes:
    """The bytes of a safetensors file to a pack; `base` is the file that it was made from (see `predict`), if there is
    one."""
    text, tensors = parse_safetensors(data)
    layout = {name: (dtype, list(values.shape)) for name, (dtype, values) in tensors.items()}
    drawn: dict[str, Any] = {}
    if base is None:
        for name, (_, values) in tensors.items():
            found = draws.find(values)
            if found is not None:
                found = draws.steady(found, values.shape, values.dtype)
                drawn[name] = [found.start, found.factor, list(found.boosted)]
    header = {"safetensors": text, "factors": dict(factors or {}), "draws": drawn}
    predicted = _predictions(layout, base, header)
    return _write(header, [_code(values, predicted.get(name)) for name, (_, values) in tensors.items()])


def unpack_weights(pack: bytes, base: Path | None = None) -> bytes:
    """The inverse of `pack_weights`, byte for byte."""
    header, groups = _read(pack)
    entries = {name: entry for name, entry in json.loads(header["safetensors"]).items() if name != "__metadata__"}
    ordered = sorted(entries.items(), key=lambda item: item[1]["data_offsets"])
    layout = {name: (entry["dtype"], entry["shape"]) for name, entry in ordered}
    predicted = _predictions(layout, base, header)
    cursor = _Cursor(groups)
    parts: list[bytes] = []
    for (name, (dtype, shape)), code in zip(layout.items(), header["codes"], strict=True):
        bits = cursor.take(code, math.prod(shape))
        parts.append(_decode(code, bits, STORAGE[dtype], shape, predicted.get(name)).tobytes())
    text = header["safetensors"].encode()
    return b"".join([struct.pack("<Q", len(text)), text, *parts])
