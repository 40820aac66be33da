"""The sparse attention door and its exact XLA implementation against plain NumPy."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas import sparse_attention
from kernels_pallas.sparse_attention import xla as attention_xla


def attend_reference(
    q: np.ndarray, rows: np.ndarray, seen: np.ndarray, pool: np.ndarray, chosen: np.ndarray, sink: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """One sequence in float64: q [T, N, H], rows [S, H], seen bool [T, S], pool [P, H], chosen [T, K], scale 1/4."""
    out, lse = np.zeros(q.shape), np.zeros(q.shape[:2])
    for t in range(len(q)):
        entries = np.concatenate([rows[seen[t]], pool[[i for i in chosen[t] if i >= 0]]]).astype(np.float64)
        for n in range(q.shape[1]):
            logits = entries @ q[t, n].astype(np.float64) / 4
            top = max(logits.max(initial=-np.inf), sink[n])
            p = np.exp(logits - top)
            total = p.sum() + np.exp(sink[n] - top)
            out[t, n] = p @ entries / total if len(entries) else 0
            lse[t, n] = top + np.log(total)
    return out, lse


attend = jax.jit(sparse_attention, static_argnames=("window", "scale", "causal"))


def attention_inputs(seed: int, batch: int, tokens: int, history: int, window: int, topk: int = 3) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    held = rng.integers(0, history + 1, batch) if history else np.zeros(batch, int)
    offset = np.arange(tokens)
    first = np.maximum(history + offset - window + 1, (history - held)[:, None]).astype(np.int32)
    return {
        "q_BTNH": rng.standard_normal((batch, tokens, 2, 8)).astype(np.float32) * 2,
        "window_BSH": rng.standard_normal((batch, history + tokens, 8)).astype(np.float32),
        "first_BT": np.maximum(first, 0),
        "sink_N": np.array([1.5, -0.5], np.float32),
        "pool_GBPH": jnp.asarray(rng.standard_normal((2, batch, 11, 8)), jnp.float32),
        "group": 1,
        "selection_BTK": rng.integers(-1, 11, (batch, tokens, topk)).astype(np.int32),
    }


def seen_rows(inputs: dict[str, Any], causal: bool = True) -> np.ndarray:
    """bool [B, T, S]: which window rows a query may read."""
    tokens, rows = inputs["first_BT"].shape[1], inputs["window_BSH"].shape[1]
    last = rows - tokens + np.arange(tokens)[:, None] if causal else np.full((tokens, 1), rows - 1)
    row = np.arange(rows)
    return (row >= inputs["first_BT"][:, :, None]) & (row <= last)


@pytest.mark.parametrize(
    ("batch", "tokens", "history", "window", "causal"),
    [
        *((2, 1, 8, 8, True), (2, 1, 0, 8, True), (3, 9, 5, 5, True), (2, 33, 0, 64, True)),
        *((2, 70, 6, 6, True), (2, 131, 6, 6, True), (1, 66, 64, 64, True), (2, 4, 7, 7, False)),
    ],
    ids=["decode", "first token", "short", "no history", "2 blocks", "3 blocks", "wide", "draft"],
)
def test_attention_equals_one_softmax_over_window_pool_and_sink(
    batch: int, tokens: int, history: int, window: int, causal: bool
) -> None:
    inputs = attention_inputs(tokens, batch, tokens, history, window)
    found, lse = attend(**inputs, window=window, scale=0.25, causal=causal)
    seen = seen_rows(inputs, causal)
    assert seen.sum(axis=-1).min() >= 1
    for b in range(batch):
        expected = attend_reference(
            inputs["q_BTNH"][b], inputs["window_BSH"][b], seen[b], np.asarray(inputs["pool_GBPH"])[1, b],
            inputs["selection_BTK"][b], inputs["sink_N"],
        )  # fmt: skip
        np.testing.assert_allclose(found[b], expected[0], rtol=2e-5, atol=2e-6)
        np.testing.assert_allclose(lse[b], expected[1], rtol=2e-5, atol=2e-6)


@pytest.mark.smoke
def test_attention_reads_exactly_what_a_hand_made_pattern_allows() -> None:
    """Every row is a unit vector of its own and all scores are 0, so the output says who was read, and how often."""
    rows, first = np.zeros((1, 5, 12), np.float32), np.array([[2, 0, 4]], np.int32)
    rows[0, np.arange(5), np.arange(5)] = 1
    pool = np.zeros((1, 1, 6, 12), np.float32)
    pool[0, 0, np.arange(6), 5 + np.arange(6)] = 1
    chosen = np.array([[[2, -1, -1], [-1, 0, 3], [5, 5, -1]]], np.int32)
    query, sink = np.zeros((1, 3, 1, 12), np.float32), np.zeros(1, np.float32)
    found, lse = attend(query, rows, first, sink, jnp.asarray(pool), 0, chosen, window=5, scale=1.0)
    counts = np.zeros((3, 12))
    counts[0, [2, 7]] = 1  # its own row 2, entry 2
    counts[1, [0, 1, 2, 3, 5, 8]] = 1  # rows 0 to 3, entries 0 and 3
    counts[2, 4], counts[2, 10] = 1, 2  # its own row, and an entry that is listed twice counts twice
    total = counts.sum(axis=1, keepdims=True) + 1  # exp(0) for the sink
    np.testing.assert_allclose(np.asarray(found)[0, :, 0], counts / total, rtol=1e-6)
    np.testing.assert_allclose(np.asarray(lse)[0, :, 0], np.log(total[:, 0]), rtol=1e-6)


@pytest.mark.parametrize("magnitude", [1e5, -1e5])
def test_attention_survives_scores_of_1e5(magnitude: float) -> None:
    """exp(score) alone would overflow, exp(sink - score) must vanish or win by far."""
    rows = np.array([1.0, 0.5, 1.0], np.float32).reshape(1, 3, 1)
    query = np.full((1, 1, 1, 1), magnitude, np.float32)
    sink, first = np.array([2.0], np.float32), np.zeros((1, 1), np.int32)
    found, lse = attend(query, rows, first, sink, window=3, scale=1.0)
    # Two rows share everything where scores are high; where they are low the sink takes it all.
    np.testing.assert_allclose(np.asarray(found).item(), 1.0 if magnitude > 0 else 0.0)
    np.testing.assert_allclose(np.asarray(lse).item(), magnitude + np.log(2) if magnitude > 0 else 2.0)


def test_attention_with_nothing_to_read_gives_zero_and_finite_gradients() -> None:
    inputs = attention_inputs(4, 2, 3, 4, 4)
    inputs["selection_BTK"][0] = -1
    inputs["first_BT"][0] = 99  # behind every row

    def loss(q: Any, rows: Any, sink: Any, pool: Any) -> Any:
        with_arrays = inputs | {"q_BTNH": q, "window_BSH": rows, "sink_N": sink, "pool_GBPH": pool}
        o, lse = sparse_attention(**with_arrays, window=4, scale=0.25)
        return jnp.sum(jnp.sin(o) + o) + jnp.sum(lse), (o, lse)

    args = (inputs["q_BTNH"], inputs["window_BSH"], inputs["sink_N"], inputs["pool_GBPH"])
    grads, (o, lse) = jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3), has_aux=True))(*args)
    np.testing.assert_array_equal(o[0], 0)
    np.testing.assert_allclose(lse[0], np.broadcast_to(inputs["sink_N"], (3, 2)), rtol=1e-6)
    for grad in grads:
        assert np.isfinite(grad).all()
    np.testing.assert_array_equal(grads[0][0], 0)
    assert np.abs(grads[0][1]).max() > 1e-3


@pytest.mark.parametrize("tokens", [3, 65])
def test_attention_never_meets_rows_that_nobody_may_read(tokens: int) -> None:
    """NaN in unread window rows and in every entry that is not selected: absent slots (-1) must not read entry 0.

    65 queries make two blocks, the second of them padded with a query that belongs to nobody.
    """
    window = 64
    inputs = attention_inputs(6, 2, tokens, 1, window)
    inputs["first_BT"] = np.maximum(inputs["first_BT"], 1)
    inputs["selection_BTK"] = np.where(inputs["selection_BTK"] < 4, -1, inputs["selection_BTK"])
    clean, _ = attend(**inputs, window=window, scale=0.25)
    rows, pool = inputs["window_BSH"].copy(), np.array(inputs["pool_GBPH"])
    rows[:, 0], pool[:, :, :4], pool[0] = np.nan, np.nan, np.nan
    found, _ = attend(**(inputs | {"window_BSH": rows, "pool_GBPH": jnp.asarray(pool)}), window=window, scale=0.25)
    np.testing.assert_array_equal(found, clean)


def test_attention_of_an_empty_pool_reads_the_window_alone() -> None:
    inputs = attention_inputs(8, 2, 3, 4, 4)
    inputs["selection_BTK"][:] = -1
    empty = inputs | {"pool_GBPH": jnp.zeros((2, 2, 0, 8))}
    alone = {k: v for k, v in inputs.items() if k not in ("pool_GBPH", "selection_BTK")}
    expected, _ = attend(**alone, window=4, scale=0.25)
    np.testing.assert_array_equal(attend(**empty, window=4, scale=0.25)[0], expected)
    np.testing.assert_allclose(attend(**inputs, window=4, scale=0.25)[0], expected, rtol=1e-6)


def test_attention_in_blocks_equals_one_block(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = attention_inputs(9, 2, 41, 6, 6)
    whole = jax.jit(lambda q: sparse_attention(**(inputs | {"q_BTNH": q}), window=6, scale=0.25))(inputs["q_BTNH"])
    monkeypatch.setattr(attention_xla, "_GATHER_ELEMENTS", 2 * 3 * 8 * 6)  # six queries at a time
    cut = jax.jit(lambda q: sparse_attention(**(inputs | {"q_BTNH": q}), window=6, scale=0.25))(inputs["q_BTNH"])
    for found, expected in zip(cut, whole, strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6)


# --- temporary memory ---------------------------------------------------------------------------------------------


def temporary_bytes(tokens: int, entries: int) -> int:
    """What a compiled call with K = 16 needs beside arguments and results."""
    shapes = (
        *(((1, tokens, 2, 32), "f4"), ((1, tokens + 16, 32), "f4"), ((1, tokens), "i4"), ((2,), "f4")),
        *(((3, 1, entries, 32), "f4"), ((1, tokens, 16), "i4")),
    )

    def f(q: Any, rows: Any, first: Any, sink: Any, pool: Any, selection: Any) -> Any:
        return sparse_attention(q, rows, first, sink, pool, 1, selection, window=16, scale=0.1)

    compiled = jax.jit(f).lower(*(jax.ShapeDtypeStruct(*shape) for shape in shapes)).compile()
    return compiled.memory_analysis().temp_size_in_bytes


def test_attention_memory_is_linear_in_the_length_and_free_of_the_pool() -> None:
    """As many entries as tokens: four times the length may take four times the memory, never sixteen times."""
    short, long = temporary_bytes(1024, 1024), temporary_bytes(4096, 4096)
    assert long < 4.5 * short
    assert long < 4096 * 4096 * 4 / 16  # a score for every pair, and every head, would be 128 MiB
    assert temporary_bytes(1024, 65_536) == short
    assert temporary_bytes(1, 65_536) < 65_536 * 32 * 4 / 100  # no group of the pool is copied out of its stack
