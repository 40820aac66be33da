"""The indexer of a FULL or REINDEX layer: which pool entries, and which candidate blocks, each query may read.

    query = fp4(rope(wq_b qr)) [I, J],  w = weights_proj(x) * (I * J)**-0.5,  score = sum_i relu(query_i . key) w_i

`qr` is the main query's normalised low-rank input, `x` the attention input. Source: arXiv 2609.19969 (hierarchical sparse
indexer), arXiv 2512.02556 (DSA lightning indexer).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from csa2_jax import formats, rope
from csa2_jax.config import ModelConfig
from csa2_jax.layers import Linear, ParamFactory
from csa2_jax.numerics import Numerics
from csa2_jax.state import Step
from kernels_pallas import index_scores, index_select
from kernels_pallas.storage import Entries


class Indexer(nnx.Module):
    """wq_b [I*J, R] and the signed head weights' weights_proj [I, D]."""

    def __init__(self, config: ModelConfig, make: ParamFactory, *, stack: tuple[int, ...]) -> None:
        out = config.index_n_heads * config.index_head_dim
        self.wq_b = Linear(out, config.q_lora_rank, make, stack=stack, storage="fp8")
        self.weights_proj = Linear(config.index_n_heads, config.hidden_size, make, stack=stack)

    def __call__(
        self,
        qr_BTR: jax.Array,
        x_BTD: jax.Array,
        key_GBPJ: Entries,
        group: jax.Array | int,
        ratio: int,
        candidates_BTC: jax.Array | None,
        make_candidates: bool,
        step: Step,
        config: ModelConfig,
        numerics: Numerics,
        want_scores: bool,
    ) -> tuple[jax.Array, jax.Array | None, jax.Array | None]:
        """(selection_BTK, candidates_BTC if made, all raw scores if wanted)."""
        heads, width = config.index_n_heads, config.index_head_dim
        q_BTIJ = self.wq_b(qr_BTR, numerics).reshape(*qr_BTR.shape[:2], heads, width)
        q_BTIJ = numerics.fake(rope.rotate(q_BTIJ, rope.over_heads(step.rope_pool)), formats.INDEX)
        scale = jnp.float32(width**-0.5 * heads**-0.5)
        w_BTI = numerics.cast(self.weights_proj(x_BTD, numerics).astype(jnp.float32) * scale)
        # Padding behind a row's real tokens has positions too, but no entries: slots never written stay unread.
        made_B = (step.start_B + step.count_B) // ratio
        visible_BT, documents = (step.position_BT + 1) // ratio, {}
        if step.origin_BT is not None:
            documents["first_BT"] = step.origin_BT // ratio
            visible_BT += documents["first_BT"]
        visible_BT = jnp.minimum(visible_BT, made_B[:, None])
        selection_BTK, made = index_select(
            q_BTIJ,
            w_BTI,
            key_GBPJ,
            group,
            visible_BT,
            topk=config.index_topk,
            block_size=config.candidate_block_size,
            make_candidates=config.candidate_topk_blocks if make_candidates else 0,
            candidates_BTC=candidates_BTC,
            **documents,
            **numerics.kernels,
        )
        scores = index_scores(q_BTIJ, w_BTI, key_GBPJ, group, visible_BT, **documents) if want_scores else None
        return selection_BTK, made, scores
