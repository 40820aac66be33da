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

from csa2_jax.dspark import Draft
from csa2_jax.model import Bound, Model, forward
from csa2_jax.state import Cache, Storage, init_cache
from kernels_pallas import Unsupported


@dataclasses.dataclass(frozen=True)
class TokenEvent:
    """One generated token of one prompt."""

    row: int  # which prompt
    index: int  # 0 is the first generated token
    token: int
    logprob: float  # of the token under softmax(logits), whatever the temperature
    finished: Literal["eos", "length"] | None = None  # set on a row's last event


def draft(model: Model, tokens_B: Any, cache: Cache) -> Draft:
    """Draft the tokens behind `tokens_B`, the ids just sampled for the position after each row's consumed tokens.

    The cache must have been made with draft=True and is not consumed. Raises ValueError without draft windows, for ids outside
    the vocabulary, and for rows that have consumed nothing yet.
    """
    if model.draft is None or cache.draft_window_LBWH is None:
        raise ValueError("drafting needs a model with a draft head and a cache from init_cache(..., draft=True)")
    ids = np.asarray(tokens_B)
    if ids.shape != cache.length_B.shape or ((ids < 0) | (ids >= model.config.vocab_size)).any():
        raise ValueError(
            f"tokens_B={ids.tolist()} must be one id in 0..{model.config.vocab_size - 1} per row of the cache"
        )
    if (cache.lengths() < 1).any():
        raise ValueError("every row must have consumed at least one token before a draft")
    graphdef, state = nnx.split(model)
    return _jit_draft(graphdef, state, ids.astype(np.int32), cache.draft_window_LBWH, cache.length_B)


@functools.partial(jax.jit, static_argnums=0)
def _jit_draft(graphdef: Any, state: Any, ids: jax.Array, window: jax.Array, length_B: jax.Array) -> Draft:
    model = nnx.merge(graphdef, state)
    embed, head = model.embed["weight"][...], model.head["weight"][...]
    return model.draft(ids, window, length_B, embed, head, model.config, model.numerics)


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
    if decoder != "full":
        raise Unsupported(f"{decoder=} is not built yet; decoder='full' runs every layer on every token")
    if chunk < 1:
        raise ValueError(f"{chunk=} must be at least 1")
    tokens = np.asarray(tokens_BT)
    if tokens.ndim != 2:
        raise ValueError(f"tokens must be [B, T], found shape {tokens.shape}")
    batch, width = tokens.shape
    lengths = np.full(batch, width) if lengths_B is None else np.asarray(lengths_B)
    if lengths.shape != (batch,) or (lengths < 0).any() or (lengths > width).any():
        raise ValueError(f"lengths_B={lengths.tolist()} must be {batch} numbers in 0..{width}")
    if (cache.lengths() + lengths > cache.max_length).any():
        raise ValueError(
            f"prompts of {lengths.tolist()} tokens do not fit max_length={cache.max_length} with {cache.lengths().tolist()} held"
        )
    size = min(chunk, _bucket(width))
    out = logits = None
    for start in range(0, max(width, 1), size):
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
    if max_new_tokens < 1:
        raise ValueError(f"{max_new_tokens=} must be at least 1")
    if not (np.isfinite(temperature) and temperature >= 0):
        raise ValueError(f"{temperature=} must be 0 (greedy) or a positive number")
    if not prompts or any(len(p) == 0 for p in prompts):
        raise ValueError("every prompt needs at least one token")
    return _generate(model, prompts, max_new_tokens, float(temperature), seed, storage, chunk, stop_at_eos)


def _generate(
    model: Model,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    temperature: float,
    seed: int,
    storage: Storage | None,
    chunk: int,
    stop_at_eos: bool,
) -> Iterator[TokenEvent]:
    batch, lengths = len(prompts), np.array([len(p) for p in prompts])
    tokens = np.zeros((batch, lengths.max()), np.int64)
    for row, prompt in enumerate(prompts):
        tokens[row, : len(prompt)] = prompt
    # The last token is never fed back, so it needs no place. Lengths go in buckets: each one compiles anew.
    needed, longest = int(lengths.max()) + max_new_tokens - 1, model.config.max_position_embeddings
    if needed > longest:
        raise ValueError(f"{needed} tokens with {max_new_tokens=} exceed max_position_embeddings={longest}")
    cache = init_cache(model.config, batch, min(_bucket(needed, 128), longest), storage)
    bound = Bound.of(model)
    out, cache = prefill(bound, tokens, cache, lengths, chunk=chunk)
    keys = jax.random.split(jax.random.key(seed), batch)
    live = np.ones(batch, bool)
    for index in range(max_new_tokens):
        drawn, logprob = _sample(out.logits, keys, index, temperature)
        drawn_host, logprob_host = np.asarray(drawn), np.asarray(logprob)
        for row in np.flatnonzero(live):
            ended = stop_at_eos and drawn_host[row] == model.config.eos_token_id
            finished = "eos" if ended else "length" if index == max_new_tokens - 1 else None
            live[row] = finished is None
            yield TokenEvent(int(row), index, int(drawn_host[row]), float(logprob_host[row]), finished)
        if not live.any():
            return
        out, cache = forward(bound, drawn_host[:, None], cache, live.astype(np.int32), all_logits=False)


@functools.partial(jax.jit, static_argnames="temperature")
def _sample(logits_BV: jax.Array, keys: jax.Array, index: int, temperature: float) -> tuple[jax.Array, jax.Array]:
    """One id per row and its log-probability. Row and index make the noise, so a row's draws do not depend on the batch."""
    if temperature == 0:
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
