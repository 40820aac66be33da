"""Compression: every m consecutive tokens become one pool entry.

    entry_j = sum_{r<m} softmax_r(Z[j*m + r]) * C[j*m + r]                              per channel, groups do not overlap
    entry_j = the same over 2m slots with `overlap`:  Z[(j-1)*m + r, :H], C[(j-1)*m + r, :H]   of the previous group, and
              Z[j*m + r, H:], C[j*m + r, H:]   of this one; entry 0 has no previous group (C = 0, Z = -inf)

Z is taken with a learned bias by slot r where one is given. Pooling is f32. Ratio 2 and 1 are CSA2, 4 with overlap and bias is
CSA, 128 with bias is HCA.

The state between calls. A call brings T new rows of C and Z per sequence, of which the first `count_B` are real; `phase_B` rows
of the open group wait from earlier calls. Carried are `c_half` and `z_half`, f32 [B, M, W] with the rows

    M = m - 1    the open group, slot 0 first; `phase` of them mean something, the rest may hold anything
    M = 2m - 1   with overlap: the m rows of the last complete group, then the open group's m - 1. Before any group is complete
                 the first m are C = 0, Z = -inf, so that no flag is needed (`empty_half` makes this state)

W is H, with overlap 2H. A waiting row's logits already contain the bias.

`compress` gives the pooled entries, `compress_entries` goes on to the latent (cast, RMSNorm) and the entry as it is stored
(rotary position, fp4 rounding, packing). Both are differentiable. Sources: arXiv 2609.19969 (CSA2 compressor); the released
DeepSeek-V4 for slot bias and overlap.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kernels_pallas import checks, dispatch, formats
from kernels_pallas.compress import pallas_gpu, pallas_tpu, rows, vjp, xla
from kernels_pallas.compress.steps import Finish, Storage
from kernels_pallas.storage import Packed

CHOICES = {"xla": xla, "pallas_tpu": pallas_tpu, "pallas_gpu": pallas_gpu}
_FLOATS = (jnp.float32, jnp.bfloat16)


class Compressed(NamedTuple):
    """What `compress_entries` returns; of E entries the first (phase + count) // ratio of each row are complete."""

    latent_BEH: jax.Array  # before rotation and rounding, in the compute dtype
    entries_BEH: jax.Array | Packed  # as stored; Packed has the shape [1, B, E, H]
    c_half_BMW: jax.Array | None
    z_half_BMW: jax.Array | None


def compress(
    c_BTH: Float[Array, "B T W"],
    z_BTH: Float[Array, "B T W"] | None,
    c_half_BMH: Float[Array, "B M W"] | None,
    z_half_BMH: Float[Array, "B M W"] | None,
    phase_B: Int[Array, " B"],
    count_B: Int[Array, " B"],
    *,
    ratio: int,
    bias_MH: Float[Array, "ratio W"] | None = None,
    overlap: bool = False,
    implementation: str | None = None,
    interpret: Any = False,
) -> tuple[Float[Array, "B E H"], Float[Array, "B M W"] | None, Float[Array, "B M W"] | None]:
    """Pool the groups that complete in this call.

    Args:
        c_BTH, z_BTH: values and pooling logits of the new tokens, f32; W = 2H with overlap.
        c_half_BMH, z_half_BMH: the carried rows, f32; see above.
        phase_B: how many rows of the open group wait, int32 in [0, ratio).
        count_B: how many of the T rows are real, int32 in [0, T].
        ratio: m >= 1, tokens per entry. At m = 1 without overlap an entry is its row of C: C may have any dtype and is returned
            as it is, Z and the carried rows may be None and are returned unchanged.
        bias_MH: added to new rows of Z by slot, f32 [m, W].
        overlap: pool over the previous group as well.
        implementation, interpret: see `dispatch`; `interpret` runs a Pallas implementation on a CPU.

    Returns:
        entries_BEH f32 with E = (T + ratio - 1) // ratio, of which the first (phase + count) // ratio of each row are complete
        and the rest unspecified; and the new carried rows.

    Raises ValueError for arguments that contradict one another, Unsupported where a named implementation refuses.
    """
    return _run(
        (c_BTH, z_BTH, c_half_BMH, z_half_BMH, phase_B, count_B, bias_MH, None),
        ratio=ratio,
        overlap=overlap,
        finish=None,
        implementation=implementation,
        interpret=interpret,
    )


def compress_entries(
    c_BTH: Float[Array, "B T W"],
    z_BTH: Float[Array, "B T W"] | None,
    c_half_BMH: Float[Array, "B M W"] | None,
    z_half_BMH: Float[Array, "B M W"] | None,
    phase_B: Int[Array, " B"],
    count_B: Int[Array, " B"],
    norm_H: Float[Array, " H"],
    rotation: tuple[Float[Array, "B E R"], Float[Array, "B E R"]],
    *,
    ratio: int,
    eps: float,
    dtype: jax.typing.DTypeLike,
    storage: Storage = "rounded",
    entry_dtype: jax.typing.DTypeLike | None = None,
    bias_MH: Float[Array, "ratio W"] | None = None,
    overlap: bool = False,
    implementation: str | None = None,
    interpret: Any = False,
) -> Compressed:
    """Pool, normalise, rotate, round and store: `compress` and all that follows it on the way into the pool.

        latent = cast(x * rsqrt(mean(x^2) + eps) * norm),  x = cast(pooled);    entry = store(cast(rotate(latent)))

    Norm and rotation are f32, `cast` is to the compute dtype. Gradients reach C, Z, the carried rows, bias and norm; rounding is
    passed straight through, packed entries and the rotation take none.

    Args (beside those of `compress`; at m = 1 C is f32 or bf16):
        norm_H: RMSNorm weight. eps: added to the mean square.
        rotation: f32 cos and sin of each entry's position, of pairs (2j, 2j + 1) on the last R channels; here R counts pairs.
        dtype: compute dtype, f32 or bf16.
        storage: "rounded" to `formats.MAIN`, the same "packed" (`kernels_pallas.storage`), or "plain" without rounding.
        entry_dtype: of entries that are stored as numbers; the compute dtype by default.
    """
    cos_BER, sin_BER = rotation
    dtype, entry_dtype = jnp.dtype(dtype), jnp.dtype(dtype if entry_dtype is None else entry_dtype)
    entry_width = c_BTH.shape[-1] // (2 if overlap else 1)
    if storage not in ("packed", "rounded", "plain"):
        raise ValueError(f"{storage=} must be 'packed', 'rounded' or 'plain'")
    if dtype not in _FLOATS or entry_dtype not in _FLOATS:
        raise ValueError(f"{dtype=} and {entry_dtype=} must be float32 or bfloat16")
    if norm_H.shape != (entry_width,):
        raise ValueError(f"{norm_H.shape=} must be [H] = [{entry_width}] to match {c_BTH.shape=} with {overlap=}")
    entries = (c_BTH.shape[0], -(-c_BTH.shape[1] // max(ratio, 1)))
    if cos_BER.shape != sin_BER.shape or cos_BER.shape[:-1] != entries or 2 * cos_BER.shape[-1] > entry_width:
        raise ValueError(
            f"rotation of {cos_BER.shape} and {sin_BER.shape} must be [B, E, R/2] = {list(entries)} and at most "
            f"{entry_width // 2}, to match {c_BTH.shape=} at {ratio=}"
        )
    if storage != "plain" and entry_width % formats.MAIN.group:
        raise ValueError(
            f"{storage=} rounds in groups of {formats.MAIN.group}, of which H={entry_width} is no multiple"
        )
    (latent_BEH, entries_BEH), c_half, z_half = _run(
        (c_BTH, z_BTH, c_half_BMH, z_half_BMH, phase_B, count_B, bias_MH, (norm_H, cos_BER, sin_BER)),
        ratio=ratio,
        overlap=overlap,
        finish=Finish(float(eps), dtype, storage, entry_dtype),
        implementation=implementation,
        interpret=interpret,
    )
    return Compressed(latent_BEH, entries_BEH, c_half, z_half)


def empty_half(batch: int, width: int, ratio: int, overlap: bool = False) -> tuple[jax.Array, jax.Array]:
    """Carried rows (c_half, z_half) of sequences that have no tokens yet, for entries of H = `width` channels."""
    shape = (batch, rows.waiting_rows(ratio, overlap), width * (2 if overlap else 1))
    none_yet = jnp.arange(shape[1])[:, None] < rows.lead_rows(ratio, overlap)
    c_half = jnp.zeros(shape, jnp.float32)
    return c_half, jnp.where(none_yet, -jnp.inf, c_half)


def waiting_rows(
    half_BMH: Float[Array, "B M W"],
    new_BTH: Float[Array, "B T W"],
    phase_B: Int[Array, " B"],
    count_B: Int[Array, " B"],
    *,
    ratio: int,
    bias_MH: Float[Array, "ratio W"] | None = None,
    overlap: bool = False,
) -> Float[Array, "B M W"]:
    """The carried rows after the first `count_B` of the new ones: what `compress` returns for them, of C or (with bias) of Z.

    For callers that learn how many of a call's rows are real only after it.
    """
    lead = rows.lead_rows(ratio, overlap)
    return rows.carry(half_BMH, new_BTH, bias_MH, phase_B, count_B, ratio=ratio, lead=lead)


_ROWS = ("c_BTH", "z_BTH", "c_half_BMH", "z_half_BMH")


def _run(
    arrays: tuple[Any, ...],
    *,
    ratio: int,
    overlap: bool,
    finish: Finish | None,
    implementation: str | None,
    interpret: Any,
) -> Any:
    """Validate, choose and call."""
    *rows_in, phase_B, count_B, bias_MH, to_finish = arrays
    rows_in = [None if a is None else checks.array(n, a) for n, a in zip(_ROWS, rows_in, strict=True)]
    c_BTH, z_BTH, c_half_BMH, z_half_BMH = rows_in
    phase_B, count_B = checks.integers("phase_B", phase_B), checks.integers("count_B", count_B)
    ratio = checks.whole("ratio", ratio, 1)
    if c_BTH is None:
        raise ValueError("c_BTH must be an array, found None")
    if c_BTH.ndim != 3 or (z_BTH is not None and z_BTH.shape != c_BTH.shape):
        raise ValueError(f"{c_BTH.shape=} and z_BTH.shape={_shape(z_BTH)} must both be [B, T, H]")
    if overlap and c_BTH.shape[2] % 2:
        raise ValueError(f"{c_BTH.shape=} must hold two series of one width with {overlap=}")
    if phase_B.shape != c_BTH.shape[:1] or count_B.shape != c_BTH.shape[:1]:
        raise ValueError(f"{phase_B.shape=} and {count_B.shape=} must be [B] to match {c_BTH.shape=}")
    pools = ratio > 1 or overlap
    if pools and z_BTH is None:
        raise ValueError(f"z_BTH is needed at {ratio=} with {overlap=}")
    half = (c_BTH.shape[0], rows.waiting_rows(ratio, overlap), c_BTH.shape[2])
    for held in (c_half_BMH, z_half_BMH):
        if held is None and not pools:
            continue
        if _shape(held) != half:
            raise ValueError(
                f"c_half_BMH.shape={_shape(c_half_BMH)} and z_half_BMH.shape={_shape(z_half_BMH)} must be "
                f"[B, {'2 * ' if overlap else ''}ratio - 1, H] = {list(half)}"
            )
    if bias_MH is not None and bias_MH.shape != (ratio, c_BTH.shape[2]):
        raise ValueError(f"{bias_MH.shape=} must be [ratio, H] = {[ratio, c_BTH.shape[2]]} to match {c_BTH.shape=}")
    arrays = jax.tree.map(jnp.asarray, (*rows_in, phase_B, count_B, bias_MH, to_finish))
    wanted = (jnp.float32,) if pools else _FLOATS
    for name, a in zip(("C", "Z", "carried C", "carried Z", "bias"), (*arrays[:4], arrays[6]), strict=True):
        if a is not None and (pools or finish is not None) and a.dtype not in wanted:
            raise ValueError(
                f"{name} has dtype {a.dtype} and must have {[jnp.dtype(d).name for d in wanted]} at {ratio=}"
            )
    if 0 in c_BTH.shape:  # nothing to pool: no kernel is needed, whichever was named
        implementation, interpret = "xla", False
    static = {"ratio": ratio, "overlap": overlap, "finish": finish}
    module = dispatch.choose("compress", implementation, interpret, CHOICES, *arrays, **static)
    return vjp.compress(vjp.Call(module, interpret, **static), *arrays)


def _shape(a: Any) -> tuple[int, ...] | None:
    return None if a is None else a.shape
