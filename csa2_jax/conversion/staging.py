"""A directory that is whole or not there: built beside its place, resumable, committed by one rename.

    TARGET.partial/begun.json   while it is written: what it is made from, so that nothing else is ever mixed in
                   content/     files appear under their names only when they are complete
    TARGET/                     afterwards: content/, renamed

A piece that is there is done: every file is written under another name, flushed to the disk and renamed.
Several processes (hosts) may write into one directory; the one that finishes last commits.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Final

from csa2_jax.safetensors_io import CheckpointError, read_json

BEGUN: Final = "begun.json"
_CONTENT: Final = "content"
_LEFT: Final = (".lock-", ".nfs")  # locks, and what is left of open files on disks that are mounted from elsewhere


class Staging:
    """The directory `target` while it is being made from what `begun` describes (JSON values)."""

    def __init__(self, target: str | os.PathLike[str], begun: dict[str, Any], host: int = 0, hosts: int = 1) -> None:
        self.target = Path(os.path.abspath(target))
        if not self.target.name:
            raise ValueError(f"{target} is no place for a checkpoint: name a directory to make")
        self.partial = self.target.with_name(self.target.name + ".partial")
        self.content = self.partial / _CONTENT
        self.begun, self.host, self.hosts = begun, host, hosts
        if hosts < 1 or not 0 <= host < hosts:
            raise ValueError(f"{host=} must be from 0 to {max(hosts, 1) - 1}, of {hosts=} processes from 1 up")

    @property
    def fingerprint(self) -> str:
        """Of what this is made from."""
        return hashlib.sha256(json.dumps(self.begun, sort_keys=True).encode()).hexdigest()

    @contextlib.contextmanager
    def open(self) -> Iterator[bool]:
        """Begin or go on; holds a lock, so that no second process writes the same part. False: others finished meanwhile.

        Raises CheckpointError if something else was begun here, or somebody is at it.
        """
        if not self.target.parent.is_dir():
            raise FileNotFoundError(f"{self.target.parent} does not exist: create it, or choose another place")
        if self.target.is_symlink() and not self.target.exists():
            raise FileExistsError(f"{self.target} is a link to nothing: remove it, or choose another place")
        if self.partial.exists() and not self.partial.is_dir():
            raise FileExistsError(
                f"{self.partial} is in the way, where the work is kept until it is whole: move it away"
            )
        self.partial.mkdir(exist_ok=True)
        who = f" as host {self.host}" if self.hosts > 1 else ""
        with self._lock(
            f".lock-{self.host}", busy=f"another process is writing {self.partial}{who}: wait for it, or stop it"
        ):
            with self._lock(".lock-commit"):  # nobody commits while this host takes its word back
                finished = self.target.exists()
                if not finished:
                    self._agree()
                    self.content.mkdir(exist_ok=True)
                    (self.partial / f".done-{self.host}").unlink(missing_ok=True)
            if finished:
                yield False
                return
            for left in self.content.rglob(f"*{self._suffix}"):  # of a process that was killed
                left.unlink()
            yield True

    @contextlib.contextmanager
    def _lock(self, name: str, busy: str = "") -> Iterator[None]:
        """Hold a lock file of the partial directory; waits for it unless `busy` says what to tell instead."""
        with (self.partial / name).open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | (fcntl.LOCK_NB if busy else 0))
            except BlockingIOError:
                raise CheckpointError(busy) from None
            except OSError as error:
                raise CheckpointError(
                    f"the disk of {self.partial} cannot lock files ({error.strerror}), so two processes could write there at "
                    "once: choose a place on a disk that can"
                ) from None
            yield

    @property
    def _suffix(self) -> str:
        return f".writing-{self.host}"

    def _agree(self) -> None:
        path = self.partial / BEGUN
        if not path.exists():
            others = [p for p in self.partial.iterdir() if not p.name.startswith(_LEFT) and BEGUN not in p.name]
            if others:
                raise CheckpointError(f"{self.partial} holds {others[0].name} and is none of ours: move it away")
            self._put(path, [json.dumps(self.begun, sort_keys=True, indent=1).encode()])
        found = read_json(path, "remove the directory to start over")
        # What follows from other entries is told last.
        for name in sorted({*found, *self.begun}, key=lambda name: (name == "layout", name)):
            if found.get(name) != self.begun.get(name):
                was, now = _short(found.get(name)), _short(self.begun.get(name))
                raise CheckpointError(
                    f"{self.partial} was begun with another {name} ({was}, now {now}): run the command that began it, "
                    "or remove that directory to start over"
                )

    def done(self, name: str, nbytes: int) -> bool:
        """Whether this file is there, whole."""
        try:
            return (self.content / name).stat().st_size == nbytes
        except FileNotFoundError:
            return False

    def write(self, name: str, pieces: Iterable[Any]) -> None:
        """Write a file from buffers; it appears under its name when all of it is on the disk.

        Raises CheckpointError when the disk is full; what is done stays, and the same command goes on from there.
        """
        self._put(self.content / name, pieces)

    def _put(self, path: Path, pieces: Iterable[Any]) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(path.name + self._suffix)
        try:
            with temporary.open("wb", buffering=0) as file:
                for piece in pieces:
                    view = memoryview(piece).cast("B")
                    while len(view):
                        view = view[file.write(view) :]
                os.fdatasync(file.fileno())
            temporary.replace(path)
        except BaseException as error:
            with contextlib.suppress(OSError):
                temporary.unlink()
            if not isinstance(error, OSError):
                raise
            if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                free = shutil.disk_usage(self.partial).free
                raise CheckpointError(
                    f"{self.partial} cannot take {path.name}: {os.strerror(error.errno)}, {free / 1e9:.2f} GB are free. Make "
                    "room and run the same command again: it goes on where it stopped"
                ) from None
            raise

    def require_space(self, nbytes: int) -> None:
        """CheckpointError unless the disk has room for so many bytes more."""
        where = self.partial if self.partial.exists() else self.target.parent
        free = shutil.disk_usage(where).free
        if nbytes > free:
            raise CheckpointError(
                f"{self.target} needs {nbytes / 1e9:.2f} GB more and its disk has {free / 1e9:.2f} GB free: make room, or choose "
                "another place"
            )

    @contextlib.contextmanager
    def finishing(self) -> Iterator[bool]:
        """Mark this host's part as done. True for one host that sees all others done: it is to commit before it leaves."""
        if self.hosts == 1:
            yield True
            return
        with self._lock(".lock-commit"):  # of two that finish at once the second finds what the first made
            if self.target.exists():
                yield False
                return
            self._put(self.partial / f".done-{self.host}", [b""])
            yield all((self.partial / f".done-{host}").exists() for host in range(self.hosts))

    def commit(self) -> None:
        """Make the directory appear under its own name."""
        if self.target.exists():
            raise FileExistsError(
                f"{self.target} came into being meanwhile: move it away and run the same command again"
            )
        _sync_directories(self.content)
        self.content.rename(self.target)
        _sync(self.target.parent)
        self.tidy()

    def tidy(self) -> None:
        """Remove what is left of the work once the directory is whole."""
        if not self.target.exists() or self.content.exists() or not self.partial.is_dir():
            return
        ours = (self.partial / BEGUN).exists() or all(p.name.startswith(_LEFT) for p in self.partial.iterdir())
        if ours:
            shutil.rmtree(self.partial, ignore_errors=True)


def _sync_directories(root: Path) -> None:
    for directory, _, _ in os.walk(root):
        _sync(Path(directory))


def _sync(directory: Path) -> None:
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."
