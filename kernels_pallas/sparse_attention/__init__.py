"""Sparse attention: one softmax over a query's window and its selected pool entries.

    s = q . k * scale           over the window rows and the selected entries of the pool (keys are the values)
    o = sum exp(s - M) k / (sum exp(s - M) + exp(sink - M)),    M = max s over entries

The per-head sink is a plain logit in the denominator. Entries marked -1 are absent; a query with no entries gives 0. An entry
that a query meets both in the window and in the pool counts twice. Source: arXiv 2609.19969 (CSA2 attention).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kernels_pallas import dispatch
from kernels_pallas.sparse_attention import xla


def sparse_attention(
    q_BTNH: Float[Array, "B T N H"],
    window_BSH: Float[Array, "B S H"],
    first_BT: Int[Array, "B T"],
    sink_N: Float[Array, " N"],
    pool_GBPH: Float[Array, "G B P H"] | None = None,
    group: jax.Array | int = 0,
    selection_BTK: Int[Array, "B T K"] | None = None,
    *,
    window: int,
    scale: float,
    causal: bool = True,
    implementation: str | None = None,
) -> tuple[Float[Array, "B T N H"], Float[Array, "B T N"]]:
    """Attend; returns (o_BTNH in q's dtype, log-sum-exp f32 [B, T, N], the sink included).

    Args:
        q_BTNH: queries, f32 or bf16.
        window_BSH: S = history + T rows in order of position; the T queries are the last T rows' tokens.
        first_BT: int32, the first row of `window_BSH` the query may read (never more than `window` rows back if causal).
        sink_N: per-head sink logits, f32.
        pool_GBPH: the stacked pools; only rows `[group, b, selection]` are read.
        selection_BTK: pool entries, -1 absent.
        window: upper bound of window rows a query reads; long causal calls are cut accordingly.
        scale: factor on the dot products.
        causal: a query reads window rows up to its own; otherwise up to the end (draft blocks).
    """
    if q_BTNH.ndim != 4 or window_BSH.ndim != 3 or window_BSH.shape[::2] != q_BTNH.shape[::3]:
        raise ValueError(f"{window_BSH.shape=} must be [B, S, H] to match {q_BTNH.shape=} [B, T, N, H]")
    if window_BSH.shape[1] < q_BTNH.shape[1]:
        raise ValueError(f"{window_BSH.shape=} must hold at least the {q_BTNH.shape[1]} rows of {q_BTNH.shape=}")
    if first_BT.shape != q_BTNH.shape[:2] or sink_N.shape != q_BTNH.shape[2:3]:
        raise ValueError(f"{first_BT.shape=} must be [B, T] and {sink_N.shape=} [N] to match {q_BTNH.shape=}")
    if window < 1:
        raise ValueError(f"{window=} must be at least 1")
    if (pool_GBPH is None) != (selection_BTK is None):
        raise ValueError("a pool and a selection come together")
    if pool_GBPH is not None and selection_BTK is not None:
        if pool_GBPH.ndim != 4 or pool_GBPH.shape[1::2] != q_BTNH.shape[::3]:
            raise ValueError(f"{pool_GBPH.shape=} must be [G, B, P, H] to match {q_BTNH.shape=}")
        if selection_BTK.shape[:2] != q_BTNH.shape[:2]:
            raise ValueError(f"{selection_BTK.shape=} must be [B, T, K] to match {q_BTNH.shape=}")
        if pool_GBPH.shape[2] == 0:
            pool_GBPH = selection_BTK = None  # an empty pool has nothing to select
    if q_BTNH.dtype not in (jnp.float32, jnp.bfloat16):
        raise ValueError(f"{q_BTNH.dtype=} must be float32 or bfloat16")
    q_BTNH, window_BSH, first_BT, sink_N = (jnp.asarray(a) for a in (q_BTNH, window_BSH, first_BT, sink_N))
    if pool_GBPH is not None:
        pool_GBPH, selection_BTK = jnp.asarray(pool_GBPH), jnp.asarray(selection_BTK)
    return dispatch.run(
        "sparse_attention",
        implementation,
        {"xla": xla.sparse_attention},
        q_BTNH,
        window_BSH,
        first_BT,
        sink_N,
        pool_GBPH,
        group,
        selection_BTK,
        window=window,
        scale=scale,
        causal=causal,
    )
