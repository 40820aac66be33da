"""A directory for each recorded set.

`materialise(name)` gives a complete release-layout directory: config.json, meta.json, model.safetensors, trace.npz.
Sets that are packed under tests/golden are unpacked once into build/golden/<name>, checked against the pinned sha256,
and found there afterwards. What the keys of a trace mean is told in tests/golden/README.md.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from tests.golden import codec

__all__ = ["GOLDEN", "SETS", "golden_file", "load_trace", "manifest", "materialise", "read_safetensors", "sha256"]

GOLDEN = Path(__file__).resolve().parent / "golden"
CACHE = GOLDEN.parent.parent / "build" / "golden"
SETS = (
    "tiny8_f32_noqat",
    "tiny8_f32",
    "tiny8_bf16",
    "tiny8_fp8",
    "tiny8_vl_f32_noqat",
    "twin40_f32_noqat",
    "twin40_fp8",
)
_STAMP = "made_from.txt"

read_safetensors = codec.read_safetensors


@functools.cache
def manifest() -> dict[str, Any]:
    """What tests/golden holds: a sha256 per file, and per set where its weights come from and what they hash to."""
    return json.loads((GOLDEN / "manifest.json").read_text())


def sha256(path: Path) -> str:
    """Hexadecimal sha256 of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def golden_file(name: str) -> Path:
    """A file that is kept as it is, such as `quantizers.npz` or `engram.npz`."""
    path = GOLDEN / name
    if not path.is_file():
        raise ValueError(f"no recorded file {name!r} in {GOLDEN}")
    return path


def materialise(name: str) -> Path:
    """The directory of a set in the release layout, unpacked on first use. Safe to call from several processes at
    once."""
    if name not in SETS:
        raise ValueError(f"unknown set {name!r}; there are {', '.join(SETS)}")
    entry = manifest()["sets"][name]
    if entry["weights"] is None:
        return GOLDEN / name
    target = CACHE / name
    stamp = _stamp(name)
    if _holds(target, stamp):
        return target
    CACHE.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(prefix=f".{name}.", dir=CACHE))
    try:
        _fill(made, name, entry)
        (made / _STAMP).write_text(stamp)
        _publish(made, target, stamp)
    finally:
        shutil.rmtree(made, ignore_errors=True)
    return target


@functools.lru_cache(maxsize=4)
def load_trace(name: str) -> dict[str, np.ndarray]:
    """All recorded arrays of a set by key. Treat them as read-only: the same arrays are handed to every caller."""
    with np.load(materialise(name) / "trace.npz") as arrays:
        trace = {key: arrays[key] for key in arrays.files}
    for values in trace.values():
        values.flags.writeable = False
    return trace


def _stamp(name: str) -> str:
    """Everything that the unpacked directory depends on; when it differs, the directory is made again."""
    entry = manifest()["sets"][name]
    files = manifest()["files"]
    kept = {path: files[path] for path in files if path.startswith(f"{name}/")}
    return json.dumps({"set": entry, "files": kept}, sort_keys=True)


def _holds(directory: Path, stamp: str) -> bool:
    try:
        return (directory / _STAMP).read_text() == stamp
    except OSError:
        return False


def _fill(directory: Path, name: str, entry: dict[str, Any]) -> None:
    for plain in ("config.json", "meta.json"):
        shutil.copyfile(GOLDEN / name / plain, directory / plain)
    base = None if entry["base"] is None else materialise(entry["base"]) / "model.safetensors"
    weights = codec.unpack_weights((GOLDEN / entry["weights"]).read_bytes(), base)
    found = hashlib.sha256(weights).hexdigest()
    if found != entry["sha256"]:
        raise ValueError(f"{name}: model.safetensors was assembled with sha256 {found}, recorded was {entry['sha256']}")
    (directory / "model.safetensors").write_bytes(weights)
    arrays: dict[str, Any] = codec.unpack_trace((GOLDEN / name / "trace.xz").read_bytes())
    np.savez(directory / "trace.npz", **arrays)


def _publish(made: Path, target: Path, stamp: str) -> None:
    """Rename into place in one step; a process that was faster wins, and its directory is as good as ours."""
    for _ in range(3):
        try:
            os.rename(made, target)
            return
        except OSError:
            if _holds(target, stamp):
                return
            # An older unpacking is in the way: move it aside first, since rename cannot replace a directory that holds
            # files.
            aside = Path(tempfile.mkdtemp(prefix=".old.", dir=target.parent))
            with contextlib.suppress(FileNotFoundError):  # somebody else may have moved it
                os.rename(target, aside / "was")
            shutil.rmtree(aside, ignore_errors=True)
    raise OSError(f"could not put {made} at {target}")
