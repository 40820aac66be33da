"""What every implementation of sparse attention must do; a test module subclasses it with an implementation's name.

The reference is plain NumPy in float64, one query at a time, over numbers that the storage holds exactly.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas import formats, sparse_attention, storage

Inputs = dict[str, Any]
ARGUMENTS = ("q_BTNH", "window_BSH", "sink_N", "pool_GBPH")  # what has a gradient

# Jitted: what they do consists of many small steps.
_pack = jax.jit(storage.pack, static_argnums=1, static_argnames="units")
_unpack = jax.jit(storage.unpack)


def attend_reference(
    q: np.ndarray,
    rows: np.ndarray,
    first: np.ndarray,
    sink: np.ndarray,
    pool: np.ndarray | None,
    selection: np.ndarray | None,
    *,
    window: int,
    scale: float,
    causal: bool = True,
) -> tuple[np.ndarray, np.ndarray]:
    """(o [B, T, N, H], lse [B, T, N]) float64 from q [B, T, N, H], rows [B, S, H], pool [B, P, H], selection [B, T, K]."""
    q, rows, sink = (np.asarray(a, np.float64) for a in (q, rows, sink))
    batch, tokens, heads, _ = q.shape
    out, lse = np.zeros(q.shape), np.zeros(q.shape[:3])
    for b in range(batch):
        for t in range(tokens):
            end = rows.shape[1] - tokens + t + 1 if causal else rows.shape[1]
            entries = [rows[b, s] for s in range(max(int(first[b, t]), end - window if causal else 0), end)]
            if pool is not None and selection is not None:
                entries += [np.asarray(pool[b, i], np.float64) for i in selection[b, t] if i >= 0]
            for n in range(heads):
                if not entries:
                    lse[b, t, n] = sink[n]
                    continue
                keys = np.stack(entries)
                logits = keys @ q[b, t, n] * scale
                top = max(logits.max(), sink[n])
                p = np.exp(logits - top)
                total = p.sum() + np.exp(sink[n] - top)
                out[b, t, n], lse[b, t, n] = p @ keys / total, top + np.log(total)
    return out, lse


def make_inputs(
    seed: int, batch: int, tokens: int, history: int, window: int, *, entries: int = 37, topk: int = 5, width: int = 32
) -> Inputs:
    """Ragged histories, selections with absent slots in any place, N = 2 heads, group 1 of 2."""
    rng = np.random.default_rng(seed)
    held = rng.integers(0, history + 1, batch) if history else np.zeros(batch, int)
    first = np.maximum(history + np.arange(tokens) - window + 1, (history - held)[:, None])
    selection = np.stack([rng.permutation(entries)[:topk] for _ in range(batch * tokens)]).reshape(batch, tokens, topk)
    selection[rng.random(selection.shape) < 0.2] = -1
    selection[0, 0, 0], selection[-1, -1, -1] = entries - 1, 0
    return {
        "q_BTNH": rng.standard_normal((batch, tokens, 2, width)).astype(np.float32),
        "window_BSH": rng.standard_normal((batch, history + tokens, width)).astype(np.float32),
        "first_BT": np.maximum(first, 0).astype(np.int32),
        "sink_N": np.array([1.5, -0.5], np.float32),
        "pool_GBPH": rng.standard_normal((2, batch, entries, width)).astype(np.float32),
        "group": 1,
        "selection_BTK": selection.astype(np.int32),
    }


# name: batch, tokens, history, window, causal, more
SHAPES: dict[str, tuple[int, int, int, int, bool, dict[str, int]]] = {
    "decode": (3, 1, 8, 8, True, {}),
    "first token, one entry": (2, 1, 0, 8, True, {"entries": 1, "topk": 1}),
    "chunk": (2, 11, 5, 5, True, {"entries": 19, "topk": 3}),
    "more slots than entries": (1, 3, 6, 4, True, {"entries": 6, "topk": 6}),
    "draft": (2, 4, 7, 7, False, {}),
}


@functools.cache
def _attend(implementation: str | None, interpret: Any, **options: Any) -> Any:
    chosen = {"implementation": implementation, "interpret": interpret}
    return jax.jit(lambda inputs: sparse_attention(**inputs, **chosen, **options))


@functools.cache
def _gradients(implementation: str | None, interpret: Any, window: int, causal: bool) -> Any:
    options = {"window": window, "causal": causal, "implementation": implementation, "interpret": interpret}

    def loss(args: tuple[Any, ...], inputs: Inputs, to_o: Any, to_lse: Any) -> Any:
        o, lse = sparse_attention(**inputs | dict(zip(ARGUMENTS, args, strict=True)), scale=0.25, **options)
        return jnp.sum(o * to_o) + jnp.sum(lse * to_lse)

    grad = jax.grad(loss)
    return jax.jit(lambda inputs, *weights: grad(tuple(inputs[a] for a in ARGUMENTS), inputs, *weights))


class SparseAttentionSuite:
    """Subclass with `implementation` and `interpret`."""

    implementation: str | None = None
    interpret: Any = False

    def attend(self, inputs: Inputs, **options: Any) -> tuple[Any, Any]:
        return _attend(self.implementation, self.interpret, **{"scale": 0.25, **options})(inputs)

    def check(self, inputs: Inputs, *, tolerance: float, causal: bool = True, window: int) -> None:
        """Against the reference, on the numbers that the storage holds."""
        found, lse = self.attend(inputs, window=window, causal=causal)
        rows, pool = inputs["window_BSH"], inputs["pool_GBPH"]
        rows = _unpack(rows)[0] if isinstance(rows, storage.Packed) else rows
        expected, expected_lse = attend_reference(
            np.asarray(inputs["q_BTNH"], np.float32),
            np.asarray(rows, np.float32),
            inputs["first_BT"],
            inputs["sink_N"],
            np.asarray(_unpack(pool), np.float32)[inputs["group"]],
            inputs["selection_BTK"],
            window=window,
            scale=0.25,
            causal=causal,
        )
        assert found.dtype == inputs["q_BTNH"].dtype
        np.testing.assert_allclose(np.asarray(found, np.float32), expected, rtol=tolerance, atol=tolerance)
        np.testing.assert_allclose(lse, expected_lse, rtol=2e-5, atol=2e-5)

    @pytest.mark.parametrize("shape", SHAPES)
    def test_attention_equals_the_reference(self, shape: str) -> None:
        batch, tokens, history, window, causal, more = SHAPES[shape]
        inputs = make_inputs(tokens, batch, tokens, history, window, **more)
        if shape == "chunk":  # claims to reach further back than its window
            inputs["first_BT"][0] = 0
        self.check(inputs, tolerance=5e-6, causal=causal, window=window)

    @pytest.mark.parametrize(
        "stored", ["f32", "bf16", "bf16 in rows", "fp4", "fp4 in units", "fp4 index", "fp8 and fp4"]
    )
    @pytest.mark.parametrize("compute", ["float32", "bfloat16"])
    def test_attention_reads_every_storage(self, stored: str, compute: str) -> None:
        """128 channels, so that every layout exists; f32 and bf16 queries."""
        inputs = make_inputs(3, 2, 3, 32, 5, entries=64, topk=6, width=128)
        pool = jnp.asarray(inputs["pool_GBPH"])
        formed = {
            "f32": lambda: pool,
            "bf16": lambda: pool.astype(jnp.bfloat16),
            "bf16 in rows": lambda: pool.astype(jnp.bfloat16).reshape(2, 2, 64, 1, 128),
            "fp4": lambda: _pack(pool, formats.MAIN),
            "fp4 in units": lambda: _pack(pool, formats.MAIN, units=True),
            "fp4 index": lambda: _pack(pool, formats.INDEX),
            "fp8 and fp4": lambda: _pack(pool, formats.MAIN),
        }
        inputs["pool_GBPH"] = formed[stored]()
        if stored == "fp8 and fp4":
            inputs["window_BSH"] = _pack(inputs["window_BSH"][None], formats.WINDOW)
        elif compute == "bfloat16":
            inputs["window_BSH"] = jnp.asarray(inputs["window_BSH"], jnp.bfloat16)
        if compute == "bfloat16" and stored == "f32":
            inputs["pool_GBPH"] = pool.astype(jnp.bfloat16).astype(jnp.float32)  # what bf16 products can see of it
        inputs["q_BTNH"] = jnp.asarray(inputs["q_BTNH"], compute) / 4
        self.check(inputs, tolerance=5e-6 if compute == "float32" else 1.2e-2, window=5)

    def test_attention_reads_exactly_what_a_hand_made_pattern_allows(self) -> None:
        """Every row is a unit vector of its own and all scores are 0, so the output says who was read, and how often."""
        rows, first = np.zeros((1, 5, 16), np.float32), np.array([[2, 0, 4]], np.int32)
        rows[0, np.arange(5), np.arange(5)] = 1
        pool = np.zeros((1, 1, 6, 16), np.float32)
        pool[0, 0, np.arange(6), 5 + np.arange(6)] = 1
        chosen = np.array([[[2, -1, -1], [-1, 0, 3], [5, 5, -1]]], np.int32)
        query, sink = np.zeros((1, 3, 2, 16), np.float32), np.zeros(2, np.float32)
        inputs = {"q_BTNH": query, "window_BSH": rows, "first_BT": first, "sink_N": sink, "pool_GBPH": pool, "group": 0}
        found, lse = self.attend(inputs | {"selection_BTK": chosen}, window=5)
        counts = np.zeros((3, 16))
        counts[0, [2, 7]] = 1  # its own row 2, entry 2
        counts[1, [0, 1, 2, 3, 5, 8]] = 1  # rows 0 to 3, entries 0 and 3
        counts[2, 4], counts[2, 10] = 1, 2  # its own row, and an entry that is listed twice counts twice
        total = counts.sum(axis=1, keepdims=True) + 1  # exp(0) for the sink
        np.testing.assert_allclose(np.asarray(found)[0, :, 1], counts / total, rtol=1e-6)
        np.testing.assert_allclose(np.asarray(lse)[0, :, 0], np.log(total[:, 0]), rtol=1e-6)

    @pytest.mark.parametrize("magnitude", [1e5, -1e5])
    def test_attention_survives_scores_of_1e5(self, magnitude: float) -> None:
        """exp(score) alone would overflow, exp(sink - score) must vanish or win by far."""
        rows, pool = np.zeros((1, 3, 8), np.float32), np.zeros((1, 1, 2, 8), np.float32)
        rows[0, :, 0], pool[0, 0, :, 0] = [1.0, 0.5, 1.0], [0.5, 1.0]
        query = np.zeros((1, 1, 2, 8), np.float32)
        query[..., 0] = magnitude
        inputs = {"q_BTNH": query, "window_BSH": rows, "first_BT": np.zeros((1, 1), np.int32), "group": 0}
        inputs |= {"sink_N": np.full(2, 2, np.float32), "pool_GBPH": pool}
        found, lse = self.attend(inputs | {"selection_BTK": np.array([[[0, 1]]], np.int32)}, window=3, scale=1.0)
        # Three entries share everything where scores are high; where they are low the sink takes it all.
        np.testing.assert_allclose(np.asarray(found)[..., 0], 1.0 if magnitude > 0 else 0.0)
        np.testing.assert_allclose(np.asarray(lse), magnitude + np.log(3) if magnitude > 0 else 2.0)

    def test_attention_never_meets_what_nobody_may_read(self) -> None:
        """NaN in unread window rows, in every entry that is not selected, the last included, and in the other group."""
        inputs = make_inputs(6, 2, 5, 4, 4, entries=19, topk=4)
        inputs["first_BT"] = np.maximum(inputs["first_BT"], 1)
        inputs["selection_BTK"] = np.where(inputs["selection_BTK"] % 9 < 3, -1, inputs["selection_BTK"])
        rows, pool = inputs["window_BSH"].copy(), inputs["pool_GBPH"].copy()
        rows[:, 0], pool[0] = np.nan, np.nan
        pool[:, :, np.arange(19) % 9 < 3] = np.nan
        assert np.isnan(pool[1, :, [0, 18]]).all()
        poisoned = inputs | {"window_BSH": rows, "pool_GBPH": pool}
        np.testing.assert_array_equal(self.attend(poisoned, window=4)[0], self.attend(inputs, window=4)[0])
        for name, found, clean in zip(
            ("q", "rows", "sink", "pool"), self.gradients(poisoned, 4), self.gradients(inputs, 4), strict=True
        ):
            np.testing.assert_array_equal(found, clean, err_msg=name)

    @pytest.mark.parametrize("broken", [np.nan, np.inf])
    def test_a_broken_row_reaches_only_the_queries_that_read_it(self, broken: float) -> None:
        """Row 5 is the newest of four queries' rows, row 2 the oldest: causality holds for NaN too."""
        inputs = make_inputs(12, 1, 4, 2, 2, entries=6, topk=2)
        inputs["first_BT"] = np.array([[1, 2, 3, 4]], np.int32)
        for row, readers in ((5, [3]), (2, [0, 1])):
            rows = inputs["window_BSH"].copy()
            rows[0, row] = broken
            found, _ = self.attend(inputs | {"window_BSH": rows}, window=2)
            finite = np.isfinite(np.asarray(found)).all(axis=(0, 2, 3))
            np.testing.assert_array_equal(finite, ~np.isin(np.arange(4), readers))

    def test_attention_of_an_empty_pool_reads_the_window_alone(self) -> None:
        inputs = make_inputs(8, 2, 3, 4, 4)
        inputs["selection_BTK"][:] = -1
        alone = {k: v for k, v in inputs.items() if k not in ("pool_GBPH", "selection_BTK")}
        expected, _ = self.attend(alone, window=4)
        empty = inputs | {"pool_GBPH": np.zeros((2, 2, 0, 32), np.float32)}
        np.testing.assert_array_equal(self.attend(empty, window=4)[0], expected)
        np.testing.assert_allclose(self.attend(inputs, window=4)[0], expected, rtol=1e-6)

    # --- gradients ------------------------------------------------------------------------------------------------

    def gradients(self, inputs: Inputs, window: int, causal: bool = True) -> tuple[jax.Array, ...]:
        """Of a loss that weighs o and lse with fixed numbers, in `ARGUMENTS`."""
        return _gradients(self.implementation, self.interpret, window, causal)(inputs, *loss_weights(inputs))

    @pytest.mark.parametrize("causal", [True, False])
    def test_gradients_equal_finite_differences(self, causal: bool) -> None:
        """Every element of every argument, by name; one entry is listed twice, another is read by all queries."""
        inputs = make_inputs(2, 2, 3, 2, 3, entries=5, topk=4, width=8)
        inputs["selection_BTK"][0] = [[1, 4, 1, -1], [1, -1, 0, 2], [3, 1, 0, 4]]
        found = self.gradients(inputs, 3, causal)
        for name, grad in zip(ARGUMENTS, found, strict=True):
            expected = finite_differences(inputs, name, causal)
            assert grad.dtype == jnp.float32
            np.testing.assert_allclose(grad, expected, rtol=2e-4, atol=2e-5, err_msg=name)
            assert np.abs(expected).max() > 0.05, name

    def test_gradients_of_queries_with_nothing_to_read_are_zero_and_finite(self) -> None:
        inputs = make_inputs(4, 2, 3, 4, 4, entries=19, topk=3)
        inputs["selection_BTK"][0] = -1
        inputs["first_BT"][0] = 99  # behind every row
        o, lse = self.attend(inputs, window=4)
        np.testing.assert_array_equal(o[0], 0)
        np.testing.assert_allclose(lse[0], np.broadcast_to(inputs["sink_N"], (3, 2)), rtol=1e-6)
        for grad in (grads := self.gradients(inputs, 4)):
            assert np.isfinite(grad).all()
        for grad in (grads[0][0], grads[1][0], grads[3][:, 0]):
            np.testing.assert_array_equal(grad, 0)
        assert np.abs(grads[0][1]).max() > 1e-3
        _, to_lse = loss_weights(inputs)
        alone = self.gradients({k: v[:1] if k in BATCHED else v for k, v in one_row(inputs).items()}, 4)[2]
        np.testing.assert_allclose(alone, to_lse[:1].sum(axis=(0, 1)), rtol=1e-5)  # lse is the sink itself

    def test_gradients_of_packed_rows_reach_queries_and_sink(self) -> None:
        inputs = make_inputs(5, 1, 2, 3, 3, entries=16, topk=4, width=32)
        packed = inputs | {"pool_GBPH": _pack(inputs["pool_GBPH"], formats.MAIN)}
        plain = inputs | {"pool_GBPH": np.asarray(_unpack(packed["pool_GBPH"]))}
        to_o, to_lse = loss_weights(inputs)

        def loss(q: Any, sink: Any) -> Any:
            o, lse = sparse_attention(
                **packed | {"q_BTNH": q, "sink_N": sink}, window=3, scale=0.25,
                implementation=self.implementation, interpret=self.interpret,
            )  # fmt: skip
            return jnp.sum(o * to_o) + jnp.sum(lse * to_lse)

        found = jax.jit(jax.grad(loss, argnums=(0, 1)))(inputs["q_BTNH"], inputs["sink_N"])
        expected = self.gradients(plain, 3)
        np.testing.assert_allclose(found[0], expected[0], rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(found[1], expected[2], rtol=1e-5, atol=1e-6)


BATCHED = ("q_BTNH", "window_BSH", "first_BT", "selection_BTK")


def one_row(inputs: Inputs) -> Inputs:
    """The first row of the batch alone."""
    return inputs | {"pool_GBPH": inputs["pool_GBPH"][:, :1]}


def loss_weights(inputs: Inputs) -> tuple[np.ndarray, np.ndarray]:
    """Fixed numbers for o and lse."""
    rng = np.random.default_rng(11)
    shape = inputs["q_BTNH"].shape
    to_o, to_lse = rng.standard_normal((2, *shape[1:])), rng.standard_normal((2, *shape[1:3]))
    return to_o[: shape[0]].astype(np.float32), to_lse[: shape[0]].astype(np.float32)


def finite_differences(inputs: Inputs, name: str, causal: bool, step: float = 1e-5) -> np.ndarray:
    """Central differences of the reference's loss in every element of one argument, all in float64."""
    to_o, to_lse = loss_weights(inputs)
    arrays = {k: np.asarray(v, np.float64) if k in ARGUMENTS else v for k, v in inputs.items()}

    def loss() -> float:
        o, lse = attend_reference(
            arrays["q_BTNH"], arrays["window_BSH"], arrays["first_BT"], arrays["sink_N"],
            arrays["pool_GBPH"][arrays["group"]], arrays["selection_BTK"], window=3, scale=0.25, causal=causal,
        )  # fmt: skip
        return float((o * to_o).sum() + (lse * to_lse).sum())

    array = arrays[name] = arrays[name].copy()
    grad = np.zeros(array.shape)
    for index in np.ndindex(array.shape):
        kept = array[index]
        array[index] = kept + step
        above = loss()
        array[index] = kept - step
        grad[index] = (above - loss()) / (2 * step)
        array[index] = kept
    return grad
