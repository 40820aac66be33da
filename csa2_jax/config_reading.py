"""config.json as the releases and transformers write it: read into the values of a `ModelConfig`, and written back.

DeepSeek-V4.1 nests the text model (`text_config`) and says by lists which layers make what; DeepSeek-V4 is flat and says it by
`compress_ratios` alone. transformers spells a few fields of V4 otherwise, and drops the layer that predicts further tokens.
A field that is not known here is refused, because it may change the forward.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any, Final

from csa2_jax.generations import V4, V41
from csa2_jax.plan import OVERLAPPING

# Fields whose only supported value is the released one: they name a computation that is built in.
_FIXED_BOTH: Final = {
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
_FIXED_TEXT: Final = {"model_type": "deepseek_v41_text", **_FIXED_BOTH}
_FIXED_TOP: Final = {"model_type": V41.model_type}
_FIXED_QUANTIZATION: Final = {
    "quant_method": "fp8",
    "activation_scheme": "dynamic",
    "weight_block_size": [V41.tile, V41.tile],
    "scale_fmt": "ue8m0",
    "expert_dtype": "fp4",
}
_FIXED_V4: Final = {"model_type": V4.model_type, "mlp_bias": False, **_FIXED_BOTH}
_FIXED_V4_QUANTIZATION: Final = {
    "quant_method": "fp8",
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "weight_block_size": [V4.tile, V4.tile],
    "scale_fmt": "ue8m0",
}
# Fields that never change the forward; carried through to_hf untouched. (`dtype` says how plain tensors are stored.)
_INERT: Final = {
    "architectures",
    "auto_map",
    "dtype",
    "torch_dtype",
    "transformers_version",
    "use_cache",
    "initializer_range",
    "_name_or_path",
}
# The same of training settings that transformers writes into V4's.
_INERT_V4: Final = {
    *_INERT,
    *("chunk_size_feed_forward", "is_encoder_decoder", "output_attentions", "output_hidden_states", "return_dict"),
    *("output_router_logits", "router_aux_loss_coef", "router_jitter_noise", "problem_type", "id2label", "label2id"),
}
_TOP_FIELDS: Final = ("bos_token_id", "eos_token_id", "pad_token_id", "image_token_id")
# What V4 has no list or number for.
_NOT_V4: Final = {
    *("image_token_id", "kv_source_layer_ids", "index_source_layer_ids", "candidate_source_layer_id"),
    *("candidate_topk_blocks", "candidate_block_size"),
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


Fields = Mapping[str, bool]  # a name of `ModelConfig` that config.json has -> whether it must have it


def read(data: Mapping[str, Any], fields: Fields, where: str) -> dict[str, Any]:
    """The values of a `ModelConfig`; ValueError names the field that cannot be read, and `where` it stands."""
    model_type = data.get("model_type")
    if model_type == V41.model_type:
        return _read_v41(data, {name: must for name, must in fields.items() if name != "num_hash_layers"}, where)
    if model_type == V4.model_type:
        return _read_v4(data, fields, where)
    raise ValueError(
        f"{where}: model_type={model_type!r}, this loader reads {V41.model_type!r} (DeepSeek-V4.1) and {V4.model_type!r} "
        "(DeepSeek-V4)"
    )


def _read_v41(data: Mapping[str, Any], fields: Fields, where: str) -> dict[str, Any]:
    text = data.get("text_config")
    if not isinstance(text, Mapping):
        raise ValueError(f"{where}: text_config must be an object, found {text!r}")
    inert: list[tuple[str, str]] = []
    inside = {name: must for name, must in fields.items() if name not in _TOP_FIELDS}
    known_top = {*_FIXED_TOP, *_TOP_FIELDS, "quantization_config", "text_config", "vision_config"}
    _sort_fields(data, known_top, _FIXED_TOP, "", inert, where)
    _sort_fields(text, {*_FIXED_TEXT, *inside}, _FIXED_TEXT, "text_config", inert, where)
    values: dict[str, Any] = {name: data[name] for name in _TOP_FIELDS if name in data}
    values |= _pick(text, inside, "text_config.", where)
    values["rope_scaling"] = _rope_scaling(text.get("rope_scaling"), "text_config.", where)
    values["quantized"] = _read_quantization(data, _FIXED_QUANTIZATION, inert, where)
    vision = data.get("vision_config")
    if vision is not None:
        require_object(vision, "vision_config", where)
        names = {f.name for f in dataclasses.fields(VisionConfig)}
        fixed = {"model_type": "deepseek_v41_vision"}
        _sort_fields(vision, names | {"model_type"}, fixed, "vision_config", inert, where)
        if missing := sorted(names - {"max_wh_ratio"} - set(vision)):
            raise ValueError(f"{where}: vision_config lacks {missing}")
        values["vision"] = VisionConfig(**{k: v for k, v in vision.items() if k in names})
    return values | {"inert": tuple(inert)}


def _read_v4(data: Mapping[str, Any], fields: Fields, where: str) -> dict[str, Any]:
    if "text_config" in data:
        raise ValueError(
            f"{where}: model_type={V4.model_type!r} has its fields at the top, but there is a text_config, which "
            f"{V41.model_type!r} has"
        )
    data = _as_released(data, where)
    inert: list[tuple[str, str]] = []
    inside = {name: must for name, must in fields.items() if name not in _NOT_V4}
    known = {*_FIXED_V4, *inside, "quantization_config", "expert_dtype"}
    _sort_fields(data, known, _FIXED_V4, "", inert, where, _INERT_V4)
    values = _pick(data, inside, "", where)
    values["rope_scaling"] = _rope_scaling(data.get("rope_scaling"), "", where)
    values["quantized"] = _read_quantization(data, _FIXED_V4_QUANTIZATION, inert, where)
    if values["quantized"] and data.get("expert_dtype", "fp4") != "fp4":
        raise ValueError(f"{where}: expert_dtype={data['expert_dtype']!r} is not supported, only 'fp4'")
    values = {name: value for name, value in values.items() if value is not None or name == "rope_scaling"}
    ratios = values["compress_ratios"]
    if not isinstance(ratios, tuple) or not all(isinstance(m, int) for m in ratios):
        raise ValueError(f"{where}: compress_ratios={ratios!r} must be a list of integers")
    layers = range(min(len(ratios), int(values["num_hidden_layers"] or 0)))
    return (
        {"rms_norm_eps": 1e-6}
        | values
        | {
            "model_type": V4.model_type,
            "kv_source_layer_ids": tuple(i for i in layers if ratios[i]),
            "index_source_layer_ids": tuple(i for i in layers if ratios[i] == OVERLAPPING),
            "inert": tuple(inert),
        }
    )


def _as_released(data: Mapping[str, Any], where: str) -> dict[str, Any]:
    """V4's fields as transformers writes them, in the release's spelling."""
    data = dict(data)
    layers = data.get("num_hidden_layers")
    if "layer_types" in data:
        rates = {"sliding_attention": 0, **data.pop("compress_rates", {})}
        types = data.pop("layer_types")
        if unknown := sorted({str(kind) for kind in types if kind not in rates}):
            raise ValueError(f"{where}: layer_types holds {unknown}, of which compress_rates={rates} says nothing")
        if rates.get("compressed_sparse_attention", OVERLAPPING) != OVERLAPPING:
            raise ValueError(
                f"{where}: compress_rates says {rates['compressed_sparse_attention']} tokens for compressed_sparse_attention; "
                f"only {OVERLAPPING}, which the release has, is supported"
            )
        # The layer that predicts further tokens is not among the weights that transformers keeps.
        data |= {"compress_ratios": [rates[kind] for kind in types], "num_nextn_predict_layers": 0}
    if "mlp_layer_types" in data:
        types = data.pop("mlp_layer_types")
        hashed = sum(kind == "hash_moe" for kind in types)
        if list(types) != ["hash_moe"] * hashed + ["moe"] * (len(types) - hashed) or len(types) != layers:
            raise ValueError(
                f"{where}: mlp_layer_types={types!r} must be 'hash_moe' for some first layers and 'moe' for all others"
            )
        data["num_hash_layers"] = hashed
    if "rope_parameters" in data:
        turns = data.pop("rope_parameters")
        require_object(turns, "rope_parameters", where)
        for name in ("main", "compress"):
            require_object(turns.get(name), f"rope_parameters.{name}", where)
        main, compress = dict(turns["main"]), dict(turns["compress"])
        data["rope_theta"], data["compress_rope_theta"] = main.get("rope_theta"), compress.pop("rope_theta", None)
        if compress.get("rope_type", "default") != "default":
            if compress.pop("attention_factor", 1.0) != 1.0:
                raise ValueError(f"{where}: rope_parameters.compress.attention_factor must be 1.0, as in the release")
            compress.pop("partial_rotary_factor", None)
            data["rope_scaling"] = compress
    if "partial_rotary_factor" in data:
        share = data.pop("partial_rotary_factor")
        data.setdefault("qk_rope_head_dim", int(data.get("head_dim", 0) * share))
    return data


def _pick(data: Mapping[str, Any], fields: Fields, prefix: str, where: str) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for name, must in fields.items():
        if name in data:
            value = data[name]
            values[name] = tuple(value) if isinstance(value, list) else value
        elif must:
            raise ValueError(f"{where}: {prefix}{name} is missing")
    return values


def _read_quantization(
    data: Mapping[str, Any], fixed: Mapping[str, Any], inert: list[tuple[str, str]], where: str
) -> bool:
    found = data.get("quantization_config")
    if found is None:
        return False
    require_object(found, "quantization_config", where)
    known = set(fixed) | {"expert_dtype"}
    _sort_fields(found, known, fixed, "quantization_config", inert, where)
    if missing := sorted(set(fixed) - set(found)):
        raise ValueError(f"{where}: quantization_config lacks {missing}")
    return True


def write(values: Mapping[str, Any]) -> dict[str, Any]:
    """config.json of the values of a `ModelConfig`, in its generation's layout."""
    scaling = values["rope_scaling"]
    yarn = {} if scaling is None else {"rope_scaling": {"rope_type": "yarn", **dataclasses.asdict(scaling)}}
    others = {name: list(v) if isinstance(v, tuple) else v for name, v in values.items() if name not in _OWN}
    if values["model_type"] == V4.model_type:
        top = {**_FIXED_V4, **{name: v for name, v in others.items() if name not in _NOT_V4}, **yarn}
        # V4 has none of what V4.1 brought.
        top = {name: v for name, v in top.items() if not name.startswith(("engram_", "dspark_"))}
        if values["quantized"]:
            top |= {"expert_dtype": "fp4", "quantization_config": _FIXED_V4_QUANTIZATION}
    else:
        text = {name: v for name, v in others.items() if name not in (*_TOP_FIELDS, "num_hash_layers")}
        top = {**_FIXED_TOP, **{name: values[name] for name in _TOP_FIELDS}}
        if values["quantized"]:
            top["quantization_config"] = _FIXED_QUANTIZATION
        top["text_config"] = {**_FIXED_TEXT, **text, **({"rope_scaling": None} | yarn)}
        if values["vision"] is not None:
            top["vision_config"] = {"model_type": "deepseek_v41_vision", **dataclasses.asdict(values["vision"])}
    top = json.loads(json.dumps(top))  # nothing of ours is handed out
    for dotted, value in values["inert"]:
        section, _, name = dotted.rpartition(".")
        (top[section] if section else top)[name] = json.loads(value)
    return top


_OWN: Final = {"model_type", "quantized", "vision", "inert", "rope_scaling"}  # not written as they are


def require_object(data: Any, section: str, where: str) -> None:
    if not isinstance(data, Mapping):
        raise ValueError(f"{where}: {section}={data!r} must be an object")


def _sort_fields(
    data: Mapping[str, Any],
    known: set[str],
    fixed: Mapping[str, Any],
    section: str,
    inert: list[tuple[str, str]],
    where: str,
    harmless: set[str] = _INERT,
) -> None:
    """Refuse unknown fields and unsupported fixed values; set inert ones aside."""
    prefix = f"{section}." if section else ""
    for name, value in data.items():
        if name in fixed and value != fixed[name]:
            raise ValueError(f"{where}: {prefix}{name}={value!r} is not supported, only {fixed[name]!r}")
        if name in known:
            continue
        if name in harmless:
            inert.append((f"{prefix}{name}", json.dumps(value)))
        else:
            raise ValueError(
                f"{where}: {prefix}{name}={value!r} is not a field that this implementation knows; "
                "it may change the forward, so it is refused. Remove it if it does not"
            )


def _rope_scaling(data: Any, prefix: str, where: str) -> RopeScaling | None:
    if data is None:
        return None
    require_object(data, f"{prefix}rope_scaling", where)
    if "rope_type" in data and data.get("type", data["rope_type"]) != data["rope_type"]:
        raise ValueError(f"{where}: {prefix}rope_scaling has rope_type={data['rope_type']!r} and type={data['type']!r}")
    names = {f.name for f in dataclasses.fields(RopeScaling)}
    kind = data.get("rope_type", data.get("type"))
    if kind != "yarn":
        raise ValueError(f"{where}: {prefix}rope_scaling.rope_type={kind!r} is not supported, only 'yarn'")
    if unknown := sorted(set(data) - names - {"rope_type", "type"}):
        raise ValueError(f"{where}: {prefix}rope_scaling has fields {unknown} that this implementation does not know")
    if missing := sorted({"factor", "original_max_position_embeddings"} - set(data)):
        raise ValueError(f"{where}: {prefix}rope_scaling lacks {missing}")
    return RopeScaling(**{k: v for k, v in data.items() if k in names})
