"""Number formats as the model uses them: roundings that gradients pass straight through.

The arithmetic itself is in `kernels_pallas.formats`.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from csa2_jax.config import ModelConfig
from kernels_pallas.formats import (
    INDEX,
    MAIN,
    OPERAND,
    WINDOW,
    Format,
    e2m1_codes,
    e2m1_values,
    e8m0_exponent,
    mixed,
    pack_e2m1,
    quantise,
    round_to,
    rounded,
    scale_exactly,
    times_power_of_two,
    unpack_e2m1,
)

__all__ = [
    "INDEX",
    "MAIN",
    "OPERAND",
    "WINDOW",
    "Format",
    "e2m1_codes",
    "e2m1_values",
    "e8m0_exponent",
    "fake_quantise",
    "operand",
    "pack_e2m1",
    "pool_format",
    "quantise",
    "round_to",
    "scale_exactly",
    "times_power_of_two",
    "unpack_e2m1",
    "window_format",
]


def window_format(config: ModelConfig) -> Format:
    """How window rows are rounded and packed."""
    group = config.generation.kv_group
    return mixed(group, config.qk_rope_head_dim) if group else WINDOW


def pool_format(config: ModelConfig) -> Format:
    """How pool entries are rounded and packed."""
    return window_format(config) if config.generation.kv_group else MAIN


def operand(group: int) -> Format:
    """How the operand of a quantised linear is rounded."""
    return dataclasses.replace(OPERAND, group=group)


def fake_quantise(x: jax.Array, fmt: Format) -> jax.Array:
    """x rounded to `fmt` and back, in x's shape and dtype; idempotent, and exact in bf16. Straight-through gradient."""
    if x.dtype != jnp.float32 and x.dtype != jnp.bfloat16:
        raise ValueError(f"{x.dtype=} must be float32 or bfloat16")
    return _straight_through(x, rounded(lax.stop_gradient(x), fmt).astype(x.dtype))


@jax.custom_vjp
def _straight_through(x: jax.Array, rounded: jax.Array) -> jax.Array:
    return rounded


_straight_through.defvjp(lambda x, rounded: (rounded, None), lambda _, g: (g, jnp.zeros_like(g)))
