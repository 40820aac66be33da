"""Gradients of experts that run a block of rows at a time, against experts that all see every token."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from csa2_jax.expert_blocks import BlockRows, Leaves, expert_blocks, sort_by_expert

LAYERS, EXPERTS, WIDTH, TOPK = 3, 5, 4, 2


def expert(leaves: Leaves, x: jax.Array, weight: jax.Array) -> jax.Array:
    w, codes, b = leaves
    return jnp.tanh(x @ w * codes.astype(jnp.float32)) * weight[:, None] + b


def dense(leaves: Leaves, layer: int, x: jax.Array, weight: jax.Array, index: jax.Array) -> jax.Array:
    w, codes, b = (a[layer] for a in leaves)
    all_experts = jnp.tanh(jnp.einsum("nd,xde->nxe", x, w) * codes.astype(jnp.float32)[:, 0])
    chosen = jnp.take_along_axis(all_experts, index[..., None], axis=1)
    return chosen * weight[..., None] + b[index]


@pytest.mark.parametrize("tokens", [1, 13])
@pytest.mark.parametrize("size", [4, 8])
def test_gradients_are_those_of_experts_that_see_every_token(size: int, tokens: int) -> None:
    """Expert 3 gets no token, expert 1 more than a block holds; codes of one byte get no gradient."""
    rng = np.random.default_rng(tokens)
    leaves = [
        jnp.asarray(rng.standard_normal((LAYERS, EXPERTS, WIDTH, WIDTH)), jnp.float32),
        jnp.asarray(rng.integers(1, 3, (LAYERS, EXPERTS, 1, WIDTH)), jnp.uint8),
        jnp.asarray(rng.standard_normal((LAYERS, EXPERTS, WIDTH)), jnp.float32),
    ]
    x = jnp.asarray(rng.standard_normal((tokens, WIDTH)), jnp.float32)
    weight = jnp.asarray(rng.random((tokens, TOPK)), jnp.float32)
    other = rng.choice([0, 2, 4], tokens)
    index = jnp.asarray(np.sort(np.stack([np.ones(tokens, int), other], axis=1), axis=1), jnp.int32)
    wanted = jnp.asarray(rng.standard_normal((tokens, TOPK, WIDTH)), jnp.float32)

    def blocks(w: jax.Array, b: jax.Array, x: jax.Array, weight: jax.Array, layer: jax.Array) -> jax.Array:
        rows = sort_by_expert(index.reshape(-1), EXPERTS, size)
        assert isinstance(rows, BlockRows)
        return jnp.sum(wanted * expert_blocks(expert, [w, leaves[1], b], layer, EXPERTS, x, weight, rows))

    def all_of_them(w: jax.Array, b: jax.Array, x: jax.Array, weight: jax.Array) -> jax.Array:
        return jnp.sum(wanted * dense([w, leaves[1], b], 1, x, weight, index))

    trained = (leaves[0], leaves[2], x, weight)
    value, found = jax.jit(jax.value_and_grad(blocks, argnums=(0, 1, 2, 3)))(*trained, jnp.int32(1))
    expected_value, expected = jax.jit(jax.value_and_grad(all_of_them, argnums=(0, 1, 2, 3)))(*trained)
    assert float(value) == pytest.approx(float(expected_value), rel=1e-5)
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
    assert not np.asarray(found[0])[[0, 2]].any()
    assert not np.asarray(found[0])[1, 3].any()
    assert np.asarray(found[0])[1, 1].all()
