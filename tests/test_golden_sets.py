"""The recordings are what the manifest says, stay small, and unpack to exactly the files that were recorded."""

from __future__ import annotations

import json

import ml_dtypes
import numpy as np
import pytest

from tests import golden_sets
from tests.golden import codec, draws

MODULE_STEPS = {
    "tiny8_f32_noqat": (0, 1, 12, 23),
    "tiny8_f32": (0, 11, 12),
    "tiny8_bf16": (0, 11, 12),
    "tiny8_fp8": (0, 11, 12),
}
FULL_LAYERS = {"tiny8": (2, 5), "twin40": (2, 8, 14, 20)}
LIMIT = 21_000_000


def _files() -> set[str]:
    kept = (path for path in golden_sets.GOLDEN.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return {path.relative_to(golden_sets.GOLDEN).as_posix() for path in kept}


@pytest.mark.smoke
def test_manifest_matches_every_file():
    ours = {"manifest.json", "README.md", "codec.py", "draws.py", "trim.py"}
    pinned = golden_sets.manifest()["files"]
    # A recording that is kept for its own test, such as prompts.json, may lie here without being made by trim.py.
    assert set(pinned) | ours <= _files()
    for name, expected in pinned.items():
        assert golden_sets.sha256(golden_sets.GOLDEN / name) == expected, name


def test_folder_stays_small():
    total = sum((golden_sets.GOLDEN / name).stat().st_size for name in _files())
    assert total < LIMIT, f"{total:,} bytes of recordings, the limit is {LIMIT:,}"


@pytest.mark.parametrize("name", golden_sets.SETS)
def test_weights_are_the_recorded_bytes(name):
    path = golden_sets.materialise(name) / "model.safetensors"
    assert golden_sets.sha256(path) == golden_sets.manifest()["sets"][name]["sha256"]


@pytest.mark.parametrize("name", golden_sets.SETS)
def test_set_is_a_release_directory(name):
    directory = golden_sets.materialise(name)
    config = json.loads((directory / "config.json").read_text())
    meta = json.loads((directory / "meta.json").read_text())
    tensors = golden_sets.read_safetensors(directory / "model.safetensors")
    trace = golden_sets.load_trace(name)
    assert tensors["embed.weight"].dtype == ml_dtypes.bfloat16
    assert tensors["layers.1.engram.embed.scale"].dtype == np.uint8
    assert len(config["text_config"]["compress_ratios"]) > config["text_config"]["num_hidden_layers"]
    vocabulary = config["text_config"]["vocab_size"]
    assert trace["tokens"].shape == (meta["batch"], meta["prefill"] + meta["decode"])
    assert trace["prefill/logits_all"].shape == (meta["batch"], meta["prefill"], vocabulary)
    for step in range(meta["decode"]):
        assert trace[f"decode{step}/logits"].shape == (meta["batch"], vocabulary)


@pytest.mark.parametrize("name", MODULE_STEPS)
def test_trace_has_what_a_replay_of_single_modules_needs(name):
    """A step can be replayed module by module if its inputs were kept, and the caches of the step before."""
    trace = golden_sets.load_trace(name)
    layers = json.loads((golden_sets.materialise(name) / "config.json").read_text())["text_config"]["num_hidden_layers"]
    for number in MODULE_STEPS[name]:
        before = "prefill" if number == 0 else f"decode{number - 1}"
        for layer in range(layers):
            for leaf in (
                "attn_in",
                "attn_q",
                "attn_o",
                "attn_out",
                "attn_idx",
                "ffn_in",
                "ffn_out",
                "gate_idx",
                "gate_w",
                "h",
                "pre_mix",
            ):
                assert f"decode{number}/L{layer}/{leaf}" in trace
            assert f"{before}/L{layer}/window_kv_cache" in trace
        for layer in FULL_LAYERS["tiny8"]:
            assert f"{before}/L{layer}/compress_kv_cache" in trace
            assert f"{before}/L{layer}/index_k_cache" in trace


def test_no_trace_keeps_what_can_be_had_from_the_rest():
    for name in golden_sets.SETS:
        assert not [key for key in golden_sets.load_trace(name) if key.endswith("/attn_kv")], name


def test_materialise_refuses_an_unknown_set():
    with pytest.raises(ValueError, match="tiny8_fp8"):
        golden_sets.materialise("tiny9")


def test_materialise_makes_again_what_is_out_of_date(tmp_path, monkeypatch):
    monkeypatch.setattr(golden_sets, "CACHE", tmp_path)
    first = golden_sets.materialise("tiny8_f32")
    expected = golden_sets.sha256(first / "model.safetensors")
    (first / "model.safetensors").write_bytes(b"stale")
    (first / "made_from.txt").write_text("something older")
    second = golden_sets.materialise("tiny8_f32")
    assert second == first
    assert golden_sets.sha256(second / "model.safetensors") == expected
    assert [path.name for path in tmp_path.iterdir()] == ["tiny8_f32"]


def test_materialise_notices_a_wrong_pack(tmp_path, monkeypatch):
    """A pin that cannot fail would prove nothing."""
    monkeypatch.setattr(golden_sets, "CACHE", tmp_path)
    wrong = json.loads(json.dumps(golden_sets.manifest()))
    wrong["sets"]["tiny8_f32"]["sha256"] = "0" * 64
    monkeypatch.setattr(golden_sets, "manifest", lambda: wrong)
    with pytest.raises(ValueError, match="sha256"):
        golden_sets.materialise("tiny8_f32")
    assert list(tmp_path.iterdir()) == []


def test_pack_of_a_trace_is_lossless():
    rng = np.random.default_rng(0)
    arrays = {
        "floats": rng.standard_normal((3, 5)).astype(np.float32),
        "brain floats": rng.standard_normal(7).astype(ml_dtypes.bfloat16).astype(np.float32),
        "special": np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 1e-45], np.float32),
        "integers": np.array([-1, 0, 2**31 - 1, -(2**31)], np.int32),
        "long": np.array([-(2**63), 2**63 - 1]),
        "flags": np.array([[True], [False]]),
        "scalar": np.array(5),
        "empty": np.zeros((2, 0), np.float32),
    }
    again = codec.unpack_trace(codec.pack_trace(arrays))
    assert list(again) == list(arrays)
    for name, values in arrays.items():
        assert again[name].dtype == values.dtype, name
        assert again[name].shape == values.shape, name
        assert again[name].tobytes() == values.tobytes(), name


def test_a_drawn_tensor_is_found_again():
    bfloat16 = np.dtype(ml_dtypes.bfloat16)
    drawn = draws.Draw(start=12_345, factor=0.625, boosted=(3, 17))
    values = draws.draw(drawn, (32, 64), bfloat16)
    found = draws.find(values)
    assert found is not None
    assert (found.start, found.boosted) == (drawn.start, drawn.boosted)
    assert np.array_equal(draws.draw(found, (32, 64), bfloat16), values)
    assert draws.find(values[::-1].copy()) is None
