"""What a forward has to multiply and a decode step has to read, counted from the configuration: the least any program does.

FLOPs count the dot products and weighted sums whose results are used, two for every product that is added:

    projections       of queries, window rows, outputs, index queries and head weights: every weight once per token
    experts           the chosen ones and the shared one; router: the scores of all
    index scores      against the entries a query can see, (t + 1) // m of them at position t, for every layer that selects; where
                      candidates bound the search, against those of their entries that the query can see
    attention         scores and weighted sum over min(W, t + 1) window rows and the entries that are selected
    compressor        values and gates of every token, index keys of every entry; hyper-connections: mixes, collapse, update
    head              of the last token alone

Norms, rotations, softmaxes, Sinkhorn's divisions, sorting and the picking of the best are not counted.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from flax import nnx

from csa2_jax import Model, ModelConfig
from csa2_jax.plan import Mode


def candidate_entries(visible: np.ndarray, blocks: int, size: int) -> np.ndarray:
    """How many visible entries lie in a query's candidates: all while there are at most `blocks` blocks of `size`.

    Behind that `blocks` of them, one of which is always the newest and may be partly filled.
    """
    begun = -(-visible // size)
    return np.where(begun <= blocks, visible, (blocks - 1) * size + visible - (begun - 1) * size)


def pool_reads(config: ModelConfig, tokens: int, start: int = 0) -> tuple[dict[int, int], dict[int, int]]:
    """(entries scored, entries read by attention), each by layer and summed over the queries at start .. start + tokens - 1."""
    position = np.arange(start, start + tokens, dtype=np.int64)
    scored: dict[int, int] = {}
    selected: dict[int, int] = {}
    for spec in config.plan.layers:
        if spec.mode in (Mode.FULL, Mode.REINDEX):
            seen = (position + 1) // spec.ratio
            if spec.candidate_source is not None:
                seen = candidate_entries(seen, config.candidate_topk_blocks, config.candidate_block_size)
            scored[spec.layer] = int(seen.sum())
            selected[spec.layer] = int(np.minimum(seen, config.index_topk).sum())
        elif spec.selection_source is not None:
            selected[spec.layer] = selected[spec.selection_source]
    return scored, selected


def flops(config: ModelConfig, tokens: int, start: int = 0) -> dict[str, int]:
    """FLOPs by part of a forward over `tokens` new tokens behind `start` others, every layer run on every token."""
    d, s, layers = config.hidden_size, config.hc_mult, config.num_hidden_layers
    heads, width, rank = config.num_attention_heads, config.head_dim, config.q_lora_rank
    position = np.arange(start, start + tokens, dtype=np.int64)
    window_rows = int(np.minimum(position + 1, config.sliding_window).sum())
    scored, selected = pool_reads(config, tokens, start)
    index = config.index_n_heads * config.index_head_dim
    joined = config.o_groups * config.o_lora_rank

    query, rows, output = d * rank + rank * heads * width, d * width, heads * width * config.o_lora_rank + joined * d
    index_input = rank * index + d * config.index_n_heads
    streams = d * s * (2 + s) * s + s * d + s * (s + 1) * d  # mixes, collapse, update; once for each of two sub-layers
    counted = {
        "projections": tokens * (layers * (query + rows + output) + len(scored) * index_input),
        "experts": tokens * layers * (config.num_experts_per_tok + 1) * 3 * d * config.moe_intermediate_size,
        "router": tokens * layers * config.n_routed_experts * d,
        "index scores": sum(scored.values()) * (index + config.index_n_heads),
        "attention": 2 * heads * width * (layers * window_rows + sum(selected.values())),
        "compressor": 0,
        "hyper-connections": tokens * 2 * layers * streams,
        "head": d * (s + config.vocab_size),
    }
    for ratio in config.plan.ratios:
        entries = (start + tokens) // ratio - start // ratio
        per_token = d * width if ratio == 1 else (2 * d + 1) * width  # values; with gates also their weighted sum
        made = tokens * per_token + entries * width * config.index_head_dim
        counted["compressor"] += len(config.plan.pool_layers(ratio)) * made
    if config.engram_layer_ids:
        memory = (s + 1) * d * config.engram_columns * config.engram_head_dim + 2 * s * d
        counted["n-gram memory"] = tokens * len(config.engram_layer_ids) * memory
    return {part: 2 * products for part, products in counted.items()}


def active_bytes(model: Model) -> int:
    """Bytes of the parameters that one decoded token uses, as `model` (abstract or not) holds them.

    Of the routed experts the chosen ones, of the embedding and the n-gram tables the rows that are looked up, no draft head.
    """
    config, total = model.config, 0
    for path, leaf in jax.tree_util.tree_leaves_with_path(nnx.state(model, nnx.Param)):
        names = [str(getattr(key, "key", getattr(key, "name", ""))) for key in path]
        size = int(np.prod(leaf.shape)) * leaf.dtype.itemsize
        if names[0] == "draft":
            continue
        if "experts" in names:
            size = size * config.num_experts_per_tok // config.n_routed_experts
        elif names[0] == "embed":
            size //= config.vocab_size
        elif names[0] == "engram_tables":
            size = size // leaf.shape[0] * config.engram_columns
        total += size
    return total


def jit_leaves(*trees: Any) -> int:
    """Arrays among the arguments of a jitted call."""
    return len(jax.tree.leaves(trees))
