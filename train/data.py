"""Rows of packed documents, in an order that a seed fixes and a run can take up again.

Documents are cut into pieces of at most a row, and laid into rows one behind another, each from a whole group of every
compression ratio and a whole block of candidates on (`ModelConfig.document_alignment`), so that nothing that is made of several
tokens is made of two documents. Rows are shuffled anew every epoch by grain, whose iterator knows its place.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any, Final

import grain
import numpy as np

from csa2_jax import ModelConfig
from train.documents import DataError, Store
from train.step import Batch

_OPEN_ROWS: Final = 32  # that a piece may still go into


@dataclasses.dataclass(frozen=True)
class DataSettings:
    """Where the tokens come from and how they are cut.

    train, held_out: files, folders or globs, relative to the configuration file; see `documents`. Without `held_out` every
        `held_out_every`-th document is held out.
    field: of a JSONL line or dataset row. tokenizer: "bytes", a tokenizer.json or the folder of one; "" takes the model's.
    tokens: of a row. rows: of a micro-batch. micro_batches: of a step.
    """

    train: tuple[str, ...] = ()
    held_out: tuple[str, ...] = ()
    held_out_every: int = 20
    field: str = "text"
    tokenizer: str = ""
    tokens: int = 1024
    rows: int = 8
    micro_batches: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.train:
            raise ValueError("data.train is empty: name at least one text file, folder, .jsonl or dataset")
        for name in ("tokens", "rows", "micro_batches"):
            if getattr(self, name) < 1:
                raise ValueError(f"data.{name}={getattr(self, name)} must be at least 1")
        if self.held_out_every < 2 and not self.held_out:
            raise ValueError(
                f"data.held_out_every={self.held_out_every} must be at least 2, or nothing is left to train on"
            )


@dataclasses.dataclass(frozen=True)
class Piece:
    """Tokens start..end-1 of the store, at `column` of a row."""

    start: int
    end: int
    column: int


class Rows:
    """A random-access source of packed rows for grain: row i is a dict of arrays [T], the fields of `Batch`."""

    def __init__(self, store: Store, documents: np.ndarray, config: ModelConfig, tokens: int) -> None:
        self._store, self._tokens, self._pad = store, tokens, config.pad_token_id
        align = config.document_alignment
        if tokens < align:
            raise DataError(f"data.tokens={tokens} is less than the {align} tokens that documents are aligned to")
        self.rows = pack(store.offsets, documents, tokens, align)
        if not self.rows:
            raise DataError(f"no row can be made of {len(documents)} documents")

    def __len__(self) -> int:
        """Rows of an epoch."""
        return len(self.rows)

    def __repr__(self) -> str:
        """What grain's errors and states call it: the same for the same data."""
        return f"Rows({len(self.rows)} of {self._tokens} tokens)"

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        """One row."""
        width = self._tokens
        row = {
            "tokens": np.full(width, self._pad, np.int32),
            "targets": np.full(width, self._pad, np.int32),
            "weight": np.zeros(width, np.float32),
            "origin": np.zeros(width, np.int32),
            "segment": np.full(width, -1, np.int32),
        }
        for number, piece in enumerate(self.rows[index]):
            ids = np.asarray(self._store.tokens[piece.start : piece.end])
            here = slice(piece.column, piece.column + len(ids))
            row["tokens"][here] = ids
            row["targets"][here.start : here.stop - 1] = ids[1:]
            row["weight"][here.start : here.stop - 1] = self._store.predict[piece.start + 1 : piece.end]
            row["segment"][here] = number
            row["origin"][here.start :] = here.start  # padding counts on from the document before it
        return row


def pack(offsets: np.ndarray, documents: np.ndarray, tokens: int, align: int) -> list[list[Piece]]:
    """Rows of pieces: a document's pieces in order, each where it leaves least room among the open rows.

    Pieces of one token, which have nothing to predict, are left out.
    """
    rows: list[list[Piece]] = []
    room: dict[int, int] = {}  # free tokens behind the last piece of each open row
    for document in documents:
        for start in range(int(offsets[document]), int(offsets[document + 1]), tokens):
            end = min(start + tokens, int(offsets[document + 1]))
            if end - start < 2:
                continue
            fits = [(free, r) for r, free in room.items() if free >= end - start]
            if fits:
                free, r = min(fits)
            else:
                free, r = tokens, len(rows)
                rows.append([])
            rows[r].append(Piece(start, end, tokens - free))
            left = free - -(-(end - start) // align) * align
            room.pop(r, None)
            if left >= max(align, 2):
                room[r] = left
            if len(room) > _OPEN_ROWS:
                room.pop(min(room, key=lambda r: room[r]))
    return rows


def split(store: Store, held_out: Store | None, every: int) -> tuple[np.ndarray, tuple[Store, np.ndarray]]:
    """(documents to train on, (store, documents) held out)."""
    everything = np.arange(len(store))
    if held_out is not None:
        return everything, (held_out, np.arange(len(held_out)))
    if len(store) < every:
        raise DataError(
            f"{len(store)} documents are too few to hold out every {every}th (data.held_out_every): name some as data.held_out"
        )
    out = everything % every == every - 1
    return everything[~out], (store, everything[out])


def segments_of(config: ModelConfig, tokens: int) -> int:
    """Documents that a row can hold at most."""
    return -(-tokens // config.document_alignment)


class Batches:
    """An endless iterator over batches [A, B, T] whose place can be saved and taken up again."""

    def __init__(self, rows: Rows, settings: DataSettings) -> None:
        per_step = settings.rows * settings.micro_batches
        if len(rows) < per_step:
            raise DataError(
                f"the data fills {len(rows)} rows of {settings.tokens} tokens, a step takes data.rows * data.micro_batches = "
                f"{per_step}: give more data, or make rows shorter or fewer"
            )
        self._shape = (settings.micro_batches, settings.rows, settings.tokens)
        dataset = grain.MapDataset.source(rows).seed(settings.seed).shuffle().repeat().batch(per_step)
        self._iterator: Any = iter(dataset.to_iter_dataset(grain.ReadOptions(num_threads=1, prefetch_buffer_size=4)))

    def __next__(self) -> Batch:
        """The next batch."""
        return Batch(**{name: a.reshape(self._shape) for name, a in next(self._iterator).items()})

    def state(self) -> str:
        """The place of the iterator, as JSON."""
        state = self._iterator.get_state()
        return state.decode() if isinstance(state, bytes) else json.dumps(state)

    def restore(self, state: str) -> None:
        """Go on where `state` was taken."""
        self._iterator.set_state(json.loads(state))


def held_out_batches(rows: Rows, settings: DataSettings, most: int) -> list[Batch]:
    """Up to `most` batches [B, T] in a fixed order, the last filled up with empty rows."""
    batches = []
    for start in range(0, min(len(rows), most * settings.rows), settings.rows):
        some = [rows[i] for i in range(start, min(start + settings.rows, len(rows)))]
        empty = {name: np.zeros_like(a) for name, a in some[0].items()} | {
            "segment": np.full_like(some[0]["segment"], -1)
        }
        some += [empty] * (settings.rows - len(some))
        batches.append(Batch(**{name: np.stack([row[name] for row in some]) for name in empty}))
    return batches


def relative_to(path: Path) -> Path:
    """Where relative names of a configuration file start."""
    return path.resolve().parent
