"""What follows the pooling, inside a TPU kernel, on a tile of entries: `steps.finish` in forms that Mosaic compiles.

RMSNorm; rotation by exchanging neighbouring lanes with two lane rotations; a group's maximum by four lane rotations inside 128
lanes, picked out of every sixteenth lane by a product with a 0/1 matrix, exact because each sum has one term; codes by
comparisons; two halves of the channels to a byte.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import tpu as pltpu

from kernels_pallas import formats
from kernels_pallas.compress import steps
from kernels_pallas.compress.steps import Finish
from kernels_pallas.compress.tpu_plan import Plan


def finish(
    plan: Plan, how: Finish, x: jax.Array, norm: jax.Array, turn: jax.Array, turned: int
) -> dict[str, jax.Array]:
    """Outputs by name, as numbers, from pooled entries f32 [n, H]; the order of `steps.finish`."""
    x = steps.cast_value(x, how.dtype)
    x = x * lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + jnp.float32(how.eps)) * norm
    latent = steps.cast_value(x, how.dtype)
    start = plan.width - turn.shape[1]
    last = _rotate(latent[:, start:], turn, turned)
    x = joined([latent[:, :start], steps.cast_value(last, how.dtype)]) if start else steps.cast_value(last, how.dtype)
    made = {"latent": latent}
    if how.storage == "plain":
        return made | {"entry": steps.cast_value(x, how.entry_dtype)}
    scale = steps.main_scale(_group_max(plan, x, how.dtype))
    code = steps.main_code(x, _over_groups(plan, scale))
    if how.storage == "rounded":
        return made | {"entry": formats.e2m1_values(code) * _over_groups(plan, scale)}  # exact in bf16
    half = plan.width // 2
    return made | {"codes": code[:, :half] | (code[:, half:] << 4), "scales": formats.e4m3_codes(scale)}


def _rotate(x: jax.Array, turn: jax.Array, turned: int) -> jax.Array:
    """x [n, X] with the pairs of its last `turned` lanes turned by (cos, sin) in `turn`."""
    lane = lax.broadcasted_iota(jnp.int32, x.shape, 1)
    even = lane % 2 == 0

    def partner(a: jax.Array) -> jax.Array:
        return jnp.where(even, pltpu.roll(a, a.shape[1] - 1, 1), pltpu.roll(a, 1, 1))

    other = partner(turn)
    cos, sin = jnp.where(even, turn, other), jnp.where(even, -other, turn)
    return jnp.where(lane >= x.shape[1] - turned, x * cos + partner(x) * sin, x)


def _group_max(plan: Plan, x: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Largest magnitude of each group of 16 channels, [n, H/16]."""
    slices = []
    for channel in range(0, plan.width, plan.lanes):
        top = jnp.abs(x[:, channel : channel + plan.lanes])
        for step in (1, 2, 4, 8):  # lane i comes to hold the maximum of lanes i .. i + 15
            top = jnp.maximum(top, pltpu.roll(top, plan.lanes - step, 1))
        slices.append(top)
    return _exact_dot(joined(slices), _picks(plan.width), dtype)


def _over_groups(plan: Plan, scale: jax.Array) -> jax.Array:
    """[n, H/16] -> [n, H]: an e4m3 number is exact in bf16."""
    channel = lax.broadcasted_iota(jnp.int32, (plan.width // formats.MAIN.group, plan.width), 1)
    group = lax.broadcasted_iota(jnp.int32, (plan.width // formats.MAIN.group, plan.width), 0)
    return _exact_dot(scale, jnp.where(channel // formats.MAIN.group == group, 1.0, 0.0), jnp.dtype(jnp.bfloat16))


def _picks(width: int) -> jax.Array:
    """0/1 matrix [H, H/16] that takes the first channel of each group."""
    channel = lax.broadcasted_iota(jnp.int32, (width, width // formats.MAIN.group), 0)
    group = lax.broadcasted_iota(jnp.int32, (width, width // formats.MAIN.group), 1)
    return jnp.where(channel == group * formats.MAIN.group, 1.0, 0.0)


def _exact_dot(a: jax.Array, ones: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """a @ ones where every sum has one term: exact in bf16 for bf16 numbers, and for f32 ones as three bf16 pieces (HIGHEST)."""
    precision = lax.Precision.HIGHEST if dtype == jnp.float32 else None
    product = functools.partial(lax.dot_general, dimension_numbers=(((1,), (0,)), ((), ())), precision=precision)
    return product(a.astype(dtype), ones.astype(dtype), preferred_element_type=jnp.float32)


def joined(slices: Sequence[jax.Array]) -> jax.Array:
    """Slices of channels side by side."""
    return slices[0] if len(slices) == 1 else jnp.concatenate(slices, axis=1)
