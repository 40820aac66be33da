"""Text generation: prefill in bucketed chunks, then one token at a time; greedy or sampled, streamed as events.

Sampling at temperature T is argmax(logits / T + Gumbel noise), which draws from softmax(logits / T). Speculative decoding comes
with the engine; `draft` is the draft head's forward.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from csa2_jax.calls import check_call, check_room, whole_numbers
from csa2_jax.config import ModelConfig
from csa2_jax.dspark import Draft
from csa2_jax.model import Bound, Model, Structure, forward
from csa2_jax.numerics import Numerics
from csa2_jax.state import Cache, Storage, init_cache, positive
from kernels_pallas import Unsupported

_COLDEST = 1e-4  # logits divided by less leave f32


@dataclasses.dataclass(frozen=True)
class TokenEvent:
    """One generated token of one prompt."""

    row: int  # which prompt
    index: int  # 0 is the first generated token
    token: int
    logprob: float  # of the token under softmax(logits), whatever the temperature (image placeholders excluded)
    finished: Literal["eos", "length"] | None = None  # set on a row's last event


def draft(model: Model | Bound, tokens_B: Any, cache: Cache) -> Draft:
    """Draft the tokens behind `tokens_B`, the ids just sampled for the position after each row's consumed tokens.

    The cache must have been made with draft=True and is not consumed. Raises ValueError without draft windows, for ids outside
    the vocabulary, and for rows that have consumed nothing yet. In loops pass a `Bound`.
    """
    bound = model if isinstance(model, Bound) else Bound.of(model)
    ids = whole_numbers("tokens_B", tokens_B)
    check_room(cache, np.zeros(ids.shape[:1], np.int64))
    if bound.draft is None or cache.draft_window_LBWH is None:
        raise ValueError("drafting needs a model with a draft head and a cache from init_cache(..., draft=True)")
    if ids.shape != cache.length_B.shape or ((ids < 0) | (ids >= bound.config.vocab_size)).any():
        raise ValueError(
            f"tokens_B={ids.tolist()} must be one id in 0..{bound.config.vocab_size - 1} per row of the cache"
        )
    if (cache.lengths() < 1).any():
        raise ValueError("every row must have consumed at least one token before a draft")
    embed, head = (bound.state[name]["weight"].get_value() for name in ("embed", "head"))
    arrays = (ids.astype(np.int32), cache.draft_window_LBWH, cache.length_B, embed, head)
    return _jit_draft(bound.draft[0], bound.config, bound.numerics, bound.draft[1], *arrays)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _jit_draft(structure: Structure, config: ModelConfig, numerics: Numerics, state: Any, *arrays: jax.Array) -> Draft:
    return nnx.merge(structure.graphdef, state)(*arrays, config, numerics)


def prefill(
    model: Model | Bound,
    tokens_BT: Any,
    cache: Cache,
    lengths_B: Any = None,
    *,
    decoder: Literal["full"] = "full",
    chunk: int = 1024,
) -> tuple[Any, Cache]:
    """Append whole prompts in chunks; returns (output with the logits [B, V] of each row's last token, cache).

    decoder: "full" runs every layer on every token. The shorter routes through the decoder are not built yet.
    chunk: tokens per call; the last one is padded, so that one shape compiles. Rows of length 0 give unspecified logits.
    """
    if decoder not in ("full", "exact", "replay"):
        raise ValueError(f"{decoder=} must be 'full'")
    if decoder != "full":
        raise Unsupported(f"{decoder=} is not built yet; decoder='full' runs every layer on every token")
    chunk = positive("chunk", chunk)
    # The whole prompt is checked before the first chunk, so that a bad id in the last one costs nothing.
    tokens, lengths, _ = check_call(model.config, tokens_BT, cache, lengths_B)
    batch, width = tokens.shape
    size = min(chunk, _bucket(width))
    out = logits = None
    for start in range(0, width, size):
        piece = np.zeros((batch, size), np.int32)
        real = tokens[:, start : start + size]
        piece[:, : real.shape[1]] = real
        counts = np.clip(lengths - start, 0, size)
        out, cache = forward(model, piece, cache, counts, all_logits=False)
        ends_here = (counts > 0)[:, None]
        logits = out.logits if logits is None else jnp.where(ends_here, out.logits, logits)
    assert out is not None
    assert logits is not None
    return dataclasses.replace(out, logits=logits), cache


def generate(
    model: Model,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    temperature: float = 0.0,
    seed: int = 0,
    storage: Storage | None = None,
    chunk: int = 1024,
    stop_at_eos: bool = True,
    speculative: bool = False,
) -> Iterator[TokenEvent]:
    """Continue each prompt (token ids), all in one batch; yields an event per token as it is made.

    temperature 0 is greedy. Equal seeds give equal samples. A row ends at the end-of-sequence id (unless `stop_at_eos` is off)
    or after `max_new_tokens`. Raises ValueError before any work for empty prompts, ids outside the vocabulary, or lengths
    beyond max_position_embeddings; Unsupported for speculative decoding.
    """
    if speculative:
        raise Unsupported("speculative decoding is not built yet; pass speculative=False")
    tokens, lengths, needed = check_request(
        model.config, prompts, max_new_tokens=max_new_tokens, temperature=temperature, seed=seed, chunk=chunk
    )
    capacity = min(_bucket(needed, 128), model.config.max_position_embeddings)  # each length compiles anew
    cache = init_cache(model.config, len(tokens), capacity, storage)
    return _generate(model, tokens, lengths, cache, max_new_tokens, float(temperature), seed, chunk, stop_at_eos)


def check_request(
    config: ModelConfig,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    temperature: float,
    seed: int,
    chunk: int,
) -> tuple[np.ndarray, np.ndarray, int]:
    """Validate what `generate` is asked for; returns padded tokens [B, T], their lengths and the positions needed."""
    max_new_tokens, chunk = positive("max_new_tokens", max_new_tokens), positive("chunk", chunk)
    if not isinstance(temperature, int | float) or not (temperature == 0 or _COLDEST <= temperature < float("inf")):
        raise ValueError(f"{temperature=} must be 0 (greedy) or a number of at least {_COLDEST}")
    if isinstance(seed, bool) or not isinstance(seed, int) or not -(2**63) <= seed < 2**63:
        raise ValueError(f"{seed=} must be a whole number of 64 bits")
    rows = [whole_numbers(f"prompt {row}", prompt) for row, prompt in enumerate(prompts)]
    if not rows or any(row.ndim != 1 or row.size == 0 for row in rows):
        raise ValueError("prompts must be one or more lists of at least one token id each")
    lengths = np.array([row.size for row in rows])
    tokens = np.zeros((len(rows), lengths.max()), np.int64)
    for padded, row in zip(tokens, rows, strict=True):
        padded[: row.size] = row
    # The last token is never fed back, so it needs no place.
    needed, longest = int(lengths.max()) + max_new_tokens - 1, config.max_position_embeddings
    if needed > longest:
        raise ValueError(f"{needed} tokens with {max_new_tokens=} exceed max_position_embeddings={longest}")
    check_call(config, tokens, None, lengths)
    return tokens, lengths, needed


def _generate(
    model: Model,
    tokens: np.ndarray,
    lengths: np.ndarray,
    cache: Cache,
    max_new_tokens: int,
    temperature: float,
    seed: int,
    chunk: int,
    stop_at_eos: bool,
) -> Iterator[TokenEvent]:
    batch, config = len(tokens), model.config
    banned = config.image_token_id if config.has_vision else None  # a placeholder, not text
    bound = Bound.of(model)
    out, cache = prefill(bound, tokens, cache, lengths, chunk=chunk)
    keys = jax.random.split(jax.random.key(seed), batch)
    live = np.ones(batch, bool)
    for index in range(max_new_tokens):
        drawn, logprob = _sample(out.logits, keys, index, temperature, temperature == 0, banned)
        drawn_host, logprob_host = np.asarray(drawn), np.asarray(logprob)
        for row in np.flatnonzero(live):
            ended = stop_at_eos and drawn_host[row] == config.eos_token_id
            finished = "eos" if ended else "length" if index == max_new_tokens - 1 else None
            live[row] = finished is None
            yield TokenEvent(int(row), index, int(drawn_host[row]), float(logprob_host[row]), finished)
        if not live.any():
            return
        out, cache = forward(bound, drawn_host[:, None], cache, live.astype(np.int32), all_logits=False)


@functools.partial(jax.jit, static_argnames=("greedy", "banned"))
def _sample(
    logits_BV: jax.Array, keys: jax.Array, index: int, temperature: float, greedy: bool, banned: int | None
) -> tuple[jax.Array, jax.Array]:
    """One id per row and its log-probability. Row and index make the noise, so a row's draws do not depend on the batch."""
    if banned is not None:
        logits_BV = logits_BV.at[:, banned].set(-jnp.inf)
    if greedy:
        ids = jnp.argmax(logits_BV, axis=-1)
    else:
        noise = jax.vmap(lambda key, row: jax.random.gumbel(jax.random.fold_in(key, index), row.shape))(keys, logits_BV)
        ids = jnp.argmax(logits_BV / temperature + noise, axis=-1)
    logprob = jnp.take_along_axis(jax.nn.log_softmax(logits_BV), ids[:, None], axis=-1)[:, 0]
    return ids.astype(jnp.int32), logprob


def _bucket(width: int, smallest: int = 16) -> int:
    """The next power of two from `smallest` up: prompts of many lengths share a few compiled shapes."""
    size = smallest
    while size < width:
        size *= 2
    return size
