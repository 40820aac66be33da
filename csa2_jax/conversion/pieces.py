"""Small regions of a large array, read from its files directly: where a region is one run of bytes, nothing else is touched.

TensorStore reads whole pieces (64 MiB each) and keeps a few. Tensors in the release's order come from several stacks in turn, so
that with two files being written pieces would be dropped and read again for every tensor (measured on 3 GB: 5 MB/s).
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import tensorstore as ts

Index = tuple[int | slice, ...]
_SMALL: Final = 64 << 20  # bytes; more is read by TensorStore, many pieces at once


class Pieces:
    """The files of one uncompressed array in Zarr's second format, each a piece of equal shape; None of anything else."""

    def __init__(self, folder: Path, array: ts.TensorStore) -> None:
        self.folder, self.shape = folder, tuple(array.shape)
        self.dtype = np.dtype(array.dtype.numpy_dtype)
        described = array.spec().to_json()
        metadata = described.get("metadata", {})
        self.piece: tuple[int, ...] = tuple(metadata.get("chunks", ()))
        self._separator = metadata.get("dimension_separator", ".")
        self.plain = (
            described["driver"] == "zarr"
            and described["kvstore"]["driver"] == "file"
            and metadata.get("compressor", "?") is None
            and metadata.get("filters") is None
            and metadata.get("order") == "C"
            and len(self.piece) == len(self.shape) > 0
        )

    def read(self, index: Index) -> np.ndarray | None:
        """The region, or None where it is large or no run of bytes in a piece that it touches. OSError for a file too short."""
        if not self.plain:
            return None
        whole = (*index, *(slice(None) for _ in self.shape[len(index) :]))
        bounds = [
            (i, i + 1) if not isinstance(i, slice) else i.indices(n)[:2] for i, n in zip(whole, self.shape, strict=True)
        ]
        steps = [i.step for i in index if isinstance(i, slice) and i.step not in (None, 1)]
        if steps or any(a < 0 or b <= a or b > n for (a, b), n in zip(bounds, self.shape, strict=True)):
            return None
        if math.prod(b - a for a, b in bounds) * self.dtype.itemsize > _SMALL:
            return None
        found = np.empty([b - a for a, b in bounds], self.dtype)
        for cell, within, to in self._cells(bounds):
            if not _is_run(within, self.piece):
                return None
            shape = [b - a for a, b in within]
            start = int(np.ravel_multi_index([a for a, _ in within], self.piece)) * self.dtype.itemsize
            found[to] = self._bytes(cell, start, math.prod(shape)).reshape(shape)
        kept = [slice(None) if isinstance(i, slice) else 0 for i in whole]
        return found[tuple(kept)]

    def _cells(self, bounds: Sequence[tuple[int, int]]) -> Iterator[tuple[tuple[int, ...], list, tuple[slice, ...]]]:
        """Every piece that the region touches: its place in the grid, the part within it, and where that goes."""
        ranges = [range(a // size, -(-b // size)) for (a, b), size in zip(bounds, self.piece, strict=True)]
        for cell in itertools.product(*ranges):
            within, to = [], []
            for number, size, (a, b) in zip(cell, self.piece, bounds, strict=True):
                low, high = max(a, number * size), min(b, (number + 1) * size)
                within.append((low - number * size, high - number * size))
                to.append(slice(low - a, high - a))
            yield cell, within, tuple(to)

    def _bytes(self, cell: tuple[int, ...], start: int, count: int) -> np.ndarray:
        path = self.folder / self._separator.join(map(str, cell))
        room = np.empty(count, self.dtype)
        left: Any = room.view(np.uint8).data
        with path.open("rb", buffering=0) as file:
            if os.fstat(file.fileno()).st_size != math.prod(self.piece) * self.dtype.itemsize:
                raise OSError(f"{path} is not whole")
            file.seek(start)
            while left:
                got: Any = file.readinto(left)
                if not got:
                    raise OSError(f"{path} ends early")
                left = left[got:]
        return room


def _is_run(within: Sequence[tuple[int, int]], piece: Sequence[int]) -> bool:
    """Whether the part is contiguous: single indices, then one range, then whole axes."""
    wide = [axis for axis, (a, b) in enumerate(within) if b - a > 1]
    first = wide[0] if wide else len(piece)
    return all(within[axis] == (0, piece[axis]) for axis in range(first + 1, len(piece)))
