"""Exact sparse attention in plain JAX: the reference, the CPU path and the fallback. Differentiable as written.

Queries go in blocks: a block reads the window rows it can see and gathers its selected pool rows, so that temporary memory
is one block's, whatever T and P are.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax

from kernels_pallas.tiling import map_query_blocks

_GATHER_ELEMENTS = 1 << 23  # pool numbers gathered at once


def sparse_attention(
    q_BTNH: jax.Array,
    window_BSH: jax.Array,
    first_BT: jax.Array,
    sink_N: jax.Array,
    pool_GBPH: jax.Array | None,
    group: jax.Array | int,
    selection_BTK: jax.Array | None,
    *,
    window: int,
    scale: float,
    causal: bool,
) -> tuple[jax.Array, jax.Array]:
    """See the door."""
    batch, tokens, _, width = q_BTNH.shape
    rows = window_BSH.shape[1]
    if causal:
        end_BT = jnp.broadcast_to(rows - tokens + 1 + jnp.arange(tokens, dtype=jnp.int32), first_BT.shape)
    else:
        end_BT = jnp.full(first_BT.shape, rows, jnp.int32)
    size = max(window, 64) if causal else tokens
    if selection_BTK is not None:
        size = min(size, max(1, _GATHER_ELEMENTS // (batch * selection_BTK.shape[2] * width)))
    block = functools.partial(_attend, window_BSH, sink_N, pool_GBPH, group, scale, window if causal else rows)
    arrays = (q_BTNH, first_BT, end_BT) + (() if selection_BTK is None else (selection_BTK,))
    o_BTNH, lse_BTN = map_query_blocks(block, size, *arrays)
    return o_BTNH, lse_BTN


def _attend(
    window_BSH: jax.Array,
    sink_N: jax.Array,
    pool_GBPH: jax.Array | None,
    group: jax.Array | int,
    scale: float,
    window: int,
    q_BTNH: jax.Array,
    first_BT: jax.Array,
    end_BT: jax.Array,
    selection_BTK: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    batch, tokens = first_BT.shape
    rows, reach = window_BSH.shape[1], window + tokens - 1
    start: jax.Array | int = 0
    if reach < rows:  # the rows a causal block can see lie together and end with its last query's own
        start = jnp.clip(end_BT[0, 0] - window, 0, rows - reach)
        window_BSH = lax.dynamic_slice_in_dim(window_BSH, start, reach, axis=1)
    row = start + jnp.arange(window_BSH.shape[1])
    # A block's padding queries have end 0: they read nothing.
    seen_BTS = (row >= first_BT[:, :, None]) & (row < end_BT[:, :, None])
    # Rows nobody reads may hold anything, NaN included, which would leak through 0 * NaN.
    keys_BSH = jnp.where(jnp.any(seen_BTS, axis=1)[..., None], window_BSH.astype(q_BTNH.dtype), 0)
    scores = [_masked(_dot("btnh,bsh->btns", q_BTNH, keys_BSH) * scale, seen_BTS[:, :, None, :])]
    if pool_GBPH is not None and selection_BTK is not None:
        b = jnp.arange(batch)[:, None, None]
        picked_BTKH = pool_GBPH[group, b, jnp.maximum(selection_BTK, 0)].astype(q_BTNH.dtype)
        # An absent slot reads entry 0; whatever lies there, NaN included, must not leak through 0 * NaN.
        picked_BTKH = jnp.where((selection_BTK >= 0)[..., None], picked_BTKH, 0)
        picked = jnp.swapaxes(_dot("btkh,btnh->btkn", picked_BTKH, q_BTNH), 2, 3) * scale
        scores.append(_masked(picked, (selection_BTK >= 0)[:, :, None, :]))
    peak = functools.reduce(jnp.maximum, [jnp.max(s, axis=-1) for s in scores])
    # A query without entries gets 0: its sink is left out, so that no value of it makes 0 / 0, here or in the gradient.
    empty = peak == -jnp.inf
    peak = lax.stop_gradient(jnp.where(empty, 0.0, peak))
    weights = [jnp.exp(s - peak[..., None]) for s in scores]
    total = functools.reduce(jnp.add, [jnp.sum(w, axis=-1) for w in weights])
    numerator = _dot("btns,bsh->btnh", _round(weights[0], q_BTNH.dtype), keys_BSH)
    if len(weights) == 2:
        numerator += _dot("btnk,btkh->btnh", _round(weights[1], q_BTNH.dtype), picked_BTKH)
    sink = jnp.broadcast_to(sink_N.astype(jnp.float32), peak.shape)
    o_BTNH = numerator / (total + jnp.exp(jnp.where(empty, 0.0, sink) - peak))[..., None]
    peak = jnp.where(empty, sink, peak)
    ceiling = jnp.maximum(peak, sink)
    lse_BTN = ceiling + jnp.log(total * jnp.exp(peak - ceiling) + jnp.exp(sink - ceiling))
    return _round(o_BTNH, q_BTNH.dtype), lse_BTN


def _masked(scores: jax.Array, seen: jax.Array) -> jax.Array:
    return jnp.where(seen, scores, -jnp.inf)


def _dot(subscripts: str, a: jax.Array, b: jax.Array) -> jax.Array:
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return jnp.einsum(subscripts, a, b, precision=precision, preferred_element_type=jnp.float32)


def _round(x: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """f32 rounded to `dtype` for good: reduce_precision cannot be optimised away as a cast can."""
    if dtype == jnp.bfloat16:
        x = lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)
    return x.astype(dtype)
