"""The indexer of a layer that selects: which pool entries, and which candidate blocks, each query may read.

    query = fp4(rope(wq_b qr)) [I, J],  w = weights_proj(x) * (I * J)**-0.5,  score = sum_i relu(query_i . key) w_i

`qr` is the main query's normalised low-rank input, `x` the attention input; neither gets a gradient from here, because a
selection has none and the index loss (`learning`) trains the indexer alone. Source: arXiv 2609.19969 (hierarchical sparse
indexer), arXiv 2512.02556 (DSA lightning indexer).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from csa2_jax import formats, rope
from csa2_jax.config import ModelConfig
from csa2_jax.layers import Linear, ParamFactory
from csa2_jax.numerics import Numerics, hadamard
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
        capture: frozenset[str] = frozenset(),
    ) -> tuple[jax.Array, jax.Array | None, dict[str, jax.Array]]:
        """(selection_BTK, candidates_BTC if made, captures: "index_scores", "index_q", "index_w")."""
        q_BTIJ, w_BTI = self.queries(qr_BTR, x_BTD, step, config, numerics)
        visible_BT, first_BT = visible_entries(step, ratio)
        documents = {} if first_BT is None else {"first_BT": first_BT}
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
        seen = {"index_q": q_BTIJ, "index_w": w_BTI}
        if "index_scores" in capture:
            seen["index_scores"] = index_scores(q_BTIJ, w_BTI, key_GBPJ, group, visible_BT, **documents)
        return selection_BTK, made, {name: value for name, value in seen.items() if name in capture}

    def queries(
        self, qr_BTR: jax.Array, x_BTD: jax.Array, step: Step, config: ModelConfig, numerics: Numerics
    ) -> tuple[jax.Array, jax.Array]:
        """Index queries [B, T, I, J] and head weights [B, T, I]."""
        qr_BTR, x_BTD = lax.stop_gradient((qr_BTR, x_BTD))
        heads, width = config.index_n_heads, config.index_head_dim
        q_BTIJ = self.wq_b(qr_BTR, numerics).reshape(*qr_BTR.shape[:2], heads, width)
        q_BTIJ = rope.rotate(q_BTIJ, rope.over_heads(step.rope_pool))
        if config.generation.hadamard:  # keys are turned alike: scores change by their roundings alone
            q_BTIJ = hadamard(q_BTIJ)
        q_BTIJ = numerics.fake(q_BTIJ, formats.INDEX)
        scale = jnp.float32(width**-0.5 * heads**-0.5)
        return q_BTIJ, numerics.cast(self.weights_proj(x_BTD, numerics).astype(jnp.float32) * scale)


def visible_entries(step: Step, ratio: int) -> tuple[jax.Array, jax.Array | None]:
    """(end, first): each query may read entries first <= e < end of a pool, int32 [B, T]; first is None where it is 0."""
    # Padding behind a row's real tokens has positions too, but no entries: slots never written stay unread.
    made_B = (step.start_B + step.count_B) // ratio
    visible_BT, first_BT = (step.position_BT + 1) // ratio, None
    if step.origin_BT is not None:
        first_BT = step.origin_BT // ratio
        visible_BT += first_BT
    return jnp.minimum(visible_BT, made_B[:, None]), first_BT
