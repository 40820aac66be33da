"""Hyper-connections: the mixing matrix after few iterations, the staggered collapse, and derivatives by hand."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from csa2_jax.block import Block
from csa2_jax.config import ModelConfig
from csa2_jax.layers import ParamFactory
from csa2_jax.numerics import Numerics
from csa2_jax.residual import HyperConnection, collapse, expand, sinkhorn, update
from tests import random_checkpoint as rc
from tests.oracle import OracleModel

F32 = jnp.dtype("float32")
NUMERICS = Numerics("float32", fake_quant=False)


def sinkhorn_reference(logits: np.ndarray, iterations: int, eps: float) -> np.ndarray:
    """One matrix [j, k] in float64: softmax over k, + eps; columns (over j) first, then rows and columns."""
    comb = np.exp(logits.astype(np.float64) - logits.max(axis=1, keepdims=True))
    comb = comb / comb.sum(axis=1, keepdims=True) + eps
    comb = comb / (comb.sum(axis=0, keepdims=True) + eps)
    for _ in range(iterations - 1):
        comb = comb / (comb.sum(axis=1, keepdims=True) + eps)
        comb = comb / (comb.sum(axis=0, keepdims=True) + eps)
    return comb


def random_logits(seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((2, 3, 4, 4)).astype(np.float32) * 3


@pytest.mark.smoke
@pytest.mark.parametrize("iterations", [1, 2, 3, 20])
def test_sinkhorn_equals_loops_and_knows_rows_from_columns(iterations: int) -> None:
    """After few iterations the sums over the two axes differ, so a transposed matrix cannot pass."""
    logits = random_logits()
    found = np.asarray(sinkhorn(jnp.asarray(logits), iterations, 1e-6))
    expected = np.stack([sinkhorn_reference(m, iterations, 1e-6) for m in logits.reshape(-1, 4, 4)]).reshape(
        logits.shape
    )
    np.testing.assert_allclose(found, expected, rtol=2e-5)
    np.testing.assert_allclose(found.sum(axis=-2), 1, atol=1e-4)  # columns were divided last, up to eps
    if iterations <= 3:
        turned = sinkhorn(jnp.asarray(np.swapaxes(logits, -1, -2)), iterations, 1e-6)
        assert np.abs(np.swapaxes(np.asarray(turned), -1, -2) - expected).max() > 1e-2
        assert np.abs(found.sum(axis=-1) - 1).max() > 1e-2


def test_sinkhorn_iterations_and_eps_count() -> None:
    logits = jnp.asarray(random_logits())
    assert np.abs(np.asarray(sinkhorn(logits, 2, 1e-6) - sinkhorn(logits, 3, 1e-6))).max() > 1e-3
    found = np.asarray(sinkhorn(logits, 2, 0.1))
    expected = [sinkhorn_reference(m, 2, 0.1) for m in np.asarray(logits).reshape(-1, 4, 4)]
    np.testing.assert_allclose(found.reshape(-1, 4, 4), expected, rtol=2e-5)


def test_sinkhorn_gradient_is_that_of_the_loops() -> None:
    logits = random_logits(1)[:1, :1]
    weight = np.random.default_rng(2).standard_normal((4, 4))
    grad = jax.jit(jax.grad(lambda x: jnp.sum(sinkhorn(x, 4, 1e-6) * weight)))(jnp.asarray(logits))[0, 0]
    step, numeric = 1e-5, np.zeros((4, 4))
    for i in np.ndindex(4, 4):
        moved = [logits[0, 0].astype(np.float64) + sign * step * (np.indices((4, 4)) == np.reshape(i, (2, 1, 1))).all(0)
                 for sign in (1, -1)]  # fmt: skip
        up, down = (np.sum(sinkhorn_reference(m, 4, 1e-6) * weight) for m in moved)
        numeric[i] = (up - down) / (2 * step)
    np.testing.assert_allclose(grad, numeric, rtol=1e-3, atol=1e-5)
    assert np.abs(numeric).max() > 1e-2


def test_sinkhorn_of_extreme_logits_stays_finite_with_its_gradient() -> None:
    logits = jnp.asarray(np.where(np.eye(4, dtype=bool), 60.0, -60.0)[None, None], jnp.float32)
    value, grad = jax.value_and_grad(lambda x: jnp.sum(sinkhorn(x, 20, 1e-6)[..., 0]))(logits)
    assert np.isfinite(float(value))
    assert np.isfinite(grad).all()
    np.testing.assert_allclose(sinkhorn(logits, 20, 1e-6)[0, 0], np.eye(4), atol=1e-4)


@functools.cache
def checkpoint() -> tuple[ModelConfig, OracleModel, dict[str, np.ndarray]]:
    config = rc.random_config(
        1, quantisable=True, swa_layers=1, encoder_ratios=(2,), hc_mult=4, hc_sinkhorn_iters=2, hidden_size=32
    )
    tensors = rc.random_tensors(config, 2)
    return ModelConfig.from_hf(config), OracleModel(config, tensors), tensors


def mixes(kind: str, x: Any) -> Any:
    """(pre, post, comb) of one sub-layer of the checkpoint."""
    return jax.jit(lambda x: loaded(kind)(x, checkpoint()[0]))(jnp.asarray(x, jnp.float32))


def loaded(kind: str) -> HyperConnection:
    config, _, tensors = checkpoint()
    module = HyperConnection(config, ParamFactory(F32, False))
    for leaf in ("fn", "base", "scale"):
        setattr(module, leaf, nnx.Param(jnp.asarray(tensors[f"layers.0.hc_{kind}_{leaf}"])))
    return module


@pytest.mark.parametrize("kind", ["attn", "ffn"])
def test_mixes_equal_the_oracle(kind: str) -> None:
    """pre, post and comb of one sub-layer, after two Sinkhorn iterations; the statistic spans all copies."""
    oracle = checkpoint()[1]
    x = np.random.default_rng(3).standard_normal((1, 7, 4, 32)).astype(np.float32) * np.array([1, 3, 0.2, 5])[:, None]
    found = mixes(kind, x)
    for mine, expected in zip(found, oracle.hyper(f"layers.0.hc_{kind}", x[0].astype(np.float64)), strict=True):
        np.testing.assert_allclose(mine[0], expected, rtol=1e-5, atol=2e-6)


def test_mixes_survive_streams_that_are_tiny_or_huge() -> None:
    """eps is 1e-20: streams of 1e-8 are still normalised, and f32 does not overflow at 1e15."""
    x = np.random.default_rng(3).standard_normal((1, 2, 4, 32)).astype(np.float32)
    plain, tiny, huge = (mixes("attn", x * f) for f in (1.0, 1e-8, 1e15))
    for a, b, c in zip(plain, tiny, huge, strict=True):
        np.testing.assert_allclose(b, a, rtol=1e-3)
        np.testing.assert_allclose(c, a, rtol=1e-4)


def test_update_carries_streams_by_the_first_axis_of_comb() -> None:
    """X_k' = post_k y + sum_j comb[j, k] X_j, by hand with two streams."""
    x = jnp.array([[[[1.0], [10.0]]]])
    y, post = jnp.array([[[100.0]]]), jnp.array([[[1.0, 2.0]]])
    comb = jnp.array([[[[0.5, 3.0], [0.25, 7.0]]]])
    np.testing.assert_allclose(update(x, y, post, comb, NUMERICS)[0, 0, :, 0], [103.0, 273.0])


def test_update_derivatives_are_comb_and_post() -> None:
    rng = np.random.default_rng(4)
    x, y = jnp.asarray(rng.standard_normal((1, 1, 4, 3))), jnp.asarray(rng.standard_normal((1, 1, 3)))
    post, comb = jnp.asarray(rng.random((1, 1, 4))), jnp.asarray(rng.random((1, 1, 4, 4)))
    by_x, by_y = jax.jit(jax.jacobian(lambda x, y: update(x, y, post, comb, NUMERICS), argnums=(0, 1)))(x, y)
    eye = np.eye(3)
    np.testing.assert_allclose(by_x[0, 0, :, :, 0, 0], np.einsum("jk,de->kdje", comb[0, 0], eye), rtol=1e-6)
    np.testing.assert_allclose(by_y[0, 0, :, :, 0, 0], np.einsum("k,de->kde", post[0, 0], eye), rtol=1e-6)


def test_expand_makes_equal_copies_and_reads_the_first() -> None:
    x = jnp.asarray(np.random.default_rng(5).standard_normal((2, 3, 8)), jnp.float32)
    streams, pre = expand(x, 4)
    assert streams.shape == (2, 3, 4, 8)
    np.testing.assert_array_equal(collapse(streams, pre, NUMERICS), x)
    np.testing.assert_array_equal(streams, np.broadcast_to(np.asarray(x)[:, :, None], streams.shape))
    np.testing.assert_array_equal(pre, np.broadcast_to(np.float32([1, 0, 0, 0]), (2, 3, 4)))


def run_part(which: str, pre: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array, Any]:
    """One hyper-connection around a spy that doubles; returns streams, pre for the next, and what the inside read."""
    config, _, _ = checkpoint()
    block = Block(config, ParamFactory(F32, False), stack=())
    block.hc_attn, block.hc_ffn = loaded("attn"), loaded("ffn")
    around = block.around_attention if which == "attn" else block.around_feed_forward
    return jax.jit(lambda x, pre: around(x, pre, lambda h: (2 * h, h), config, NUMERICS))(x, pre)


@pytest.mark.parametrize("which", ["attn", "ffn"])
def test_sublayer_reads_with_the_pre_of_the_one_before_and_hands_its_own_on(which: str) -> None:
    """Only `pre` is deferred: the collapse uses the one handed in, post and comb are the sub-layer's own."""
    rng = np.random.default_rng(6)
    x = jnp.asarray(rng.standard_normal((1, 5, 4, 32)), jnp.float32)
    handed = jnp.asarray(rng.random((1, 5, 4)), jnp.float32)
    streams, handed_on, read = run_part(which, handed, x)
    pre, post, comb = mixes(which, x)
    np.testing.assert_allclose(handed_on, pre, rtol=1e-6)
    mixed = np.asarray(collapse(x, handed, NUMERICS), np.float64)
    norm = mixed / np.sqrt(np.mean(mixed**2, axis=-1, keepdims=True))
    np.testing.assert_allclose(read, norm, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(streams, update(x, 2 * read, post, comb, NUMERICS), rtol=1e-5, atol=1e-5)
    own = np.asarray(collapse(x, pre, NUMERICS))
    assert np.abs(own / np.sqrt(np.mean(own**2, axis=-1, keepdims=True)) - norm).max() > 0.1
