"""Safetensors without PyTorch: headers checked as data from a stranger, tensors as memory-mapped NumPy views.

A file is 8 bytes of little-endian header length n, n bytes of JSON (name -> dtype, shape, data_offsets) and the data
block. A directory holds one `model.safetensors`, or `model.safetensors.index.json` and the shards that its weight_map
names. Everything is validated from sizes and headers alone, so a damaged checkpoint is refused in milliseconds whatever
its size. ml_dtypes supplies bf16 and the fp8 formats. Values are not looked at here.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any, Final

import ml_dtypes
import numpy as np

SINGLE_FILE: Final = "model.safetensors"
INDEX_FILE: Final = "model.safetensors.index.json"

MAX_HEADER_BYTES: Final = 100_000_000
"""The format's own limit; a longer header is an attack or a damaged length field."""

DTYPES: Final[dict[str, np.dtype]] = {
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F16": np.dtype(np.float16),
    "F32": np.dtype(np.float32),
    "F64": np.dtype(np.float64),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "F8_E8M0": np.dtype(np.uint8),  # the exponent byte itself: 2**(b - 127), and 255 is NaN
    "I8": np.dtype(np.int8),
    "I16": np.dtype(np.int16),
    "I32": np.dtype(np.int32),
    "I64": np.dtype(np.int64),
    "U8": np.dtype(np.uint8),
    "U16": np.dtype(np.uint16),
    "U32": np.dtype(np.uint32),
    "U64": np.dtype(np.uint64),
    "BOOL": np.dtype(np.bool_),
}
"""Safetensors dtype -> the NumPy dtype of its view."""


class CheckpointError(ValueError):
    """A checkpoint that cannot be what its configuration says; the text names file, tensor, value and remedy."""


@dataclasses.dataclass(frozen=True, slots=True)
class TensorEntry:
    """Where one tensor lies: absolute byte range [start, stop) of `file`."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return self.stop - self.start


class Entries(Mapping[str, TensorEntry]):
    """Tensors of a directory by name; subclasses say where `_entries` come from and how values are read."""

    directory: Path
    remedy: str = "fetch the file again"  # for values that are damaged
    _entries: Mapping[str, TensorEntry]

    def __getitem__(self, name: str) -> TensorEntry:
        return self._entries[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors together."""
        return sum(entry.nbytes for entry in self._entries.values())

    @property
    def files(self) -> tuple[Path, ...]:
        """Where they lie, in order of first use."""
        return tuple(dict.fromkeys(entry.file for entry in self._entries.values()))

    def region(self, path: str, region: tuple[slice, ...], dtype: np.dtype) -> np.ndarray | None:
        """A region of a whole stack of parameters, by those who keep stacks in this dtype; None by the others."""


class _Handles:
    """Open files by path, closed with their owner."""

    def __init__(self) -> None:
        self._open: dict[Path, int] = {}
        self._lock = threading.Lock()

    def get(self, path: Path) -> int:
        with self._lock:
            if path not in self._open:
                self._open[path] = os.open(path, os.O_RDONLY)
            return self._open[path]

    def __del__(self, close: Callable[[int], None] = os.close) -> None:  # `os` may be gone when the interpreter ends
        for handle in self._open.values():
            close(handle)


class TensorFiles(Entries):
    """All tensors of a model directory by name; `read` maps one into memory without copying it.

    Raises CheckpointError for damage (see the module docstring) and FileNotFoundError when nothing is there to open.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        """Open `directory` and validate every header in it; no tensor data is read."""
        self.directory = Path(directory)
        self._maps: dict[Path, np.memmap] = {}
        self._handles = _Handles()
        single, index = self.directory / SINGLE_FILE, self.directory / INDEX_FILE
        if not self.directory.is_dir():
            raise FileNotFoundError(
                f"{self.directory} is not a directory: name the folder with config.json and {SINGLE_FILE}"
            )
        if single.is_file() and index.is_file():
            raise CheckpointError(
                f"{self.directory} holds both {SINGLE_FILE} and {INDEX_FILE}: remove the one that is not the model, "
                "so that which weights are read is no guess"
            )
        if index.is_file():
            self._entries = _read_sharded(self.directory, index)
        elif single.is_file():
            self._entries = {entry.name: entry for entry in read_header(single)}
        else:
            raise FileNotFoundError(
                f"{self.directory} holds neither {SINGLE_FILE} nor {INDEX_FILE}: no weights to read"
            )

    def read(self, name: str) -> np.ndarray:
        """Read-only view of a tensor in its stored dtype (`DTYPES`); pages come from disk as they are touched."""
        entry = self._entries[name]
        if not entry.nbytes:
            return np.empty(entry.shape, DTYPES[entry.dtype])
        if entry.file not in self._maps:
            self._maps[entry.file] = np.memmap(entry.file, np.uint8, "r")
        raw = self._maps[entry.file]
        if entry.stop > len(raw):
            raise CheckpointError(
                f"{entry.file} shrank to {len(raw)} bytes while it was read, {name} ends at {entry.stop}: is a copy "
                "still running?"
            )
        data = np.asarray(raw[entry.start : entry.stop])
        dtype = DTYPES[entry.dtype]
        if entry.start % dtype.itemsize:
            data = data.copy()  # a header of odd length leaves wider elements unaligned, which a view must not be
            data.flags.writeable = False
        return data.view(dtype).reshape(entry.shape)

    def rows(self, name: str) -> list[tuple[int, np.ndarray]]:
        """A tensor [rows, width] of bytes as runs (first row, mapped uint8 array); here one."""
        return [(0, self.read(name).view(np.uint8))]

    def part(self, name: str, region: tuple[slice, ...] = ()) -> np.ndarray:
        """A region of a tensor (a slice with unit step per leading axis), read into memory of its own.

        Unlike `read` this maps nothing, so that a process takes the memory of what it asks for and no more.
        """
        entry = self._entries[name]
        dtype = DTYPES[entry.dtype]
        rows, *rest = (slice(*s.indices(n)) for s, n in zip(region, entry.shape, strict=False)) if region else [None]
        if rows is None:
            start, shape = entry.start, entry.shape
        else:
            width = math.prod(entry.shape[1:]) * dtype.itemsize
            start, shape = entry.start + rows.start * width, (max(rows.stop - rows.start, 0), *entry.shape[1:])
        out = np.empty(math.prod(shape) * dtype.itemsize, np.uint8)
        handle = self._handles.get(entry.file)
        read = 0
        while read < len(out):
            try:
                count = os.preadv(handle, [out.data[read:]], start + read)
            except OSError as error:
                raise CheckpointError(
                    f"{entry.file} cannot be read at byte {start + read}, in {name}: {error.strerror}. The disk may be failing; "
                    "fetch the file again"
                ) from None
            if not count:
                raise CheckpointError(
                    f"{entry.file} shrank to {os.fstat(handle).st_size} bytes while it was read, {name} ends at "
                    f"{entry.stop}: is a copy still running?"
                )
            read += count
        return out.view(dtype).reshape(shape)[(slice(None), *rest)] if rest else out.view(dtype).reshape(shape)


def read_header(path: Path) -> list[TensorEntry]:
    """Entries of one safetensors file in order of position; CheckpointError names what is wrong with the header."""
    header, base, size = _read_header(path)
    entries = [_entry(path, name, fields, base, size) for name, fields in header.items() if name != "__metadata__"]
    entries.sort(key=lambda e: (e.start, e.stop))
    _check_tiling(path, entries, base, size)
    return entries


def read_metadata(path: Path) -> dict[str, str] | None:
    """The `__metadata__` of one safetensors file, None if it has none."""
    found = _read_header(path)[0].get("__metadata__")
    if found is not None and not (isinstance(found, dict) and all(isinstance(v, str) for v in found.values())):
        raise CheckpointError(
            f"{path}: __metadata__ must map names to texts, found {found!r:.80}: fetch the file again"
        )
    return found


def _read_header(path: Path) -> tuple[dict[str, Any], int, int]:
    """(the header, where the data begin, bytes of the file)."""
    size = path.stat().st_size
    if size < 8:
        raise CheckpointError(f"{path} has {size} bytes, not even a header length: it is truncated, fetch it again")
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > MAX_HEADER_BYTES:
            raise CheckpointError(
                f"{path} declares a header of {length} bytes, the format allows {MAX_HEADER_BYTES}: "
                "it is no safetensors file, or damaged; fetch it again"
            )
        if 8 + length > size:
            raise CheckpointError(
                f"{path} declares a header of {length} bytes but has {size} in all: it is truncated, fetch it again"
            )
        raw = file.read(length)
    return _load_json(raw, f"the header of {path}"), 8 + length, size


def _entry(path: Path, name: str, fields: Any, base: int, size: int) -> TensorEntry:
    if not isinstance(fields, dict) or not {"dtype", "shape", "data_offsets"} <= set(fields):
        raise CheckpointError(f"{path}: the header of {name} must hold dtype, shape and data_offsets, found {fields!r}")
    dtype, shape, offsets = fields["dtype"], fields["shape"], fields["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise CheckpointError(
            f"{path}: {name} has dtype {dtype!r}, which this reader does not know; it reads {', '.join(DTYPES)}. "
            "Convert it first"
        )
    if not _counts(shape):
        raise CheckpointError(f"{path}: {name} has shape {shape!r}, which is not a list of sizes")
    if not _counts(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise CheckpointError(f"{path}: {name} has data_offsets {offsets!r}, which are not [begin, end]")
    begin, end = offsets
    if base + end > size:
        raise CheckpointError(
            f"{path}: {name} ends at byte {base + end} but the file has {size}: "
            "it is truncated, or the header is damaged; fetch it again"
        )
    needed = math.prod(shape) * DTYPES[dtype].itemsize
    if end - begin != needed:
        raise CheckpointError(
            f"{path}: {name} is {dtype} {shape}, {needed} bytes, but its data_offsets [{begin}, {end}] span "
            f"{end - begin}: the header is damaged, fetch the file again"
        )
    return TensorEntry(name, dtype, tuple(shape), path, base + begin, base + end)


def _counts(value: Any) -> bool:
    return isinstance(value, list) and all(type(n) is int and 0 <= n < 1 << 63 for n in value) and len(value) <= 32


def _check_tiling(path: Path, entries: list[TensorEntry], base: int, size: int) -> None:
    """Tensors must cover the data block exactly: an overlap or a hole means that some offset is wrong."""
    end, last = base, "the header"
    for entry in entries:
        if entry.start < end:
            raise CheckpointError(
                f"{path}: {entry.name} begins at byte {entry.start}, inside {last}, which ends at {end}: "
                "tensors overlap, the header is damaged; fetch the file again"
            )
        if entry.start > end:
            raise CheckpointError(
                f"{path}: {entry.start - end} bytes between {last} and {entry.name} belong to no tensor: "
                "the header is damaged; fetch the file again"
            )
        end, last = entry.stop, entry.name
    if end != size:
        raise CheckpointError(
            f"{path}: {size - end} bytes behind {last} belong to no tensor: "
            "the file or its header is damaged; fetch it again"
        )


def _read_sharded(directory: Path, index: Path) -> dict[str, TensorEntry]:
    """Entries of every shard that the index names, checked against it in both directions."""
    content = _load_json(index.read_bytes(), str(index))
    weight_map = content.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index}: weight_map must map tensor names to shard files, found {weight_map!r:.80}")
    promised: dict[str, list[str]] = {}
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or not stays_inside(shard):
            raise CheckpointError(
                f"{index}: {name} is in shard {shard!r}, a path that leaves the model directory: "
                "refused, shards lie beside the index; fetch the index again"
            )
        promised.setdefault(shard, []).append(name)
    for shard in promised:
        if not (directory / shard).is_file():
            raise CheckpointError(
                f"{index} names shard {shard} for {len(promised[shard])} tensors ({promised[shard][0]} first), "
                f"but {directory / shard} does not exist: fetch it"
            )
    found: dict[str, TensorEntry] = {}
    for shard in promised:
        for entry in read_header(directory / shard):
            if entry.name in found:
                raise CheckpointError(
                    f"{entry.name} is in two shards, {found[entry.name].file.name} and {shard} of {directory}: "
                    "remove one of them, or which values count is a guess"
                )
            found[entry.name] = entry
    for name, shard in weight_map.items():
        if name not in found:
            raise CheckpointError(
                f"{index} promises {name} in {shard}, but that shard does not hold it: fetch index and shards again"
            )
        if found[name].file != directory / shard:
            raise CheckpointError(
                f"{index} promises {name} in {shard}, but it is in {found[name].file.name}: fetch index and shards "
                "again"
            )
    if extra := [name for name in found if name not in weight_map]:
        raise CheckpointError(
            f"{found[extra[0]].file} holds {extra[0]} (and {len(extra) - 1} more) which {index.name} does not list: "
            "fetch index and shards again"
        )
    return found


def stays_inside(shard: str) -> bool:
    """Whether a shard named like this lies below the index's directory; lexical, so that a cache may link it to elsewhere."""
    posix, windows = PurePosixPath(shard), PureWindowsPath(shard)
    rooted = posix.is_absolute() or bool(windows.drive or windows.root)
    return bool(posix.parts) and not rooted and ".." not in (*posix.parts, *windows.parts)


def read_json(path: Path, remedy: str) -> dict[str, Any]:
    """A file that must hold a JSON object; CheckpointError naming it, and what to do, otherwise."""
    return _load_json(path.read_bytes(), str(path), remedy)


def _load_json(raw: bytes, where: str, remedy: str = "fetch the file again") -> dict[str, Any]:
    """A JSON object in which no name occurs twice (plain json keeps the last one silently)."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name, value in pairs:
            if name in found:
                raise CheckpointError(f"{where} lists {name} twice: which one counts is a guess; {remedy}")
            found[name] = value
        return found

    try:
        content = json.loads(raw.decode("utf-8"), object_pairs_hook=unique)
    except CheckpointError:
        raise
    except (ValueError, RecursionError) as error:  # text that is no JSON, bytes that are no text, numbers without end
        raise CheckpointError(f"{where} is not valid JSON ({error}): it is damaged, {remedy}") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{where} must be a JSON object, found {type(content).__name__}: it is damaged, {remedy}")
    return content
