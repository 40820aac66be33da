"""One layer's attention: query, window KV, the joint sparse read and the grouped output projection.

    qr = q_norm(wq_a x),  q = rope(wq_b qr) [N, H],  kv = fp8(rope(kv_norm(wkv x))) [H], one head, keys = values
    o = softmax over {window rows} + {selected pool entries} with a sink per head,  rotated back by the query's position
    y = wo_b concat_g(wo_a[g] o_g),  G groups of consecutive heads

What a layer makes on top (`Compressor`, `Indexer`) is passed in by the block. V4's query heads are normalised, and its HCA layers
read all of their pool that is complete. Sources: arXiv 2609.19969 (CSA2); DeepSeek-V4.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from csa2_jax import formats, rope
from csa2_jax.compressor import Compressor
from csa2_jax.config import ModelConfig
from csa2_jax.indexer import Indexer, visible_entries
from csa2_jax.layers import Linear, ParamFactory, RMSNorm, inverse_rms
from csa2_jax.numerics import Numerics, einsum
from csa2_jax.plan import Mode
from csa2_jax.state import Pool, Step, join_window
from kernels_pallas import sparse_attention
from kernels_pallas.storage import Entries, Packed


@dataclasses.dataclass(frozen=True)
class Role:
    """What an attention call makes and reads besides its window: static mode, traced places."""

    mode: Mode
    ratio: int = 0
    group: jax.Array | int = 0  # pool slot
    compressor: Compressor | None = None  # FULL, CSA, HCA
    indexer: Indexer | None = None  # FULL, REINDEX, CSA
    makes_candidates: bool = False
    reads_candidates: bool = False
    in_decoder: bool = False


@dataclasses.dataclass(frozen=True)
class Shared:
    """The pool, selection and candidates a layer reads, and returns replaced by those it made."""

    pool: Pool | None
    selection_BTK: jax.Array
    candidates_BTC: jax.Array


class Attention(nnx.Module):
    """The parameters every layer has, whatever its mode."""

    def __init__(self, config: ModelConfig, make: ParamFactory, *, stack: tuple[int, ...] = ()) -> None:
        n, h, d, r = config.num_attention_heads, config.head_dim, config.hidden_size, config.q_lora_rank
        groups, rank = config.o_groups, config.o_lora_rank
        self.wq_a = Linear(r, d, make, stack=stack, storage="fp8")
        self.q_norm = RMSNorm(r, make, stack=stack)
        self.wq_b = Linear(n * h, r, make, stack=stack, storage="fp8")
        self.wkv = Linear(h, d, make, stack=stack, storage="fp8")
        self.kv_norm = RMSNorm(h, make, stack=stack)
        self.attn_sink = make.full((*stack, n), 0.0, jnp.dtype(jnp.float32))
        self.wo_a = Linear(groups * rank, n * h // groups, make, stack=stack, storage="fp8")
        self.wo_b = Linear(d, groups * rank, make, stack=stack, storage="fp8")

    def __call__(
        self,
        x_BTD: jax.Array,
        history_BWH: Entries,
        role: Role,
        shared: Shared,
        step: Step,
        config: ModelConfig,
        numerics: Numerics,
        capture: frozenset[str],
    ) -> tuple[jax.Array, jax.Array, Shared, dict[str, jax.Array]]:
        """Attend with the T tokens of this call.

        Args:
            x_BTD: attention input, collapsed and normalised.
            history_BWH: the window before this call in order of position ([B, 0, H] without a cache, [1, B, W, H] packed).

        Returns:
            y_BTD, the new window rows [B, T, H] (as stored), the shared state with what this layer made, and captures.
        """
        seen: dict[str, jax.Array] = {}
        rotation = step.rope_window if role.mode is Mode.SWA else step.rope_pool
        if role.compressor is not None and shared.pool is not None:
            pool, latent_BEH = role.compressor(x_BTD, shared.pool, role.group, step, config, numerics)
            shared = dataclasses.replace(shared, pool=pool)
            seen["latent"] = latent_BEH
            if "group_rows" in capture and role.ratio > 1:
                seen["group_rows"] = jnp.stack(role.compressor.rows(x_BTD, numerics))  # type: ignore[arg-type]
            if "key_group_rows" in capture and role.compressor.keys is not None:
                seen["key_group_rows"] = jnp.stack(role.compressor.keys.rows(x_BTD, numerics))  # type: ignore[arg-type]
        qr_BTR = self.query_input(x_BTD, config, numerics)
        if role.indexer is not None and shared.pool is not None and shared.pool.key_GBPJ is not None:
            selection_BTK, made, index_seen = role.indexer(
                qr_BTR,
                x_BTD,
                shared.pool.key_GBPJ,
                role.group,
                role.ratio,
                shared.candidates_BTC if role.reads_candidates else None,
                role.makes_candidates,
                step,
                config,
                numerics,
                capture,
            )
            seen |= index_seen
            selection_BTK = checkpoint_name(selection_BTK, "selection")
            shared = dataclasses.replace(shared, selection_BTK=selection_BTK)
            seen["selections"] = selection_BTK
            if made is not None:
                made = checkpoint_name(made, "candidates")
                shared = dataclasses.replace(shared, candidates_BTC=_widen(made, shared.candidates_BTC.shape))
                seen["candidates"] = made
        q_BTNH = self.query(qr_BTR, rotation, config, numerics)
        kv_BTH = self.window_kv(x_BTD, rotation, config, numerics)
        if not isinstance(history_BWH, Packed):
            kv_BTH = kv_BTH.astype(history_BWH.dtype)
        reads_pool = role.mode is not Mode.SWA
        rows_BSH = join_window(history_BWH, kv_BTH)
        first_BT = step.decoder_first_BT if role.in_decoder else step.first_BT
        window = {"window": config.sliding_window, "scale": config.head_dim**-0.5, **numerics.kernels}
        pool_GBPH = shared.pool.kv_GBPH if reads_pool and shared.pool is not None else None
        span, selection_BTK = {}, None
        if role.mode is Mode.HCA:
            end_BT, begin_BT = visible_entries(step, role.ratio)
            span["span_BT"] = (jnp.zeros_like(end_BT) if begin_BT is None else begin_BT, end_BT)
        elif pool_GBPH is not None:
            selection_BTK = shared.selection_BTK
        o_BTNH, lse_BTN = sparse_attention(
            q_BTNH, rows_BSH, first_BT, self.attn_sink[...], pool_GBPH, role.group, selection_BTK, **span, **window
        )
        if "window_lse" in capture:  # what the pool's part of a softmax is held against, whichever entries that reads
            _, seen["window_lse"] = sparse_attention(q_BTNH, rows_BSH, first_BT, self.attn_sink[...], **window)
        y_BTD = self.output(o_BTNH, rotation, config, numerics)
        seen.update(attn_in=x_BTD, attn_q=q_BTNH, attn_lse=lse_BTN, attn_o=o_BTNH, attn_out=y_BTD, window_kv=kv_BTH)
        return y_BTD, kv_BTH, shared, {name: value for name, value in seen.items() if name in capture}

    def query_input(self, x_BTD: jax.Array, config: ModelConfig, numerics: Numerics) -> jax.Array:
        """qr: the normalised low-rank query input, shared by the main and the index query."""
        return self.q_norm(self.wq_a(x_BTD, numerics), config.rms_norm_eps, numerics)

    def query(self, qr_BTR: jax.Array, rotation: rope.Table, config: ModelConfig, numerics: Numerics) -> jax.Array:
        """Rotated queries [B, T, N, H], in V4 each head normalised."""
        q = self.wq_b(qr_BTR, numerics).reshape(*qr_BTR.shape[:2], config.num_attention_heads, config.head_dim)
        if config.generation.query_norm:
            q = numerics.cast(q.astype(jnp.float32) * inverse_rms(q.astype(jnp.float32), config.rms_norm_eps))
        return rope.rotate(q, rope.over_heads(rotation))

    def window_kv(self, x_BTD: jax.Array, rotation: rope.Table, config: ModelConfig, numerics: Numerics) -> jax.Array:
        """Rotated, rounded window rows [B, T, H]."""
        return window_kv(self.wkv, self.kv_norm, x_BTD, rotation, config, numerics)

    def output(self, o_BTNH: jax.Array, rotation: rope.Table, config: ModelConfig, numerics: Numerics) -> jax.Array:
        """Inverse rotation, then the grouped low-rank output projection [B, T, D]."""
        o = rope.rotate(o_BTNH, rope.over_heads(rotation), inverse=True)
        o_BTGK = o.reshape(*o.shape[:2], config.o_groups, -1)
        # Stored fp8, used as plain numbers: its operand is not rounded.
        wo_a = self.wo_a.plain(numerics.dtype).reshape(config.o_groups, config.o_lora_rank, -1)
        z_BTGO = numerics.cast(einsum("btgk,gok->btgo", o_BTGK, wo_a))
        return self.wo_b(z_BTGO.reshape(*o.shape[:2], -1), numerics)


def window_kv(
    wkv: Linear, kv_norm: RMSNorm, x_BTD: jax.Array, rotation: rope.Table, config: ModelConfig, numerics: Numerics
) -> jax.Array:
    """fp8(rope(kv_norm(wkv x))): window rows [B, T, H] of a layer or of a draft stage."""
    kv = kv_norm(wkv(x_BTD, numerics), config.rms_norm_eps, numerics)
    return numerics.fake(rope.rotate(kv, rotation), formats.window_format(config))


def _widen(candidates_BTC: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Pad to the width candidates travel with, so that a scan carries one shape."""
    return jnp.pad(candidates_BTC, ((0, 0), (0, 0), (0, shape[2] - candidates_BTC.shape[2])), constant_values=-1)
