"""What every door asks of its arguments: kinds, sizes and places, each refusal naming the argument and its value."""

from __future__ import annotations

import operator
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer

from kernels_pallas.dispatch import Unsupported
from kernels_pallas.storage import Entries, Packed


def array(name: str, value: Any) -> jax.Array:
    """`value` (array, list or number) as an array; ValueError for what is none."""
    if isinstance(value, jax.Array):
        return value
    try:
        return jnp.asarray(value)
    except TypeError as error:
        raise ValueError(f"{name} must be an array, found {type(value).__name__}: {error}") from None


def floats(name: str, value: Any, *dtypes: Any) -> jax.Array:
    """An array of one of the dtypes, by default f32 or bf16."""
    value = array(name, value)
    dtypes = dtypes or (jnp.float32, jnp.bfloat16)
    if value.dtype not in dtypes:
        raise ValueError(f"{name}.dtype={value.dtype} must be {' or '.join(jnp.dtype(d).name for d in dtypes)}")
    return value


def integers(name: str, value: Any) -> jax.Array:
    """An array of integers, as int32."""
    value = array(name, value)
    if not jnp.issubdtype(value.dtype, jnp.integer):
        raise ValueError(f"{name}.dtype={value.dtype} must be an integer type")
    return value.astype(jnp.int32)


def entries(name: str, value: Any) -> Entries:
    """Stored entries: f32 or bf16 numbers, or codes and scales that fit together."""
    if not isinstance(value, Packed):
        value = floats(name, value)
        if value.ndim not in (3, 4, 5):
            raise ValueError(f"{name}.shape={value.shape} must be [G, B, P, H] or [G, B, P, H / 128, 128]")
        return value
    value = jax.tree.map(jnp.asarray, value)
    shape = value.shape
    for part, a, size in (("codes", value.codes, value.code_bytes), ("scales", value.scales, value.scale_bytes)):
        if a.dtype != jnp.uint8:
            raise ValueError(f"{name}.{part}.dtype={a.dtype} must be uint8")
        if a.ndim != value.codes.ndim or a.shape[:2] != shape[:2] or a.size != shape[0] * shape[1] * shape[2] * size:
            raise ValueError(
                f"{name}.{part}.shape={a.shape} does not hold {size} bytes for each entry of shape {shape}, as "
                f"{name}.codes.shape={value.codes.shape} does"
            )
    return value


def group(value: Any, groups: int) -> jax.Array:
    """The index of a pool in its stack as an int32 scalar. What is known now must lie inside; a traced one is the caller's."""
    place = integers("group", value)
    if place.ndim:
        raise ValueError(f"group.shape={place.shape} must be a scalar")
    if not isinstance(place, Tracer) and not 0 <= int(place) < groups:
        raise ValueError(f"group={int(place)} must lie in [0, {groups}), the pools of the stack")
    return place


def whole(name: str, value: Any, least: int) -> int:
    """A static whole number of at least `least`."""
    try:
        number = least - 1 if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = least - 1
    if number < least:
        raise ValueError(f"{name}={value!r} must be a whole number and at least {least}")
    return number


def without_tail(*stored: Any) -> None:
    """Refuse packed entries with channels that are not coded, which no kernel reads yet."""
    for value in stored:
        if isinstance(value, Packed) and value.fmt.tail:
            raise Unsupported(
                f"entries packed as {value.fmt} are read by XLA alone: use 'xla', or hold them as numbers"
            )
