"""What a forward computes for training besides its output: index loss, balance loss and expert loads, layer by layer.

They are made where their inputs live, inside the walk through the layers, so that queries and router scores of a layer are gone
before the next one runs. `Learning` says which; `Walk` calls the functions below; what comes out is a number per layer, summed
over tokens, so that rows, documents and micro-batches add up. Source: arXiv 2609.19969; arXiv 2412.19437 (sequence balance loss).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Final, Literal, get_args

import jax
import jax.numpy as jnp

from csa2_jax.config import ModelConfig
from csa2_jax.indexer import visible_entries
from csa2_jax.plan import Mode, Plan
from csa2_jax.state import Pool, Step
from kernels_pallas import Unsupported, attention_mass, index_divergence

Teacher = Literal["served", "own"]
Domain = Literal["selected", "candidates", "visible"]
Remat = Literal["none", "layer", "group"]

KEPT: Final = ("selection", "candidates")  # by the backward, whatever else it computes again
_BALANCE: Final = frozenset({"gate_idx", "gate_score"})
_STUDENT: Final = frozenset({"index_q", "index_w"})


@dataclasses.dataclass(frozen=True)
class IndexLoss:
    """How the indexer is taught.

    teacher: whose attention it imitates: the mean over all layers that its selection "serves", or its "own" layer's.
    domain: the entries over which both are compared. "selected": those selected, with the denominators that attention had.
        "candidates": of layers that make or obey candidate blocks the entries of those, else all. "visible": all; the last two
        hold attention against all those entries, as if each had been selected, and cost T x P.
    """

    teacher: Teacher = "served"
    domain: Domain = "selected"

    def __post_init__(self) -> None:
        for name, value, choices in (("teacher", self.teacher, Teacher), ("domain", self.domain, Domain)):
            if value not in get_args(choices):
                raise ValueError(f"{name}={value!r} must be one of {get_args(choices)}")

    def check(self, plan: Plan) -> None:
        """Refuse a plan in which a selection serves a layer behind a window-only one: its group is over by then."""
        if self.teacher != "served":
            return
        for segment in plan.segments:
            if segment.mode is Mode.REUSE:
                raise Unsupported(
                    f"layers {list(segment.heads)} reuse a selection across a window-only layer, which the teacher 'served' "
                    "cannot wait for; use teacher='own'"
                )


@dataclasses.dataclass(frozen=True)
class Learning:
    """What a training forward computes besides its output, and what it keeps for the backward.

    segment_BT: number of each token's document within its row, below `segments`; -1 is padding, which counts nowhere.
    remat: what is computed again in the backward: nothing, each layer, or each group of a head and its REUSE layers.
    """

    segment_BT: jax.Array
    segments: int
    index: IndexLoss | None = None
    remat: Remat = "none"

    @property
    def captures(self) -> frozenset[str]:
        """What a layer has to show for this."""
        if self.index is None:
            return _BALANCE
        lse = "attn_lse" if self.index.domain == "selected" else "window_lse"
        return _BALANCE | _STUDENT | {"attn_q", lse}

    def of_experts(self, seen: Mapping[str, jax.Array], experts: int) -> dict[str, jax.Array]:
        """{"expert_load": f32 [X] tokens sent to each expert, "balance_loss": scalar} of one layer.

        balance = sum over documents of n sum_x f_x P_x, with f_x = X / (k n) * (times chosen) and P_x = mean of the normalised
        scores over the document's n tokens: 1 per token when both are even.
        """
        score_BTX, index_BTk = seen["gate_score"], seen["gate_idx"]
        batch, topk = score_BTX.shape[0], index_BTk.shape[-1]
        real_BT = self.segment_BT >= 0
        row = jnp.where(real_BT, self.segment_BT + self.segments * jnp.arange(batch)[:, None], batch * self.segments)
        share_BTX = score_BTX / jnp.sum(score_BTX, axis=-1, keepdims=True)
        chosen_BTX = jnp.sum(jax.nn.one_hot(index_BTk, experts, dtype=jnp.float32), axis=2)

        def per_document(a: jax.Array) -> jax.Array:
            empty = jnp.zeros((batch * self.segments, *a.shape[2:]), jnp.float32)
            return empty.at[row].add(a, mode="drop")

        count_d = per_document(real_BT.astype(jnp.float32))
        chosen_dX, share_dX = per_document(chosen_BTX), per_document(share_BTX)
        per_d = jnp.sum(chosen_dX * share_dX, axis=-1) * (experts / topk) / jnp.maximum(count_d, 1.0)
        return {"expert_load": jnp.sum(chosen_dX, axis=0), "balance_loss": jnp.sum(per_d)}


@dataclasses.dataclass(frozen=True)
class Lesson:
    """What one selection is taught: the teacher's attention from the layers it serves, then the divergence of its scores."""

    learning: Learning
    pool: Pool
    group: Any  # of the pool
    ratio: int
    selection_BTK: jax.Array
    candidates_BTC: jax.Array | None  # blocks that bound it or came with it
    step: Step
    config: ModelConfig

    @property
    def index(self) -> IndexLoss:
        """The settings."""
        assert self.learning.index is not None
        return self.learning.index

    @property
    def served(self) -> bool:
        """Whether REUSE layers teach too."""
        return self.index.teacher == "served"

    @property
    def entries(self) -> jax.Array | None:
        """Entries [B, T, E] over which teacher and student are compared, -1 absent; None means all."""
        if self.index.domain == "selected":
            return self.selection_BTK
        if self.index.domain == "visible" or self.candidates_BTC is None:
            return None
        size = self.config.candidate_block_size
        entry = self.candidates_BTC[..., None] * size + jnp.arange(size)
        entry = jnp.where(self.candidates_BTC[..., None] < 0, -1, entry)
        return entry.reshape(*self.candidates_BTC.shape[:2], -1)

    def mass(self, seen: Mapping[str, jax.Array], group: Any) -> jax.Array:
        """Attention of one layer per entry, summed over heads [B, T, E]: what the teacher adds up."""
        visible_BT, first_BT = visible_entries(self.step, self.ratio)
        joins = self.index.domain != "selected"
        return attention_mass(
            seen["attn_q"],
            seen["window_lse" if joins else "attn_lse"],
            self.pool.kv_GBPH,
            group,
            visible_BT,
            scale=self.config.head_dim**-0.5,
            entries_BTE=self.entries,
            first_BT=first_BT,
            joins=joins,
        )

    def loss(self, seen: Mapping[str, jax.Array], mass_BTE: jax.Array) -> dict[str, jax.Array]:
        """{"index_loss", "index_recall", "index_tokens"}: scalars, summed over tokens; the last counts those that have entries.

        The recall is the part of the teacher's attention that the selection caught: 1 by construction in the domain "selected".
        """
        visible_BT, first_BT = visible_entries(self.step, self.ratio)
        entries_BTE = self.entries
        loss_BT = index_divergence(
            seen["index_q"],
            seen["index_w"],
            self.pool.key_GBPJ,  # type: ignore[arg-type]
            self.group,
            mass_BTE,
            visible_BT,
            entries_BTE=entries_BTE,
            first_BT=first_BT,
        )
        real_BT = self.learning.segment_BT >= 0
        total_BT = jnp.sum(mass_BTE, axis=-1)
        counted_BT = real_BT & (total_BT > 0)
        caught_BT = _caught(mass_BTE, entries_BTE, self.selection_BTK) / jnp.where(counted_BT, total_BT, 1.0)
        return {
            "index_loss": jnp.sum(jnp.where(real_BT, loss_BT, 0.0)),
            "index_recall": jnp.sum(jnp.where(counted_BT, caught_BT, 0.0)),
            "index_tokens": jnp.sum(counted_BT.astype(jnp.float32)),
        }


def _caught(mass_BTE: jax.Array, entries_BTE: jax.Array | None, selection_BTK: jax.Array) -> jax.Array:
    """Mass [B, T] of the entries that are selected."""
    if entries_BTE is selection_BTK:
        return jnp.sum(mass_BTE, axis=-1)
    there = selection_BTK >= 0
    if entries_BTE is None:
        picked = jnp.take_along_axis(mass_BTE, jnp.maximum(selection_BTK, 0), axis=-1)
        return jnp.sum(jnp.where(there, picked, 0.0), axis=-1)
    # Both ascend, absent ones first or last: an entry is selected where the sorted selection holds it.
    sorted_BTK = jnp.sort(jnp.where(there, selection_BTK, jnp.iinfo(jnp.int32).max), axis=-1)
    place = jax.vmap(jax.vmap(jnp.searchsorted))(sorted_BTK, entries_BTE)
    hit = jnp.take_along_axis(sorted_BTK, jnp.minimum(place, sorted_BTK.shape[-1] - 1), axis=-1) == entries_BTE
    return jnp.sum(jnp.where(hit & (entries_BTE >= 0), mass_BTE, 0.0), axis=-1)
