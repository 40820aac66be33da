"""How a TPU kernel of compression cuts its work: which kernel, how many rows and entries in a block, what goes in and out."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from kernels_pallas import formats
from kernels_pallas.compress import rows, steps
from kernels_pallas.compress.steps import Finish
from kernels_pallas.dispatch import tuned
from kernels_pallas.storage import LANES

BLOCK_BYTES = 1 << 20  # of C (and of Z) per block
BLOCK_ENTRIES = 512  # at most
TILE = 32  # entries worked on at once: rows of one uint8 tile
VMEM_BYTES = 40 << 20  # of 64 MiB (TPU7x) or 128 MiB (v5e, v5p, v6e)
SUBLANES = 8


@dataclasses.dataclass(frozen=True)
class Plan:
    """What is static in a kernel. `rows`: tokens in a block; `entries`: entries in a block (with "chunk" rows / ratio)."""

    kind: str  # "chunk" | "step" | "rows"
    ratio: int
    overlap: bool
    width: int  # H
    finish: Finish | None
    biased: bool
    rows: int
    entries: int
    total: int  # entries of a sequence, or of all with "step" and "rows"

    @property
    def lead(self) -> int:
        return rows.lead_rows(self.ratio, self.overlap)

    @property
    def waiting(self) -> int:
        return rows.waiting_rows(self.ratio, self.overlap)

    @property
    def front(self) -> int:
        """Rows of the buffer before a block's own."""
        return -(-self.waiting // SUBLANES) * SUBLANES

    @property
    def row_width(self) -> int:
        return self.width * (2 if self.overlap else 1)

    @property
    def lanes(self) -> int:
        """Channels in a slice: 128, or all of a width that only an interpreter takes."""
        return LANES if self.width % LANES == 0 else self.width

    @property
    def held(self) -> bool:
        """Whether the slots of an entry are held at once."""
        return steps.holds(self.ratio, self.overlap)

    @property
    def inputs(self) -> list[str]:
        names = ["c"] if self.kind == "rows" else ["c", "z", "c_half", "z_half"]
        names += ["bias"] if self.biased else []
        return names + (["norm", "turn"] if self.finish else [])

    @property
    def outputs(self) -> dict[str, tuple[int, jnp.dtype]]:
        """Width and dtype by name. A block has to be whole tiles (up to 32 rows) or all there is: others leave in 32 bits."""
        narrow = self.entries % TILE == 0 or self.entries == self.total

        def kept(dtype: jax.typing.DTypeLike) -> jnp.dtype:
            return jnp.dtype(dtype if narrow else jnp.int32 if dtype == jnp.uint8 else jnp.float32)

        if self.finish is None:
            return {"pooled": (self.width, kept(jnp.float32))}
        out = {"latent": (self.width, kept(self.finish.dtype))}
        if self.finish.storage == "packed":
            scales = self.width // formats.MAIN.group
            return out | {"codes": (self.width // 2, kept(jnp.uint8)), "scales": (scales, kept(jnp.uint8))}
        return out | {"entry": (self.width, kept(self.finish.entry_dtype))}


def make_plan(c_BTW: jax.Array, bias_MW: jax.Array | None, ratio: int, overlap: bool, finish: Finish | None) -> Plan:
    """The plan of a call."""
    batch, tokens, row_width = c_BTW.shape
    width = row_width // (2 if overlap else 1)
    pools = ratio > 1 or overlap
    kind = "rows" if not pools else "step" if tokens == 1 else "chunk"
    total = -(-tokens // ratio) if kind == "chunk" else batch * tokens
    # Bytes that come with one entry.
    size = 4 * row_width * (rows.waiting_rows(ratio, overlap) + 1 if kind == "step" else ratio)
    bytes_ = tuned("compress", "block_bytes", BLOCK_BYTES)
    block = min(bytes_ // size, BLOCK_ENTRIES) // TILE * TILE or max(bytes_ // size // 8, 1) * SUBLANES
    block = total if total <= min(block, TILE) else min(block, -(-total // TILE) * TILE)
    return Plan(kind, ratio, overlap, width, finish, bias_MW is not None and pools, block * ratio, block, total)


def vmem_bytes(plan: Plan, itemsize: int) -> int:
    """Bytes of blocks, doubled for the pipeline, and of the buffers."""
    row = plan.row_width * itemsize
    if plan.kind == "rows":
        held = 2 * plan.entries * row
    elif plan.kind == "step":
        held = 2 * 2 * plan.entries * (plan.front + 1) * row
    else:
        held = 2 * (2 * plan.rows + plan.front * 3 + plan.rows) * row
    return held + 2 * plan.entries * (sum(w * d.itemsize for w, d in plan.outputs.values()) + 4 * LANES) + (4 << 20)
