"""What persists between calls and what travels between layers: plain pytrees, passed in and returned.

Only four things persist: pools (with index keys and half-filled groups), windows, the n-gram history and the lengths. Stacks
hold all layers of a kind in one array, so that a jitted step has few arguments and a scan can index them.
"""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from csa2_jax import formats
from csa2_jax.config import ModelConfig
from csa2_jax.plan import OVERLAPPING
from kernels_pallas import empty_half
from kernels_pallas import storage as stored
from kernels_pallas.storage import Entries, Packed

Storage = Literal["bf16", "f32", "packed"]
_NUMBERS = {"bf16": jnp.bfloat16, "f32": jnp.float32}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Pool:
    """The pools of all layers that make one at one compression ratio m."""

    # Rotated, rounded entries, keys and values at once; a width of whole 128s is held as [G, B, P, H/128, 128], so that a TPU can
    # fetch single entries (`kernels_pallas.storage`).
    kv_GBPH: Entries
    key_GBPJ: Entries | None  # index keys; V4's HCA layers have none
    # C and Z (axis Y) of the tokens that wait in the open group, f32, in V4 of the last complete group too; None at m = 1.
    half_YGBMH: jax.Array | None
    key_half_YGBMJ: jax.Array | None = None  # the same of the keys' own compressor, in V4


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
    window_LBWH: Entries  # ring: position t sits in slot t mod W
    draft_window_LBWH: Entries | None  # the same for the draft stages
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


def map_rows(f: Callable[..., jax.Array], cache: Cache, *others: Cache) -> Cache:
    """A cache of f(axis, array, arrays of the others) for every array of it; `axis` is the one of the rows."""

    def over(axis: int, *trees: Any) -> Any:
        return jax.tree.map(lambda *arrays: f(axis, *arrays), *trees)

    def each(name: str, axis: int) -> Any:
        return over(axis, *(getattr(c, name) for c in (cache, *others)))

    def pool(name: str) -> Pool:
        these = [c.pools[name] for c in (cache, *others)]
        axes = {"kv_GBPH": 1, "key_GBPJ": 1, "half_YGBMH": 2, "key_half_YGBMJ": 2}
        return Pool(**{field: over(axis, *(getattr(p, field) for p in these)) for field, axis in axes.items()})

    return Cache(
        **{name: each(name, 0) for name in ("length_B", "decoder_from_B", "ngram_BE")},
        **{name: each(name, 1) for name in ("window_LBWH", "draft_window_LBWH")},
        pools={name: pool(name) for name in cache.pools},
        max_length=cache.max_length,
    )


def take_row(cache: Cache, row: jax.Array | int) -> Cache:
    """A cache of one row."""
    return map_rows(lambda axis, a: lax.dynamic_slice_in_dim(a, row, 1, axis), cache)


def put_row(cache: Cache, row: jax.Array | int, one: Cache) -> Cache:
    """`cache` with a row replaced by a cache of one row."""
    return map_rows(lambda axis, a, b: lax.dynamic_update_slice_in_dim(a, b, row, axis), cache, one)


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
    config: ModelConfig, batch: int, max_length: int, storage: Storage, *, one_group: bool = False
) -> dict[str, Pool]:
    """Empty pools. `one_group` keeps a single pool per ratio, enough where no later call reads it."""
    pools = {}
    # What a TPU fetches is 512 bytes, which hold the scales of 128 index keys: there capacities are multiples of that.
    units = storage == "packed" and jax.default_backend() == "tpu" and _in_units(config)
    for ratio in config.plan.ratios:
        groups = 1 if one_group else len(config.plan.pool_layers(ratio))
        entries = pool_capacity(config, ratio, max_length)
        entries = -(-entries // stored.LANES) * stored.LANES if units else entries
        shape = (groups, batch, entries)
        keyed, key = config.plan.has_keys(ratio), None
        if storage == "packed":
            kv: Entries = stored.empty((*shape, config.head_dim), formats.pool_format(config), units=units)
            key = stored.empty((*shape, config.index_head_dim), formats.INDEX, units=units) if keyed else None
        else:
            kv = stored.in_rows(jnp.zeros((*shape, config.head_dim), _NUMBERS[storage]))
            key = jnp.zeros((*shape, config.index_head_dim), _NUMBERS[storage]) if keyed else None
        pools[pool_name(ratio)] = Pool(
            kv,
            key,
            open_groups(config, ratio, groups, batch, config.head_dim) if ratio > 1 else None,
            open_groups(config, ratio, groups, batch, config.index_head_dim) if own_keys(config, ratio) else None,
        )
    return pools


def open_groups(config: ModelConfig, ratio: int, groups: int, batch: int, width: int) -> jax.Array:
    """What waits in open groups before there are tokens: `half_YGBMH` of a pool, or with the index width `key_half_YGBMJ`."""
    halves_BMW = empty_half(batch, width, ratio, overlaps(config, ratio))
    return jnp.repeat(jnp.stack(halves_BMW)[:, None], groups, axis=1)


def overlaps(config: ModelConfig, ratio: int) -> bool:
    """Whether entries pool over the group before theirs too."""
    return config.generation.own_pools and ratio == OVERLAPPING


def own_keys(config: ModelConfig, ratio: int) -> bool:
    """Whether pools of this ratio get their index keys from a compressor of their own."""
    return config.generation.own_key_compressor and config.plan.has_keys(ratio)


def _in_units(config: ModelConfig) -> bool:
    """Whether codes and scales of all entries divide the 512 bytes that a TPU fetches at once."""
    if formats.pool_format(config).tail:
        return False
    widths = ((config.head_dim, formats.MAIN), (config.index_head_dim, formats.INDEX))
    return all(stored.UNIT % size == 0 for width, fmt in widths for size in (width // 2, width // fmt.group))


def init_cache(
    config: ModelConfig, batch: int, max_length: int, storage: Storage | None = None, *, draft: bool = False
) -> Cache:
    """An empty cache for `batch` sequences of up to `max_length` tokens.

    storage: "bf16" (exact for models that run with their roundings: every rounded value is a bf16 number), "packed" (the same
        numbers as the fp8 and fp4 codes and scales they were rounded to, 3.5 to 4 times smaller; for models with roundings
        only), or "f32". By default bf16 on accelerators and f32 on CPUs, whose compiler widens a whole bf16 array for every
        few rows it reads.
    draft: also keep the draft head's windows, needed by `draft`.
    Raises ValueError for sizes below 1, a length beyond max_position_embeddings, widths that packing does not divide, or an
    unknown storage.
    """
    if storage is None:
        storage = "f32" if jax.default_backend() == "cpu" else "bf16"
    if storage not in get_args(Storage):
        raise ValueError(f"{storage=} must be one of {get_args(Storage)}")
    if not isinstance(config, ModelConfig):
        raise ValueError(f"init_cache takes a ModelConfig (model.config), found {type(config).__name__}")
    batch, max_length = positive("batch", batch), positive("max_length", max_length)
    if max_length > config.max_position_embeddings:
        raise ValueError(f"{max_length=} exceeds max_position_embeddings={config.max_position_embeddings}")
    if draft and not config.num_nextn_predict_layers:
        raise ValueError("draft=True, but the configuration has num_nextn_predict_layers=0: there is no draft head")
    if storage == "packed":
        _check_packable(config)

    def windows(layers: int) -> Entries:
        shape = (layers, batch, config.sliding_window, config.head_dim)
        return (
            stored.empty(shape, formats.window_format(config))
            if storage == "packed"
            else jnp.zeros(shape, _NUMBERS[storage])
        )

    return Cache(
        length_B=jnp.zeros(batch, jnp.int32),
        decoder_from_B=jnp.zeros(batch, jnp.int32),
        ngram_BE=jnp.full((batch, max(config.engram_max_ngram_size - 1, 0)), -1, jnp.int32),
        window_LBWH=windows(config.num_hidden_layers),
        draft_window_LBWH=windows(config.num_nextn_predict_layers) if draft else None,
        pools=make_pools(config, batch, max_length, storage),
        max_length=max_length,
    ).with_mirror(np.zeros(batch, np.int64))


@dataclasses.dataclass(frozen=True)
class CacheBytes:
    """What a cache of one sequence takes, measured on its arrays."""

    per_token: float  # of every further token
    per_sequence: int  # of the sequence itself: windows, open groups, n-gram history, lengths
    draft_windows: int  # of those, the draft head's


def measure_cache(config: ModelConfig, storage: Storage = "packed") -> CacheBytes:
    """Bytes of `init_cache`'s arrays, none of which is made."""
    draft = config.num_nextn_predict_layers > 0
    whole = math.lcm(*config.plan.ratios, 1) * max(config.candidate_block_size if config.has_candidates else 1, 1)
    lengths = whole, 2 * whole  # whole groups in whole candidate blocks, so that no capacity is rounded up
    long = dataclasses.replace(config, max_position_embeddings=max(2 * whole, config.max_position_embeddings))
    caches = [jax.eval_shape(lambda n=n: init_cache(long, 1, n, storage, draft=draft)) for n in lengths]
    small, large = (stored.nbytes(cache) for cache in caches)
    return CacheBytes(
        per_token=(large - small) / whole,
        per_sequence=2 * small - large,
        draft_windows=stored.nbytes(caches[0].draft_window_LBWH) if draft else 0,
    )


def _check_packable(config: ModelConfig) -> None:
    for name, width, fmt in rounded_widths(config):
        if (width - fmt.tail) % fmt.group:
            raise ValueError(
                f"storage='packed' keeps a scale per {fmt.group} channels, which {name}={width}"
                + (f" without its {fmt.tail} rotated ones" if fmt.tail else "")
                + " is no multiple of; use storage='bf16'"
            )


def rounded_widths(config: ModelConfig) -> list[tuple[str, int, formats.Format]]:
    """(name, width, format) of everything that is rounded in groups of channels."""
    window, pool = formats.window_format(config), formats.pool_format(config)
    keys = [("index_head_dim", config.index_head_dim, formats.INDEX)] if config.plan.index_layers else []
    return [("head_dim", config.head_dim, max(window, pool, key=lambda f: f.group)), *keys]


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
    decoder_first_BT: jax.Array  # the same in the decoder, which may not have seen every token
    image_BT: jax.Array | None
    rope_window: tuple[jax.Array, jax.Array]  # cos, sin [B, T, R/2] of window-only layers
    rope_pool: tuple[jax.Array, jax.Array]  # of layers that read a pool
    tokens_BT: jax.Array | None = None  # ids, where layers choose experts by them
    origin_BT: jax.Array | None = None  # where in its row a token's document begins; None: every row is one document
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


def window_history(window_LBWH: Entries, layer: jax.Array | int, start_B: jax.Array) -> Entries:
    """One layer's ring in order of position: row i holds position start - W + i (rows before position 0 mean nothing).

    [B, W, H] of a plain ring, [1, B, W, H] of a packed one.
    """
    batch, width = stored.shape(window_LBWH)[1:3]
    slot_BW = (start_B[:, None] + jnp.arange(width)) % width

    def turn(a: jax.Array) -> jax.Array:
        return a[layer, jnp.arange(batch)[:, None], slot_BW]

    if isinstance(window_LBWH, Packed):
        return jax.tree.map(lambda a: turn(a)[None], window_LBWH)
    return turn(window_LBWH)


def no_history(batch: int, width: int, dtype: jnp.dtype) -> jax.Array:
    """The history of a call without a cache, [B, 0, H]."""
    return jnp.zeros((batch, 0, width), dtype)


def join_window(history_BWH: Entries, kv_BTH: jax.Array) -> Entries:
    """History and this call's rows, as `sparse_attention` reads them."""
    if isinstance(history_BWH, Packed):
        new = stored.pack(kv_BTH[None], history_BWH.fmt)
        return jax.tree.map(lambda a, b: jnp.concatenate([a, b], axis=2), history_BWH, new)
    return jnp.concatenate([history_BWH, kv_BTH.astype(history_BWH.dtype)], axis=1)


def window_tail(rows_BTH: jax.Array, count_B: jax.Array, width: int) -> jax.Array:
    """The new rows that may stay in the ring: all T if they fit, else the last `width` real ones."""
    tokens = rows_BTH.shape[1]
    if tokens <= width:
        return rows_BTH
    return jnp.take_along_axis(rows_BTH, _tail_index(count_B, width)[..., None].clip(0, tokens - 1), axis=1)


def write_windows(window_LBWH: Entries, tail_LBRH: jax.Array, step: Step) -> Entries:
    """Put the tail rows of the first L layers into their slots; rows that are not real go nowhere."""
    width, (layers, _, kept), tokens = stored.shape(window_LBWH)[2], tail_LBRH.shape[:3], step.position_BT.shape[1]
    if tokens <= width:
        index_BR = jnp.broadcast_to(jnp.arange(tokens), step.position_BT.shape)
    else:
        index_BR = _tail_index(step.count_B, kept)
    real = (index_BR >= 0) & (index_BR < step.count_B[:, None])
    slot_BR = jnp.where(real, (step.start_B[:, None] + index_BR) % width, width)
    return stored.write(window_LBWH, slice(0, layers), slot_BR, tail_LBRH)


def _tail_index(count_B: jax.Array, width: int) -> jax.Array:
    """Which of the call's tokens are its last `width` real ones (negative: there is none)."""
    return count_B[:, None] - width + jnp.arange(width)
