"""How a model computes: compute dtype, roundings on or off, and matrix products that keep their precision everywhere."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from csa2_jax import formats

ComputeDtype = Literal["float32", "bfloat16"]
Implementation = Literal["xla", "pallas_tpu", "pallas_gpu"]
WeightStorage = Literal["stored", "float32", "bfloat16"]


@dataclasses.dataclass(frozen=True)
class Numerics:
    """Static choices of a forward.

    compute_dtype: what activations are cast to after every linear, norm and update.
    fake_quant: apply the roundings to fp8 and fp4 that the released model was trained with (window KV, pool KV, index query
        and key, operands of quantised linears).
    implementation: of the three operations of `kernels_pallas`: "xla", "pallas_tpu", "pallas_gpu", or None for the best that
        is proven on the device. A named one works or raises.
    interpret: run the named Pallas implementation on a CPU, slowly; for tests.
    """

    compute_dtype: ComputeDtype = "bfloat16"
    fake_quant: bool = True
    implementation: Implementation | None = None
    interpret: bool = False

    def __post_init__(self) -> None:
        if self.compute_dtype not in ("float32", "bfloat16"):
            raise ValueError(f"compute_dtype={self.compute_dtype!r} must be 'float32' or 'bfloat16'")
        if self.implementation not in (None, *get_args(Implementation)):
            raise ValueError(
                f"implementation={self.implementation!r} must be one of {get_args(Implementation)} or None"
            )
        if self.interpret and self.implementation in (None, "xla"):
            raise ValueError(
                f"interpret=True needs a Pallas implementation, found implementation={self.implementation!r}"
            )

    @property
    def kernels(self) -> dict[str, Any]:
        """Keywords for the doors of `kernels_pallas`."""
        return {"implementation": self.implementation, "interpret": self.interpret}

    @property
    def dtype(self) -> jnp.dtype:
        """The compute dtype as a dtype."""
        return jnp.dtype(self.compute_dtype)

    def cast(self, x: jax.Array) -> jax.Array:
        """Round f32 `x` to the compute dtype."""
        return formats.round_to(x, self.dtype)

    def fake(self, x: jax.Array, fmt: formats.Format) -> jax.Array:
        """`x` through the rounding `fmt` when roundings are on."""
        return formats.fake_quantise(x, fmt) if self.fake_quant else x


def hadamard(x: jax.Array) -> jax.Array:
    """x [..., n] times the Hadamard matrix of n (a power of two) over sqrt(n): orthogonal, its own inverse; f32, cast back."""
    width = x.shape[-1]
    if width & (width - 1):
        raise ValueError(f"a Hadamard matrix needs a power of two of channels, found {width}")
    matrix = np.ones((1, 1), np.float32)
    while len(matrix) < width:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return formats.round_to(einsum("...j,jk->...k", x.astype(jnp.float32), jnp.asarray(matrix)) * width**-0.5, x.dtype)


def einsum(subscripts: str, *operands: jax.Array) -> jax.Array:
    """An einsum with f32 accumulation and result; f32 operands are multiplied in full f32 on every backend."""
    dtype = jnp.result_type(*operands)
    return jnp.einsum(
        subscripts,
        *(o.astype(dtype) for o in operands),
        precision=lax.Precision.HIGHEST if dtype == jnp.float32 else None,
        preferred_element_type=jnp.float32,
    )
