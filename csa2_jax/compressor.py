"""The compressor of a FULL layer: m tokens become one latent, the latent becomes a pool entry and an index key.

    m > 1: latent = norm(sum over the group of softmax(Z) * C),  C = wkv x, Z = wgate x, all f32
    m = 1: latent = norm(wkv x), in the compute dtype
    index key = fp4(rope(k_norm(wk latent))),   pool entry = fp4(rope(latent))

Entry j sits at position j * m, its group's first token, and is visible to the query at t if (j + 1) m <= t + 1.
Source: arXiv 2609.19969 (CSA2 compressor).
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from csa2_jax import formats, rope
from csa2_jax.config import ModelConfig
from csa2_jax.layers import Linear, ParamFactory, RMSNorm
from csa2_jax.numerics import Numerics, einsum
from csa2_jax.state import Pool, Step
from kernels_pallas import compress_entries
from kernels_pallas import storage as stored
from kernels_pallas.storage import Entries, Packed


class Compressor(nnx.Module):
    """What a FULL layer has on top of a layer that reuses: wkv, wgate (m > 1), norm, and the index key's wk, k_norm."""

    def __init__(self, config: ModelConfig, ratio: int, make: ParamFactory, *, stack: tuple[int, ...]) -> None:
        self.ratio = ratio
        storage = "f32" if ratio > 1 else "plain"
        self.wkv = Linear(config.head_dim, config.hidden_size, make, stack=stack, storage=storage)
        self.wgate = (
            Linear(config.head_dim, config.hidden_size, make, stack=stack, storage=storage) if ratio > 1 else None
        )
        self.norm = RMSNorm(config.head_dim, make, stack=stack)
        self.wk = Linear(config.index_head_dim, config.head_dim, make, stack=stack)
        self.k_norm = RMSNorm(config.index_head_dim, make, stack=stack)

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
        c_BTH, z_BTH = self.rows(x_BTD, numerics)
        c_half = z_half = None
        if pool.half_YGBMH is not None:
            c_half, z_half = pool.half_YGBMH[0, group], pool.half_YGBMH[1, group]
        entry_dtype = None if isinstance(pool.kv_GBPH, Packed) else pool.kv_GBPH.dtype
        entry_BE = first_B[:, None] + jnp.arange(-(-x_BTD.shape[1] // m))
        # Rows that several documents share begin each at a whole group, and count its positions from there.
        position_BE = entry_BE * m if step.origin_BT is None else step.position_BT[:, ::m]
        rotation = rope.table(position_BE, rope.layer_frequencies(config, reads_pool=True))
        latent_BEH, kv_BEH, c_half, z_half = compress_entries(
            c_BTH,
            z_BTH,
            c_half,
            z_half,
            phase_B,
            step.count_B,
            self.norm.weight[...],
            rotation,
            ratio=m,
            eps=config.rms_norm_eps,
            dtype=numerics.dtype,
            storage="packed" if entry_dtype is None else "rounded" if numerics.fake_quant else "plain",
            entry_dtype=entry_dtype,
            **numerics.kernels,
        )
        # Keys serve the selection alone: their gradient, from the index loss, ends at wk and k_norm.
        key_BEJ = self.wk(lax.stop_gradient(latent_BEH), numerics)
        key_BEJ = rope.rotate(self.k_norm(key_BEJ, config.rms_norm_eps, numerics), rotation)
        if not isinstance(pool.key_GBPJ, Packed):  # packed storage rounds by itself
            key_BEJ = numerics.fake(key_BEJ, formats.INDEX)
        if not step.cached:  # every row starts a pool of its own: entry e sits in slot e, and gradients flow
            pool = dataclasses.replace(
                pool, kv_GBPH=_fill(pool.kv_GBPH, kv_BEH), key_GBPJ=_fill(pool.key_GBPJ, key_BEJ)
            )
            return pool, latent_BEH
        complete_B = (phase_B + step.count_B) // m
        written = jnp.arange(latent_BEH.shape[1]) < complete_B[:, None]
        slot_BE = jnp.where(written, entry_BE, stored.shape(pool.kv_GBPH)[2])  # out of range: dropped
        half_YGBMH = pool.half_YGBMH
        if half_YGBMH is not None and c_half is not None and z_half is not None:
            half_YGBMH = half_YGBMH.at[:, group].set(jnp.stack([c_half, z_half]))
        pool = Pool(
            kv_GBPH=stored.write(pool.kv_GBPH, group, slot_BE, kv_BEH),
            key_GBPJ=stored.write(pool.key_GBPJ, group, slot_BE, key_BEJ),
            half_YGBMH=half_YGBMH,
        )
        return pool, latent_BEH

    def rows(self, x_BTD: jax.Array, numerics: Numerics) -> tuple[jax.Array, jax.Array | None]:
        """C and Z of this call's tokens, f32 [B, T, H]; at m = 1 C in the compute dtype and no Z."""
        if self.wgate is None:
            return self.wkv(x_BTD, numerics), None
        x = x_BTD.astype(jnp.float32)
        pair = (self.wkv, self.wgate)
        c_BTH, z_BTH = (w.adapted(einsum("btd,hd->bth", x, w.weight[...]), x, numerics) for w in pair)
        return c_BTH, z_BTH


def _fill(array_GBPH: Entries, rows_BEH: Entries) -> jax.Array:
    """Rows at the front of group 0; pools that live for one call are plain."""
    assert not isinstance(array_GBPH, Packed)
    assert not isinstance(rows_BEH, Packed)
    kept = min(rows_BEH.shape[1], array_GBPH.shape[2])
    rows = rows_BEH[:, :kept].astype(array_GBPH.dtype)
    return array_GBPH.at[0, :, :kept].set(rows.reshape(*rows.shape[:2], *array_GBPH.shape[3:]))
