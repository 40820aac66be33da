"""Compression: every m consecutive tokens become one pool entry.

    entry_j = sum_{r<m} softmax_r(Z[j*m + r]) * C[j*m + r]          per channel, groups do not overlap

A call brings T new rows of C and Z per sequence; `phase_B` of its group's rows already wait in the half-filled group.
Only the first `count_B` of the T rows are real. Source: arXiv 2609.19969 (CSA2 compressor).
"""

from __future__ import annotations

from typing import Any

from jaxtyping import Array, Float, Int

from kernels_pallas import dispatch
from kernels_pallas.compress import xla

CHOICES = {"xla": xla}


def compress(
    c_BTH: Float[Array, "B T H"],
    z_BTH: Float[Array, "B T H"],
    c_half_BMH: Float[Array, "B M-1 H"],
    z_half_BMH: Float[Array, "B M-1 H"],
    phase_B: Int[Array, " B"],
    count_B: Int[Array, " B"],
    *,
    ratio: int,
    implementation: str | None = None,
    interpret: Any = False,
) -> tuple[Float[Array, "B E H"], Float[Array, "B M-1 H"], Float[Array, "B M-1 H"]]:
    """Pool the groups that complete in this call.

    Args:
        c_BTH, z_BTH: values and pooling logits of the new tokens, f32.
        c_half_BMH, z_half_BMH: the waiting rows [B, ratio - 1, H] f32; only the first `phase_B` of each mean anything.
        phase_B: how many rows wait, int32 in [0, ratio).
        count_B: how many of the T rows are real, int32 in [0, T].
        ratio: m >= 1, tokens per entry.

    Returns:
        entries_BEH f32 with E = (T + ratio - 1) // ratio, of which the first (phase + count) // ratio of each row are complete
        and the rest unspecified; and the new c_half_BMH, z_half_BMH.
    """
    if ratio < 1:
        raise ValueError(f"{ratio=} must be at least 1")
    if c_BTH.ndim != 3 or z_BTH.shape != c_BTH.shape:
        raise ValueError(f"{c_BTH.shape=} and {z_BTH.shape=} must both be [B, T, H]")
    if phase_B.shape != c_BTH.shape[:1] or count_B.shape != c_BTH.shape[:1]:
        raise ValueError(f"{phase_B.shape=} and {count_B.shape=} must be [B] to match {c_BTH.shape=}")
    half = (c_BTH.shape[0], ratio - 1, c_BTH.shape[2])
    if c_half_BMH.shape != half or z_half_BMH.shape != half:
        raise ValueError(f"{c_half_BMH.shape=} and {z_half_BMH.shape=} must be [B, ratio - 1, H] = {list(half)}")
    arrays = (c_BTH, z_BTH, c_half_BMH, z_half_BMH, phase_B, count_B)
    module = dispatch.choose("compress", implementation, interpret, CHOICES, *arrays, ratio=ratio)
    return module.run(*arrays, ratio=ratio, interpret=interpret)
