"""Loading: every value where it belongs, every damage refused by name before anything large is allocated."""

from __future__ import annotations

import io
import json
import shutil
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx

from csa2_jax import checkpoint, manifest
from csa2_jax.checkpoint import CheckpointError, load_checkpoint
from csa2_jax.config import ModelConfig
from csa2_jax.conversion import stacks
from csa2_jax.conversion.stacks import Source, Stack, dequantise
from csa2_jax.safetensors_io import TensorFiles
from tests import golden_sets
from tests import oracle_formats as formats
from tests import random_checkpoint as rc

Tensors = dict[str, np.ndarray]

# Two encoder groups of one ratio, a decoder with candidates and a REINDEX layer, Engram twice, two draft stages.
KNOBS: dict[str, Any] = {
    "swa_layers": 1,
    "encoder_ratios": (2, 2),
    "encoder_extra": "U",
    "decoder_extra": "UI",
    "candidates": True,
    "engram_layers": (0, 3),
    "draft_stages": 2,
    "draft_targets": (6, 7),
    "hidden_size": 64,
    "moe_intermediate_size": 32,
    "num_attention_heads": 4,
    "o_groups": 2,
    "o_lora_rank": 32,
}


def make(storage: rc.Storage, seed: int = 0, **knobs: Any) -> tuple[dict[str, Any], Tensors]:
    config = rc.random_config(seed, quantisable=True, **(KNOBS | knobs))
    return rc.config_for_storage(config, storage), rc.random_tensors(config, seed, storage)


@pytest.fixture(scope="module", params=["bf16", "fp8", "f32"])
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Tensors]:
    config, tensors = make(request.param)
    return rc.write_checkpoint(tmp_path_factory.mktemp(request.param), config, tensors), tensors


def parameters(model: nnx.Module) -> dict[str, np.ndarray]:
    return {".".join(map(str, key)): np.asarray(v[...]) for key, v in nnx.to_flat_state(nnx.state(model))}


def values(stored: np.ndarray, scale: np.ndarray | None) -> np.ndarray:
    """Float32 values of a stored weight, by the oracle's arithmetic."""
    if scale is None:
        return stored.astype(np.float32)
    if stored.dtype == np.int8:
        return formats.dequantise_expert_fp4(stored, scale)
    if scale.shape[0] == stored.shape[0]:
        return formats.dequantise_rows_fp8(stored, scale)
    return formats.dequantise_weight_fp8(stored, scale)


# ---- what a load holds ----


@pytest.mark.smoke
@pytest.mark.parametrize("weights", ["stored", "float32", "bfloat16"])
@pytest.mark.parametrize("compute_dtype", ["float32", "bfloat16"])
def test_load_puts_every_tensor_into_its_slot(made: tuple[Path, Tensors], compute_dtype: str, weights: str) -> None:
    directory, tensors = made
    config = ModelConfig.from_hf(directory)
    if manifest.plain_dtype(config) == "F32" and "bfloat16" in (
        weights,
        compute_dtype if weights == "stored" else weights,
    ):
        with pytest.raises(CheckpointError, match=r"stored as F32 and cannot become bfloat16.*weights='float32'"):
            load_checkpoint(directory, compute_dtype=compute_dtype, weights=weights)  # type: ignore[arg-type]
        return
    found = parameters(load_checkpoint(directory, compute_dtype=compute_dtype, weights=weights))  # type: ignore[arg-type]
    seen: Counter[str] = Counter()
    for spec in manifest.release_tensors(config):
        if spec.path not in found:
            assert spec.dtype == "F8_E8M0"
            assert spec.path.removesuffix(".scale") + ".weight" in found
            continue
        slot, stored = found[spec.path][spec.index], tensors[spec.name]
        seen[spec.path] += 1
        if spec.dtype in ("F8_E8M0", "I8", "F8_E4M3") and slot.dtype.itemsize == 1:
            assert slot.tobytes() == stored.tobytes(), spec.name
        else:
            scale = tensors.get(spec.name.removesuffix(".weight") + ".scale") if spec.name.endswith(".weight") else None
            np.testing.assert_array_equal(slot.astype(np.float32), values(stored, scale), err_msg=spec.name)
    assert sum(seen.values()) == sum(s.path in found for s in manifest.release_tensors(config))
    assert set(found) - set(seen) == {"token_map", "ngram_products"}


@pytest.mark.parametrize("made", ["bf16", "fp8"], indirect=True)
def test_load_keeps_f32_what_is_computed_in_f32(made: tuple[Path, Tensors]) -> None:
    directory, _ = made
    config = ModelConfig.from_hf(directory)
    found = parameters(load_checkpoint(directory, compute_dtype="bfloat16"))
    f32 = {path for path, value in found.items() if value.dtype == np.float32}
    stored_f32 = {s.path for s in manifest.release_tensors(config) if s.dtype == "F32"}
    assert stored_f32 <= f32
    assert {"layers.hc_attn.fn", "layers.attn.attn_sink", "layers.ffn.gate.bias", "layers.ffn.gate.weight"} <= f32
    assert {"compressors.m2.wkv.weight", "compressors.m2.wgate.weight"} <= f32
    assert found["embed.weight"].dtype == found["compressors.m1.wkv.weight"].dtype == ml_dtypes.bfloat16


def test_load_of_shards_equals_load_of_one_file(tmp_path: Path) -> None:
    config, tensors = make("fp8")
    one = load_checkpoint(rc.write_checkpoint(tmp_path / "one", config, tensors))
    many = load_checkpoint(rc.write_checkpoint(tmp_path / "many", config, tensors, shards=5))
    for a, b in zip(parameters(one).values(), parameters(many).values(), strict=True):
        assert a.tobytes() == b.tobytes()


def test_load_owns_its_memory(tmp_path: Path) -> None:
    config, tensors = make("bf16")
    directory = rc.write_checkpoint(tmp_path, config, tensors)
    model = load_checkpoint(directory)
    before = {path: value.copy() for path, value in parameters(model).items()}
    with (directory / "model.safetensors").open("r+b") as file:
        size = file.seek(0, 2)
        file.seek(size // 2)
        file.write(b"\xaa" * (size - size // 2))
    for path, value in parameters(model).items():
        assert value.tobytes() == before[path].tobytes()


def test_load_multimodal_checkpoint_for_text_leaves_the_tower_on_disk() -> None:
    directory = golden_sets.materialise("tiny8_vl_f32_noqat")
    model = load_checkpoint(directory, compute_dtype="float32")
    assert manifest.unbuilt_parts(model.config) == {"vision.*": 19, "aligner.*": 4, "image_*": 3}
    found = parameters(model)
    assert found["layers.ffn.gate.bias_vl"].shape == (8, 8)
    assert not [path for path in found if path.startswith(("vision", "aligner", "image"))]


def test_load_while_tracing_gives_arrays_to_keep(tmp_path: Path) -> None:
    config, tensors = make("bf16")
    directory = rc.write_checkpoint(tmp_path, config, tensors)
    kept = []

    @jax.jit
    def first_use() -> jax.Array:
        kept.append(load_checkpoint(directory))
        return kept[0].embed.weight[...].astype(jnp.float32).sum()

    assert np.isfinite(first_use())
    for a, b in zip(parameters(kept[0]).values(), parameters(load_checkpoint(directory)).values(), strict=True):
        assert a.tobytes() == b.tobytes()


class Terminal(io.StringIO):
    """A stderr somebody watches."""

    def isatty(self) -> bool:
        return True


def test_load_shows_progress_only_for_long_loads_on_a_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, tensors = make("fp8")
    directory = rc.write_checkpoint(tmp_path, config, tensors)
    shown = []
    for least, watched in ((0, True), (0, False), (10**9, True)):
        stderr = Terminal() if watched else io.StringIO()
        monkeypatch.setattr(checkpoint, "_PROGRESS_FROM", least)
        monkeypatch.setattr(sys, "stderr", stderr)
        load_checkpoint(directory, weights="float32")
        shown.append(stderr.getvalue())
    size = sum(t.nbytes for t in tensors.values()) / 1e6
    assert "loading weights" in shown[0]
    assert f"{size:.1f}/{size:.1f} MB" in shown[0]  # every byte was counted, scales included
    assert shown[1:] == ["", ""]


# ---- number formats ----


def test_dequantise_reads_every_scale_byte_exactly() -> None:
    scale = np.arange(255, dtype=np.uint8)[:, None]
    weight = np.ones((255, 32), ml_dtypes.float8_e4m3fn)
    out = np.empty((255, 32), np.float32)
    dequantise("w", weight, scale, out)
    # 2.0**-127 is subnormal in f32: written as an integer of 2**-149, it shows whether anything flushed it.
    assert out[0, 0] == np.float32(2.0**-127) != 0
    np.testing.assert_array_equal(
        out.astype(np.float64), np.repeat(2.0 ** (np.arange(255.0)[:, None] - 127), 32, axis=1)
    )


def test_dequantise_uses_one_scale_per_tile_of_a_ragged_weight() -> None:
    rng = np.random.default_rng(0)
    rows, width = 70, 100
    weight = rng.normal(size=(rows, width)).astype(ml_dtypes.float8_e4m3fn)
    scale = (np.arange(12, dtype=np.uint8) + 120).reshape(3, 4)  # all distinct
    expected = np.empty((rows, width), np.float64)
    for i in range(rows):
        for j in range(width):
            expected[i, j] = float(weight[i, j]) * 2.0 ** (int(scale[i // 32, j // 32]) - 127)
    for dtype in (np.float32, ml_dtypes.bfloat16):
        out = np.empty((rows, width), dtype)
        dequantise("w", weight, scale, out)
        np.testing.assert_array_equal(out.astype(np.float64), expected)


def test_dequantise_unpacks_fp4_low_nibble_first() -> None:
    grid = [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]
    packed = np.asarray([[low | (high << 4) for high in range(16)] for low in range(16)], np.uint8).view(np.int8)
    out = np.empty((16, 32), np.float32)
    dequantise("w", packed, np.arange(120, 136, dtype=np.uint8)[:, None], out)
    for low in range(16):
        for high in range(16):
            factor = 2.0 ** (120 + low - 127)
            assert (out[low, 2 * high], out[low, 2 * high + 1]) == (grid[low] * factor, grid[high] * factor)
    assert np.signbit(out[8, 0])


def test_dequantise_works_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(1)
    weight, scale = formats.quantise_weight_fp8(rng.normal(size=(130, 64)).astype(np.float32))
    monkeypatch.setattr(stacks, "_BLOCK", 64 * 40)  # 32 rows at a time
    out = np.empty((130, 64), np.float32)
    dequantise("w", weight, scale, out)
    np.testing.assert_array_equal(out, formats.dequantise_weight_fp8(weight, scale))


@pytest.mark.parametrize(("byte", "dtype"), [(254, np.float32), (254, ml_dtypes.bfloat16), (0, ml_dtypes.bfloat16)])
def test_dequantise_refuses_what_the_dtype_cannot_hold(byte: int, dtype: Any) -> None:
    weight = np.full((1, 32), 448.0 if byte else 2.0**-9, ml_dtypes.float8_e4m3fn)
    with pytest.raises(CheckpointError, match=r"w\[0, 0\] is .* cannot hold.*weights='stored'"):
        dequantise("w", weight, np.asarray([[byte]], np.uint8), np.empty((1, 32), dtype))


# ---- slots ----


def slots(directory: Path, *indices: tuple[int, ...]) -> tuple[list[Source], TensorFiles]:
    """A checkpoint of one-row tensors for the given slots."""
    tensors = {f"t{i}": np.full((1, 4), i, np.float32) for i in range(len(indices))}
    rc._write_safetensors(directory / "model.safetensors", tensors)
    specs = [manifest.TensorSpec(f"t{i}", (1, 4), "F32", "x", "p", index) for i, index in enumerate(indices)]
    return [Source(spec) for spec in specs], TensorFiles(directory)


def test_stack_is_filled_in_any_order(tmp_path: Path) -> None:
    sources, files = slots(tmp_path, (1, 0), (0, 1), (0, 0), (1, 1))
    out = Stack("p", (2, 2, 1, 4), np.dtype(np.float32), sources).read(files)
    assert out[:, :, 0, 0].tolist() == [[2, 1], [0, 3]]


@pytest.mark.parametrize(
    ("indices", "words"),
    [
        pytest.param([(0,), (1,)], r"slot \[2\] of parameter p \[3, 1, 4\] is filled 0 times", id="missing"),
        pytest.param([(0,), (1,), (2,), (1,)], r"slot \[1\] .* is filled 2 times", id="twice"),
        pytest.param([(0,), (1,), (3,)], r"t2 \[1, 4\] does not fit slot \[3\]", id="outside"),
        pytest.param([(0,), (1,), (2, 0)], r"t2 \[1, 4\] does not fit slot \[2, 0\]", id="other_depth"),
    ],
)
def test_stack_slot_is_filled_exactly_once(tmp_path: Path, indices: list[tuple[int, ...]], words: str) -> None:
    sources, _ = slots(tmp_path, *indices)
    with pytest.raises(CheckpointError, match=words):
        Stack("p", (3, 1, 4), np.dtype(np.float32), sources)


def test_grouping_refuses_a_parameter_that_nothing_fills_and_a_tensor_without_one() -> None:
    spec = manifest.TensorSpec("layers.0.attn.wkv.weight", (1,), "BF16", "attention", "layers.attn.wkv.weight", (0,))
    with pytest.raises(CheckpointError, match=r"no tensor .* fills parameter layers\.new"):
        stacks.group_by_path([spec], {"layers.attn.wkv.weight", "layers.new"})
    with pytest.raises(CheckpointError, match=r"layers\.0\.attn\.wkv\.weight fills parameter layers\.attn\.wkv"):
        stacks.group_by_path([spec], {"layers.new"})


# ---- damages ----

W = "layers.1.attn.wkv.weight"
S = "layers.1.attn.wkv.scale"
EXPERT = "layers.2.ffn.experts.1.w2.weight"


def rename(old: str, new: str) -> Callable[[Tensors], None]:
    return lambda t: t.update({new: t.pop(old)})


def replace(name: str, change: Callable[[np.ndarray], np.ndarray]) -> Callable[[Tensors], None]:
    return lambda t: t.update({name: change(t[name])})


def every(match: Callable[[str], bool], change: Callable[[np.ndarray], np.ndarray]) -> Callable[[Tensors], None]:
    return lambda t: t.update({name: change(value) for name, value in t.items() if match(name)})


def add(name: str, shape: tuple[int, ...] = (4,)) -> Callable[[Tensors], None]:
    return lambda t: t.update({name: np.zeros(shape, np.float32)})


def to_bf16(value: np.ndarray) -> np.ndarray:
    return value.view(np.int8).astype(np.float32).astype(ml_dtypes.bfloat16)


def is_quantised_weight(name: str) -> bool:
    return name.endswith(".weight") and (".attn.w" in name or ".experts." in name or "shared_experts" in name)


DAMAGES = [
    # storage, damage, words
    pytest.param("bf16", lambda t: t.pop(W), [W, "missing", "attention, BF16 [32, 64]"], id="missing"),
    pytest.param("bf16", add("layers.1.attn.wv.weight"), ["layers.1.attn.wv.weight is no tensor", "wkv"], id="extra"),
    pytest.param("bf16", add("optimizer.step"), ["optimizer.step is no tensor of this model"], id="extra_far"),
    pytest.param(
        "bf16",
        rename(W, "layers.1.attn.w_kv.weight"),
        ["layers.1.attn.w_kv.weight", f"{W} is missing", "rename"],
        id="misspelt",
    ),
    pytest.param(
        "bf16", rename("norm.weight", "norm.wieght"), ["norm.wieght", "norm.weight is missing"], id="misspelt_top"
    ),
    pytest.param("bf16", replace(W, lambda w: w[:-1]), [W, "[31, 64]", "[32, 64]"], id="shape"),
    pytest.param(
        "bf16", replace(W, lambda w: np.ascontiguousarray(w.T)), [W, "[64, 32]", "transposed"], id="transposed"
    ),
    pytest.param("bf16", replace(W, lambda w: w.astype(np.float32)), [W, "F32 [32, 64]", "BF16 [32, 64]"], id="dtype"),
    pytest.param(
        "bf16",
        replace("layers.0.attn.attn_sink", lambda w: w.astype(ml_dtypes.bfloat16)),
        ["layers.0.attn.attn_sink", "BF16", "F32"],
        id="sink_in_bf16",
    ),
    pytest.param(
        "bf16", add("layers.1.attn.compressor.ape", (2, 64)), ["ape", "slot bias", "DeepSeek-V4"], id="v4_slot_bias"
    ),
    pytest.param("bf16", add("hc_head_fn"), ["hc_head_fn", "head collapse", "DeepSeek-V4 tensor set"], id="v4_head"),
    pytest.param("bf16", add("layers.0.ffn.gate.tid2eid"), ["tid2eid", "routing by token id"], id="v4_hash_routing"),
    pytest.param(
        "bf16", add("layers.2.attn.indexer.compressor.wkv.weight"), ["indexer.compressor", "V4"], id="v4_indexer"
    ),
    pytest.param("bf16", add("mtp.0.e_proj.weight"), ["mtp.0.e_proj.weight", "V4"], id="v4_draft"),
    pytest.param(
        "bf16",
        add("layers.5.attn.compressor.wgate.weight"),
        ["layers.5.attn.compressor.wgate.weight is no"],
        id="wgate_at_m1",
    ),
    pytest.param(
        "bf16", add("layers.0.ffn.gate.bias_vl"), ["layers.0.ffn.gate.bias_vl is no tensor"], id="bias_vl_text_only"
    ),
    pytest.param("fp8", lambda t: t.pop(S), [W, S, "F8_E4M3", "cannot be read"], id="scale_missing"),
    pytest.param(
        "fp8",
        rename(S, "layers.1.attn.wkv.weight_scale_inv"),
        [W, S, "rename layers.1.attn.wkv.weight_scale_inv"],
        id="scale_name",
    ),
    pytest.param("fp8", lambda t: t.pop(W), [f"{W} (attention, F8_E4M3", "missing"], id="weight_missing"),
    pytest.param(
        "fp8", lambda t: t.pop("layers.0.engram.embed.scale"), ["layers.0.engram.embed.weight"], id="table_scale"
    ),
    pytest.param("fp8", replace(W, to_bf16), [W, "BF16", "F8_E4M3", "convert"], id="one_weight_bf16"),
    pytest.param(
        "fp8",
        lambda t: (t.pop(S), t.update({W: to_bf16(t[W])})),
        [f"{W} is stored as BF16", f"{S} is missing", "quantise this weight"],
        id="one_weight_bf16_without_scale",
    ),
    pytest.param(
        "fp8",
        every(is_quantised_weight, to_bf16),
        ["quantization_config", "stored as BF16", "delete"],
        id="all_weights_bf16",
    ),
    pytest.param(
        "fp8", replace(W, lambda w: w.view(np.int8)[:, ::2].copy()), [W, "I8 [32, 32]", "packed fp4"], id="fp4_for_fp8"
    ),
    pytest.param(
        "fp8", replace(W, lambda w: w.view(np.int8)), [W, "I8 [32, 64]", "packed fp4"], id="fp4_for_fp8_same_shape"
    ),
    pytest.param(
        "fp8",
        replace(EXPERT, lambda w: w.view(ml_dtypes.float8_e4m3fn)),
        [EXPERT, "F8_E4M3 [64, 16]", "I8 [64, 16]", "packed fp4"],
        id="fp8_for_fp4",
    ),
    pytest.param(
        "fp8", replace(EXPERT, lambda w: w.repeat(2, axis=1)), [EXPERT, "[64, 32]", "not packed"], id="unpacked_fp4"
    ),
    pytest.param(
        "fp8", replace(S, lambda s: s[:, :1]), [S, "[1, 1]", "[1, 2]", "32x32 tile"], id="scale_of_other_tiles"
    ),
    pytest.param(
        "fp8",
        replace("layers.2.ffn.experts.1.w2.scale", lambda s: s[:2]),
        ["layers.2.ffn.experts.1.w2.scale", "[2, 1]", "[64, 1]", "per 32 along a row"],
        id="fp4_scale_of_tiles",
    ),
    pytest.param("fp8", replace(S, lambda s: s.astype(np.float32)), [S, "F32", "F8_E8M0"], id="scale_dtype"),
]


@pytest.mark.parametrize(("storage", "damage", "words"), DAMAGES)
def test_load_refuses_damage_by_name_before_allocating(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    storage: rc.Storage,
    damage: Callable[[Tensors], Any],
    words: list[str],
) -> None:
    config, tensors = make(storage)
    damage(tensors)
    rc.write_checkpoint(tmp_path, config, tensors)

    def built(*_: Any, **__: Any) -> None:
        raise AssertionError("the model was built although its files do not match")

    monkeypatch.setattr(checkpoint, "Model", built)
    with pytest.raises(CheckpointError) as error:
        load_checkpoint(tmp_path)
    for word in [*words, str(tmp_path)]:
        assert word in str(error.value)
    assert len(str(error.value)) < 700


def test_load_refuses_quantised_weights_under_a_plain_config(tmp_path: Path) -> None:
    _, tensors = make("fp8")
    rc.write_checkpoint(tmp_path, make("bf16")[0], tensors)
    (tmp_path / "config.json").write_text(json.dumps(make("bf16")[0]))
    with pytest.raises(CheckpointError, match=r"F8_E4M3 with a \.scale beside it.*no quantization_config"):
        load_checkpoint(tmp_path)


def test_load_refuses_the_config_of_another_model_in_one_sentence(tmp_path: Path) -> None:
    _, tensors = make("bf16")
    rc.write_checkpoint(tmp_path, make("bf16", swa_layers=2)[0], tensors)
    with pytest.raises(
        CheckpointError, match=r"\d+ of \d+ tensors are missing .*first.*config\.json describes another model"
    ):
        load_checkpoint(tmp_path)


def test_load_refuses_an_odd_width_in_fp4(tmp_path: Path) -> None:
    config, tensors = make("fp8")
    config["text_config"]["moe_intermediate_size"] = 33
    rc.write_checkpoint(tmp_path, config, tensors)
    with pytest.raises(ValueError, match=r"experts\.0\.w2\.weight would be \[64, 33\].*odd width of 33"):
        load_checkpoint(tmp_path)


@pytest.mark.parametrize("weights", ["stored", "float32"])
@pytest.mark.parametrize(
    "name", [S, "layers.2.ffn.experts.1.w2.scale", "layers.0.engram.embed.scale", "mtp.1.ffn.shared_experts.w1.scale"]
)
def test_load_refuses_the_nan_scale_by_name(tmp_path: Path, name: str, weights: Any) -> None:
    config, tensors = make("fp8")
    tensors[name] = tensors[name].copy()
    tensors[name][-1, -1] = 255
    last = [n - 1 for n in tensors[name].shape]
    rc.write_checkpoint(tmp_path, config, tensors)
    with pytest.raises(CheckpointError) as error:
        load_checkpoint(tmp_path, weights=weights)
    assert f"{name} holds byte 255 at {last}" in str(error.value)


def test_load_refuses_a_config_of_the_other_generation(tmp_path: Path) -> None:
    config, tensors = make("bf16")
    config["model_type"] = "deepseek_v4"
    rc.write_checkpoint(tmp_path, config, tensors)
    with pytest.raises(ValueError, match="model_type='deepseek_v4'"):
        load_checkpoint(tmp_path)


def test_load_names_every_argument_it_does_not_know(tmp_path: Path) -> None:
    config, tensors = make("bf16")
    rc.write_checkpoint(tmp_path, config, tensors)
    with pytest.raises(ValueError, match="weights='int4'"):
        load_checkpoint(tmp_path, weights="int4")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="compute_dtype='float16'"):
        load_checkpoint(tmp_path, compute_dtype="float16")  # type: ignore[arg-type]


def test_load_needs_the_files_to_be_there(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"config\.json"):
        load_checkpoint(tmp_path)
    shutil.copy(golden_sets.materialise("tiny8_f32_noqat") / "config.json", tmp_path)
    with pytest.raises(FileNotFoundError, match="no weights to read"):
        load_checkpoint(tmp_path)
