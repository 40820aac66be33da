"""The gradient of sparse attention: an implementation's forward, paired with its own backward or with XLA's.

A module's `run` gives (o, lse); its `backward` gives the cotangents of queries, window rows, sink and pool from what the forward
left. Modules without a `backward` use XLA's.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp

from kernels_pallas.sparse_attention import xla
from kernels_pallas.storage import Entries, Packed


@dataclasses.dataclass(frozen=True)
class Call:
    """What is static in a call."""

    module: ModuleType
    interpret: Any
    window: int
    scale: float
    causal: bool

    @property
    def options(self) -> dict[str, Any]:
        """Keywords of `run` and `backward`."""
        return {"window": self.window, "scale": self.scale, "causal": self.causal, "interpret": self.interpret}


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def attend(
    call: Call,
    q_BTNH: jax.Array,
    window_BSH: Entries,
    first_BT: jax.Array,
    sink_N: jax.Array,
    pool_GBPH: Entries | None,
    group: jax.Array,
    selection_BTK: jax.Array | None,
    span: xla.Span | None = None,
) -> tuple[jax.Array, jax.Array]:
    """(o_BTNH, lse_BTN); see the door."""
    arrays = (q_BTNH, window_BSH, first_BT, sink_N, pool_GBPH, group, selection_BTK)
    return call.module.run(*arrays, **call.options, **_whole(span))


def _whole(span: xla.Span | None) -> dict[str, Any]:
    """The keyword that only XLA's implementation takes."""
    return {} if span is None else {"span": span}


def _forward(call: Call, *arrays: Any) -> tuple[tuple[jax.Array, jax.Array], Any]:
    o_BTNH, lse_BTN = call.module.run(*arrays[:-1], **call.options, **_whole(arrays[-1]))
    return (o_BTNH, lse_BTN), (arrays, o_BTNH, lse_BTN)


def _backward(call: Call, saved: Any, cotangents: tuple[jax.Array, jax.Array]) -> tuple[Any, ...]:
    # Constants may come back from tracing as arrays of NumPy, which a traced place cannot index.
    arrays, o_BTNH, lse_BTN = jax.tree.map(jnp.asarray, saved)
    lse_BTN = jnp.where(lse_BTN == -jnp.inf, 0.0, lse_BTN)  # nothing to read and no sink: every weight is exp(-inf - 0)
    _, window_BSH, _, sink_N, pool_GBPH, _, _, span = arrays
    do_BTNH, dlse_BTN = cotangents
    # d loss / d s = p * (do . k - do . o + dlse): what does not depend on the entry, once per query and head.
    f32 = jnp.float32
    shift_BTN = dlse_BTN.astype(f32) - jnp.sum(do_BTNH.astype(f32) * o_BTNH.astype(f32), axis=-1)
    backward: Callable[..., Any] | None = getattr(call.module, "backward", None)
    if backward is None or isinstance(window_BSH, Packed) or isinstance(pool_GBPH, Packed):
        backward = xla.backward  # packed rows take no gradient, so that only queries and sink are asked for
        options = call.options | {"interpret": False}
    else:
        options = call.options
    dq, dwindow, dpool = backward(*arrays[:-1], do_BTNH, lse_BTN, shift_BTN, **options, **_whole(span))
    dsink_N = jnp.sum(jnp.exp(sink_N.astype(f32) - lse_BTN) * shift_BTN, axis=(0, 1)).astype(sink_N.dtype)
    return (
        dq,
        _none_if_packed(window_BSH, dwindow),
        None,
        dsink_N,
        _none_if_packed(pool_GBPH, dpool),
        None,
        None,
        None,
    )


def _none_if_packed(entries: Entries | None, cotangent: jax.Array | None) -> Any:
    if entries is None or isinstance(entries, Packed) or cotangent is None:
        return None
    return cotangent.reshape(entries.shape).astype(entries.dtype)


attend.defvjp(_forward, _backward)
