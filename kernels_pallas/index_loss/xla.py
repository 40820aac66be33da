"""The index loss in plain JAX, a block of queries at a time, forward and backward."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax

from kernels_pallas import storage
from kernels_pallas.products import einsum
from kernels_pallas.storage import Entries
from kernels_pallas.tiling import cut_query_blocks, map_query_blocks

_BLOCK_ELEMENTS = 1 << 22  # numbers of one block's largest array


def attention_mass(
    q_BTNH: jax.Array,
    lse_BTN: jax.Array,
    pool_GBPH: Entries,
    group: jax.Array | int,
    visible_BT: jax.Array,
    first_BT: jax.Array,
    entries_BTE: jax.Array | None,
    *,
    scale: float,
    joins: bool,
) -> jax.Array:
    """See the door."""
    batch, _, heads, width = q_BTNH.shape
    whole = storage.shape(pool_GBPH)[2]

    def block(q_BTNH: jax.Array, lse_BTN: jax.Array, *places: jax.Array) -> tuple[jax.Array]:
        seen_BTE = _seen(whole, *places)
        if len(places) == 2:
            rows_BPH = storage.chunk(pool_GBPH, group, 0, whole).astype(q_BTNH.dtype)
            s_BTNE = einsum("btnh,bph->btnp", q_BTNH, rows_BPH) * scale
        else:
            rows_BTEH = storage.gather(pool_GBPH, group, jnp.maximum(places[2] - 1, 0)).astype(q_BTNH.dtype)
            s_BTNE = jnp.swapaxes(einsum("bteh,btnh->bten", rows_BTEH, q_BTNH), 2, 3) * scale
        s_BTNE = jnp.where(seen_BTE[:, :, None], s_BTNE, -jnp.inf)
        if joins:
            lse_BTN = jnp.logaddexp(lse_BTN, jax.nn.logsumexp(s_BTNE, axis=-1))
        lse_BTN = jnp.where(lse_BTN == -jnp.inf, 0.0, lse_BTN)
        return (jnp.sum(jnp.exp(s_BTNE - lse_BTN[..., None]), axis=2),)

    per_query = batch * (heads * whole if entries_BTE is None else entries_BTE.shape[2] * max(width, heads))
    rows = (q_BTNH, lse_BTN, *_rows(visible_BT, first_BT, entries_BTE))
    (mass_BTE,) = map_query_blocks(block, max(1, _BLOCK_ELEMENTS // per_query), *rows)
    return mass_BTE


@functools.partial(jax.custom_vjp)
def divergence(
    q_BTIJ: jax.Array,
    w_BTI: jax.Array,
    keys_GBPJ: jax.Array,
    group: jax.Array,
    mass_BTE: jax.Array,
    visible_BT: jax.Array,
    first_BT: jax.Array,
    entries_BTE: jax.Array | None,
) -> jax.Array:
    """See the door."""
    keys_GBPJ = jnp.asarray(keys_GBPJ)  # see `_backward`

    def block(q_BTIJ: jax.Array, w_BTI: jax.Array, mass_BTE: jax.Array, *places: jax.Array) -> tuple[jax.Array]:
        return (_block_loss(q_BTIJ, w_BTI, _keys(keys_GBPJ, group, places), mass_BTE, keys_GBPJ.shape[2], places),)

    rows = (q_BTIJ, w_BTI, mass_BTE, *_rows(visible_BT, first_BT, entries_BTE))
    (loss_BT,) = map_query_blocks(block, _queries(q_BTIJ, keys_GBPJ, entries_BTE), *rows)
    return loss_BT


def _forward(*arrays: jax.Array) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    return divergence(*arrays), arrays


def _backward(arrays: tuple[jax.Array, ...], g_BT: jax.Array) -> tuple[jax.Array | None, ...]:
    # Constants may come back from tracing as arrays of NumPy, which a traced place cannot index.
    q_BTIJ, w_BTI, keys_GBPJ, group, mass_BTE, visible_BT, first_BT, entries_BTE = jax.tree.map(jnp.asarray, arrays)
    size = _queries(q_BTIJ, keys_GBPJ, entries_BTE)
    rows = (g_BT, q_BTIJ, w_BTI, mass_BTE, *_rows(visible_BT, first_BT, entries_BTE))
    blocks, join = cut_query_blocks(size, *rows)

    def step(dkeys_GBPJ: jax.Array, block: tuple[jax.Array, ...]) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        g_BT, q_BTIJ, w_BTI, mass_BTE, *places = block

        def loss(q_BTIJ: jax.Array, w_BTI: jax.Array, keys: jax.Array) -> jax.Array:
            return _block_loss(q_BTIJ, w_BTI, keys, mass_BTE, keys_GBPJ.shape[2], tuple(places))

        _, pull = jax.vjp(loss, q_BTIJ, w_BTI, _keys(keys_GBPJ, group, tuple(places)))
        dq_BTIJ, dw_BTI, dkeys = pull(g_BT)
        if len(places) == 2:
            return dkeys_GBPJ.at[group].add(dkeys), (dq_BTIJ, dw_BTI)
        b = jnp.arange(dkeys.shape[0])[:, None, None]
        entry_BTE = jnp.where(places[2] == 0, dkeys_GBPJ.shape[2], places[2] - 1)  # out of range: dropped
        return dkeys_GBPJ.at[group, b, entry_BTE].add(dkeys, mode="drop"), (dq_BTIJ, dw_BTI)

    dkeys_GBPJ, (dq, dw) = lax.scan(step, jnp.zeros(keys_GBPJ.shape, jnp.float32), blocks)
    return join(dq), join(dw), dkeys_GBPJ.astype(keys_GBPJ.dtype), None, None, None, None, None


divergence.defvjp(_forward, _backward)


def _rows(visible_BT: jax.Array, first_BT: jax.Array, entries_BTE: jax.Array | None) -> tuple[jax.Array, ...]:
    """What is cut into blocks of queries; of padding queries nothing is visible, and a slot of 0 means absent."""
    return visible_BT, first_BT, *(() if entries_BTE is None else (entries_BTE + 1,))


def _queries(q_BTIJ: jax.Array, keys_GBPJ: jax.Array, entries_BTE: jax.Array | None) -> int:
    batch, _, heads, width = q_BTIJ.shape
    per_query = heads * keys_GBPJ.shape[2] if entries_BTE is None else entries_BTE.shape[2] * max(width, heads)
    return max(1, _BLOCK_ELEMENTS // (batch * per_query))


def _seen(whole: int, visible_BT: jax.Array, first_BT: jax.Array, slot_BTE: jax.Array | None = None) -> jax.Array:
    """Whether each of the entries is there and visible; all `whole` of them where none are named."""
    entry = jnp.arange(whole) if slot_BTE is None else slot_BTE - 1
    return (entry >= first_BT[:, :, None]) & (entry < visible_BT[:, :, None])


def _keys(keys_GBPJ: jax.Array, group: jax.Array, places: tuple[jax.Array, ...]) -> jax.Array:
    """Keys of the entries, f32: [B, P, J] for all, [B, T, E, J] where they are named."""
    if len(places) == 2:
        return storage.chunk(keys_GBPJ, group, 0, keys_GBPJ.shape[2]).astype(jnp.float32)
    return storage.gather(keys_GBPJ, group, jnp.maximum(places[2] - 1, 0)).astype(jnp.float32)


def _block_loss(
    q_BTIJ: jax.Array,
    w_BTI: jax.Array,
    keys: jax.Array,
    mass_BTE: jax.Array,
    whole: int,
    places: tuple[jax.Array, ...],
) -> jax.Array:
    seen_BTE = _seen(whole, *places)
    q_BTIJ = q_BTIJ.astype(jnp.float32)
    dots_BTIE = einsum("btij,bpj->btip", q_BTIJ, keys) if keys.ndim == 3 else einsum("btij,btej->btie", q_BTIJ, keys)
    score_BTE = jnp.sum(jax.nn.relu(dots_BTIE) * w_BTI.astype(jnp.float32)[..., None], axis=2)
    mass_BTE = jnp.where(seen_BTE, mass_BTE, 0.0)
    total_BT = jnp.sum(mass_BTE, axis=-1)
    some_BT = total_BT > 0
    t_BTE = mass_BTE / jnp.where(some_BT, total_BT, 1.0)[..., None]
    # A query without entries would make NaN of its gradient through -inf - -inf: its scores are replaced before.
    log_p = jax.nn.log_softmax(jnp.where(seen_BTE | ~some_BT[..., None], score_BTE, -jnp.inf), axis=-1)
    log_t = jnp.log(jnp.where(t_BTE > 0, t_BTE, 1.0))
    return jnp.sum(jnp.where(t_BTE > 0, t_BTE * (log_t - jnp.where(t_BTE > 0, log_p, 0.0)), 0.0), axis=-1)
