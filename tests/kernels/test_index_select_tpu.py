"""The TPU kernels of index selection, interpreted: small tiles, so that a test's sizes are several of them."""

from __future__ import annotations

import os

import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from test_kernels_xla import candidate_reference, scores_of, select_reference

from kernels_pallas import Unsupported, index_select
from kernels_pallas.index_select import pallas_tpu, tpu_gather
from kernels_pallas.index_select.tpu_dense import Tiles
from tests.kernels.index_select_suite import BLOCK, FEW, TOPK, IndexSelectSuite, make_inputs, store

os.environ.setdefault("NPROC", "32")  # threads of the watching interpreter: with few it may wait for itself


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three chunks of 128 keys in 300; candidates are gathered where they are less than half of the pool."""
    monkeypatch.setattr(pallas_tpu, "_ONE_QUERY", Tiles(1, 1024, 256))
    monkeypatch.setattr(pallas_tpu, "_EIGHT_QUERIES", Tiles(8, 128, 128))
    monkeypatch.setattr(pallas_tpu, "_GATHER_MANY", 2)
    monkeypatch.setattr(tpu_gather, "_UNROLL", 1)


class TestIndexSelectTpu(IndexSelectSuite):
    implementation = "pallas_tpu"
    interpret = True
    storages = ("f32", "bf16", "packed units")

    def test_index_select_reads_packed_keys_that_are_not_in_units(self) -> None:
        """Interpreted only: a TPU would spread such rows over its tiles."""
        q, w, keys, visible = make_inputs(1, "packed", *FEW)
        stored = store("packed", keys)
        found, _ = self.select(q, w, stored, 1, visible)
        for b in range(2):
            expected = select_reference(scores_of(q[b], w[b], keys[1, b]), visible[b], TOPK)
            np.testing.assert_array_equal(found[b], expected)
        with pytest.raises(Unsupported, match="to_units"):
            index_select(q, w, stored, 1, visible, topk=TOPK, implementation="pallas_tpu")

    def test_index_select_of_a_long_row_carries_its_counts_on(self) -> None:
        """More than 128 pieces of 128 entries: several chunks, several steps of the compaction, ties across them."""
        q, w, keys, visible = make_inputs(2, "f32", 1, 17_000, batch=1)
        visible[...] = 16_900
        q[..., 2:], q[..., :2], w[...] = 0, [1, -1], 1  # few different scores
        found, made = self.select(q, w, store("f32", keys), 0, visible, topk=1500, make_candidates=150)
        scores = scores_of(q[0], w[0], keys[0, 0])
        expected = select_reference(scores, visible[0], 1500)
        assert expected.max() > 128 * 128
        np.testing.assert_array_equal(found[0], expected)
        assert made is not None
        np.testing.assert_array_equal(made[0], candidate_reference(scores, visible[0], BLOCK, 150))


@pytest.mark.parametrize(
    "parameters",
    [
        {"dma_execution_mode": "on_wait", "uninitialized_memory": "nan"},
        {"dma_execution_mode": "eager", "detect_races": True},
    ],
    ids=["late copies, nan", "races"],
)
@pytest.mark.parametrize(
    ("kind", "tokens", "entries", "count"),
    [("f32", 2, 264, 0), ("f32", 1, 2304, 140), ("packed units", 1, 2304, 140)],
    ids=["dense", "gathered", "gathered units"],
)
def test_index_select_waits_for_its_copies_and_reads_nothing_else(
    kind: str, tokens: int, entries: int, count: int, parameters: dict[str, object]
) -> None:
    """Copies done no sooner than waited for, memory NaN before it is written, accesses watched; both buffers in use."""
    from jax._src.pallas.mosaic.interpret import interpret_pallas_call

    q, w, keys, visible = make_inputs(1, kind, tokens, entries, batch=1)
    visible[...] = entries - 1
    blocks = np.sort(np.random.default_rng(2).permutation(entries // BLOCK)[:count]).astype(np.int32)
    found, _ = index_select(
        q,
        w,
        store(kind, keys),
        1,
        visible,
        topk=TOPK,
        block_size=BLOCK,
        candidates_BTC=blocks[None, None] if count else None,
        implementation="pallas_tpu",
        interpret=pltpu.InterpretParams(**parameters),  # type: ignore[arg-type]
    )
    named = blocks[None] if count else None
    expected = select_reference(scores_of(q[0], w[0], keys[1, 0]), visible[0], TOPK, BLOCK, named)
    np.testing.assert_array_equal(found[0], expected)
    if "detect_races" in parameters:
        assert not interpret_pallas_call.races.races_found
    pltpu.reset_tpu_interpret_mode_state()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"block_size": 12, "make_candidates": 2}, "block_size=12.*power of two"),
        ({"block_size": 4, "make_candidates": 2}, "block_size=4.*at least 8"),
        ({}, "width=8"),
    ],
)
def test_index_select_refuses_what_the_kernels_cannot_do(options: dict[str, int], message: str) -> None:
    """With the values that asked for it."""
    kind = "f32" if "width" in message else "bf16"
    q, w, keys, visible = make_inputs(1, kind, 2, 16)
    with pytest.raises(Unsupported, match=message):
        index_select(q, w, store(kind, keys), 0, visible, topk=2, implementation="pallas_tpu", **options)
