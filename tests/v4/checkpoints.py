"""Random DeepSeek-V4 checkpoints in the release's layout: plain, or quantised as the release is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final, Literal

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from csa2_jax import ModelConfig
from csa2_jax.manifest import release_tensors

CONFIG: Final[dict[str, Any]] = {
    "model_type": "deepseek_v4",
    "vocab_size": 64,
    "hidden_size": 32,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "head_dim": 96,
    "qk_rope_head_dim": 32,
    "q_lora_rank": 32,
    "o_lora_rank": 16,
    "o_groups": 2,
    "max_position_embeddings": 512,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "sliding_window": 5,
    "compress_ratios": [0, 4, 8, 4],
    "index_n_heads": 8,
    "index_head_dim": 32,
    "index_topk": 2,
    "num_hash_layers": 1,
    "hc_mult": 2,
    "num_nextn_predict_layers": 0,
    "rope_scaling": {
        "type": "yarn",
        "factor": 4,
        "beta_fast": 32,
        "beta_slow": 1,
        "original_max_position_embeddings": 64,
    },
}
QUANTIZATION: Final = {
    "quant_method": "fp8",
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "scale_fmt": "ue8m0",
    "weight_block_size": [128, 128],
}


def config_of(storage: Literal["f32", "bf16", "quantised"] = "f32", **changes: Any) -> ModelConfig:
    """`CONFIG` with changes, as a checkpoint of that storage would have it."""
    data = CONFIG | changes
    if storage == "quantised":
        data |= {"expert_dtype": "fp4", "quantization_config": QUANTIZATION}
    else:
        data |= {"torch_dtype": {"f32": "float32", "bf16": "bfloat16"}[storage]}
    return ModelConfig.from_hf(data)


def tensors_of(config: ModelConfig, seed: int = 0) -> dict[str, np.ndarray]:
    """Every tensor at random: gains around 1, ids of experts all different, codes and scales of ordinary size."""
    rng = np.random.default_rng(seed)
    made: dict[str, np.ndarray] = {}
    for spec in release_tensors(config):
        if spec.dtype == "I64":
            rows = [rng.permutation(config.n_routed_experts)[: spec.shape[1]] for _ in range(spec.shape[0])]
            made[spec.name] = np.stack(rows).astype(np.int64)
        elif spec.dtype == "I8":
            made[spec.name] = rng.integers(-128, 128, spec.shape).astype(np.int8)
        elif spec.dtype == "F8_E8M0":
            made[spec.name] = rng.integers(121, 125, spec.shape).astype(np.uint8).view(ml_dtypes.float8_e8m0fnu)
        else:
            values = rng.standard_normal(spec.shape)
            values = 1 + 0.2 * values if "norm" in spec.name else 0.3 * values
            kinds = {"BF16": ml_dtypes.bfloat16, "F32": np.float32, "F8_E4M3": ml_dtypes.float8_e4m3fn}
            made[spec.name] = (values * (10 if spec.dtype == "F8_E4M3" else 1)).astype(kinds[spec.dtype])
    return made


def write(directory: Path, config: ModelConfig, tensors: dict[str, np.ndarray]) -> Path:
    """A checkpoint of one file."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config.to_hf()), encoding="utf-8")
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory
