"""Back to the release layout: the same names, dtypes and files, or weights as bf16 in files of a size to choose."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np

from csa2_jax.conversion.converted import RELEASE_FILE, STAMP, ConvertedFiles, layout, refuse_inside, travelling
from csa2_jax.conversion.stacks import Files
from csa2_jax.conversion.staging import Staging
from csa2_jax.conversion.views import Requantised, Widened
from csa2_jax.manifest import TILE, TensorSpec, release_tensors
from csa2_jax.progress import byte_progress
from csa2_jax.safetensors_io import INDEX_FILE, SINGLE_FILE, CheckpointError, read_json, stays_inside
from csa2_jax.token_map import TOKEN_MAP_FILE

SHARD_BYTES: Final = 5 << 30
_BLOCK_BYTES: Final = 32 << 20

Storage = Literal["stored", "bfloat16"]


@dataclasses.dataclass(frozen=True)
class Exported:
    """What an export did."""

    directory: Path
    tensors: int
    nbytes: int
    files: int


class _Stopped(Exception):
    """Another file failed first; seen by nobody."""


@dataclasses.dataclass(frozen=True)
class _Shard:
    name: str
    specs: tuple[TensorSpec, ...]
    metadata: dict[str, str] | None

    @property
    def header(self) -> bytes:
        """With its length in front."""
        content: dict[str, Any] = {} if self.metadata is None else {"__metadata__": self.metadata}
        at = 0
        for spec in self.specs:
            content[spec.name] = {
                "dtype": spec.dtype,
                "shape": list(spec.shape),
                "data_offsets": [at, at + spec.nbytes],
            }
            at += spec.nbytes
        text = json.dumps(content, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        return len(text).to_bytes(8, "little") + text

    @property
    def nbytes(self) -> int:
        """Of the file."""
        return len(self.header) + sum(spec.nbytes for spec in self.specs)


def export(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    weights: Storage = "stored",
    shard_bytes: int | None = None,
    workers: int = 2,
) -> Exported:
    """Write the converted directory `source` in the release layout; killed at any moment, the same call goes on.

    weights: "stored" writes fp8 and fp4 as the configuration says (weights that were dequantised are quantised again by
    `views.Requantised`), "bfloat16" writes them dequantised, with a config.json that says so. shard_bytes: of a file; by default
    the files are those that were converted, else 5 GiB.

    Raises CheckpointError as `convert` does, and for weights that fp8 cannot hold.
    """
    refuse_inside(Path(source), Path(target))
    files = ConvertedFiles(source)
    config, root = files.config, files.directory
    written = config if weights == "stored" else dataclasses.replace(config, quantized=False)
    specs = tuple(release_tensors(written))
    view: Files = files
    if weights == "stored" and files.weights != "stored" and config.quantized:
        view = Requantised(files, specs)
    elif weights == "bfloat16" and config.quantized and files.weights != "bfloat16":
        view = Widened(files, layout(config, files.weights), specs)
    shards = _shards(root, specs, shard_bytes, alike=weights == "stored")
    begun = {
        "layout": hashlib.sha256(b"".join(shard.header for shard in shards)).hexdigest(),
        "source": _fingerprint(root),
        "weights": weights,
        "shard_bytes": shard_bytes or 0,
    }
    staging = Staging(target, begun)
    total = sum(shard.nbytes for shard in shards)
    result = Exported(Path(target), len(specs), total, len(shards))
    if staging.target.exists():
        return _already_there(staging, result)
    with staging.open() as to_do:
        if not to_do:
            return _already_there(staging, result)
        _companions(staging, root, quantized=written.quantized)
        missing = [shard for shard in shards if not staging.done(shard.name, shard.nbytes)]
        needed = sum(shard.nbytes for shard in missing)
        staging.require_space(needed)
        with byte_progress("exporting", total, done=total - needed, lines=True) as advance:
            _write_all(staging, view, missing, workers, advance)
        if len(shards) > 1 or shards[0].name != SINGLE_FILE:
            index = {
                "metadata": {"total_size": sum(spec.nbytes for spec in specs)},
                "weight_map": {spec.name: shard.name for shard in shards for spec in shard.specs},
            }
            staging.write(INDEX_FILE, [json.dumps(index, indent=2).encode()])
        if _fingerprint(root) != begun["source"]:
            raise CheckpointError(
                f"{root} changed while it was exported: remove {staging.partial} and export again when nobody writes there"
            )
        staging.write(STAMP, [json.dumps({"made_from": staging.fingerprint}).encode()])
        staging.commit()
    return result


def _already_there(staging: Staging, result: Exported) -> Exported:
    stamp = staging.target / STAMP
    if (
        stamp.is_file()
        and read_json(stamp, "remove the directory and export again").get("made_from") == staging.fingerprint
    ):
        staging.tidy()
        return result
    raise FileExistsError(
        f"{staging.target} exists and was not made by this command from this source: choose another place, or remove it"
    )


def _write_all(
    staging: Staging, view: Files, shards: Sequence[_Shard], workers: int, advance: Callable[[int], None]
) -> None:
    """Files side by side; the first that fails, or an interrupt, stops the others at their next block."""
    stop = threading.Event()
    with ThreadPoolExecutor(max(workers, 1)) as pool:
        jobs = [pool.submit(staging.write, shard.name, _content(view, shard, advance, stop)) for shard in shards]
        try:
            for job in as_completed(jobs):
                job.result()
        finally:
            stop.set()
            pool.shutdown(wait=True, cancel_futures=True)


def _fingerprint(root: Path) -> str:
    """Of the names, sizes and times of all files of a converted directory."""
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*")):
        if path.is_file():
            status = path.stat()
            digest.update(f"{path.relative_to(root)} {status.st_size} {status.st_mtime_ns}\n".encode())
    return digest.hexdigest()


def _content(view: Files, shard: _Shard, advance: Callable[[int], None], stop: threading.Event) -> Iterator[Any]:
    """Header, then every tensor a few rows at a time."""
    yield shard.header
    advance(len(shard.header))
    for spec in shard.specs:
        for block in row_blocks(spec, wide=not isinstance(view, ConvertedFiles)):
            if stop.is_set():
                raise _Stopped(f"{shard.name} is not finished")
            values = np.ascontiguousarray(view.part(spec.name, block))
            yield values.reshape(-1).view(np.uint8)
            advance(values.nbytes)


def row_blocks(spec: TensorSpec, nbytes: int = _BLOCK_BYTES, *, wide: bool = False) -> Iterator[tuple[slice, ...]]:
    """Regions of at most `nbytes` (or one row) that cover a tensor in order; each begins at a multiple of 32 rows if it can.

    wide: where a quantised weight is made from values, or values from it, what counts are its f32 values; of a scale, those of
    the tiles it belongs to.
    """
    if not spec.shape or not spec.shape[0]:
        yield ()
        return
    size = spec.nbytes
    if wide:
        size = 4 * math.prod(spec.logical_shape) * (TILE * TILE if spec.dtype == "F8_E8M0" else 1)
    rows = max(nbytes // max(size // spec.shape[0], 1), 1)
    rows = rows // 32 * 32 or rows
    for start in range(0, spec.shape[0], rows):
        yield (slice(start, min(start + rows, spec.shape[0])),)


def _shards(root: Path, specs: Sequence[TensorSpec], shard_bytes: int | None, *, alike: bool) -> list[_Shard]:
    """The files of the release that was converted, or as many as it takes."""
    recorded = root / RELEASE_FILE
    if alike and shard_bytes is None and recorded.is_file():
        by_name = {spec.name: spec for spec in specs}
        files = _recorded_files(recorded)
        names = [name for file in files.values() for name in file["tensors"]]
        if sorted(names) == sorted(by_name):
            return [
                _Shard(name, tuple(by_name[n] for n in file["tensors"]), file["metadata"])
                for name, file in files.items()
            ]
    limit = shard_bytes or SHARD_BYTES
    if limit < 1:
        raise ValueError(f"{shard_bytes=} must be at least 1")
    groups: list[list[TensorSpec]] = [[]]
    size = 0
    for spec in specs:
        if groups[-1] and size + spec.nbytes > limit:
            groups.append([])
            size = 0
        groups[-1].append(spec)
        size += spec.nbytes
    metadata = {"format": "pt"}
    if len(groups) == 1:
        return [_Shard(SINGLE_FILE, tuple(groups[0]), metadata)]
    return [
        _Shard(f"model-{i + 1:05d}-of-{len(groups):05d}.safetensors", tuple(group), metadata)
        for i, group in enumerate(groups)
    ]


def _recorded_files(path: Path) -> dict[str, Any]:
    """release.json: by file name its metadata and the names of its tensors."""
    files = read_json(path, "convert again")
    for name, file in files.items():
        tensors = file.get("tensors") if isinstance(file, dict) else None
        texts = isinstance(tensors, list) and all(isinstance(n, str) for n in tensors)
        metadata = file.get("metadata") if isinstance(file, dict) else None
        if not texts or not isinstance(metadata, dict | None) or not name.endswith(".safetensors"):
            raise CheckpointError(f"{path}: {name} must be a weight file with its metadata and tensors: convert again")
        if not stays_inside(name):
            raise CheckpointError(f"{path} names {name}, a file outside of the checkpoint: refused; convert again")
    return files


def _companions(staging: Staging, root: Path, *, quantized: bool) -> None:
    token_map = root / TOKEN_MAP_FILE
    for path in (*travelling(root), *((token_map,) if token_map.is_file() else ())):
        content = path.read_bytes()
        if path.name == "config.json" and not quantized:
            config = json.loads(content)
            config.pop("quantization_config", None)
            config.get("text_config", {}).pop("quantization_config", None)
            content = json.dumps(config, indent=2).encode()
        staging.write(path.name, [content])
    if not (root / "config.json").is_file():
        raise CheckpointError(f"{root} has no config.json: convert again")
