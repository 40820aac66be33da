"""Progress of long work on files: a bar where somebody watches, a line now and then where the output goes to a file."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Final

_LINE_EVERY: Final = 10.0  # seconds


@contextlib.contextmanager
def byte_progress(
    title: str, nbytes: int, *, done: int = 0, least: int = 0, lines: bool = False
) -> Iterator[Callable[[int], None]]:
    """Yields a function that is told bytes as they are done, from any thread; shows them, rate and time left on stderr.

    done: bytes that were done before. Work of no more than `least` bytes shows nothing. lines: without a terminal, print a line
    every ten seconds instead of nothing.
    """
    watched = sys.stderr.isatty()
    if nbytes <= least or not (watched or lines):
        yield lambda _: None
    elif watched:
        with _bar(title, nbytes, done) as advance:
            yield advance
    else:
        yield _Lines(title, nbytes, done)


@contextlib.contextmanager
def _bar(title: str, nbytes: int, done: int) -> Iterator[Callable[[int], None]]:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (
        TextColumn(title),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TextColumn("ETA"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(title, total=nbytes, completed=done)
        yield lambda n: bar.advance(task, n)


class _Lines:
    def __init__(self, title: str, nbytes: int, done: int) -> None:
        self._title, self._nbytes, self._before, self._new = title, nbytes, done, 0
        self._start = self._told = time.monotonic()
        self._lock = threading.Lock()

    def __call__(self, nbytes: int) -> None:
        with self._lock:
            self._new += nbytes
            now = time.monotonic()
            if now - self._told < _LINE_EVERY:
                return
            self._told = now
            rate = self._new / (now - self._start)
            at = self._before + self._new
            left = (self._nbytes - at) / rate if rate else float("inf")
            print(
                f"{self._title}: {at / 1e9:.1f} of {self._nbytes / 1e9:.1f} GB, {rate / 1e6:.0f} MB/s, {left / 60:.0f} min left",
                file=sys.stderr,
                flush=True,
            )
