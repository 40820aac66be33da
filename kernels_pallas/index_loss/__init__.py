"""What trains an indexer: how much attention each pool entry gets, and the divergence of the index scores from that.

    mass_e = sum_n exp(q_n . k_e scale - lse_n)                                   `attention_mass`, no gradient
    t = mass / sum mass,   loss = sum_e t_e (log t_e - log softmax(score)_e)       `index_divergence`
    score_e = sum_i relu(q_i . key_e) w_i

over the same entries e of each query: those it is given by number, or all that are visible to it. Differentiable in index
queries, head weights and keys alone; only those and the mass are kept for the backward, which computes the scores again, a
block of queries at a time. Source: our choice where arXiv 2609.19969 is silent, after arXiv 2512.02556 (DSA's indexer).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kernels_pallas import checks, storage
from kernels_pallas.index_loss import xla
from kernels_pallas.storage import Entries, Packed


def attention_mass(
    q_BTNH: Float[Array, "B T N H"],
    lse_BTN: Float[Array, "B T N"],
    pool_GBPH: Entries,
    group: jax.Array | int,
    visible_BT: Int[Array, "B T"],
    *,
    scale: float,
    entries_BTE: Int[Array, "B T E"] | None = None,
    first_BT: Int[Array, "B T"] | None = None,
    joins: bool = False,
) -> Float[Array, "B T E"]:
    """The attention that entries get, summed over heads, f32; 0 for absent ones.

    Args:
        q_BTNH: main queries.
        lse_BTN: logarithm of the softmax's denominator per head.
        pool_GBPH: the stacked pools; `[group, b]` is read.
        visible_BT, first_BT: entries first <= e < visible may be read (first is 0 by default).
        scale: factor on the dot products.
        entries_BTE: entry numbers, negative ones absent; None means all P entries.
        joins: the entries are not in `lse_BTN` yet and join the denominator here.
    """
    q_BTNH, lse_BTN = checks.floats("q_BTNH", q_BTNH), checks.floats("lse_BTN", lse_BTN)
    pool_GBPH, visible_BT = checks.entries("pool_GBPH", pool_GBPH), checks.integers("visible_BT", visible_BT)
    pool_shape = storage.shape(pool_GBPH)
    if q_BTNH.ndim != 4 or pool_shape[1::2] != q_BTNH.shape[::3]:
        raise ValueError(f"pool_GBPH.shape={pool_shape} must be [G, B, P, H] to match {q_BTNH.shape=}")
    if lse_BTN.shape != q_BTNH.shape[:3]:
        raise ValueError(f"{lse_BTN.shape=} must be [B, T, N] to match {q_BTNH.shape=}")
    places = _places(visible_BT, first_BT, entries_BTE, q_BTNH.shape[:2])
    group = checks.group(group, pool_shape[0])
    arrays = jax.lax.stop_gradient((q_BTNH, lse_BTN, pool_GBPH))
    return xla.attention_mass(*arrays, group, *places, scale=float(scale), joins=joins)


def index_divergence(
    q_BTIJ: Float[Array, "B T I J"],
    w_BTI: Float[Array, "B T I"],
    keys_GBPJ: Float[Array, "G B P J"],
    group: jax.Array | int,
    mass_BTE: Float[Array, "B T E"],
    visible_BT: Int[Array, "B T"],
    *,
    entries_BTE: Int[Array, "B T E"] | None = None,
    first_BT: Int[Array, "B T"] | None = None,
) -> Float[Array, "B T"]:
    """KL(mass / sum mass || softmax of the index scores) per query, f32; 0 where a query has no entries or no mass.

    Args:
        q_BTIJ, w_BTI, keys_GBPJ, group: as `index_select` takes them, the keys plain numbers.
        mass_BTE: non-negative, for the same entries; needs no normalisation and gets no gradient.
        visible_BT, first_BT, entries_BTE: see `attention_mass`.
    """
    q_BTIJ, w_BTI = checks.floats("q_BTIJ", q_BTIJ), checks.floats("w_BTI", w_BTI)
    if isinstance(keys_GBPJ, Packed):
        raise ValueError("keys_GBPJ is packed: codes take no gradient, and an index loss has no other use")
    keys_GBPJ, mass_BTE = checks.floats("keys_GBPJ", keys_GBPJ), checks.floats("mass_BTE", mass_BTE)
    if q_BTIJ.ndim != 4 or w_BTI.shape != q_BTIJ.shape[:3]:
        raise ValueError(f"{q_BTIJ.shape=} must be [B, T, I, J] and {w_BTI.shape=} its [B, T, I]")
    if keys_GBPJ.ndim != 4 or keys_GBPJ.shape[1::2] != q_BTIJ.shape[::3]:
        raise ValueError(f"{keys_GBPJ.shape=} must be [G, B, P, J] to match {q_BTIJ.shape=}")
    visible_BT = checks.integers("visible_BT", visible_BT)
    places = _places(visible_BT, first_BT, entries_BTE, q_BTIJ.shape[:2])
    named_BTE = places[2]
    expected = (*q_BTIJ.shape[:2], keys_GBPJ.shape[2] if named_BTE is None else named_BTE.shape[2])
    if mass_BTE.shape != expected:
        raise ValueError(f"{mass_BTE.shape=} must be {expected}, one number for each entry of each query")
    group = checks.group(group, keys_GBPJ.shape[0])
    mass_BTE = jax.lax.stop_gradient(mass_BTE.astype(jnp.float32))
    return xla.divergence(q_BTIJ, w_BTI, keys_GBPJ, group, mass_BTE, *places)


def _places(
    visible_BT: jax.Array, first_BT: jax.Array | None, entries_BTE: jax.Array | None, shape: tuple[int, ...]
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    first_BT = jnp.zeros_like(visible_BT) if first_BT is None else checks.integers("first_BT", first_BT)
    if visible_BT.shape != shape or first_BT.shape != shape:
        raise ValueError(f"{visible_BT.shape=} and {first_BT.shape=} must be [B, T] = {shape}")
    if entries_BTE is not None:
        entries_BTE = checks.integers("entries_BTE", entries_BTE)
        if entries_BTE.ndim != 3 or entries_BTE.shape[:2] != shape:
            raise ValueError(f"{entries_BTE.shape=} must be [B, T, E] with [B, T] = {shape}")
    return visible_BT, first_BT, entries_BTE
