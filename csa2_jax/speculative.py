"""Speculative decoding with the DSpark draft head: one forward verifies a block of drafts, the cache keeps what is accepted.

    round:  forward over [the known token, d_1 .. d_k]  ->  p_0 .. p_k;  keep n drafts, draw the token behind them (`sampling`)
            cache <- the known token and the kept drafts, nothing of the others;   draft again behind it

Nothing is rolled back: what a forward leaves in windows, open groups, n-gram history and lengths is written when the number of
kept drafts is known, in the same compiled program. Pool entries of refused drafts lie behind the row's length, where no query
looks, until they are written again. A round is one program and one transfer to the host, whatever it accepts.

Each place of a draft comes with a confidence, a logit of being accepted; drafts count up to the place where the probability
that all so far are kept falls below a threshold, and the program for the shortest block that holds them runs.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np

from csa2_jax.bound import Bound
from csa2_jax.config import ModelConfig
from csa2_jax.dspark import DraftFeed
from csa2_jax.numerics import Numerics
from csa2_jax.sampling import Rules, accept_drafts, draw, log_distribution
from csa2_jax.state import Cache
from csa2_jax.structure import Structure

THRESHOLD: Final = 0.3  # of the probability that a draft and all before it are kept


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Pending:
    """What the next round starts from: a token that is known but not consumed, and what is drafted behind it."""

    token_B: jax.Array
    index_B: jax.Array  # which token of the answer comes behind it
    draft_BT: jax.Array  # T = drafts per block
    logits_BTV: jax.Array  # they were drawn from
    hopeful_B: jax.Array  # how many are worth verifying


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Round:
    """What a round made: `kept_B` drafts and one token more per row, of tokens [B, T + 1] and their log-probabilities."""

    token_BT: jax.Array
    logprob_BT: jax.Array
    kept_B: jax.Array
    tried_B: jax.Array


def widths(config: ModelConfig) -> tuple[int, ...]:
    """Tokens that a round may verify: each is a program of its own."""
    block = config.dspark_block_size
    return tuple(sorted({1, (block + 2) // 2, block + 1}))


def requested(speculative: bool | float) -> tuple[bool, float]:
    """(whether to draft, the confidence that drafts need) of an argument that is True, False or that confidence."""
    if isinstance(speculative, bool | np.bool_):
        return bool(speculative), THRESHOLD
    if not isinstance(speculative, int | float) or not 0 <= speculative <= 1:
        raise ValueError(f"{speculative=} must be True, False or a confidence from 0 to 1")
    return True, float(speculative)


def begin(
    bound: Bound, cache: Cache, token_B: Any, index_B: Any, rules: Rules, banned: int | None, threshold: float
) -> Pending:
    """Draft behind `token_B`, known but not consumed; `index_B`: which token of the answer the first draft would be."""
    assert bound.draft is not None
    return _jit_begin(
        *(bound.draft[0], bound.config, bound.numerics, banned),
        *(
            bound.draft[1],
            *bound.vocabulary,
            cache.draft_window_LBWH,
            cache.length_B,
            token_B,
            index_B,
            rules,
            threshold,
        ),
    )


def advance(
    bound: Bound,
    cache: Cache,
    pending: Pending,
    rules: Rules,
    limit_B: np.ndarray,
    *,
    width: int,
    banned: int | None,
    threshold: float,
) -> tuple[Cache, Pending, Round]:
    """One round. limit_B: how many tokens a row may consume, 0 for rows that take no part; the cache is consumed."""
    assert bound.draft is not None
    return _jit_advance(
        *(bound.structure, bound.draft[0], bound.state, bound.draft[1]),
        *(cache, pending, rules, limit_B, threshold),
        width=width,
        banned=banned,
    )


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3))
def _jit_begin(
    structure: Structure,
    config: ModelConfig,
    numerics: Numerics,
    banned: int | None,
    state: Any,
    embed_VD: jax.Array,
    head_VD: jax.Array,
    window_LBWH: Any,
    length_B: jax.Array,
    token_B: jax.Array,
    index_B: jax.Array,
    rules: Rules,
    threshold: jax.Array,
) -> Pending:
    head = structure.merge(state)
    arrays = (window_LBWH, length_B, embed_VD, head_VD)
    return _draft(head, config, numerics, token_B, index_B, rules, banned, threshold, *arrays)


@functools.partial(
    jax.jit,
    static_argnames=("structure", "draft_structure", "width", "banned"),
    donate_argnames=("cache",),
)
def _jit_advance(
    structure: Structure,
    draft_structure: Structure,
    state: Any,
    draft_state: Any,
    cache: Cache,
    pending: Pending,
    rules: Rules,
    limit_B: jax.Array,
    threshold: jax.Array,
    *,
    width: int,
    banned: int | None,
) -> tuple[Cache, Pending, Round]:
    model = structure.merge(state)
    head = draft_structure.merge(draft_state)
    config, numerics = model.config, model.numerics
    draft_BT = pending.draft_BT[:, : width - 1]
    tokens_BT = jnp.concatenate([pending.token_B[:, None], draft_BT], axis=1)
    drafts_B = jnp.clip(jnp.minimum(pending.hopeful_B, limit_B - 1), 0, width - 1)
    live_B = limit_B > 0
    index_B = pending.index_B

    def accept(logits_BTV: jax.Array) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        logits_BTV = without(logits_BTV, banned)
        log_p_BTV = log_distribution(logits_BTV, rules)
        log_q_BTV = log_distribution(pending.logits_BTV[:, : width - 1], rules) if width > 1 else log_p_BTV[:, :0]
        kept_B, next_B = accept_drafts(log_p_BTV, draft_BT, log_q_BTV, drafts_B, rules, index_B)
        place_BT = jnp.arange(width)[None]
        made_BT = jnp.where(place_BT == kept_B[:, None], next_B[:, None], jnp.pad(draft_BT, ((0, 0), (0, 1))))
        logprob_BT = jnp.take_along_axis(jax.nn.log_softmax(logits_BTV), made_BT[..., None], axis=-1)[..., 0]
        return jnp.where(live_B, kept_B + 1, 0), (made_BT, logprob_BT, kept_B, next_B)

    count_B = jnp.where(live_B, drafts_B + 1, 0)
    out, cache = model(tokens_BT, cache, count_B, feed=DraftFeed(head), accept=accept)
    made_BT, logprob_BT, kept_B, next_B = out.captured["accepted"]
    token_B = jnp.where(live_B, next_B, pending.token_B)
    index_B = index_B + jnp.where(live_B, kept_B + 1, 0)
    arrays = (cache.draft_window_LBWH, cache.length_B, model.embed["weight"][...], model.head["weight"][...])
    pending = _draft(head, config, numerics, token_B, index_B, rules, banned, threshold, *arrays)
    return cache, pending, Round(made_BT, logprob_BT, kept_B, jnp.where(live_B, drafts_B, 0))


def _draft(
    head: Any,
    config: ModelConfig,
    numerics: Numerics,
    token_B: jax.Array,
    index_B: jax.Array,
    rules: Rules,
    banned: int | None,
    threshold: jax.Array,
    window_LBWH: Any,
    length_B: jax.Array,
    embed_VD: jax.Array,
    head_VD: jax.Array,
) -> Pending:
    def choose(logits_BV: jax.Array, place: jax.Array) -> jax.Array:
        log_q_BTV = log_distribution(without(logits_BV, banned)[:, None], rules)
        return draw(log_q_BTV, rules, (index_B + place)[:, None], drafting=True)[:, 0]

    made = head(token_B, window_LBWH, length_B, embed_VD, head_VD, config, numerics, choose)
    hope_BT = jnp.cumprod(jax.nn.sigmoid(made.confidence), axis=1)
    hopeful_B = jnp.sum(jnp.cumprod((hope_BT >= threshold).astype(jnp.int32), axis=1), axis=1)
    return Pending(token_B.astype(jnp.int32), index_B, made.ids[:, 1:], without(made.logits, banned), hopeful_B)


def without(logits: jax.Array, banned: int | None) -> jax.Array:
    """Logits [..., V] that never give the banned token."""
    return logits if banned is None else logits.at[..., banned].set(-jnp.inf)


class Acceptance:
    """Counts over a run: how often the draft at each place of a block was tried and kept."""

    def __init__(self, places: int) -> None:
        self.tried, self.kept, self.rounds, self.tokens = np.zeros(places, int), np.zeros(places, int), 0, 0

    def add(self, tried: int, kept: int) -> None:
        """One row of one round."""
        self.tried[: min(kept + 1, tried)] += 1  # places behind a refusal were not judged
        self.kept[:kept] += 1
        self.rounds += 1
        self.tokens += kept + 1

    @property
    def by_place(self) -> np.ndarray:
        """Share of judged drafts that were kept, by place; NaN where none was judged."""
        return np.divide(self.kept, self.tried, out=np.full(len(self.tried), np.nan), where=self.tried > 0)

    @property
    def tokens_per_round(self) -> float:
        """Tokens that a forward gave on average."""
        return self.tokens / self.rounds if self.rounds else float("nan")
