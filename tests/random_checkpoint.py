"""Small random models in the release layout: configurations, tensors with checkpoint-like gains, safetensors files.

Configurations satisfy every rule of the model: each pool source is an index source too, a group has one compression
ratio, and the candidate blocks kept always hold at least `index_topk` visible entries once they drop any. Tensors have
the small norm gains of a trained checkpoint, and linears scaled to undo them, so that attention is neither uniform nor
one-hot and a wrong selection, sink or residual mix moves the logits.
"""

from __future__ import annotations

import copy
import json
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import ml_dtypes
import numpy as np
from hypothesis import strategies as st

from tests.oracle_config import ModelShape, engram_primes, layer_specs
from tests.oracle_formats import quantise_expert_fp4, quantise_rows_fp8, quantise_weight_fp8

Storage = Literal["bf16", "f32", "fp8"]
Choose = Callable[[str, Sequence[Any]], Any]

# --- configurations -----------------------------------------------------------------------------------------------

KNOBS = (
    *("vocab_size", "hidden_size", "moe_intermediate_size", "num_attention_heads", "head_dim", "qk_rope_head_dim"),
    *("o_groups", "o_lora_rank", "swa_layers", "encoder_ratios", "encoder_extra", "encoder_reindex", "decoder_extra"),
    *("sliding_window", "index_n_heads", "index_head_dim", "index_topk", "candidates", "candidate_block_size"),
    *("candidate_spare_blocks", "n_routed_experts", "num_experts_per_tok", "hc_mult", "hc_sinkhorn_iters"),
    *("engram_layers", "engram_max_ngram_size", "engram_n_heads", "engram_vocab_size", "draft_stages"),
    *("dspark_block_size", "draft_targets", "yarn"),
)


def random_config(
    rng: np.random.Generator | int | None = None, *, quantisable: bool = False, **knobs: Any
) -> dict[str, Any]:
    """A complete nested config.json; every knob of KNOBS that is not given is drawn from `rng`.

    `quantisable` keeps all widths on the scale groups of the number formats (needed for fp8 storage or fake-quant).
    Knobs that are not config fields: `swa_layers` count; `encoder_ratios` one per encoder group; `encoder_extra` and
    `decoder_extra` strings of "U" (REUSE) and "I" (REINDEX) after each group's FULL layer (all encoder groups share
    one string); `encoder_reindex` False turns "I" into "U" in encoders; `candidates` on/off; `candidate_spare_blocks`
    above the smallest legal number; `engram_layers` and `draft_targets` tuples of layer ids; `yarn` the original
    context length, 0 for off.
    """
    generator = np.random.default_rng(rng)

    def choose(name: str, options: Sequence[Any]) -> Any:
        return options[int(generator.integers(len(options)))]

    return _build_config(choose, quantisable, knobs)


@st.composite
def configs(draw: st.DrawFn, *, quantisable: bool = False, **knobs: Any) -> dict[str, Any]:
    """Hypothesis strategy over `random_config`; early options are the simple ones, so shrinking finds them."""
    return _build_config(lambda name, options: draw(st.sampled_from(options), label=name), quantisable, knobs)


def _layers(pick: Choose) -> tuple[list[int], list[int], list[int], int]:
    """(ratios, pool sources, index sources, first decoder layer): SWA layers, encoder groups, one decoder."""
    ratios = [0] * pick("swa_layers", (1, 2))
    extra = pick("encoder_extra", ("", "U", "I"))
    if not pick("encoder_reindex", (True, False)):
        extra = extra.replace("I", "U")
    groups = [(m, extra) for m in pick("encoder_ratios", ((2,), (3,), (4,), (2, 2), (3, 2), (2, 4)))]
    groups.append((1, pick("decoder_extra", ("U", "I", "UI", "IU", "II"))))
    pools, indices = [], []
    for m, extra in groups:
        pools.append(len(ratios))
        indices.append(len(ratios))
        ratios.append(m)
        for role in extra:
            if role == "I":
                indices.append(len(ratios))
            ratios.append(m)
    return ratios, pools, indices, pools[-1]


def _build_config(choose: Choose, quantisable: bool, knobs: dict[str, Any]) -> dict[str, Any]:
    if unknown := set(knobs) - set(KNOBS):
        raise TypeError(f"unknown knobs {sorted(unknown)}")

    def pick(name: str, options: Sequence[Any]) -> Any:
        return knobs[name] if name in knobs else choose(name, tuple(options))

    ratios, pools, indices, decoder = _layers(pick)
    count = len(ratios)
    vocab = pick("vocab_size", (64, 96, 128))
    groups = pick("o_groups", (1, 2))
    topk = pick("index_topk", (3, 2, 4, 6, 64))
    block = pick("candidate_block_size", (2, 1, 3, 4))
    blocks = -(-(topk - 1) // block) + 1 + pick("candidate_spare_blocks", (0, 1, 3))
    first = pick("engram_layers", ((), *((i,) for i in range(count)), *((i, count - 1) for i in range(count - 1))))
    ngram, memory_heads = pick("engram_max_ngram_size", (4, 3, 2)), pick("engram_n_heads", (2, 1))
    floor = pick("engram_vocab_size", (20, 50))
    stages = pick("draft_stages", (0, 1, 2))
    tails = [tuple(range(start, count)) for start in range(count - 1, max(decoder, count - 3) - 1, -1)]
    targets = pick("draft_targets", tails) if stages else ()
    experts = pick("n_routed_experts", (4, 6, 8))
    text = {
        "model_type": "deepseek_v41_text",
        "vocab_size": vocab,
        "hidden_size": pick("hidden_size", (32, 64)),
        "moe_intermediate_size": pick("moe_intermediate_size", (32, 64)),
        "num_hidden_layers": count,
        "num_attention_heads": pick("num_attention_heads", (2, 4)),
        "num_key_value_heads": 1,
        "head_dim": pick("head_dim", (32,) if quantisable else (16, 32)),
        "qk_rope_head_dim": pick("qk_rope_head_dim", (4, 8)),
        "q_lora_rank": 32,
        "o_lora_rank": pick("o_lora_rank", (32, 16) if groups == 2 else (32,)),
        "o_groups": groups,
        "hidden_act": "silu",
        "swiglu_limit": 10.0,
        "rms_norm_eps": 1e-20,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "use_cache": True,
        "tie_word_embeddings": False,
        "max_position_embeddings": 256,
        "rope_theta": 10000.0,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 16,
            "beta_fast": 32,
            "beta_slow": 1,
            "original_max_position_embeddings": pick("yarn", (0, 32, 512)),
        },
        "n_routed_experts": experts,
        "n_shared_experts": 1,
        "num_experts_per_tok": pick("num_experts_per_tok", (2, 1, 3)),
        "scoring_func": "sqrtsoftplus",
        "topk_method": "noaux_tc",
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.5,
        "sliding_window": pick("sliding_window", tuple(range(3, 9))),
        "compress_ratios": ratios + [0] * stages,
        "compress_rope_theta": 160000.0,
        "kv_source_layer_ids": pools,
        "index_source_layer_ids": indices,
        "index_n_heads": pick("index_n_heads", (2, 4, 8)),
        "index_head_dim": pick("index_head_dim", (32,) if quantisable else (16, 32)),
        "index_topk": topk,
        "candidate_source_layer_id": decoder if pick("candidates", (True, False)) else None,
        "candidate_topk_blocks": blocks,
        "candidate_block_size": block,
        "hc_mult": pick("hc_mult", (2, 4)),
        "hc_sinkhorn_iters": pick("hc_sinkhorn_iters", (20, 3)),
        "hc_eps": 1e-6,
        "engram_layer_ids": list(first),
        "engram_num_embeddings": [int(p.sum()) for p in engram_primes(len(first), ngram - 1, memory_heads, floor)],
        "engram_max_ngram_size": ngram,
        "engram_vocab_size": floor,
        "engram_n_heads": memory_heads,
        "engram_head_dim": 32,
        "engram_pad_token_id": 2,
        "engram_compressed_vocab_size": vocab // 2,
        "num_nextn_predict_layers": stages,
        "dspark_block_size": pick("dspark_block_size", (3, 2, 4)),
        "dspark_noise_token_id": vocab - 1,
        "dspark_target_layer_ids": list(targets),
        "dspark_markov_rank": 32,
        "dspark_n_routed_experts": 4,
        "dspark_num_experts_per_tok": 2,
    }
    config = {
        "architectures": ["DeepseekV41ForCausalLM"],
        "model_type": "deepseek_v41",
        "dtype": "bfloat16",
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 2,
        "image_token_id": 129264,
        "text_config": text,
        "vision_config": {
            "model_type": "deepseek_v41_vision",
            "num_hidden_layers": 0,
            "hidden_size": 1024,
            "num_attention_heads": 16,
            "intermediate_size": 2816,
            "patch_size": 14,
            "rope_theta": 10000.0,
            "downsample_ratio": 3,
            "max_image_tokens": 1024,
            "min_pixels": 295936,
            "max_wh_ratio": None,
        },
    }
    ModelShape.from_hf(config)  # refuses what the model's rules refuse
    return config


def config_for_storage(config: dict[str, Any], storage: Storage) -> dict[str, Any]:
    """A copy of `config` that declares the storage: fp8 adds the quantization block, f32 the dtype."""
    out = copy.deepcopy(config)
    out["dtype"] = "float32" if storage == "f32" else "bfloat16"
    if storage == "fp8":
        out["quantization_config"] = {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "weight_block_size": [32, 32],
            "scale_fmt": "ue8m0",
            "expert_dtype": "fp4",
        }
    return out


# --- tensors ------------------------------------------------------------------------------------------------------

ATTN_GAIN, FFN_GAIN, KV_GAIN, POOL_GAIN = 0.025, 0.2, 0.4, 0.6


class _Writer:
    """Draws tensors by release name and stores them in the storage's dtypes."""

    def __init__(self, rng: np.random.Generator, storage: Storage, residual_scale: float) -> None:
        self.rng, self.storage, self.residual = rng, storage, residual_scale
        self.tensors: dict[str, np.ndarray] = {}

    def normal(self, shape: tuple[int, ...], std: float, mean: float | np.ndarray = 0.0) -> np.ndarray:
        return (self.rng.standard_normal(shape) * std + mean).astype(np.float32)

    def plain(self, name: str, value: np.ndarray) -> None:
        """A tensor that is never quantised: bf16, or f32 in an f32 checkpoint."""
        self.tensors[name] = value if self.storage == "f32" else value.astype(ml_dtypes.bfloat16)

    def f32(self, name: str, value: np.ndarray) -> None:
        self.tensors[name] = value.astype(np.float32)

    def gain(self, name: str, width: int, mean: float) -> None:
        self.plain(f"{name}.weight", self.normal((width,), 0.1 * mean, mean))

    def linear(self, name: str, out: int, width: int, target: float, operand: float, kind: str = "plain") -> None:
        """[out, width] whose outputs have RMS about `target` when inputs have RMS `operand`."""
        self.weight(name, self.normal((out, width), target / (operand * width**0.5)), kind)

    def weight(self, name: str, value: np.ndarray, kind: str) -> None:
        if self.storage != "fp8" or kind == "plain":
            self.plain(f"{name}.weight", value)
            return
        quantise = quantise_weight_fp8 if kind == "fp8" else quantise_expert_fp4
        self.tensors[f"{name}.weight"], self.tensors[f"{name}.scale"] = quantise(value)

    def expert(self, name: str, width: int, inner: int, kind: str) -> None:
        """Gate and up near RMS 1.5, with one row in 16 six times larger so that the SwiGLU clamps bind."""
        for part in ("w1", "w3"):
            value = self.normal((inner, width), 1.5 / (FFN_GAIN * width**0.5))
            value[self.rng.permutation(inner)[: inner // 16]] *= 6
            self.weight(f"{name}.{part}", value, kind)
        self.linear(f"{name}.w2", width, inner, 0.5 * self.residual, 3.0, kind)


def random_tensors(
    config: dict[str, Any],
    rng: np.random.Generator | int | None = None,
    storage: Storage = "bf16",
    *,
    residual_scale: float = 1.0,
) -> dict[str, np.ndarray]:
    """Every tensor that a checkpoint of `config` holds, by release name, in stored dtypes.

    e8m0 scales are raw uint8, packed fp4 is int8. `residual_scale` shrinks what attention, experts and Engram write
    into the stream: about 0.1 keeps a flipped rounding step local in tests with fake-quant.
    """
    c, shape = config["text_config"], ModelShape.from_hf(config)
    w = _Writer(np.random.default_rng(rng), storage, residual_scale)
    d, vocab = c["hidden_size"], c["vocab_size"]
    w.plain("embed.weight", w.normal((vocab, d), 0.12))
    for layer, spec in enumerate(layer_specs(c)):
        prefix = f"layers.{layer}"
        _layer(w, c, prefix, c["n_routed_experts"])
        attn = f"{prefix}.attn"
        if spec.makes_pool:
            w.linear(f"{attn}.compressor.wkv", c["head_dim"], d, 1.0, ATTN_GAIN)
            if spec.ratio > 1:
                w.linear(f"{attn}.compressor.wgate", c["head_dim"], d, 1.5, ATTN_GAIN)
            w.gain(f"{attn}.compressor.norm", c["head_dim"], POOL_GAIN)
            w.linear(f"{attn}.indexer.wk", c["index_head_dim"], c["head_dim"], 1.0, POOL_GAIN)
            w.gain(f"{attn}.indexer.k_norm", c["index_head_dim"], 0.5)
        if spec.makes_selection:
            rows = c["index_n_heads"] * c["index_head_dim"]
            w.linear(f"{attn}.indexer.wq_b", rows, c["q_lora_rank"], 1.5, 1.0, "fp8")
            w.linear(f"{attn}.indexer.weights_proj", c["index_n_heads"], d, 1.0, ATTN_GAIN)
        if layer in shape.engram_layers:
            _engram(w, c, f"{prefix}.engram", shape.engram_rows[shape.engram_layers.index(layer)])
    _draft(w, c)
    w.gain("norm", d, 1.0)
    w.linear("head", vocab, d, 2.0, 1.0)
    return w.tensors


def _layer(w: _Writer, c: dict[str, Any], prefix: str, experts: int) -> None:
    """What every layer and every draft stage has (an SWA or REUSE layer has nothing else)."""
    d, n, heads, width = c["hidden_size"], c["hc_mult"], c["num_attention_heads"], c["head_dim"]
    attn = f"{prefix}.attn"
    w.gain(f"{prefix}.attn_norm", d, ATTN_GAIN)
    w.linear(f"{attn}.wq_a", c["q_lora_rank"], d, 1.0, ATTN_GAIN, "fp8")
    w.gain(f"{attn}.q_norm", c["q_lora_rank"], 0.97)
    w.linear(f"{attn}.wq_b", heads * width, c["q_lora_rank"], 3.0, 1.0, "fp8")
    w.linear(f"{attn}.wkv", width, d, 1.0, ATTN_GAIN, "fp8")
    w.gain(f"{attn}.kv_norm", width, KV_GAIN)
    w.f32(f"{attn}.attn_sink", w.normal((heads,), 0.5, 2.0))
    w.linear(f"{attn}.wo_a", c["o_groups"] * c["o_lora_rank"], heads * width // c["o_groups"], 1.0, 1.0, "fp8")
    w.linear(f"{attn}.wo_b", d, c["o_groups"] * c["o_lora_rank"], w.residual, 0.4, "fp8")
    w.gain(f"{prefix}.ffn_norm", d, FFN_GAIN)
    w.linear(f"{prefix}.ffn.gate", experts, d, 2.0, FFN_GAIN)
    w.f32(f"{prefix}.ffn.gate.bias", w.normal((experts,), 0.15))
    for expert in range(experts):
        w.expert(f"{prefix}.ffn.experts.{expert}", d, c["moe_intermediate_size"], "fp4")
    w.expert(f"{prefix}.ffn.shared_experts", d, c["moe_intermediate_size"], "fp8")
    for kind in ("attn", "ffn"):
        base = np.concatenate([np.zeros(2 * n), 2.0 * np.eye(n).ravel()])  # comb leans to the identity
        w.f32(f"{prefix}.hc_{kind}_fn", w.normal(((2 + n) * n, n * d), (n * d) ** -0.5))
        w.f32(f"{prefix}.hc_{kind}_base", w.normal(base.shape, 0.5, base))
        w.f32(f"{prefix}.hc_{kind}_scale", w.normal((3,), 0.15, 0.6))


def _engram(w: _Writer, c: dict[str, Any], prefix: str, rows: int) -> None:
    """The table is e4m3 with e8m0 scales in every storage."""
    d, n = c["hidden_size"], c["hc_mult"]
    columns = (c["engram_max_ngram_size"] - 1) * c["engram_n_heads"] * c["engram_head_dim"]
    table = quantise_rows_fp8(w.normal((rows, c["engram_head_dim"]), 0.5))
    w.tensors[f"{prefix}.embed.weight"], w.tensors[f"{prefix}.embed.scale"] = table
    w.linear(f"{prefix}.wkv", (n + 1) * d, columns, 0.5 * w.residual, 0.5, "fp8")
    w.plain(f"{prefix}.q_weight", w.normal((n, d), 0.2, 1.0))
    w.plain(f"{prefix}.k_weight", w.normal((n, d), 0.2, 1.0))


def _draft(w: _Writer, c: dict[str, Any]) -> None:
    """The first stage owns main_proj and main_norm, the last the norm, the Markov head and the confidence head."""
    stages, d, rank = c["num_nextn_predict_layers"], c["hidden_size"], c["dspark_markov_rank"]
    for stage in range(stages):
        prefix = f"mtp.{stage}"
        if stage == 0:
            w.linear(f"{prefix}.main_proj", d, len(c["dspark_target_layer_ids"]) * d, 1.0, 1.0, "fp8")
            w.gain(f"{prefix}.main_norm", d, ATTN_GAIN)
        _layer(w, c, prefix, c["dspark_n_routed_experts"])
        if stage == stages - 1:
            w.gain(f"{prefix}.norm", d, 1.0)
            w.plain(f"{prefix}.markov_head.embed.weight", w.normal((c["vocab_size"], rank), rank**-0.5))
            w.linear(f"{prefix}.markov_head.head", c["vocab_size"], rank, 1.0, rank**-0.5)
            w.linear(f"{prefix}.confidence_head.proj", 1, d + rank, 1.0, 1.0)


# --- files --------------------------------------------------------------------------------------------------------

_FILE_DTYPES = {
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F32": np.dtype(np.float32),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E8M0": np.dtype(np.uint8),
    "I8": np.dtype(np.int8),
}


def _file_dtype(name: str, tensor: np.ndarray) -> str:
    if tensor.dtype == np.uint8:
        return "F8_E8M0" if name.endswith((".scale", "scale_inv")) else "I8"
    for code, dtype in _FILE_DTYPES.items():
        if tensor.dtype == dtype:
            return code
    raise ValueError(f"{name}: no file dtype for {tensor.dtype}")


def _write_safetensors(path: Path, tensors: dict[str, np.ndarray]) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, tensor in tensors.items():
        end = offset + tensor.nbytes
        header[name] = {
            "dtype": _file_dtype(name, tensor),
            "shape": list(tensor.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for tensor in tensors.values():
            file.write(np.ascontiguousarray(tensor).tobytes())


def write_checkpoint(
    directory: str | Path, config: dict[str, Any], tensors: dict[str, np.ndarray], shards: int = 1
) -> Path:
    """Write config.json and safetensors (an index file too when there are several shards); returns the directory."""
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    if "layers.0.attn.wq_a.scale" in tensors:
        config = config_for_storage(config, "fp8")
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    if shards == 1:
        _write_safetensors(directory / "model.safetensors", tensors)
        return directory
    names, weight_map = list(tensors), {}
    for shard in range(shards):
        chosen = names[len(names) * shard // shards : len(names) * (shard + 1) // shards]
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        _write_safetensors(directory / file, {name: tensors[name] for name in chosen})
        weight_map.update(dict.fromkeys(chosen, file))
    index = {"metadata": {"total_size": sum(t.nbytes for t in tensors.values())}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
    return directory


def read_checkpoint(directory: str | Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """(config, tensors by release name) of any release-layout directory; e8m0 scales come back as raw uint8."""
    directory = Path(directory)
    tensors: dict[str, np.ndarray] = {}
    for path in sorted(directory.glob("*.safetensors")):
        raw = path.read_bytes()
        start = 8 + struct.unpack("<Q", raw[:8])[0]
        for name, entry in json.loads(raw[8:start]).items():
            if name != "__metadata__":
                first, last = entry["data_offsets"]
                data = np.frombuffer(raw[start + first : start + last], _FILE_DTYPES[entry["dtype"]])
                tensors[name] = data.reshape(entry["shape"])
    return json.loads((directory / "config.json").read_text()), tensors
