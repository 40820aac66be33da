"""The model against recordings of the released code: whole runs from their tokens, and modules from their recorded inputs.

The same comparisons and tolerances as `csa2 check`; the f32_noqat sets decide (all integers equal, floats to a few 1e-6), the
rounded ones are held to the distribution that a correct implementation with other summation orders has.
"""

import numpy as np
import pytest

from csa2_jax import load_checkpoint
from csa2_jax.gates import Pooled, judge_end_to_end, judge_modules, pool
from csa2_jax.recording import Comparison, Recording
from csa2_jax.replay import compare_end_to_end, compare_modules
from tests.golden_sets import materialise

SETS = ("tiny8_f32_noqat", "twin40_f32_noqat", "tiny8_f32", "tiny8_bf16", "tiny8_fp8", "twin40_fp8")
# What each kind of recording must have compared, so that a trace which lost its keys cannot pass by comparing nothing.
DECISIVE = {
    "logits",
    "argmax",
    "h",
    "pre_mix",
    "pool",
    "index keys",
    "window cache",
    "index_score",
    "index_idx",
    "gate_idx",
}
DECISIVE |= {"engram_hash", "draft logits", "draft_ids", "main_hidden", "draft window", "latent", "open group C"}
MODULES = {
    "attn_q",
    "attn_o",
    "attn_out",
    "ffn_out",
    "gate_idx",
    "h",
    "pre_mix",
    "latent",
    "index_score",
    "index_idx",
    "engram_h",
}
DRAFTED = {"draft attn_q", "draft attn_o", "draft attn_out", "draft ffn_out", "draft gate_idx"}


def _load(name: str):
    recording = Recording(materialise(name))
    model = load_checkpoint(recording.directory, compute_dtype=recording.compute_dtype, fake_quant=recording.fake_quant)
    return recording, model


def _assert_kept(verdicts, pooled: dict[str, Pooled]):
    assert verdicts
    broken = [(v.quantity, v.measure, v.value, v.bound, pooled[v.quantity].worst) for v in verdicts if not v.passed]
    assert broken == []


def run_agrees(name):
    """A whole run against its recording."""
    recording, model = _load(name)
    comparisons = list(compare_end_to_end(recording, model))
    pooled = pool(comparisons)
    if recording.mode == "f32_noqat":
        by_step: dict[str, set[str]] = {}
        for comparison in comparisons:
            by_step.setdefault(comparison.step, set()).add(comparison.quantity)
        assert tuple(by_step) == recording.steps
        assert all(made >= {"logits", "index_idx", "engram_hash", "h"} for made in by_step.values())
        assert set(pooled) >= DECISIVE
        # Every index source, and at the candidate source its blocks, at prefill and at each step.
        assert pooled["index_idx"].share_equal == 1.0
        assert pooled["draft_ids"].share_equal == 1.0
    _assert_kept(judge_end_to_end(recording, pooled), pooled)


def modules_agree(name):
    """Modules, each from its recorded inputs."""
    recording, model = _load(name)
    pooled = pool(compare_modules(recording, model))
    assert set(pooled) >= MODULES | DRAFTED
    _assert_kept(judge_modules(recording, pooled), pooled)


@pytest.mark.parametrize("name", [pytest.param(SETS[0], marks=pytest.mark.smoke), *SETS[1:]])
def test_run_agrees_with_the_recording(name):
    run_agrees(name)


@pytest.mark.parametrize("name", SETS)
def test_modules_agree_from_recorded_inputs(name):
    modules_agree(name)


def test_gates_fail_on_one_wrong_choice_and_on_nan():
    right = np.ones(1000, bool)
    wrong = right.copy()
    wrong[17] = False
    recording = Recording(materialise("tiny8_f32_noqat"))
    for equal, passed in ((right, True), (wrong, False)):
        (verdict,) = judge_end_to_end(recording, pool([Comparison("gate_idx", "decode3", 2, equal=equal)]))
        assert verdict.passed is passed
    # A difference is excused where the recorder itself met equal scores, and only there.
    recording.meta["ties"] = [["decode3", "L2", "gate", 1]]
    assert judge_end_to_end(recording, pool([Comparison("gate_idx", "decode3", 2, equal=wrong)])) == []
    (verdict,) = judge_end_to_end(recording, pool([Comparison("gate_idx", "decode4", 2, equal=wrong)]))
    assert not verdict.passed
    nan = Pooled("logits", errors=np.array([1e-7, np.nan]))
    assert not any(v.passed for v in judge_end_to_end(recording, {"logits": nan}))
