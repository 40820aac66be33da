"""Exact compression in plain JAX: the reference, the CPU path and the fallback."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from kernels_pallas.compress import rows, steps
from kernels_pallas.compress.steps import Finish, Tail


def run(
    c_BTW: jax.Array,
    z_BTW: jax.Array | None,
    c_half_BMW: jax.Array | None,
    z_half_BMW: jax.Array | None,
    phase_B: jax.Array,
    count_B: jax.Array,
    bias_MW: jax.Array | None,
    tail: Tail | None,
    *,
    ratio: int,
    overlap: bool,
    finish: Finish | None,
    interpret: Any = False,
) -> tuple[Any, jax.Array | None, jax.Array | None]:
    """(pooled entries, or with `finish` a latent and a stored entry; c_half; z_half). See the doors."""
    del interpret
    if ratio == 1 and not overlap:
        pooled_BEH = c_BTW
    else:
        assert z_BTW is not None
        assert c_half_BMW is not None
        assert z_half_BMW is not None
        lead = rows.lead_rows(ratio, overlap)
        length = lead + -(-c_BTW.shape[1] // ratio) * ratio
        layout = {"ratio": ratio, "lead": lead}
        pooled_BEH = _pool(
            rows.sequence(c_half_BMW, c_BTW, None, phase_B, length=length, **layout),
            rows.sequence(z_half_BMW, z_BTW, bias_MW, phase_B, length=length, **layout),
            ratio,
            overlap,
        )
        c_half_BMW = rows.carry(c_half_BMW, c_BTW, None, phase_B, count_B, **layout)
        z_half_BMW = rows.carry(z_half_BMW, z_BTW, bias_MW, phase_B, count_B, **layout)
    if finish is None:
        return pooled_BEH, c_half_BMW, z_half_BMW
    assert tail is not None
    return steps.finish(pooled_BEH, tail, finish), c_half_BMW, z_half_BMW


def _pool(c_BUW: jax.Array, z_BUW: jax.Array, ratio: int, overlap: bool) -> jax.Array:
    def groups(rows_BUW: jax.Array) -> jax.Array:
        batch, length, width = rows_BUW.shape
        groups_BEMW = rows_BUW.reshape(batch, length // ratio, ratio, width)
        if not overlap:
            return groups_BEMW
        previous, this = groups_BEMW[:, :-1, :, : width // 2], groups_BEMW[:, 1:, :, width // 2 :]
        return jnp.concatenate([previous, this], axis=2)

    return jnp.sum(jax.nn.softmax(groups(z_BUW), axis=2) * groups(c_BUW), axis=2)
