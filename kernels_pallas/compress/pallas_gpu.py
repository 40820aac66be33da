"""Compression on a GPU (Triton): each program makes a few entries, with all their channels.

    entry e, slot r  is row v = e m + r of the sequence that begins at the open group's first token: new row v - phase, or if
    that is negative a carried row

so a program computes which rows its slots are and loads them where they lie (slot by slot for its entries, or where a group is
long, several slots at a time of one entry); only a sequence's first programs, whose groups may
begin before this call, look at carried rows. Every new row is read once. Entries that do not complete are not pooled at all: a
decode step reads the waiting rows of only those sequences that complete an entry in it.

Programs at the end of a sequence are given its last entry several times instead of entries that do not exist. They compute and
store the same values there, so that no access needs a mask.

After pooling, in the same program and in the order of `steps.finish`: RMSNorm; rotation on pairs of neighbouring channels, cut
apart and put together through integer sums of their bits (a sum of floats would turn -0 into 0); maxima over reshaped groups.
Compiled for sm_90 (H100, H200) and sm_100 (B200); not run on one.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from kernels_pallas import formats
from kernels_pallas.compress import rows, steps
from kernels_pallas.compress.steps import Finish, Segment, Tail
from kernels_pallas.dispatch import Unsupported, tuned
from kernels_pallas.storage import Packed

SLOTS = 16  # of a long group at a time
BLOCK_ENTRIES = 4  # per program: one row of 512 channels for each of four warps
WARPS = 4


def check(
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
    interpret: Any,
) -> None:
    """Refuse what the compiler cannot take."""
    if c_BTW.shape[1] == 0:
        raise Unsupported(f"pallas_gpu needs at least one token, found {c_BTW.shape=}; use 'xla'")
    if interpret:
        return
    width = c_BTW.shape[2] // (2 if overlap else 1)
    if width & (width - 1) or width < formats.MAIN.group:
        raise Unsupported(f"pallas_gpu takes a power of two of channels from 16 up, found H={width}; use 'xla'")


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
    interpret: Any,
) -> tuple[Any, jax.Array | None, jax.Array | None]:
    """As `xla.run`."""
    pools = ratio > 1 or overlap
    if not pools and finish is None:
        return c_BTW, c_half_BMW, z_half_BMW
    batch, tokens, row_width = c_BTW.shape
    width = row_width // (2 if overlap else 1)
    entries = -(-tokens // ratio)
    held = not pools or steps.holds(ratio, overlap)
    block = min(tuned("compress", "block_entries", BLOCK_ENTRIES), 1 << (entries - 1).bit_length()) if held else 1
    arrays: dict[str, Any] = {"c": c_BTW}
    if pools:
        arrays |= {"z": z_BTW, "c_half": c_half_BMW, "z_half": z_half_BMW}
        arrays |= {} if bias_MW is None else {"bias": bias_MW}
    if tail is not None:
        arrays |= dict(zip(("norm", "cos", "sin"), tail, strict=True))
    out = _outputs(width, finish)

    def whole(name: str) -> pl.BlockSpec:
        """All of a sequence's array, or of a shared one: programs address rows themselves."""
        shape = arrays[name].shape
        if name in ("bias", "norm"):
            return pl.BlockSpec(shape, lambda b, i: (0,) * len(shape))
        return pl.BlockSpec((None, *shape[1:]), lambda b, i: (b, 0, 0))

    one = pl.BlockSpec((1,), lambda b, i: (b,))
    made = pl.pallas_call(
        functools.partial(_kernel, tuple(arrays), tuple(out), ratio, overlap, width, tokens, entries, block, finish),
        grid=(batch, -(-entries // block)),
        in_specs=[one, one, *(whole(name) for name in arrays)],
        out_specs=[pl.BlockSpec((None, entries, w), lambda b, i: (b, 0, 0)) for w, _ in out.values()],
        out_shape=[jax.ShapeDtypeStruct((batch, entries, w), dtype) for w, dtype in out.values()],
        compiler_params=plt.CompilerParams(num_warps=tuned("compress", "warps", WARPS)),
        interpret=interpret,
    )(phase_B, count_B, *arrays.values())
    result = dict(zip(out, made, strict=True))
    if pools:
        assert z_BTW is not None
        assert c_half_BMW is not None
        assert z_half_BMW is not None
        layout = {"ratio": ratio, "lead": rows.lead_rows(ratio, overlap)}
        c_half_BMW = rows.carry(c_half_BMW, c_BTW, None, phase_B, count_B, **layout)
        z_half_BMW = rows.carry(z_half_BMW, z_BTW, bias_MW, phase_B, count_B, **layout)
    if finish is None:
        return result["pooled"], c_half_BMW, z_half_BMW
    if finish.storage == "packed":
        entry = Packed(result["codes"][None], result["scales"][None], width, formats.MAIN)
    else:
        entry = result["entry"]
    return (result["latent"], entry), c_half_BMW, z_half_BMW


def _outputs(width: int, finish: Finish | None) -> dict[str, tuple[int, jnp.dtype]]:
    """Width and dtype by name."""
    if finish is None:
        return {"pooled": (width, jnp.dtype(jnp.float32))}
    if finish.storage == "packed":
        byte = jnp.dtype(jnp.uint8)
        stored = {"codes": (width // 2, byte), "scales": (width // formats.MAIN.group, byte)}
    else:
        stored = {"entry": (width, finish.entry_dtype)}
    return {"latent": (width, finish.dtype), **stored}


def _kernel(
    inputs: tuple[str, ...],
    outputs: tuple[str, ...],
    ratio: int,
    overlap: bool,
    width: int,
    tokens: int,
    entries: int,
    block: int,
    finish: Finish | None,
    phase_ref: Any,
    count_ref: Any,
    *refs: Any,
) -> None:
    """`block` entries of one sequence.

    Input:  phase [1], count [1]; c, z [T, W]; c_half, z_half [M, W]; bias [m, W]; norm [H]; cos, sin [E, R/2]
    Output: pooled [E, H], or latent [E, H] and entry [E, H] or codes [E, H/2], scales [E, H/16]
    """
    ref = dict(zip((*inputs, *outputs), refs, strict=True))
    phase, count = phase_ref[0], count_ref[0]
    first = pl.program_id(1) * block
    entry = jnp.minimum(first + lax.iota(jnp.int32, block), entries - 1)
    channel = lax.iota(jnp.int32, width)

    def rows_of(name: str, index: jax.Array, lanes: jax.Array = channel) -> jax.Array:
        return ref[name][index[:, None], lanes[None, :]]

    if ratio == 1 and not overlap:
        pooled = rows_of("c", entry).astype(jnp.float32)
    else:
        held = steps.holds(ratio, overlap)
        together = 1 if held else math.gcd(ratio, SLOTS)
        segments = _segments(ref, rows_of, entry, phase, first, ratio, overlap, together, width, tokens)
        pooled = lax.cond(
            first < (phase + count) // ratio,
            lambda: steps.pool(segments, held, lambda a, reduce: a if held else reduce(a, axis=0, keepdims=True)),
            lambda: jnp.zeros((block, width), jnp.float32),
        )
    if finish is None:
        ref["pooled"][entry[:, None], channel[None, :]] = pooled
        return
    made = _finish(finish, pooled, ref["norm"][...].astype(jnp.float32), functools.partial(_turns, ref, entry, width))
    for name, value in made.items():
        lanes = lax.iota(jnp.int32, value.shape[1])
        ref[name][entry[:, None], lanes[None, :]] = value.astype(ref[name].dtype)


def _segments(
    ref: dict[str, Any],
    rows_of: Callable[..., jax.Array],
    entry: jax.Array,
    phase: jax.Array,
    first: jax.Array,
    ratio: int,
    overlap: bool,
    together: int,
    width: int,
    tokens: int,
) -> list[Segment]:
    """Where the slots of the program's entries lie: one slot of all entries, or several of the only entry."""
    lead, waiting = rows.lead_rows(ratio, overlap), rows.waiting_rows(ratio, overlap)
    looks_back = first <= (1 if overlap else 0)

    def series(shift: int, offset: int) -> Segment:
        channel = lax.iota(jnp.int32, width) + offset

        def read(i: Any) -> tuple[jax.Array, jax.Array]:
            slot = i * together + lax.iota(jnp.int32, together)
            row = entry * ratio + (slot + shift)
            new = jnp.clip(row - phase, 0, tokens - 1)
            c, z = rows_of("c", new, channel), rows_of("z", new, channel)
            if "bias" in ref:
                z = z + rows_of("bias", slot, channel)

            def with_carried() -> tuple[jax.Array, jax.Array]:
                old, waits = jnp.clip(row + lead, 0, waiting - 1), (row < phase)[:, None]
                c_old, z_old = rows_of("c_half", old, channel), rows_of("z_half", old, channel)
                return jnp.where(waits, c_old, c), jnp.where(waits, z_old, z)

            return lax.cond(looks_back, with_carried, lambda: (c, z))

        return ratio // together, read

    return [series(-ratio, 0), series(0, width)] if overlap else [series(0, 0)]


def _turns(ref: dict[str, Any], entry: jax.Array, width: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """cos and sin [n, H/2] of all pairs of channels, and whether a pair turns."""
    pairs = ref["cos"].shape[-1]
    pair = lax.iota(jnp.int32, width // 2) - (width // 2 - pairs)
    at = (entry[:, None], jnp.maximum(pair, 0)[None, :])
    return ref["cos"][at], ref["sin"][at], (pair >= 0)[None, :]


def _finish(
    how: Finish, x: jax.Array, norm: jax.Array, turns: Callable[[], tuple[jax.Array, jax.Array, jax.Array]]
) -> dict[str, jax.Array]:
    """Outputs by name, as numbers, from pooled entries f32 [n, H]; the order of `steps.finish`."""
    n, width = x.shape
    x = steps.cast_value(x, how.dtype)
    mean = jnp.mean(jnp.square(x), axis=1, keepdims=True)
    latent = steps.cast_value(x * lax.rsqrt(mean + jnp.float32(how.eps)) * norm[None, :], how.dtype)
    x = steps.cast_value(_rotate(latent, *turns()), how.dtype)
    made = {"latent": latent}
    if how.storage == "plain":
        return made | {"entry": steps.cast_value(x, how.entry_dtype)}
    groups = x.reshape(n, width // formats.MAIN.group, formats.MAIN.group)
    scale = steps.main_scale(jnp.max(jnp.abs(groups), axis=2))
    code = steps.main_code(groups, scale[:, :, None])
    if how.storage == "rounded":
        return made | {"entry": (formats.e2m1_values(code) * scale[:, :, None]).reshape(n, width)}  # exact in bf16
    halves = code.reshape(n, 2, width // 2)
    low = lax.broadcasted_iota(jnp.int32, halves.shape, 1) == 0
    codes = jnp.sum(jnp.where(low, halves, halves * 16), axis=1)
    return made | {"codes": codes, "scales": formats.e4m3_codes(scale)}


def _rotate(x: jax.Array, cos: jax.Array, sin: jax.Array, turned: jax.Array) -> jax.Array:
    """x [n, H] with the pairs (2j, 2j + 1) that turn turned."""
    n, width = x.shape
    bits = lax.bitcast_convert_type(x, jnp.int32).reshape(n, width // 2, 2)
    first = lax.broadcasted_iota(jnp.int32, bits.shape, 2) == 0

    def apart(which: jax.Array) -> jax.Array:
        return lax.bitcast_convert_type(jnp.sum(jnp.where(which, bits, 0), axis=2), jnp.float32)

    even, odd = apart(first), apart(jnp.logical_not(first))
    new_even = jnp.where(turned, even * cos - odd * sin, even)
    new_odd = jnp.where(turned, even * sin + odd * cos, odd)
    return jnp.where(first, new_even[:, :, None], new_odd[:, :, None]).reshape(n, width)
