"""Which tensors of the release fill which stacked parameter, and any region of a stack read from them.

Storage on disk -> parameter: packed fp4 (I8) -> uint8, e8m0 scales -> their uint8 byte, e4m3, bf16 and f32 as they are,
bf16 -> f32 where f32 is wanted. A weight whose `.scale` is not wanted is dequantised, exactly: e2m1 or e4m3 value x
2**(byte - 127). Values are read a few rows at a time, so that memory is that of the region asked for.
Source: arXiv 2609.19969 and the released file layout.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final, Protocol

import numpy as np

from csa2_jax.manifest import TensorSpec, scale_tile
from csa2_jax.safetensors_io import DTYPES, CheckpointError, TensorEntry

Region = tuple[slice, ...]
Advance = Callable[[int], None]

_E2M1: Final = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
_ROWS: Final = 128  # rows are read in multiples of the largest tile
_BLOCK: Final = 1 << 22  # elements converted at a time: bounds the f32 temporaries


class Files(Protocol):
    """What tensors are read from: a release-layout directory or a converted one."""

    directory: Path
    remedy: str  # for values that are damaged

    def __getitem__(self, name: str, /) -> TensorEntry: ...

    def part(self, name: str, region: Region = ()) -> np.ndarray:
        """A region of a tensor in its stored dtype, read into memory of its own."""
        ...

    def region(self, path: str, region: Region, dtype: np.dtype) -> np.ndarray | None:
        """A region of a whole stack, where it is kept as one and in this dtype."""
        ...


@dataclasses.dataclass(frozen=True, slots=True)
class Source:
    """One tensor that fills a slot of a stack; `scale` is its companion when the slot wants the product of both."""

    weight: TensorSpec
    scale: TensorSpec | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the slot."""
        return self.weight.shape if self.scale is None else self.weight.logical_shape

    @property
    def nbytes(self) -> int:
        """Read from disk."""
        return self.weight.nbytes + (0 if self.scale is None else self.scale.nbytes)


class Stack:
    """A parameter [stack axes..., tensor axes...] and the tensor of each of its slots.

    absent: slots that no tensor fills, which are zero. Raises CheckpointError if another slot has no tensor, or one has two, or
    one that does not fit.
    """

    def __init__(
        self,
        path: str,
        shape: tuple[int, ...],
        dtype: np.dtype,
        sources: Sequence[Source],
        absent: frozenset[tuple[int, ...]] = frozenset(),
    ) -> None:
        self.path, self.shape, self.dtype = path, tuple(shape), np.dtype(dtype)
        self.axes = axes = len(sources[0].weight.index)
        self.sources = {source.weight.index: source for source in sources}
        for source in sources:
            index = source.weight.index
            if (
                len(index) != axes
                or any(i >= n for i, n in zip(index, shape, strict=False))
                or shape[axes:] != source.shape
            ):
                raise CheckpointError(
                    f"{source.weight.name} {list(source.shape)} does not fit slot {list(index)} of parameter {path} {list(shape)}"
                )
        if len(self.sources) != len(sources) or len(sources) + len(absent) != math.prod(shape[:axes]):
            filled = np.zeros(shape[:axes], np.int64)
            for index in (*(source.weight.index for source in sources), *absent):
                filled[index] += 1
            slot = tuple(int(i) for i in np.argwhere(filled != 1)[0])
            raise CheckpointError(
                f"slot {list(slot)} of parameter {path} {list(shape)} is filled {filled[slot]} times, not once"
            )

    @property
    def nbytes(self) -> int:
        """Of the whole stack."""
        return math.prod(self.shape) * self.dtype.itemsize

    def read(self, files: Files, region: Region | None = None, advance: Advance = lambda nbytes: None) -> np.ndarray:
        """The values of a region (a slice per axis, unit steps), the whole stack by default.

        `advance` is told the bytes that were read. Raises CheckpointError for a damaged scale, or for values that the stack's
        dtype cannot hold.
        """
        region = tuple(
            slice(*s.indices(n)) for s, n in zip(region or (slice(None),) * len(self.shape), self.shape, strict=True)
        )
        if (values := files.region(self.path, region, self.dtype)) is not None:
            advance(values.nbytes)
            return values
        out = np.empty([s.stop - s.start for s in region], self.dtype)
        for index in itertools.product(*(range(s.start, s.stop) for s in region[: self.axes])):
            slot = out[tuple(i - s.start for i, s in zip(index, region, strict=False))]
            source = self.sources.get(index)
            if source is None:
                slot[...] = 0
                continue
            for rows, part in _row_blocks(region[self.axes :], source.shape):
                advance(_fill(files, source, part, slot[rows]))
        return out


def _row_blocks(region: Region, shape: tuple[int, ...]) -> Iterator[tuple[slice, Region]]:
    """(rows of the result, region of the tensor) a few rows at a time, each beginning at a tile of the tensor."""
    first, *rest = region
    step = max(_ROWS, _BLOCK // max(math.prod(shape[1:]), 1) // _ROWS * _ROWS)
    start = first.start
    while start < first.stop:
        stop = min(start // _ROWS * _ROWS + step, first.stop)
        yield slice(start - first.start, stop - first.start), (slice(start, stop), *rest)
        start = stop


def _fill(files: Files, source: Source, region: Region, out: np.ndarray) -> int:
    """A region of one tensor into `out`; returns the bytes read."""
    weight, scale = source.weight, source.scale
    if scale is None:
        stored = files.part(weight.name, region)
        out[...] = _as_stored(files, weight, stored, out.dtype, region)
        return stored.nbytes
    # Whole tiles and rows of both, of which the region is cut: scales and packed pairs are shared by several elements.
    rows, columns = region
    tile, across = scale_tile(source.shape, scale.shape)
    top = rows.start // tile * tile
    stored = files.part(weight.name, (slice(top, rows.stop),))
    scales = files.part(scale.name, (slice(top // tile, -(-rows.stop // tile)),))
    refuse_nan_scale(files, scale.name, scales, top // tile)
    values = out if (top, columns) == (rows.start, slice(0, source.shape[1], 1)) else None
    if values is None:
        values = np.empty((rows.stop - top, source.shape[1]), out.dtype)
    dequantise(weight.name, stored, scales, values, first_row=top, tile=(tile, across))
    if values is not out:
        out[...] = values[rows.start - top :, columns]
    return stored.nbytes + scales.nbytes


def _as_stored(files: Files, spec: TensorSpec, stored: np.ndarray, dtype: np.dtype, region: Region) -> np.ndarray:
    """The values in the parameter's dtype; only conversions that lose nothing."""
    if spec.dtype == "F8_E8M0":
        refuse_nan_scale(files, spec.name, stored, region[0].start)
    if spec.dtype == "I8" and dtype == np.uint8:
        return stored.view(np.uint8)
    if spec.dtype == "I64" and dtype == np.int32:
        if stored.size and not 0 <= stored.min() <= stored.max() < 2**31:
            raise CheckpointError(
                f"{files[spec.name].file}: {spec.name} holds {stored.min()} and {stored.max()}, which are no ids: {files.remedy}"
            )
        return stored
    if stored.dtype == dtype or (spec.dtype, dtype) == ("BF16", np.dtype(np.float32)):
        return stored  # assigning bf16 to f32 widens exactly
    remedy = "load with weights='float32'" if spec.dtype == "F32" else "this is a fault of the loader"
    raise CheckpointError(
        f"{files[spec.name].file}: {spec.name} is stored as {spec.dtype} and cannot become {dtype} without loss: {remedy}"
    )


def refuse_nan_scale(files: Files, name: str, scale: np.ndarray, first_row: int = 0) -> None:
    """CheckpointError if one of the e8m0 bytes, rows from `first_row` on, is 255."""
    flat = scale.reshape(-1)
    for start in range(0, flat.size, _BLOCK):
        bad = np.flatnonzero(flat[start : start + _BLOCK] == 255)
        if bad.size:
            row, *rest = (int(i) for i in np.unravel_index(start + bad[0], scale.shape))
            raise CheckpointError(
                f"{files[name].file}: {name} holds byte 255 at {[first_row + row, *rest]}, which is NaN in e8m0: the scale is "
                f"damaged, {files.remedy}"
            )


def dequantise(
    name: str,
    weight: np.ndarray,
    scale: np.ndarray,
    out: np.ndarray,
    *,
    first_row: int = 0,
    tile: tuple[int, int] | None = None,
) -> None:
    """out[i, j] = value(weight)[i, j] * 2**(scale byte - 127), exactly, into f32 or bf16 `out` [rows, width].

    `weight` is e4m3 [rows, width], or int8 [rows, width/2] with two e2m1 values per byte, the even one in the low nibble.
    `scale` covers `tile` rows and columns (found from the shapes by default).
    CheckpointError, with rows counted from `first_row`, where bf16 cannot hold a product.
    """
    rows, width = out.shape
    down, across = tile or scale_tile((rows, width), scale.shape)
    step = max(_ROWS, _BLOCK // max(width, 1) // _ROWS * _ROWS)
    for start in range(0, rows, step):
        block = slice(start, min(start + step, rows))
        values = _unpack(weight[block]) if weight.dtype == np.int8 else weight[block].astype(np.float32)
        exponent = scale[start // down : -(-block.stop // down)].astype(np.int32) - 127
        exponent = np.repeat(np.repeat(exponent, down, axis=0), across, axis=1)[: len(values), :width]
        with np.errstate(over="ignore", under="ignore"):  # looked at below
            out[block] = np.ldexp(values, exponent)
        # Far exponents leave f32 or bf16: seldom worth a second look, never worth a silent infinity or zero.
        if exponent.min(initial=0) < -120 or exponent.max(initial=0) > 118:  # 448 * 2**119 is still finite
            back = np.ldexp(out[block].astype(np.float64), -exponent)
            if not np.array_equal(back, values, equal_nan=True):
                i, j = (int(n) for n in np.argwhere(~((back == values) | np.isnan(values)))[0])
                raise CheckpointError(
                    f"{name}[{first_row + start + i}, {j}] is {values[i, j]} * 2**{exponent[i, j]}, which {out.dtype} cannot "
                    "hold: load with weights='stored', or the scale is damaged"
                )


def _unpack(packed: np.ndarray) -> np.ndarray:
    """f32 [rows, 2n] of packed fp4 int8 [rows, n]."""
    codes = packed.view(np.uint8)
    values = np.empty((codes.shape[0], 2 * codes.shape[1]), np.float32)
    values[:, 0::2] = _E2M1[codes & 15]
    values[:, 1::2] = _E2M1[codes >> 4]
    return values


# ---- which tensors fill which stack ----


def group_by_path(specs: Sequence[TensorSpec], targets: Collection[str]) -> dict[str, list[Source]]:
    """Sources of every parameter path, in reading order.

    A path that the model does not have is an error, except a `.scale` whose weight it has: that weight is dequantised.
    So is a parameter of the model that nothing fills.
    """
    by_name = {spec.name: spec for spec in specs}
    stacks: dict[str, list[Source]] = {}
    for spec in specs:
        if spec.path is None:
            continue
        base, _, leaf = spec.path.rpartition(".")
        if spec.path in targets:
            scale = by_name.get(spec.name.removesuffix(".weight") + ".scale") if leaf == "weight" else None
            folded = scale is not None and f"{base}.scale" not in targets
            stacks.setdefault(spec.path, []).append(Source(spec, scale if folded else None))
        elif not (spec.dtype == "F8_E8M0" and f"{base}.weight" in targets):
            raise CheckpointError(f"{spec.name} fills parameter {spec.path}, which this model does not have")
    if empty := sorted(set(targets) - set(stacks)):
        raise CheckpointError(f"no tensor of the checkpoint fills parameter {empty[0]} (and {len(empty) - 1} more)")
    return stacks


Absent = Mapping[str, frozenset[tuple[int, ...]]]  # by path, see `manifest.absent_slots`


def stacks_of(
    specs: Sequence[TensorSpec], wanted: Mapping[str, TensorSpec], absent: Absent | None = None
) -> dict[str, Stack]:
    """The stacks that hold `wanted` (tensors by name, in the layout to be written), filled from `specs` of the same names.

    A tensor that belongs to no parameter of ours (an image tower) is a stack of its own under its own name.
    """
    placed = [dataclasses.replace(spec, path=spec.name, index=()) if spec.path is None else spec for spec in specs]
    targets: dict[str, TensorSpec] = {}
    for spec in wanted.values():
        targets.setdefault(spec.path or spec.name, spec)
    stacks = {}
    for path, sources in group_by_path(placed, targets).items():
        sizes = zip(*(source.weight.index for source in sources), strict=True)
        shape = (*(max(axis) + 1 for axis in sizes), *sources[0].shape)
        dtype, holes = parameter_dtype(targets[path].dtype), (absent or {}).get(path, frozenset())
        stacks[path] = Stack(path, shape, dtype, sources, holes)
    return stacks


def parameter_dtype(stored: str) -> np.dtype:
    """NumPy dtype of a parameter that keeps what is stored as `stored`: packed bytes and exponents are uint8, ids int32."""
    return {"I8": np.dtype(np.uint8), "I64": np.dtype(np.int32)}.get(stored, DTYPES[stored])
