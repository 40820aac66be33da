"""Disks that are full, fill up, fail or cannot lock: told by name, and nothing that is done is lost."""

from __future__ import annotations

import errno
import os
import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from csa2_jax import load_checkpoint
from csa2_jax.conversion import staging
from csa2_jax.conversion.convert import convert
from csa2_jax.conversion.converted import ConvertedFiles
from csa2_jax.conversion.export import export
from csa2_jax.conversion.verify import verify
from csa2_jax.safetensors_io import CheckpointError, TensorFiles
from tests.conversion.test_round_trip import SMALL_PIECES, digests, written


def test_too_little_room_is_told_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = written("fp8", tmp_path / "source")
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(staging.shutil, "disk_usage", lambda where: usage._replace(free=1000))
    with pytest.raises(CheckpointError, match=r"needs 0\.\d+ GB more and its disk has 0\.00 GB free"):
        convert(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("after", [0, 1, 7, 150])
def test_a_disk_that_fills_loses_nothing(after: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = written("fp8", tmp_path / "source")
    convert(source, tmp_path / "whole", piece_bytes=SMALL_PIECES)
    count, real = 0, os.fdatasync

    def full(handle: int) -> None:
        nonlocal count
        count += 1
        if count > after:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(handle)

    monkeypatch.setattr(staging.os, "fdatasync", full)
    with pytest.raises(
        CheckpointError, match=r"No space left on device, .* GB are free\. Make room and run the same command again"
    ):
        convert(source, tmp_path / "out", piece_bytes=SMALL_PIECES, workers=1)
    assert not (tmp_path / "out").exists()
    assert not list((tmp_path / "out.partial").rglob("*.writing*"))
    monkeypatch.undo()
    done = convert(source, tmp_path / "out", piece_bytes=SMALL_PIECES)
    assert (done.resumed_bytes > 0) == (after == 150)
    assert digests(tmp_path / "out") == digests(tmp_path / "whole")


def test_export_to_a_disk_that_fills_goes_on_where_it_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = written("fp8", tmp_path / "source", shards=5)
    convert(source, tmp_path / "orbax")
    count, real = 0, os.fdatasync

    def full(handle: int) -> None:
        nonlocal count
        count += 1
        if count > 6:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(handle)

    monkeypatch.setattr(staging.os, "fdatasync", full)
    with pytest.raises(CheckpointError, match="No space left"):
        export(tmp_path / "orbax", tmp_path / "back", workers=1)
    assert not (tmp_path / "back").exists()
    with pytest.raises((CheckpointError, FileNotFoundError)):
        load_checkpoint(tmp_path / "back.partial")
    monkeypatch.undo()
    kept = {path: path.stat().st_ino for path in (tmp_path / "back.partial/content").glob("*.safetensors")}
    assert 0 < len(kept) < 5
    export(tmp_path / "orbax", tmp_path / "back")
    assert all((tmp_path / "back" / path.name).stat().st_ino == inode for path, inode in kept.items())
    assert verify(source, tmp_path / "back").differences == ()


@pytest.mark.parametrize("failure", [CheckpointError("a weight is damaged"), KeyboardInterrupt()])
def test_an_export_that_fails_stops_its_other_files_at_once(
    failure: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = written("fp8", tmp_path / "source", shards=3)
    convert(source, tmp_path / "orbax")
    real, reads = ConvertedFiles.part, []

    def part(self: ConvertedFiles, name: str, region: Any = ()) -> np.ndarray:
        reads.append(name)
        if len(reads) == 20:
            raise failure
        time.sleep(0.002)
        return real(self, name, region)

    monkeypatch.setattr(ConvertedFiles, "part", part)
    with pytest.raises(type(failure)):
        export(tmp_path / "orbax", tmp_path / "back", workers=2)
    assert len(reads) < 60 < len(TensorFiles(source))
    assert not (tmp_path / "back").exists()
    assert not list((tmp_path / "back.partial").rglob("*.writing*"))


def test_a_disk_that_fails_is_told_with_file_tensor_and_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = written("fp8", tmp_path / "source")
    entry = TensorFiles(source)["layers.1.attn.wkv.weight"]
    real = os.preadv

    def fail(handle: int, buffers: Any, offset: int) -> int:
        if offset == entry.start:
            raise OSError(errno.EIO, "Input/output error")
        return real(handle, buffers, offset)

    monkeypatch.setattr(os, "preadv", fail)
    told = (
        rf"model\.safetensors cannot be read at byte {entry.start}, in layers\.1\.attn\.wkv\.weight: Input/output error"
    )
    with pytest.raises(CheckpointError, match=told):
        convert(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_disk_without_locks_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = written("fp8", tmp_path / "source")

    def refuse(*_: Any) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(staging.fcntl, "flock", refuse)
    with pytest.raises(
        CheckpointError, match=r"cannot lock files \(No locks available\).* choose a place on a disk that can"
    ):
        convert(source, tmp_path / "out")
