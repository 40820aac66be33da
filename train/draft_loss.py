"""The loss of the DSpark draft head: it learns to guess what comes behind random places, from a backbone that it cannot move.

    block behind position p: inputs token p + 1 and noise at p + 1 ..., targets token p + 2 ... p + 1 + block
    ce = -log softmax(head(norm(x_i)) + markov_head(markov_embed(token p + 1 + i)))[target_i]
    confidence = binary cross-entropy of confidence_i against "the likeliest draft is the target"

Everything of the backbone (copy-means, embedding, head) is detached. The stages read true tokens in their windows, the Markov
head true predecessors. Source: arXiv 2609.19969 (DSpark); the choice of places and targets is ours.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax

from csa2_jax import Model, rope
from csa2_jax.dspark import DraftFeed
from train.losses import cross_entropy, likeliest


@dataclasses.dataclass(frozen=True)
class DraftLossSettings:
    """weight: of the loss, 0 for none. places: blocks per row and step. confidence: weight of the confidence's part.

    targets: "tokens" of the text, or what the "backbone" itself would say there, which is what drafts are held against.
    """

    weight: float = 0.0
    places: int = 16
    confidence: float = 0.1
    targets: Literal["tokens", "backbone"] = "backbone"

    def __post_init__(self) -> None:
        if self.weight < 0 or self.confidence < 0 or self.places < 1:
            raise ValueError(
                f"weight={self.weight} and confidence={self.confidence} must not be negative, places={self.places} at least 1"
            )
        if self.targets not in ("tokens", "backbone"):
            raise ValueError(f"targets={self.targets!r} must be 'tokens' or 'backbone'")


def draft_sums(
    model: Model,
    settings: DraftLossSettings,
    tokens_BT: jax.Array,
    segment_BT: jax.Array,
    position_BT: jax.Array,
    main_BTE: jax.Array,
    h_BTD: jax.Array,
    key: jax.Array,
    chunk: int | None,
) -> dict[str, jax.Array]:
    """Sums over the drafted tokens: draft (ce), draft_confidence, draft_correct, draft_tokens, draft_load [stages, X]."""
    config, numerics, head = model.config, model.numerics, model.draft
    assert head is not None
    main_BTE, h_BTD, embed_VD, head_VD = lax.stop_gradient(
        (main_BTE, h_BTD, model.embed["weight"][...], model.head["weight"][...])
    )
    batch, tokens = tokens_BT.shape
    block, window, places = config.dspark_block_size, config.sliding_window, settings.places
    rows = DraftFeed(head).rows(
        main_BTE, rope.table(position_BT, rope.layer_frequencies(config, reads_pool=False)), config, numerics
    )
    last_BA = jax.random.randint(
        key, (batch, places), 0, max(tokens - 2, 1), jnp.int32
    )  # the last consumed token of each block

    def at(a_BT: jax.Array, index: jax.Array) -> jax.Array:
        """a at [B, A, ...] places of the rows; what lies outside reads the ends."""
        flat = jnp.clip(index, 0, tokens - 1).reshape(batch, -1)
        found = jnp.take_along_axis(a_BT, flat.reshape(*flat.shape, *[1] * (a_BT.ndim - 2)), axis=1)
        return found.reshape(*index.shape, *a_BT.shape[2:])

    back = jnp.arange(window) - window + 1
    histories = [at(kv_BTH, last_BA[..., None] + back).reshape(batch * places, window, -1) for kv_BTH in rows]
    ahead_BAK = last_BA[..., None] + 1 + jnp.arange(block)  # the inputs' places
    before_BAK = at(tokens_BT, ahead_BAK)
    inside = (ahead_BAK + 1 < tokens) & (at(segment_BT, ahead_BAK + 1) == at(segment_BT, last_BA)[..., None])
    weight_n = (inside & (at(segment_BT, last_BA) >= 0)[..., None]).astype(jnp.float32).reshape(-1)
    if settings.targets == "tokens":
        target_n = at(tokens_BT, ahead_BAK + 1).reshape(-1)
    else:
        target_n = likeliest(at(h_BTD, ahead_BAK).reshape(-1, h_BTD.shape[-1]), head_VD, chunk)
    noise = jnp.full((batch, places, block - 1), config.dspark_noise_token_id, jnp.int32)
    inputs = jnp.concatenate([before_BAK[..., :1], noise], axis=-1).reshape(batch * places, block)
    length_B = (at(position_BT, last_BA) + 1).reshape(-1)
    x_bKD, h_bKD, routed = head.walk(embed_VD[inputs], histories, length_B, config, numerics)
    markov_nE = head.markov_embed["weight"][...][before_BAK.reshape(-1)]
    # One product gives both terms of the logits: features and weights side by side.
    features = jnp.concatenate([h_bKD.reshape(-1, h_bKD.shape[-1]), markov_nE.astype(h_bKD.dtype)], axis=-1)
    both_VE = jnp.concatenate(
        [head_VD.astype(jnp.float32), head.markov_head["weight"][...].astype(jnp.float32)], axis=-1
    )
    ce = cross_entropy(features, both_VE, target_n, weight_n, chunk)
    hit_n = likeliest(*lax.stop_gradient((features, both_VE)), chunk) == target_n
    joined = jnp.concatenate([x_bKD.reshape(-1, x_bKD.shape[-1]), markov_nE.astype(x_bKD.dtype)], axis=-1)
    confidence_n = joined.astype(jnp.float32) @ head.confidence["weight"][...][0]
    missed_n = jax.nn.softplus(jnp.where(hit_n, -confidence_n, confidence_n))
    used_bK = weight_n.reshape(batch * places, block)
    load = [
        jnp.sum(
            jax.nn.one_hot(made["gate_idx"], config.dspark_n_routed_experts) * used_bK[..., None, None], axis=(0, 1, 2)
        )
        for made in routed
    ]
    return {
        "draft": ce.loss,
        "draft_confidence": jnp.sum(weight_n * missed_n),
        "draft_correct": ce.correct,
        "draft_tokens": jnp.sum(weight_n),
        "draft_load": jnp.stack(load),
    }
