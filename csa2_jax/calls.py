"""What a call may look like: checked on the host before anything starts, so that nothing is consumed by a call that cannot be."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax
import jax.core
import numpy as np

from csa2_jax.config import ModelConfig
from csa2_jax.state import Cache
from kernels_pallas import Unsupported
from kernels_pallas.storage import Packed

CAPTURES = frozenset(
    {
        *("attn_in", "attn_q", "attn_lse", "attn_o", "attn_out", "window_kv", "window_lse", "latent"),
        *("selections", "candidates", "index_scores", "index_q", "index_w"),
        *("ffn_in", "ffn_out", "gate_idx", "gate_w", "gate_score", "hidden", "pre_mix", "main_hidden", "engram_rows"),
    }
)


def check_call(
    config: ModelConfig, tokens_BT: Any, cache: Cache | None, lengths_B: Any = None, capture: Iterable[str] = ()
) -> tuple[np.ndarray, np.ndarray, frozenset[str]]:
    """Validate a call; returns tokens int32 [B, T] (0 behind each row's real ones), lengths int32 [B] and capture names."""
    tokens = whole_numbers("tokens", tokens_BT)
    if tokens.ndim != 2 or 0 in tokens.shape:
        raise ValueError(f"tokens must be [B, T] with at least one row and one token, found shape {tokens.shape}")
    batch, width = tokens.shape
    lengths = np.full(batch, width) if lengths_B is None else whole_numbers("lengths_B", lengths_B).astype(np.int64)
    if lengths.shape != (batch,):
        raise ValueError(f"lengths_B must be {batch} integers, one per row, found shape {lengths.shape}")
    if (lengths < 0).any() or (lengths > width).any():
        raise ValueError(f"lengths_B={lengths.tolist()} must lie in 0..{width}, the number of tokens in each row")
    real = np.arange(width) < lengths[:, None]
    outside = real & ((tokens < 0) | (tokens >= config.vocab_size))
    if outside.any():
        b, t = np.argwhere(outside)[0]
        raise ValueError(
            f"token id {tokens[b, t]} at row {b}, position {t} of the call is outside 0..{config.vocab_size - 1}"
        )
    if config.has_vision and (real & (tokens == config.image_token_id)).any():
        b, t = np.argwhere(real & (tokens == config.image_token_id))[0]
        raise Unsupported(
            f"row {b}, position {t} of the call is an image token ({config.image_token_id}): the image tower is not built yet"
        )
    names = frozenset((capture,) if isinstance(capture, str) else capture)
    if unknown := sorted(names - CAPTURES):
        raise ValueError(f"capture={unknown} is unknown; choose from {sorted(CAPTURES)}")
    if "main_hidden" in names and not config.dspark_target_layer_ids:
        raise ValueError("capture=('main_hidden',) needs a model with dspark_target_layer_ids")
    if cache is None:
        if width > config.max_position_embeddings:
            raise ValueError(f"{width} tokens exceed max_position_embeddings={config.max_position_embeddings}")
    else:
        check_room(cache, lengths)
    return np.where(real, tokens, 0).astype(np.int32), lengths.astype(np.int32), names


def document_origins(config: ModelConfig, documents_BT: Any, shape: tuple[int, ...]) -> np.ndarray:
    """Where in its row each token's document begins, int32 [B, T]; padding (-1) counts on from the document before it.

    Raises ValueError for ids of another shape, a document that is interrupted, or one that starts between whole groups.
    """
    ids = whole_numbers("documents_BT", documents_BT)
    if ids.shape != shape:
        raise ValueError(f"documents_BT has shape {ids.shape} and must have that of the tokens, {shape}")
    align = config.document_alignment
    column = np.arange(shape[1])
    begins = ids >= 0
    begins[:, 1:] &= ids[:, 1:] != ids[:, :-1]
    begins[:, 0] = True
    if (begins & (column % align != 0)).any():
        b, t = np.argwhere(begins & (column % align != 0))[0]
        raise ValueError(
            f"document {ids[b, t]} begins at row {b}, token {t}, which is no multiple of {align}: pad the one before it with -1, "
            "so that no group of tokens and no block of candidates belongs to two documents"
        )
    for b, row in enumerate(ids):
        named = row[begins[b] & (row >= 0)]
        if len(np.unique(named)) != len(named):
            again = next(i for i in named if (named == i).sum() > 1)
            raise ValueError(f"document {again} of row {b} is interrupted by another: its tokens must lie together")
    return np.maximum.accumulate(np.where(begins, column, 0), axis=1).astype(np.int32)


def check_room(cache: Cache, lengths: np.ndarray) -> None:
    """Refuse a cache that is not one, was consumed, holds another number of rows, or would overrun."""
    if not isinstance(cache, Cache):
        raise ValueError(f"cache must come from init_cache, found {type(cache).__name__}")
    if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(cache)):
        raise ValueError(
            "the cache is traced, but calls are checked on the host: inside your own jit call the model itself, "
            "model(tokens, cache, lengths)"
        )
    if any(leaf.is_deleted() for leaf in jax.tree.leaves(cache) if isinstance(leaf, jax.Array)):
        raise ValueError("this cache was consumed by an earlier call; continue with the cache that call returned")
    if cache.length_B.shape != lengths.shape:
        raise ValueError(f"the cache holds {cache.length_B.shape[0]} rows, the tokens have {len(lengths)}")
    held = cache.lengths()
    after = held + lengths
    if (after > cache.max_length).any():
        b = int(np.argmax(after))
        raise ValueError(
            f"row {b} holds {held[b]} tokens and would get {lengths[b]} more: {after[b]} exceeds "
            f"max_length={cache.max_length}; make the cache longer with init_cache"
        )


def check_storage(fake_quant: bool, cache: Cache) -> None:
    """Refuse a packed cache for a model without roundings: it would round what the model does not."""
    if isinstance(cache.window_LBWH, Packed) and not fake_quant:
        raise ValueError(
            "storage='packed' keeps rounded numbers, but this model runs with fake_quant=False; use storage='f32' or 'bf16', or "
            "load the model with its roundings"
        )


def whole_numbers(name: str, values: Any) -> np.ndarray:
    """`values` as an integer array on the host; ValueError for anything else, or for a traced array."""
    if isinstance(values, jax.core.Tracer):
        raise ValueError(
            f"{name} is traced, but calls are checked on the host: inside your own jit call the model itself, "
            "model(tokens, cache, lengths)"
        )
    try:
        array = np.asarray(values)
    except ValueError:
        raise ValueError(f"{name} must be rectangular: pad its rows and say in lengths_B how much is real") from None
    if array.size == 0:  # NumPy makes floats of an empty list
        array = array.astype(np.int64)
    if array.dtype.kind not in "iu":
        raise ValueError(f"{name} must be integers, found {array.dtype}")
    return array
