"""What persists between calls and what travels between layers: plain pytrees, passed in and returned.

Only four things persist: pools (with index keys and half-filled groups), windows, the n-gram history and the lengths. Stacks
hold all layers of a kind in one array, so that a jitted step has few arguments and a scan can index them.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from csa2_jax.config import ModelConfig
from kernels_pallas import storage as stored

Storage = Literal["bf16", "f32"]
_STORAGE = {"bf16": jnp.bfloat16, "f32": jnp.float32}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Pool:
    """The pools of all FULL layers of one compression ratio m."""

    # Rotated, rounded entries, keys and values at once; a width of whole 128s is held as [G, B, P, H/128, 128], so that a TPU can
    # fetch single entries (`kernels_pallas.storage`).
    kv_GBPH: jax.Array
    key_GBPJ: jax.Array  # index keys
    c_half_GBMH: jax.Array | None  # the open group's waiting rows [G, B, m - 1, H], f32; None at m = 1
    z_half_GBMH: jax.Array | None


@jax.tree_util.register_pytree_node_class
@dataclasses.dataclass(frozen=True)
class Cache:
    """Everything a sequence leaves behind; consumed (donated) and returned by every call that takes it.

    The host keeps a mirror of the lengths, so that a call that would overrun `max_length` is refused before it starts, without
    waiting for the device. The mirror is not part of the pytree, and where it got lost the lengths are read back once.
    """

    length_B: jax.Array  # tokens consumed
    decoder_from_B: jax.Array  # first position whose decoder window rows are valid
    ngram_BE: jax.Array  # last compressed ids before `length`, -1 dead
    window_LBWH: jax.Array  # ring: position t sits in slot t mod W
    draft_window_LBWH: jax.Array | None  # the same for the draft stages
    pools: dict[str, Pool]  # by ratio: "m2", "m1"
    max_length: int  # static
    mirror: tuple[jax.Array, np.ndarray] | None = None  # `length_B` and what it holds, on the host

    def tree_flatten(self) -> tuple[tuple[Any, ...], int]:
        """Arrays are leaves, `max_length` is static, the host's mirror stays behind."""
        return tuple(getattr(self, name) for name in _CACHE_LEAVES), self.max_length

    @classmethod
    def tree_unflatten(cls, max_length: int, leaves: Sequence[Any]) -> Cache:
        """Inverse of `tree_flatten`, without a mirror."""
        return cls(*leaves, max_length=max_length)

    def lengths(self) -> np.ndarray:
        """Tokens consumed per row, on the host."""
        if self.mirror is not None and self.mirror[0] is self.length_B:
            return self.mirror[1].copy()
        return np.asarray(self.length_B).astype(np.int64)

    def with_mirror(self, lengths: np.ndarray) -> Cache:
        """The same cache, knowing on the host that `length_B` holds `lengths`."""
        return dataclasses.replace(self, mirror=(self.length_B, lengths))


_CACHE_LEAVES = ("length_B", "decoder_from_B", "ngram_BE", "window_LBWH", "draft_window_LBWH", "pools")


def pool_name(ratio: int) -> str:
    """The key of a ratio's pools and compressors."""
    return f"m{ratio}"


def pool_capacity(config: ModelConfig, ratio: int, max_length: int) -> int:
    """Entries a pool needs for `max_length` tokens, in whole candidate blocks."""
    entries = max_length // ratio
    block = config.candidate_block_size if config.has_candidates else 1
    return -(-entries // block) * block


def make_pools(
    config: ModelConfig, batch: int, max_length: int, dtype: jnp.dtype, *, one_group: bool = False
) -> dict[str, Pool]:
    """Empty pools. `one_group` keeps a single pool per ratio, enough where no later call reads it."""
    pools = {}
    for ratio in config.plan.ratios:
        groups = 1 if one_group else len(config.plan.pool_layers(ratio))
        entries = pool_capacity(config, ratio, max_length)
        half = (groups, batch, ratio - 1, config.head_dim)
        pools[pool_name(ratio)] = Pool(
            kv_GBPH=stored.in_rows(jnp.zeros((groups, batch, entries, config.head_dim), dtype)),
            key_GBPJ=jnp.zeros((groups, batch, entries, config.index_head_dim), dtype),
            c_half_GBMH=jnp.zeros(half, jnp.float32) if ratio > 1 else None,
            z_half_GBMH=jnp.zeros(half, jnp.float32) if ratio > 1 else None,
        )
    return pools


def init_cache(
    config: ModelConfig, batch: int, max_length: int, storage: Storage | None = None, *, draft: bool = False
) -> Cache:
    """An empty cache for `batch` sequences of up to `max_length` tokens.

    storage: "bf16" (exact for models that run with their roundings: every rounded value is a bf16 number) or "f32". By default
        bf16 on accelerators and f32 on CPUs, whose compiler widens a whole bf16 array for every few rows it reads.
    draft: also keep the draft head's windows, needed by `draft`.
    Raises ValueError for sizes below 1, a length beyond max_position_embeddings, or an unknown storage.
    """
    if storage == "packed":
        from kernels_pallas import Unsupported

        raise Unsupported("storage='packed' is not built yet; use 'bf16', which holds the same numbers exactly")
    if storage is None:
        storage = "f32" if jax.default_backend() == "cpu" else "bf16"
    if storage not in _STORAGE:
        raise ValueError(f"{storage=} must be one of {sorted(_STORAGE)}")
    if not isinstance(config, ModelConfig):
        raise ValueError(f"init_cache takes a ModelConfig (model.config), found {type(config).__name__}")
    batch, max_length = positive("batch", batch), positive("max_length", max_length)
    if max_length > config.max_position_embeddings:
        raise ValueError(f"{max_length=} exceeds max_position_embeddings={config.max_position_embeddings}")
    if draft and not config.num_nextn_predict_layers:
        raise ValueError("draft=True, but the configuration has num_nextn_predict_layers=0: there is no draft head")
    dtype = jnp.dtype(_STORAGE[storage])

    def windows(layers: int) -> jax.Array:
        return jnp.zeros((layers, batch, config.sliding_window, config.head_dim), dtype)

    return Cache(
        length_B=jnp.zeros(batch, jnp.int32),
        decoder_from_B=jnp.zeros(batch, jnp.int32),
        ngram_BE=jnp.full((batch, max(config.engram_max_ngram_size - 1, 0)), -1, jnp.int32),
        window_LBWH=windows(config.num_hidden_layers),
        draft_window_LBWH=windows(config.num_nextn_predict_layers) if draft else None,
        pools=make_pools(config, batch, max_length, dtype),
        max_length=max_length,
    ).with_mirror(np.zeros(batch, np.int64))


def positive(name: str, value: Any) -> int:
    """`value` as a whole number of at least 1."""
    try:
        number = 0 if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = 0
    if number < 1:
        raise ValueError(f"{name}={value!r} must be a whole number of at least 1")
    return number


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Step:
    """The call every layer sees: where its tokens are and how rotary turns them. Computed once per forward."""

    start_B: jax.Array  # tokens consumed before this call
    count_B: jax.Array  # real tokens of this call
    position_BT: jax.Array
    first_BT: jax.Array  # first row of concat(window history, new rows) a query may read
    image_BT: jax.Array | None
    rope_window: tuple[jax.Array, jax.Array]  # cos, sin [B, T, R/2] of window-only layers
    rope_pool: tuple[jax.Array, jax.Array]  # of layers that read a pool
    cached: bool = dataclasses.field(default=True, metadata={"static": True})  # False: pools live for this call only


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Flow:
    """What travels up through the layers."""

    x_BTSD: jax.Array  # residual streams
    pre_BTS: jax.Array  # how the next sub-layer reads them
    main_BTQD: jax.Array | None  # copy-means at the draft head's target layers
    selection_BTK: jax.Array
    candidates_BTC: jax.Array


def window_history(window_LBWH: jax.Array, layer: jax.Array | int, start_B: jax.Array) -> jax.Array:
    """One layer's ring in order of position: row i holds position start - W + i (rows before position 0 mean nothing)."""
    batch, width = window_LBWH.shape[1:3]
    slot_BW = (start_B[:, None] + jnp.arange(width)) % width
    return window_LBWH[layer, jnp.arange(batch)[:, None], slot_BW]


def window_tail(rows_BTH: jax.Array, count_B: jax.Array, width: int) -> jax.Array:
    """The new rows that may stay in the ring: all T if they fit, else the last `width` real ones."""
    tokens = rows_BTH.shape[1]
    if tokens <= width:
        return rows_BTH
    return jnp.take_along_axis(rows_BTH, _tail_index(count_B, width)[..., None].clip(0, tokens - 1), axis=1)


def write_windows(window_LBWH: jax.Array, tail_LBRH: jax.Array, step: Step) -> jax.Array:
    """Put every layer's tail rows into their slots; rows that are not real go nowhere."""
    width, kept, tokens = window_LBWH.shape[2], tail_LBRH.shape[2], step.position_BT.shape[1]
    if tokens <= width:
        index_BR = jnp.broadcast_to(jnp.arange(tokens), step.position_BT.shape)
    else:
        index_BR = _tail_index(step.count_B, kept)
    real = (index_BR >= 0) & (index_BR < step.count_B[:, None])
    slot_BR = jnp.where(real, (step.start_B[:, None] + index_BR) % width, width)
    return write_rows(window_LBWH, slice(None), slot_BR, tail_LBRH)


def write_rows(array_GBPH: jax.Array, group: Any, slot_BE: jax.Array, rows: jax.Array) -> jax.Array:
    """`array[group, b, slot_BE[b]] = rows[b]`, in place under jit; slots beyond the array are dropped."""
    b = jnp.arange(slot_BE.shape[0])[:, None]
    rows = rows.astype(array_GBPH.dtype)
    rows = rows.reshape(*rows.shape[:-1], *array_GBPH.shape[3:])
    return array_GBPH.at[group, b, slot_BE].set(rows, mode="drop")


def _tail_index(count_B: jax.Array, width: int) -> jax.Array:
    """Which of the call's tokens are its last `width` real ones (negative: there is none)."""
    return count_B[:, None] - width + jnp.arange(width)
