"""config.json in and out: nothing lost, nothing unknown accepted, every contradiction refused with its values."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from csa2_jax.config import ModelConfig

CONFIGS = Path(__file__).resolve().parent.parent / "configs"


def data(name: str = "v41_tiny") -> dict[str, Any]:
    return json.loads((CONFIGS / f"{name}.json").read_text())


def edited(edit: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    changed = copy.deepcopy(data())
    edit(changed)
    return changed


def text(**changes: Any) -> Callable[[dict[str, Any]], None]:
    return lambda d: d["text_config"].update(changes)


@pytest.mark.smoke
@pytest.mark.parametrize("path", sorted(CONFIGS.glob("v41_*.json")), ids=lambda p: p.stem)
def test_config_round_trip_loses_nothing(path: Path) -> None:
    source = json.loads(path.read_text())
    config = ModelConfig.from_hf(path)
    out = config.to_hf()
    assert ModelConfig.from_hf(out) == config
    assert hash(ModelConfig.from_hf(out)) == hash(config)

    def assert_kept(old: dict[str, Any], new: dict[str, Any], where: str) -> None:
        for name, value in old.items():
            if isinstance(value, dict):
                assert_kept(value, new[name], f"{where}{name}.")
            else:
                assert new[name] == value, f"{where}{name}"

    assert_kept(source, out, "")


def test_config_reads_path_directory_and_mapping_alike(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(data()))
    assert ModelConfig.from_hf(tmp_path) == ModelConfig.from_hf(tmp_path / "config.json") == ModelConfig.from_hf(data())


def test_config_has_the_released_numbers() -> None:
    c = ModelConfig.from_hf(CONFIGS / "v41_flash.json")
    assert (c.hidden_size, c.num_attention_heads, c.head_dim, c.n_routed_experts) == (5120, 64, 512, 384)
    assert (c.rms_norm_eps, c.hc_eps, c.rope_theta, c.compress_rope_theta) == (1e-20, 1e-6, 1e4, 16e4)
    assert c.engram_num_embeddings == tuple(e.rows for e in c.engram_constants) == (384006168, 384016682)
    assert c.engram_columns == 24
    assert c.quantized
    assert c.has_vision


def test_config_keeps_inert_fields_in_place() -> None:
    changed = edited(lambda d: (d.update(transformers_version="5.0"), d["text_config"].update(use_cache=False)))
    out = ModelConfig.from_hf(changed).to_hf()
    assert out["transformers_version"] == "5.0"
    assert out["text_config"]["use_cache"] is False


@pytest.mark.parametrize(
    ("edit", "values"),
    [
        pytest.param(text(use_qk_norm=True), ["text_config.use_qk_norm=True", "refused"], id="unknown_text"),
        pytest.param(lambda d: d.update(logit_scale=2.0), ["logit_scale=2.0", "refused"], id="unknown_top"),
        pytest.param(lambda d: d["vision_config"].update(mode="hd"), ["vision_config.mode='hd'"], id="unknown_vision"),
        pytest.param(
            text(
                rope_scaling={"rope_type": "yarn", "factor": 4, "original_max_position_embeddings": 32, "mscale": 1.0}
            ),
            ["rope_scaling", "mscale"],
            id="unknown_rope_field",
        ),
        pytest.param(text(rope_scaling={"rope_type": "llama3"}), ["rope_type='llama3'", "'yarn'"], id="other_rope"),
        pytest.param(text(rope_scaling={"rope_type": "yarn"}), ["factor", "original_max_position"], id="rope_lacks"),
        pytest.param(lambda d: d.update(model_type="deepseek_v4"), ["'deepseek_v4'", "'deepseek_v41'"], id="v4_config"),
        pytest.param(text(scoring_func="softmax"), ["scoring_func='softmax'", "'sqrtsoftplus'"], id="scoring"),
        pytest.param(text(hidden_act="gelu"), ["hidden_act='gelu'", "'silu'"], id="activation"),
        pytest.param(text(n_shared_experts=2), ["n_shared_experts=2", "only 1"], id="shared_experts"),
        pytest.param(text(num_key_value_heads=8), ["num_key_value_heads=8"], id="kv_heads"),
        pytest.param(text(tie_word_embeddings=True), ["tie_word_embeddings=True"], id="tied"),
        pytest.param(
            lambda d: d.update(quantization_config={"quant_method": "fp8", "weight_block_size": [128, 128]}),
            ["weight_block_size=[128, 128]", "[32, 32]"],
            id="tiles",
        ),
        pytest.param(
            lambda d: d.update(quantization_config={"quant_method": "fp8"}),
            ["quantization_config lacks"],
            id="quant_lacks",
        ),
        pytest.param(lambda d: d["text_config"].pop("head_dim"), ["text_config.head_dim is missing"], id="missing"),
        pytest.param(
            lambda d: d["vision_config"].pop("patch_size"), ["vision_config lacks", "patch_size"], id="vision_lacks"
        ),
        pytest.param(lambda d: d.update(text_config=None), ["text_config must be an object"], id="no_text_config"),
        pytest.param(text(head_dim="64"), ["head_dim='64'", "integer"], id="string"),
        pytest.param(text(head_dim=64.0), ["head_dim=64.0", "integer"], id="float"),
        pytest.param(text(hidden_size=True), ["hidden_size=True", "integer"], id="bool"),
        pytest.param(text(compress_ratios=[0, "2"]), ["compress_ratios", "list of integers"], id="list_of_strings"),
        pytest.param(text(rms_norm_eps="1e-20"), ["rms_norm_eps='1e-20'", "number"], id="eps_string"),
        pytest.param(text(hc_eps=-1.0), ["hc_eps=-1.0", "not negative"], id="eps_negative"),
        pytest.param(text(rope_theta=float("nan")), ["rope_theta=nan", "finite"], id="theta_nan"),
        pytest.param(text(compress_rope_theta=1.0), ["compress_rope_theta=1.0", "greater than 1"], id="theta_one"),
        pytest.param(text(rope_scaling="yarn"), ["rope_scaling='yarn'", "object"], id="rope_string"),
        pytest.param(
            text(rope_scaling={"rope_type": "yarn", "factor": "16", "original_max_position_embeddings": 32}),
            ["rope_scaling.factor='16'", "number"],
            id="rope_factor_string",
        ),
        pytest.param(
            text(
                rope_scaling={"rope_type": "yarn", "factor": 4, "original_max_position_embeddings": 32, "beta_fast": 0}
            ),
            ["rope_scaling.beta_fast=0", "positive"],
            id="rope_beta",
        ),
        pytest.param(
            text(rope_scaling={"rope_type": "yarn", "factor": 4, "original_max_position_embeddings": -5}),
            ["original_max_position_embeddings=-5"],
            id="rope_original",
        ),
        pytest.param(
            text(
                rope_scaling={"rope_type": "yarn", "type": "linear", "factor": 4, "original_max_position_embeddings": 8}
            ),
            ["rope_type='yarn'", "type='linear'"],
            id="rope_types_differ",
        ),
        pytest.param(lambda d: d.update(quantization_config="fp8"), ["quantization_config='fp8'"], id="quant_string"),
        pytest.param(lambda d: d.update(vision_config=[1]), ["vision_config=[1]"], id="vision_list"),
        pytest.param(
            lambda d: d["vision_config"].update(num_hidden_layers="3"), ["num_hidden_layers='3'"], id="vision_type"
        ),
        pytest.param(lambda d: d.update(eos_token_id=10**9), ["eos_token_id=1000000000", "256"], id="eos"),
        pytest.param(
            text(engram_vocab_size=2**25 - 1, engram_num_embeddings=[201326972, 201327560]),
            ["engram_vocab_size=33554431", "2**25"],
            id="engram_primes_too_large",
        ),
        pytest.param(text(hidden_size=0), ["hidden_size=0", "at least 1"], id="zero"),
        pytest.param(text(qk_rope_head_dim=15), ["qk_rope_head_dim=15", "even"], id="odd_rope"),
        pytest.param(text(qk_rope_head_dim=128), ["qk_rope_head_dim=128", "head_dim=64"], id="wide_rope"),
        pytest.param(text(index_head_dim=8), ["qk_rope_head_dim=16", "index_head_dim=8"], id="index_rope"),
        pytest.param(text(o_groups=3), ["num_attention_heads=4", "o_groups=3"], id="groups"),
        pytest.param(text(num_experts_per_tok=9), ["num_experts_per_tok=9", "n_routed_experts=8"], id="experts"),
        pytest.param(
            text(compress_ratios=[0, 0, 2, 2, 2, 1, 1, 1]), ["8 entries", "num_hidden_layers=8", "2"], id="ratios"
        ),
        pytest.param(text(compress_ratios=[0, 0, 2, 2, 2, 1, 1, 1, 0, 1]), ["compress_ratios[8:]"], id="draft_ratio"),
        # A query may run out of candidates only if that leaves fewer positions than it selects.
        pytest.param(
            text(candidate_topk_blocks=2, candidate_block_size=2, index_topk=4),
            ["candidate_topk_blocks=2", "candidate_block_size=2", "= 3", "index_topk=4"],
            id="candidate_rule",
        ),
        pytest.param(text(candidate_block_size=0), ["candidate_block_size=0", "at least 1"], id="candidate_block"),
        pytest.param(text(index_topk=0), ["index_topk=0"], id="topk"),
        pytest.param(text(engram_num_embeddings=[384]), ["[384]", "engram_layer_ids=[1, 5]"], id="engram_tables"),
        pytest.param(text(engram_num_embeddings=[384, 551]), ["551 rows", "layer 5", "552"], id="engram_rows"),
        pytest.param(text(engram_max_ngram_size=1), ["engram_max_ngram_size=1", "at least 2"], id="engram_ngram"),
        pytest.param(text(engram_compressed_vocab_size=257), ["=257", "vocab_size=256"], id="engram_vocab"),
        pytest.param(text(engram_pad_token_id=256), ["engram_pad_token_id=256", "256"], id="engram_pad"),
        pytest.param(
            text(dspark_target_layer_ids=[]), ["num_nextn_predict_layers=2", "dspark_target"], id="draft_targets"
        ),
        pytest.param(text(dspark_num_experts_per_tok=5), ["=5", "dspark_n_routed_experts=4"], id="draft_experts"),
        pytest.param(text(dspark_noise_token_id=256), ["dspark_noise_token_id=256", "256"], id="draft_noise"),
        pytest.param(text(kv_source_layer_ids=[2, 5, 6]), ["[6]", "index_source_layer_ids=[2, 5, 7]"], id="plan"),
    ],
)
def test_config_refuses_by_value(edit: Callable[[dict[str, Any]], None], values: list[str]) -> None:
    with pytest.raises(ValueError, match=re.escape(values[0])) as error:
        ModelConfig.from_hf(edited(edit))
    for value in values:
        assert value in str(error.value)


def test_config_accepts_candidates_that_just_suffice() -> None:
    # (3 - 1) * 2 + 1 = 5 visible candidates hold any selection of up to 5.
    assert ModelConfig.from_hf(edited(text(index_topk=5))).index_topk == 5
    with pytest.raises(ValueError, match="index_topk=6"):
        ModelConfig.from_hf(edited(text(index_topk=6)))


def test_config_refusal_names_the_file(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    with pytest.raises(FileNotFoundError, match=r"config\.json"):
        ModelConfig.from_hf(tmp_path)
    path.write_text("{")
    with pytest.raises(ValueError, match="not valid JSON"):
        ModelConfig.from_hf(tmp_path)
    path.write_text("[]")
    with pytest.raises(ValueError, match="JSON object, found list"):
        ModelConfig.from_hf(tmp_path)
    path.write_text(json.dumps(edited(text(head_dim=0))))
    with pytest.raises(ValueError, match=str(path)):
        ModelConfig.from_hf(tmp_path)
