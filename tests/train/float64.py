"""The same model in float64: what the code calls float32 is float64 while the context is open.

Finite differences of a float32 function say little; of the very same code in float64 they are good to eight digits. All
modules name their accumulation dtype as `jnp.float32` when they are called, so that this name and the few places that froze it
at import are all that has to change.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import pytest

from csa2_jax.numerics import Numerics


@contextlib.contextmanager
def in_float64() -> Iterator[None]:
    """Trace inside, with float64 arrays; what was traced may be called outside only under `jax.enable_x64`."""
    real = jnp.float64
    with pytest.MonkeyPatch.context() as patch, jax.enable_x64(True):
        patch.setattr(jnp, "float32", real)
        patch.setattr(Numerics, "dtype", property(lambda self: jnp.dtype(real)))
        patch.setattr("csa2_jax.state._NUMBERS", {"f32": real, "bf16": jnp.bfloat16})
        compress = sys.modules["kernels_pallas.compress"]  # the attribute of that name is the function
        patch.setattr(compress, "_FLOATS", (real, jnp.bfloat16))
        yield
