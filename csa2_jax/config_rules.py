"""Every rule that the numbers of a configuration have to keep, each refused with the values that break it."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from csa2_jax.config_reading import RopeScaling
from csa2_jax.generations import GENERATIONS


def validate(c: Any) -> None:
    """Every consistency rule, each refused with the values that break it."""
    _check_types(c)
    if c.model_type not in GENERATIONS:
        raise ValueError(f"model_type={c.model_type!r} must be one of {sorted(GENERATIONS)}")
    if not 0 <= c.num_hash_layers < c.num_hidden_layers:
        raise ValueError(f"num_hash_layers={c.num_hash_layers} must be below num_hidden_layers={c.num_hidden_layers}")
    width = c.index_head_dim
    if c.generation.hadamard and c.index_source_layer_ids and width & (width - 1):
        raise ValueError(
            f"index_head_dim={width} must be a power of two: index queries are turned by a Hadamard matrix"
        )
    for name in (
        *("vocab_size", "hidden_size", "moe_intermediate_size", "num_hidden_layers", "num_attention_heads", "head_dim"),
        *("qk_rope_head_dim", "q_lora_rank", "o_lora_rank", "o_groups", "max_position_embeddings", "n_routed_experts"),
        *("num_experts_per_tok", "sliding_window", "hc_mult", "hc_sinkhorn_iters"),
    ):
        if getattr(c, name) < 1:
            raise ValueError(f"{name}={getattr(c, name)} must be at least 1")
    if c.qk_rope_head_dim % 2 or c.qk_rope_head_dim > c.head_dim:
        raise ValueError(f"qk_rope_head_dim={c.qk_rope_head_dim} must be even and at most head_dim={c.head_dim}")
    if c.num_attention_heads % c.o_groups:
        raise ValueError(f"num_attention_heads={c.num_attention_heads} must be a multiple of o_groups={c.o_groups}")
    if c.num_experts_per_tok > c.n_routed_experts:
        raise ValueError(f"num_experts_per_tok={c.num_experts_per_tok} exceeds n_routed_experts={c.n_routed_experts}")
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        if not 0 <= getattr(c, name) < c.vocab_size:
            raise ValueError(f"{name}={getattr(c, name)} must be a token id below vocab_size={c.vocab_size}")
    if c.vision is not None:
        _check_types(c.vision, "vision_config.")
    _validate_rope(c)
    expected = c.num_hidden_layers + c.num_nextn_predict_layers
    if len(c.compress_ratios) != expected:
        raise ValueError(
            f"compress_ratios has {len(c.compress_ratios)} entries, expected num_hidden_layers={c.num_hidden_layers} + "
            f"num_nextn_predict_layers={c.num_nextn_predict_layers}"
        )
    if any(c.compress_ratios[c.num_hidden_layers :]):
        raise ValueError(f"draft stages are window only: compress_ratios[{c.num_hidden_layers}:] must be 0")
    _ = c.plan
    if c.index_source_layer_ids:
        for name in ("index_n_heads", "index_head_dim", "index_topk"):
            if getattr(c, name) < 1:
                raise ValueError(f"{name}={getattr(c, name)} must be at least 1 when a layer selects")
        if c.qk_rope_head_dim > c.index_head_dim:
            raise ValueError(f"qk_rope_head_dim={c.qk_rope_head_dim} exceeds index_head_dim={c.index_head_dim}")
    if c.has_candidates:
        blocks, size, topk = c.candidate_topk_blocks, c.candidate_block_size, c.index_topk
        if blocks < 1 or size < 1:
            raise ValueError(f"candidate_topk_blocks={blocks} and candidate_block_size={size} must be at least 1")
        if (blocks - 1) * size + 1 < topk:
            raise ValueError(
                f"(candidate_topk_blocks={blocks} - 1) * candidate_block_size={size} + 1 = {(blocks - 1) * size + 1} is below "
                f"index_topk={topk}: a query could run out of candidates and attend to masked positions"
            )
    _validate_engram(c)
    _validate_dspark(c)


def _check_types(record: Any, prefix: str = "") -> None:
    """JSON lets any type through; a string or a float where a count belongs would fail far from its cause."""
    for field in dataclasses.fields(record):
        value: Any = getattr(record, field.name)
        kind, name = str(field.type), f"{prefix}{field.name}"
        if value is None and kind.endswith("| None"):
            continue
        whole = isinstance(value, int) and not isinstance(value, bool)
        if kind.startswith("int") and not whole:
            raise ValueError(f"{name}={value!r} must be an integer")
        finite = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value >= 0
        if kind.startswith("float") and not finite:
            raise ValueError(f"{name}={value!r} must be a finite number, not negative")
        if kind.startswith("tuple[int") and (
            not isinstance(value, tuple) or not all(isinstance(v, int) and not isinstance(v, bool) for v in value)
        ):
            raise ValueError(f"{name}={value!r} must be a list of integers")


def _validate_rope(c: Any) -> None:
    for name in ("rope_theta", "compress_rope_theta"):
        if getattr(c, name) <= 1:
            raise ValueError(f"{name}={getattr(c, name)} must be greater than 1")
    yarn = c.rope_scaling
    if yarn is None:
        return
    if not isinstance(yarn, RopeScaling):
        raise ValueError(f"rope_scaling={yarn!r} must be a RopeScaling")
    _check_types(yarn, "rope_scaling.")
    for name in ("factor", "beta_fast", "beta_slow"):
        if getattr(yarn, name) <= 0:
            raise ValueError(f"rope_scaling.{name}={getattr(yarn, name)} must be positive")
    if yarn.original_max_position_embeddings < 0:
        length = yarn.original_max_position_embeddings
        raise ValueError(f"rope_scaling.original_max_position_embeddings={length} must be 0 (YaRN off) or a length")


def _validate_engram(c: Any) -> None:
    if len(c.engram_num_embeddings) != len(c.engram_layer_ids):
        raise ValueError(
            f"engram_num_embeddings={list(c.engram_num_embeddings)} must have one entry per layer of "
            f"engram_layer_ids={list(c.engram_layer_ids)}"
        )
    if not c.engram_layer_ids:
        return
    for name in ("engram_vocab_size", "engram_n_heads", "engram_head_dim", "engram_compressed_vocab_size"):
        if getattr(c, name) < 1:
            raise ValueError(f"{name}={getattr(c, name)} must be at least 1 when engram_layer_ids is not empty")
    if c.engram_max_ngram_size < 2:
        raise ValueError(f"engram_max_ngram_size={c.engram_max_ngram_size} must be at least 2")
    if c.engram_compressed_vocab_size > c.vocab_size:
        raise ValueError(
            f"engram_compressed_vocab_size={c.engram_compressed_vocab_size} exceeds vocab_size={c.vocab_size}"
        )
    if not 0 <= c.engram_pad_token_id < c.vocab_size:
        raise ValueError(
            f"engram_pad_token_id={c.engram_pad_token_id} must be a token id below vocab_size={c.vocab_size}"
        )
    if c.engram_vocab_size >= 2**25 or max(int(k.primes.max()) for k in c.engram_constants) >= 2**25:
        raise ValueError(
            f"engram_vocab_size={c.engram_vocab_size} gives primes beyond 2**25: rows are hashed in 32 bits"
        )
    if any(rows >= 2**31 for rows in c.engram_num_embeddings):
        raise ValueError(f"engram_num_embeddings={list(c.engram_num_embeddings)} must be below 2**31 rows each")
    for layer, declared, constants in zip(c.engram_layer_ids, c.engram_num_embeddings, c.engram_constants, strict=True):
        if declared != constants.rows:
            raise ValueError(
                f"engram_num_embeddings declares {declared} rows for layer {layer}, but the primes from "
                f"engram_vocab_size={c.engram_vocab_size} sum to {constants.rows}"
            )


def _validate_dspark(c: Any) -> None:
    stages = c.num_nextn_predict_layers
    if stages < 0:
        raise ValueError(f"num_nextn_predict_layers={stages} must not be negative")
    if c.generation.own_pools:
        return  # V4 predicts further tokens with layers of its own kind
    if stages == 0:
        if c.dspark_target_layer_ids:
            raise ValueError(
                f"dspark_target_layer_ids={list(c.dspark_target_layer_ids)} but num_nextn_predict_layers=0"
            )
        return
    for name in ("dspark_block_size", "dspark_markov_rank", "dspark_n_routed_experts", "dspark_num_experts_per_tok"):
        if getattr(c, name) < 1:
            raise ValueError(f"{name}={getattr(c, name)} must be at least 1 when num_nextn_predict_layers={stages}")
    if not c.dspark_target_layer_ids:
        raise ValueError(f"num_nextn_predict_layers={stages} needs dspark_target_layer_ids")
    if c.dspark_num_experts_per_tok > c.dspark_n_routed_experts:
        raise ValueError(
            f"dspark_num_experts_per_tok={c.dspark_num_experts_per_tok} exceeds "
            f"dspark_n_routed_experts={c.dspark_n_routed_experts}"
        )
    if not 0 <= c.dspark_noise_token_id < c.vocab_size:
        raise ValueError(
            f"dspark_noise_token_id={c.dspark_noise_token_id} must be a token id below vocab_size={c.vocab_size}"
        )
