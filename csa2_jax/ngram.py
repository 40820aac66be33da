"""Constants of the Engram n-gram memory, derived from the configuration: primes, offsets, multipliers, token map.

Each Engram layer hashes, for every n-gram size 2..max and every head, the last n compressed token ids into its own range
of table rows; every range is a distinct prime long. Nothing here is stored in a checkpoint, so all of it is derived and
checked against what the checkpoint declares. Pure NumPy. Source: arXiv 2609.19969 (Engram), released constants.
"""

from __future__ import annotations

import dataclasses
import unicodedata
from collections.abc import Callable, Sequence

import numpy as np

_SEED_PER_LAYER = 10007
_REPLACEMENT = "\ufffd"


def _is_prime(n: int) -> bool:
    if n < 4:
        return n > 1
    if n % 2 == 0:
        return False
    return all(n % d for d in range(3, int(n**0.5) + 1, 2))


def ngram_primes(floor: int, num_layers: int, num_sizes: int, num_heads: int) -> np.ndarray:
    """Table sizes int64 [layer, n-gram size, head]: strictly increasing primes, the first at or above `floor`."""
    primes: list[int] = []
    n = floor
    while len(primes) < num_layers * num_sizes * num_heads:
        if _is_prime(n):
            primes.append(n)
        n += 1
    return np.asarray(primes, np.int64).reshape(num_layers, num_sizes, num_heads)


def ngram_multipliers(layer: int, compressed_vocab: int, max_ngram: int) -> np.ndarray:
    """Odd multipliers int64 [max_ngram], one per look-back; ids times multiplier stay below 2**63."""
    high = (2**63 - 1) // compressed_vocab // 2
    return np.random.default_rng(_SEED_PER_LAYER * layer).integers(0, high, size=max_ngram, dtype=np.int64) * 2 + 1


@dataclasses.dataclass(frozen=True)
class NgramConstants:
    """What the hash of one Engram layer needs."""

    primes: np.ndarray  # [sizes * heads], column order: 2-gram heads, 3-gram heads, ...
    offsets: np.ndarray  # [sizes * heads], first table row of each column
    multipliers: np.ndarray  # [max_ngram]

    @property
    def rows(self) -> int:
        """Rows of this layer's table."""
        return int(self.primes.sum())


def ngram_constants(
    layer_ids: Sequence[int], *, floor: int, heads: int, max_ngram: int, compressed_vocab: int
) -> tuple[NgramConstants, ...]:
    """One `NgramConstants` per Engram layer, in `layer_ids` order (the primes run on from layer to layer)."""
    if not len(layer_ids):
        return ()
    primes = ngram_primes(floor, len(layer_ids), max_ngram - 1, heads).reshape(len(layer_ids), -1)
    return tuple(
        NgramConstants(
            p, np.concatenate([[0], np.cumsum(p)[:-1]]), ngram_multipliers(layer, compressed_vocab, max_ngram)
        )
        for layer, p in zip(layer_ids, primes, strict=True)
    )


def compress_vocabulary(decode: Callable[[int], str], raw_token: Callable[[int], str], vocab_size: int) -> np.ndarray:
    """Token map int32 [vocab_size]: tokens that read alike share a compressed id, numbered by first appearance.

    `decode(id)` is the text of one token decoded alone, `raw_token(id)` its vocabulary string. The key of a token is its text
    after NFKC, NFD, dropping accents, lower-casing, collapsing runs of space, tab, CR and LF, and stripping; a text that is
    one space keeps it, a text that vanishes keeps its un-normalised form, and undecodable bytes fall back to the raw string.
    """
    numbers: dict[str, int] = {}
    out = np.empty(vocab_size, np.int32)
    for i in range(vocab_size):
        text = decode(i)
        key = raw_token(i) if _REPLACEMENT in text else _normalise(text)
        out[i] = numbers.setdefault(key, len(numbers))
    return out


def _normalise(text: str) -> str:
    folded = unicodedata.normalize("NFD", unicodedata.normalize("NFKC", text))
    folded = "".join(c for c in folded if unicodedata.category(c)[0] != "M").lower()
    pieces: list[str] = []
    for c in folded:
        blank = c in " \t\r\n"
        if not (blank and pieces and pieces[-1] == " "):
            pieces.append(" " if blank else c)
    folded = "".join(pieces)
    if folded == " ":
        return folded
    return folded.strip() or text
