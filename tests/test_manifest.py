"""The manifest: exact totals at the released numbers, and equal to the header of every recorded checkpoint."""

from __future__ import annotations

import dataclasses
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from csa2_jax import manifest
from csa2_jax.config import ModelConfig
from csa2_jax.safetensors_io import TensorFiles
from tests import golden_sets

CONFIGS = Path(__file__).resolve().parent.parent / "configs"


def config(name: str) -> ModelConfig:
    return ModelConfig.from_hf(CONFIGS / f"{name}.json")


def by_name(c: ModelConfig) -> dict[str, manifest.TensorSpec]:
    return {t.name: t for t in manifest.release_tensors(c)}


@pytest.mark.smoke
def test_manifest_of_the_released_config_has_exact_totals() -> None:
    specs = list(manifest.release_tensors(config("v41_flash")))
    assert len(specs) == len({s.name for s in specs}) == 96_085
    assert sum(s.nbytes for s in specs) == 510_286_023_000
    totals = manifest.part_totals(config("v41_flash"))
    assert sum(t.tensors for t in totals) == 96_085
    assert sum(t.nbytes for t in totals) == 510_286_023_000
    assert sum(t.parameters for t in totals) == sum(s.parameters for s in specs)


@pytest.mark.parametrize("name", golden_sets.SETS)
def test_manifest_equals_the_header_of_a_recorded_checkpoint(name: str) -> None:
    directory = golden_sets.materialise(name)
    expected = {s.name: (s.dtype, s.shape) for s in by_name(ModelConfig.from_hf(directory)).values()}
    files = TensorFiles(directory)
    assert {entry.name: (entry.dtype, entry.shape) for entry in files.values()} == expected


def test_manifest_released_shapes_are_the_published_ones() -> None:
    specs = by_name(config("v41_flash"))

    def stored(name: str) -> tuple[str, tuple[int, ...]]:
        return specs[name].dtype, specs[name].shape

    assert stored("layers.7.attn.wq_b.weight") == ("F8_E4M3", (32768, 1280))
    assert stored("layers.7.attn.wq_b.scale") == ("F8_E8M0", (1024, 40))
    assert stored("layers.39.attn.wo_a.weight") == ("F8_E4M3", (8192, 4096))
    assert stored("layers.0.ffn.experts.383.w1.weight") == ("I8", (2304, 2560))
    assert stored("layers.0.ffn.experts.383.w2.weight") == ("I8", (5120, 1152))
    assert stored("layers.0.ffn.experts.383.w2.scale") == ("F8_E8M0", (5120, 72))
    assert stored("layers.20.attn.indexer.wk.weight") == ("BF16", (128, 512))
    assert stored("layers.14.engram.embed.weight") == ("F8_E4M3", (384_016_682, 256))
    assert stored("layers.14.engram.embed.scale") == ("F8_E8M0", (384_016_682, 8))
    assert stored("layers.1.engram.wkv.weight") == ("F8_E4M3", (25600, 6144))
    assert stored("mtp.0.main_proj.weight") == ("F8_E4M3", (5120, 15360))
    assert stored("mtp.2.confidence_head.proj.weight") == ("BF16", (1, 5376))
    assert stored("mtp.1.ffn.gate.bias_vl") == ("F32", (128,))
    assert stored("layers.3.hc_attn_fn") == ("F32", (24, 20480))
    assert stored("aligner.w1.weight") == ("BF16", (5120, 9216))


def test_manifest_gives_each_role_its_tensors_and_no_other() -> None:
    names = Counter(
        name.split(".", 2)[2]
        for name in by_name(config("v41_flash"))
        if name.startswith("layers.") and ".experts." not in name
    )
    assert names["attn.compressor.wkv.weight"] == 4
    assert names["attn.compressor.wgate.weight"] == 3  # not at one token per entry
    assert names["attn.indexer.wk.weight"] == names["attn.indexer.k_norm.weight"] == 4
    assert names["attn.indexer.wq_b.weight"] == names["attn.indexer.weights_proj.weight"] == 8
    assert names["ffn.gate.bias_vl"] == names["attn.wq_a.weight"] == 40
    assert "layers.20.attn.compressor.wgate.weight" not in by_name(config("v41_flash"))
    assert not [name for name in by_name(config("v41_flash")) if "hc_head" in name or name.endswith(".ape")]
    assert "ffn.gate.bias_vl" not in {name.split(".", 2)[-1] for name in by_name(config("v41_tiny"))}


@pytest.mark.parametrize("name", ["v41_flash", "v41_tiny", "v41_twin"])
def test_manifest_fills_each_slot_of_each_stack_once(name: str) -> None:
    c = config(name)
    slots: dict[str, list[tuple[int, ...]]] = {}
    shapes: dict[str, set[tuple[int, ...]]] = {}
    for spec in manifest.release_tensors(c):
        if spec.path is not None:
            slots.setdefault(spec.path, []).append(spec.index)
            shapes.setdefault(spec.path, set()).add(spec.shape)
    for path, indices in slots.items():
        assert len(shapes[path]) == 1, path
        stack = np.asarray(indices).reshape(len(indices), -1).max(axis=0, initial=-1) + 1
        assert len(set(indices)) == len(indices) == int(np.prod(stack)), path
    assert slots["layers.attn.wq_a.weight"] == [(i,) for i in range(c.num_hidden_layers)]
    assert len(slots["layers.ffn.experts.w1.weight"]) == c.num_hidden_layers * c.n_routed_experts
    assert slots["compressors.m1.wk.weight"] == [(0,)]
    assert [s for s in slots if s.startswith("compressors.m1.")] == [
        *(
            "compressors.m1.wkv.weight",
            "compressors.m1.norm.weight",
            "compressors.m1.wk.weight",
            "compressors.m1.k_norm.weight",
        )
    ]
    assert slots["engram_tables.1.weight"] == slots["draft.markov_embed.weight"] == [()]


def test_manifest_names_the_parameters_by_their_dotted_paths() -> None:
    specs = by_name(config("v41_flash"))

    def place(name: str) -> tuple[str | None, tuple[int, ...]]:
        return specs[name].path, specs[name].index

    assert place("layers.5.hc_ffn_scale") == ("layers.hc_ffn.scale", (5,))
    assert place("layers.5.ffn.experts.17.w3.scale") == ("layers.ffn.experts.w3.scale", (5, 17))
    assert place("layers.8.attn.compressor.wgate.weight") == ("compressors.m2.wgate.weight", (1,))
    assert place("layers.20.attn.indexer.k_norm.weight") == ("compressors.m1.k_norm.weight", (0,))
    assert place("layers.36.attn.indexer.wq_b.scale") == ("indexers.wq_b.scale", (7,))
    assert place("layers.14.engram.q_weight") == ("engram.q_weight", (1,))
    assert place("layers.14.engram.embed.scale") == ("engram_tables.1.scale", ())
    assert place("mtp.2.ffn.experts.5.w2.weight") == ("draft.stages.ffn.experts.w2.weight", (2, 5))
    assert place("mtp.0.main_norm.weight") == ("draft.main_norm.weight", ())
    assert place("mtp.2.markov_head.embed.weight") == ("draft.markov_embed.weight", ())
    assert place("mtp.2.confidence_head.proj.weight") == ("draft.confidence.weight", ())
    assert place("vision.blocks.3.attn.wqkv.bias") == (None, ())


def test_manifest_lists_the_parts_not_built_yet() -> None:
    assert manifest.unbuilt_parts(config("v41_flash")) == {"vision.*": 259, "aligner.*": 4, "image_*": 3}
    assert manifest.unbuilt_parts(config("v41_tiny")) == {}


def test_manifest_counts_two_parameters_per_packed_byte_and_none_per_scale() -> None:
    bf16, fp8 = config("v41_twin"), dataclasses.replace(config("v41_twin"), quantized=True)
    bf16 = dataclasses.replace(bf16, quantized=False)
    plain, quantised = by_name(bf16), by_name(fp8)
    assert sum(s.parameters for s in plain.values()) == sum(s.parameters for s in quantised.values())
    assert sum(s.nbytes for s in plain.values()) > 1.5 * sum(s.nbytes for s in quantised.values())
    expert = quantised["layers.0.ffn.experts.0.w1.weight"]
    assert expert.logical_shape == plain[expert.name].shape


def test_manifest_refuses_an_odd_width_in_packed_fp4() -> None:
    odd = dataclasses.replace(config("v41_tiny"), quantized=True, moe_intermediate_size=65)
    with pytest.raises(ValueError, match=r"layers\.0\.ffn\.experts\.0\.w2\.weight.*odd width of 65"):
        list(manifest.release_tensors(odd))
    assert list(manifest.release_tensors(dataclasses.replace(odd, quantized=False)))


def test_manifest_stores_f32_where_an_unquantised_config_declares_it() -> None:
    c = dataclasses.replace(config("v41_tiny"), quantized=False, inert=(("dtype", '"float32"'),))
    dtypes = {s.part: s.dtype for s in manifest.release_tensors(c)}
    assert dtypes["attention"] == dtypes["norms"] == "F32"
    assert by_name(c)["layers.1.engram.embed.weight"].dtype == "F8_E4M3"
    quantised = dataclasses.replace(c, quantized=True)
    assert by_name(quantised)["norm.weight"].dtype == "BF16"


def test_cache_bytes_are_the_published_ones() -> None:
    c = config("v41_flash")
    assert manifest.pool_entry_bytes(c) == 288 + 68
    assert manifest.cached_bytes_per_token(c) == 890.0
    assert manifest.window_bytes_per_sequence(c) == 528 * 128 * 40
    halved = dataclasses.replace(
        c,
        kv_source_layer_ids=(2, 8, 14),
        index_source_layer_ids=(2, 8, 14, 24, 28, 32, 36),
        candidate_source_layer_id=None,
        compress_ratios=(0, 0, *[2] * 38, 0, 0, 0),
    )
    assert manifest.cached_bytes_per_token(halved) == 3 * 178.0
