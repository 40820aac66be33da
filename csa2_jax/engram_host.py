"""N-gram tables that stay on disk: a forward asks the host for the few rows its tokens need.

A table of the released model is 98 GB, and a token reads 24 rows of 264 bytes of it. `HostRows` maps the files and gathers rows
by several threads; the operating system's page cache is the cache. `HostTable` is the table a model holds instead of an
`EngramTable`: inside jit it calls back to the host, once per call and table, before the layers run. Callers that know the next
tokens already (a prefill does) let `prefetch` read their rows while the device computes.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

from csa2_jax.ngram import NgramConstants

_THREADS: Final = 16  # that wait for a disk: more than cores
_ROWS_EACH: Final = 512


class Rows(Protocol):
    """Rows of bytes: an array, or one that is mapped when rows of it are asked for."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    def __len__(self) -> int: ...

    def __getitem__(self, rows: np.ndarray, /) -> np.ndarray: ...


class HostRows:
    """Rows of one table: e4m3 codes [rows, width] and e8m0 scales [rows, ceil(width / 32)], each as runs of mapped rows.

    codes, scales: (first row, uint8 rows [n, width]) in order, from row 0 on without gaps.
    """

    def __init__(
        self,
        codes: Sequence[tuple[int, Rows]],
        scales: Sequence[tuple[int, Rows]],
        constants: NgramConstants,
        token_map: np.ndarray,
        pad_id: int,
    ) -> None:
        self._parts = [_Runs(codes), _Runs(scales)]
        self.shape = (self._parts[0].rows, self._parts[0].width)
        self._constants, self._token_map, self._pad = constants, token_map, int(token_map[pad_id])
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="engram")
        self._ahead: Future[None] | None = None
        self._lock = threading.Lock()

    @property
    def widths(self) -> tuple[int, int]:
        """Bytes of a row's codes and of its scales."""
        return self._parts[0].width, self._parts[1].width

    def gather(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Codes uint8 [..., width] and scales uint8 [..., width / 32] of any rows."""
        rows = np.asarray(rows)
        wanted, places = np.unique(rows, return_inverse=True)
        pieces = [wanted[i : i + _ROWS_EACH] for i in range(0, len(wanted), _ROWS_EACH)]
        found = []
        for part in self._parts:
            got = list(self._pool.map(part.take, pieces)) if len(pieces) > 1 else [part.take(wanted)]
            found.append(np.concatenate(got))
        if (bad := np.flatnonzero((found[1] == 255).any(axis=1))).size:
            raise ValueError(
                f"row {wanted[bad[0]]} of an n-gram table of {self.shape[0]} rows has scale byte 255, which is NaN in e8m0: the "
                "table is damaged, fetch its file again"
            )
        return found[0][places.reshape(rows.shape)], found[1][places.reshape(rows.shape)]

    def rows_of(self, tokens_BU: np.ndarray, tokens: int) -> np.ndarray:
        """Table rows [B, tokens, Y] of the last `tokens` of these ids, as `engram.hash_rows` finds them.

        Ids before the first one are taken as dead, which for a hint what to read is near enough.
        """
        constants = self._constants
        ids = self._token_map[np.asarray(tokens_BU)].astype(np.int64)
        sizes = len(constants.multipliers) - 1
        heads = len(constants.primes) // sizes
        missing = max(sizes + tokens - ids.shape[1], 0)
        ids = np.pad(ids, ((0, 0), (missing, 0)), constant_values=-1)
        start = ids.shape[1] - tokens
        alive = np.ones((len(ids), tokens), bool)
        mixed = np.zeros((len(ids), tokens), np.uint64)
        columns = []
        for back in range(sizes + 1):
            shifted = ids[:, start - back : start - back + tokens]
            alive &= shifted >= 0
            mixed = mixed ^ np.where(alive, shifted, self._pad).astype(np.uint64) * np.uint64(
                constants.multipliers[back]
            )
            if back:
                primes = constants.primes[(back - 1) * heads : back * heads].astype(np.uint64)
                columns.append(mixed[..., None] % primes)
        rows = np.concatenate(columns, axis=-1) + constants.offsets.astype(np.uint64)
        return rows.astype(np.int64)

    def prefetch(self, tokens_BU: np.ndarray, tokens: int) -> None:
        """Read the rows of these tokens in the background; does nothing while it is still at the last ones."""
        with self._lock:
            if self._ahead is not None and not self._ahead.done():
                return
            ids = np.array(tokens_BU)
            self._ahead = self._pool.submit(self._touch, ids, tokens)

    def _touch(self, ids: np.ndarray, tokens: int) -> None:
        wanted = np.unique(self.rows_of(ids, tokens))
        for part in self._parts:
            part.take(wanted)


@dataclasses.dataclass
class _Runs:
    """Mapped rows in runs; `take` copies some of them."""

    runs: Sequence[tuple[int, Rows]]

    def __post_init__(self) -> None:
        self.starts = np.array([start for start, _ in self.runs])
        ends = [start + len(rows) for start, rows in self.runs]
        if self.starts[0] != 0 or list(self.starts[1:]) != ends[:-1]:
            raise ValueError(f"runs of rows must follow each other, found starts {list(self.starts)} and ends {ends}")
        self.rows, self.width = ends[-1], self.runs[0][1].shape[1]

    def take(self, sorted_rows: np.ndarray) -> np.ndarray:
        """Rows [n, width] in ascending order."""
        if len(self.runs) == 1:
            return np.asarray(self.runs[0][1][sorted_rows])
        out = np.empty((len(sorted_rows), self.width), np.uint8)
        run = np.searchsorted(self.starts, sorted_rows, side="right") - 1
        for i in np.unique(run):
            first, last = np.searchsorted(run, [i, i + 1])
            start, rows = self.runs[i]
            out[first:last] = rows[sorted_rows[first:last] - start]
        return out


class HostTable(nnx.Module):
    """What a model holds for a table on the host: no parameters, a handle."""

    def __init__(self, rows: HostRows) -> None:
        self.rows = rows  # not an array: part of the structure, equal to itself alone

    def fetch(self, rows_BTY: jax.Array) -> FetchedRows:
        """The rows of a call, asked for where this is traced."""
        store = self.rows
        codes, scales = (jax.ShapeDtypeStruct((*rows_BTY.shape, width), np.uint8) for width in store.widths)
        codes, scales = jax.pure_callback(store.gather, (codes, scales), rows_BTY, vmap_method="expand_dims")
        return FetchedRows(lax.bitcast_convert_type(codes, jnp.float8_e4m3fn), scales)


@dataclasses.dataclass(frozen=True)
class FetchedRows:
    """Rows of a call that are on the device already."""

    codes_BTYH: jax.Array
    scale_BTYH: jax.Array

    def take(self, rows_BTY: jax.Array) -> tuple[jax.Array, jax.Array]:
        """They were gathered for just these."""
        del rows_BTY
        return self.codes_BTYH, self.scale_BTYH
