"""Release layout -> Orbax checkpoint of our stacked parameters, a piece of 64 MiB at a time.

Every array of the checkpoint is cut into pieces (chunks of its zarr array, in files of their own). A piece is read from the
tensors that meet in it, written, and never touched again; pieces that are there are skipped when a conversion is resumed. On a
mesh no piece crosses the border between two devices' parts if it can be helped, and every host writes those of its own devices.
"""

from __future__ import annotations

import dataclasses
import hashlib
import io
import itertools
import json
import logging
import math
import os
import tempfile
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, Final

import numpy as np

from csa2_jax.conversion.converted import (
    FORMAT,
    MARKER,
    PARAMS,
    RELEASE_FILE,
    Weights,
    is_converted,
    layout,
    read_marker,
    refuse_inside,
    travelling,
)
from csa2_jax.conversion.opening import Opened, open_checkpoint
from csa2_jax.conversion.stacks import Region, Stack, stacks_of
from csa2_jax.conversion.staging import Staging
from csa2_jax.manifest import absent_slots
from csa2_jax.progress import byte_progress
from csa2_jax.safetensors_io import CheckpointError, TensorFiles, read_metadata
from csa2_jax.sharding import partition, pieces
from csa2_jax.token_map import TOKEN_MAP_FILE, find_token_map

PIECE_BYTES: Final = 64 << 20
_WORKERS: Final = 4


@dataclasses.dataclass(frozen=True)
class Piece:
    """One chunk of one array: its place in the grid of chunks, and the region of the stack it holds."""

    stack: Stack
    grid: tuple[int, ...]
    region: Region
    chunk: tuple[int, ...]

    @property
    def name(self) -> str:
        """File below the output directory."""
        return f"{PARAMS}/{self.stack.path}/{'.'.join(map(str, self.grid or (0,)))}"

    @property
    def nbytes(self) -> int:
        """In the file: a chunk at the edge of the array is padded to its full size."""
        return math.prod(self.chunk) * self.stack.dtype.itemsize


@dataclasses.dataclass(frozen=True)
class Converted:
    """What a conversion did."""

    directory: Path
    tensors: int
    nbytes: int
    resumed_bytes: int
    complete: bool  # False on a host that is not the last to finish


def convert(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    weights: Weights = "stored",
    mesh: Mapping[str, int] | None = None,
    host: int = 0,
    hosts: int = 1,
    piece_bytes: int = PIECE_BYTES,
    workers: int = _WORKERS,
) -> Converted:
    """Convert the release-layout directory `source` into `target`; killed at any moment, the same call goes on.

    weights: "stored" keeps fp8 and fp4 as they are, "bfloat16" and "float32" dequantise them. mesh: axis sizes of the mesh that
    will read it, see `sharding`. host, hosts: of so many processes that write one `target` on a shared disk, this one writes
    its share. piece_bytes: of a file; memory is about `workers` times three of them.

    Raises CheckpointError for whatever the headers tell before any large work: tensors missing, extra, misnamed, of wrong shape
    or dtype, files truncated or unreadable, a tokenizer of another vocabulary, too little room. What only values tell (a NaN
    scale), and a disk that fills meanwhile, end it with the pieces so far kept. `target` appears when it is whole.
    """
    source, target = Path(source), Path(target)
    refuse_inside(source, target)
    if is_converted(source):
        read_marker(source)  # an unfinished one is told so
        raise CheckpointError(f"{source} is converted already: use it as it is, or csa2 export to go back")
    opened = open_checkpoint(source)
    config, files, specs = opened.config, opened.files, opened.specs
    assert isinstance(files, TensorFiles)
    token_map = find_token_map(source, config)
    stacks = stacks_of(specs, {spec.name: spec for spec in layout(config, weights)}, absent_slots(config))
    own = list(pieces_of(stacks.values(), mesh or {}, piece_bytes, host, hosts))
    begun = {
        "layout": _layout_digest(stacks.values(), mesh or {}, piece_bytes),
        "source": _fingerprint(files, opened.directory),
        "weights": weights,
        "mesh": [list(axis) for axis in (mesh or {}).items()],
        "hosts": hosts,
        "piece_bytes": piece_bytes,
    }
    staging = Staging(target, begun, host, hosts)
    if target.exists():
        return _already_there(target, staging, len(specs), own)
    with staging.open() as to_do:
        if not to_do:
            return _already_there(target, staging, len(specs), own)
        missing = [piece for piece in own if not staging.done(piece.name, piece.nbytes)]
        needed, total = (sum(piece.nbytes for piece in some) for some in (missing, own))
        staging.require_space(needed)
        _companions(staging, opened, token_map)
        for stack in stacks.values():
            _describe(staging, stack, mesh or {}, piece_bytes)
        with byte_progress("converting", total, done=total - needed, lines=True) as advance:
            _write_all(staging, files, missing, workers, advance)
        if _fingerprint(files, opened.directory) != begun["source"]:
            raise CheckpointError(
                f"{source} changed while it was converted: its files are not those that were begun with. Remove "
                f"{staging.partial} and convert again when nobody writes there"
            )
        with staging.finishing() as last:
            if last:
                for piece in pieces_of(stacks.values(), mesh or {}, piece_bytes):  # of all hosts
                    if not staging.done(piece.name, piece.nbytes):
                        raise CheckpointError(
                            f"{staging.partial} lacks {piece.name} although every host says it is done: run the command of "
                            "every host again"
                        )
                _finish(staging, stacks, weights)
        complete = target.exists()
    return Converted(target, len(specs), total, total - needed, complete)


# ---- pieces ----


def pieces_of(
    stacks: Iterable[Stack], mesh: Mapping[str, int], piece_bytes: int, host: int = 0, hosts: int = 1
) -> Iterator[Piece]:
    """The pieces that one host writes: those of its devices' parts, and its share of what many hold."""
    for stack in stacks:
        chunk = chunk_shape(stack, mesh, piece_bytes)
        counts = [-(-n // c) for n, c in zip(stack.shape, chunk, strict=True)]
        axes = partition(stack.path, stack.shape, mesh)
        parts = [n // p for n, p in zip(stack.shape, pieces(axes, mesh), strict=True)]
        for number, grid in enumerate(itertools.product(*map(range, counts))):
            region = tuple(slice(g * c, min((g + 1) * c, n)) for g, c, n in zip(grid, chunk, stack.shape, strict=True))
            if hosts > 1:
                held = tuple(_part(s, part) for s, part in zip(region, parts, strict=True))
                holders = _holders(held, axes, mesh, hosts)
                if holders[number % len(holders)] != host:
                    continue
            yield Piece(stack, grid, region, chunk)


def _part(span: slice, size: int) -> int | None:
    """Which of the parts of this size a span lies in; None for a span of several."""
    return span.start // size if span.start // size == (span.stop - 1) // size else None


def _holders(
    part: tuple[int | None, ...], axes: tuple[tuple[str, ...], ...], mesh: Mapping[str, int], hosts: int
) -> list[int]:
    """Hosts with a device that holds this part of an array, along an axis of None any; devices are numbered along the mesh, hosts
    have equal runs of them.
    """
    fixed: dict[str, int] = {}
    for index, names in zip(part, axes, strict=True):
        if index is None:
            continue
        for name in reversed(names):  # of several axes on one dimension the last turns fastest
            index, fixed[name] = divmod(index, mesh[name])
    devices = [0]
    for name, size in mesh.items():
        devices = [d * size + i for d in devices for i in ([fixed[name]] if name in fixed else range(size))]
    every = math.prod(mesh.values())
    if every < hosts:
        return list(range(hosts))  # fewer devices than hosts: they share the work evenly
    return sorted({d * hosts // every for d in devices})


def chunk_shape(stack: Stack, mesh: Mapping[str, int], piece_bytes: int) -> tuple[int, ...]:
    """Of at most `piece_bytes` (or one row), within a device's part, cut along the first axes."""
    split = pieces(partition(stack.path, stack.shape, mesh), mesh)
    if stack.path.startswith("engram_tables."):
        split = (split[0], 1)  # whole rows, however devices split them: they can be mapped, and are read once
    chunk = [n // s for n, s in zip(stack.shape, split, strict=True)]
    for axis, size in enumerate(chunk):
        rest = math.prod(chunk[axis + 1 :]) * stack.dtype.itemsize
        if size * rest <= piece_bytes:
            break
        chunk[axis] = _divisor(size, max(piece_bytes // max(rest, 1), 1))
    return tuple(max(c, 1) for c in chunk)


def _divisor(size: int, most: int) -> int:
    """The largest divisor of `size` up to `most`; where that would make many small pieces, `most` itself."""
    best = next((most - i for i in range(most) if size % (most - i) == 0 and (most - i) * 2 >= most), 0)
    return best or most


# ---- writing ----


def _write_all(staging: Staging, files: TensorFiles, missing: Sequence[Piece], workers: int, advance: Any) -> None:
    stop = threading.Event()

    def write(piece: Piece) -> None:
        if stop.is_set():
            return
        values = piece.stack.read(files, piece.region)
        if values.shape != piece.chunk:
            padded = np.zeros(piece.chunk, values.dtype)
            padded[tuple(slice(n) for n in values.shape)] = values
            values = padded
        staging.write(piece.name, [np.ascontiguousarray(values).reshape(-1).view(np.uint8)])
        advance(piece.nbytes)

    with ThreadPoolExecutor(max(workers, 1)) as pool:
        # A bounded number waits at a time: a hundred thousand futures are no use to anybody.
        queue, waiting = iter(missing), set()
        try:
            while True:
                waiting |= {pool.submit(write, piece) for piece in itertools.islice(queue, 4 * workers - len(waiting))}
                if not waiting:
                    return
                finished, waiting = wait(waiting, return_when=FIRST_COMPLETED)
                for future in finished:
                    future.result()
        finally:
            stop.set()


def _describe(staging: Staging, stack: Stack, mesh: Mapping[str, int], piece_bytes: int) -> None:
    """The metadata of one zarr array (version 2): its pieces hold plain bytes in C order."""
    dtype = stack.dtype
    plain = dtype.kind in "fiu" and dtype.name.startswith(("float32", "float64", "float16", "int", "uint"))
    content = {
        "zarr_format": 2,
        "shape": list(stack.shape),
        "chunks": list(chunk_shape(stack, mesh, piece_bytes)),
        "dtype": dtype.str if plain else dtype.name,
        "compressor": None,
        "fill_value": None,
        "filters": None,
        "order": "C",
        "dimension_separator": ".",
    }
    staging.write(f"{PARAMS}/{stack.path}/.zarray", [json.dumps(content, sort_keys=True).encode()])


def _companions(staging: Staging, opened: Opened, token_map: np.ndarray | None) -> None:
    """Everything small: configuration, tokenizer and texts as they are, the token map, and where each tensor was."""
    files = opened.files
    for path in travelling(opened.directory):
        staging.write(path.name, [path.read_bytes()])
    if opened.changed:
        staging.write("config.json", [json.dumps(opened.config.to_hf(), indent=2).encode()])
    if token_map is not None:
        staging.write(TOKEN_MAP_FILE, [_npy(token_map)])
    # Shards may lie in folders below.
    place = {path: path.relative_to(opened.directory).as_posix() for path in files.files}
    release: dict[str, Any] = {place[path]: {"metadata": read_metadata(path), "tensors": []} for path in files.files}
    for entry in files.values():
        release[place[entry.file]]["tensors"].append(entry.name)
    staging.write(RELEASE_FILE, [json.dumps(release, indent=0).encode()])


def _npy(array: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, array, allow_pickle=False)
    return buffer.getvalue()


def _finish(staging: Staging, stacks: Mapping[str, Stack], weights: Weights) -> None:
    """Orbax's own description of the tree, our marker, the rename."""
    for name, content in orbax_metadata(stacks).items():
        staging.write(f"{PARAMS}/{name}", [content])
    marker = FORMAT | {"weights": weights, "made_from": staging.fingerprint}
    staging.write(MARKER, [json.dumps(marker, indent=1).encode()])
    staging.commit()


def orbax_metadata(paths: Any) -> dict[str, bytes]:
    """The files with which Orbax describes a checkpoint of these parameter paths, as the installed Orbax writes them.

    It saves a tree of the same names with one byte each; only its description is kept.
    """
    import orbax.checkpoint as ocp

    tree: dict[str, Any] = {}
    for path in paths:
        *inner, leaf = path.split(".")
        node = tree
        for key in inner:
            node = node.setdefault(key, {})
        node[leaf] = np.zeros(1, np.uint8)
    with tempfile.TemporaryDirectory() as directory:
        where = Path(directory) / PARAMS
        handler = ocp.PyTreeCheckpointHandler(use_ocdbt=False, use_zarr3=False)
        log = logging.getLogger("absl")  # it warns about files that are not meant to be there
        level = log.level
        log.setLevel(logging.ERROR)
        try:
            with ocp.Checkpointer(handler) as checkpointer:
                checkpointer.save(where, ocp.args.PyTreeSave(tree))
        finally:
            log.setLevel(level)
        return {path.name: path.read_bytes() for path in where.iterdir() if path.is_file()}


# ---- what it is made from ----


def _fingerprint(files: TensorFiles, directory: Path) -> str:
    """Of all headers, of the weight files' sizes and times, and of what the small files say: changes when the source does."""
    digest = hashlib.sha256()
    for path in sorted(files.files):
        status = path.stat()
        digest.update(f"{path.name} {status.st_size} {status.st_mtime_ns}\n".encode())
    for name in sorted(files):
        entry = files[name]
        digest.update(f"{name} {entry.dtype} {entry.shape} {entry.file.name} {entry.start}\n".encode())
    for path in (*travelling(directory), directory / TOKEN_MAP_FILE):
        if path.is_file():
            digest.update(f"{path.name} {hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
    return digest.hexdigest()


def _layout_digest(stacks: Iterable[Stack], mesh: Mapping[str, int], piece_bytes: int) -> str:
    """Of how arrays are cut into pieces, which another version of this program may do otherwise."""
    digest = hashlib.sha256(json.dumps(FORMAT).encode())
    for stack in stacks:
        digest.update(f"{stack.path} {stack.dtype} {stack.shape} {chunk_shape(stack, mesh, piece_bytes)}\n".encode())
    return digest.hexdigest()


def _already_there(target: Path, staging: Staging, tensors: int, own: Sequence[Piece]) -> Converted:
    if (target / MARKER).is_file() and read_marker(target).get("made_from") == staging.fingerprint:
        for piece in own:
            path = target / piece.name
            found = path.stat().st_size if path.is_file() else 0
            if found != piece.nbytes:
                raise CheckpointError(
                    f"{path} has {found} bytes, not {piece.nbytes}: {target} was finished and has been damaged since. Remove it "
                    "and convert again"
                )
        staging.tidy()
        nbytes = sum(piece.nbytes for piece in own)
        return Converted(target, tensors, nbytes, nbytes, complete=True)
    raise FileExistsError(
        f"{target} exists and was not made by this command from this source: choose another place, or remove it"
    )
