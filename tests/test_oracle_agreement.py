"""Random small models through the public door against the NumPy oracle, which shares no code with them.

A checkpoint is written in the release layout and loaded. Two ragged calls with a cache give everything that is compared:
one compiled program for a configuration, and the second call starts in the middle of a group.
"""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Iterator
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, assume, given, settings
from hypothesis import strategies as st

from csa2_jax import Cache, ModelConfig, draft, forward, init_cache, load_checkpoint
from csa2_jax.state import pool_name
from tests import random_checkpoint as rc
from tests.oracle import FAULTS, OracleModel, OracleTrace
from tests.small_models import quick_compilation, relative_error

CAPTURE = ("selections", "candidates", "hidden", "gate_idx", "engram_rows", "main_hidden")
CALLS = np.array([[13, 9], [11, 13]])  # real tokens per call and row
TOTALS = (24, 22)
WIDTH = 13
TOLERANCE = 5e-5
FEW = settings(
    max_examples=6,
    deadline=None,
    derandomize=True,
    database=None,
    phases=(Phase.explicit, Phase.generate),  # shrinking would compile for minutes
    suppress_health_check=list(HealthCheck),
)


@pytest.fixture(autouse=True, scope="module")
def quickly() -> Iterator[None]:
    """There is a new program for every example."""
    with quick_compilation():
        yield


@dataclasses.dataclass(frozen=True)
class Run:
    """What our model made of `tokens`: captures per row and layer over all calls, the cache behind them, the drafts."""

    logits: list[np.ndarray]
    seen: list[dict[str, Any]]
    cache: Cache
    drafts: Any


def run(directory: str, tokens: np.ndarray, **options: Any) -> Run:
    model = load_checkpoint(directory, **options)
    stages = model.config.num_nextn_predict_layers
    capture = tuple(name for name in CAPTURE if stages or name != "main_hidden")
    cache = init_cache(model.config, 2, 32, "f32", draft=stages > 0)
    parts: list[list[tuple[np.ndarray, dict[str, Any]]]] = [[], []]
    done = np.zeros(2, int)
    for counts in CALLS:
        chunk = np.zeros((2, WIDTH), int)
        for b, n in enumerate(counts):
            chunk[b, :n] = tokens[b, done[b] : done[b] + n]
        out, cache = forward(model, chunk, cache, counts, capture=capture)
        for b, n in enumerate(counts):
            parts[b].append(jax.tree.map(lambda a, b=b, n=n: np.asarray(a)[b, :n], (out.logits, out.captured)))
        done = done + counts
    joined = [jax.tree.map(lambda *pieces: np.concatenate(pieces), *row) for row in parts]
    drafts = draft(model, np.array([row[0][-1].argmax() for row in joined]), cache) if stages else None
    return Run([row[0] for row in joined], [row[1] for row in joined], cache, drafts)


def smallest_margin(oracle: OracleModel, trace: OracleTrace) -> float:
    """How far the nearest runner-up among pool entries, candidate blocks and experts was from being chosen.

    Below f32's rounding the choice is a matter of luck, and everything behind it differs. Exact ties are not: both
    sides give them to the lowest index.
    """
    s, gaps = oracle.shape, [np.inf]

    def gap(scores: np.ndarray, count: int) -> None:
        ordered = np.sort(scores[scores > -np.inf])[::-1]
        if len(ordered) > count and ordered[count - 1] != ordered[count]:
            gaps.append((ordered[count - 1] - ordered[count]) / max(1.0, abs(ordered[count])))

    for layer, scores in trace.index_score.items():
        for t, row in enumerate(scores):
            gap(row, s.index_topk)
            if layer == s.candidate_source:
                visible = (t + 1) // s.layers[layer].ratio
                starts = range(0, visible, s.candidate_block)
                blocks = np.array([row[i : min(i + s.candidate_block, visible)].max() for i in starts])
                gap(blocks[:-1], s.candidate_topk - 1)  # the newest is in anyway
    for layer, x in trace.ffn_in.items():
        score = np.sqrt(np.log1p(np.exp(x @ oracle.tensor(f"layers.{layer}.ffn.gate.weight").T)))
        for row in score + oracle.tensor(f"layers.{layer}.ffn.gate.bias"):
            ordered = np.sort(row)[::-1]
            gaps.append(np.min(ordered[:-1] - ordered[1:]))
    return float(min(gaps))


def blocks_of(captured: np.ndarray) -> list[list[int]]:
    return [[int(i) for i in row if i >= 0] for row in captured]


def compare_integers(seen: dict[str, Any], trace: OracleTrace) -> None:
    """Choices are equal, not close."""
    assert set(seen["selections"]) == set(trace.selections)
    for layer, expected in trace.selections.items():
        np.testing.assert_array_equal(seen["selections"][layer], expected, err_msg=f"selection of layer {layer}")
    for layer, expected in trace.candidates.items():
        assert blocks_of(seen["candidates"][layer]) == [list(r) for r in expected], f"candidates of layer {layer}"
    for layer, expected in trace.gate_idx.items():
        np.testing.assert_array_equal(seen["gate_idx"][layer], expected, err_msg=f"experts of layer {layer}")
    for layer, expected in trace.engram_hash.items():
        np.testing.assert_array_equal(seen["engram_rows"][layer], expected, err_msg=f"hashes of layer {layer}")


def compare_floats(row: int, found: Run, trace: OracleTrace, config: ModelConfig, total: int) -> None:
    seen = found.seen[row]
    for layer, expected in trace.hidden.items():
        assert relative_error(seen["hidden"][layer], expected) < TOLERANCE, layer
    if "main_hidden" in seen:
        assert relative_error(seen["main_hidden"], trace.main_hidden) < TOLERANCE
    assert relative_error(found.logits[row], trace.logits) < TOLERANCE
    slots = np.arange(max(0, total - config.sliding_window), total)
    for layer, rows in trace.window_kv.items():
        ring = np.asarray(found.cache.window_LBWH)[layer, row]
        assert relative_error(ring[slots % config.sliding_window], rows[slots]) < TOLERANCE, ("window", layer)
    for layer, rows in trace.pool_kv.items():
        spec = config.plan.layers[layer]
        pool = found.cache.pools[pool_name(spec.ratio)]
        assert len(rows) == total // spec.ratio
        for array, expected in ((pool.kv_GBPH, rows), (pool.key_GBPJ, trace.pool_key[layer])):
            held = np.asarray(array)[spec.pool_slot, row]
            assert relative_error(held[: len(rows)], expected) < TOLERANCE, ("pool", layer)
            assert not held[len(rows) :].any(), ("behind the pool", layer)


def compare_drafts(row: int, found: Run, oracle: OracleModel, trace: OracleTrace, total: int) -> None:
    expected = oracle.draft(trace, total - 1, int(trace.logits[-1].argmax()))
    np.testing.assert_array_equal(found.drafts.ids[row], expected.ids)
    assert relative_error(found.drafts.logits[row], expected.logits) < TOLERANCE
    np.testing.assert_allclose(found.drafts.confidence[row], expected.confidence, rtol=1e-4, atol=1e-4)


@dataclasses.dataclass(frozen=True)
class Case:
    """A configuration, its weights, two sequences, and what the oracle makes of them in float64."""

    config: dict[str, Any]
    tensors: dict[str, np.ndarray]
    tokens: np.ndarray
    oracle: OracleModel
    traces: list[OracleTrace]

    @classmethod
    def of(cls, config: dict[str, Any], seed: int) -> Case:
        tensors = rc.random_tensors(config, seed)
        tokens = np.random.default_rng(seed).integers(0, config["text_config"]["vocab_size"], (2, 24))
        oracle = OracleModel(config, tensors)
        return cls(config, tensors, tokens, oracle, [oracle.forward(tokens[b, :n]) for b, n in enumerate(TOTALS)])

    def is_clear(self) -> bool:
        return min(smallest_margin(self.oracle, trace) for trace in self.traces) > 2e-5

    def compare(self) -> Run:
        """Exact logic: f32 without roundings."""
        with tempfile.TemporaryDirectory() as directory:
            rc.write_checkpoint(directory, self.config, self.tensors)
            found = run(directory, self.tokens, compute_dtype="float32", fake_quant=False)
        for row, trace in enumerate(self.traces):
            compare_integers(found.seen[row], trace)
            compare_floats(row, found, trace, ModelConfig.from_hf(self.config), TOTALS[row])
            if found.drafts is not None:
                compare_drafts(row, found, self.oracle, trace, TOTALS[row])
        return found


@FEW
@given(config=rc.configs(), seed=st.integers(0, 999))
def test_model_equals_the_oracle_on_random_configurations(config: dict[str, Any], seed: int) -> None:
    case = Case.of(config, seed)
    assume(case.is_clear())
    case.compare()


# What the random draws may miss. Both: several heads per output group, two encoder groups.
PINNED: dict[str, dict[str, Any]] = {
    "everything": {
        "swa_layers": 1, "encoder_ratios": (4, 3), "encoder_extra": "U", "decoder_extra": "IU", "index_topk": 3,
        "candidates": True, "candidate_block_size": 2, "candidate_spare_blocks": 0, "engram_layers": (1, 6),
        "draft_stages": 2, "num_attention_heads": 4, "o_groups": 2, "sliding_window": 4, "yarn": 32,
    },
    "all entries fit": {
        "swa_layers": 2, "encoder_ratios": (2, 2), "encoder_extra": "I", "encoder_reindex": True, "decoder_extra": "U",
        "index_topk": 64, "candidates": False, "engram_layers": (), "draft_stages": 0, "num_attention_heads": 4,
        "o_groups": 1, "sliding_window": 3, "yarn": 0,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", ["everything", pytest.param("all entries fit", marks=pytest.mark.smoke)])
def test_model_equals_the_oracle_on_pinned_configurations(name: str) -> None:
    case = Case.of(rc.random_config(1, **PINNED[name]), seed=2)
    assert case.is_clear()
    found = case.compare()
    if name != "everything":
        return
    # The comparison can fail: an oracle with any single fault is far away.
    for fault in FAULTS:
        wrong = OracleModel(case.config, case.tensors, fault=fault).forward(case.tokens[0, : TOTALS[0]])
        assert relative_error(found.logits[0], wrong.logits) > 1e-2, fault


SMALLEST: dict[str, Any] = {
    "swa_layers": 1, "encoder_ratios": (2,), "encoder_extra": "", "decoder_extra": "I", "index_topk": 3,
    "candidates": True, "candidate_block_size": 2, "candidate_spare_blocks": 0, "engram_layers": (1,),
    "draft_stages": 0, "hidden_size": 32, "moe_intermediate_size": 32, "num_attention_heads": 2, "o_groups": 1,
    "n_routed_experts": 4, "num_experts_per_tok": 2, "sliding_window": 4, "hc_mult": 4,
}  # fmt: skip


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_quantised_model_equals_the_oracle_but_for_flipped_roundings(dtype: Any) -> None:
    """fp8 and fp4 storage with every rounding on. A number that rounds the other way moves all that follows it, so what
    is compared is a distribution over tokens: most are equal to the last places, whatever is systematic moves all."""
    config = rc.config_for_storage(rc.random_config(3, quantisable=True, **SMALLEST), "fp8")
    tensors = rc.random_tensors(config, 4, "fp8", residual_scale=0.1)
    tokens = np.random.default_rng(5).integers(0, config["text_config"]["vocab_size"], (2, 24))
    real = np.float32 if dtype == "float32" else ml_dtypes.bfloat16
    oracle = OracleModel(config, tensors, fake_quant=True, dtype=real)
    traces = [oracle.forward(tokens[b, :n]) for b, n in enumerate(TOTALS)]
    with tempfile.TemporaryDirectory() as directory:
        rc.write_checkpoint(directory, config, tensors)
        found = run(directory, tokens, compute_dtype=dtype, fake_quant=True)
    for layer in range(len(oracle.shape.layers)):
        errors = np.concatenate([row_errors(found.seen[b]["hidden"][layer], traces[b].hidden[layer]) for b in range(2)])
        assert np.median(errors) < 1e-6, layer
        if layer < 2:  # flips have hardly begun
            assert np.quantile(errors, 0.9) < (1e-6 if dtype == "float32" else 2e-3), layer
    for b, trace in enumerate(traces):
        for layer, expected in trace.selections.items():
            assert (found.seen[b]["selections"][layer] == expected).mean() > 0.9
        for layer, expected in trace.gate_idx.items():
            assert (found.seen[b]["gate_idx"][layer] == expected).mean() > 0.9
    logits = np.concatenate([row_errors(found.logits[b], traces[b].logits) for b in range(2)])
    assert np.median(logits) < 1e-6
    # Roundings matter here: the same weights without them are far away, for every token.
    plain = OracleModel(config, tensors, dtype=real).forward(tokens[0]).logits
    assert np.min(row_errors(found.logits[0], plain)) > 1e-3


def row_errors(found: np.ndarray, expected: np.ndarray) -> np.ndarray:
    """One relative error per token."""
    return np.array([relative_error(f.ravel(), e.ravel()) for f, e in zip(found, expected, strict=True)])
