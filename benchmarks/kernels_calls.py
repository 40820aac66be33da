"""The calls that are measured, as data: sizes, inputs, what is called, and what it costs at least.

    bytes     every array read or written once; of a pool, the entries that are read at all
    gathered  the same with every query fetching its own rows, which is what happens where no cache holds them
    flops     multiplications and additions of the dot products, two each

Neither counts exponentials, sorting, or unpacking.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Final, Literal

import jax
import jax.numpy as jnp
import numpy as np

from kernels_pallas import compress_entries, formats, index_select, sparse_attention, storage
from kernels_pallas.formats import Format
from kernels_pallas.storage import Entries

Door = Literal["sparse_attention", "sparse_attention backward", "index_select", "compress"]
Storage = Literal["f32", "bf16", "packed"]
DOORS: Final[tuple[Door, ...]] = ("sparse_attention", "sparse_attention backward", "index_select", "compress")
K4, K64, M1 = 1 << 12, 1 << 16, 1 << 20


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Widths of a model; the defaults are those of DeepSeek-V4.1-Flash."""

    heads: int = 64
    width: int = 512
    topk: int = 512
    window: int = 128
    index_heads: int = 32
    index_width: int = 128
    blocks: int = 2048
    block: int = 8
    ratio: int = 2


TINY: Final = Sizes(heads=2, width=32, topk=5, window=4, index_heads=3, index_width=32, blocks=3, block=4)


@dataclasses.dataclass(frozen=True)
class Cost:
    """See the module."""

    bytes: int
    gathered: int
    flops: int

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.bytes + other.bytes, self.gathered + other.gathered, self.flops + other.flops)


@dataclasses.dataclass(frozen=True)
class Call:
    """One door, called with `batch` rows of `tokens` queries against `entries` pool entries each.

    kind: of an index selection, "select", "make" or "among" candidates.
    """

    door: Door
    batch: int
    tokens: int
    entries: int
    storage: Storage
    kind: str = ""
    sizes: Sizes = Sizes()

    @property
    def name(self) -> str:
        """How tables and records call it."""
        parts = [self.door, self.kind, f"B={self.batch}", f"T={self.tokens}"]
        parts += [f"P={self.entries:,}"] if self.entries else []
        return " ".join(part for part in (*parts, self.storage) if part)

    @property
    def for_tuning(self) -> bool:
        """Whether tile sizes are chosen by it: full batches and long chunks, where a device is busy; pools of 64k entries."""
        busy = self.batch * self.tokens >= 64 or self.sizes == TINY
        return busy and self.entries <= K64 and self.kind in ("", "select")

    @property
    def dtype(self) -> Any:
        """Of queries."""
        return jnp.float32 if self.storage == "f32" else jnp.bfloat16

    def cost(self) -> Cost:
        """What the call reads, writes and multiplies."""
        return _COSTS[self.door](self)

    def inputs(self, seed: int, *, in_rows: bool = False) -> tuple[Any, ...]:
        """Arguments of `function`, the stored entries (if any) last. in_rows: as TPUs hold them."""
        return _INPUTS[self.door](self, np.random.default_rng(seed), in_rows)

    def function(self, implementation: str | None, *, interpret: bool = False) -> Callable[..., Any]:
        """What is measured: arrays in, arrays out."""
        return functools.partial(
            _FUNCTIONS[self.door], self, {"implementation": implementation, "interpret": interpret}
        )


def released(doors: tuple[Door, ...] = DOORS) -> tuple[Call, ...]:
    """Calls at the released sizes: decoding one token and prefilling a chunk."""
    both: tuple[Storage, ...] = ("bf16", "packed")
    attention = [
        Call("sparse_attention", b, t, p, s)
        for b, t, p in ((1, 1, K4), (1, 1, K64), (1, 1, M1), (64, 1, K64), (1, 4096, K64), (1, 4096, M1), (64, 64, K64))
        for s in both
    ]
    backward = [Call("sparse_attention backward", b, t, p, "bf16") for b, t, p in ((1, 4096, K4), (1, 4096, K64))]
    index = [
        Call("index_select", b, t, p, s, kind)
        for kind in ("select", "make", "among")
        for b, t, p in ((1, 1, K64), (1, 1, M1), (64, 1, K64), (1, 4096, K64))
        for s in both
    ]
    pooling = [Call("compress", b, t, 0, "packed") for b, t in ((64, 2), (64, 64), (1, 4096))]
    return tuple(call for call in (*attention, *backward, *index, *pooling) if call.door in doors)


def for_cpu(doors: tuple[Door, ...] = DOORS) -> tuple[Call, ...]:
    """Calls that a CPU does in well under a second each, in float32."""
    calls = (
        Call("sparse_attention", 1, 1, K64, "f32"),
        Call("sparse_attention", 1, 64, K4, "f32"),
        Call("index_select", 1, 1, K64, "f32", "select"),
        Call("index_select", 1, 16, K64, "f32", "select"),
        Call("index_select", 1, 1, M1, "f32", "among"),
        Call("compress", 1, 4096, 0, "f32"),
    )
    return tuple(call for call in calls if call.door in doors)


def tiny(doors: tuple[Door, ...] = DOORS, stored: Storage = "f32") -> tuple[Call, ...]:
    """Calls small enough for a test, and for the interpreter."""
    calls = (
        Call("sparse_attention", 2, 3, 16, stored, sizes=TINY),
        Call("sparse_attention backward", 1, 2, 16, stored, sizes=TINY),
        Call("index_select", 2, 3, 32, stored, "select", sizes=TINY),
        Call("index_select", 2, 3, 32, stored, "make", sizes=TINY),
        Call("index_select", 1, 2, 32, stored, "among", sizes=TINY),
        Call("compress", 2, 6, 0, stored, sizes=TINY),
    )
    return tuple(call for call in calls if call.door in doors)


# ---- costs ----


def entry_bytes(width: int, stored: Storage, fmt: Format) -> int:
    """Bytes of one stored entry."""
    if stored == "packed":
        return width // 2 + width // fmt.group
    return width * (4 if stored == "f32" else 2)


def _read_entries(call: Call, per_query: int, width: int, fmt: Format) -> tuple[int, int]:
    """Bytes of pool entries: each once, and as every query fetches its own."""
    size = entry_bytes(width, call.storage, fmt)
    once = call.batch * min(call.tokens * per_query, call.entries)
    return once * size, call.batch * call.tokens * min(per_query, call.entries) * size


def _attention_cost(call: Call) -> Cost:
    sizes, queries = call.sizes, call.batch * call.tokens
    number = jnp.dtype(call.dtype).itemsize
    window = call.batch * (sizes.window + call.tokens) * sizes.width * number
    # Queries and outputs; log-sum-exp; selection; window rows.
    fixed = 2 * queries * sizes.heads * sizes.width * number + 4 * queries * (sizes.heads + sizes.topk) + window
    once, gathered = _read_entries(call, sizes.topk, sizes.width, formats.MAIN)
    read = min(sizes.topk, call.entries) + sizes.window
    return Cost(fixed + once, fixed + gathered, 4 * queries * sizes.heads * sizes.width * read)


def _backward_cost(call: Call) -> Cost:
    """Forward and backward: what a training step pays. The backward has five dot products to the forward's two."""
    sizes, queries = call.sizes, call.batch * call.tokens
    number = jnp.dtype(call.dtype).itemsize
    read = min(sizes.topk, call.entries) + sizes.window
    # Queries, their cotangents and those of the outputs; log-sum-exp and shift; selection; window rows and their cotangents.
    fixed = 3 * queries * sizes.heads * sizes.width * number + 4 * queries * (2 * sizes.heads + sizes.topk)
    fixed += call.batch * (sizes.window + call.tokens) * sizes.width * (number + 4)
    once, gathered = _read_entries(call, sizes.topk, sizes.width, formats.MAIN)
    pool = 4 * call.batch * call.entries * sizes.width  # the f32 cotangent of a pool is written whole
    added = 2 * 4 * queries * min(sizes.topk, call.entries) * sizes.width  # and read and written per row that is added
    flops = 10 * queries * sizes.heads * sizes.width * read
    return _attention_cost(call) + Cost(fixed + once + pool, fixed + gathered + pool + added, flops)


_QUERIES_TOGETHER = 128  # that share one pass over the keys


def _index_cost(call: Call) -> Cost:
    sizes, queries = call.sizes, call.batch * call.tokens
    number = jnp.dtype(call.dtype).itemsize
    fixed = queries * sizes.index_heads * (sizes.index_width + 1) * number + 4 * queries * (1 + sizes.topk)
    if call.kind in ("make", "among"):
        fixed += 4 * queries * sizes.blocks
    if call.kind == "among":
        scored = min(sizes.blocks * sizes.block, call.entries)
        once, gathered = _read_entries(call, scored, sizes.index_width, formats.INDEX)
    else:
        scored = call.entries
        once, _ = _read_entries(call, scored, sizes.index_width, formats.INDEX)
        gathered = once * -(-call.tokens // _QUERIES_TOGETHER)
    return Cost(fixed + once, fixed + gathered, 2 * queries * sizes.index_heads * sizes.index_width * scored)


def _compress_cost(call: Call) -> Cost:
    sizes, tokens = call.sizes, call.batch * call.tokens
    made = call.batch * -(-call.tokens // sizes.ratio)
    waiting = 2 * 2 * 4 * call.batch * (sizes.ratio - 1) * sizes.width  # C and Z, in and out
    entry = entry_bytes(sizes.width, call.storage, formats.MAIN) + jnp.dtype(call.dtype).itemsize * sizes.width
    bytes_ = 2 * 4 * tokens * sizes.width + waiting + made * entry
    return Cost(bytes_, bytes_, 2 * tokens * sizes.width)


_COSTS: Final[dict[Door, Callable[[Call], Cost]]] = {
    "sparse_attention": _attention_cost,
    "sparse_attention backward": _backward_cost,
    "index_select": _index_cost,
    "compress": _compress_cost,
}


# ---- inputs ----


def _normal(rng: np.random.Generator, dtype: Any, *shape: int) -> jax.Array:
    return jnp.asarray(rng.standard_normal(shape, np.float32), dtype)


def _whole(rng: np.random.Generator, dtype: Any, *shape: int, span: int = 3) -> jax.Array:
    """Small whole numbers: their products and sums are exact in every order, so that equal scores are equal everywhere."""
    return jnp.asarray(rng.integers(-span, span, shape, np.int8, endpoint=True), dtype)


def _store(call: Call, numbers: Callable[[int], jax.Array], fmt: Format, in_rows: bool) -> Entries:
    """Entries [1, B, P, H] of `numbers(p)`, f32 [p, H]: made for 64k entries and one row, and repeated from there."""
    made = numbers(min(call.entries, K64))[None, None]
    if call.storage == "packed":
        entries: Entries = storage.pack(made, fmt, units=in_rows)
    elif in_rows and made.shape[-1] > storage.LANES:
        entries = made.reshape(*made.shape[:3], -1, storage.LANES).astype(call.dtype)
    else:
        entries = made.astype(call.dtype)
    times = call.entries // made.shape[2]
    return jax.tree.map(lambda a: jnp.tile(a, (1, call.batch, times, *[1] * (a.ndim - 3))), entries)


def _choose(rng: np.random.Generator, shape: tuple[int, int], count: int, of: int) -> jax.Array:
    """`count` different numbers below `of` for every query, ascending: one of each stretch of of / count."""
    count = min(count, of)
    edges = np.arange(count + 1) * of // count
    return jnp.asarray(rng.integers(edges[:-1], edges[1:], (*shape, count)).astype(np.int32))


def _attention_inputs(call: Call, rng: np.random.Generator, in_rows: bool) -> tuple[Any, ...]:
    sizes, lead = call.sizes, (call.batch, call.tokens)
    return (
        _normal(rng, call.dtype, *lead, sizes.heads, sizes.width),
        _normal(rng, call.dtype, call.batch, sizes.window + call.tokens, sizes.width),
        jnp.broadcast_to(1 + jnp.arange(call.tokens, dtype=jnp.int32), lead),  # query t reads rows t + 1 .. t + W
        _normal(rng, jnp.float32, sizes.heads),
        _choose(rng, lead, sizes.topk, call.entries),
        _store(call, lambda p: _normal(rng, jnp.float32, p, sizes.width), formats.MAIN, in_rows),
    )


def _backward_inputs(call: Call, rng: np.random.Generator, in_rows: bool) -> tuple[Any, ...]:
    args = _attention_inputs(call, rng, in_rows)
    return (_normal(rng, call.dtype, *args[0].shape), *args)


def _index_inputs(call: Call, rng: np.random.Generator, in_rows: bool) -> tuple[Any, ...]:
    sizes, lead = call.sizes, (call.batch, call.tokens)
    args = (
        _whole(rng, call.dtype, *lead, sizes.index_heads, sizes.index_width, span=1),
        _whole(rng, call.dtype, *lead, sizes.index_heads),
        jnp.full(lead, call.entries, jnp.int32),
    )
    if call.kind == "among":
        args = (*args, _choose(rng, lead, sizes.blocks, -(-call.entries // sizes.block)))
    return (*args, _store(call, lambda p: _whole(rng, jnp.float32, p, sizes.index_width), formats.INDEX, in_rows))


def _compress_inputs(call: Call, rng: np.random.Generator, in_rows: bool) -> tuple[Any, ...]:
    del in_rows
    sizes, b, t = call.sizes, call.batch, call.tokens
    rows = (_normal(rng, jnp.float32, b, t, sizes.width) for _ in range(2))
    waiting = (_normal(rng, jnp.float32, b, sizes.ratio - 1, sizes.width) for _ in range(2))
    angle = rng.uniform(0, 6, (b, -(-t // sizes.ratio), sizes.width // 8)).astype(np.float32)
    counts = (jnp.arange(b, dtype=jnp.int32) % sizes.ratio, jnp.full(b, t, jnp.int32))
    norm = 1 + 0.1 * _normal(rng, jnp.float32, sizes.width)
    return (*rows, *waiting, *counts, norm, jnp.cos(angle), jnp.sin(angle))


_INPUTS: Final[dict[Door, Callable[[Call, np.random.Generator, bool], tuple[Any, ...]]]] = {
    "sparse_attention": _attention_inputs,
    "sparse_attention backward": _backward_inputs,
    "index_select": _index_inputs,
    "compress": _compress_inputs,
}


# ---- functions ----


def _attend(
    call: Call, how: dict[str, Any], q: Any, window: Any, first: Any, sink: Any, selection: Any, pool: Any
) -> tuple[jax.Array, jax.Array]:
    sizes = call.sizes
    return sparse_attention(
        *(q, window, first, sink, pool, 0, selection), window=sizes.window, scale=sizes.width**-0.5, **how
    )


def _attend_and_back(
    call: Call, how: dict[str, Any], do: Any, q: Any, window: Any, first: Any, sink: Any, selection: Any, pool: Any
) -> tuple[Any, ...]:
    def forward(q: Any, window: Any, sink: Any, pool: Any) -> jax.Array:
        return _attend(call, how, q, window, first, sink, selection, pool)[0]

    o, pull = jax.vjp(forward, q, window, sink, pool)
    return (o, *pull(do))


def _select(call: Call, how: dict[str, Any], q: Any, w: Any, visible: Any, *rest: Any) -> tuple[Any, ...]:
    sizes, options = call.sizes, dict(how)
    *candidates, keys = rest
    if call.kind != "select":
        options["block_size"] = sizes.block
    if call.kind == "make":
        options["make_candidates"] = sizes.blocks
    if candidates:
        options["candidates_BTC"] = candidates[0]
    made = index_select(q, w, keys, 0, visible, topk=sizes.topk, **options)
    return tuple(a for a in made if a is not None)


def _compress(call: Call, how: dict[str, Any], *args: Any) -> tuple[Any, ...]:
    *_, phase, count, norm, cos, sin = args
    kept: dict[str, Any] = {"storage": "packed"} if call.storage == "packed" else {"storage": "plain"}
    done = compress_entries(
        *(args[0], args[1], args[2], args[3], phase, count, norm, (cos, sin)),
        **{"ratio": call.sizes.ratio, "eps": 1e-20, "dtype": call.dtype, "entry_dtype": call.dtype, **kept, **how},
    )
    complete = (phase + count) // call.sizes.ratio  # what lies behind the complete entries is unspecified
    seen = jnp.arange(done.latent_BEH.shape[1]) < complete[:, None]
    entries = jax.tree.map(lambda a: a if a.ndim == 3 else a[0], done.entries_BEH)
    stored = jax.tree.leaves(entries)
    return tuple(jnp.where(seen[..., None], a, jnp.zeros_like(a)) for a in (done.latent_BEH, *stored))


_FUNCTIONS: Final[dict[Door, Callable[..., Any]]] = {
    "sparse_attention": _attend,
    "sparse_attention backward": _attend_and_back,
    "index_select": _select,
    "compress": _compress,
}
