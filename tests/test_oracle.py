"""The oracle against recorded traces of the released code, and the random checkpoints that feed it."""

from __future__ import annotations

import dataclasses
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import golden_sets
from tests import oracle_formats as formats
from tests import random_checkpoint as rc
from tests.oracle import FAULTS, OracleModel, OracleTrace, SharedState
from tests.oracle_config import ModelShape, ngram_rows

BF16 = ml_dtypes.bfloat16


@dataclasses.dataclass(frozen=True)
class Recording:
    """One recorded set; step 0 is the prefill of `prompt` tokens, step k > 0 consumes one token more."""

    config: dict[str, Any]
    tensors: dict[str, np.ndarray]
    trace: dict[str, np.ndarray]
    tokens: np.ndarray  # [B, prompt + decode]
    prompt: int

    @property
    def steps(self) -> list[str]:
        return ["prefill"] + [f"decode{k}" for k in range(self.tokens.shape[1] - self.prompt)]

    def positions(self, step: int) -> slice:
        return slice(0, self.prompt) if step == 0 else slice(self.prompt + step - 1, self.prompt + step)

    def found(self, name: str, row: int) -> list[tuple[slice, np.ndarray]]:
        """(positions, values) of every step that kept `name`; [B * S, k] arrays are split into rows."""
        out = []
        for step, label in enumerate(self.steps):
            if (values := self.trace.get(f"{label}/{name}")) is not None:
                where = self.positions(step)
                span, batch = where.stop - where.start, len(self.tokens)
                if values.shape[0] != batch or values.shape[1] != span:
                    values = values.reshape(batch, span, -1)
                out.append((where, values[row]))
        return out

    def logits(self, row: int) -> list[tuple[int, np.ndarray]]:
        """(position, logits) wherever they were kept."""
        out = list(enumerate(self.trace["prefill/logits_all"][row])) if "prefill/logits_all" in self.trace else []
        for step, label in enumerate(self.steps):
            if step and f"{label}/logits" in self.trace:
                out.append((self.prompt + step - 1, self.trace[f"{label}/logits"][row]))
        return out


def recording(name: str) -> Recording:
    """A recorded set, or a skip that says which one is absent."""
    if not (golden_sets.GOLDEN / name).is_dir():
        pytest.skip(f"recorded set {name} is not in tests/golden")
    config, tensors = rc.read_checkpoint(golden_sets.materialise(name))
    trace = golden_sets.load_trace(name)
    tokens = trace.get("tokens")
    if tokens is None:
        decodes = sum(key.startswith("decode") and key.endswith("/tokens") for key in trace)
        labels = ["prefill"] + [f"decode{k}" for k in range(decodes)]
        tokens = np.concatenate([trace[f"{label}/tokens"] for label in labels], axis=1)
    prompt = trace["prefill/tokens"].shape[1] if "prefill/tokens" in trace else trace["prefill/main_hidden"].shape[1]
    return Recording(config, tensors, trace, tokens, prompt)


def arrays(name: str) -> dict[str, np.ndarray]:
    """A recorded npz file as a dictionary, or a skip."""
    path = golden_sets.GOLDEN / name
    if not path.is_file():
        pytest.skip(f"{name} is not in tests/golden")
    with np.load(path) as file:
        return {key: file[key] for key in file.files}


def relative(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """|a - b| / |b| along the last axis."""
    return np.linalg.norm(a - b, axis=-1) / np.maximum(np.linalg.norm(b, axis=-1), 1e-30)


def bits(x: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(x, np.float32).view(np.uint32)


# --- number formats -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("source", ["f32", "bf16"])
@pytest.mark.parametrize(
    ("key", "quantise"),
    [
        ("window_fp8_32", formats.quantise_window_fp8),
        ("main_fp4_16", formats.quantise_main_fp4),
        ("index_fp4_32", formats.quantise_index_fp4),
    ],
)
def test_roundings_are_bit_exact(key: str, quantise: Any, source: str) -> None:
    z = arrays("quantizers.npz")
    found = quantise(z[f"input_{source}"])
    np.testing.assert_array_equal(bits(found.values), bits(z[f"{key}_{source}"]))
    np.testing.assert_array_equal(found.scales, z[f"{key}_{source}_scale"])
    np.testing.assert_array_equal(found.codes, z[f"{key}_{source}_codes"])
    usable = np.isfinite(found.values).all(axis=1)  # one row overflows, far outside the real range
    if key == "main_fp4_16":
        # Twice the smallest e4m3 scale is the one exception: amax in (9, 10) * 2^-9 gets scale 2^-8, its maximum
        # becomes 4 * 2^-8, and rounding that again gives scale 2^-9.
        usable &= (found.scales != 2.0**-8).all(axis=1)
    np.testing.assert_array_equal(bits(quantise(found.values[usable]).values), bits(found.values[usable]))


def test_weight_storage_is_exact_both_ways() -> None:
    z = arrays("quantizers.npz")
    codes, scales = z["weight_fp8_codes"].view(formats.E4M3), z["weight_fp8_scale_codes"]
    values = formats.dequantise_weight_fp8(codes, scales)
    np.testing.assert_array_equal(bits(values), bits(z["weight_fp8_dequant"]))
    again = formats.quantise_weight_fp8(values)
    np.testing.assert_array_equal(again[0].view(np.uint8), codes.view(np.uint8))
    np.testing.assert_array_equal(again[1], scales)
    values = formats.dequantise_expert_fp4(z["expert_fp4_packed"], z["expert_fp4_scale_codes"])
    np.testing.assert_array_equal(bits(values), bits(z["expert_fp4_dequant"]))
    again = formats.quantise_expert_fp4(values)
    np.testing.assert_array_equal(again[0], z["expert_fp4_packed"])
    np.testing.assert_array_equal(again[1], z["expert_fp4_scale_codes"])


def test_quantised_products_are_bit_exact() -> None:
    z = arrays("quantizers.npz")
    fp8 = formats.dequantise_weight_fp8(z["gemm_w_codes"].view(formats.E4M3), z["gemm_w_scale_codes"])
    fp4 = formats.dequantise_expert_fp4(z["gemm_w4_packed"], z["gemm_w4_scale_codes"])
    for weight, key in ((fp8, "gemm_fp8_y"), (fp4, "gemm_fp4_y")):
        np.testing.assert_array_equal(bits(formats.quantised_matmul(z["gemm_x"], weight)), bits(z[key]))


def test_e8m0_reads_every_byte_and_refuses_nan_by_name() -> None:
    values = formats.e8m0_values(np.arange(255, dtype=np.uint8))
    assert [float(v) for v in values] == [2.0 ** (b - 127) for b in range(255)]
    np.testing.assert_array_equal(formats.e8m0_codes(values), np.arange(255))
    with pytest.raises(ValueError, match=r"wq_a\.scale.*255"):
        formats.e8m0_values(np.array([[255]], np.uint8), "wq_a.scale")


def test_released_engram_constants_and_hashes() -> None:
    z = arrays("engram.npz")
    config = rc.random_config(0, engram_layers=())
    shape = dataclasses.replace(
        ModelShape.from_hf(config),
        engram_layers=tuple(int(layer) for layer in z["layer_ids"]),
        engram_max_ngram=4,
        engram_heads=8,
        engram_prime_floor=16_000_000,
        engram_compressed_vocab=99_092,
        engram_pad=int(z["pad_compressed"]),
    )
    np.testing.assert_array_equal(np.stack(shape.primes()), z["primes"])
    identity = np.arange(shape.engram_compressed_vocab)
    for row, compressed in enumerate(z["compressed"]):
        for column, layer in enumerate(shape.engram_layers):
            for mask, key in ((None, "hash_all_alive"), (~z["alive_mask"][row], "hash_masked")):
                rows = ngram_rows(shape, identity, compressed, layer, mask)
                np.testing.assert_array_equal(rows, z[key][row, :, column])


# --- recorded traces ----------------------------------------------------------------------------------------------


def check_integers(rec: Recording, row: int, trace: OracleTrace, window: int) -> int:
    """Selections, experts, candidates and hashes equal wherever both have them; returns how many arrays that was."""
    compared = 0

    def check(name: str, mine: Any, prepare: Any = lambda values, where: values) -> None:
        nonlocal compared
        for where, recorded in rec.found(name, row):
            if where.stop <= len(mine):
                values = prepare(recorded, where)
                np.testing.assert_array_equal(mine[where][:, : values.shape[1]], values, err_msg=f"{name} at {where}")
                compared += 1

    def pool_numbering(values: np.ndarray, where: slice) -> np.ndarray:
        return np.where(values < 0, -1, values - (rec.prompt if where.start == 0 else window))

    for layer, mine in trace.selections.items():
        check(f"L{layer}/index_idx", mine, pool_numbering)
    for layer, mine in trace.gate_idx.items():
        check(f"L{layer}/gate_idx", mine)
    for layer, mine in trace.engram_hash.items():
        check(f"L{layer}/engram_hash", mine)
    for layer, blocks in trace.candidates.items():
        check(f"L{layer}/candidates", allowed_positions(rec, blocks))
    return compared


def allowed_positions(rec: Recording, blocks: list[np.ndarray]) -> np.ndarray:
    """Candidate block ids as a mask over positions [T, T], blocks whole even where they reach past the query."""
    size = rec.config["text_config"]["candidate_block_size"]
    return np.stack([np.isin(np.arange(len(blocks)) // size, kept) for kept in blocks])


def check_end_to_end(rec: Recording, row: int, model: OracleModel, trace: OracleTrace) -> None:
    """The suite's decisive gate: logits, every integer, every draft."""
    positions, logits = zip(*rec.logits(row), strict=True)
    error = relative(trace.logits[list(positions)], np.stack(logits))
    assert error.max() <= 5e-5
    assert np.median(error) <= 4e-6
    assert check_integers(rec, row, trace, model.shape.window) > 0
    for layer, mine in trace.hidden.items():
        for where, values in rec.found(f"L{layer}/h", row):
            assert relative(mine[where], values).max() <= 5e-5
    for step, label in enumerate(rec.steps):
        if f"{label}/draft_ids" in rec.trace:
            draft = model.draft(trace, rec.prompt + step - 1, int(rec.trace[f"{label}/ids"][row]))
            np.testing.assert_array_equal(draft.ids, rec.trace[f"{label}/draft_ids"][row])
            if f"{label}/draft_logits" in rec.trace:
                assert relative(draft.logits, rec.trace[f"{label}/draft_logits"][row]).max() <= 5e-5
                np.testing.assert_allclose(
                    draft.confidence, rec.trace[f"{label}/draft_conf"][row], rtol=1e-5, atol=3e-5
                )


@pytest.mark.parametrize("name", ["tiny8_f32_noqat", "twin40_f32_noqat"])
def test_forward_and_drafts_equal_the_recording(name: str) -> None:
    rec = recording(name)
    model = OracleModel(rec.config, rec.tensors, token_map=rec.trace.get("engram/token_map"))
    for row, tokens in enumerate(rec.tokens):
        check_end_to_end(rec, row, model, model.forward(tokens))


def test_scores_and_caches_equal_the_recording() -> None:
    rec = recording("tiny8_f32_noqat")
    model = OracleModel(rec.config, rec.tensors)
    pairs = {"compress_kv_cache": "pool_kv", "index_k_cache": "pool_key", "latent": "latent"}
    for row in range(len(rec.tokens)):
        trace = model.forward(rec.tokens[row, : rec.prompt])
        for layer, mine in trace.index_score.items():
            if (values := rec.trace.get(f"prefill/L{layer}/index_score")) is not None:
                np.testing.assert_array_equal(np.isinf(mine), np.isinf(values[row]))
                np.testing.assert_allclose(mine, values[row], atol=3e-5)
        for key, attribute in pairs.items():
            for layer, mine in getattr(trace, attribute).items():
                if (values := rec.trace.get(f"prefill/L{layer}/{key}")) is not None:
                    np.testing.assert_allclose(mine, values[row, : len(mine)], atol=3e-5)
        slots = np.arange(rec.prompt - model.shape.window, rec.prompt)
        for layer, mine in trace.window_kv.items():
            if (values := rec.trace.get(f"prefill/L{layer}/window_kv_cache")) is not None:
                np.testing.assert_allclose(mine[slots], values[row, slots % model.shape.window], atol=3e-5)


def test_image_spans_equal_the_recording() -> None:
    rec = recording("tiny8_vl_f32_noqat")
    if not {"prefill/token_types", "prefill/aligner_out"} <= rec.trace.keys():
        pytest.skip("the trimmed set has no image parts")
    model = OracleModel(rec.config, rec.tensors)
    types, aligned = rec.trace["prefill/token_types"], list(rec.trace["prefill/aligner_out"])
    vectors = {0: "image_start", 2: "image_newline", 3: "image_end"}
    for row, tokens in enumerate(rec.tokens):
        kinds = np.concatenate([types[row], np.full(len(tokens) - rec.prompt, -1)])
        embedded = model.tensor("embed.weight")[tokens]
        for t, kind in enumerate(kinds):
            if kind >= 0:
                embedded[t] = aligned.pop(0) if kind == 1 else model.tensor(vectors[kind])
        trace = model.forward(tokens, embedded=embedded, image_mask=kinds >= 0)
        check_end_to_end(rec, row, model, trace)


@pytest.mark.parametrize(
    ("name", "dtype", "attention_gate", "moe_gate"),
    [
        ("tiny8_f32", np.float32, 2e-6, 2e-6),
        ("tiny8_f32", np.float64, 2e-6, 2e-6),
        ("tiny8_bf16", BF16, 1e-3, 1e-3),
        ("tiny8_fp8", BF16, 1e-3, 1e-3),
    ],
)
def test_modules_with_rounding_equal_the_recording(
    name: str, dtype: Any, attention_gate: float, moe_gate: float
) -> None:
    """Layer by layer from recorded inputs, p98 over tokens: a lattice step may flip, nothing else may differ."""
    rec = recording(name)
    model = OracleModel(rec.config, rec.tensors, fake_quant=True, dtype=dtype)
    attention, moe = [], []
    for row in range(len(rec.tokens)):
        shared, trace = SharedState(), OracleTrace(np.empty(0), np.empty(0))
        for layer in range(len(model.shape.layers)):
            keys = ("attn_in", "attn_out", "ffn_in", "ffn_out")
            named = {key: rec.trace.get(f"prefill/L{layer}/{key}") for key in keys}
            if named["attn_in"] is not None and named["attn_out"] is not None:
                out = model.attention(layer, named["attn_in"][row], shared, trace)
                attention.append(relative(out, named["attn_out"][row]))
            if named["ffn_in"] is not None and named["ffn_out"] is not None:
                out, _ = model.moe(f"layers.{layer}.ffn", named["ffn_in"][row], model.shape.active_experts)
                moe.append(relative(out, named["ffn_out"][row]))
        if attention:
            assert check_integers(rec, row, trace, model.shape.window) > 0
    if not attention or not moe:
        pytest.skip(f"{name} kept no module inputs")
    assert np.quantile(np.concatenate(attention), 0.98) <= attention_gate
    assert np.quantile(np.concatenate(moe), 0.98) <= moe_gate


RECORDED_CONTROLS = {  # relative change of all logits of batch row 0 in tiny8_f32_noqat when this one thing is wrong
    "no_pool": 0.65112,
    "reuse_recent": 0.52765,
    "no_candidates": 0.22279,
    "no_sink": 0.84933,
    "no_inverse_rope": 0.93338,
    "no_engram": 0.71131,
    "mhc_unstaggered": 0.49605,
}


def test_faults_move_the_logits_as_recorded() -> None:
    rec = recording("tiny8_f32_noqat")
    right = OracleModel(rec.config, rec.tensors).forward(rec.tokens[0]).logits
    assert set(FAULTS) == set(RECORDED_CONTROLS)
    for fault, change in RECORDED_CONTROLS.items():
        wrong = OracleModel(rec.config, rec.tensors, fault=fault).forward(rec.tokens[0]).logits
        assert np.linalg.norm(wrong - right) / np.linalg.norm(right) == pytest.approx(change, abs=1e-3)


# --- random checkpoints -------------------------------------------------------------------------------------------


@settings(max_examples=20, deadline=None, database=None)
@given(config=rc.configs(), seed=st.integers(0, 99), cut=st.integers(1, 23))
def test_a_prefix_does_not_see_what_follows(config: dict[str, Any], seed: int, cut: int) -> None:
    rng = np.random.default_rng(seed)
    model = OracleModel(config, rc.random_tensors(config, rng))
    tokens = rng.integers(0, model.shape.vocab, 24)
    whole, part = model.forward(tokens), model.forward(tokens[:cut])
    assert np.isfinite(whole.logits).all()
    np.testing.assert_allclose(part.logits, whole.logits[:cut], atol=1e-9)
    for layer, selection in whole.selections.items():
        np.testing.assert_array_equal(part.selections[layer], selection[:cut])
        ratio = model.shape.layers[layer].ratio
        for t, row in enumerate(selection):  # sorted, padded at the end, visible, full as soon as it can be
            chosen = row[: min(model.shape.index_topk, (t + 1) // ratio)]
            assert (np.diff(chosen) > 0).all()
            assert (chosen >= 0).all()
            assert (chosen < (t + 1) // ratio).all()
            assert (row[len(chosen) :] == -1).all()


def test_faults_move_a_small_random_model() -> None:
    """The fixture drops entries and blocks, so that a wrong choice shows."""
    config = rc.random_config(
        0, encoder_ratios=(2, 3), encoder_extra="U", decoder_extra="IU", index_topk=3, candidates=True,
        candidate_block_size=2, candidate_spare_blocks=0, engram_layers=(1,), sliding_window=4,
    )  # fmt: skip
    tensors = rc.random_tensors(config, 1)
    tokens = np.random.default_rng(2).integers(0, config["text_config"]["vocab_size"], 32)
    model = OracleModel(config, tensors)
    right = model.forward(tokens)
    blocks = 32 // model.shape.candidate_block
    assert model.shape.index_topk < 32 // 3 / 2
    assert model.shape.candidate_topk < blocks
    for fault in FAULTS:
        wrong = OracleModel(config, tensors, fault=fault).forward(tokens).logits
        assert np.linalg.norm(wrong - right.logits) / np.linalg.norm(right.logits) > 0.05, fault


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("storage", ["bf16", "f32", "fp8"])
def test_checkpoint_files_come_back_as_written(tmp_path: Any, storage: rc.Storage, shards: int) -> None:
    config = rc.config_for_storage(rc.random_config(3, quantisable=True, draft_stages=2), storage)
    tensors = rc.random_tensors(config, 4, storage)
    read_config, read = rc.read_checkpoint(rc.write_checkpoint(tmp_path, config, tensors, shards))
    assert read_config == config
    assert set(read) == set(tensors)
    for name, value in tensors.items():
        assert read[name].dtype == value.dtype
        assert read[name].shape == value.shape
        assert read[name].tobytes() == value.tobytes()
    assert len(list(tmp_path.glob("*.safetensors"))) == shards


@pytest.mark.parametrize("dtype", [np.float64, np.float32, BF16])
def test_fp8_storage_runs_with_rounding_in_every_dtype(dtype: Any) -> None:
    config = rc.random_config(5, quantisable=True, draft_stages=1)
    tensors = rc.random_tensors(config, 6, "fp8", residual_scale=0.12)
    tokens = np.random.default_rng(7).integers(0, config["text_config"]["vocab_size"], 20)
    plain = OracleModel(config, tensors, dtype=dtype).forward(tokens).logits
    model = OracleModel(config, tensors, dtype=dtype, fake_quant=True)
    trace = model.forward(tokens)
    change = np.median(relative(trace.logits, plain))
    assert 1e-3 < change < 1.0
    draft = model.draft(trace, 19, int(trace.logits[-1].argmax()))
    assert len(draft.ids) == model.shape.draft_block + 1
    assert np.isfinite(draft.confidence).all()


def test_meaningless_checkpoints_are_refused() -> None:
    config = rc.random_config(8, quantisable=True, candidates=True, index_topk=4)
    tensors = rc.random_tensors(config, 9, "fp8")
    del tensors["layers.0.attn.wkv.scale"]
    with pytest.raises(ValueError, match=r"layers\.0\.attn\.wkv\.weight.*layers\.0\.attn\.wkv\.scale"):
        OracleModel(config, tensors).forward([1, 2, 3])
    text = config["text_config"]
    with pytest.raises(ValueError, match="candidates"):
        ModelShape.from_hf({"text_config": {**text, "candidate_topk_blocks": 1, "candidate_block_size": 2}})
    with pytest.raises(ValueError, match="selection"):
        ModelShape.from_hf({"text_config": {**text, "index_source_layer_ids": text["index_source_layer_ids"][1:]}})
    with pytest.raises(ValueError, match="fault"):
        OracleModel(config, tensors, fault="no_such_fault")
