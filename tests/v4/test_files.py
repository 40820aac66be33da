"""DeepSeek-V4 checkpoints in files: loaded, converted, exported, verified, refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from csa2_jax import forward, load_checkpoint
from csa2_jax.conversion.convert import convert
from csa2_jax.conversion.export import export
from csa2_jax.conversion.verify import verify
from csa2_jax.manifest import unbuilt_parts
from csa2_jax.safetensors_io import CheckpointError, TensorFiles
from csa2_jax.saving import save_checkpoint
from tests.conversion.test_round_trip import assert_same_tensors
from tests.small_models import quick_compilation, v4
from tests.test_checkpoint import parameters
from tests.v4 import checkpoints

# Widths that tiles of 128 do not divide; a layer that predicts further tokens.
KNOBS: dict[str, Any] = {"hidden_size": 160, "compress_ratios": [0, 4, 8, 4, 0], "num_nextn_predict_layers": 1}


def written(storage: Any, directory: Path, seed: int = 0, **knobs: Any) -> Path:
    config = checkpoints.config_of(storage, **(KNOBS | knobs))
    return checkpoints.write(directory, config, checkpoints.tensors_of(config, seed))


@pytest.mark.parametrize("storage", ["quantised", "bf16", "f32"])
def test_round_trip_is_exact(storage: str, tmp_path: Path) -> None:
    source = written(storage, tmp_path / "source")
    convert(source, tmp_path / "orbax", piece_bytes=4096)
    export(tmp_path / "orbax", tmp_path / "back")
    assert_same_tensors(source, tmp_path / "back")
    assert json.loads((source / "config.json").read_text()) == json.loads((tmp_path / "back/config.json").read_text())
    for pair in ((source, tmp_path / "orbax"), (tmp_path / "orbax", tmp_path / "back")):
        found = verify(*pair)
        assert (found.differences, found.exact) == ((), found.tensors)
        assert found.tensors == len(TensorFiles(source))


def test_converted_loads_as_the_release_does(tmp_path: Path) -> None:
    source = written("quantised", tmp_path / "source")
    convert(source, tmp_path / "orbax", piece_bytes=4096)
    for options in ({"compute_dtype": "float32"}, {"weights": "float32"}):
        found, expected = (parameters(load_checkpoint(d, **options)) for d in (tmp_path / "orbax", source))  # type: ignore[arg-type]
        assert found.keys() == expected.keys()
        for path, value in expected.items():
            assert (found[path].dtype, found[path].tobytes()) == (value.dtype, value.tobytes()), path


def test_parameters_are_the_tensors(tmp_path: Path) -> None:
    """Where they go, and that fp8 is dequantised by tiles of 128."""
    source = written("quantised", tmp_path / "source")
    files, found = TensorFiles(source), parameters(load_checkpoint(source, weights="float32"))
    np.testing.assert_array_equal(found["layers.ffn.by_token"][0], files.read("layers.0.ffn.gate.tid2eid"))
    assert found["layers.ffn.by_token"].dtype == np.int32
    assert not found["layers.ffn.gate.bias"][0].any()
    np.testing.assert_array_equal(found["layers.ffn.gate.bias"][2], files.read("layers.2.ffn.gate.bias"))
    np.testing.assert_array_equal(
        found["compressors.m4.keys.bias"][1], files.read("layers.3.attn.indexer.compressor.ape")
    )
    np.testing.assert_array_equal(found["compressors.m8.bias"][0], files.read("layers.2.attn.compressor.ape"))
    np.testing.assert_array_equal(found["collapse.fn"], files.read("hc_head_fn"))
    codes, scales = (files.read(f"layers.1.attn.wq_a.{leaf}") for leaf in ("weight", "scale"))
    grown = np.repeat(scales.astype(np.int32) - 127, 128, axis=1)[:, :160]  # 32 rows lie in one tile
    np.testing.assert_array_equal(found["layers.attn.wq_a.weight"][1], np.ldexp(codes.astype(np.float32), grown))


def test_quantised_again_from_numbers(tmp_path: Path) -> None:
    """Dequantised while converting and quantised while exporting: the same values in tiles of 128."""
    source = written("quantised", tmp_path / "source")
    convert(source, tmp_path / "orbax", weights="float32", piece_bytes=4096)
    export(tmp_path / "orbax", tmp_path / "again")
    again, expected = (parameters(load_checkpoint(d, weights="float32")) for d in (tmp_path / "again", source))
    for path, value in expected.items():
        np.testing.assert_array_equal(again[path], value, err_msg=path)


def test_a_model_is_saved_and_read_again(tmp_path: Path) -> None:
    model = v4().model
    save_checkpoint(model, tmp_path / "saved", weights="f32")
    found, expected = parameters(load_checkpoint(tmp_path / "saved", compute_dtype="float32")), parameters(model)
    for path, value in expected.items():
        np.testing.assert_array_equal(found[path], value, err_msg=path)


def test_parts_that_are_not_built_are_told() -> None:
    config = checkpoints.config_of("f32", **KNOBS)
    parts = unbuilt_parts(config)
    assert list(parts) == ["mtp.*"]
    assert parts["mtp.*"] == sum(name.startswith("mtp.") for name in checkpoints.tensors_of(config))


def test_quantised_weights_compute_what_their_numbers_do(tmp_path: Path) -> None:
    """Without roundings of operands the codes give the logits of the dequantised weights."""
    source = written("quantised", tmp_path / "source", hidden_size=32)
    tokens = np.random.default_rng(0).integers(0, 64, (1, 20))
    logits = []
    for weights in ("stored", "float32"):
        model = load_checkpoint(source, compute_dtype="float32", fake_quant=False, weights=weights)  # type: ignore[arg-type]
        with quick_compilation():
            logits.append(np.asarray(forward(model, tokens).logits))
    np.testing.assert_allclose(logits[0], logits[1], rtol=2e-5, atol=2e-5 * np.abs(logits[1]).max())


def test_tensors_of_the_other_generation_are_refused_by_name(tmp_path: Path) -> None:
    config = checkpoints.config_of("f32")
    tensors = checkpoints.tensors_of(config)
    foreign = tensors | {"layers.1.attn.indexer.wk.weight": np.zeros((32, 96), np.float32)}
    checkpoints.write(tmp_path / "mixed", config, foreign)
    with pytest.raises(
        CheckpointError, match=r"indexer\.wk\.weight.*DeepSeek-V4\.1 tensor set.*describes DeepSeek-V4;"
    ):
        load_checkpoint(tmp_path / "mixed")


def test_ids_of_experts_must_be_ids(tmp_path: Path) -> None:
    config = checkpoints.config_of("f32")
    for bad in (-1, config.n_routed_experts, 1 << 40):
        tensors = checkpoints.tensors_of(config)
        tensors["layers.0.ffn.gate.tid2eid"][5, 1] = bad
        directory = checkpoints.write(tmp_path / f"bad{bad}", config, tensors)
        with pytest.raises(CheckpointError, match=r"layers\.0\.ffn\.gate\.tid2eid"):
            load_checkpoint(directory, compute_dtype="float32")


def test_lost_and_misplaced_tensors_are_named(tmp_path: Path) -> None:
    config = checkpoints.config_of("f32")
    for lost in ("layers.1.attn.indexer.compressor.ape", "hc_head_base", "layers.2.attn.compressor.wgate.weight"):
        tensors = checkpoints.tensors_of(config)
        value = tensors.pop(lost)
        with pytest.raises(CheckpointError, match=lost.replace(".", r"\.")):
            load_checkpoint(checkpoints.write(tmp_path / f"lost {lost}", config, tensors))
        tensors[lost] = value.astype(ml_dtypes.bfloat16)[:1]
        with pytest.raises(CheckpointError, match=lost.replace(".", r"\.")):
            load_checkpoint(checkpoints.write(tmp_path / f"short {lost}", config, tensors))
