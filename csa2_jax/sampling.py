"""From logits to the next token: temperature, top-k, top-p, greedy; and the accept rule of speculative decoding.

    p = softmax(logits / T) restricted to the k likeliest tokens and to the smallest set of them that holds a mass of top_p
    token = argmax(log p + Gumbel noise),  which draws from p;   T = 0 is argmax of the logits

Accepting drafts: a draft d drawn from q is kept with probability min(1, p(d) / q(d)); at the first refusal the token comes from
max(p - q, 0), normalised, and behind the last draft from p. What is emitted then has the distribution p, whatever q is. With
T = 0 both are one-hot, and the rule keeps drafts as long as they are the argmax. Source: arXiv 2211.17192.

Noise comes from a row's own seed and the index of the token in its answer, so that nothing a row draws depends on its batch.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np

COLDEST: Final = 1e-4  # logits divided by less leave f32
_TOKEN, _DRAFT, _ACCEPT = range(3)  # independent draws for one index


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How one answer is drawn.

    temperature: 0 is greedy. top_k: only the k likeliest tokens, 0 for all. top_p: only the likeliest tokens that together have
    this mass. seed: equal seeds give equal answers. Ties at the border of top_k or top_p stay in.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        number = isinstance(self.temperature, int | float) and not isinstance(self.temperature, bool)
        if not number or not (self.temperature == 0 or COLDEST <= self.temperature < math.inf):
            raise ValueError(f"temperature={self.temperature!r} must be 0 (greedy) or a number of at least {COLDEST}")
        if isinstance(self.top_k, bool) or not isinstance(self.top_k, int | np.integer) or not 0 <= self.top_k < 2**31:
            raise ValueError(f"top_k={self.top_k!r} must be a whole number, 0 for no limit")
        if isinstance(self.top_p, bool) or not isinstance(self.top_p, int | float) or not 0 < self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p!r} must be a number above 0, at most 1 (no limit)")
        whole = isinstance(self.seed, int | np.integer) and not isinstance(self.seed, bool)
        if not whole or not -(2**63) <= self.seed < 2**63:
            raise ValueError(f"seed={self.seed!r} must be a whole number of 64 bits")
        object.__setattr__(self, "seed", int(self.seed))  # NumPy's integers overflow where Python's do not
        object.__setattr__(self, "top_k", int(self.top_k))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Rules:
    """`Sampling` of every row of a batch, as arrays."""

    temperature_B: Any
    top_k_B: Any
    top_p_B: Any
    seed_B2: Any  # uint32, low and high half

    @classmethod
    def of(cls, rows: Sequence[Sampling]) -> Rules:
        """On the host."""
        seeds = np.array([s.seed % 2**64 for s in rows], np.uint64)
        return cls(
            np.array([s.temperature for s in rows], np.float32),
            np.array([s.top_k for s in rows], np.int32),
            np.array([s.top_p for s in rows], np.float32),
            np.stack([seeds & np.uint64(0xFFFFFFFF), seeds >> np.uint64(32)], axis=-1).astype(np.uint32),
        )


def log_distribution(logits_BTV: jax.Array, rules: Rules) -> jax.Array:
    """log p, f32 [B, T, V]; -inf where a token cannot come."""
    temperature = rules.temperature_B[:, None, None]
    greedy = temperature == 0
    scaled = logits_BTV / jnp.where(greedy, 1.0, temperature)
    limited = jnp.any((rules.top_k_B > 0) | (rules.top_p_B < 1))
    scaled = jax.lax.cond(limited, lambda x: _limit(x, rules), lambda x: x, scaled)  # sorting a vocabulary is dear
    best = jnp.arange(logits_BTV.shape[-1]) == jnp.argmax(logits_BTV, axis=-1, keepdims=True)
    return jnp.where(greedy, jnp.where(best, 0.0, -jnp.inf), jax.nn.log_softmax(scaled, axis=-1))


def _limit(scaled_BTV: jax.Array, rules: Rules) -> jax.Array:
    """-inf below the k-th largest, and below the last one needed for a mass of top_p among those."""
    vocabulary = scaled_BTV.shape[-1]
    down = -jnp.sort(-scaled_BTV, axis=-1)
    k = jnp.where(rules.top_k_B > 0, jnp.minimum(rules.top_k_B, vocabulary), vocabulary)[:, None, None]
    kept = jnp.arange(vocabulary) < k
    mass = jnp.cumsum(jax.nn.softmax(jnp.where(kept, down, -jnp.inf), axis=-1), axis=-1)
    before = jnp.pad(mass, ((0, 0), (0, 0), (1, 0)))[..., :-1]
    kept &= (before < rules.top_p_B[:, None, None]) | (rules.top_p_B[:, None, None] >= 1)
    floor = jnp.min(jnp.where(kept, down, jnp.inf), axis=-1, keepdims=True)
    return jnp.where(scaled_BTV >= floor, scaled_BTV, -jnp.inf)


def draw(log_p_BTV: jax.Array, rules: Rules, index_BT: jax.Array, *, drafting: bool = False) -> jax.Array:
    """A token id int32 [B, T] from each distribution; `index` counts the tokens of a row's answer."""
    keys = _keys(rules, index_BT, _DRAFT if drafting else _TOKEN)
    noise = jax.vmap(jax.vmap(lambda key, row: jax.random.gumbel(key, row.shape)))(keys, log_p_BTV)
    return jnp.argmax(log_p_BTV + noise, axis=-1).astype(jnp.int32)  # of a one-hot p whatever the noise


def accept_drafts(
    log_p_BTV: jax.Array,
    draft_BT: jax.Array,
    log_q_BTV: jax.Array,
    drafts_B: jax.Array,
    rules: Rules,
    index_B: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """(how many leading drafts each row keeps, int32 [B]; the token behind them, int32 [B]).

    Args:
        log_p_BTV: the model's distributions at T = drafts + 1 places, the first before any draft.
        draft_BT, log_q_BTV: T - 1 drafted tokens and the distributions they were drawn from.
        drafts_B: how many of a row's drafts count.
        index_B: which token of the answer the first draft would be.
    """
    drafts = draft_BT.shape[1]
    index_BT = index_B[:, None] + jnp.arange(drafts + 1)
    if drafts == 0:
        return jnp.zeros_like(drafts_B), draw(log_p_BTV, rules, index_BT)[:, 0]
    log_ratio = jnp.take_along_axis(log_p_BTV[:, :-1] - log_q_BTV, draft_BT[..., None], axis=-1)[..., 0]
    keys = _keys(rules, index_BT[:, :-1], _ACCEPT)
    uniform = jax.vmap(jax.vmap(jax.random.uniform))(keys)
    kept_BT = (jnp.log(uniform) < log_ratio) & (jnp.arange(drafts) < drafts_B[:, None])
    kept_B = jnp.sum(jnp.cumprod(kept_BT.astype(jnp.int32), axis=1), axis=1)
    # Only the distribution at the place behind the kept drafts is needed: p, less q where a draft was refused there.
    place = kept_B[:, None, None]
    log_p_BV = jnp.take_along_axis(log_p_BTV, place, axis=1)[:, 0]
    log_q_BV = jnp.take_along_axis(log_q_BTV, jnp.minimum(place, drafts - 1), axis=1)[:, 0]
    refused_B = kept_B < drafts_B
    rest_BV = jnp.maximum(jnp.exp(log_p_BV) - jnp.where(refused_B[:, None], jnp.exp(log_q_BV), 0.0), 0.0)
    # Where rounding leaves nothing of p - q, p is q up to rounding, and p itself will do.
    rest_BV = jnp.where(jnp.sum(rest_BV, axis=-1, keepdims=True) > 0, rest_BV, jnp.exp(log_p_BV))
    next_B = draw(jnp.log(rest_BV)[:, None], rules, (index_B + kept_B)[:, None])[:, 0]
    return kept_B, next_B


def _keys(rules: Rules, index_BT: jax.Array, purpose: int) -> jax.Array:
    """A key per row and index, and for each purpose another."""

    def key(seed_2: jax.Array, index: jax.Array) -> jax.Array:
        base = jax.random.fold_in(jax.random.key(seed_2[0]), seed_2[1])
        return jax.random.fold_in(jax.random.fold_in(base, index), purpose)

    return jax.vmap(lambda seed_2, row: jax.vmap(lambda i: key(seed_2, i))(row))(rules.seed_B2, index_BT)
