"""A step as a whole: micro-batches, router biases, broken numbers, simulated replay."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from csa2_jax import Bound, ModelConfig, init_cache, init_model, prefill
from csa2_jax.model import head_logits
from tests.small_models import quick_compilation
from tests.train.small import rows, trainable
from tests.train.test_run import MODEL
from train.optimizer import OptimizerSettings, make_optimizer
from train.parameters import Choice, take_apart
from train.step import Batch, LossSettings, TrainState, broken_parameters, make_step, replay_starts

OPTIMIZER = OptimizerSettings(peak=1e-2, end=1e-2, warmup=0, schedule="constant", router_bias_rate=0.01)


@functools.cache
def stepper() -> Any:
    """(step, a function that makes a fresh state, names of what is trained) of a model of two layers."""
    config = ModelConfig.from_hf(
        {"model_type": "deepseek_v41", "text_config": {"model_type": "deepseek_v41_text", **MODEL}}
    )
    together, parts = take_apart(init_model(config, 1, compute_dtype="float32", fake_quant=False), Choice())
    optimizer = make_optimizer(parts.trained, Choice(), config, OPTIMIZER, 10)
    step = make_step(together, optimizer, config, LossSettings(remat="none"), OPTIMIZER, 4)

    def fresh() -> TrainState:
        return jax.tree.map(jnp.copy, TrainState.start(parts, optimizer))

    return step, fresh, sorted(parts.trained)


def batch(seed: int = 0) -> Batch:
    rng = np.random.default_rng(seed)
    lengths = [[9, 6], [16], [5], [11, 3]]
    return rows([[rng.integers(3, 250, n).astype(np.int32) for n in row] for row in lengths], 16, 2)


def cut(one: Batch, micro_batches: int) -> Batch:
    return jax.tree.map(lambda a: a.reshape(micro_batches, -1, *a.shape[1:]), one)


def test_cutting_a_batch_into_micro_batches_changes_rounding_alone() -> None:
    """Rows with unlike numbers of tokens: everything is divided by the tokens of the whole batch, loads are counted over it."""
    step, fresh, _ = stepper()
    with quick_compilation():
        (one, told), (two, again) = (step(fresh(), cut(batch(), n)) for n in (1, 2))
    for name in ("loss", "lm", "index", "balance", "gradient_norm", "tokens", "predicted", "recall"):
        np.testing.assert_allclose(again[name], told[name], rtol=2e-5, err_msg=name)
    for name, bias in one.loads.items():
        np.testing.assert_array_equal(two.loads[name], bias)
    # Muon makes a rounding of a tiny singular value large: the moves are compared where gradients are plain sums.
    for name in ("embed.weight", "head.weight", "norm.weight"):
        np.testing.assert_allclose(two.trained[name], one.trained[name], atol=2e-4)


def test_router_biases_move_by_the_rate_against_the_load_of_the_whole_batch() -> None:
    step, fresh, _ = stepper()
    with quick_compilation():
        state, _ = step(fresh(), cut(batch(), 2))
    before, after = fresh().loads["layers.ffn.gate.bias"], state.loads["layers.ffn.gate.bias"]
    moved = np.asarray(after - before, np.float64)
    assert set(np.round(moved.ravel(), 6).tolist()) <= {-0.01, 0.0, 0.01}
    assert moved.any()
    np.testing.assert_allclose(moved.sum(axis=-1), 0, atol=1e-7)  # of two experts one gains what the other loses


def test_a_step_without_finite_gradients_changes_nothing_and_names_them() -> None:
    step, fresh, names = stepper()
    broken = fresh()
    broken = dataclasses.replace(
        broken, trained=broken.trained | {"norm.weight": broken.trained["norm.weight"].at[0].set(jnp.nan)}
    )
    before = jax.tree.map(np.array, (broken.trained, broken.optimizer, broken.loads, broken.step))
    with quick_compilation():
        state, told = step(broken, cut(batch(), 2))
    assert not bool(told["finite"])
    for a, b in zip(
        jax.tree.leaves((state.trained, state.optimizer, state.loads, state.step)), jax.tree.leaves(before), strict=True
    ):
        np.testing.assert_array_equal(a, b)
    assert "embed.weight" in broken_parameters(names, told["broken"])


def test_simulated_replay_is_what_a_replayed_prefill_computes() -> None:
    """A row whose document is replayed from its last window on gives that prefill's logits; one that is not is as before."""
    model = trainable()
    window, length = model.config.sliding_window, 20
    tokens = np.random.default_rng(0).integers(0, model.config.vocab_size, (2, length)).astype(np.int32)
    with quick_compilation():
        cache = init_cache(model.config, 2, 32, "f32")
        expected, _ = prefill(Bound.of(model), tokens, cache, decoder="replay", chunk=8)
        start = jnp.full(tokens.shape, length - window, jnp.int32)
        count = jnp.full(2, length, jnp.int32)
        run = jax.jit(lambda replay: model.trunk(jnp.asarray(tokens), count, replay_BT=replay)[0])
        h, plain = run(start), run(jnp.full_like(start, length))
        ordinary = jax.jit(lambda: model.trunk(jnp.asarray(tokens), count)[0])()
    np.testing.assert_allclose(head_logits(h, model.head["weight"][...])[:, -1], expected.logits, rtol=0, atol=1e-4)
    np.testing.assert_array_equal(h[:, : length - window], plain[:, : length - window])
    np.testing.assert_allclose(plain, ordinary, atol=1e-6)
    assert np.abs(np.asarray(h - plain)).max() > 1e-3


def test_replays_start_inside_their_documents() -> None:
    one = batch()
    full = np.asarray(replay_starts(one, 1.0, 4, jax.random.key(3)))
    for b, t in np.ndindex(*one.tokens.shape):
        if one.segment[b, t] >= 0:
            inside = np.flatnonzero(one.segment[b] == one.segment[b, t])
            assert inside[0] <= full[b, t] <= inside[-1]
            assert len(set(full[b, inside].tolist())) == 1
    assert (np.asarray(replay_starts(one, 0.0, 4, jax.random.key(3))) == one.tokens.shape[1]).all()
