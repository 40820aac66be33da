"""Rows on both sides of a call: waiting rows and new rows as one sequence, and the rows that wait after it.

A sequence is counted from the open group's first token: row v is slot v % m of group v // m. With overlap, `lead` = m rows of
the last complete group come before it (v < 0). Of the carried rows the first lead + phase mean something.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax


def lead_rows(ratio: int, overlap: bool) -> int:
    """Carried rows of the last complete group."""
    return ratio if overlap else 0


def waiting_rows(ratio: int, overlap: bool) -> int:
    """All carried rows: those of the last complete group, then the open group's m - 1."""
    return lead_rows(ratio, overlap) + ratio - 1


def sequence(
    half_BMW: jax.Array,
    new_BTW: jax.Array,
    bias_MW: jax.Array | None,
    phase_B: jax.Array,
    *,
    ratio: int,
    lead: int,
    length: int,
) -> jax.Array:
    """`length` rows from v = -lead on, in order; rows that are not real hold anything. New rows get the bias of their slot.

    The new rows move as one piece, by m - 1 - phase, so that no row is fetched by itself.
    """
    pad = jnp.zeros((new_BTW.shape[0], length + ratio, new_BTW.shape[2]), new_BTW.dtype)
    rows_BUW = jnp.concatenate([half_BMW, new_BTW, pad], axis=1)[:, : length + ratio - 1]
    moved_BUW = jax.vmap(lambda rows, by: lax.dynamic_slice_in_dim(rows, by, length))(rows_BUW, ratio - 1 - phase_B)
    if bias_MW is not None:
        moved_BUW = moved_BUW + jnp.tile(bias_MW, (length // ratio, 1))
    waits_BU = jnp.arange(length) < lead + phase_B[:, None]
    return jnp.where(waits_BU[:, :, None], rows_BUW[:, :length], moved_BUW)


def carry(
    half_BMW: jax.Array,
    new_BTW: jax.Array,
    bias_MW: jax.Array | None,
    phase_B: jax.Array,
    count_B: jax.Array,
    *,
    ratio: int,
    lead: int,
) -> jax.Array:
    """The rows that wait for the next call; those that are not real hold anything."""
    waiting, tokens = half_BMW.shape[1], new_BTW.shape[1]
    if waiting == 0 or tokens == 0:
        return half_BMW
    first_B = (phase_B + count_B) // ratio * ratio  # how far the open group's first token moves
    at_BM = first_B[:, None] + jnp.arange(waiting)
    stays_BM = at_BM < lead + phase_B[:, None]
    old_BMW = half_BMW
    if lead:  # the open group became the last complete one; further on no old row is left
        moved_BMW = jnp.concatenate([half_BMW[:, ratio:], half_BMW[:, :ratio]], axis=1)
        old_BMW = jnp.where(first_B[:, None, None] == 0, half_BMW, moved_BMW)
    fresh_BMW = new_BTW  # of a single token there is nothing to choose
    if tokens > 1:
        index_BM = (at_BM - lead - phase_B[:, None]).clip(0, tokens - 1)
        fresh_BMW = jnp.take_along_axis(new_BTW, index_BM[:, :, None], axis=1)
    if bias_MW is not None:
        fresh_BMW = fresh_BMW + jnp.tile(bias_MW, (-(-waiting // ratio), 1))[:waiting]
    return jnp.where(stays_BM[:, :, None], old_BMW, fresh_BMW)
