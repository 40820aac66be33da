"""Rotary positions: interleaved pairs on the last R channels, two thetas, YaRN for the layers that read a pool.

    freq_j = theta**(-2j/R);  (x_2j, x_2j+1) -> (x_2j cos a - x_2j+1 sin a, x_2j sin a + x_2j+1 cos a),  a = position * freq_j

YaRN divides the slow frequencies by `factor` and blends in between, by the pair's number of turns over the original length.
There is no attention-temperature factor. Source: arXiv 2309.00071 (YaRN), arXiv 2609.19969.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np

from csa2_jax.config import ModelConfig, RopeScaling
from csa2_jax.formats import round_to

Table = tuple[jax.Array, jax.Array]  # cos and sin, f32 [..., R/2]


def inverse_frequencies(width: int, theta: float, scaling: RopeScaling | None = None) -> np.ndarray:
    """f32 [R/2] frequencies in radians per position; `scaling` applies YaRN unless its original length is 0."""
    freqs = np.float32(1.0) / np.power(np.float32(theta), np.arange(0, width, 2, dtype=np.float32) / np.float32(width))
    freqs = freqs.astype(np.float32)
    if scaling is None or scaling.original_max_position_embeddings == 0:
        return freqs

    def pair_with_turns(turns: float) -> float:
        """The (fractional) pair index whose wave makes `turns` turns over the original context."""
        length = scaling.original_max_position_embeddings
        return width * math.log(length / (2 * math.pi * turns)) / (2 * math.log(theta))

    low = max(math.floor(pair_with_turns(scaling.beta_fast)), 0)
    high = min(math.ceil(pair_with_turns(scaling.beta_slow)), width - 1)
    pairs = np.arange(width // 2, dtype=np.float32)
    ramp = np.clip((pairs - np.float32(low)) / np.float32(max(high - low, 1e-3)), 0, 1).astype(np.float32)
    return (freqs / np.float32(scaling.factor) * ramp + freqs * (1 - ramp)).astype(np.float32)


def layer_frequencies(config: ModelConfig, reads_pool: bool) -> np.ndarray:
    """Frequencies of a layer: `compress_rope_theta` with YaRN if it reads a pool, else `rope_theta` (draft stages too)."""
    if reads_pool:
        return inverse_frequencies(config.qk_rope_head_dim, config.compress_rope_theta, config.rope_scaling)
    return inverse_frequencies(config.qk_rope_head_dim, config.rope_theta)


def table(positions: jax.Array, frequencies: np.ndarray) -> Table:
    """cos and sin [..., R/2] of positions [...] (f32 angle = f32 position * f32 frequency)."""
    angle = positions.astype(jnp.float32)[..., None] * jnp.asarray(frequencies)
    return jnp.cos(angle), jnp.sin(angle)


def rotate(x: jax.Array, rotation: Table, *, inverse: bool = False) -> jax.Array:
    """Rotate the last R channels of x [..., H] by cos, sin [..., R/2] (broadcast over heads); f32 inside, cast back."""
    cos, sin = rotation
    width = 2 * cos.shape[-1]
    if inverse:
        sin = -sin
    tail = x[..., -width:].astype(jnp.float32).reshape(*x.shape[:-1], width // 2, 2)
    even, odd = tail[..., 0], tail[..., 1]
    turned = jnp.stack([even * cos - odd * sin, even * sin + odd * cos], axis=-1).reshape(*x.shape[:-1], width)
    return jnp.concatenate([x[..., :-width], round_to(turned, x.dtype)], axis=-1)


def over_heads(rotation: Table) -> Table:
    """The table with a head axis before the channels: [..., 1, R/2]."""
    cos, sin = rotation
    return cos[..., None, :], sin[..., None, :]
