"""Text generation for a fixed batch of prompts: prefill, then step by step, streamed as events.

`draft` is the draft head's forward by itself. Many users at once, with requests that come and go, are served by `engine`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import jax
import numpy as np

from csa2_jax import speculative as drafting
from csa2_jax.bound import Bound
from csa2_jax.calls import check_call, check_room, whole_numbers
from csa2_jax.config import ModelConfig
from csa2_jax.decoding import Decoder
from csa2_jax.dspark import Draft
from csa2_jax.model import Model
from csa2_jax.numerics import Numerics
from csa2_jax.prefilling import Route, bucket, prefill
from csa2_jax.sampling import Sampling
from csa2_jax.state import Cache, Storage, init_cache, positive
from csa2_jax.structure import Structure
from kernels_pallas import Unsupported

_ROW_STRIDE = 0x9E3779B97F4A7C15  # seeds of neighbouring rows lie far apart


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
    arrays = (ids.astype(np.int32), cache.draft_window_LBWH, cache.length_B, *bound.vocabulary)
    return _jit_draft(bound.draft[0], bound.config, bound.numerics, bound.draft[1], *arrays)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _jit_draft(structure: Structure, config: ModelConfig, numerics: Numerics, state: Any, *arrays: jax.Array) -> Draft:
    return structure.merge(state)(*arrays, config, numerics)


def generate(
    model: Model | Bound,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int = 0,
    storage: Storage | None = None,
    decoder: Route = "exact",
    chunk: int = 1024,
    stop_at_eos: bool = True,
    speculative: bool | float = False,
) -> Iterator[TokenEvent]:
    """Continue each prompt (token ids), all in one batch; yields an event per token as it is made.

    Args:
        temperature, top_k, top_p, seed: see `Sampling`; temperature 0 is greedy. A row's samples depend on seed and row alone.
        decoder, chunk: of the prefill, see `prefill`.
        stop_at_eos: end a row at the end-of-sequence id, else after `max_new_tokens` only.
        speculative: draft with the model's draft head and verify: the same tokens if greedy, the same distribution if sampled, in
            fewer steps. A number is the confidence that drafts need (`speculative.THRESHOLD` by default).

    Raises ValueError before any work for empty prompts, ids outside the vocabulary, or lengths beyond max_position_embeddings;
    Unsupported for speculative decoding without a draft head.
    """
    sampling = Sampling(temperature, top_k, top_p, seed)
    tokens, lengths, needed = check_request(model.config, prompts, max_new_tokens=max_new_tokens, chunk=chunk)
    drafts, threshold = drafting.requested(speculative)
    if drafts and not model.config.num_nextn_predict_layers:
        raise Unsupported("speculative=True needs a draft head, but this model has num_nextn_predict_layers=0")
    capacity = min(bucket(needed, 128), model.config.max_position_embeddings)  # each length compiles anew
    cache = init_cache(model.config, len(tokens), capacity, storage, draft=drafts)
    bound = model if isinstance(model, Bound) else Bound.of(model)
    rows = [
        dataclasses.replace(sampling, seed=(sampling.seed + row * _ROW_STRIDE) % 2**64 - 2**63)
        for row in range(len(tokens))
    ]
    steps = Decoder(bound, cache, speculative=drafts, threshold=threshold)
    return _generate(steps, tokens, lengths, rows, max_new_tokens, decoder, chunk, stop_at_eos)


def check_request(
    config: ModelConfig, prompts: Sequence[Sequence[int]], *, max_new_tokens: int, chunk: int = 1
) -> tuple[np.ndarray, np.ndarray, int]:
    """Validate what is asked for; returns padded tokens [B, T], their lengths and the positions needed."""
    max_new_tokens, chunk = positive("max_new_tokens", max_new_tokens), positive("chunk", chunk)
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
    steps: Decoder,
    tokens: np.ndarray,
    lengths: np.ndarray,
    rows: list[Sampling],
    max_new_tokens: int,
    route: Route,
    chunk: int,
    stop_at_eos: bool,
) -> Iterator[TokenEvent]:
    batch, eos = len(tokens), steps.bound.config.eos_token_id if stop_at_eos else None
    out, steps.cache = prefill(steps.bound, tokens, steps.cache, lengths, decoder=route, chunk=chunk)
    ids, logprobs = steps.start(range(batch), rows, out.logits)
    made, found, counts = np.zeros(batch, int), (ids[:, None], logprobs[:, None]), np.ones(batch, int)
    live = np.ones(batch, bool)
    while True:
        for row in np.flatnonzero(live):
            for token, logprob in zip(found[0][row, : counts[row]], found[1][row], strict=False):
                index, made[row] = int(made[row]), made[row] + 1
                finished = "eos" if token == eos else "length" if made[row] == max_new_tokens else None
                live[row] = finished is None
                yield TokenEvent(int(row), index, int(token), float(logprob), finished)
                if finished:
                    break
        if not live.any():
            return
        step = steps.step(np.where(live, max_new_tokens - made, 0))
        found, counts = (step.tokens, step.logprobs), step.counts
