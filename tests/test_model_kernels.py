"""The model on its Pallas kernels, interpreted on a CPU, against recordings of the released code.

The comparisons and tolerances are those of `csa2 check`.
"""

from __future__ import annotations

import pytest

from csa2_jax import load_checkpoint
from csa2_jax.gates import judge_end_to_end, judge_modules, pool
from csa2_jax.recording import Recording
from csa2_jax.replay import compare_end_to_end, compare_modules
from tests.golden_sets import materialise

KERNELS = ("pallas_tpu", "pallas_gpu")


def load(name: str, implementation: str):
    recording = Recording(materialise(name))
    model = load_checkpoint(
        recording.directory,
        compute_dtype=recording.compute_dtype,  # type: ignore[arg-type]
        fake_quant=recording.fake_quant,
        implementation=implementation,  # type: ignore[arg-type]
        interpret=True,
    )
    return recording, model


@pytest.mark.parametrize("implementation", KERNELS)
def test_whole_run_on_kernels_agrees_with_the_recording(implementation: str) -> None:
    """Exact logic in f32: every selection, candidate block and draft equal, at prefill and at every decode step."""
    recording, model = load("tiny8_f32_noqat", implementation)
    pooled = pool(compare_end_to_end(recording, model))
    assert pooled["index_idx"].share_equal == 1.0
    assert pooled["draft_ids"].share_equal == 1.0
    verdicts = judge_end_to_end(recording, pooled)
    assert [v for v in verdicts if not v.passed] == []
    assert len(verdicts) > 10


@pytest.mark.parametrize("implementation", KERNELS)
def test_rounded_modules_on_kernels_agree_with_the_recording(implementation: str) -> None:
    """bf16 with roundings: what bf16 products in the kernels have to keep."""
    recording, model = load("tiny8_bf16", implementation)
    verdicts = judge_modules(recording, pool(compare_modules(recording, model)))
    assert [v for v in verdicts if not v.passed] == []
    assert len(verdicts) > 5
