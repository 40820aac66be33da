"""The model configuration: the released config.json, read, checked and written back.

Field names are config.json's own. Construction validates every rule that the numerics rely on and refuses with the values
named; a field this implementation does not know is refused rather than ignored, because it may change the forward.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from csa2_jax import config_reading
from csa2_jax.config_reading import RopeScaling, VisionConfig
from csa2_jax.config_rules import validate
from csa2_jax.generations import GENERATIONS, V41, Generation
from csa2_jax.ngram import NgramConstants, ngram_constants
from csa2_jax.plan import Plan, build_own_pools, build_plan

__all__ = ["ModelConfig", "RopeScaling", "VisionConfig"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A DeepSeek-V4.1 or DeepSeek-V4 model by config.json's field names; frozen and hashable, valid once constructed.

    `quantized` says whether the checkpoint stores fp8 / fp4 weights (config.json has a `quantization_config`).
    Raises ValueError naming the offending values when fields contradict each other.
    """

    vocab_size: int
    hidden_size: int
    moe_intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    head_dim: int
    qk_rope_head_dim: int
    q_lora_rank: int
    o_lora_rank: int
    o_groups: int
    max_position_embeddings: int
    n_routed_experts: int
    num_experts_per_tok: int
    sliding_window: int
    compress_ratios: tuple[int, ...]
    kv_source_layer_ids: tuple[int, ...]
    index_source_layer_ids: tuple[int, ...]
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    candidate_source_layer_id: int | None = None
    candidate_topk_blocks: int = 0
    candidate_block_size: int = 0
    swiglu_limit: float = 10.0
    rms_norm_eps: float = 1e-20
    rope_theta: float = 10000.0
    compress_rope_theta: float = 160000.0
    rope_scaling: RopeScaling | None = None
    routed_scaling_factor: float = 1.5
    hc_mult: int = 4
    hc_sinkhorn_iters: int = 20
    hc_eps: float = 1e-6
    engram_layer_ids: tuple[int, ...] = ()
    engram_num_embeddings: tuple[int, ...] = ()
    engram_max_ngram_size: int = 0
    engram_vocab_size: int = 0
    engram_n_heads: int = 0
    engram_head_dim: int = 0
    engram_pad_token_id: int = 0
    engram_compressed_vocab_size: int = 0
    num_nextn_predict_layers: int = 0
    dspark_block_size: int = 0
    dspark_noise_token_id: int = 0
    dspark_target_layer_ids: tuple[int, ...] = ()
    dspark_markov_rank: int = 0
    dspark_n_routed_experts: int = 0
    dspark_num_experts_per_tok: int = 0
    num_hash_layers: int = 0  # first layers whose experts are chosen by token id
    bos_token_id: int = 0
    eos_token_id: int = 1
    pad_token_id: int = 2
    image_token_id: int | None = None
    model_type: str = V41.model_type
    quantized: bool = False
    vision: VisionConfig | None = None
    inert: tuple[tuple[str, str], ...] = ()  # (dotted name, JSON text) of fields that never change the forward

    def __post_init__(self) -> None:
        validate(self)

    # ---- derived, cached: all of it pure Python ----

    @property
    def generation(self) -> Generation:
        """What this model does otherwise than one of another generation."""
        return GENERATIONS[self.model_type]

    @functools.cached_property
    def plan(self) -> Plan:
        """Layer modes, sources and scan segments."""
        if self.generation.own_pools:
            return build_own_pools(num_hidden_layers=self.num_hidden_layers, compress_ratios=self.compress_ratios)
        return build_plan(
            num_hidden_layers=self.num_hidden_layers,
            compress_ratios=self.compress_ratios,
            kv_source_layer_ids=self.kv_source_layer_ids,
            index_source_layer_ids=self.index_source_layer_ids,
            candidate_source_layer_id=self.candidate_source_layer_id,
            engram_layer_ids=self.engram_layer_ids,
            dspark_target_layer_ids=self.dspark_target_layer_ids,
        )

    @functools.cached_property
    def engram_constants(self) -> tuple[NgramConstants, ...]:
        """Hash constants of each Engram layer, in `engram_layer_ids` order."""
        return ngram_constants(
            self.engram_layer_ids,
            floor=self.engram_vocab_size,
            heads=self.engram_n_heads,
            max_ngram=self.engram_max_ngram_size,
            compressed_vocab=self.engram_compressed_vocab_size,
        )

    @property
    def engram_columns(self) -> int:
        """Table rows gathered per token: n-gram sizes x heads."""
        return (self.engram_max_ngram_size - 1) * self.engram_n_heads

    @property
    def has_candidates(self) -> bool:
        """Whether a layer makes candidate blocks (null and negative ids both mean none)."""
        return self.candidate_source_layer_id is not None and self.candidate_source_layer_id >= 0

    @property
    def document_alignment(self) -> int:
        """Tokens in a whole number of groups and candidate blocks of every ratio: where documents that share a row may begin."""
        return math.lcm(*self.plan.ratios, 1) * (self.candidate_block_size if self.has_candidates else 1)

    @property
    def has_vision(self) -> bool:
        """Whether the checkpoint carries an image tower."""
        return self.vision is not None and self.vision.num_hidden_layers > 0

    # ---- config.json in and out ----

    @classmethod
    def from_hf(cls, source: str | os.PathLike[str] | Mapping[str, Any]) -> ModelConfig:
        """Read a release-layout config.json: a path to it, a directory that holds it, or the parsed mapping."""
        if isinstance(source, Mapping):
            return cls._read(source, "config")
        path = Path(source)
        if path.is_dir():
            path = path / "config.json"
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise FileNotFoundError(
                f"{path} does not exist: a model directory needs the release's config.json"
            ) from None
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise ValueError(f"{path} is not valid JSON: {error}") from None
        if not isinstance(data, Mapping):
            raise ValueError(f"{path} must hold a JSON object, found {type(data).__name__}")
        return cls._read(data, str(path))

    def to_hf(self) -> dict[str, Any]:
        """The config.json mapping of its generation; `from_hf(c.to_hf()) == c`."""
        return config_reading.write({f.name: getattr(self, f.name) for f in dataclasses.fields(self)})

    @classmethod
    def _read(cls, data: Mapping[str, Any], where: str) -> ModelConfig:
        fields = {
            f.name: f.default is dataclasses.MISSING
            for f in dataclasses.fields(cls)
            if f.name not in ("model_type", "quantized", "vision", "inert")
        }
        try:
            return cls(**config_reading.read(data, fields, where))
        except ValueError as error:
            text = str(error)
            raise ValueError(text if text.startswith(f"{where}:") else f"{where}: {text}") from None
