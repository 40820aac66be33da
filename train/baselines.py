"""What a loss has to be held against: gzip, and an interpolated n-gram model of the same tokens.

    P_n(w | h) = (c(h w) + u(h) P_{n-1}(w | h')) / (c(h) + u(h)),   u(h) = how many different tokens followed h

(Witten and Bell), down to the uniform distribution. Counts live in sorted arrays of n-grams packed into 64 bits.
"""

from __future__ import annotations

import gzip
import math
from collections.abc import Sequence

import numpy as np


class NGrams:
    """An interpolated n-gram model of token ids below `vocabulary`."""

    def __init__(self, tokens: np.ndarray, order: int, vocabulary: int) -> None:
        bits = max(1, math.ceil(math.log2(vocabulary)))
        if bits * order > 64:
            raise ValueError(
                f"{order} tokens of {bits} bits do not fit into 64: order={order} must be at most {64 // bits}"
            )
        self.order, self._bits, self._vocabulary = order, np.uint64(bits), vocabulary
        self._grams: list[tuple[np.ndarray, np.ndarray]] = []  # per length n: codes and counts
        self._contexts: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []  # codes, counts, different followers
        for n in range(1, order + 1):
            codes, counts = np.unique(self._codes(tokens, n), return_counts=True)
            heads, first = np.unique(codes >> self._bits, return_index=True)
            ends = np.append(first[1:], len(codes))
            total = np.add.reduceat(counts, first)
            self._grams.append((codes, counts))
            self._contexts.append((heads, total, ends - first))

    def bits_per_token(self, tokens: np.ndarray) -> float:
        """Mean of -log2 P(token | up to order - 1 tokens before it), for all but the first order - 1."""
        start = self.order - 1
        p = np.full(len(tokens) - start, 1.0 / self._vocabulary)
        for n in range(1, self.order + 1):
            codes = self._codes(tokens, n)[start - (n - 1) :]
            count = _lookup(*self._grams[n - 1], codes)
            heads, totals, kinds = self._contexts[n - 1]
            context = codes >> self._bits
            total, kind = _lookup(heads, totals, context), _lookup(heads, kinds, context)
            p = np.where(total > 0, (count + kind * p) / np.maximum(total + kind, 1), p)
        return float(-np.log2(p).mean())

    def _codes(self, tokens: np.ndarray, n: int) -> np.ndarray:
        ids = np.asarray(tokens, np.uint64)
        codes = np.zeros(len(ids) - n + 1, np.uint64)
        for i in range(n):
            codes = (codes << self._bits) | ids[i : len(ids) - n + 1 + i]
        return codes


def _lookup(keys: np.ndarray, values: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    place = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    return np.where(keys[place] == wanted, values[place], 0)


def gzip_bits_per_byte(texts: Sequence[str], together: bool) -> float:
    """Size of gzip -9 in bits per byte of text, of each text alone or of all as one."""
    data = ["".join(texts)] if together else list(texts)
    size = sum(len(gzip.compress(text.encode(), 9, mtime=0)) for text in data)
    return 8.0 * size / sum(len(text.encode()) for text in data)
