"""The TPU kernels of compression, interpreted on a CPU: the inherited suite, and what is theirs alone."""

from __future__ import annotations

import os
from typing import Any

import jax
import numpy as np
import pytest
from jax._src.pallas.mosaic.interpret import interpret_pallas_call
from jax.experimental.pallas import tpu as pltpu
from kernels.compress_suite import CSA, CSA2, CompressSuite, Kind, Sequences, assert_same_bits, tables

from kernels_pallas import Compressed, Unsupported, compress, compress_entries
from kernels_pallas.compress import tpu_plan

os.environ.setdefault("NPROC", "32")  # threads of the watching interpreter: with few it may wait for itself

LATE = pltpu.InterpretParams(dma_execution_mode="on_wait", uninitialized_memory="nan")
RACES = pltpu.InterpretParams(dma_execution_mode="eager", detect_races=True)


class TestCompressTpu(CompressSuite):
    implementation = "pallas_tpu"
    interpret = True


def packed(kind: Kind, at: np.ndarray, count: np.ndarray, width: int, turned: int, **chosen: Any) -> Compressed:
    """One fused call on exact inputs."""
    tokens, m = int(count.max()), kind.ratio
    sequences = Sequences.exact(1, kind, len(at), int((at + count).max()), width)
    chunk, halves, phase = sequences.chunk(at, count, tokens), sequences.halves(at), (at % m).astype(np.int32)
    turn, norm = tables(2, len(at), -(-tokens // m), turned // 2), np.full(width, 1.25, np.float32)

    @jax.jit
    def f(*arrays: Any) -> Compressed:
        static = {"eps": 1e-20, "dtype": "bfloat16", "storage": "packed", "bias_MH": sequences.bias}
        return compress_entries(*arrays, **static, **kind.options, **chosen)

    return f(*chunk, *halves, phase, count.astype(np.int32), norm, turn)


@pytest.mark.parametrize("kind", [CSA2, CSA], ids=["m=2", "m=4 overlap"])
def test_blocks_hand_their_last_rows_to_the_next(kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three blocks of two tiles, the last one partial, slices of 128 channels: what long chunks are at full width."""
    monkeypatch.setattr(tpu_plan, "TILE", 8)
    monkeypatch.setattr(tpu_plan, "BLOCK_BYTES", 16 * kind.ratio * kind.rows(256) * 4)
    at, count = np.array([kind.ratio - 1, kind.ratio]), np.array([41 * kind.ratio + 1, 38 * kind.ratio])
    found = packed(kind, at, count, 256, 64, implementation="pallas_tpu", interpret=True)
    expected = packed(kind, at, count, 256, 64, implementation="xla")
    complete = np.arange(42) < ((at % kind.ratio + count) // kind.ratio)[:, None]
    assert_same_bits(found[:2], expected[:2], complete)
    assert_same_bits(found[2:], expected[2:])


def test_decode_steps_leave_alone_what_does_not_complete(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of sequences in which no entry completes are zero, and do not disturb the ones that do."""
    monkeypatch.setattr(tpu_plan, "BLOCK_BYTES", 1)  # blocks of 8 sequences
    at, count = np.arange(40) % 3, np.ones(40, int)
    at[[9, 13, 30]] = 3
    found = packed(CSA, at, count, 32, 16, implementation="pallas_tpu", interpret=True)
    expected = packed(CSA, at, count, 32, 16, implementation="xla")
    assert_same_bits(found[:2], expected[:2], (at == 3)[:, None])
    assert_same_bits(found[2:], expected[2:])
    assert not np.asarray(found.latent_BEH)[16:24].any()


@pytest.mark.parametrize(
    ("watch", "tokens"),
    [(LATE, 36), (RACES, 36), (LATE, 1)],
    ids=["memory starts as NaN", "races", "memory of a decode step starts as NaN"],
)
def test_kernels_read_nothing_unwritten_and_never_race(
    watch: Any, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two blocks of eight entries, the last partial."""
    monkeypatch.setattr(tpu_plan, "TILE", 8)
    monkeypatch.setattr(tpu_plan, "BLOCK_BYTES", 8 * 4 * CSA.rows(16) * 4)
    at, count = np.array([3, 0]), np.array([tokens, tokens - 1])
    found = packed(CSA, at, count, 16, 8, implementation="pallas_tpu", interpret=watch)
    if watch is RACES:
        assert not interpret_pallas_call.races.races_found
    expected = packed(CSA, at, count, 16, 8, implementation="xla")
    complete = np.arange(-(-tokens // 4)) < ((at % 4 + count) // 4)[:, None]
    assert_same_bits(found[:2], expected[:2], complete)


def test_groups_that_do_not_fit_in_memory_are_refused() -> None:
    rows, half = np.zeros((1, 2, 1024), np.float32), np.zeros((1, 1023, 1024), np.float32)
    count = np.ones(1, np.int32)
    with pytest.raises(Unsupported, match=r"VMEM.*ratio=1024"):
        compress(rows, rows, half, half, count, count, ratio=1024, implementation="pallas_tpu")
