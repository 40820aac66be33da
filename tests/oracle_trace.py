"""What the oracle returns, what its layers share, and the single faults it can plant as negative controls."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

FAULTS = (
    "no_pool",  # attention drops every pool entry
    "reuse_recent",  # REUSE layers read the newest K visible entries instead of the inherited selection
    "no_candidates",  # REINDEX layers score every visible entry
    "no_sink",
    "no_inverse_rope",
    "no_engram",
    "mhc_unstaggered",  # a sub-layer collapses with its own pre instead of the previous sub-layer's
)


@dataclass
class OracleTrace:
    """What one forward saw. Dictionaries are keyed by backbone layer id."""

    logits: np.ndarray  # [T, V]
    main_hidden: np.ndarray  # [T, targets * D]: mean over copies on entry to each draft target layer
    hidden: dict[int, np.ndarray] = field(default_factory=dict)  # [T, n, D] after the layer
    pre_mix: dict[int, np.ndarray] = field(default_factory=dict)  # [T, n] for the next layer
    attn_in: dict[int, np.ndarray] = field(default_factory=dict)  # [T, D] after attn_norm
    attn_out: dict[int, np.ndarray] = field(default_factory=dict)
    ffn_in: dict[int, np.ndarray] = field(default_factory=dict)  # [T, D] after ffn_norm
    ffn_out: dict[int, np.ndarray] = field(default_factory=dict)
    window_kv: dict[int, np.ndarray] = field(default_factory=dict)  # [T, H] rotated and rounded
    latent: dict[int, np.ndarray] = field(default_factory=dict)  # FULL: [P, H] before RoPE
    pool_kv: dict[int, np.ndarray] = field(default_factory=dict)  # FULL: [P, H] rotated and rounded
    pool_key: dict[int, np.ndarray] = field(default_factory=dict)  # FULL: [P, J] rotated and rounded
    index_score: dict[int, np.ndarray] = field(default_factory=dict)  # [T, P], -inf: not visible, not a candidate
    selections: dict[int, np.ndarray] = field(default_factory=dict)  # int [T, index_topk], ascending, then -1
    candidates: dict[int, list[np.ndarray]] = field(default_factory=dict)  # per token sorted block ids
    gate_idx: dict[int, np.ndarray] = field(default_factory=dict)  # int [T, k], best score + bias first
    engram_hash: dict[int, np.ndarray] = field(default_factory=dict)  # int [T, (ngram - 1) * heads] table rows


@dataclass
class DraftResult:
    """One greedy draft step: `ids[0]` is the given token (position p + 1), `ids[1:]` are the drafts that follow it."""

    ids: np.ndarray  # int [block + 1]
    logits: np.ndarray  # [block, V], markov bias included
    confidence: np.ndarray  # [block], raw logits


@dataclass
class SharedState:
    """What a layer reads from layers above it: the pool, the selection over it, the candidate blocks."""

    pool_kv: np.ndarray | None = None
    pool_key: np.ndarray | None = None
    selection: list[np.ndarray] | None = None
    candidates: list[np.ndarray] | None = None
