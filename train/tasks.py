"""Tasks whose answer lies beyond every window: only a pool and an index that finds the right entry in it can solve them.

Associative recall: pairs (key, value) come first, in any order, then noise in which keys come back; behind each the model has to
say its value. Needle: one pair in a haystack of noise, asked for at the end. Only answers are predicted, and only those that lie
further back than every window of every layer together could carry.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

import numpy as np

from train.step import Batch

Kind = Literal["recall", "needle"]


@dataclasses.dataclass(frozen=True)
class Task:
    """One kind of sequence, drawn at random.

    kind: "recall" or "needle". tokens: of a sequence. pairs: (key, value) pairs in it. keys, values: how many ids of each there
    are; ids are keys, then values, then as many of noise.
    reach: how far back the windows of all layers reach together; answers are asked for from further away only.
    """

    kind: Kind = "recall"
    tokens: int = 256
    pairs: int = 16
    keys: int = 32
    values: int = 32
    noise: int = 32
    reach: int = 64

    def __post_init__(self) -> None:
        if self.pairs > self.keys:
            raise ValueError(f"pairs={self.pairs} need as many different keys, found keys={self.keys}")
        if 2 * self.pairs + self.reach + 2 > self.tokens:
            raise ValueError(
                f"tokens={self.tokens} must hold {self.pairs} pairs, the {self.reach} tokens that windows reach "
                "back, and a question"
            )

    @property
    def vocab_size(self) -> int:
        """Ids in use."""
        return self.keys + self.values + self.noise

    def draw(self, rng: np.random.Generator, rows: int) -> tuple[Batch, np.ndarray]:
        """(a batch [rows, tokens], the position of each answer's pair [rows, tokens], -1 where nothing is asked)."""
        made = [self._recall(rng) if self.kind == "recall" else self._needle(rng) for _ in range(rows)]
        tokens, needles = (np.stack(a) for a in zip(*made, strict=True))
        # The token behind a question is its answer: position t predicts token t + 1.
        targets = np.roll(tokens, -1, axis=1).astype(np.int32)
        zeros = np.zeros(tokens.shape, np.int32)
        weight = (needles >= 0).astype(np.float32)
        return Batch(tokens, targets, weight, zeros, zeros), needles

    def _noise(self, rng: np.random.Generator) -> np.ndarray:
        return rng.integers(self.keys + self.values, self.vocab_size, self.tokens).astype(np.int32)

    def _recall(self, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        tokens, needles = self._noise(rng), np.full(self.tokens, -1, np.int32)
        keys = rng.choice(self.keys, self.pairs, replace=False)
        values = self.keys + rng.integers(0, self.values, self.pairs)
        tokens[0 : 2 * self.pairs : 2], tokens[1 : 2 * self.pairs : 2] = keys, values
        start = 2 * self.pairs
        places = start + 2 * rng.choice(
            (self.tokens - start) // 2, min(self.pairs, (self.tokens - start) // 4), replace=False
        )
        for place in np.sort(places):
            pair = rng.integers(self.pairs)
            tokens[place], tokens[place + 1] = keys[pair], values[pair]
            if place - 2 * pair > self.reach:
                needles[place] = 2 * pair
        return tokens, needles

    def _needle(self, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        tokens, needles = self._noise(rng), np.full(self.tokens, -1, np.int32)
        key, value = rng.integers(self.keys), self.keys + rng.integers(self.values)
        question = self.tokens - 2
        place = int(rng.integers(0, question - self.reach))
        for at in (place, question):
            tokens[at], tokens[at + 1] = key, value
        needles[question] = place
        return tokens, needles
