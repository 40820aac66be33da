"""The random numbers that most recorded weights are made of, drawn again.

The weights of the recorded sets are `factor * z`, rounded, with z drawn from one Mersenne Twister (seed 0) the way
PyTorch's CPU `normal_` does it: 24 bits of each 32-bit word make a uniform number, and of every 16 of those the first
eight and the last eight are joined by Box and Muller's formula into eight cosines and eight sines. So a weight is known
from where its numbers start in the stream, its factor, and the rows in which the recorder made it `BOOST` times larger.
This module computes z in float64, which differs from the recorder's float32 by single last places: what is stored is
the difference, so the result is exact all the same.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import ml_dtypes
import numpy as np

__all__ = ["BOOST", "Draw", "draw", "find", "steady"]

BOOST = 6.0  # one row in sixteen of the experts' w1 and w3, so that the clamps of the SwiGLU bind
_LENGTH = 5_000_000  # words of the stream that are made; the 40-layer set uses 4.93 million
_SEED = 0


@dataclass(frozen=True)
class Draw:
    """Where a tensor's numbers start in the stream, its factor, and the rows that are `BOOST` times larger."""

    start: int
    factor: float
    boosted: tuple[int, ...] = ()


@functools.cache
def _waves() -> tuple[np.ndarray, np.ndarray]:
    """For every word t of the stream, the cosine and the sine number that t and t + 8 would make."""
    words = np.frombuffer(
        np.random.RandomState(_SEED).bytes(4 * _LENGTH), "<u4"
    )  # RandomState's stream is frozen for good
    uniform = (words & np.uint32(0xFFFFFF)).astype(np.float64) * 2.0**-24
    radius = np.sqrt(-2 * np.log(1 - uniform[:-8]))
    angle = 2 * np.pi * uniform[8:]
    return radius * np.cos(angle), radius * np.sin(angle)


def _normals(start: int, count: int) -> np.ndarray:
    cosines, sines = _waves()
    index = np.arange(count)
    word = start + index // 16 * 16 + index % 8
    return np.where(index % 16 < 8, cosines[word], sines[word])


def draw(what: Draw, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """The tensor that `what` describes."""
    return _round(what, _normals(what.start, int(np.prod(shape))).reshape(shape), dtype)


def _round(what: Draw, normals: np.ndarray, dtype: np.dtype) -> np.ndarray:
    values = normals * what.factor
    if what.boosted:
        values[list(what.boosted)] *= BOOST
    return values.astype(np.float32).astype(dtype)


# --- finding a tensor in the stream: only for making the packs --------------------------------------------------------


@functools.cache
def _by_ratio() -> tuple[np.ndarray, np.ndarray]:
    cosines = _waves()[0]
    ratio = cosines[1:] / cosines[:-1]
    order = np.argsort(ratio)
    return ratio[order], order


def find(values: np.ndarray) -> Draw | None:
    """The draw that explains a matrix, or None. Looks for the ratio of its first two numbers, then compares the first
    64."""
    if values.ndim != 2 or values.size < 1024 or values.dtype not in (np.float32, ml_dtypes.bfloat16):
        return None
    wanted = values.astype(np.float64)
    head = wanted.reshape(-1)[: min(64, values.shape[1])]
    if not head[0] or not head[1]:
        return None
    ratio, order = _by_ratio()
    slack = abs(head[1] / head[0]) * 2.0**-7
    low, high = np.searchsorted(ratio, [head[1] / head[0] - slack, head[1] / head[0] + slack])
    starts = order[low:high]
    starts = starts[starts < _LENGTH - values.size - 32]
    for count in (8, head.size):
        index = np.arange(count)
        cosines, sines = _waves()
        word = index // 16 * 16 + index % 8
        picked = np.where(index % 16 < 8, cosines[starts[:, None] + word], sines[starts[:, None] + word])
        likeness = picked @ head[:count] / np.linalg.norm(picked, axis=1) / np.linalg.norm(head[:count])
        starts = starts[likeness > 0.9999]
    return None if starts.size != 1 else _fit(int(starts[0]), wanted, values)


def _fit(start: int, wanted: np.ndarray, values: np.ndarray) -> Draw | None:
    normals = _normals(start, values.size).reshape(values.shape)
    by_row = (wanted * normals).sum(1) / (normals * normals).sum(1)
    boosted = tuple(int(row) for row in np.flatnonzero(by_row > np.sqrt(BOOST) * np.median(by_row)))
    plain = np.setdiff1d(np.arange(len(by_row)), boosted)
    mean = float((wanted[plain] * normals[plain]).sum() / (normals[plain] ** 2).sum())
    candidates = [
        Draw(start, factor, boosted) for factor in (mean, *(float(f"{mean:.{digits}g}") for digits in (2, 3, 4, 5)))
    ]
    best = min(candidates, key=lambda what: np.count_nonzero(_round(what, normals, values.dtype) != values))
    return best if _explains(best, normals, wanted) else None


def _explains(what: Draw, normals: np.ndarray, wanted: np.ndarray) -> bool:
    values = _round(what, normals, np.dtype(np.float32))
    return bool(np.abs(values - wanted).max() <= np.abs(wanted).max() * 2.0**-7)


def steady(what: Draw, shape: tuple[int, ...], dtype: np.dtype) -> Draw:
    """The same draw with its factor nudged until no number lies so near a rounding boundary that another mathematics
    library, whose logarithms and cosines differ in the last places, would round it the other way."""
    normals = _normals(what.start, int(np.prod(shape))).reshape(shape)
    for nudge in range(100):
        tried = Draw(what.start, what.factor * (1 + nudge * 1e-10), what.boosted)
        below, above = (_round(tried, normals * (1 + error), dtype) for error in (-1e-13, 1e-13))
        if np.array_equal(below, above):
            return tried
    raise ValueError(f"no steady factor near {what}")
