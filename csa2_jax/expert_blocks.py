"""Routed experts, a block of one expert's rows at a time, with a backward whose work does not grow with the number of experts.

Left to itself, the transposed scan would make, in every block, a cotangent as large as all experts of all layers. Here a block
adds to its own expert's, in place.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

Leaves = list[jax.Array]
Expert = Callable[[Leaves, jax.Array, jax.Array], jax.Array]


class BlockRows(NamedTuple):
    """Where (token, expert) pairs lie: pair p is choice p % k of token p // k.

    pair_of_row: of padding rows 0. expert_of_block: the number of experts where a block is unused.
    """

    row_of_pair_p: jax.Array
    pair_of_row_bs: jax.Array
    expert_of_block_b: jax.Array


def sort_by_expert(expert_p: jax.Array, experts: int, size: int) -> BlockRows:
    """Lay (token, expert) pairs out by expert, each expert's rows padded to whole blocks of `size`.

    The number of blocks is a static bound: every expert may leave one block partly filled, and no block is empty.
    """
    pairs = expert_p.shape[0]
    blocks = min(-(-pairs // size) + experts, pairs)
    count = jnp.zeros(experts, jnp.int32).at[expert_p].add(1)
    blocks_of = -(-count // size)
    first_block = jnp.cumsum(blocks_of) - blocks_of
    order = jnp.argsort(expert_p, stable=True)
    sorted_expert = expert_p[order]
    rank = jnp.arange(pairs) - (jnp.cumsum(count) - count)[sorted_expert]
    row_sorted = first_block[sorted_expert] * size + rank
    row_of_pair = jnp.zeros(pairs, jnp.int32).at[order].set(row_sorted.astype(jnp.int32))
    pair_of_row = jnp.zeros(blocks * size, jnp.int32).at[row_of_pair].set(jnp.arange(pairs, dtype=jnp.int32))
    used = jnp.sum(blocks_of)
    block = jnp.arange(blocks)
    owner = jnp.searchsorted(jnp.cumsum(blocks_of), block, side="right").astype(jnp.int32)
    return BlockRows(row_of_pair, pair_of_row.reshape(blocks, size), jnp.where(block < used, owner, experts))


def expert_blocks(
    expert: Expert,
    leaves: Leaves,
    layer: jax.Array | int,
    experts: int,
    x_nD: jax.Array,
    weight_nk: jax.Array,
    rows: BlockRows,
) -> jax.Array:
    """Outputs [n, k, D] of the chosen experts.

    expert: (its leaves, x [s, D], routing weights [s]) -> [s, D]; it closes over no array that wants a gradient.
    leaves: [L, X, ...]; those of more than one byte per number are differentiable.
    """
    floating = [jnp.issubdtype(a.dtype, jnp.floating) and jnp.dtype(a.dtype).itemsize > 1 for a in leaves]
    trained = [a for a, wants in zip(leaves, floating, strict=True) if wants]
    stored = [a for a, wants in zip(leaves, floating, strict=True) if not wants]

    def joined(trained: Leaves, stored: Leaves, x_nD: jax.Array, weight_n: jax.Array) -> jax.Array:
        some, others = iter(trained), iter(stored)
        return expert([next(some if wants else others) for wants in floating], x_nD, weight_n)

    return _run(joined, experts, trained, stored, jnp.asarray(layer, jnp.int32), x_nD, weight_nk, rows)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _run(
    expert: Any,
    experts: int,
    trained: Leaves,
    stored: Leaves,
    layer: jax.Array,
    x_nD: jax.Array,
    weight_nk: jax.Array,
    rows: BlockRows,
) -> jax.Array:
    topk = weight_nk.shape[1]

    def block(_: None, of: tuple[jax.Array, jax.Array]) -> tuple[None, jax.Array]:
        pair_s, e = of
        x_sD, weight_s = x_nD[pair_s // topk], weight_nk.reshape(-1)[pair_s]
        run = lambda: expert(_pick(trained, layer, e), _pick(stored, layer, e), x_sD, weight_s)  # noqa: E731
        out = jax.eval_shape(run)
        return None, lax.cond(e < experts, run, lambda: jnp.zeros(out.shape, out.dtype))

    _, y_bsD = lax.scan(block, None, (rows.pair_of_row_bs, rows.expert_of_block_b))
    return y_bsD.reshape(-1, x_nD.shape[1])[rows.row_of_pair_p].reshape(*weight_nk.shape, -1)


def _forward(expert: Any, experts: int, *arrays: Any) -> tuple[jax.Array, tuple[Any, ...]]:
    return _run(expert, experts, *arrays), arrays


def _backward(expert: Any, experts: int, arrays: tuple[Any, ...], g_nkD: jax.Array) -> tuple[Any, ...]:
    trained, stored, layer, x_nD, weight_nk, rows = arrays
    topk = weight_nk.shape[1]
    g_pD = g_nkD.reshape(-1, g_nkD.shape[-1])
    blocks, size = rows.pair_of_row_bs.shape
    row_bs = jnp.arange(blocks * size).reshape(blocks, size)

    def block(sums: Leaves, of: tuple[jax.Array, ...]) -> tuple[Leaves, tuple[jax.Array, jax.Array]]:
        pair_s, row_s, e = of
        x_sD, weight_s = x_nD[pair_s // topk], weight_nk.reshape(-1)[pair_s]
        # A padding row repeats pair 0, whose row is another one.
        g_sD = jnp.where((rows.row_of_pair_p[pair_s] == row_s)[:, None], g_pD[pair_s], 0)
        own = _pick(trained, layer, e)

        def pull() -> tuple[Leaves, jax.Array, jax.Array]:
            return jax.vjp(lambda *a: expert(a[0], _pick(stored, layer, e), *a[1:]), own, x_sD, weight_s)[1](g_sD)

        skip = lambda: jax.tree.map(jnp.zeros_like, (own, x_sD, weight_s))  # noqa: E731
        d_own, dx_sD, dweight_s = lax.cond(e < experts, pull, skip)
        at = jnp.minimum(e, experts - 1)
        sums = [total.at[at].add(d.astype(total.dtype)) for total, d in zip(sums, d_own, strict=True)]
        return sums, (dx_sD, dweight_s)

    zeros = [jnp.zeros(a.shape[1:], jnp.promote_types(a.dtype, jnp.float32)) for a in trained]
    sums, (dx_bsD, dweight_bs) = lax.scan(block, zeros, (rows.pair_of_row_bs, row_bs, rows.expert_of_block_b))
    d_trained = [jnp.zeros_like(a).at[layer].set(d.astype(a.dtype)) for a, d in zip(trained, sums, strict=True)]
    dx_pD = dx_bsD.reshape(-1, x_nD.shape[1])[rows.row_of_pair_p]
    dx_nD = jnp.sum(dx_pD.reshape(*weight_nk.shape, -1).astype(jnp.float32), axis=1).astype(x_nD.dtype)
    dweight_nk = dweight_bs.reshape(-1)[rows.row_of_pair_p].reshape(weight_nk.shape)
    return d_trained, None, None, dx_nD, dweight_nk, None


_run.defvjp(_forward, _backward)


def _pick(leaves: Leaves, layer: jax.Array, e: jax.Array) -> Leaves:
    return [a[layer, e] for a in leaves]
