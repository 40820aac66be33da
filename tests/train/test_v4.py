"""DeepSeek-V4 learns by the same code: finite differences, exact zeros, documents packed and apart, a few steps."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from csa2_jax import Model
from tests.small_models import load_v4, quick_compilation
from tests.train.float64 import in_float64
from tests.train.small import rows
from train.optimizer import OptimizerSettings, make_optimizer
from train.parameters import INDEXER, Choice, matches, table, take_apart
from train.step import Batch, LossSettings, TrainState, losses, make_step

WIDTH, SEGMENTS = 40, 5
TERMS = ("lm", "index", "balance")
SETTINGS = LossSettings(remat="none")


@functools.cache
def model() -> Model:
    return load_v4(seed=3)


@functools.cache
def parts() -> Any:
    return take_apart(model(), Choice())


def documents() -> list[np.ndarray]:
    """With 2, 3 and more groups of four, and one or more of eight, the last of them open."""
    rng = np.random.default_rng(0)
    return [rng.integers(3, 64, n).astype(np.int32) for n in (9, 14, 21, 38)]


def apart() -> Batch:
    return rows([[d] for d in documents()], WIDTH, 1)


def packed() -> Batch:
    a, b, c, d = documents()
    return rows([[a, b], [c], [d], []], WIDTH, model().config.document_alignment)


def terms(arrays: dict[str, Any], batch: Any) -> jax.Array:
    sums = losses(parts()[0](arrays), batch, SETTINGS, SEGMENTS, jax.random.key(0))
    return jnp.stack([sums[name] for name in TERMS])


@functools.cache
def found(which: str) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """(terms, their gradients by path [term, ...])."""
    _, p = parts()

    @jax.jit
    def both(trained: dict[str, Any], batch: Any) -> Any:
        value, pull = jax.vjp(lambda t: terms(t | p.loads | p.frozen, batch), trained)
        return value, jax.vmap(pull)(jnp.eye(len(TERMS), dtype=value.dtype))[0]

    with quick_compilation():
        value, jacobian = both(p.trained, {"apart": apart, "packed": packed}[which]())
    return np.asarray(value), {name: np.asarray(a) for name, a in jacobian.items()}


def test_every_parameter_has_a_rule_and_a_loss() -> None:
    """The indexer, its compressor and slot bias learn from the index loss alone; everything else from cross-entropy."""
    rows_of = table(parts()[1].all(), Choice(), model().config)
    assert {row.name for row in rows_of} | {"layers.ffn.by_token"} == set(parts()[1].all())
    assert {row.name for row in rows_of if row.rule.role == "biases and scales"} >= {
        *("compressors.m4.bias", "compressors.m8.bias", "compressors.m4.keys.bias", "collapse.base"),
    }
    _, jacobian = found("apart")
    indexer = {name for name in jacobian if matches(name, INDEXER)}
    assert indexer >= {"indexers.wq_b.weight", "compressors.m4.keys.wkv.weight", "compressors.m4.keys.bias"}
    for name, gradient in jacobian.items():
        assert np.isfinite(gradient).all(), name
        assert gradient[0].any() == (name not in indexer), name
        assert gradient[1].any() == (name in indexer), name


def test_packed_documents_are_separate_ones() -> None:
    """Groups of both ratios, the group before the first among them, experts chosen by token: none crosses a document."""
    value, jacobian = found("apart")
    other, of_packed = found("packed")
    np.testing.assert_allclose(other, value, rtol=3e-6)
    for name, gradient in jacobian.items():
        for i, term in enumerate(TERMS):
            atol = 3e-4 * np.abs(gradient[i]).max() + 1e-8
            np.testing.assert_allclose(of_packed[name][i], gradient[i], rtol=0, atol=atol, err_msg=f"{term} {name}")


def test_gradients_are_those_of_finite_differences_in_float64() -> None:
    _, p = parts()
    _, single = found("packed")
    batch, rng = packed(), np.random.default_rng(1)
    with in_float64(), quick_compilation():

        def wide(arrays: dict[str, Any]) -> dict[str, Any]:
            return {
                name: jnp.asarray(np.asarray(a), jnp.float64) if a.dtype == np.float32 else a
                for name, a in arrays.items()
            }

        exact, rest = wide(p.trained), wide(p.loads | p.frozen)
        forward = jax.jit(lambda trained: terms(trained | rest, batch))

        @jax.jit
        def gradient(trained: dict[str, Any]) -> Any:
            value, pull = jax.vjp(lambda t: terms(t | rest, batch), trained)
            return jax.vmap(pull)(jnp.eye(len(TERMS), dtype=value.dtype))[0]

        jacobian = {name: np.asarray(a) for name, a in gradient(exact).items()}
        checked = 0
        for name, a in exact.items():
            direction = rng.standard_normal(a.shape)
            step = 1e-5 * float(np.abs(np.asarray(a)).max() + 1e-3) / np.abs(direction).max()
            above, below = (np.asarray(forward(exact | {name: a + s * step * direction})) for s in (1, -1))
            slope = (above - below) / (2 * step)
            for i, term in enumerate(TERMS[:2]):
                if (term == "index") != matches(name, INDEXER):
                    continue
                size = np.sqrt(np.sum(np.square(jacobian[name][i])))
                along = np.sum(jacobian[name][i] * direction)
                assert abs(slope[i] - along) <= 2e-6 * size * np.sqrt(direction.size) + 1e-7, (term, name)
                error = np.abs(single[name][i] - jacobian[name][i]).max()
                assert error <= 5e-4 * np.abs(jacobian[name][i]).max() + 1e-7, (term, name)
                checked += 1
        assert checked == len(exact)


def test_a_few_steps_lower_both_losses() -> None:
    together, p = parts()
    config, settings = model().config, OptimizerSettings(peak=3e-3, end=3e-3, warmup=0, schedule="constant")
    optimizer = make_optimizer(p.trained, Choice(), config, settings, 8)
    batch = jax.tree.map(lambda a: np.asarray(a)[None], packed())
    with quick_compilation():
        step = make_step(together, optimizer, config, LossSettings(remat="layer"), settings, SEGMENTS)
        state = jax.tree.map(jnp.copy, TrainState.start(p, optimizer))
        seen = []
        for _ in range(8):
            state, report = step(state, batch)
            seen.append((float(report["lm"]), float(report["index"])))
    assert all(np.isfinite(seen).all() for seen in seen)
    assert seen[-1][0] < 0.8 * seen[0][0]
    assert seen[-1][1] < seen[0][1]
