"""The GPU kernel of index selection, interpreted: small steps and buffers, so that a test's sizes fill several of them."""

from __future__ import annotations

import functools
import itertools
import operator
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_kernels_xla import candidate_reference, random_candidates, scores_of, select_reference

from kernels_pallas import Unsupported, formats, index_select, storage
from kernels_pallas.index_select import gpu_best, gpu_scores, pallas_gpu
from tests.kernels.index_select_suite import BLOCK, IndexSelectSuite, make_inputs, store


@pytest.fixture(autouse=True)
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Five steps in 300 entries, a buffer that overflows at the second or third, and no splits."""
    monkeypatch.setattr(pallas_gpu, "_STEP", {"bfloat16": (64, 4), "float32": (64, 4)})
    monkeypatch.setattr(pallas_gpu, "_RUN", 1)
    monkeypatch.setattr(pallas_gpu, "_PROGRAMS", 1)


class TestIndexSelectGpu(IndexSelectSuite):
    implementation = "pallas_gpu"
    interpret = True
    storages = ("f32", "packed units")


def _select(*args: Any, **options: Any) -> Any:
    """The door, compiled afresh: the sizes that tests change are not arguments."""
    select = functools.partial(index_select, implementation="pallas_gpu", interpret=True, **options)
    return jax.jit(lambda *a: select(*a))(*args)


@pytest.mark.parametrize("kind", ["bf16", "packed"])
def test_index_select_gpu_reads_the_other_storages(kind):
    """bf16 keys; packed keys of f32 queries, whose one scale covers both halves of a byte."""
    q, w, keys, visible = make_inputs(4, kind, 5, 130)
    found, made = _select(q, w, store(kind, keys), 1, visible, topk=7, block_size=BLOCK, make_candidates=6)
    for b in range(2):
        scores = scores_of(q[b], w[b], keys[1, b])
        np.testing.assert_array_equal(found[b], select_reference(scores, visible[b], 7))
        np.testing.assert_array_equal(made[b], candidate_reference(scores, visible[b], BLOCK, 6))


def test_index_select_gpu_merges_many_splits_in_levels(monkeypatch):
    """Ten splits whose survivors take two levels of merging; blocks too, of which a split holds fewer than are wanted."""
    monkeypatch.setattr(pallas_gpu, "_STEP", {"bfloat16": (32, 4), "float32": (32, 4)})
    monkeypatch.setattr(pallas_gpu, "_PROGRAMS", 1000)
    monkeypatch.setattr(pallas_gpu, "_MERGE_TILE", 1)
    q, w, keys, visible = make_inputs(9, "f32", 2, 300)
    visible[0, 0] = 77
    found, made = _select(q, w, store("f32", keys), 0, visible, topk=7, block_size=BLOCK, make_candidates=9)
    for b in range(2):
        scores = scores_of(q[b], w[b], keys[0, b])
        np.testing.assert_array_equal(found[b], select_reference(scores, visible[b], 7))
        np.testing.assert_array_equal(made[b], candidate_reference(scores, visible[b], BLOCK, 9))


def test_index_select_gpu_splits_candidates(monkeypatch):
    monkeypatch.setattr(pallas_gpu, "_STEP", {"bfloat16": (32, 4), "float32": (32, 4)})
    monkeypatch.setattr(pallas_gpu, "_PROGRAMS", 1000)
    q, w, keys, visible = make_inputs(6, "f32", 2, 300)
    visible[:, -1] = 300
    candidates = random_candidates(np.random.default_rng(1), 2, 2, 38, 21)
    found, _ = _select(q, w, store("f32", keys), 0, visible, topk=5, block_size=BLOCK, candidates_BTC=candidates)
    for b in range(2):
        scores = scores_of(q[b], w[b], keys[0, b])
        np.testing.assert_array_equal(found[b], select_reference(scores, visible[b], 5, BLOCK, candidates[b]))


@pytest.mark.parametrize("bits", [16, 32])
def test_best_places_agree_with_a_stable_sort(bits):
    """Ties at the cut go to the first; fewer than `count`, none at all, and keys of both signs up to the ends of the range."""
    best = gpu_best.Best(count=9, bits=bits, capacity=64, barriers=False)
    places = jax.jit(best.places)
    rng = np.random.default_rng(bits)
    low, high = best.empty + 1, 2 ** (bits - 1) - 1
    rows = [
        rng.integers(low, high, 64),
        rng.integers(-2, 3, 64),
        np.where(rng.random(64) < 0.9, best.empty, rng.integers(-2, 3, 64)),
        np.full(64, best.empty),
        np.full(64, high),
        np.where(np.arange(64) < 60, low, high),
    ]
    for row in rows:
        place, tau, held = places(jnp.asarray(row, jnp.int32))
        order = np.array([i for i in np.argsort(-row, kind="stable") if row[i] > best.empty][:9], int)
        expected = np.full(64, 64)
        expected[np.sort(order)] = np.arange(len(order))
        np.testing.assert_array_equal(place, expected)
        assert held == len(order)
        assert tau == (row[order[-1]] if len(order) == 9 else best.empty)


_BITWISE = {
    "mov.b32": lambda a: a,
    "shl.b32": operator.lshift,
    "shr.b32": operator.rshift,
    "and.b32": operator.and_,
    "or.b32": operator.or_,
}


def _run_assembly(text: str, word: int, scale: int) -> int:
    """What DEQUANTISE computes, by a reading of its seven instructions: two bf16 patterns in one register."""
    registers = {"$1": word, "$2": scale}

    def value(name: str) -> int:
        return registers[name] if name in registers else int(name, 0)

    def halves(x: int) -> np.ndarray:
        return np.array([x & 0xFFFF, x >> 16], np.uint16).view(jnp.bfloat16).astype(np.float64)

    for statement in text.strip("{} ").split(";"):
        name, *operands = re.split(r"[ ,]+", statement.strip())
        if not name or name == ".reg":
            continue
        target, *sources = operands
        a, *b = (value(source) for source in sources)
        if name == "mul.rn.bf16x2":
            with np.errstate(over="ignore"):
                low, high = (halves(a) * halves(b[0])).astype(jnp.bfloat16).view(np.uint16).astype(int)
            registers[target] = int(low) | int(high) << 16
        else:
            registers[target] = _BITWISE[name](a, *b) & 0xFFFFFFFF
    return registers["$0"]


def test_dequantise_assembly_gives_every_code_and_scale():
    """All sixteen codes in every nibble, at scales from the least to the greatest whose products bf16 holds."""
    magnitudes = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    for nibble, scale in itertools.product(range(4), (0, 1, 60, 126, 127, 128, 129, 200, 250)):
        power = 0x40 if scale == 0 else scale << 7
        expected = (np.r_[magnitudes, -magnitudes] * 2.0 ** (scale - 127)).astype(jnp.bfloat16).view(np.uint16)
        for code in range(16):
            other = 15 - code  # the second channel, and every nibble around
            low, high = (0xFFFF ^ (0xF << 4 * nibble)) | code << 4 * nibble, other << 4 * nibble
            found = _run_assembly(gpu_scores.DEQUANTISE[nibble], low | high << 16, power | power << 16)
            assert (found & 0xFFFF, found >> 16) == (expected[code], expected[other])


def test_pallas_gpu_refuses_shapes_that_no_tensor_core_takes():
    plain = np.zeros((1, 1, 8, 128), jnp.bfloat16)
    main = storage.Packed(jnp.zeros((1, 1, 8, 64), jnp.uint8), jnp.zeros((1, 1, 8, 32), jnp.uint8), 128, formats.MAIN)

    def check(heads: int, interpret: bool = False, keys: Any = plain, **changed: Any) -> None:
        q = jnp.zeros((1, 1, heads, 128), jnp.bfloat16)
        static = {"topk": 4, "block_size": 0, "make_candidates": 0, "candidates_BTC": None} | changed
        pallas_gpu.check(q, q[..., 0], keys, 0, jnp.zeros((1, 1), jnp.int32), interpret=interpret, **static)

    check(32)
    check(3, interpret=True)
    with pytest.raises(Unsupported, match="heads=24"):
        check(24)
    with pytest.raises(Unsupported, match="topk=5000"):
        check(32, topk=5000)
    with pytest.raises(Unsupported, match="block_size=12"):
        check(32, block_size=12, make_candidates=4)
    with pytest.raises(Unsupported, match="packed as"):
        check(32, interpret=True, keys=main)
