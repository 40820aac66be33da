"""DeepSeek-V4's config.json in both spellings, what it implies, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from csa2_jax import ModelConfig
from csa2_jax.cli import main
from csa2_jax.manifest import absent_slots, cached_bytes_per_token, release_tensors, scale_tile
from csa2_jax.plan import Mode
from csa2_jax.state import measure_cache
from tests.v4.checkpoints import CONFIG

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
FLASH, PRO = (ModelConfig.from_hf(CONFIGS / f"{name}.json") for name in ("v4_flash", "v4_pro"))


def test_released_configurations_come_back_as_they_were() -> None:
    for name, config in (("v4_flash", FLASH), ("v4_pro", PRO)):
        written, read = config.to_hf(), json.loads((CONFIGS / f"{name}.json").read_text())
        scaling = written.pop("rope_scaling"), read.pop("rope_scaling")
        assert scaling[0] == {k: v for k, v in scaling[1].items() if k != "type"} | {"rope_type": "yarn"}
        assert {k: written[k] for k in read} == read
        assert ModelConfig.from_hf(config.to_hf()) == config


def test_plan_of_the_released_model() -> None:
    """0, 0, then CSA on even and HCA on odd layers; one scan walks the pairs."""
    modes = [spec.mode for spec in FLASH.plan.layers]
    assert modes == [Mode.SWA] * 2 + [Mode.CSA, Mode.HCA] * 20 + [Mode.CSA]
    pairs = FLASH.plan.segments[1]
    assert (pairs.mode, pairs.ratio, pairs.tail_mode, pairs.tail_ratio) == (Mode.CSA, 4, Mode.HCA, 128)
    assert (len(pairs.heads), pairs.tail_length, len(FLASH.plan.segments)) == (20, 1, 3)
    assert FLASH.plan.index_layers == tuple(range(2, 43, 2))
    assert [len(FLASH.plan.pool_layers(m)) for m in FLASH.plan.ratios] == [21, 20]
    assert [s.mode for s in PRO.plan.segments] == [Mode.HCA, Mode.CSA, Mode.CSA]
    spec = FLASH.plan.layers[3]
    assert (spec.makes, spec.reads, spec.pool_source, spec.selection_source) == (("pool",), (), 3, None)


def test_cached_bytes_per_token_are_those_of_the_arrays() -> None:
    """21 (584 + 68) / 4 + 20 584 / 128 = 3,514.25, by formula and measured on abstract arrays of a packed cache."""
    assert cached_bytes_per_token(FLASH) == measure_cache(FLASH).per_token == 3514.25
    assert cached_bytes_per_token(PRO) == measure_cache(PRO).per_token == 30 * 652 / 4 + 31 * 584 / 128


def test_tensors_of_the_released_checkpoints() -> None:
    flash = {spec.name: spec for spec in release_tensors(FLASH)}
    assert (len(flash), sum(spec.nbytes for spec in flash.values())) == (69187, 159_609_485_896)
    assert sum(name.startswith("mtp.0.") for name in flash) == 1575
    for name, shape, dtype in (
        ("layers.0.ffn.gate.tid2eid", (129280, 6), "I64"),
        ("layers.3.ffn.gate.bias", (256,), "F32"),
        ("layers.2.attn.compressor.ape", (4, 1024), "F32"),
        ("layers.3.attn.compressor.ape", (128, 512), "F32"),
        ("layers.2.attn.indexer.compressor.wkv.weight", (256, 4096), "BF16"),
        ("layers.2.attn.indexer.wq_b.weight", (8192, 1024), "F8_E4M3"),
        ("layers.2.attn.indexer.wq_b.scale", (64, 8), "F8_E8M0"),
        ("layers.5.ffn.experts.7.w1.weight", (2048, 2048), "I8"),
        ("layers.5.ffn.experts.7.w1.scale", (2048, 128), "F8_E8M0"),
        ("hc_head_fn", (4, 16384), "F32"),
    ):
        assert (flash[name].shape, flash[name].dtype) == (shape, dtype), name
    assert not any(name.startswith(("layers.0.attn.compressor", "layers.3.attn.indexer")) for name in flash)
    assert "layers.2.ffn.gate.bias" not in flash
    assert absent_slots(FLASH) == {"layers.ffn.gate.bias": frozenset({(0,), (1,), (2,)})}


def test_scales_tell_their_tile() -> None:
    assert scale_tile((256, 512), (2, 4)) == (128, 128)
    assert scale_tile((256, 512), (8, 16)) == (32, 32)
    assert scale_tile((256, 512), (256, 16)) == (1, 32)
    with pytest.raises(ValueError, match=r"\[3, 4\] fit no weight of shape \[256, 512\]"):
        scale_tile((256, 512), (3, 4))


def test_transformers_spelling_means_the_same() -> None:
    ours = ModelConfig.from_hf(CONFIG)
    theirs: dict[str, Any] = {
        k: v for k, v in CONFIG.items() if k not in ("compress_ratios", "rope_scaling", "num_hash_layers")
    }
    theirs |= {
        "layer_types": [
            *("sliding_attention", "compressed_sparse_attention"),
            *("heavily_compressed_attention", "compressed_sparse_attention"),
        ],
        "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8},
        "mlp_layer_types": ["hash_moe", "moe", "moe", "moe"],
        "partial_rotary_factor": 1 / 3,
        "rope_parameters": {
            "main": {"rope_type": "default", "rope_theta": 10000.0},
            "compress": {
                "rope_theta": 160000.0,
                "attention_factor": 1.0,
                **CONFIG["rope_scaling"],
                "rope_type": "yarn",
            },
        },
        "num_nextn_predict_layers": 1,  # which transformers does not keep
        "router_aux_loss_coef": 0.001,
    }
    found = ModelConfig.from_hf(theirs)
    assert {k: v for k, v in found.to_hf().items() if k != "router_aux_loss_coef"} == ours.to_hf()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"text_config": {}}, "has its fields at the top"),
        ({"kv_source_layer_ids": [1]}, "kv_source_layer_ids"),
        ({"engram_layer_ids": [1], "engram_num_embeddings": [5]}, "engram"),
        ({"compress_ratios": [0, 4, 8]}, "compress_ratios has 3 entries"),
        ({"compress_ratios": [0, 4, 1, 4]}, r"compress_ratios\[2\]=1"),
        ({"num_hash_layers": 4}, "num_hash_layers=4"),
        ({"index_head_dim": 48}, "index_head_dim=48 must be a power of two"),
        ({"scoring_func": "softmax"}, "scoring_func='softmax'"),
        ({"mlp_layer_types": ["moe", "hash_moe", "moe", "moe"]}, "mlp_layer_types"),
        ({"layer_types": ["full_attention"] * 4}, "full_attention"),
        ({"num_nextn_predict_layers": 1}, "expected num_hidden_layers=4"),
        ({"surprise": 1}, "surprise=1 is not a field"),
    ],
)
def test_contradictions_are_refused_by_value(change: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        ModelConfig.from_hf(CONFIG | change)


def test_inspect_describes_it(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["inspect", "--config", str(CONFIGS / "v4_flash.json"), "--png", str(tmp_path / "plan.png")]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "2 x SWA, 20 x (CSA m=4 + 1 HCA m=128), 1 x CSA m=4" in text
    assert "3,514.2 bytes per token" in text
    assert "69,187 tensors, 159,609,485,896 bytes" in text
    assert "mtp.* (1575)" in text
    assert (tmp_path / "plan.png").stat().st_size > 10_000
