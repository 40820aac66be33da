"""The TPU kernels of sparse attention, interpreted on a CPU: the inherited suite, and the interpreter that watches memory."""

from __future__ import annotations

import os
from typing import Any

import jax
import numpy as np
import pytest
from jax._src.pallas.mosaic.interpret import interpret_pallas_call
from jax.experimental.pallas import tpu as pltpu
from kernels.sparse_attention_suite import Inputs, SparseAttentionSuite, loss_weights, make_inputs

from kernels_pallas import Unsupported, formats, sparse_attention, storage
from kernels_pallas.sparse_attention import pallas_tpu, tpu_plan, vjp

os.environ.setdefault("NPROC", "32")  # threads of the watching interpreter: with few it may wait for itself


class TestSparseAttentionTpu(SparseAttentionSuite):
    implementation = "pallas_tpu"
    interpret = True


# --- the interpreter that watches memory --------------------------------------------------------------------------

LATE = pltpu.InterpretParams(dma_execution_mode="on_wait", uninitialized_memory="nan")
RACES = pltpu.InterpretParams(dma_execution_mode="eager", detect_races=True)


def watched_inputs() -> Inputs:
    inputs = make_inputs(2, 1, 4, 2, 3, entries=9, topk=4, width=8)
    inputs["selection_BTK"][0] = [[1, 4, 1, -1], [1, -1, 0, 2], [3, 1, 0, 4], [8, 8, 8, 0]]
    return inputs


def forward_and_gradients(inputs: Inputs, **chosen: Any) -> list[np.ndarray]:
    """o, lse and the four gradients in one program."""

    def f(q: Any, rows: Any, sink: Any, pool: Any) -> Any:
        given = inputs | {"q_BTNH": q, "window_BSH": rows, "sink_N": sink, "pool_GBPH": pool}
        return sparse_attention(**given, window=3, scale=0.25, **chosen)

    def both(*args: Any) -> Any:
        out, pull = jax.vjp(f, *args)
        return *out, *pull(loss_weights(inputs))

    args = (inputs["q_BTNH"], inputs["window_BSH"], inputs["sink_N"], inputs["pool_GBPH"])
    return [np.asarray(a) for a in jax.jit(both)(*args)]


@pytest.mark.parametrize("watch", [LATE, RACES], ids=["copies arrive late, memory starts as NaN", "races"])
def test_kernels_wait_for_every_copy_and_never_race(watch: Any) -> None:
    inputs = watched_inputs()
    found = forward_and_gradients(inputs, implementation="pallas_tpu", interpret=watch)
    if watch is RACES:
        assert not interpret_pallas_call.races.races_found
    for a, b in zip(found, forward_and_gradients(inputs, implementation="xla"), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_a_missing_wait_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the test above is worth: without waiting for its rows, the kernel reads NaN."""
    monkeypatch.setattr(tpu_plan, "wait_rows", lambda *_: None)
    inputs = {k: jax.numpy.asarray(v) for k, v in watched_inputs().items()}
    q, rows, first, sink, pool, group, selection = inputs.values()
    call = vjp.Call(pallas_tpu, LATE, 3, 0.25, True)
    o, _ = vjp.attend(call, q, rows, first, sink, pool, group, selection)
    assert np.isnan(np.asarray(o)).any()


# --- what the hardware path refuses -------------------------------------------------------------------------------


def refusal(**changes: Any) -> str:
    """Why a call at the released shapes (with changes) is refused, seen without running it."""
    shape = jax.ShapeDtypeStruct
    inputs: dict[str, Any] = {
        "q_BTNH": shape((2, 4, 64, 512), "bfloat16"),
        "window_BSH": shape((2, 132, 512), "bfloat16"),
        "first_BT": shape((2, 4), "int32"),
        "sink_N": shape((64,), "float32"),
        "pool_GBPH": shape((3, 2, 4096, 4, 128), "bfloat16"),
        "selection_BTK": shape((2, 4, 512), "int32"),
        **changes,
    }
    with pytest.raises(Unsupported) as refused:
        jax.eval_shape(
            lambda inputs: sparse_attention(**inputs, window=128, scale=0.1, implementation="pallas_tpu"), inputs
        )
    return str(refused.value)


def test_pools_that_would_be_copied_whole_are_refused_with_the_remedy() -> None:
    shape = jax.ShapeDtypeStruct
    assert "hold it as [G, B, P, H // 128, 128]" in refusal(pool_GBPH=shape((3, 2, 4096, 512), "bfloat16"))
    flat = storage.Packed(shape((3, 2, 4096, 256), "uint8"), shape((3, 2, 4096, 32), "uint8"), 512, formats.MAIN)
    assert "units=True" in refusal(pool_GBPH=flat)


def test_sizes_that_do_not_fill_registers_are_refused_by_value() -> None:
    shape = jax.ShapeDtypeStruct
    assert "(2, 4, 500)" in refusal(selection_BTK=shape((2, 4, 500), "int32"))
    assert "heads=60" in refusal(q_BTNH=shape((2, 4, 60, 512), "bfloat16"), sink_N=shape((60,), "float32"))
