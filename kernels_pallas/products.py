"""Matrix products as all implementations take them: f32 sums, and f32 operands multiplied in full f32 on every backend."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax


def dot(a: jax.Array, b: jax.Array, a_axis: int, b_axis: int) -> jax.Array:
    """Contract one axis of each matrix, f32 out; f32 operands are multiplied in full f32."""
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    dims = (((a_axis,), (b_axis,)), ((), ()))
    return lax.dot_general(a, b, dims, precision=precision, preferred_element_type=jnp.float32)


def einsum(subscripts: str, a: jax.Array, b: jax.Array) -> jax.Array:
    """An einsum of two operands in their common dtype, f32 out."""
    dtype = jnp.promote_types(a.dtype, b.dtype)
    precision = lax.Precision.HIGHEST if dtype == jnp.float32 else None
    return jnp.einsum(
        subscripts, a.astype(dtype), b.astype(dtype), precision=precision, preferred_element_type=jnp.float32
    )


def settled(x: jax.Array) -> jax.Array:
    """The same array, which a CPU's compiler may not take into the product or the pass behind it.

    It would else transpose inside a product, element by element (measured 21 ms against 43 for the scores of selected entries).
    """
    return lax.optimization_barrier(x) if jax.default_backend() == "cpu" else x
