"""The gradient of compression: an implementation's forward, paired with XLA's backward.

Only the inputs are kept; the backward pools again. Rounding is passed straight through: the entry's cotangent is that of the
un-rounded entry, and packed bytes have none. Rotation tables take no gradient. Rows that are not real may hold NaN, and results
that are unspecified may bring a NaN back as their cotangent: the first become 0 before the backward starts, the second as well.
"""

from __future__ import annotations

import dataclasses
import functools
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp

from kernels_pallas.compress import rows, xla
from kernels_pallas.compress.steps import Finish, Tail


@dataclasses.dataclass(frozen=True)
class Call:
    """What is static in a call."""

    module: ModuleType
    interpret: Any
    ratio: int
    overlap: bool
    finish: Finish | None


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def compress(
    call: Call,
    c_BTW: jax.Array,
    z_BTW: jax.Array | None,
    c_half_BMW: jax.Array | None,
    z_half_BMW: jax.Array | None,
    phase_B: jax.Array,
    count_B: jax.Array,
    bias_MW: jax.Array | None,
    tail: Tail | None,
) -> Any:
    """What `xla.run` returns, by the chosen implementation."""
    arrays = (c_BTW, z_BTW, c_half_BMW, z_half_BMW, phase_B, count_B, bias_MW, tail)
    static = {"ratio": call.ratio, "overlap": call.overlap, "finish": call.finish}
    return call.module.run(*arrays, interpret=call.interpret, **static)


def _forward(call: Call, *arrays: Any) -> tuple[Any, Any]:
    return compress(call, *arrays), arrays


def _backward(call: Call, arrays: Any, cotangents: Any) -> tuple[Any, ...]:
    c_BTW, z_BTW, c_half_BMW, z_half_BMW, phase_B, count_B, bias_MW, tail = arrays
    lead = rows.lead_rows(call.ratio, call.overlap)
    total_B = phase_B + count_B
    c_BTW, z_BTW = _keep((c_BTW, z_BTW), count_B)
    c_half_BMW, z_half_BMW = _keep((c_half_BMW, z_half_BMW), lead + phase_B)
    results, *halves = cotangents
    finish = call.finish
    if finish is not None:
        latent_BEH, entry = results
        if finish.storage == "packed":
            finish = dataclasses.replace(finish, entry_dtype=finish.dtype)
            entry = jnp.zeros_like(latent_BEH)
        finish = dataclasses.replace(finish, storage="plain")
        results = (latent_BEH, entry)
    cotangents = (_keep(results, total_B // call.ratio), *_keep(halves, lead + total_B % call.ratio))
    norm_H = None if tail is None else tail[0]

    def again(c: Any, z: Any, c_half: Any, z_half: Any, bias: Any, norm: Any) -> Any:
        rest = (phase_B, count_B, bias, None if tail is None else (norm, *tail[1:]))
        return xla.run(c, z, c_half, z_half, *rest, ratio=call.ratio, overlap=call.overlap, finish=finish)

    _, pull = jax.vjp(again, c_BTW, z_BTW, c_half_BMW, z_half_BMW, bias_MW, norm_H)
    *drows, dbias_MW, dnorm_H = pull(cotangents)
    return (*drows, None, None, dbias_MW, None if tail is None else (dnorm_H, None, None))


def _keep(arrays: Any, count_B: jax.Array) -> Any:
    """Arrays [B, X, ...] with 0 from index `count_B` of each row on."""

    def keep(a: jax.Array) -> jax.Array:
        return jnp.where((jnp.arange(a.shape[1]) < count_B[:, None])[:, :, None], a, jnp.zeros_like(a))

    return jax.tree.map(keep, arrays)


compress.defvjp(_forward, _backward)
