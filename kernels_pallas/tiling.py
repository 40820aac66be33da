"""Cutting long calls into blocks of queries."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax


def map_query_blocks(f: Callable[..., tuple[jax.Array, ...]], size: int, *rows: jax.Array) -> tuple[jax.Array, ...]:
    """`f` over blocks of at most `size` queries (axis 1 of every array), one block at a time; results joined on axis 1.

    The last block is padded with zero rows, whose results are dropped. Peak memory is that of one block.
    """
    if rows[0].shape[1] <= size:
        return f(*rows)
    blocks, join = cut_query_blocks(size, *rows)
    return tuple(join(a) for a in lax.map(lambda block: f(*block), blocks))


def cut_query_blocks(size: int, *rows: jax.Array) -> tuple[tuple[jax.Array, ...], Callable[[jax.Array], jax.Array]]:
    """Arrays [B, T, ...] as blocks [T/size, B, size, ...] padded with zero rows, and the inverse for results."""
    tokens = rows[0].shape[1]
    blocks = -(-tokens // size)
    size = -(-tokens // blocks)  # even blocks: the least padding for this many

    def cut(a: jax.Array) -> jax.Array:
        a = jnp.pad(a, [(0, blocks * size - tokens if i == 1 else 0) for i in range(a.ndim)])
        return jnp.moveaxis(a.reshape(a.shape[0], blocks, size, *a.shape[2:]), 1, 0)

    def join(a: jax.Array) -> jax.Array:
        a = jnp.moveaxis(a, 0, 1)
        return a.reshape(a.shape[0], blocks * size, *a.shape[3:])[:, :tokens]

    return tuple(cut(a) for a in rows), join
