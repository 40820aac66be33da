"""A converted directory, read by the names of the release: our stacked parameters as an Orbax checkpoint.

    DIR/csa2.json       what this is; written last, so a directory without it is none of ours
        config.json     the release's, with the tokenizer's files beside it
        token_map.npy   compressed token ids, where the model has n-gram memories
        release.json    which file of the release held which tensor, for the way back
        params/         Orbax: one array per parameter path, plus the image tower's tensors under their own names

`orbax.checkpoint.StandardCheckpointer().restore(DIR/params, target)` reads it as well, onto any mesh.
"""

from __future__ import annotations

import collections
import dataclasses
import json
import os
import resource
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Literal, get_args

import numpy as np
import tensorstore as ts

from csa2_jax.config import ModelConfig
from csa2_jax.conversion.pieces import Pieces
from csa2_jax.conversion.stacks import Region, Stack, refuse_nan_scale, stacks_of
from csa2_jax.conversion.staging import BEGUN
from csa2_jax.manifest import TensorSpec, absent_slots, release_tensors
from csa2_jax.safetensors_io import DTYPES, INDEX_FILE, SINGLE_FILE, CheckpointError, Entries, TensorEntry, read_json
from csa2_jax.token_map import TOKEN_MAP_FILE

Weights = Literal["stored", "bfloat16", "float32"]
MARKER: Final = "csa2.json"
PARAMS: Final = "params"
RELEASE_FILE: Final = "release.json"
STAMP: Final = "exported_from.json"
_CACHE_BYTES: Final = 256 << 20
_TRAVELS: Final = ("*.json", "*.txt", "*.md", "*.model", "*.jinja", "LICENSE*")
_LARGEST_COMPANION: Final = 100_000_000  # bytes
_MAPPED: Final = 64  # files of tables at a time, and at most an eighth of what the process may open
FORMAT: Final = {"format": "csa2-jax stacked parameters", "version": 1}


def layout(config: ModelConfig, weights: Weights) -> tuple[TensorSpec, ...]:
    """Tensors by the release's names as a converted directory holds them: as released, or with quantised weights dequantised."""
    stored = tuple(release_tensors(config))
    if weights == "stored" or not config.quantized:
        return stored
    wide = {spec.name: spec for spec in release_tensors(dataclasses.replace(config, quantized=False))}
    dtype = {"bfloat16": "BF16", "float32": "F32"}[weights]
    was = {spec.name: spec.dtype for spec in stored}
    return tuple(
        spec if spec.dtype == was[spec.name] else dataclasses.replace(spec, dtype=dtype) for spec in wide.values()
    )


def is_converted(directory: str | os.PathLike[str]) -> bool:
    """Whether this is a converted directory, finished or not; one that holds safetensors is none, whatever else is there."""
    directory = Path(directory)
    if any((directory / name).is_file() for name in (MARKER, BEGUN)):
        return True
    return (directory / PARAMS).is_dir() and not any((directory / name).exists() for name in (SINGLE_FILE, INDEX_FILE))


def travelling(directory: Path) -> list[Path]:
    """The small files beside the weights that go with them wherever they go: configuration, tokenizer, texts.

    Raises CheckpointError for one that is too large to be any of these.
    """
    names = {path for pattern in _TRAVELS for path in directory.glob(pattern)}
    own = (INDEX_FILE, TOKEN_MAP_FILE, MARKER, RELEASE_FILE, STAMP, BEGUN)
    found = [path for path in sorted(names) if path.name not in own and path.is_file()]
    for path in found:
        if path.stat().st_size > _LARGEST_COMPANION:
            raise CheckpointError(
                f"{path} has {path.stat().st_size} bytes: no text that belongs to a model; move it away"
            )
    return found


def refuse_inside(source: Path, target: Path) -> None:
    """ValueError for an output inside its own input, which would become part of it."""
    if source.resolve() in target.resolve().parents:
        raise ValueError(f"{target} lies inside {source}, which it is made from: choose a place beside it")


class _Maps:
    """The files that were read last, mapped: a large table has more files than a process may hold open."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._mapped: collections.OrderedDict[Path, np.ndarray] = collections.OrderedDict()
        may_open, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._most = _MAPPED if may_open == resource.RLIM_INFINITY else max(1, min(_MAPPED, may_open // 8))

    def get(self, path: Path, shape: tuple[int, ...]) -> np.ndarray:
        with self._lock:
            if path not in self._mapped:
                while len(self._mapped) >= self._most:
                    self._mapped.popitem(last=False)  # closed when the last reader lets it go
                self._mapped[path] = np.memmap(path, np.uint8, "r", shape=shape)
            self._mapped.move_to_end(path)
            return self._mapped[path]


@dataclasses.dataclass(frozen=True)
class _Mapped:
    """Rows of bytes in a file, mapped when they are asked for."""

    maps: _Maps
    path: Path
    shape: tuple[int, int]

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: Any) -> np.ndarray:
        return self.maps.get(self.path, self.shape)[rows]


class ConvertedFiles(Entries):
    """All tensors of a converted directory by their release names; regions of them, and of whole stacks.

    Raises CheckpointError for a directory that was never finished, is of another version, or does not hold what its
    config.json describes. Arrays' metadata are read, no values.
    """

    remedy = "convert again"

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self.directory = Path(directory)
        self.marker = read_marker(self.directory)
        self.weights: Weights = self.marker["weights"]
        self.config = ModelConfig.from_hf(self.directory)
        self.specs = layout(self.config, self.weights)
        self.stacks = stacks_of(self.specs, {spec.name: spec for spec in self.specs}, absent_slots(self.config))
        self._of = {spec.name: spec for spec in self.specs}
        self._arrays = _open(self.directory / PARAMS, self.stacks)
        self._pieces = {path: Pieces(self.directory / PARAMS / path, array) for path, array in self._arrays.items()}
        self._entries = {
            spec.name: TensorEntry(spec.name, spec.dtype, spec.shape, self._file(spec), 0, spec.nbytes)
            for spec in self.specs
        }

    def _file(self, spec: TensorSpec) -> Path:
        return self.directory / PARAMS / (spec.path or spec.name)

    def part(self, name: str, region: Region = ()) -> np.ndarray:
        """A region of a tensor in its stored dtype, read into memory of its own."""
        spec = self._of[name]
        within = tuple(slice(*s.indices(n)) for s, n in zip(region, spec.shape, strict=False))
        values = self._read(spec.path or name, (*spec.index, *within))
        if spec.dtype == "I64":
            return values.astype(np.int64)
        return values.view(DTYPES[spec.dtype]) if spec.dtype == "I8" else values

    def read(self, name: str) -> np.ndarray:
        """A whole tensor."""
        return self.part(name)

    def rows(self, name: str) -> list[tuple[int, Any]]:
        """A tensor [rows, width] of bytes as runs (first row, uint8 rows mapped when they are read), one per file of its array.

        Raises CheckpointError for arrays that are compressed, or cut along their rows' width: they cannot be mapped.
        """
        spec = self._of[name]
        folder = self._file(spec)
        try:
            described = json.loads((folder / ".zarray").read_text(encoding="utf-8"))
            (size, width), plain = described["chunks"], described["compressor"] is None
        except (OSError, ValueError, KeyError):
            size, width, plain = 0, 0, False
        if not plain or spec.index or width != spec.shape[1]:
            raise CheckpointError(f"{folder} cannot be mapped row by row: convert again with csa2 convert")
        runs: list[tuple[int, Any]] = []
        maps = _Maps()
        for start in range(0, spec.shape[0], size):
            path = folder / f"{start // size}.0"
            found = path.stat().st_size if path.is_file() else 0
            if found != size * width:
                raise CheckpointError(f"{path}, rows of {name}, has {found} bytes, not {size * width}: convert again")
            runs.append((start, _Mapped(maps, path, (min(size, spec.shape[0] - start), width))))
        return runs

    def region(self, path: str, region: Region, dtype: np.dtype) -> np.ndarray | None:
        """A region of a whole stack, where it is stored in this dtype."""
        stack = self.stacks.get(path)
        if stack is None or stack.dtype != dtype:
            return None
        values = self._read(path, region)
        if next(iter(stack.sources.values())).weight.dtype == "F8_E8M0":
            for within in np.ndindex(values.shape[: stack.axes]):
                slot = tuple(i + s.start for i, s in zip(within, region, strict=False))
                refuse_nan_scale(self, stack.sources[slot].weight.name, values[within], region[stack.axes].start)
        return values

    def _read(self, path: str, index: tuple[Any, ...]) -> np.ndarray:
        try:
            found = self._pieces[path].read(index)
            return np.asarray(self._arrays[path][index].read().result()) if found is None else found
        except (ValueError, OSError) as error:
            raise CheckpointError(
                f"{self.directory / PARAMS / path} cannot be read ({str(error)[:200]}): convert again"
            ) from None


def read_marker(directory: Path) -> dict[str, Any]:
    """The content of csa2.json; CheckpointError where it is absent or of another version."""
    path = directory / MARKER
    if not path.is_file():
        raise CheckpointError(
            f"{directory} has no {MARKER}: it is no finished conversion. Run the same command again, which goes on where it "
            "stopped"
        )
    marker = read_json(path, "convert again")
    found = {name: marker.get(name) for name in FORMAT}
    if found != FORMAT or marker.get("weights") not in get_args(Weights):
        raise CheckpointError(
            f"{path} says {str(found)[:200]}, this version reads {FORMAT}: convert again with this version"
        )
    return marker


def array_spec(params: Path, name: str, *, ocdbt: bool, zarr3: bool) -> dict[str, Any]:
    """TensorStore's description of one array of an Orbax checkpoint."""
    if ocdbt:
        store: dict[str, Any] = {"driver": "ocdbt", "base": f"file://{params.resolve()}/", "path": f"{name}/"}
    else:
        store = {"driver": "file", "path": f"{params.resolve()}/{name}/", "file_io_locking": {"mode": "none"}}
    # Without the last entry a lost piece would read as zeros.
    return {"driver": "zarr3" if zarr3 else "zarr", "kvstore": store, "fill_missing_data_reads": False}


def _open(params: Path, stacks: Mapping[str, Stack]) -> dict[str, ts.TensorStore]:
    """Every array, checked against the stack it should hold."""
    metadata = params / "_METADATA"
    try:
        tree = json.loads(metadata.read_text(encoding="utf-8"))
        flags = {"ocdbt": bool(tree["use_ocdbt"]), "zarr3": bool(tree.get("use_zarr3"))}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{metadata} is no description of an Orbax checkpoint ({error}): convert again") from None
    # Tensors lie side by side in one piece and are asked for one after the other: each piece is read once.
    context = ts.Context({"cache_pool": {"total_bytes_limit": _CACHE_BYTES}})
    waiting = {
        path: ts.open(
            array_spec(params, path, **flags), read=True, open=True, context=context, recheck_cached_data=False
        )
        for path in stacks
    }
    arrays = {}
    for path, stack in stacks.items():
        try:
            arrays[path] = waiting[path].result()
        except (ValueError, OSError) as error:
            raise CheckpointError(
                f"{params / path}, parameter {path} {list(stack.shape)}, cannot be opened ({str(error)[:200]}): convert again"
            ) from None
        found = tuple(arrays[path].shape), np.dtype(arrays[path].dtype.numpy_dtype)
        if found != (stack.shape, stack.dtype):
            raise CheckpointError(
                f"{params / path} is {found[1]} {list(found[0])}, but config.json describes {stack.dtype} {list(stack.shape)}: "
                "the two do not belong together; convert again"
            )
    return arrays
