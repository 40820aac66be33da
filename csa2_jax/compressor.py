"""The compressor of a layer that makes a pool: m tokens become one latent, the latent becomes a pool entry and an index key.

    m > 1: latent = norm(sum over the group of softmax(Z) * C),  C = wkv x, Z = wgate x, all f32
    m = 1: latent = norm(wkv x), in the compute dtype
    index key = fp4(rope(k_norm(wk latent))),   pool entry = fp4(rope(latent))

Entry j sits at position j * m, its group's first token, and is visible to the query at t if (j + 1) m <= t + 1.

DeepSeek-V4 adds a learned bias by slot to Z. Its CSA layers (m = 4) have two series of C and Z, one of them for the entry of the
next group, and pool their index keys from the tokens by a second compressor, of the index width, whose result is turned by a
Hadamard matrix before it is rounded. Its HCA layers have no keys. Entries are fp8 there but for the rotated channels.
Sources: arXiv 2609.19969 (CSA2 compressor); DeepSeek-V4.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from csa2_jax import formats, rope
from csa2_jax.config import ModelConfig
from csa2_jax.layers import Linear, ParamFactory, RMSNorm
from csa2_jax.numerics import Numerics, einsum, hadamard
from csa2_jax.state import Pool, Step, overlaps, own_keys
from kernels_pallas import Compressed, compress_entries
from kernels_pallas import storage as stored
from kernels_pallas.storage import Entries, Packed


class Pooling(nnx.Module):
    """Groups of m tokens to entries of `width` channels: wkv, wgate (m > 1), bias by slot (V4), norm."""

    def __init__(
        self, config: ModelConfig, ratio: int, width: int, make: ParamFactory, *, stack: tuple[int, ...]
    ) -> None:
        self.ratio, self.overlap = ratio, overlaps(config, ratio)
        rows = width * (2 if self.overlap else 1)
        storage = "f32" if ratio > 1 else "plain"
        self.wkv = Linear(rows, config.hidden_size, make, stack=stack, storage=storage)
        self.wgate = Linear(rows, config.hidden_size, make, stack=stack, storage=storage) if ratio > 1 else None
        self.norm = RMSNorm(width, make, stack=stack)
        f32 = jnp.dtype(jnp.float32)
        self.bias = make.full((*stack, ratio, rows), 0.0, f32) if config.generation.slot_bias else nnx.data(None)

    def rows(self, x_BTD: jax.Array, numerics: Numerics) -> tuple[jax.Array, jax.Array | None]:
        """C and Z of this call's tokens without bias, f32 [B, T, W]; at m = 1 C in the compute dtype and no Z."""
        if self.wgate is None:
            return self.wkv(x_BTD, numerics), None
        x = x_BTD.astype(jnp.float32)
        pair = (self.wkv, self.wgate)
        c_BTW, z_BTW = (w.adapted(einsum("btd,wd->btw", x, w.weight[...]), x, numerics) for w in pair)
        return c_BTW, z_BTW

    def pooled(
        self,
        x_BTD: jax.Array,
        half_YBMW: jax.Array | None,
        step: Step,
        rotation: rope.Table,
        config: ModelConfig,
        numerics: Numerics,
        **storage: Any,
    ) -> Compressed:
        """Latents and rotated entries of the groups of this call, and what waits after it; `storage`: of `compress_entries`."""
        c_half, z_half = (None, None) if half_YBMW is None else half_YBMW
        c_BTW, z_BTW = self.rows(x_BTD, numerics)
        if self.overlap and step.origin_BT is not None and z_BTW is not None:
            c_BTW, z_BTW = _end_with_documents(c_BTW, z_BTW, step.origin_BT, self.ratio)
        return compress_entries(
            c_BTW,
            z_BTW,
            c_half,
            z_half,
            step.start_B % self.ratio,
            step.count_B,
            self.norm.weight[...],
            rotation,
            ratio=self.ratio,
            eps=config.rms_norm_eps,
            dtype=numerics.dtype,
            bias_MH=None if self.bias is None else self.bias[...],
            overlap=self.overlap,
            **storage,
            **numerics.kernels,
        )


class Compressor(Pooling):
    """What a layer that makes a pool has on top of others: its pooling, and what makes index keys.

    Keys come from the latent by wk and k_norm, in V4 from a pooling of their own, `keys`.
    """

    def __init__(self, config: ModelConfig, ratio: int, make: ParamFactory, *, stack: tuple[int, ...]) -> None:
        super().__init__(config, ratio, config.head_dim, make, stack=stack)
        own, projected = own_keys(config, ratio), not config.generation.own_key_compressor
        width = config.index_head_dim
        self.wk = Linear(width, config.head_dim, make, stack=stack) if projected else nnx.data(None)
        self.k_norm = RMSNorm(width, make, stack=stack) if projected else nnx.data(None)
        self.keys = Pooling(config, ratio, width, make, stack=stack) if own else nnx.data(None)

    def __call__(
        self,
        x_BTD: jax.Array,
        pool: Pool,
        group: jax.Array | int,
        step: Step,
        config: ModelConfig,
        numerics: Numerics,
    ) -> tuple[Pool, jax.Array]:
        """Append this call's completed entries to pool `group`; returns the pool and the latents [B, E, H].

        Of the E = (T + m - 1) // m latents the first (phase + count) // m of each row are complete; only those are written.
        """
        m = self.ratio
        phase_B, first_B = step.start_B % m, step.start_B // m
        entry_BE = first_B[:, None] + jnp.arange(-(-x_BTD.shape[1] // m))
        # Rows that several documents share begin each at a whole group, and count its positions from there.
        position_BE = entry_BE * m if step.origin_BT is None else step.position_BT[:, ::m]
        rotation = rope.table(position_BE, rope.layer_frequencies(config, reads_pool=True))
        half_YBMH = None if pool.half_YGBMH is None else pool.half_YGBMH[:, group]
        made = self.pooled(x_BTD, half_YBMH, step, rotation, config, numerics, **self._storage(pool, config, numerics))
        kv_BEH = made.entries_BEH
        if not isinstance(pool.kv_GBPH, Packed) and formats.pool_format(config) != formats.MAIN:
            assert not isinstance(kv_BEH, Packed)
            kv_BEH = numerics.fake(kv_BEH, formats.pool_format(config))
        key_BEJ, key_halves = self._keys(x_BTD, made.latent_BEH, pool, group, step, rotation, config, numerics)
        if not step.cached:  # every row starts a pool of its own: entry e sits in slot e, and gradients flow
            key = None if key_BEJ is None or pool.key_GBPJ is None else _fill(pool.key_GBPJ, key_BEJ)
            return dataclasses.replace(pool, kv_GBPH=_fill(pool.kv_GBPH, kv_BEH), key_GBPJ=key), made.latent_BEH
        complete_B = (phase_B + step.count_B) // m
        written = jnp.arange(entry_BE.shape[1]) < complete_B[:, None]
        slot_BE = jnp.where(written, entry_BE, stored.shape(pool.kv_GBPH)[2])  # out of range: dropped
        pool = Pool(
            kv_GBPH=stored.write(pool.kv_GBPH, group, slot_BE, kv_BEH),
            key_GBPJ=None
            if key_BEJ is None or pool.key_GBPJ is None
            else stored.write(pool.key_GBPJ, group, slot_BE, key_BEJ),
            half_YGBMH=_put(pool.half_YGBMH, group, (made.c_half_BMW, made.z_half_BMW)),
            key_half_YGBMJ=_put(pool.key_half_YGBMJ, group, key_halves),
        )
        return pool, made.latent_BEH

    def _storage(self, pool: Pool, config: ModelConfig, numerics: Numerics) -> dict[str, Any]:
        """How `compress_entries` leaves main entries: as stored, or where the format is not its own, as numbers."""
        packed = isinstance(pool.kv_GBPH, Packed)
        if formats.pool_format(config) != formats.MAIN:
            return {"storage": "plain", "entry_dtype": numerics.dtype}
        kind = "packed" if packed else "rounded" if numerics.fake_quant else "plain"
        return {"storage": kind, "entry_dtype": None if packed else pool.kv_GBPH.dtype}  # type: ignore[union-attr]

    def _keys(
        self,
        x_BTD: jax.Array,
        latent_BEH: jax.Array,
        pool: Pool,
        group: jax.Array | int,
        step: Step,
        rotation: rope.Table,
        config: ModelConfig,
        numerics: Numerics,
    ) -> tuple[jax.Array | None, tuple[jax.Array | None, jax.Array | None]]:
        """Index keys [B, E, J] of this call's groups, and what their own compressor leaves waiting.

        Keys serve the selection alone: their gradient, from the index loss, ends at the weights that make them.
        """
        halves = (None, None)
        if self.wk is not None and self.k_norm is not None:
            key_BEJ = self.wk(lax.stop_gradient(latent_BEH), numerics)
            key_BEJ = rope.rotate(self.k_norm(key_BEJ, config.rms_norm_eps, numerics), rotation)
        elif self.keys is not None:
            half_YBMJ = None if pool.key_half_YGBMJ is None else pool.key_half_YGBMJ[:, group]
            plain = {"storage": "plain", "entry_dtype": numerics.dtype}
            made = self.keys.pooled(lax.stop_gradient(x_BTD), half_YBMJ, step, rotation, config, numerics, **plain)
            assert not isinstance(made.entries_BEH, Packed)
            key_BEJ, halves = made.entries_BEH, (made.c_half_BMW, made.z_half_BMW)
        else:
            return None, halves
        if config.generation.hadamard:
            key_BEJ = hadamard(key_BEJ)
        if not isinstance(pool.key_GBPJ, Packed):  # packed storage rounds by itself
            key_BEJ = numerics.fake(key_BEJ, formats.INDEX)
        return key_BEJ, halves


def _end_with_documents(
    c_BTW: jax.Array, z_BTW: jax.Array, origin_BT: jax.Array, ratio: int
) -> tuple[jax.Array, jax.Array]:
    """C and Z with nothing for the next group's entry where that group begins another document."""
    tokens = origin_BT.shape[1]
    column = jnp.arange(tokens)
    begins_BT = jnp.pad(origin_BT == column, ((0, 0), (0, ratio)))
    last_BT1 = begins_BT[:, (column // ratio + 1) * ratio, None]
    half = c_BTW.shape[2] // 2
    c_BTH, z_BTH = jnp.where(last_BT1, 0.0, c_BTW[..., :half]), jnp.where(last_BT1, -jnp.inf, z_BTW[..., :half])
    return jnp.concatenate([c_BTH, c_BTW[..., half:]], axis=-1), jnp.concatenate([z_BTH, z_BTW[..., half:]], axis=-1)


def _put(
    half_YGBMW: jax.Array | None, group: jax.Array | int, halves: tuple[jax.Array | None, jax.Array | None]
) -> jax.Array | None:
    """One pool's waiting rows into the stack of all."""
    if half_YGBMW is None or halves[0] is None:
        return half_YGBMW
    return half_YGBMW.at[:, group].set(jnp.stack(halves))  # type: ignore[arg-type]


def _fill(array_GBPH: Entries, rows_BEH: Entries) -> jax.Array:
    """Rows at the front of group 0; pools that live for one call are plain."""
    assert not isinstance(array_GBPH, Packed)
    assert not isinstance(rows_BEH, Packed)
    kept = min(rows_BEH.shape[1], array_GBPH.shape[2])
    rows = rows_BEH[:, :kept].astype(array_GBPH.dtype)
    return array_GBPH.at[0, :, :kept].set(rows.reshape(*rows.shape[:2], *array_GBPH.shape[3:]))
