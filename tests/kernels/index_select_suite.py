"""What every implementation of index selection must do: tests to inherit, run for each kind of stored keys.

Inputs are small whole numbers wherever the reference is float64: products and sums are then exact in f32 and in bf16, in any
order, and ties are ordinary. A subclass names an implementation, and the storages to run it with.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, TypeVar

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from test_kernels_xla import candidate_reference, integers, random_candidates, scores_of, select_reference

from kernels_pallas import formats, index_select, storage
from kernels_pallas.storage import Entries, Packed

BF16 = ml_dtypes.bfloat16

STORAGES = ("f32", "bf16", "packed", "packed units")
QUERY = {"f32": np.float32, "bf16": BF16, "packed": np.float32, "packed units": BF16}
WIDTH = {"f32": 8, "bf16": 128, "packed": 32, "packed units": 128}
BLOCK, TOPK = 8, 7
# (T, P): few distinct shapes, because every one is compiled. Units need more entries, see `make_inputs`.
DECODE, FEW, LONG = (1, 300), (5, 136), (19, 300)

_select = jax.jit(
    index_select, static_argnames=("topk", "block_size", "make_candidates", "implementation", "interpret")
)
_pack = jax.jit(storage.pack, static_argnames=("fmt", "units"))

_Test = TypeVar("_Test", bound=Callable[..., None])


def at(*sizes: int, kinds: tuple[str, ...] = STORAGES) -> Callable[[_Test], _Test]:
    """Run a test with these sizes (tokens, entries, count, as far as it has them) and kinds of stored keys; may be repeated."""

    def mark(f: _Test) -> _Test:
        f.cases = [(kind, *sizes) for kind in kinds] + getattr(f, "cases", [])  # type: ignore[attr-defined]
        return f

    return mark


def make_inputs(
    seed: int, kind: str, tokens: int, entries: int, *, batch: int = 2, heads: int = 3
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """(q [B, T, I, J], w, keys [2, B, P, J], visible): whole numbers, scores within +-144, counts lopsided and 0 among them.

    Four channels of a query head are not zero, anywhere in the width. P is at least `entries`, in whole units where held so.
    """
    rng = np.random.default_rng(seed)
    width = WIDTH[kind]
    entries = -(-entries // 128) * 128 if kind == "packed units" else entries
    channels = np.argsort(rng.random((batch, tokens, heads, width)), axis=-1)
    q = np.where(channels < 4, integers(rng, batch, tokens, heads, width, span=2), 0)
    w, keys = integers(rng, batch, tokens, heads, span=2), integers(rng, 2, batch, entries, width)
    visible = rng.integers(0, entries + 1, (batch, tokens))
    visible[0, -1] = entries
    visible[1:, 0] = 0
    return q.astype(QUERY[kind]), w.astype(QUERY[kind]), keys, visible.astype(np.int32)


def store(kind: str, keys: np.ndarray) -> Entries:
    """Keys [G, B, P, J] as the storage holds them."""
    if kind in ("f32", "bf16"):
        return jnp.asarray(keys, jnp.float32 if kind == "f32" else jnp.bfloat16)
    return _pack(keys, formats.INDEX, units=kind == "packed units")


def poison(kind: str, keys: Entries, held: np.ndarray, value: float) -> Entries:
    """The same keys with `value` (packed: bytes that mean more than f32 can hold) behind `held[b]` entries of every row."""
    p = storage.shape(keys)[2]
    behind = np.arange(p) >= held[:, None]

    def fill(a: jax.Array, size: int, byte: int) -> jax.Array:
        rows = jnp.where(behind[None, :, :, None], jnp.uint8(byte), storage.from_units(a, size))
        return rows.reshape(a.shape)

    if isinstance(keys, Packed):
        codes, scales = fill(keys.codes, keys.code_bytes, 0x77), fill(keys.scales, keys.scale_bytes, 255)
        return Packed(codes, scales, keys.width, keys.fmt)
    return jnp.where(behind[None, :, :, None], jnp.asarray(value, keys.dtype), keys)


class IndexSelectSuite:
    """Inherit, set `implementation` (and `interpret`), and narrow `storages` where others are tested elsewhere."""

    implementation: ClassVar[str]
    interpret: ClassVar[Any] = False
    storages: ClassVar[tuple[str, ...]] = STORAGES

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """The cases of a test that are of this class's storages."""
        names = [name for name in ("kind", "tokens", "entries", "count") if name in metafunc.fixturenames]
        if names:
            cases = getattr(metafunc.function, "cases", [(kind,) for kind in STORAGES])
            metafunc.parametrize(names, [case for case in cases if case[0] in self.storages])

    def select(self, *args: Any, **options: Any) -> tuple[np.ndarray, np.ndarray | None]:
        """The door, through this implementation; the group is traced."""
        options = {"topk": TOPK, "block_size": BLOCK} | options
        found, made = _select(*args, implementation=self.implementation, interpret=self.interpret, **options)
        assert found.dtype == jnp.int32
        return np.asarray(found), None if made is None else np.asarray(made)

    @at(*DECODE)
    @at(*FEW)
    @at(*LONG, kinds=("f32", "bf16", "packed units"))
    def test_index_select_takes_the_highest_visible_scores(self, kind: str, tokens: int, entries: int) -> None:
        """One or more blocks of queries and chunks of keys, the last ones ragged; ties to the lowest; either group."""
        q, w, keys, visible = make_inputs(tokens, kind, tokens, entries)
        for group in (0, 1):
            found, made = self.select(q, w, store(kind, keys), group, visible)
            assert made is None
            for b in range(2):
                expected = select_reference(scores_of(q[b], w[b], keys[group, b]), visible[b], TOPK)
                np.testing.assert_array_equal(found[b], expected)

    @at(kinds=("f32", "packed"))
    def test_index_select_of_more_than_there_is_pads(self, kind: str) -> None:
        q, w, keys, visible = make_inputs(3, kind, 3, 9)
        found, made = self.select(q, w, store(kind, keys), 1, visible, topk=12, make_candidates=4)
        assert made is not None
        for b in range(2):
            scores = scores_of(q[b], w[b], keys[1, b])
            np.testing.assert_array_equal(found[b], select_reference(scores, visible[b], 12))
            np.testing.assert_array_equal(made[b], candidate_reference(scores, visible[b], BLOCK, 4))

    def test_index_select_never_takes_what_is_not_visible(self, kind: str) -> None:
        """Scores of 1e9, NaN or infinity behind a row's length lose against everything, and touch nothing else."""
        q, w, keys, visible = make_inputs(7, kind, *FEW)
        q, w = np.abs(q) + 1, np.abs(w) + 1  # every huge key would score hugely
        held = np.array([70, 33])
        visible = np.minimum(visible, held[:, None]).astype(np.int32)
        blocks = np.broadcast_to(np.array([0, 2, 4, 8, -1]), (2, FEW[0], 5)).astype(np.int32)
        stored = store(kind, keys)
        for options in ({"make_candidates": 5}, {"candidates_BTC": blocks}):
            clean, made = self.select(q, w, stored, 0, visible, **options)
            assert (clean < visible[:, :, None]).all()
            assert (clean >= 0).any()
            for value in (1e9, np.nan) if kind in ("f32", "bf16") else (np.nan,):
                found, again = self.select(q, w, poison(kind, stored, held, value), 0, visible, **options)
                np.testing.assert_array_equal(found, clean)
                if made is not None:
                    np.testing.assert_array_equal(again, made)

    @at(*DECODE, kinds=("f32", "packed units"))
    @at(*FEW)
    def test_index_select_makes_the_best_blocks_with_the_newest_among_them(
        self, kind: str, tokens: int, entries: int
    ) -> None:
        """The last block of a ragged pool is short; the selection itself is from all scores."""
        q, w, keys, visible = make_inputs(21, kind, tokens, entries)
        found, made = self.select(q, w, store(kind, keys), 1, visible, make_candidates=5)
        assert made is not None
        for b in range(2):
            scores = scores_of(q[b], w[b], keys[1, b])
            np.testing.assert_array_equal(made[b], candidate_reference(scores, visible[b], BLOCK, 5))
            np.testing.assert_array_equal(found[b], select_reference(scores, visible[b], TOPK))

    @at(*DECODE, 5, kinds=("f32", "packed units"))
    @at(*FEW, 5)
    @at(*FEW, 14, kinds=("f32", "packed units"))
    def test_index_select_obeys_candidates(self, kind: str, tokens: int, entries: int, count: int) -> None:
        """Entries of the named blocks alone, the pool's last block among them; rows without any select nothing."""
        q, w, keys, visible = make_inputs(tokens + 50, kind, tokens, entries)
        entries = keys.shape[2]
        blocks = -(-entries // BLOCK)
        visible[:, -1] = entries
        candidates = random_candidates(np.random.default_rng(1), 2, tokens, blocks, count)
        candidates[0, -1] = np.r_[np.arange(count - 1), blocks - 1]
        candidates[1, 0] = -1
        found, made = self.select(q, w, store(kind, keys), 1, visible, candidates_BTC=candidates)
        assert made is None
        for b in range(2):
            scores = scores_of(q[b], w[b], keys[1, b])
            expected = select_reference(scores, visible[b], TOPK, BLOCK, candidates[b])
            np.testing.assert_array_equal(found[b], expected)

    @at(kinds=("f32", "packed"))
    def test_index_select_without_anything_visible_selects_nothing(self, kind: str) -> None:
        q, w, keys, visible = make_inputs(3, kind, *FEW)
        found, made = self.select(q, w, store(kind, keys), 0, np.zeros_like(visible), make_candidates=5)
        assert made is not None
        assert (found == -1).all()
        assert (made == -1).all()

    def test_index_select_holds_minus_zero_and_zero_for_equal(self, kind: str) -> None:
        """A negative weight makes -0.0 of a dot that is not positive; the lower index still wins."""
        q, w, keys, visible = make_inputs(0, kind, *FEW)
        q[...], w[...], keys[...] = 0, 0, 0
        q[..., 0], keys[0, :, :10, 0] = 1, [3, -2, 0, -1, 3, 0, -1, 2, 0, -3]
        visible[...] = 10
        for weight, expected in ((-1, [1, 2, 3, 5, 6, 8, 9]), (1, [0, 1, 2, 3, 4, 5, 7])):
            w[:, :, 1] = weight
            found, _ = self.select(q, w, store(kind, keys), 0, visible)
            np.testing.assert_array_equal(found, np.broadcast_to(expected, found.shape))

    @at(kinds=("f32", "bf16", "packed"))
    def test_index_select_orders_large_scores_of_either_sign(self, kind: str) -> None:
        """Magnitudes of 1e5 and more: no room for a penalty such as -1e9 or a narrow mantissa."""
        q, w, keys, visible = make_inputs(5, kind, *FEW)
        w[0] = -np.abs(w[0])
        keys *= 4096
        found, _ = self.select(q, w, store(kind, keys), 0, visible)
        for b in range(2):
            scores = scores_of(q[b], w[b], keys[0, b])
            assert np.abs(scores).max() > 1e5
            np.testing.assert_array_equal(found[b], select_reference(scores, visible[b], TOPK))

    @at(kinds=("f32", "packed"))
    def test_index_select_resolves_ordinary_f32_scores(self, kind: str) -> None:
        """Ordinary numbers and many key scales; the scores at the cut are equal zeros or further apart than f32 sums can err."""
        rng = np.random.default_rng(11)
        q, w, keys, visible = make_inputs(11, kind, *FEW)
        q, w = rng.standard_normal(q.shape).astype(np.float32), rng.standard_normal(w.shape).astype(np.float32)
        keys = rng.standard_normal(keys.shape) * np.exp2(rng.integers(-9, 3, (*keys.shape[:3], 1)))
        stored = store(kind, keys.astype(np.float32))
        numbers = np.asarray(storage.unpack(stored))
        found, _ = self.select(q, w, stored, 1, visible)
        for b in range(2):
            scores = scores_of(q[b], w[b], numbers[1, b])
            for row, n in zip(scores, visible[b], strict=True):
                last, next_one = np.sort(row[:n])[::-1][TOPK - 1 : TOPK + 1] if n > TOPK else (1, 0)
                assert last - next_one > 1e-5 or last == next_one == 0
            np.testing.assert_array_equal(found[b], select_reference(scores, visible[b], TOPK))

    @at(kinds=("bf16", "packed units"))
    def test_index_select_of_bf16_queries_rounds_three_times(self, kind: str) -> None:
        """After the dot, after the weight and after the sum. Scores lie so close together that every rounding decides.

        Unrounded sums are exact in f32, so their order is free.
        """
        rng = np.random.default_rng(5)
        q, w, keys, visible = make_inputs(19, kind, *LONG)
        keys[...] = np.where(rng.random(keys.shape) < 0.05, keys, keys[:, :, :1])
        q = (rng.integers(1, 32, q.shape) * np.sign(keys[0, :, None, :1])).astype(BF16)
        w = (rng.integers(16, 32, w.shape) / 16).astype(BF16)
        found, _ = self.select(q, w, store(kind, keys), 0, visible)
        differs = np.zeros(4, int)

        def rounded(x: np.ndarray) -> np.ndarray:
            return x.astype(BF16).astype(np.float32)

        for b in range(2):
            weight = w[b].astype(np.float32)[:, :, None]
            dots = np.maximum(np.einsum("tij,pj->tip", q[b].astype(np.float32), keys[0, b]), 0)
            terms = rounded(dots) * weight
            expected = select_reference(rounded(rounded(terms).sum(axis=1)), visible[b], TOPK)
            np.testing.assert_array_equal(found[b], expected)
            lacking = (rounded(rounded(dots * weight).sum(1)), rounded(terms.sum(1)), rounded(terms).sum(1))
            for i, scores in enumerate((*lacking, scores_of(q[b], w[b], keys[0, b]))):
                differs[i] += (select_reference(scores, visible[b], TOPK) != expected).any(-1).sum()
        assert (differs > 3).all(), differs  # without any one of them, or all, rows differ
