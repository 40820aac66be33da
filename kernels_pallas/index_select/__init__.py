"""Index selection: which K pool entries a query may read.

    score[t, p] = sum_i relu(q[t, i] . key[p]) * w[t, i]            p < visible[t], otherwise absent
    selection[t] = the K entries of highest score, lowest index first among equals, listed ascending, -1 behind them

With bf16 queries the dot product, its product with w, and the sum are each rounded to bf16, so ties are ordinary.
Candidates are blocks of `block_size` neighbouring entries, ranked by their best score with the block of the newest visible
entry forced in; a later search may be bounded to them. Nothing here has a gradient. Source: arXiv 2609.19969 (hierarchical
sparse indexer).
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kernels_pallas import checks, dispatch, storage
from kernels_pallas.index_select import pallas_gpu, pallas_tpu, xla
from kernels_pallas.storage import Entries

CHOICES = {"xla": xla, "pallas_tpu": pallas_tpu, "pallas_gpu": pallas_gpu}


def index_select(
    q_BTIJ: Float[Array, "B T I J"],
    w_BTI: Float[Array, "B T I"],
    keys_GBPJ: Entries,
    group: jax.Array | int,
    visible_BT: Int[Array, "B T"],
    *,
    topk: int,
    block_size: int = 0,
    make_candidates: int = 0,
    candidates_BTC: Int[Array, "B T C"] | None = None,
    first_BT: Int[Array, "B T"] | None = None,
    implementation: str | None = None,
    interpret: Any = False,
) -> tuple[Int[Array, "B T K"], Int[Array, "B T C"] | None]:
    """Select pool entries, optionally making or obeying candidate blocks.

    Args:
        q_BTIJ: index queries; their dtype (f32 or bf16) decides the rounding of the scores.
        w_BTI: signed head weights.
        keys_GBPJ: the stacked index keys, plain [G, B, P, J] or packed (`storage`); only `[group, b]` is read, in chunks, up to
            the last visible entry.
        group: which pool of the stack.
        visible_BT: int32, entries 0..visible-1 are visible to the query. Whatever lies behind them is never selected; a score of
            NaN among them has no defined place.
        first_BT: int32, the first entry that is visible, 0 by default; what lies before it is another document's. Of XLA alone.
        topk: K.
        block_size: entries per candidate block; needed with either candidate argument.
        make_candidates: C > 0 also returns that many candidate blocks.
        candidates_BTC: block ids, ascending and distinct, -1 padded; only their entries are scored and selected from.
        implementation, interpret: see `dispatch`; `interpret` runs a Pallas implementation on a CPU.

    Returns:
        selection_BTK int32 (width K always), and candidates_BTC int32 (ascending, -1 padded) or None.
    """
    q_BTIJ, w_BTI, keys_GBPJ, group, visible_BT = _checked(q_BTIJ, w_BTI, keys_GBPJ, group, visible_BT)
    topk, make_candidates = checks.whole("topk", topk, 1), checks.whole("make_candidates", make_candidates, 0)
    block_size = checks.whole("block_size", block_size, 1 if make_candidates or candidates_BTC is not None else 0)
    if candidates_BTC is not None:
        candidates_BTC = checks.integers("candidates_BTC", candidates_BTC)
    if candidates_BTC is not None and (candidates_BTC.ndim != 3 or candidates_BTC.shape[:2] != q_BTIJ.shape[:2]):
        raise ValueError(f"{candidates_BTC.shape=} must be [B, T, C] to match {q_BTIJ.shape=}")
    if make_candidates and candidates_BTC is not None:
        raise ValueError("one call either makes candidates or obeys them")
    q_BTIJ, w_BTI, keys_GBPJ = jax.lax.stop_gradient((q_BTIJ, w_BTI, keys_GBPJ))
    batch, tokens, entries = *visible_BT.shape, storage.shape(keys_GBPJ)[2]
    if 0 in (entries, batch, tokens):
        none = functools.partial(jnp.full, fill_value=-1, dtype=jnp.int32)
        return none((batch, tokens, topk)), none((batch, tokens, make_candidates)) if make_candidates else None
    arrays = (q_BTIJ, w_BTI, keys_GBPJ, group, visible_BT)
    static: dict[str, Any] = {"topk": topk, "block_size": block_size, "make_candidates": make_candidates}
    static["candidates_BTC"] = candidates_BTC
    if first_BT is not None:
        static["first_BT"] = _first(first_BT, visible_BT)
    module = dispatch.choose("index_select", implementation, interpret, CHOICES, *arrays, **static)
    return module.run(*arrays, interpret=interpret, **static)


def index_scores(
    q_BTIJ: Float[Array, "B T I J"],
    w_BTI: Float[Array, "B T I"],
    keys_GBPJ: Entries,
    group: jax.Array | int,
    visible_BT: Int[Array, "B T"],
    first_BT: Int[Array, "B T"] | None = None,
) -> Float[Array, "B T P"]:
    """All scores f32 [B, T, P], -inf where not visible. Quadratic: for looking inside and for the index loss on short spans."""
    q_BTIJ, w_BTI, keys_GBPJ, group, visible_BT = _checked(q_BTIJ, w_BTI, keys_GBPJ, group, visible_BT)
    first_BT = None if first_BT is None else _first(first_BT, visible_BT)
    return xla.index_scores(q_BTIJ, w_BTI, keys_GBPJ, group, visible_BT, first_BT)


def _first(first_BT: Any, visible_BT: jax.Array) -> jax.Array:
    first_BT = checks.integers("first_BT", first_BT)
    if first_BT.shape != visible_BT.shape:
        raise ValueError(f"{first_BT.shape=} must be [B, T] to match {visible_BT.shape=}")
    return first_BT


def _checked(
    q_BTIJ: Any, w_BTI: Any, keys_GBPJ: Any, group: Any, visible_BT: Any
) -> tuple[jax.Array, jax.Array, Entries, jax.Array, jax.Array]:
    """The arguments of both doors, of the kinds and shapes they must have."""
    q_BTIJ, w_BTI = checks.floats("q_BTIJ", q_BTIJ), checks.floats("w_BTI", w_BTI)
    keys_GBPJ, visible_BT = checks.entries("keys_GBPJ", keys_GBPJ), checks.integers("visible_BT", visible_BT)
    keys_shape = storage.shape(keys_GBPJ)
    if q_BTIJ.ndim != 4 or w_BTI.shape != q_BTIJ.shape[:3]:
        raise ValueError(f"{q_BTIJ.shape=} must be [B, T, I, J] and {w_BTI.shape=} its [B, T, I]")
    if keys_GBPJ.ndim != 4 or keys_shape[1] != q_BTIJ.shape[0] or keys_shape[3] != q_BTIJ.shape[3]:
        raise ValueError(f"keys_GBPJ.shape={keys_shape} must be [G, B, P, J] to match {q_BTIJ.shape=}")
    if visible_BT.shape != q_BTIJ.shape[:2]:
        raise ValueError(f"{visible_BT.shape=} must be [B, T] to match {q_BTIJ.shape=}")
    return q_BTIJ, w_BTI, keys_GBPJ, checks.group(group, keys_shape[0]), visible_BT
