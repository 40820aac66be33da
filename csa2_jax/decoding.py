"""The decode loop's device side: one compiled program per step for all rows, plain or speculative.

A `Decoder` owns a cache and, per row, the token that is known but not consumed. `start` gives a row its first token (drawn from
the logits of its prefill), `step` runs all rows that may go on and returns what each of them got.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from csa2_jax import speculative
from csa2_jax.bound import Bound
from csa2_jax.calls import check_storage
from csa2_jax.sampling import Rules, Sampling, draw, log_distribution
from csa2_jax.speculative import Acceptance, without
from csa2_jax.state import Cache
from csa2_jax.structure import Structure
from kernels_pallas import Unsupported


@dataclasses.dataclass(frozen=True)
class Made:
    """What a step made: of row b the first `counts[b]` of tokens [B, T], with log-probabilities under softmax(logits)."""

    tokens: np.ndarray
    logprobs: np.ndarray
    counts: np.ndarray


def banned_token(bound: Bound) -> int | None:
    """The image placeholder, which is no text."""
    return bound.config.image_token_id if bound.config.has_vision else None


class Decoder:
    """Rows of a cache being continued.

    speculative: draft and verify; needs a model with a draft head and a cache with draft windows.
    threshold: drafts count as long as the confidence that all of them are kept is at least this; 0 verifies whole blocks.
    """

    def __init__(
        self, bound: Bound, cache: Cache, *, speculative: bool = False, threshold: float = speculative.THRESHOLD
    ) -> None:
        if speculative and (bound.draft is None or cache.draft_window_LBWH is None):
            raise Unsupported(
                "speculative=True needs a model with a draft head (num_nextn_predict_layers > 0) and a cache with draft windows"
            )
        check_storage(bound.numerics.fake_quant, cache)
        batch = len(cache.lengths())
        self.bound, self.cache, self.speculative, self.threshold = bound, cache, speculative, float(threshold)
        self.banned = banned_token(bound)
        self.samplings = [Sampling()] * batch
        self.token, self.index = np.zeros(batch, np.int32), np.zeros(batch, np.int32)
        self.acceptance = Acceptance(bound.config.dspark_block_size if speculative else 0)
        self._rules = Rules.of(self.samplings)
        self._pending: Any = None
        self._hopeful = np.zeros(batch, int)

    def start(
        self, rows: Sequence[int], samplings: Sequence[Sampling], logits: jax.Array
    ) -> tuple[np.ndarray, np.ndarray]:
        """Draw the first token of each row's answer from `logits` [rows, V]: (ids, log-probabilities)."""
        for row, sampling in zip(rows, samplings, strict=True):
            self.samplings[row] = sampling
        self._rules = Rules.of(self.samplings)
        drawn, logprobs = _jit_draw(logits, Rules.of(samplings), np.zeros(len(rows), np.int32), banned=self.banned)
        ids = np.asarray(drawn)
        self.token[list(rows)], self.index[list(rows)] = ids, 1
        self._pending = None  # of the other rows it is drafted again: the same
        return ids, np.asarray(logprobs)

    def step(self, limit: np.ndarray) -> Made:
        """One token, or as many as are accepted, for every row with limit[b] > 0, at most limit[b] of them."""
        return self._verify(limit) if self.speculative else self._plain(limit)

    def reset(self, cache: Cache) -> None:
        """Go on with another cache, whose rows are empty."""
        self.cache, self._pending = cache, None

    def compile(self, width: int) -> None:
        """Run a step of that many places for nobody."""
        nobody = np.zeros(len(self.token), int)
        if self.speculative:
            self._verify(nobody, width)
        else:
            self._plain(nobody)

    def _plain(self, limit: np.ndarray) -> Made:
        live = (limit > 0).astype(np.int32)
        before = self.cache.lengths()
        feed = self.bound.feed if self.cache.draft_window_LBWH is not None else None
        (drawn, logprobs), cache = _jit_decode(
            *(self.bound.structure, feed and feed[0], self.bound.state, feed and feed[1]),
            *(self.token, self.cache, live, self.index, self._rules),
            banned=self.banned,
        )
        self.cache = cache.with_mirror(before + live)
        ids = np.asarray(drawn)
        self.token = np.where(live, ids, self.token).astype(np.int32)
        self.index = self.index + live
        return Made(ids[:, None], np.asarray(logprobs)[:, None], live.astype(int))

    def _verify(self, limit: np.ndarray, width: int = 0) -> Made:
        if self._pending is None:
            arrays = (self.token, self.index, self._rules)
            self._pending = speculative.begin(self.bound, self.cache, *arrays, self.banned, self.threshold)
            self._hopeful = np.asarray(self._pending.hopeful_B)
        wanted = int(np.where(limit > 0, np.minimum(self._hopeful, limit - 1), 0).max(initial=0)) + 1
        width = width or next(w for w in speculative.widths(self.bound.config) if w >= wanted)
        before = self.cache.lengths()
        limit = limit.astype(np.int32)
        cache, self._pending, made = speculative.advance(
            *(self.bound, self.cache, self._pending, self._rules, limit),
            width=width,
            banned=self.banned,
            threshold=self.threshold,
        )
        tokens, logprobs, kept, tried, hopeful = jax.device_get(
            (made.token_BT, made.logprob_BT, made.kept_B, made.tried_B, self._pending.hopeful_B)
        )
        self._hopeful = hopeful
        counts = np.where(limit > 0, kept + 1, 0)
        self.cache = cache.with_mirror(before + counts)
        self.index = self.index + counts.astype(np.int32)
        last = np.take_along_axis(tokens, kept[:, None], axis=1)[:, 0]
        self.token = np.where(limit > 0, last, self.token).astype(np.int32)
        for row in np.flatnonzero(limit > 0):
            self.acceptance.add(int(tried[row]), int(kept[row]))
        return Made(tokens, logprobs, counts)


@functools.partial(jax.jit, static_argnames=("banned",))
def _jit_draw(
    logits_BV: jax.Array, rules: Rules, index_B: jax.Array, *, banned: int | None
) -> tuple[jax.Array, jax.Array]:
    return _draw(logits_BV, rules, index_B, banned)


def _draw(logits_BV: jax.Array, rules: Rules, index_B: jax.Array, banned: int | None) -> tuple[jax.Array, jax.Array]:
    logits_BV = without(logits_BV, banned)
    ids = draw(log_distribution(logits_BV[:, None], rules), rules, index_B[:, None])
    return ids[:, 0], jnp.take_along_axis(jax.nn.log_softmax(logits_BV), ids, axis=-1)[:, 0]


@functools.partial(jax.jit, static_argnames=("structure", "feed_structure", "banned"), donate_argnames=("cache",))
def _jit_decode(
    structure: Structure,
    feed_structure: Structure | None,
    state: Any,
    feed_state: Any,
    token_B: jax.Array,
    cache: Cache,
    live_B: jax.Array,
    index_B: jax.Array,
    rules: Rules,
    *,
    banned: int | None,
) -> tuple[tuple[jax.Array, jax.Array], Cache | None]:
    feed = None if feed_structure is None else feed_structure.merge(feed_state)
    model = structure.merge(state)
    out, cache = model(token_B[:, None], cache, live_B, all_logits=False, feed=feed)
    return _draw(out.logits, rules, index_B, banned), cache
