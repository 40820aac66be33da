"""Router and experts: choice and ties, clamps in value and gradient, and both ways of running the routed experts."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from csa2_jax.config import ModelConfig
from csa2_jax.layers import ParamFactory, take_layer
from csa2_jax.model import Model
from csa2_jax.moe import Gate, MoE, swiglu
from csa2_jax.numerics import Numerics
from tests import random_checkpoint as rc
from tests.golden_sets import materialise
from tests.oracle import OracleModel
from tests.small_models import load_random, quick_compilation, relative_error

F32 = jnp.dtype("float32")
NUMERICS = Numerics("float32", fake_quant=False)
LIMIT = 10.0
KNOBS: dict[str, Any] = {
    "swa_layers": 1,
    "encoder_ratios": (2,),
    "encoder_extra": "",
    "decoder_extra": "U",
    "hidden_size": 64,
    "moe_intermediate_size": 64,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "engram_layers": (),
    "draft_stages": 0,
}


@pytest.fixture(autouse=True, scope="module")
def quickly() -> Iterator[None]:
    """Every test has programs of its own."""
    with quick_compilation():
        yield


@functools.cache
def model(storage: rc.Storage = "f32", fake_quant: bool = False, experts_per_token: int = 2) -> Model:
    knobs = KNOBS | {"num_experts_per_tok": experts_per_token}
    return load_random(knobs, seed=3, storage=storage, fake_quant=fake_quant)


@functools.cache
def oracle(experts_per_token: int = 2) -> OracleModel:
    config = rc.random_config(3, quantisable=True, **(KNOBS | {"num_experts_per_tok": experts_per_token}))
    return OracleModel(config, rc.random_tensors(config, 4, "f32"))


@functools.partial(jax.jit, static_argnums=(0, 2))
def _run(graphdef: Any, state: Any, layer: int, x: Any) -> Any:
    merged = nnx.merge(graphdef, state)
    y, made = take_layer(merged.layers.ffn, layer)(x, layer, None, merged.config, merged.numerics)
    return y, made["gate_idx"], made["gate_w"]


def run(m: Model, layer: int, x: np.ndarray) -> list[np.ndarray]:
    """(y, expert ids, weights) of one layer's feed-forward."""
    graphdef, state = nnx.split(m)
    return [np.asarray(a) for a in _run(graphdef, state, layer, jnp.asarray(x, jnp.float32))]


def inputs(batch: int, tokens: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((batch, tokens, 64)).astype(np.float32) * rc.FFN_GAIN


@pytest.mark.parametrize(("experts_per_token", "tokens"), [(1, 2), (1, 50), (2, 1), (2, 50)])
def test_moe_equals_the_oracle(experts_per_token: int, tokens: int) -> None:
    """Few tokens read their experts one by one, many are sorted by expert; a single expert's weight is not normalised."""
    x = inputs(1, tokens)
    y, index, weight = run(model(experts_per_token=experts_per_token), 2, x)
    expected, chosen = oracle(experts_per_token).moe("layers.2.ffn", x[0].astype(np.float64), experts_per_token)
    np.testing.assert_array_equal(index[0], chosen)
    assert relative_error(y[0], expected) < 2e-6
    if experts_per_token > 1:
        np.testing.assert_allclose(weight.sum(axis=-1), 1.5, rtol=1e-5)
    else:
        assert np.ptp(weight) > 0.1 or tokens == 1


@pytest.mark.parametrize("storage", ["f32", "fp8"])
@pytest.mark.parametrize("crowded", [False, True])
def test_few_token_path_equals_sorted_path(storage: rc.Storage, crowded: bool) -> None:
    """50 tokens at once against one at a time; crowded: all go to the same experts, the blocks of others stay empty."""
    m = model(storage, fake_quant=storage == "fp8")
    x = inputs(1, 50, seed=1)
    if crowded:
        x = x * 1e-3 + inputs(1, 1, seed=2)
    together, index, _ = run(m, 1, x)
    assert (len(np.unique(index)) == 2) == crowded
    alone = np.concatenate([run(m, 1, x[:, t : t + 1])[0] for t in range(50)], axis=1)
    assert relative_error(together, alone) < 2e-6
    # The border between the paths: three tokens are six pairs for six experts, four tokens are sorted.
    for tokens in (3, 4):
        assert relative_error(run(m, 1, x[:, :tokens])[0], alone[:, :tokens]) < 2e-6


def test_rows_of_a_batch_do_not_meet() -> None:
    x = inputs(3, 7, seed=5)
    y, index, _ = run(model(), 0, x)
    changed = x.copy()
    changed[1] = np.nan
    y_changed, index_changed, _ = run(model(), 0, changed)
    np.testing.assert_allclose(y_changed[[0, 2]], y[[0, 2]], rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(index_changed[[0, 2]], index[[0, 2]])


# --- the router ---------------------------------------------------------------------------------------------------


def gate(experts: int, weight: Any = None, bias: Any = None, bias_vl: Any = None) -> Gate:
    config = ModelConfig.from_hf(materialise("tiny8_vl_f32_noqat"))
    assert config.has_vision
    module = Gate(config, experts, ParamFactory(F32, False))
    module.weight = nnx.Param(jnp.zeros((experts, 4)) if weight is None else jnp.asarray(weight, F32))
    module.bias = nnx.Param(jnp.zeros(experts) if bias is None else jnp.asarray(bias, F32))
    module.bias_vl = nnx.Param(jnp.zeros(experts) if bias_vl is None else jnp.asarray(bias_vl, F32))
    return module


@pytest.mark.smoke
def test_gate_gives_ties_to_the_lowest_expert() -> None:
    index, weight, score = gate(7)(jnp.ones((2, 4)), None, 3, 1.5)
    np.testing.assert_array_equal(index, [[0, 1, 2]] * 2)
    np.testing.assert_allclose(weight, 0.5, rtol=1e-6)
    np.testing.assert_allclose(score, np.full((2, 7), score[0, 0]))
    index, _, _ = gate(7, bias=[0, 0, 2, 0, 0, 2, 0])(jnp.ones((1, 4)), None, 3, 1.5)
    np.testing.assert_array_equal(index, [[2, 5, 0]])


def test_gate_bias_moves_the_choice_and_not_the_weight() -> None:
    rows = np.array([[2.0, 0, 0, 0], [1.0, 0, 0, 0], [-1.0, 0, 0, 0]])
    x = jnp.array([[1.0, 0, 0, 0]])
    score = np.sqrt(np.log1p(np.exp(rows[:, 0])))
    index, weight, _ = gate(3, rows, bias=[-9, 0, 0])(x, None, 2, 1.5)
    np.testing.assert_array_equal(index, [[1, 2]])
    np.testing.assert_allclose(weight[0], 1.5 * score[1:] / score[1:].sum(), rtol=1e-6)
    _, single, _ = gate(3, rows)(x, None, 1, 1.5)
    np.testing.assert_allclose(single[0, 0], 1.5 * score[0], rtol=1e-6)


def test_gate_uses_bias_vl_for_image_tokens_only() -> None:
    module = gate(4, bias=[5, 0, 0, 0], bias_vl=[0, 0, 0, 5])
    index, weight, _ = module(jnp.ones((3, 4)), jnp.array([False, True, False]), 2, 1.5)
    np.testing.assert_array_equal(index, [[0, 1], [3, 0], [0, 1]])
    np.testing.assert_allclose(weight, 0.75, rtol=1e-6)
    index, _, _ = module(jnp.ones((1, 4)), None, 2, 1.5)  # no image anywhere
    np.testing.assert_array_equal(index, [[0, 1]])


def test_gate_survives_large_logits() -> None:
    """softplus(200) is 200, softplus(-200) almost 0; neither overflows."""
    rows = np.array([[200.0, 0, 0, 0], [-200.0, 0, 0, 0]])
    _, weight, _ = gate(2, rows)(jnp.array([[1.0, 0, 0, 0]]), None, 2, 1.5)
    np.testing.assert_allclose(weight, [[1.5, 0]], atol=1e-6)


# --- the clamps ---------------------------------------------------------------------------------------------------

GATE = np.array([50.0, 50, -50, -50, 50, 9, -12, 0.5, 3, 10.5, -9, -50])
UP = np.array([50.0, -50, 50, -50, 2, 50, 50, -50, -9, 10.5, 9, 0.5])


def silu(g: np.ndarray) -> np.ndarray:
    return g / (1 + np.exp(-g))


def expected_h(g: np.ndarray, u: np.ndarray) -> np.ndarray:
    """gate clipped above only, up on both sides."""
    return silu(np.minimum(g, LIMIT)) * np.clip(u, -LIMIT, LIMIT)


def expected_slopes(g: np.ndarray, u: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """dh/dg and dh/du: zero behind a clamp."""
    sigmoid = 1 / (1 + np.exp(-g))
    slope = np.where(g < LIMIT, sigmoid * (1 + g * (1 - sigmoid)), 0)
    return slope * np.clip(u, -LIMIT, LIMIT), np.where(np.abs(u) < LIMIT, silu(np.minimum(g, LIMIT)), 0)


@pytest.mark.smoke
def test_swiglu_clamps_value_and_gradient_at_50() -> None:
    g, u = jnp.asarray(GATE, F32), jnp.asarray(UP, F32)
    np.testing.assert_allclose(swiglu(g, u, None, LIMIT, NUMERICS), expected_h(GATE, UP), rtol=1e-5)
    grads = jax.grad(lambda g, u: jnp.sum(swiglu(g, u, None, LIMIT, NUMERICS)), argnums=(0, 1))(g, u)
    for found, expected in zip(grads, expected_slopes(GATE, UP), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-18)
    assert float(grads[0][0]) == float(grads[1][0]) == 0.0
    # -50 is not clamped: silu(-50) vanishes, silu(-10) would not.
    assert abs(float(swiglu(g, u, None, LIMIT, NUMERICS)[2])) < 1e-15


@pytest.mark.parametrize("tokens", [1, 9], ids=["few tokens", "sorted"])
@pytest.mark.parametrize("part", ["routed", "shared"])
def test_moe_clamps_routed_and_shared_experts_in_value_and_gradient(part: str, tokens: int) -> None:
    """Every expert computes g = GATE x_0 and u = UP x_0; the router is flat, so it adds nothing to the gradient."""
    m = model()
    graphdef, state = nnx.split(take_layer(m.layers.ffn, 0))
    module: MoE = nnx.merge(graphdef, jax.tree.map(jnp.zeros_like, state))
    width = len(GATE)
    w1, w3 = (jnp.zeros((64, 64)).at[:width, 0].set(column) for column in (GATE, UP))
    w2 = jnp.eye(64)
    experts = module.experts if part == "routed" else module.shared_experts
    for name, value in (("w1", w1), ("w3", w3), ("w2", w2)):
        linear = getattr(experts, name) if part == "routed" else experts[name]
        linear.weight = type(linear.weight)(jnp.broadcast_to(value, linear.weight.shape))

    def y_of(scale: jax.Array) -> jax.Array:
        x = jnp.zeros((1, tokens, 64)).at[:, :, 0].set(scale)
        return module(x, 0, None, m.config, NUMERICS)[0][0, tokens - 1, :width]

    weight = 1.5 if part == "routed" else 1.0  # two equal experts share the routed weight of 1.5

    # One compilation for both.
    @jax.jit
    def both(scale: jax.Array) -> tuple[jax.Array, jax.Array]:
        return y_of(scale), jax.jacrev(y_of)(scale)

    value, slope = both(jnp.float32(1.0))
    by_g, by_u = expected_slopes(GATE, UP)
    np.testing.assert_allclose(value, weight * expected_h(GATE, UP), rtol=1e-5)
    np.testing.assert_allclose(slope, weight * (by_g * GATE + by_u * UP), rtol=1e-4, atol=1e-17)
    assert float(slope[0]) == 0.0
