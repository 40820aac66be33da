"""Single-pass manifold-constrained hyper-connections (mHC): S residual streams with learned, normalised mixing.

From the streams X that enter a sub-layer (flattened, f32):

    mixes = (X fn^T) * rsqrt(mean(X^2) + eps),   a = mixes * scale + base
    pre = sigmoid(a_pre) + hc_eps,   post = 2 sigmoid(a_post),   comb = Sinkhorn(softmax(a_comb))

The sub-layer reads sum_j pre_prev[j] X_j, where pre_prev was computed by the sub-layer before (only `pre` is deferred), and the
streams become X_k' = post[k] y + sum_j comb[j, k] X_j. In DeepSeek-V4 a sub-layer reads by its own pre, and the head by one more,
which `Collapse` computes in the same way. Source: arXiv 2609.19969 (single-pass mHC), arXiv 2512.24880 (mHC).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from csa2_jax.config import ModelConfig
from csa2_jax.layers import ParamFactory, inverse_rms
from csa2_jax.numerics import Numerics, einsum


class HyperConnection(nnx.Module):
    """The mixing parameters of one sub-layer: fn [(2+S)S, S*D], base [(2+S)S], scale [3], all f32."""

    def __init__(self, config: ModelConfig, make: ParamFactory, *, stack: tuple[int, ...] = ()) -> None:
        s, f32 = config.hc_mult, jnp.dtype(jnp.float32)
        self.fn = make.normal((*stack, (2 + s) * s, s * config.hidden_size), f32)
        self.base = make.full((*stack, (2 + s) * s), 0.0, f32)
        self.scale = make.full((*stack, 3), 1.0, f32)

    def __call__(self, x_BTSD: jax.Array, config: ModelConfig) -> tuple[jax.Array, jax.Array, jax.Array]:
        """(pre_BTS for the next sub-layer, post_BTS, comb [B, T, S, S]) from the streams, f32."""
        s = config.hc_mult
        flat = x_BTSD.astype(jnp.float32).reshape(*x_BTSD.shape[:-2], -1)
        mixes = einsum("btk,ok->bto", flat, self.fn[...]) * inverse_rms(flat, config.rms_norm_eps)
        scale = jnp.repeat(self.scale[...], jnp.array([s, s, s * s]), total_repeat_length=(2 + s) * s)
        a = mixes * scale + self.base[...]
        pre = jax.nn.sigmoid(a[..., :s]) + config.hc_eps
        post = 2.0 * jax.nn.sigmoid(a[..., s : 2 * s])
        comb = a[..., 2 * s :].reshape(*a.shape[:-1], s, s)
        return pre, post, sinkhorn(comb, config.hc_sinkhorn_iters, config.hc_eps)


class Collapse(nnx.Module):
    """How V4's head joins the streams: fn [S, S*D], base [S], scale [1], all f32."""

    def __init__(self, config: ModelConfig, make: ParamFactory) -> None:
        s, f32 = config.hc_mult, jnp.dtype(jnp.float32)
        self.fn = make.normal((s, s * config.hidden_size), f32)
        self.base = make.full((s,), 0.0, f32)
        self.scale = make.full((1,), 1.0, f32)

    def __call__(self, x_BTSD: jax.Array, config: ModelConfig) -> jax.Array:
        """pre_BTS = sigmoid(mixes * scale + base) + hc_eps, f32."""
        flat = x_BTSD.astype(jnp.float32).reshape(*x_BTSD.shape[:-2], -1)
        mixes = einsum("btk,ok->bto", flat, self.fn[...]) * inverse_rms(flat, config.rms_norm_eps)
        return jax.nn.sigmoid(mixes * self.scale[...] + self.base[...]) + config.hc_eps


def sinkhorn(logits: jax.Array, iterations: int, eps: float) -> jax.Array:
    """[..., j, k] logits to a near doubly stochastic matrix: softmax over k, + eps, then alternate division by sums + eps.

    Columns (sums over j) are divided first, then rows and columns `iterations` - 1 times.
    """
    shape = logits.shape
    # Tokens last: the little matrix then vectorises (measured 10 us against 2,560 us for 2,048 tokens on a CPU).
    comb = jnp.moveaxis(logits.reshape(-1, *shape[-2:]), 0, -1)
    comb = jax.nn.softmax(comb, axis=1) + eps

    def over_columns(m: jax.Array) -> jax.Array:
        return m / (jnp.sum(m, axis=0, keepdims=True) + eps)

    def both(_: int, m: jax.Array) -> jax.Array:
        return over_columns(m / (jnp.sum(m, axis=1, keepdims=True) + eps))

    comb = lax.fori_loop(0, iterations - 1, both, over_columns(comb))
    return jnp.moveaxis(comb, -1, 0).reshape(shape)


def collapse(x_BTSD: jax.Array, pre_BTS: jax.Array, numerics: Numerics) -> jax.Array:
    """sum_j pre[j] X_j, f32, cast: what a sub-layer (or the head) reads."""
    # Stream by stream: XLA's reduction over a middle axis takes a hundred times longer on CPUs.
    x = x_BTSD.astype(jnp.float32)
    return numerics.cast(sum(pre_BTS[..., j, None] * x[..., j, :] for j in range(x.shape[-2])))  # type: ignore[arg-type]


def update(x_BTSD: jax.Array, y_BTD: jax.Array, post_BTS: jax.Array, comb: jax.Array, numerics: Numerics) -> jax.Array:
    """X_k' = post[k] y + sum_j comb[j, k] X_j, f32, cast."""
    x = x_BTSD.astype(jnp.float32)
    carried = sum(comb[..., j, :, None] * x[..., j : j + 1, :] for j in range(x.shape[-2]))
    return numerics.cast(post_BTS[..., None] * y_BTD.astype(jnp.float32)[..., None, :] + carried)


def expand(x_BTD: jax.Array, streams: int) -> tuple[jax.Array, jax.Array]:
    """The start of the residual: `streams` equal copies, and a pre_mix that reads copy 0."""
    x_BTSD = jnp.repeat(x_BTD[..., None, :], streams, axis=-2)
    pre_BTS = jnp.zeros((*x_BTD.shape[:-1], streams), jnp.float32).at[..., 0].set(1.0)
    return x_BTSD, pre_BTS
