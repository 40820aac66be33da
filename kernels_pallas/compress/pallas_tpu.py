"""Compression on a TPU: one pass over the new rows, the state of the open group held in VMEM.

A call's groups begin at the open group's first token, at an arbitrary phase of the blocks that rows arrive in. Laying the rows
out again before the kernel would move the whole chunk twice more through HBM, so the kernel takes the rows as they are:

    block i of sequence b brings rows [i R, (i+1) R); they go behind the last F rows before them (carried rows at i = 0) in a
    VMEM buffer; slot r of the block's R/m entries is then one strided read of the buffer, from row F - phase + r in steps of m

Slots thus arrive as arrays [R/m, 128] (entries along sublanes, channels along lanes), the softmax over slots is elementwise, and
every row of C and Z is read from HBM once. Strided reads want rows of 128 lanes, so the buffer holds each slice of 128 channels
by itself. Blocks of a sequence follow one another (the buffer is their state), sequences are independent.

Where each sequence brings one token (decode), only phase m - 1 completes an entry, and its slots are the waiting rows and the
new one: rows of the grid's blocks are then sequences, and blocks in which nothing completes do not fetch their waiting rows.
At m = 1 there is nothing to pool and rows of blocks are tokens of any sequence.

All that follows the pooling happens in the same kernel (`tpu_finish`). Compiled for v5e, v5p, v6e and TPU7x; not run on one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kernels_pallas import formats
from kernels_pallas.compress import rows, steps, tpu_finish, tpu_plan
from kernels_pallas.compress.steps import Finish, Segment, Tail
from kernels_pallas.compress.tpu_plan import Plan
from kernels_pallas.dispatch import Unsupported
from kernels_pallas.storage import LANES, Packed

UNROLL = 8  # slots in flight where many are read one by one


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
        raise Unsupported(f"pallas_tpu needs at least one token, found {c_BTW.shape=}; use 'xla'")
    if interpret:
        return
    width = c_BTW.shape[2] // (2 if overlap else 1)
    unit = 2 * LANES if finish is not None and finish.storage == "packed" else LANES
    if width % unit:
        raise Unsupported(f"pallas_tpu compresses entries of H = n * {unit} channels here, found H={width}; use 'xla'")
    plan = tpu_plan.make_plan(c_BTW, bias_MW, ratio, overlap, finish)
    need = tpu_plan.vmem_bytes(plan, c_BTW.dtype.itemsize)
    if need > tpu_plan.VMEM_BYTES:
        raise Unsupported(
            f"pallas_tpu would need {need} bytes of VMEM of {tpu_plan.VMEM_BYTES} at {ratio=}, {width=}; use 'xla'"
        )


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
    batch, tokens, _ = c_BTW.shape
    if ratio == 1 and not overlap and finish is None:
        return c_BTW, c_half_BMW, z_half_BMW
    plan = tpu_plan.make_plan(c_BTW, bias_MW, ratio, overlap, finish)
    entries = -(-tokens // ratio)
    if tail is not None:
        norm_H, cos_BER, sin_BER = tail
        more = {"norm": norm_H.astype(jnp.float32)[None], "turn": _turns(plan, cos_BER, sin_BER)}
        turned = 2 * cos_BER.shape[-1]
    else:
        more, turned = {}, 0
    if plan.biased:
        assert bias_MW is not None
        # A slot may be any number at run time, which a row of a tile may not.
        more["bias"] = bias_MW.reshape(ratio, -1, plan.lanes)
    arrays: dict[str, Any] = {"c": c_BTW, "z": z_BTW, "c_half": c_half_BMW, "z_half": z_half_BMW, **more}
    if plan.kind == "chunk":
        made = _run_chunk(plan, arrays, phase_B, turned, entries, interpret)
    else:
        made = _run_flat(plan, arrays, phase_B, count_B, turned, interpret)
        made = {name: a.reshape(batch, tokens, a.shape[-1]) for name, a in made.items()}
    if plan.kind != "rows":
        assert z_BTW is not None
        assert c_half_BMW is not None
        assert z_half_BMW is not None
        layout = {"ratio": ratio, "lead": plan.lead}
        c_half_BMW = rows.carry(c_half_BMW, c_BTW, None, phase_B, count_B, **layout)
        z_half_BMW = rows.carry(z_half_BMW, z_BTW, bias_MW, phase_B, count_B, **layout)
    if finish is None:
        return made["pooled"], c_half_BMW, z_half_BMW
    if finish.storage == "packed":
        codes, scales = (made[name].astype(jnp.uint8)[None] for name in ("codes", "scales"))
        entry = Packed(codes, scales, plan.width, formats.MAIN)
    else:
        entry = made["entry"].astype(finish.entry_dtype)
    return (made["latent"].astype(finish.dtype), entry), c_half_BMW, z_half_BMW


def _turn_width(width: int, turned: int) -> int:
    """Channels of the last slices, which hold all that is rotated."""
    return min(-(-turned // LANES) * LANES, width)


def _turns(plan: Plan, cos_BER: jax.Array, sin_BER: jax.Array) -> jax.Array:
    """[B, E, X]: cos in even lanes and sin in odd ones, of the pairs in the last X channels; 0 before those."""
    pairs = jnp.stack([cos_BER, sin_BER], axis=-1).astype(jnp.float32)
    table = pairs.reshape(*cos_BER.shape[:2], 2 * cos_BER.shape[2])
    return jnp.pad(table, ((0, 0), (0, 0), (_turn_width(plan.width, table.shape[2]) - table.shape[2], 0)))


# ---- chunks ----


def _run_chunk(
    plan: Plan, arrays: dict[str, Any], phase_B: jax.Array, turned: int, entries: int, interpret: Any
) -> dict[str, jax.Array]:
    batch, tokens, row_width = arrays["c"].shape
    blocks = -(-entries // plan.entries)
    block_rows = tokens if blocks == 1 else plan.rows
    per_block = {name: pl.BlockSpec((None, block_rows, row_width), lambda b, i, _: (b, i, 0)) for name in ("c", "z")}
    # One block holds all carried rows and what an aligned move of them needs.
    per_row = {
        name: pl.BlockSpec((None, plan.front, row_width), lambda b, i, _: (b, 0, 0)) for name in ("c_half", "z_half")
    }
    specs = per_block | per_row
    specs["bias"] = pl.BlockSpec((plan.ratio, row_width // plan.lanes, plan.lanes), lambda b, i, _: (0, 0, 0))
    specs["norm"] = pl.BlockSpec((1, plan.width), lambda b, i, _: (0, 0))
    block_entries = entries if blocks == 1 else plan.entries
    specs["turn"] = pl.BlockSpec((None, block_entries, _turn_width(plan.width, turned)), lambda b, i, _: (b, i, 0))
    out = plan.outputs
    buffer = pltpu.VMEM((row_width // plan.lanes, plan.front + plan.rows, plan.lanes), jnp.float32)
    made = pl.pallas_call(
        functools.partial(_chunk_kernel, plan, block_rows, block_entries, turned),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(batch, blocks),
            in_specs=[specs[name] for name in plan.inputs],
            out_specs=[pl.BlockSpec((None, block_entries, w), lambda b, i, _: (b, i, 0)) for w, _ in out.values()],
            scratch_shapes=[buffer, buffer],
        ),
        out_shape=[jax.ShapeDtypeStruct((batch, entries, w), dtype) for w, dtype in out.values()],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=tpu_plan.vmem_bytes(plan, 4) + (8 << 20)
        ),
        interpret=interpret,
    )(phase_B, *(arrays[name] for name in plan.inputs))
    return dict(zip(out, made, strict=True))


def _chunk_kernel(plan: Plan, block_rows: int, block_entries: int, turned: int, phase_ref: Any, *refs: Any) -> None:
    """One block of one sequence.

    Prefetch: phase [B]
    Input:    c, z [rows, W]; c_half, z_half [F, W], the first M real; bias [m, W/128, 128]; norm [1, H]; turn [entries, X]
    Output:   pooled [entries, H], or latent [entries, H] and entry [entries, H] or codes [entries, H/2], scales [entries, H/16]
    Scratch:  c, z [W/128, F + R, 128]: row F + t is row t of the block, those before it the rows that came before
    """
    *named, c_buffer, z_buffer = refs
    ref = dict(zip([*plan.inputs, *plan.outputs], named, strict=True))
    phase, block = phase_ref[pl.program_id(0)], pl.program_id(1)
    front, lanes, m = plan.front, plan.lanes, plan.ratio
    for buffer, half, new in ((c_buffer, ref["c_half"], ref["c"]), (z_buffer, ref["z_half"], ref["z"])):
        for s in range(plan.row_width // lanes):
            piece = slice(s * lanes, (s + 1) * lanes)

            @pl.when(block == 0)
            def _(buffer: Any = buffer, half: Any = half, s: int = s, piece: slice = piece) -> None:
                # Row lead + v goes to buffer row F - phase + v; rows that are not real wrap around to where nothing reads.
                buffer[s, :front, :] = pltpu.roll(half[:, piece], (front - plan.lead - phase) % front, 0)

            @pl.when(block > 0)
            def _(buffer: Any = buffer, s: int = s) -> None:
                buffer[s, :front, :] = buffer[s, plan.rows :, :]

            buffer[s, front : front + block_rows, :] = new[:, piece]

    def segments(start: Any, size: int, channel: int) -> list[Segment]:
        """Slots of entries [start, start + size) of the block, channels [channel, channel + lanes)."""
        entry = start + lax.broadcasted_iota(jnp.int32, (size, lanes), 0) + block * plan.entries

        def series(shift: int, offset: int) -> Segment:
            s = (offset + channel) // lanes

            def read(slot: Any) -> tuple[jax.Array, jax.Array]:
                at = pl.ds(front - phase + shift + slot + start * m, size, stride=m)
                c, z = c_buffer.at[s][at, :], z_buffer.at[s][at, :]
                if plan.biased:
                    bias = ref["bias"][slot, s : s + 1, :]
                    z = jnp.where(entry * m + shift + slot >= phase, z + bias, z)
                return c, z

            return m, read

        return [series(-m, 0), series(0, plan.width)] if plan.overlap else [series(0, 0)]

    _for_tiles(plan, block_entries, turned, ref, segments)


# ---- one token a sequence, or no pooling ----


def _run_flat(
    plan: Plan, arrays: dict[str, Any], phase_B: jax.Array, count_B: jax.Array, turned: int, interpret: Any
) -> dict[str, jax.Array]:
    total = arrays["c"].shape[0] * arrays["c"].shape[1]
    row_width = arrays["c"].shape[2]
    blocks = -(-total // plan.entries)
    arrays = arrays | {n: arrays[n].reshape(total, -1) for n in ("c", "z", "turn") if arrays.get(n) is not None}
    # With slots outermost a slot of many sequences is whole tiles. It is also how XLA likes to hold an odd number of rows.
    arrays |= {n: jnp.swapaxes(arrays[n], 0, 1) for n in ("c_half", "z_half") if plan.kind == "step"}
    # The block whose waiting rows a block fetches: its own if an entry completes in it, else the last fetched one again.
    source = jnp.zeros(blocks, jnp.int32)
    if plan.kind == "step":
        complete = jnp.pad(phase_B + count_B == plan.ratio, (0, blocks * plan.entries - total))
        any_complete = jnp.any(complete.reshape(blocks, plan.entries), axis=1)
        source = lax.cummax(jnp.where(any_complete, jnp.arange(blocks), 0))
    specs = {name: pl.BlockSpec((plan.entries, row_width), lambda i, _: (i, 0)) for name in ("c", "z")}
    for name in ("c_half", "z_half"):
        specs[name] = pl.BlockSpec((plan.waiting, plan.entries, row_width), lambda i, source: (0, source[i], 0))
    specs["bias"] = pl.BlockSpec((plan.ratio, row_width // plan.lanes, plan.lanes), lambda i, _: (0, 0, 0))
    specs["norm"] = pl.BlockSpec((1, plan.width), lambda i, _: (0, 0))
    specs["turn"] = pl.BlockSpec((plan.entries, _turn_width(plan.width, turned)), lambda i, _: (i, 0))
    out = plan.outputs
    made = pl.pallas_call(
        functools.partial(_flat_kernel, plan, turned),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(blocks,),
            in_specs=[specs[name] for name in plan.inputs],
            out_specs=[pl.BlockSpec((plan.entries, w), lambda i, _: (i, 0)) for w, _ in out.values()],
        ),
        out_shape=[jax.ShapeDtypeStruct((total, w), dtype) for w, dtype in out.values()],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel",), vmem_limit_bytes=tpu_plan.vmem_bytes(plan, 4) + (8 << 20)
        ),
        interpret=interpret,
    )(source, *(arrays[name] for name in plan.inputs))
    return dict(zip(out, made, strict=True))


def _flat_kernel(plan: Plan, turned: int, source_ref: Any, *refs: Any) -> None:
    """One block of entries, each from one new row.

    Prefetch: source [blocks], the block whose waiting rows are here
    Input:    c, z [entries, W]; c_half, z_half [M, entries, W] with "step"; bias [m, W/128, 128]; norm [1, H]; turn [entries, X]
    Output:   as `_chunk_kernel`
    """
    ref = dict(zip([*plan.inputs, *plan.outputs], refs, strict=True))
    lanes = plan.lanes

    def segments(start: Any, size: int, channel: int) -> list[Segment]:
        tile = pl.ds(start, size)

        def waiting(count: int, first: int, offset: int) -> Segment:
            piece = pl.ds(offset + channel, lanes)

            return count, lambda slot: (
                ref["c_half"][first + slot, tile, piece],
                ref["z_half"][first + slot, tile, piece],
            )

        def newest(offset: int) -> Segment:
            piece = pl.ds(offset + channel, lanes)
            z = ref["z"][tile, piece]
            if plan.biased:
                s = (offset + channel) // lanes
                z = z + ref["bias"][plan.ratio - 1, s : s + 1, :]
            return 1, lambda _: (ref["c"][tile, piece], z)

        this = plan.width if plan.overlap else 0
        before = [waiting(plan.lead, 0, 0)] if plan.overlap else []
        return [*before, waiting(plan.ratio - 1, plan.lead, this), newest(this)]

    if plan.kind == "rows":
        _for_tiles(plan, plan.entries, turned, ref, None)
        return
    here = source_ref[pl.program_id(0)] == pl.program_id(0)

    @pl.when(here)
    def _() -> None:
        _for_tiles(plan, plan.entries, turned, ref, segments)

    @pl.when(jnp.logical_not(here))
    def _() -> None:  # nothing completes, and the waiting rows here are other sequences'
        for name in plan.outputs:
            ref[name][...] = jnp.zeros_like(ref[name])


# ---- the work on one tile of entries ----


def _for_tiles(
    plan: Plan, entries: int, turned: int, ref: dict[str, Any], segments: Callable[..., Sequence[Segment]] | None
) -> None:
    """Pool, finish and write the block's entries, tile by tile."""
    size = tpu_plan.TILE if entries > tpu_plan.TILE and entries % tpu_plan.TILE == 0 else entries

    def tile(start: Any) -> None:
        at = pl.ds(start, size)
        if segments is None:
            pooled = ref["c"][at, :].astype(jnp.float32)
        else:
            channels = range(0, plan.width, plan.lanes)
            pooled = tpu_finish.joined(
                [steps.pool(segments(start, size, channel), plan.held, unroll=UNROLL) for channel in channels]
            )
        if plan.finish is None:
            ref["pooled"][at, :] = pooled
            return
        for name, value in tpu_finish.finish(
            plan, plan.finish, pooled, ref["norm"][...], ref["turn"][at, :], turned
        ).items():
            ref[name][at, :] = value.astype(ref[name].dtype)

    if size == entries:
        tile(0)
    else:
        lax.fori_loop(0, entries // size, lambda i, _: tile(pl.multiple_of(i * size, size)), None)
