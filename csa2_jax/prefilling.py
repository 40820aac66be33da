"""Whole prompts into a cache, chunk by chunk, with as much of the decoder as the answer needs.

The decoder's pool is made from H_20, which the encoder gives, so a prompt token leaves everything that later tokens read from the
pool without passing the decoder's layers. Only the decoder's windows reach back: layer d + i reads the last W rows of itself, and
those were made from rows that read W more below, so that

    exact     the decoder runs on the last D W tokens (D decoder layers); what it does not see cannot reach the last W rows
    replay    on the last W tokens; their windows begin with them, an approximation that serving uses
    full      on every token

Memory is that of one chunk. Source: arXiv 2609.19969 (causal encoder-decoder, bounded replay).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Final, Literal, get_args

import jax.numpy as jnp
import numpy as np

from csa2_jax.bound import Bound, forward, forward_encoder
from csa2_jax.calls import check_call, check_storage
from csa2_jax.config import ModelConfig
from csa2_jax.model import Model
from csa2_jax.state import Cache, positive

Route = Literal["exact", "replay", "full"]
SMALLEST_PIECE: Final = 128  # of a skipped part that fills no whole chunk


def prefill(
    model: Model | Bound,
    tokens_BT: Any,
    cache: Cache,
    lengths_B: Any = None,
    *,
    decoder: Route = "exact",
    chunk: int = 1024,
    on_progress: Callable[[int, int], None] | None = None,
) -> tuple[Any, Cache]:
    """Append whole prompts in chunks; returns (output with the logits [B, V] of each row's last token, cache).

    Args:
        tokens_BT, lengths_B, cache: as `forward` takes them; rows may be of different lengths. Rows of length 0 give
            unspecified logits. The cache passed in is consumed.
        decoder: "exact" skips the decoder where nothing that follows can tell, "replay" runs it on the last W tokens alone, which
            changes the result a little (`benchmarks/inference.py` measures how much), "full" runs every layer on every token.
        chunk: tokens per call; parts that fill no chunk are padded, so that few shapes compile.
        on_progress: called with (tokens done, tokens in all) after each chunk, counted over all rows.

    Raises ValueError as `forward` does, before the first chunk.
    """
    if decoder not in get_args(Route):
        raise ValueError(f"{decoder=} must be one of {get_args(Route)}")
    chunk = positive("chunk", chunk)
    # The whole prompt is checked before the first chunk, so that a bad id in the last one costs nothing.
    tokens, lengths, _ = check_call(model.config, tokens_BT, cache, lengths_B)
    bound = model if isinstance(model, Bound) else Bound.of(model)
    check_storage(bound.numerics.fake_quant, cache)
    skipped = skipped_tokens(model.config, lengths, decoder, chunk)
    done, total = 0, int(lengths.sum())
    out = logits = None
    for start, size in pieces(int(skipped.max()), chunk):
        piece, counts = _cut(tokens, np.full(len(tokens), start), skipped, size)
        cache = forward_encoder(bound, piece, cache, counts)
        bound.prefetch(tokens, start + size, start + 2 * size)
        done += int(counts.sum())
        if on_progress is not None:
            on_progress(done, total)
    size = min(chunk, bucket(int((lengths - skipped).max())))
    for start in range(0, max(int((lengths - skipped).max()), 1), size):
        piece, counts = _cut(tokens, skipped + start, lengths, size)
        out, cache = forward(bound, piece, cache, counts, all_logits=False)
        bound.prefetch(tokens, int(skipped.max()) + start + size, int(skipped.max()) + start + 2 * size)
        ends_here = (counts > 0)[:, None]
        logits = out.logits if logits is None else jnp.where(ends_here, out.logits, logits)
        done += int(counts.sum())
        if on_progress is not None:
            on_progress(done, total)
    assert out is not None
    assert logits is not None
    return dataclasses.replace(out, logits=logits), cache


def skipped_tokens(config: ModelConfig, lengths: np.ndarray, decoder: Route, chunk: int) -> np.ndarray:
    """How many of each row's new tokens pass the encoder alone, int [B]."""
    layers = config.num_hidden_layers - config.plan.decoder_start
    if decoder == "full" or layers == 0:
        return np.zeros_like(lengths)
    tail = config.sliding_window
    if decoder == "exact":
        tail *= layers
        tail = -(-tail // chunk) * chunk  # whole chunks cost what padded ones do
    return np.maximum(lengths - tail, 0)


def pieces(total: int, chunk: int) -> list[tuple[int, int]]:
    """(start, padded size) of the calls that take `total` skipped tokens: whole chunks, then a power of two."""
    found = [(start, chunk) for start in range(0, total - chunk + 1, chunk)]
    start = total // chunk * chunk
    if total > start:
        found.append((start, min(chunk, bucket(total - start, SMALLEST_PIECE))))
    return found


def bucket(width: int, smallest: int = 16) -> int:
    """The next power of two from `smallest` up: prompts of many lengths share a few compiled shapes."""
    size = smallest
    while size < width:
        size *= 2
    return size


def _cut(tokens: np.ndarray, start_B: np.ndarray, end_B: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Each row's tokens from `start` up to `end`, at most `size` of them: padded tokens [B, size], counts int32 [B]."""
    counts = np.clip(end_B - start_B, 0, size).astype(np.int32)
    index = (start_B[:, None] + np.arange(size)).clip(0, tokens.shape[1] - 1)
    piece = np.take_along_axis(tokens, index, axis=1)
    return np.where(np.arange(size) < counts[:, None], piece, 0).astype(np.int32), counts
