"""DSpark draft head: window-only stages propose a block of tokens from the backbone's middle, a Markov head links them.

    main_x = main_norm(main_proj(concat of the copy-means at the target layers)), one row per consumed token
    stage windows hold fp8(rope(kv_norm(wkv main_x)));  draft queries see the window and the whole block (bidirectional)
    logits_i = head(norm(x_i)) + markov_head(markov_embed(token_i)),  token_{i+1} = argmax;  confidence_i is a raw logit

The inputs of a draft behind position p are the token just sampled (it sits at p + 1) and noise ids, at positions p + 1 ...
Source: arXiv 2609.19969 (DSpark).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from csa2_jax import rope
from csa2_jax.attention import Attention, window_kv
from csa2_jax.block import Block
from csa2_jax.config import ModelConfig
from csa2_jax.layers import Linear, ParamFactory, RMSNorm, take_layer
from csa2_jax.numerics import Numerics, einsum
from csa2_jax.residual import collapse, expand
from csa2_jax.state import Step, join_window, window_history, window_tail
from kernels_pallas import sparse_attention
from kernels_pallas.storage import Entries

Choose = Callable[[jax.Array, jax.Array], jax.Array]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Draft:
    """A drafted block: ids [B, block + 1] (the given token first), logits f32 [B, block, V], confidence f32 [B, block]."""

    ids: jax.Array
    logits: jax.Array
    confidence: jax.Array


class DraftFeed(nnx.Module):
    """The part of the draft head that every forward runs to fill the stages' windows: shares its parameters."""

    def __init__(self, head: DraftHead) -> None:
        self.main_proj, self.main_norm = head.main_proj, head.main_norm
        self.wkv, self.kv_norm = head.stages.attn.wkv, head.stages.attn.kv_norm

    def __call__(self, main_BTE: jax.Array, step: Step, config: ModelConfig, numerics: Numerics) -> jax.Array:
        """Window tails of all stages [stages, B, R, H] for the tokens of a call, from the joined copy-means."""
        rows = self.rows(main_BTE, step.rope_window, config, numerics)
        return jnp.stack([window_tail(kv_BTH, step.count_B, config.sliding_window) for kv_BTH in rows])

    def rows(
        self, main_BTE: jax.Array, rotation: rope.Table, config: ModelConfig, numerics: Numerics
    ) -> list[jax.Array]:
        """Window rows [B, T, H] of each stage, from the joined copy-means of T tokens."""
        main_BTD = self.main_norm(self.main_proj(main_BTE, numerics), config.rms_norm_eps, numerics)
        rows = []
        for stage in range(config.num_nextn_predict_layers):
            wkv, kv_norm = take_layer(self.wkv, stage), take_layer(self.kv_norm, stage)
            rows.append(window_kv(wkv, kv_norm, main_BTD, rotation, config, numerics))
        return rows


class DraftHead(nnx.Module):
    """The stages (stacked blocks of SWA layers with their own experts) and the heads around them."""

    def __init__(self, config: ModelConfig, make: ParamFactory) -> None:
        d, v, rank = config.hidden_size, config.vocab_size, config.dspark_markov_rank
        self.main_proj = Linear(d, d * len(config.dspark_target_layer_ids), make, storage="fp8")
        self.main_norm = RMSNorm(d, make)
        self.stages = Block(config, make, stack=(config.num_nextn_predict_layers,), draft=True)
        self.norm = RMSNorm(d, make)
        self.markov_embed = nnx.Dict(weight=make.normal((v, rank)))
        self.markov_head = nnx.Dict(weight=make.normal((v, rank)))
        self.confidence = nnx.Dict(weight=make.normal((1, d + rank), jnp.dtype(jnp.float32)))

    def __call__(
        self,
        token_B: jax.Array,
        window_LBWH: Entries,
        length_B: jax.Array,
        embed_VD: jax.Array,
        head_VD: jax.Array,
        config: ModelConfig,
        numerics: Numerics,
        choose: Choose | None = None,
    ) -> Draft:
        """Draft behind `length_B` consumed tokens, the next of which is already known to be `token_B`.

        choose: the token for given logits [B, V] and place in the block (0 first); the likeliest by default.
        """
        batch, block = token_B.shape[0], config.dspark_block_size
        noise = jnp.full((batch, block - 1), config.dspark_noise_token_id, jnp.int32)
        inputs = jnp.concatenate([token_B[:, None].astype(jnp.int32), noise], axis=1)
        histories = [window_history(window_LBWH, i, length_B) for i in range(config.num_nextn_predict_layers)]
        x_BTD, h_BTD, _ = self.walk(embed_VD[inputs], histories, length_B, config, numerics)
        base_BTV = einsum("btd,vd->btv", h_BTD.astype(jnp.float32), head_VD.astype(jnp.float32))
        return self._link(token_B, x_BTD, base_BTV, block, choose or (lambda logits, _: jnp.argmax(logits, axis=-1)))

    def walk(
        self,
        x_BTD: jax.Array,
        histories: Sequence[Entries],
        length_B: jax.Array,
        config: ModelConfig,
        numerics: Numerics,
    ) -> tuple[jax.Array, jax.Array, list[dict[str, jax.Array]]]:
        """Embedded blocks behind `length_B` tokens through the stages, each with the window before it.

        Returns what the confidence reads [B, T, D], what the head reads [B, T, D], and what each stage's router did.
        """
        x_BTSD, pre_BTS = expand(x_BTD.astype(numerics.dtype), config.hc_mult)
        routed = []
        for stage, history_BWH in enumerate(histories):
            module = take_layer(self.stages, stage)

            def attend(h_BTD: jax.Array, module: Block = module, history: Entries = history_BWH) -> tuple:
                return attend_draft(module.attn, h_BTD, history, length_B, config, numerics)

            x_BTSD, pre_BTS, _ = module.around_attention(x_BTSD, pre_BTS, attend, config, numerics)
            x_BTSD, pre_BTS, made = module.feed_forward(x_BTSD, pre_BTS, stage, None, config, numerics)
            routed.append(made)
        x_BTD = collapse(x_BTSD, pre_BTS, numerics)
        return x_BTD, self.norm(x_BTD, config.rms_norm_eps, numerics), routed

    def _link(self, token_B: jax.Array, x_BTD: jax.Array, base_BTV: jax.Array, block: int, choose: Choose) -> Draft:
        """Left to right: each token shifts the logits of the next through the Markov head."""
        embed, head, proj = (w["weight"][...] for w in (self.markov_embed, self.markov_head, self.confidence))

        def link(token_B: jax.Array, xs: tuple[jax.Array, ...]) -> tuple[jax.Array, tuple[jax.Array, ...]]:
            base_BV, x_BD, place = xs
            e_BE = embed[token_B]
            logits = base_BV + einsum("be,ve->bv", e_BE.astype(jnp.float32), head.astype(jnp.float32))
            joined = jnp.concatenate([x_BD.astype(jnp.float32), e_BE.astype(jnp.float32)], axis=-1)
            confidence = einsum("bd,od->bo", joined, proj)[:, 0]
            token_B = choose(logits, place).astype(jnp.int32)
            return token_B, (token_B, logits, confidence)

        xs = (jnp.moveaxis(base_BTV, 1, 0), jnp.moveaxis(x_BTD, 1, 0), jnp.arange(block))
        _, (ids, logits, confidence) = lax.scan(link, token_B.astype(jnp.int32), xs, length=block)
        ids = jnp.concatenate([token_B[:, None].astype(jnp.int32), ids.T], axis=1)
        return Draft(ids, jnp.moveaxis(logits, 0, 1), confidence.T)


def attend_draft(
    attn: Attention,
    h_BTD: jax.Array,
    history_BWH: Entries,
    length_B: jax.Array,
    config: ModelConfig,
    numerics: Numerics,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """A stage's attention: every draft position reads the window before the block and the whole block."""
    width, block = config.sliding_window, h_BTD.shape[1]
    position_BT = length_B[:, None] + jnp.arange(block)
    rotation = rope.table(position_BT, rope.layer_frequencies(config, reads_pool=False))
    first_BT = jnp.broadcast_to(jnp.maximum(width - length_B, 0)[:, None], position_BT.shape)
    q_BTNH = attn.query(attn.query_input(h_BTD, config, numerics), rotation, config, numerics)
    rows_BSH = join_window(history_BWH, attn.window_kv(h_BTD, rotation, config, numerics))
    scale = config.head_dim**-0.5
    o_BTNH, _ = sparse_attention(
        q_BTNH, rows_BSH, first_BT, attn.attn_sink[...], window=width, scale=scale, causal=False, **numerics.kernels
    )
    return attn.output(o_BTNH, rotation, config, numerics), {"attn_q": q_BTNH, "attn_o": o_BTNH}
