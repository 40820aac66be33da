"""Which parameter goes where, and what each method does to it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from csa2_jax import Model, ModelConfig
from tests.small_models import RELEASED
from tests.train.small import trainable
from train.optimizer import (
    OptimizerSettings,
    balance,
    make_optimizer,
    move_router_bias,
    muon,
    schedule,
    sinkhorn_momentum,
)
from train.parameters import DRAFT, INDEXER, RECIPES, RULES, Choice, matches, table, take_apart
from train.step import TrainState


def test_every_parameter_of_the_released_model_has_a_rule_and_the_right_one() -> None:
    """At full size, without a byte of weights: stored codes are frozen, the rest goes where the report says."""
    config = ModelConfig.from_hf(RELEASED)
    model = nnx.eval_shape(lambda: Model(config, weights="float32"))
    flat = {".".join(map(str, path)): v for path, v in nnx.to_flat_state(nnx.state(model))}
    rows = {row.name: row for row in table({n: v.get_value() for n, v in flat.items()}, Choice(), config)}
    assert len(rows) > 70
    roles = {name: row.rule.role for name, row in rows.items()}
    assert roles["embed.weight"] == roles["head.weight"] == "embeddings and head"
    assert roles["layers.attn.wq_b.weight"] == roles["draft.stages.attn.wq_b.weight"] == "query heads"
    assert roles["indexers.wq_b.weight"] == "index query heads"
    assert roles["layers.ffn.gate.bias"] == roles["draft.stages.ffn.gate.bias"] == "router bias"
    assert roles["layers.attn.attn_sink"] == roles["layers.hc_attn.base"] == "biases and scales"
    assert roles["layers.attn.q_norm.weight"] == roles["compressors.m2.k_norm.weight"] == "norms"
    assert rows["layers.attn.wq_b.weight"].matrices == config.num_hidden_layers * config.num_attention_heads
    for name, row in rows.items():
        assert (row.rule.method == "frozen") == ("engram_tables" in name), name  # e4m3 codes
        if row.rule.method == "muon":
            assert len(row.shape) >= 2


def test_recipes_train_what_they_say() -> None:
    _, everything = take_apart(trainable(), Choice())
    names = set(everything.trained)
    indexer = {n for n in names if matches(n, INDEXER)}
    assert {n for n in names if n.startswith("indexers.")} < indexer
    assert set(take_apart(trainable(), RECIPES["indexer only"])[1].trained) == indexer
    assert set(take_apart(trainable(), RECIPES["frozen indexer"])[1].trained) == names - indexer
    assert set(take_apart(trainable(), RECIPES["draft head only"])[1].trained) == {
        n for n in names if matches(n, DRAFT)
    }
    assert not take_apart(trainable(), RECIPES["adapters"])[1].trained
    with pytest.raises(ValueError, match=r"recipe='all' is unknown; choose from \['adapters'"):
        Choice.recipe("all")


def test_a_model_taken_apart_goes_together_again() -> None:
    together, parts = take_apart(trainable(), Choice())
    again = nnx.state(together(parts.all()))
    for a, b in zip(jax.tree.leaves(again), jax.tree.leaves(nnx.state(trainable())), strict=True):
        assert a is b


def test_the_router_bias_is_in_no_optimizer_state_and_moves_by_load() -> None:
    _, parts = take_apart(trainable(), Choice())
    optimizer = make_optimizer(parts.trained, Choice(), trainable().config, OptimizerSettings(), 10)
    state = TrainState.start(parts, optimizer)
    assert set(state.loads) == {"layers.ffn.gate.bias", "draft.stages.ffn.gate.bias"}
    for tree in (state.trained, state.optimizer):
        assert not [p for p, _ in jax.tree.leaves_with_path(tree) if "gate.bias" in jax.tree_util.keystr(p)]
    bias = jnp.array([[0.5, 0.0, -0.25], [0.0, 0.0, 0.0]])
    load = jnp.array([[9.0, 3.0, 0.0], [4.0, 4.0, 4.0]])
    moved = move_router_bias(bias, load, 0.01)
    np.testing.assert_allclose(moved, [[0.49, 0.01, -0.24], [0.0, 0.0, 0.0]], atol=1e-7)


def test_muon_orthogonalises_each_matrix_and_each_head_by_itself() -> None:
    rng = np.random.default_rng(0)
    gradient = jnp.asarray(rng.standard_normal((2, 12, 5)), jnp.float32)
    whole, split = (muon(0.95, 5, parts) for parts in (1, 3))
    params = {"w": jnp.zeros((2, 12, 5))}
    moved = whole.update({"w": gradient}, whole.init(params), params)[0]["w"]
    by_head = split.update({"w": gradient}, split.init(params), params)[0]["w"]
    for layer in range(2):
        singular = np.linalg.svd(np.asarray(moved[layer]) / (0.2 * np.sqrt(12)), compute_uv=False)
        assert (singular > 0.6).all()
        assert (singular < 1.3).all()
        for head in range(3):
            rows = slice(4 * head, 4 * head + 4)
            own = {"w": gradient[layer, rows]}
            alone = muon(0.95, 5).update(own, muon(0.95, 5).init(own), own)[0]["w"]
            np.testing.assert_allclose(by_head[layer, rows], alone, rtol=1e-5, atol=1e-6)
    assert np.abs(np.asarray(by_head - moved)).max() > 0.01


def test_balanced_updates_have_even_rows_and_columns_and_leave_unseen_rows() -> None:
    rng = np.random.default_rng(1)
    gradient = (
        rng.standard_normal((40, 8)) * np.exp(rng.standard_normal((40, 1)) * 3) * np.exp(rng.standard_normal((1, 8)))
    )
    gradient[5:20] = 0
    gradient *= 1e-18  # squares of such numbers vanish in float32
    found = np.asarray(balance(jnp.asarray(gradient, jnp.float32), 20))
    assert not found[5:20].any()
    seen = np.delete(found, np.s_[5:20], axis=0)
    np.testing.assert_allclose(np.sqrt((seen**2).mean(axis=1)), 1.0, rtol=1e-5)
    np.testing.assert_allclose(np.sqrt((seen**2).mean(axis=0)), 1.0, rtol=0.02)
    transform = sinkhorn_momentum(0.9, 5)
    params = {"w": jnp.zeros((40, 8))}
    update, state = transform.update({"w": jnp.zeros((40, 8))}, transform.init(params), params)
    assert np.isfinite(np.asarray(update["w"])).all()
    assert not np.asarray(update["w"]).any()
    del state


def test_a_row_stays_in_steps_without_a_gradient_for_it_and_goes_on_with_its_momentum() -> None:
    transform = sinkhorn_momentum(0.9, 5)
    first, second = np.random.default_rng(2).standard_normal((2, 6, 4)).astype(np.float32)
    without = first.copy()
    without[2] = 0
    state = transform.init({"w": jnp.zeros((6, 4))})
    _, state = transform.update({"w": jnp.asarray(second)}, state)
    moved, between = transform.update({"w": jnp.asarray(without)}, state)
    assert not np.asarray(moved["w"])[2].any()
    assert np.asarray(moved["w"])[[0, 1, 3, 4, 5]].all()
    moved, _ = transform.update({"w": jnp.asarray(first)}, between)
    momentum = 0.9 * second[2] + first[2]
    direction = np.asarray(moved["w"])[2] / (first[2] + 0.9 * momentum)
    assert (direction > 0).all()  # balancing scales each number by its row and column


@pytest.mark.parametrize("name", ["cosine", "linear", "wsd", "constant"])
def test_schedules_start_at_the_warm_up_and_end_where_they_say(name: str) -> None:
    settings = OptimizerSettings(peak=1e-2, end=1e-3, warmup=10, schedule=name)  # type: ignore[arg-type]
    rate = schedule(settings, 110)
    values = [float(np.asarray(rate(step))) for step in range(111)]
    assert values[0] == pytest.approx(1e-3)
    assert values[9] == pytest.approx(1e-2)
    assert max(values) <= 1e-2 * (1 + 1e-6)
    assert values[110] == pytest.approx(1e-2 if name == "constant" else 1e-3)


def test_decay_spares_biases_and_embeddings_and_tables_move_five_times_as_far() -> None:
    """With a zero gradient only decay moves anything; with one, the rate of a rule scales the move."""
    _, parts = take_apart(trainable(), Choice())
    settings = OptimizerSettings(peak=1e-2, end=1e-2, warmup=0, schedule="constant", clip=0.0)
    optimizer = make_optimizer(parts.trained, Choice(), trainable().config, settings, 10)
    zero = jax.tree.map(jnp.zeros_like, parts.trained)
    updates, _ = optimizer.update(zero, optimizer.init(parts.trained), parts.trained)
    rules = {row.name: row.rule for row in table(parts.trained, Choice(), trainable().config)}
    for name, update in updates.items():
        expected = -1e-2 * 0.1 * parts.trained[name] if rules[name].decay else jnp.zeros_like(update)
        np.testing.assert_allclose(update, expected, atol=1e-7, err_msg=name)
    ones = jax.tree.map(jnp.ones_like, parts.trained)
    updates, _ = optimizer.update(ones, optimizer.init(parts.trained), parts.trained)
    norm = {name: float(jnp.sqrt(jnp.mean(jnp.square(u)))) for name, u in updates.items()}
    assert norm["engram_tables.0.weight"] == pytest.approx(5 * norm["embed.weight"], rel=1e-3)


def test_settings_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ValueError, match=r"end=0.1 must lie between 0 and peak=0.01"):
        OptimizerSettings(peak=0.01, end=0.1)
    with pytest.raises(ValueError, match="schedule='step'"):
        OptimizerSettings(schedule="step")  # type: ignore[arg-type]
    assert len({rule.role for rule in RULES}) == len(RULES)
