"""Checkpoints named as the open port in transformers names them are read as the release's; unknown names get the nearest."""

from __future__ import annotations

import re
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from csa2_jax import load_checkpoint
from csa2_jax.conversion.convert import convert
from csa2_jax.conversion.export import export
from csa2_jax.conversion.opening import open_checkpoint
from csa2_jax.conversion.port_names import release_name
from csa2_jax.safetensors_io import CheckpointError
from tests import random_checkpoint as rc
from tests.test_checkpoint import Tensors, make, parameters

# From the release's names to the port's, written down apart from the table that is tested.
TO_PORT = {
    "embed.weight": "model.embed_tokens.weight",
    "head.weight": "lm_head.weight",
    "norm.weight": "model.norm.weight",
}
IN_LAYER = {
    "attn_norm.weight": "input_layernorm.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "attn.q_norm.weight": "self_attn.q_a_norm.weight",
    "attn.kv_norm.weight": "self_attn.kv_norm.weight",
    "attn.attn_sink": "self_attn.sinks",
    "attn.compressor.wkv.weight": "self_attn.compressor.kv_proj.weight",
    "attn.compressor.wgate.weight": "self_attn.compressor.gate_proj.weight",
    "attn.compressor.norm.weight": "self_attn.compressor.kv_norm.weight",
    "attn.indexer.wk.weight": "self_attn.indexer.k_proj.weight",
    "attn.indexer.k_norm.weight": "self_attn.indexer.k_norm.weight",
    "attn.indexer.weights_proj.weight": "self_attn.indexer.weights_proj.weight",
    "ffn.gate.weight": "mlp.gate.weight",
    "ffn.gate.bias": "mlp.gate.e_score_correction_bias",
    "ffn.gate.bias_vl": "mlp.gate.e_score_correction_bias_vl",
    "engram.q_weight": "engram.q_weight",
    "engram.k_weight": "engram.k_weight",
} | {f"hc_{site}_{leaf}": f"{site}_hc.{leaf}" for site in ("attn", "ffn") for leaf in ("fn", "base", "scale")}
LINEARS = {
    "attn.wq_a": "self_attn.q_a_proj",
    "attn.wq_b": "self_attn.q_b_proj",
    "attn.wkv": "self_attn.kv_proj",
    "attn.wo_a": "self_attn.o_a_proj",
    "attn.wo_b": "self_attn.o_b_proj",
    "attn.indexer.wq_b": "self_attn.indexer.q_b_proj",
    "ffn.shared_experts.w1": "mlp.shared_experts.gate_proj",
    "ffn.shared_experts.w2": "mlp.shared_experts.down_proj",
    "ffn.shared_experts.w3": "mlp.shared_experts.up_proj",
    "engram.wkv": "engram.wkv",
}
SUFFIX = {"weight": "weight", "scale": "weight_scale_inv"}


def port(tensors: Tensors) -> Tensors:
    """The text model's tensors under the port's names: experts in two arrays a layer, tables in a list, no draft head."""
    out: Tensors = {}
    experts: dict[tuple[str, str], dict[tuple[int, str], np.ndarray]] = {}
    for name, value in tensors.items():
        if name.startswith("mtp."):
            continue
        if name in TO_PORT:
            out[TO_PORT[name]] = value
            continue
        _, layer, rest = name.split(".", 2)
        prefix = f"model.layers.{layer}."
        if routed := re.fullmatch(r"ffn\.experts\.(\d+)\.(w[123])\.(weight|scale)", rest):
            experts.setdefault((layer, routed[3]), {})[int(routed[1]), routed[2]] = value
        elif rest.startswith("engram.embed."):
            out[f"model.engram_tables.{layer}.{SUFFIX[rest.rpartition('.')[2]]}"] = value
        elif rest in IN_LAYER:
            out[prefix + IN_LAYER[rest]] = value
        else:
            linear, _, leaf = rest.rpartition(".")
            out[f"{prefix}{LINEARS[linear]}.{SUFFIX[leaf]}"] = value
    for (layer, leaf), held in experts.items():
        count = 1 + max(expert for expert, _ in held)
        tail = "_scale_inv" if leaf == "scale" else ""
        up = [np.concatenate([held[e, "w1"], held[e, "w3"]]) for e in range(count)]
        out[f"model.layers.{layer}.mlp.experts.gate_up_proj{tail}"] = np.stack(up)
        out[f"model.layers.{layer}.mlp.experts.down_proj{tail}"] = np.stack([held[e, "w2"] for e in range(count)])
    return out


@pytest.mark.parametrize("storage", ["bf16", "fp8"])
def test_port_names_load_as_the_release_does(storage: rc.Storage, tmp_path: Path) -> None:
    config, tensors = make(storage)
    source = rc.write_checkpoint(tmp_path / "port", config, port(tensors), shards=3)
    plain = {name: value for name, value in tensors.items() if not name.startswith("mtp.")}
    text = config["text_config"]
    text |= {"num_nextn_predict_layers": 0, "dspark_target_layer_ids": []}
    text["compress_ratios"] = text["compress_ratios"][: text["num_hidden_layers"]]
    expected = parameters(load_checkpoint(rc.write_checkpoint(tmp_path / "release", config, plain)))
    found = parameters(load_checkpoint(source))
    assert found.keys() == expected.keys()
    for path, value in expected.items():
        assert found[path].tobytes() == value.tobytes(), path
    # Converted and exported they have the release's names.
    convert(source, tmp_path / "orbax", piece_bytes=3000)
    export(tmp_path / "orbax", tmp_path / "back")
    back = open_checkpoint(tmp_path / "back")
    assert set(back.files) == set(plain)
    for name, value in plain.items():
        assert back.files.read(name).tobytes() == value.tobytes(), name  # type: ignore[union-attr]


def test_release_names_behind_a_prefix_are_the_release(tmp_path: Path) -> None:
    config, tensors = make("fp8")
    prefixed = {f"model.{name}": value for name, value in tensors.items()}
    one, two = (
        parameters(load_checkpoint(rc.write_checkpoint(tmp_path / d, config, t)))
        for d, t in (("a", prefixed), ("b", tensors))
    )
    assert all(one[path].tobytes() == value.tobytes() for path, value in two.items())


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("model.language_model.layers.3.self_attn.q_a_proj.weight", "layers.3.attn.wq_a.weight"),
        ("model.layers.3.self_attn.compressor.indexer.q_b_proj.weight_scale_inv", "layers.3.attn.indexer.wq_b.scale"),
        (
            "model.layers.3.self_attn.compressor.indexer.scorer.weights_proj.weight",
            "layers.3.attn.indexer.weights_proj.weight",
        ),
        ("layers.3.attn_hc.scale", "layers.3.hc_attn_scale"),  # of the residual mix, not of a weight
        ("model.layers.3.mlp.experts.5.gate_proj.weight", "layers.3.ffn.experts.5.w1.weight"),
        ("model.visual.blocks.2.attn.qkv.weight", "vision.blocks.2.attn.wqkv.weight"),
        ("model.aligner.w1.weight", "aligner.w1.weight"),
        ("layers.3.attn.wq_a.weight", "layers.3.attn.wq_a.weight"),
    ],
)
def test_names_one_by_one(name: str, expected: str) -> None:
    assert release_name(name) == expected


def test_unknown_port_name_is_refused_with_the_nearest(tmp_path: Path) -> None:
    config, tensors = make("fp8")
    named = port(tensors)
    named["model.layers.1.self_attn.kv_projection.weight"] = named.pop("model.layers.1.self_attn.kv_proj.weight")
    source = rc.write_checkpoint(tmp_path, config, named)
    with pytest.raises(CheckpointError, match=r"layers\.1\.attn\.(kv_projection|wkv)\.weight"):
        load_checkpoint(source)


def test_two_names_for_one_tensor_are_refused(tmp_path: Path) -> None:
    config, tensors = make("bf16")
    named = port(tensors)
    named["layers.1.attn.wkv.weight"] = named["model.layers.1.self_attn.kv_proj.weight"]
    with pytest.raises(CheckpointError, match=r"are both layers\.1\.attn\.wkv\.weight: remove one"):
        load_checkpoint(rc.write_checkpoint(tmp_path, config, named))


def test_fused_experts_of_another_shape_are_refused(tmp_path: Path) -> None:
    config, tensors = make("bf16")
    named = port(tensors)
    named["model.layers.1.mlp.experts.gate_up_proj"] = np.zeros((4, 5), ml_dtypes.bfloat16)
    with pytest.raises(CheckpointError, match=r"gate_up_proj has shape \[4, 5\], expected \[experts, out, in\]"):
        load_checkpoint(rc.write_checkpoint(tmp_path, config, named))
