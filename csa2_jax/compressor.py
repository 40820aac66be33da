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

from csa2_jax import formats, rope
from csa2_jax.config import ModelConfig
from csa2_jax.layers import Linear, ParamFactory, RMSNorm
from csa2_jax.numerics import Numerics, einsum
from csa2_jax.state import Pool, Step, write_rows
from kernels_pallas import compress


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
        if m == 1:
            raw = self.wkv(x_BTD, numerics)
            c_half = z_half = None
        else:
            assert self.wgate is not None
            assert pool.c_half_GBMH is not None
            assert pool.z_half_GBMH is not None
            x = x_BTD.astype(jnp.float32)
            raw, c_half, z_half = compress(
                einsum("btd,hd->bth", x, self.wkv.weight[...]),
                einsum("btd,hd->bth", x, self.wgate.weight[...]),
                pool.c_half_GBMH[group],
                pool.z_half_GBMH[group],
                phase_B,
                step.count_B,
                ratio=m,
                **numerics.kernels,
            )
            c_half = pool.c_half_GBMH.at[group].set(c_half)
            z_half = pool.z_half_GBMH.at[group].set(z_half)
            raw = numerics.cast(raw)
        latent_BEH = self.norm(raw, config.rms_norm_eps, numerics)
        entry_BE = first_B[:, None] + jnp.arange(latent_BEH.shape[1])
        rotation = rope.table(entry_BE * m, rope.layer_frequencies(config, reads_pool=True))
        key_BEJ = self.k_norm(self.wk(latent_BEH, numerics), config.rms_norm_eps, numerics)
        key_BEJ = numerics.fake(rope.rotate(key_BEJ, rotation), formats.INDEX)
        kv_BEH = numerics.fake(rope.rotate(latent_BEH, rotation), formats.MAIN)
        if not step.cached:  # every row starts a pool of its own: entry e sits in slot e, and gradients flow
            pool = dataclasses.replace(
                pool, kv_GBPH=_fill(pool.kv_GBPH, kv_BEH), key_GBPJ=_fill(pool.key_GBPJ, key_BEJ)
            )
            return pool, latent_BEH
        complete_B = (phase_B + step.count_B) // m
        capacity = pool.kv_GBPH.shape[2]
        written = jnp.arange(latent_BEH.shape[1]) < complete_B[:, None]
        slot_BE = jnp.where(written, entry_BE, capacity)  # out of range: dropped
        pool = Pool(
            kv_GBPH=write_rows(pool.kv_GBPH, group, slot_BE, kv_BEH),
            key_GBPJ=write_rows(pool.key_GBPJ, group, slot_BE, key_BEJ),
            c_half_GBMH=c_half,
            z_half_GBMH=z_half,
        )
        return pool, latent_BEH


def _fill(array_GBPH: jax.Array, rows_BEH: jax.Array) -> jax.Array:
    """Rows at the front of group 0."""
    kept = min(rows_BEH.shape[1], array_GBPH.shape[2])
    rows = rows_BEH[:, :kept].astype(array_GBPH.dtype)
    return array_GBPH.at[0, :, :kept].set(rows.reshape(*rows.shape[:2], *array_GBPH.shape[3:]))
