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

from csa2_jax.ngram import NgramConstants, ngram_constants
from csa2_jax.plan import Plan, build_plan

# Fields whose only supported value is the released one: they name a computation that is built in.
_FIXED_TEXT = {
    "model_type": "deepseek_v41_text",
    "num_key_value_heads": 1,
    "hidden_act": "silu",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "tie_word_embeddings": False,
    "n_shared_experts": 1,
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
}
_FIXED_TOP = {"model_type": "deepseek_v41"}
_FIXED_QUANTIZATION = {
    "quant_method": "fp8",
    "activation_scheme": "dynamic",
    "weight_block_size": [32, 32],
    "scale_fmt": "ue8m0",
    "expert_dtype": "fp4",
}
# Fields that never change the forward; carried through to_hf untouched. (`dtype` says how plain tensors are stored.)
_INERT = {
    "architectures",
    "auto_map",
    "dtype",
    "torch_dtype",
    "transformers_version",
    "use_cache",
    "initializer_range",
    "_name_or_path",
}


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """YaRN parameters of the layers that read a pool; `original_max_position_embeddings` 0 switches YaRN off."""

    factor: float = 1.0
    beta_fast: float = 32
    beta_slow: float = 1
    original_max_position_embeddings: int = 0


@dataclasses.dataclass(frozen=True)
class VisionConfig:
    """The image tower's numbers (described so that its tensors can be accounted for; the tower itself is not built yet)."""

    num_hidden_layers: int
    hidden_size: int
    num_attention_heads: int
    intermediate_size: int
    patch_size: int
    rope_theta: float
    downsample_ratio: int
    max_image_tokens: int
    min_pixels: int
    max_wh_ratio: float | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A DeepSeek-V4.1 model by config.json's field names; frozen and hashable, valid once constructed.

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
    bos_token_id: int = 0
    eos_token_id: int = 1
    pad_token_id: int = 2
    image_token_id: int | None = None
    quantized: bool = False
    vision: VisionConfig | None = None
    inert: tuple[tuple[str, str], ...] = ()  # (dotted name, JSON text) of fields that never change the forward

    def __post_init__(self) -> None:
        _validate(self)

    # ---- derived, cached: all of it pure Python ----

    @functools.cached_property
    def plan(self) -> Plan:
        """Layer modes, sources and scan segments."""
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
            return _from_mapping(cls, source, "config")
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
        return _from_mapping(cls, data, str(path))

    def to_hf(self) -> dict[str, Any]:
        """The nested config.json mapping; `from_hf(c.to_hf()) == c`."""
        text: dict[str, Any] = dict(_FIXED_TEXT)
        for name in _TEXT_FIELDS:
            value = getattr(self, name)
            text[name] = list(value) if isinstance(value, tuple) else value
        if self.rope_scaling is not None:
            text["rope_scaling"] = {"rope_type": "yarn", **dataclasses.asdict(self.rope_scaling)}
        top: dict[str, Any] = dict(_FIXED_TOP)
        for name in _TOP_FIELDS:
            top[name] = getattr(self, name)
        if self.quantized:
            top["quantization_config"] = {
                k: list(v) if isinstance(v, list) else v for k, v in _FIXED_QUANTIZATION.items()
            }
        top["text_config"] = text
        if self.vision is not None:
            top["vision_config"] = {"model_type": "deepseek_v41_vision", **dataclasses.asdict(self.vision)}
        for dotted, value in self.inert:
            section, _, name = dotted.rpartition(".")
            (top[section] if section else top)[name] = json.loads(value)
        return top


_TOP_FIELDS = ("bos_token_id", "eos_token_id", "pad_token_id", "image_token_id")
_OWN_FIELDS = {*_TOP_FIELDS, "quantized", "vision", "inert"}
_TEXT_FIELDS = tuple(f.name for f in dataclasses.fields(ModelConfig) if f.name not in _OWN_FIELDS)


def _from_mapping(cls: type[ModelConfig], data: Mapping[str, Any], where: str) -> ModelConfig:
    model_type = data.get("model_type")
    if model_type != _FIXED_TOP["model_type"]:
        raise ValueError(
            f"{where}: model_type={model_type!r}, this loader reads model_type={_FIXED_TOP['model_type']!r} (V4.1)"
        )
    sections = {"text_config": data.get("text_config"), "vision_config": data.get("vision_config")}
    text = sections["text_config"]
    if not isinstance(text, Mapping):
        raise ValueError(f"{where}: text_config must be an object, found {text!r}")
    inert: list[tuple[str, str]] = []
    known_top = {*_FIXED_TOP, *_TOP_FIELDS, "quantization_config", "text_config", "vision_config"}
    _sort_fields(data, known_top, _FIXED_TOP, "", inert, where)
    _sort_fields(text, {*_FIXED_TEXT, *_TEXT_FIELDS}, _FIXED_TEXT, "text_config", inert, where)
    values: dict[str, Any] = {name: data[name] for name in _TOP_FIELDS if name in data}
    for field in dataclasses.fields(cls):
        name = field.name
        if name in _OWN_FIELDS:
            continue
        if name in text:
            value = text[name]
            values[name] = tuple(value) if isinstance(value, list) else value
        elif field.default is dataclasses.MISSING:
            raise ValueError(f"{where}: text_config.{name} is missing")
    values["rope_scaling"] = _rope_scaling(text.get("rope_scaling"), where)
    quantization = data.get("quantization_config")
    if quantization is not None:
        _require_object(quantization, "quantization_config", where)
        _sort_fields(quantization, set(_FIXED_QUANTIZATION), _FIXED_QUANTIZATION, "quantization_config", inert, where)
        if missing := sorted(set(_FIXED_QUANTIZATION) - set(quantization)):
            raise ValueError(f"{where}: quantization_config lacks {missing}")
    values["quantized"] = quantization is not None
    vision = sections["vision_config"]
    if vision is not None:
        _require_object(vision, "vision_config", where)
        names = {f.name for f in dataclasses.fields(VisionConfig)}
        _sort_fields(
            vision, names | {"model_type"}, {"model_type": "deepseek_v41_vision"}, "vision_config", inert, where
        )
        if missing := sorted(names - {"max_wh_ratio"} - set(vision)):
            raise ValueError(f"{where}: vision_config lacks {missing}")
        values["vision"] = VisionConfig(**{k: v for k, v in vision.items() if k in names})
    values["inert"] = tuple(inert)
    try:
        return cls(**values)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


def _require_object(data: Any, section: str, where: str) -> None:
    if not isinstance(data, Mapping):
        raise ValueError(f"{where}: {section}={data!r} must be an object")


def _sort_fields(
    data: Mapping[str, Any],
    known: set[str],
    fixed: Mapping[str, Any],
    section: str,
    inert: list[tuple[str, str]],
    where: str,
) -> None:
    """Refuse unknown fields and unsupported fixed values; set inert ones aside."""
    prefix = f"{section}." if section else ""
    for name, value in data.items():
        if name in fixed and value != fixed[name]:
            raise ValueError(f"{where}: {prefix}{name}={value!r} is not supported, only {fixed[name]!r}")
        if name in known:
            continue
        if name in _INERT:
            inert.append((f"{prefix}{name}", json.dumps(value)))
        else:
            raise ValueError(
                f"{where}: {prefix}{name}={value!r} is not a field of a V4.1 model this implementation knows; "
                "it may change the forward, so it is refused. Remove it if it does not"
            )


def _rope_scaling(data: Any, where: str) -> RopeScaling | None:
    if data is None:
        return None
    _require_object(data, "text_config.rope_scaling", where)
    if "rope_type" in data and data.get("type", data["rope_type"]) != data["rope_type"]:
        raise ValueError(
            f"{where}: text_config.rope_scaling has rope_type={data['rope_type']!r} and type={data['type']!r}"
        )
    names = {f.name for f in dataclasses.fields(RopeScaling)}
    kind = data.get("rope_type", data.get("type"))
    if kind != "yarn":
        raise ValueError(f"{where}: text_config.rope_scaling.rope_type={kind!r} is not supported, only 'yarn'")
    if unknown := sorted(set(data) - names - {"rope_type", "type"}):
        raise ValueError(
            f"{where}: text_config.rope_scaling has fields {unknown} that this implementation does not know"
        )
    if missing := sorted({"factor", "original_max_position_embeddings"} - set(data)):
        raise ValueError(f"{where}: text_config.rope_scaling lacks {missing}")
    return RopeScaling(**{k: v for k, v in data.items() if k in names})


def _validate(c: ModelConfig) -> None:
    """Every consistency rule, each refused with the values that break it."""
    _check_types(c)
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
    if c.kv_source_layer_ids:
        for name in ("index_n_heads", "index_head_dim", "index_topk"):
            if getattr(c, name) < 1:
                raise ValueError(f"{name}={getattr(c, name)} must be at least 1 when kv_source_layer_ids is not empty")
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


def _validate_rope(c: ModelConfig) -> None:
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


def _validate_engram(c: ModelConfig) -> None:
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


def _validate_dspark(c: ModelConfig) -> None:
    stages = c.num_nextn_predict_layers
    if stages < 0:
        raise ValueError(f"num_nextn_predict_layers={stages} must not be negative")
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
