"""Exact compression in plain JAX: the reference, the CPU path and the fallback."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp


def run(
    c_BTH: jax.Array,
    z_BTH: jax.Array,
    c_half_BMH: jax.Array,
    z_half_BMH: jax.Array,
    phase_B: jax.Array,
    count_B: jax.Array,
    *,
    ratio: int,
    interpret: Any = False,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(entries, c_half, z_half); see the door. Waiting and new rows are laid out as one sequence that starts at the open group's first token."""
    del interpret
    if ratio == 1:
        return c_BTH, c_half_BMH, z_half_BMH
    batch, tokens, width = c_BTH.shape
    entries = (tokens + ratio - 1) // ratio
    rows_BU = _sources(phase_B, entries * ratio, tokens, ratio)
    c_BUH = _take(jnp.concatenate([c_half_BMH, c_BTH], axis=1), rows_BU)
    z_BUH = _take(jnp.concatenate([z_half_BMH, z_BTH], axis=1), rows_BU)
    groups = (batch, entries, ratio, width)
    weights = jax.nn.softmax(z_BUH.reshape(groups), axis=2)
    entries_BEH = jnp.sum(weights * c_BUH.reshape(groups), axis=2)
    # The rows behind the last complete group wait for the next call. Fewer than ratio - 1 may be real; the rest is ignored later.
    total_B = phase_B + count_B
    first_B = total_B - total_B % ratio
    rest_BM = first_B[:, None] + jnp.arange(ratio - 1)
    last = (ratio - 1) + tokens - 1
    rest_BM = jnp.where(rest_BM < phase_B[:, None], rest_BM, rest_BM - phase_B[:, None] + ratio - 1).clip(0, last)
    return (
        entries_BEH,
        _take(jnp.concatenate([c_half_BMH, c_BTH], axis=1), rest_BM),
        _take(jnp.concatenate([z_half_BMH, z_BTH], axis=1), rest_BM),
    )


def _sources(phase_B: jax.Array, length: int, tokens: int, ratio: int) -> jax.Array:
    """Where row u of the sequence lies in concat(half, new): u < phase waits in the half group, the others are new rows."""
    u = jnp.arange(length)
    rows = jnp.where(u < phase_B[:, None], u, u - phase_B[:, None] + ratio - 1)
    return rows.clip(0, ratio - 1 + tokens - 1)


def _take(rows_BUH: jax.Array, index_BV: jax.Array) -> jax.Array:
    return jnp.take_along_axis(rows_BUH, index_BV[:, :, None], axis=1)
