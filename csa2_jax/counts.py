"""What a forward has to multiply, counted from the configuration: the least any program does. Pure Python and NumPy, no JAX.

FLOPs count the dot products and weighted sums whose results are used, two for every product that is added:

    projections       of queries, window rows, outputs, index queries and head weights: every weight once per token
    experts           the chosen ones and the shared one; router: the scores of all
    index scores      against the entries a query can see, (t + 1) // m of them at position t, for every layer that selects; where
                      candidates bound the search, against those of their entries that the query can see; score sums: of heads
    attention         scores and weighted sum over min(W, t + 1) window rows and the entries that are selected, in HCA layers all
    compressor        values and gates of every token, index keys of every entry; hyper-connections: mixes, collapse, update
    head              of the last token alone

Norms, rotations, softmaxes, Sinkhorn's divisions, sorting and the picking of the best are not counted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, Literal

import numpy as np

from csa2_jax.config import ModelConfig
from csa2_jax.plan import Mode

WEIGHTS: Final[Mapping[str, float]] = {
    "projections": 0.5,
    "experts": 0.5,
    "n-gram memory": 0.5,
    "index scores": 0.25,
    "attention": 1.0,
    "head": 1.0,
}
"""What an operation costs by its number format: bf16 1, fp8 1/2, fp4 1/4. The small f32 parts (router, compressor,
score sums, hyper-connections) are left out."""


def candidate_entries(visible: np.ndarray, blocks: int, size: int) -> np.ndarray:
    """How many visible entries lie in a query's candidates: all while there are at most `blocks` blocks of `size`.

    Behind that `blocks` of them, one of which is always the newest and may be partly filled.
    """
    begun = -(-visible // size)
    return np.where(begun <= blocks, visible, (blocks - 1) * size + visible - (begun - 1) * size)


def pool_reads(
    config: ModelConfig, tokens: int, start: int = 0, *, bounded: bool = True
) -> tuple[dict[int, int], dict[int, int]]:
    """(entries scored, entries read by attention), each by layer and summed over the queries at start .. start + tokens - 1.

    bounded: whether candidates bound the searches that the configuration lets them bound.
    """
    position = np.arange(start, start + tokens, dtype=np.int64)
    scored: dict[int, int] = {}
    selected: dict[int, int] = {}
    for spec in config.plan.layers:
        if spec.mode is Mode.HCA:
            selected[spec.layer] = int(((position + 1) // spec.ratio).sum())
        elif spec.mode.selects:
            seen = (position + 1) // spec.ratio
            if spec.candidate_source is not None and bounded:
                seen = candidate_entries(seen, config.candidate_topk_blocks, config.candidate_block_size)
            scored[spec.layer] = int(seen.sum())
            selected[spec.layer] = int(np.minimum(seen, config.index_topk).sum())
        elif spec.selection_source is not None:
            selected[spec.layer] = selected[spec.selection_source]
    return scored, selected


def flops(
    config: ModelConfig,
    tokens: int,
    start: int = 0,
    *,
    layers: Sequence[int] | None = None,
    head: bool = True,
    bounded: bool = True,
) -> dict[str, int]:
    """FLOPs by part of a forward over `tokens` new tokens behind `start` others.

    layers: those that run on every token, by default all. head: whether the last token's logits are wanted. bounded: see
    `pool_reads`.
    """
    d, s = config.hidden_size, config.hc_mult
    ran = set(range(config.num_hidden_layers) if layers is None else layers)
    heads, width, rank = config.num_attention_heads, config.head_dim, config.q_lora_rank
    position = np.arange(start, start + tokens, dtype=np.int64)
    window_rows = int(np.minimum(position + 1, config.sliding_window).sum())
    scored, selected = (
        {layer: n for layer, n in reads.items() if layer in ran}
        for reads in pool_reads(config, tokens, start, bounded=bounded)
    )
    index = config.index_n_heads * config.index_head_dim
    joined = config.o_groups * config.o_lora_rank

    query, rows, output = d * rank + rank * heads * width, d * width, heads * width * config.o_lora_rank + joined * d
    index_input = rank * index + d * config.index_n_heads
    streams = d * s * (2 + s) * s + s * d + s * (s + 1) * d  # mixes, collapse, update; once for each of two sub-layers
    counted = {
        "projections": tokens * (len(ran) * (query + rows + output) + len(scored) * index_input),
        "experts": tokens * len(ran) * (config.num_experts_per_tok + 1) * 3 * d * config.moe_intermediate_size,
        "router": tokens * len(ran) * config.n_routed_experts * d,
        "index scores": sum(scored.values()) * index,
        "score sums": sum(scored.values()) * config.index_n_heads,
        "attention": 2 * heads * width * (len(ran) * window_rows + sum(selected.values())),
        "compressor": sum(
            _compression(config, spec.layer, tokens, start) for spec in config.plan.layers if spec.layer in ran
        ),
        "hyper-connections": tokens * 2 * len(ran) * streams,
        "head": head * d * (s + config.vocab_size),
    }
    memories = len(ran & set(config.engram_layer_ids))
    if memories:
        memory = (s + 1) * d * config.engram_columns * config.engram_head_dim + 2 * s * d
        counted["n-gram memory"] = tokens * memories * memory
    return {part: 2 * products for part, products in counted.items()}


def _compression(config: ModelConfig, layer: int, tokens: int, start: int) -> int:
    """Products that make the entries and index keys of one layer's pool."""
    spec, d, width = config.plan.layers[layer], config.hidden_size, config.head_dim
    if not spec.mode.makes_pool:
        return 0
    entries = (start + tokens) // spec.ratio - start // spec.ratio
    if config.generation.own_pools:  # one or two series, of entries and of keys
        series = 2 if spec.mode is Mode.CSA else 1
        widths = width + (config.index_head_dim if spec.mode.selects else 0)
        return series * widths * (tokens * 2 * d + entries * spec.ratio)
    per_token = d * width if spec.ratio == 1 else (2 * d + 1) * width  # values; with gates also their weighted sum
    return tokens * per_token + entries * width * config.index_head_dim


def prefill_flops(config: ModelConfig, tokens: int, decoder: Literal["full", "exact", "replay"]) -> dict[str, int]:
    """FLOPs by part of a prompt, with as much of the decoder as `prefill` runs: on all tokens, the last D W, or the last W."""
    start, layers = config.plan.decoder_start, config.num_hidden_layers
    depth = layers - start
    if decoder == "full" or depth == 0:
        return flops(config, tokens)
    tail = min(tokens, config.sliding_window * (depth if decoder == "exact" else 1))
    encoder = flops(config, tokens, layers=range(start), head=False)
    rest = flops(config, tail, tokens - tail, layers=range(start, layers))
    found = {part: encoder.get(part, 0) + rest.get(part, 0) for part in {**encoder, **rest}}
    found["compressor"] += 2 * _compression(config, start, tokens - tail, 0)  # the decoder's pool, of the others
    return found


def weighted(parts: Mapping[str, float]) -> float:
    """The sum of parts, each by what its number format costs (`WEIGHTS`)."""
    return sum(count * WEIGHTS.get(part, 0.0) for part, count in parts.items())
