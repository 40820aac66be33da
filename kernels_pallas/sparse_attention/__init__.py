"""Sparse attention: one softmax over a query's window and its selected pool entries.

    s = q . k * scale           over the window rows and the selected entries of the pool (keys are the values)
    o = sum exp(s - M) k / (sum exp(s - M) + exp(sink - M)),    M = max s over entries
    lse = log(sum exp(s) + exp(sink))

The per-head sink is a plain logit in the denominator. Entries marked -1 are absent; a query with no entries gives o = 0. An
entry that a query meets twice, in the window and in the pool or twice in its selection, counts twice. With bf16 queries the
weights exp(s - M) are rounded to bf16 before they meet the values, the denominator sums them unrounded.

Differentiable in queries, sink, and a plain window and pool; only queries, rows, o and lse are kept for the backward, which
computes the weights again. Source: arXiv 2609.19969 (CSA2 attention); arXiv 2205.14135 for the backward from lse.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kernels_pallas import checks, dispatch, storage
from kernels_pallas.sparse_attention import pallas_gpu, pallas_tpu, vjp, xla
from kernels_pallas.storage import Entries, Packed

CHOICES = {"xla": xla, "pallas_tpu": pallas_tpu, "pallas_gpu": pallas_gpu}


def sparse_attention(
    q_BTNH: Float[Array, "B T N H"],
    window_BSH: Float[Array, "B S H"] | Packed,
    first_BT: Int[Array, "B T"],
    sink_N: Float[Array, " N"],
    pool_GBPH: Entries | None = None,
    group: jax.Array | int = 0,
    selection_BTK: Int[Array, "B T K"] | None = None,
    *,
    span_BT: tuple[Int[Array, "B T"], Int[Array, "B T"]] | None = None,
    window: int,
    scale: float,
    causal: bool = True,
    implementation: str | None = None,
    interpret: Any = False,
) -> tuple[Float[Array, "B T N H"], Float[Array, "B T N"]]:
    """Attend; returns (o_BTNH in q's dtype, log-sum-exp f32 [B, T, N], the sink included).

    Args:
        q_BTNH: queries, f32 or bf16.
        window_BSH: S = history + T rows in order of position; the T queries are the last T rows' tokens. Numbers, or
            `Packed` of shape [1, B, S, H].
        first_BT: int32, the first row of `window_BSH` the query may read. Causal queries never read further back than `window`
            rows, their own included, whatever it says.
        sink_N: per-head sink logits, f32.
        pool_GBPH: the stacked pools, plain or packed (`storage`); only rows `[group, b, selection]` are read.
        selection_BTK: pool entries below P, negative ones absent.
        span_BT: instead of a selection, the first entry and the one behind the last that each query reads: all between, as one
            matrix product on XLA; the other implementations are given them as a selection.
        window: W, how many rows back a causal query reads; others read to the end.
        scale: factor on the dot products.
        causal: a query reads window rows up to its own; otherwise up to the end (draft blocks).
        implementation, interpret: see `dispatch`; `interpret` runs a Pallas implementation on a CPU (True, or the
            `InterpretParams` of Pallas for TPUs).

    Raises ValueError for arguments that contradict one another, Unsupported where a named implementation refuses.
    """
    q_BTNH, sink_N = checks.floats("q_BTNH", q_BTNH), checks.floats("sink_N", sink_N)
    window_BSH, first_BT = checks.entries("window_BSH", window_BSH), checks.integers("first_BT", first_BT)
    window = checks.whole("window", window, 1)
    rows_BSH = storage.shape(window_BSH)[1:] if isinstance(window_BSH, Packed) else window_BSH.shape
    if q_BTNH.ndim != 4 or len(rows_BSH) != 3 or rows_BSH[::2] != q_BTNH.shape[::3]:
        raise ValueError(f"window_BSH.shape={tuple(rows_BSH)} must be [B, S, H] to match {q_BTNH.shape=} [B, T, N, H]")
    if isinstance(window_BSH, Packed) and storage.shape(window_BSH)[0] != 1:
        raise ValueError(f"a packed window_BSH is a stack of one, [1, B, S, H], found {storage.shape(window_BSH)}")
    if rows_BSH[1] < q_BTNH.shape[1]:
        raise ValueError(
            f"window_BSH.shape={tuple(rows_BSH)} must hold at least the {q_BTNH.shape[1]} rows of {q_BTNH.shape=}"
        )
    if first_BT.shape != q_BTNH.shape[:2] or sink_N.shape != q_BTNH.shape[2:3]:
        raise ValueError(f"{first_BT.shape=} must be [B, T] and {sink_N.shape=} [N] to match {q_BTNH.shape=}")
    if selection_BTK is not None and span_BT is not None:
        raise ValueError("a query reads a selection or a span of the pool, not both")
    if (pool_GBPH is None) != (selection_BTK is None and span_BT is None):
        raise ValueError("a pool and a selection (or span) come together")
    if pool_GBPH is not None and span_BT is not None:
        span_BT, entries = _span(span_BT, q_BTNH), storage.shape(checks.entries("pool_GBPH", pool_GBPH))[2]
        if (implementation or dispatch.preferred()[0]) != "xla" or entries == 0:
            entry = jnp.arange(entries, dtype=jnp.int32)
            seen_BTP = (entry >= span_BT[0][..., None]) & (entry < span_BT[1][..., None])
            selection_BTK, span_BT = jnp.where(seen_BTP, entry, -1), None
    if pool_GBPH is not None and span_BT is not None:
        pool_GBPH = _pool(pool_GBPH, q_BTNH)
        group = checks.group(group, storage.shape(pool_GBPH)[0])
    if pool_GBPH is not None and selection_BTK is not None:
        pool_GBPH, selection_BTK = _pool(pool_GBPH, q_BTNH), checks.integers("selection_BTK", selection_BTK)
        pool_shape = storage.shape(pool_GBPH)
        if selection_BTK.ndim != 3 or selection_BTK.shape[:2] != q_BTNH.shape[:2]:
            raise ValueError(f"{selection_BTK.shape=} must be [B, T, K] to match {q_BTNH.shape=}")
        group = checks.group(group, pool_shape[0])
        if pool_shape[2] == 0 or selection_BTK.shape[2] == 0:
            pool_GBPH = selection_BTK = None  # nothing to select from
    if 0 in q_BTNH.shape:
        return jnp.zeros_like(q_BTNH), jnp.zeros(q_BTNH.shape[:3], jnp.float32)
    arrays = (q_BTNH, window_BSH, first_BT, sink_N, pool_GBPH, jnp.asarray(group, jnp.int32), selection_BTK)
    static = {"window": window, "scale": scale, "causal": causal}
    module = dispatch.choose("sparse_attention", implementation, interpret, CHOICES, *arrays, **static)
    return vjp.attend(vjp.Call(module, interpret, window, float(scale), causal), *arrays, span_BT)


def _pool(pool_GBPH: Any, q_BTNH: jax.Array) -> Entries:
    pool_GBPH = checks.entries("pool_GBPH", pool_GBPH)
    shape = storage.shape(pool_GBPH)
    if pool_GBPH.ndim not in (4, 5) or shape[1::2] != q_BTNH.shape[::3]:
        raise ValueError(f"pool_GBPH.shape={shape} must be [G, B, P, H] to match {q_BTNH.shape=}")
    return pool_GBPH


def _span(span_BT: tuple[Any, Any], q_BTNH: jax.Array) -> tuple[jax.Array, jax.Array]:
    first_BT, end_BT = (checks.integers("span_BT", a) for a in span_BT)
    if first_BT.shape != q_BTNH.shape[:2] or end_BT.shape != q_BTNH.shape[:2]:
        raise ValueError(f"span_BT of {first_BT.shape} and {end_BT.shape} must be [B, T] to match {q_BTNH.shape=}")
    return first_BT, end_BT
