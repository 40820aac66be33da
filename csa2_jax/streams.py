"""What an engine hands out: events, streams of one request's events, and rounds that Ctrl-C does not cut short."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import signal
import threading
from collections.abc import Iterator
from typing import Any, Protocol

from csa2_jax.answers import Finish


@dataclasses.dataclass(frozen=True)
class Event:
    """What a step brought a request: a token, the text that became certain with it, or its end.

    token, logprob: None on an event that only ends (a cancellation). text: None without a tokenizer.
    """

    ticket: int
    index: int
    token: int | None
    logprob: float | None
    text: str | None
    finished: Finish | None


class Source(Protocol):
    """Where a stream gets its events from: an `Engine`."""

    def next_events(self, ticket: int) -> list[Event]:
        """Events of one request, as soon as there are any."""
        ...

    def take(self, ticket: int) -> list[Event]:
        """Those that are there already."""
        ...

    def cancel(self, ticket: int) -> bool:
        """End the request."""
        ...


class Stream(Iterator[Event]):
    """Events of one request as they come (`Engine.stream`). Closing it, started or not, cancels the request unless it is over."""

    def __init__(self, engine: Source, ticket: int) -> None:
        self._engine, self._ticket = engine, ticket
        self._ready: collections.deque[Event] = collections.deque()
        self._over = False

    def __next__(self) -> Event:
        if self._over:
            raise StopIteration
        if not self._ready:
            self._ready.extend(self._engine.next_events(self._ticket))
        if not self._ready:
            self._over = True
            raise ValueError(f"ticket={self._ticket} is unknown or was streamed to its end already")
        event = self._ready.popleft()
        self._over = event.finished is not None
        return event

    def close(self) -> None:
        """Leave; nobody waits for the rest."""
        if not self._over:
            self._over = True
            self._engine.cancel(self._ticket)
            self._engine.take(self._ticket)

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Hold Ctrl-C back until the end of the block, in the thread that gets it."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGINT)
    if before is None or before == signal.SIG_IGN:  # installed by another language, or nobody wants to know
        yield
        return
    seen: list[tuple[int, Any]] = []
    signal.signal(signal.SIGINT, lambda number, frame: seen.append((number, frame)))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if seen:
        (before if callable(before) else signal.default_int_handler)(*seen[0])
