"""The static side of the oracle: sizes, layer modes, rotary frequencies and Engram hashing, from config.json."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class LayerSpec:
    """SWA: ratio 0. FULL makes pool and selection, REINDEX a selection only, REUSE neither."""

    ratio: int
    makes_pool: bool
    makes_selection: bool


@dataclass(frozen=True)
class ModelShape:
    """The numbers of a configuration that the oracle needs, under short names."""

    vocab: int
    width: int
    heads: int
    head_width: int
    rope_width: int
    output_groups: int
    window: int
    layers: tuple[LayerSpec, ...]
    rms_eps: float
    theta: float
    compress_theta: float
    yarn: dict[str, float] | None
    index_heads: int
    index_width: int
    index_topk: int
    candidate_source: int | None
    candidate_topk: int
    candidate_block: int
    copies: int
    sinkhorn_iters: int
    hc_eps: float
    active_experts: int
    routed_scale: float
    swiglu_limit: float
    engram_layers: tuple[int, ...]
    engram_rows: tuple[int, ...]
    engram_max_ngram: int
    engram_prime_floor: int
    engram_heads: int
    engram_pad: int
    engram_compressed_vocab: int
    draft_stages: int
    draft_block: int
    draft_targets: tuple[int, ...]
    draft_active_experts: int
    noise_token: int

    @classmethod
    def from_hf(cls, config: dict[str, Any]) -> ModelShape:
        """Read a nested config.json; meaningless layer lists and leaking candidates are refused."""
        c = config.get("text_config", config)
        source = c.get("candidate_source_layer_id")
        shape = cls(
            vocab=c["vocab_size"],
            width=c["hidden_size"],
            heads=c["num_attention_heads"],
            head_width=c["head_dim"],
            rope_width=c["qk_rope_head_dim"],
            output_groups=c["o_groups"],
            window=c["sliding_window"],
            layers=layer_specs(c),
            rms_eps=c["rms_norm_eps"],
            theta=c["rope_theta"],
            compress_theta=c["compress_rope_theta"],
            yarn=c.get("rope_scaling"),
            index_heads=c["index_n_heads"],
            index_width=c["index_head_dim"],
            index_topk=c["index_topk"],
            candidate_source=None if source is None or source < 0 else source,
            candidate_topk=c.get("candidate_topk_blocks") or 0,
            candidate_block=c.get("candidate_block_size") or 1,
            copies=c["hc_mult"],
            sinkhorn_iters=c["hc_sinkhorn_iters"],
            hc_eps=c["hc_eps"],
            active_experts=c["num_experts_per_tok"],
            routed_scale=c["routed_scaling_factor"],
            swiglu_limit=c["swiglu_limit"],
            engram_layers=tuple(c.get("engram_layer_ids") or ()),
            engram_rows=tuple(c.get("engram_num_embeddings") or ()),
            engram_max_ngram=c.get("engram_max_ngram_size", 0),
            engram_prime_floor=c.get("engram_vocab_size", 0),
            engram_heads=c.get("engram_n_heads", 0),
            engram_pad=c.get("engram_pad_token_id", 0),
            engram_compressed_vocab=c.get("engram_compressed_vocab_size", 0),
            draft_stages=c.get("num_nextn_predict_layers", 0),
            draft_block=c.get("dspark_block_size", 0),
            draft_targets=tuple(c.get("dspark_target_layer_ids") or ()),
            draft_active_experts=c.get("dspark_num_experts_per_tok", 0),
            noise_token=c.get("dspark_noise_token_id", 0),
        )
        if shape.candidate_source is not None:
            reach = (shape.candidate_topk - 1) * shape.candidate_block + 1
            if reach < shape.index_topk:
                raise ValueError(f"candidates reach {reach} visible entries, fewer than {shape.index_topk=}")
        sums = tuple(int(primes.sum()) for primes in shape.primes())
        if sums != shape.engram_rows:
            raise ValueError(f"engram tables declare {shape.engram_rows} rows, the primes give {sums}")
        return shape

    def primes(self) -> list[np.ndarray]:
        """Hash moduli per Engram layer, [(max_ngram - 1), heads] each."""
        return engram_primes(
            len(self.engram_layers), self.engram_max_ngram - 1, self.engram_heads, self.engram_prime_floor
        )


def layer_specs(c: dict[str, Any]) -> tuple[LayerSpec, ...]:
    """Mode of every backbone layer from the id lists."""
    kv, index = set(c["kv_source_layer_ids"]), set(c["index_source_layer_ids"])
    if not kv <= index:
        raise ValueError(f"layers {sorted(kv - index)} make a pool but no selection over it")
    specs, pool_ratio = [], 0
    for layer in range(c["num_hidden_layers"]):
        ratio = c["compress_ratios"][layer]
        if layer in kv:
            pool_ratio = ratio
        if (ratio == 0 and layer in index) or (ratio > 0 and ratio != pool_ratio):
            raise ValueError(f"layer {layer}: ratio {ratio} does not fit the pool above it (ratio {pool_ratio})")
        specs.append(LayerSpec(ratio, layer in kv, layer in index))
    return tuple(specs)


# --- rotary -------------------------------------------------------------------------------------------------------


def rotary_frequencies(shape: ModelShape, ratio: int) -> np.ndarray:
    """Float32 angular frequency of each channel pair [R/2]; YaRN only where a layer compresses."""
    width = shape.rope_width
    theta = shape.compress_theta if ratio else shape.theta
    pair = np.arange(width // 2)
    frequency = (1.0 / (np.float32(theta) ** (2 * pair / width).astype(np.float32))).astype(np.float32)
    original = (shape.yarn or {}).get("original_max_position_embeddings", 0)
    if not ratio or shape.yarn is None or not original:
        return frequency

    def turns(beta: float) -> float:
        """The (fractional) pair index that makes `beta` turns over the original context."""
        return width * math.log(original / (2 * math.pi * beta)) / (2 * math.log(theta))

    low = max(math.floor(turns(shape.yarn["beta_fast"])), 0)
    high = min(math.ceil(turns(shape.yarn["beta_slow"])), width - 1)
    ramp = np.clip((pair - low) / max(high - low, 1e-3), 0, 1).astype(np.float32)
    return (frequency / np.float32(shape.yarn["factor"]) * ramp + frequency * (1 - ramp)).astype(np.float32)


# --- Engram hashing -----------------------------------------------------------------------------------------------


def is_prime(n: int) -> bool:
    """Trial division; prime floors here are small, and 16 million needs 4,000 divisions."""
    return n > 1 and all(n % d for d in range(2, math.isqrt(n) + 1))


def engram_primes(tables: int, ngrams: int, heads: int, floor: int) -> list[np.ndarray]:
    """Per table [ngrams, heads]: the next unused prime each time, from the floor upwards."""
    primes, candidate = [], floor
    for _ in range(tables):
        table = np.empty((ngrams, heads), np.int64)
        for slot in range(table.size):
            while not is_prime(candidate):
                candidate += 1
            table.flat[slot] = candidate
            candidate += 1
        primes.append(table)
    return primes


def engram_multipliers(shape: ModelShape, layer: int) -> np.ndarray:
    """One odd multiplier per look-back, from a generator seeded by the layer id."""
    bound = (2**63 - 1) // shape.engram_compressed_vocab // 2
    draws = np.random.default_rng(10007 * layer).integers(0, bound, size=shape.engram_max_ngram)
    return draws.astype(np.int64) * 2 + 1


def ngram_rows(
    shape: ModelShape, token_map: np.ndarray, ids: np.ndarray, layer: int, image_mask: np.ndarray | None = None
) -> np.ndarray:
    """Table rows [T, (max_ngram - 1) * heads] in order 2-gram heads, 3-gram heads, ...

    A look-back that passes position 0 or meets an image token is the pad token's compressed id, and so is every
    further one; look-back 0 counts.
    """
    primes = shape.primes()[shape.engram_layers.index(layer)]
    multipliers = engram_multipliers(shape, layer)
    offsets = np.concatenate([[0], np.cumsum(primes.ravel())[:-1]]).reshape(primes.shape)
    pad = int(token_map[shape.engram_pad])
    rows = np.empty((len(ids), *primes.shape), np.int64)
    for t in range(len(ids)):
        alive, mixed = True, 0
        for back in range(shape.engram_max_ngram):
            source = t - back
            alive = alive and source >= 0 and not (image_mask is not None and image_mask[source])
            compressed = int(token_map[ids[source]]) if alive else pad
            mixed ^= compressed * int(multipliers[back])
            if back:
                rows[t, back - 1] = mixed % primes[back - 1] + offsets[back - 1]
    return rows.reshape(len(ids), -1)
