"""Every tensor of a release-layout checkpoint, derived from the configuration alone: name, shape, dtype, where it goes.

The same list serves three readers: the loader (which stack of ours a tensor fills, at which index), the accounting of a
directory (nothing missing, nothing extra) and `csa2 inspect` (parameters and bytes by part). At the released numbers it
comes to 96,085 tensors and 510,286,023,000 bytes. DeepSeek-V4 has the same names where it has the same parts, and fp8 tiles of
128x128. Pure Python, no JAX. Source: arXiv 2609.19969 and the released file layouts.

Storage of a weight [out, in] in a quantised checkpoint (`config.quantized`):

    fp8   e4m3 [out, in]         + e8m0 `.scale` [ceil(out/32), ceil(in/32)]   one scale per 32x32 tile
    fp4   packed I8 [out, in/2]  + e8m0 `.scale` [out, ceil(in/32)]            one scale per row per 32 along K

and bf16 [out, in] otherwise (f32 where config.json's `dtype` says "float32"; the release never does). An Engram table
is e4m3 [rows, width] + e8m0 [rows, ceil(width/32)] in every checkpoint.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Final

from csa2_jax.config import ModelConfig
from csa2_jax.generations import V4
from csa2_jax.plan import LayerSpec, Mode

DTYPE_BYTES: Final[dict[str, int]] = {"BF16": 2, "F32": 4, "F8_E4M3": 1, "F8_E8M0": 1, "I8": 1, "I64": 8}
"""Storage dtypes of the release layout (safetensors spelling) and their bytes per element."""

TILE: Final = 32
"""The group length along K of fp4 weights and Engram rows, and in V4.1 rows and columns of one fp8 weight tile."""

Shape = tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor on disk and the place it fills in our stacked parameters.

    `path` is the dotted parameter path, None for a part that is accounted for but not built yet. `index` selects the
    slot in the parameter's leading stack axes: `layers.attn.wq_a.weight` with index (3,) is row 3 of [L, out, in].
    """

    name: str
    shape: Shape
    dtype: str
    part: str
    path: str | None
    index: tuple[int, ...] = ()

    def at(self, path: str) -> TensorSpec:
        """The same tensor, filling another parameter."""
        return dataclasses.replace(self, path=path)

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]

    @property
    def parameters(self) -> int:
        """Numbers a model would count: two per byte of packed fp4, none for a scale or a table of ids."""
        if self.dtype in ("F8_E8M0", "I64"):
            return 0
        return math.prod(self.shape) * (2 if self.dtype == "I8" else 1)

    @property
    def logical_shape(self) -> Shape:
        """The shape after unpacking: the last axis of packed fp4 is twice as wide."""
        return (*self.shape[:-1], 2 * self.shape[-1]) if self.dtype == "I8" else self.shape


@dataclasses.dataclass(frozen=True, slots=True)
class _Place:
    """Where a group of tensors lives: name prefix on disk, our path prefix (None: not built), stack index, part."""

    name: str
    path: str | None
    index: tuple[int, ...]
    part: str

    def plain(self, leaf: str, shape: Shape, dtype: str = "BF16", *, to: str | None = None) -> TensorSpec:
        """One tensor as it is stored; `to` renames it on our side."""
        path = None if self.path is None else f"{self.path}{leaf if to is None else to}"
        return TensorSpec(f"{self.name}{leaf}", shape, dtype, self.part, path, self.index)

    def fp8(self, leaf: str, out: int, width: int, tile: int, *, to: str | None = None) -> Iterator[TensorSpec]:
        """A linear [out, width]: e4m3 with one scale per tile, or bf16 where `tile` is 0."""
        to = leaf if to is None else to
        yield self.plain(f"{leaf}.weight", (out, width), "F8_E4M3" if tile else "BF16", to=f"{to}.weight")
        if tile:
            scales = (_ceil(out, tile), _ceil(width, tile))
            yield self.plain(f"{leaf}.scale", scales, "F8_E8M0", to=f"{to}.scale")

    def fp4(self, leaf: str, out: int, width: int, quantized: bool, *, to: str) -> Iterator[TensorSpec]:
        """An expert linear [out, width]: two e2m1 per byte along K with one scale per row per 32, or bf16."""
        if quantized and width % 2:
            raise ValueError(
                f"{self.name}{leaf}.weight would be [{out}, {width}]: packed fp4 holds two values per byte along the "
                f"last axis, so an odd width of {width} cannot be stored; choose an even hidden_size and "
                "moe_intermediate_size, or store bf16 weights"
            )
        shape = (out, width // 2) if quantized else (out, width)
        yield self.plain(f"{leaf}.weight", shape, "I8" if quantized else "BF16", to=f"{to}.weight")
        if quantized:
            yield self.plain(f"{leaf}.scale", (out, _ceil(width)), "F8_E8M0", to=f"{to}.scale")

    def part_of(self, part: str) -> _Place:
        """The same place under another human name."""
        return dataclasses.replace(self, part=part)

    def inside(self, leaf: str) -> _Place:
        """One module deeper, on disk and on our side alike."""
        return dataclasses.replace(
            self, name=f"{self.name}{leaf}.", path=None if self.path is None else f"{self.path}{leaf}."
        )


def plain_dtype(config: ModelConfig) -> str:
    """Storage of what is bf16 in the release: BF16, or F32 where an unquantised config.json declares dtype float32."""
    declared = dict(config.inert)
    dtype = declared.get("dtype", declared.get("torch_dtype"))
    return "F32" if dtype == '"float32"' and not config.quantized else "BF16"


def _ceil(n: int, tile: int = TILE) -> int:
    return -(-n // tile)


def scale_tile(shape: Shape, scales: Shape) -> tuple[int, int]:
    """Rows and columns of a weight [out, in] that share a scale: (1, 32), (32, 32) or (128, 128), from the two shapes alone.

    Shapes that allow several are of weights so small that it makes no difference. ValueError where none fits.
    """
    rows, width = shape
    for tile in ((1, TILE), (TILE, TILE), (V4.tile, V4.tile)):
        if tuple(scales) == (_ceil(rows, tile[0]), _ceil(width, tile[1])):
            return tile
    raise ValueError(f"scales of shape {list(scales)} fit no weight of shape {list(shape)}")


def _fp8_tile(c: ModelConfig) -> int:
    """Rows and columns of an fp8 tile, 0 where weights are plain."""
    return c.generation.tile if c.quantized else 0


def release_tensors(config: ModelConfig) -> Iterator[TensorSpec]:
    """Every tensor of the release layout of `config`, in reading order.

    Raises ValueError when a quantised configuration has an expert width that packed fp4 cannot hold (an odd one).
    """
    if plain_dtype(config) == "BF16":
        return _tensors(config)
    return (dataclasses.replace(t, dtype="F32") if t.dtype == "BF16" else t for t in _tensors(config))


def _tensors(c: ModelConfig) -> Iterator[TensorSpec]:
    top = _Place("", "", (), "embedding")
    yield top.plain("embed.weight", (c.vocab_size, c.hidden_size))
    for spec in c.plan.layers:
        place = _Place(f"layers.{spec.layer}.", "layers.", (spec.layer,), "attention")
        yield from _layer(c, place, c.n_routed_experts)
        if spec.mode.makes_pool:
            yield from _compressor(c, spec)
        if spec.index_slot >= 0:
            yield from _selector(c, spec)
        if spec.engram_slot >= 0:
            yield from _engram(c, spec)
    yield top.part_of("norms").plain("norm.weight", (c.hidden_size,))
    yield top.part_of("output head").plain("head.weight", (c.vocab_size, c.hidden_size))
    if c.generation.head_collapse:
        yield from _collapse(c, top.part_of("hyper-connections"), "collapse.")
    for stage in range(c.num_nextn_predict_layers):
        yield from _draft_stage(c, stage) if not c.generation.own_pools else _next_layer(c, stage)
    yield from _vision(c)


def absent_slots(config: ModelConfig) -> dict[str, frozenset[tuple[int, ...]]]:
    """Slots of our stacks that no tensor fills, by path: they stay zero. The router's bias where token ids choose the experts."""
    hashed = frozenset((layer,) for layer in range(config.num_hash_layers))
    return {"layers.ffn.gate.bias": hashed} if hashed else {}


def _collapse(c: ModelConfig, place: _Place, ours: str | None) -> Iterator[TensorSpec]:
    """How the streams are joined for a head."""
    place, n = dataclasses.replace(place, path=ours), c.hc_mult
    yield place.plain("hc_head_fn", (n, n * c.hidden_size), "F32", to="fn")
    yield place.plain("hc_head_base", (n,), "F32", to="base")
    yield place.plain("hc_head_scale", (1,), "F32", to="scale")


def _layer(c: ModelConfig, place: _Place, experts: int, part: str | None = None) -> Iterator[TensorSpec]:
    """What every layer has in every mode; a draft stage is one of these too (`part` then names it whole)."""
    d, q, tile = c.hidden_size, c.quantized, _fp8_tile(c)

    def named(name: str) -> _Place:
        return place.part_of(part or name)

    norms, attn = named("norms"), named("attention").inside("attn")
    yield norms.plain("attn_norm.weight", (d,))
    yield norms.plain("ffn_norm.weight", (d,))
    yield from attn.fp8("wq_a", c.q_lora_rank, d, tile)
    yield attn.plain("q_norm.weight", (c.q_lora_rank,))
    yield from attn.fp8("wq_b", c.num_attention_heads * c.head_dim, c.q_lora_rank, tile)
    yield from attn.fp8("wkv", c.head_dim, d, tile)
    yield attn.plain("kv_norm.weight", (c.head_dim,))
    yield attn.plain("attn_sink", (c.num_attention_heads,), "F32")
    yield from attn.fp8("wo_a", c.o_groups * c.o_lora_rank, c.num_attention_heads * c.head_dim // c.o_groups, tile)
    yield from attn.fp8("wo_b", d, c.o_groups * c.o_lora_rank, tile)

    gate = named("router").inside("ffn").inside("gate")
    yield gate.plain("weight", (experts, d))
    if part is None and place.index[0] < c.num_hash_layers:
        yield gate.plain("tid2eid", (c.vocab_size, c.num_experts_per_tok), "I64").at("layers.ffn.by_token")
    else:
        yield gate.plain("bias", (experts,), "F32")
    if c.has_vision:
        yield gate.plain("bias_vl", (experts,), "F32")
    routed = named("routed experts").inside("ffn").inside("experts")
    for expert in range(experts):
        one = dataclasses.replace(routed, index=(*place.index, expert))
        for leaf, out, width in _expert_linears(c):
            yield from one.fp4(f"{expert}.{leaf}", out, width, q, to=leaf)
    shared = named("shared experts").inside("ffn").inside("shared_experts")
    for leaf, out, width in _expert_linears(c):
        yield from shared.fp8(leaf, out, width, tile)

    streams = c.hc_mult
    mixes = 2 * streams + streams * streams  # pre, post, and the stream-by-stream combination
    for site in ("hc_attn", "hc_ffn"):
        hyper = named("hyper-connections")
        yield hyper.plain(f"{site}_fn", (mixes, streams * d), "F32", to=f"{site}.fn")
        yield hyper.plain(f"{site}_base", (mixes,), "F32", to=f"{site}.base")
        yield hyper.plain(f"{site}_scale", (3,), "F32", to=f"{site}.scale")


def _expert_linears(c: ModelConfig) -> tuple[tuple[str, int, int], ...]:
    d, f = c.hidden_size, c.moe_intermediate_size
    return (("w1", f, d), ("w2", d, f), ("w3", f, d))


def _compressor(c: ModelConfig, spec: LayerSpec) -> Iterator[TensorSpec]:
    """The pool side of a layer that makes one: projections to one latent, and the index key made from it."""
    if c.generation.own_pools:
        yield from _own_pooling(c, spec)
        return
    h, j, d = c.head_dim, c.index_head_dim, c.hidden_size
    where = f"layers.{spec.layer}.attn."
    ours = f"compressors.m{spec.ratio}."
    pool = _Place(f"{where}compressor.", ours, (spec.pool_slot,), "compressor")
    yield pool.plain("wkv.weight", (h, d))
    if spec.ratio > 1:  # one token per entry needs no weighting inside its group
        yield pool.plain("wgate.weight", (h, d))
    yield pool.plain("norm.weight", (h,))
    key = _Place(f"{where}indexer.", ours, (spec.pool_slot,), "indexer")
    yield key.plain("wk.weight", (j, h))
    yield key.plain("k_norm.weight", (j,))


def _own_pooling(c: ModelConfig, spec: LayerSpec) -> Iterator[TensorSpec]:
    """V4: a pooling of the entries, and in layers that select another one of the index keys."""
    where, ours = f"layers.{spec.layer}.attn.", f"compressors.m{spec.ratio}."
    series = 2 if spec.mode is Mode.CSA else 1
    places = [(_Place(f"{where}compressor.", ours, (spec.pool_slot,), "compressor"), c.head_dim)]
    if spec.mode.selects:
        keys = _Place(f"{where}indexer.compressor.", f"{ours}keys.", (spec.pool_slot,), "indexer")
        places.append((keys, c.index_head_dim))
    for place, width in places:
        yield place.plain("wkv.weight", (series * width, c.hidden_size))
        yield place.plain("wgate.weight", (series * width, c.hidden_size))
        yield place.plain("norm.weight", (width,))
        yield place.plain("ape", (spec.ratio, series * width), "F32", to="bias")


def _selector(c: ModelConfig, spec: LayerSpec) -> Iterator[TensorSpec]:
    """The query side of a layer that selects (FULL and REINDEX)."""
    index = _Place(f"layers.{spec.layer}.attn.indexer.", "indexers.", (spec.index_slot,), "indexer")
    yield from index.fp8("wq_b", c.index_n_heads * c.index_head_dim, c.q_lora_rank, _fp8_tile(c))
    yield index.plain("weights_proj.weight", (c.index_n_heads, c.hidden_size))


def _engram(c: ModelConfig, spec: LayerSpec) -> Iterator[TensorSpec]:
    """One n-gram memory: its table, and the projection to n keys and one value."""
    slot, d, n = spec.engram_slot, c.hidden_size, c.hc_mult
    rows, width = c.engram_num_embeddings[slot], c.engram_head_dim
    where = f"layers.{spec.layer}.engram."
    table = _Place(f"{where}embed.", f"engram_tables.{slot}.", (), "engram table")
    yield table.plain("weight", (rows, width), "F8_E4M3")
    yield table.plain("scale", (rows, _ceil(width)), "F8_E8M0")
    mix = _Place(where, "engram.", (slot,), "engram")
    yield from mix.fp8("wkv", (n + 1) * d, c.engram_columns * width, _fp8_tile(c))
    yield mix.plain("q_weight", (n, d))
    yield mix.plain("k_weight", (n, d))


def _draft_stage(c: ModelConfig, stage: int) -> Iterator[TensorSpec]:
    """mtp.S: a window-only layer; the first stage owns the input projection, the last one the heads."""
    d, part = c.hidden_size, "draft head"
    yield from _layer(c, _Place(f"mtp.{stage}.", "draft.stages.", (stage,), part), c.dspark_n_routed_experts, part)
    one = _Place(f"mtp.{stage}.", "draft.", (), part)
    if stage == 0:
        yield from one.fp8("main_proj", d, len(c.dspark_target_layer_ids) * d, _fp8_tile(c))
        yield one.plain("main_norm.weight", (d,))
    if stage == c.num_nextn_predict_layers - 1:
        rank = c.dspark_markov_rank
        yield one.plain("norm.weight", (d,))
        yield one.plain("markov_head.embed.weight", (c.vocab_size, rank), to="markov_embed.weight")
        yield one.plain("markov_head.head.weight", (c.vocab_size, rank), to="markov_head.weight")
        yield one.plain("confidence_head.proj.weight", (1, d + rank), to="confidence.weight")


def _next_layer(c: ModelConfig, stage: int) -> Iterator[TensorSpec]:
    """V4's mtp.S: a window-only layer that reads the streams and the next token's embedding, with a collapse of its own.

    Described, not built yet (path None).
    """
    d, part = c.hidden_size, "draft head"
    one = _Place(f"mtp.{stage}.", None, (), part)
    for spec in _layer(c, one, c.n_routed_experts, part):
        yield dataclasses.replace(spec, index=())  # of experts too: what is not built has no stack
    for name in ("e_proj", "h_proj"):
        yield from one.fp8(name, d, d, _fp8_tile(c))
    for name in ("enorm", "hnorm", "norm"):
        yield one.plain(f"{name}.weight", (d,))
    yield from _collapse(c, one, None)


def _vision(c: ModelConfig) -> Iterator[TensorSpec]:
    """The image tower, its aligner and the three delimiter vectors: described, not built yet (path None)."""
    v, d = c.vision, c.hidden_size
    if v is None or not c.has_vision:
        return
    w = v.hidden_size
    tower = _Place("vision.", None, (), "vision")

    def linear(place: _Place, leaf: str, out: int, width: int, bias: bool) -> Iterator[TensorSpec]:
        yield place.plain(f"{leaf}.weight", (out, width))
        if bias:
            yield place.plain(f"{leaf}.bias", (out,))

    yield from linear(tower, "patch_embed.proj", w, 3 * v.patch_size**2, True)
    for block in range(v.num_hidden_layers):
        one = tower.inside(f"blocks.{block}")
        yield one.plain("norm1.weight", (w,))
        yield from linear(one, "attn.wqkv", 3 * w, w, True)
        yield from linear(one, "attn.wo", w, w, True)
        yield one.plain("norm2.weight", (w,))
        yield from linear(one, "mlp.w1", 2 * v.intermediate_size, w, False)
        yield from linear(one, "mlp.w2", w, v.intermediate_size, False)
    yield tower.plain("norm.weight", (w,))
    aligner = _Place("aligner.", None, (), "vision")
    yield from linear(aligner, "w1", d, v.downsample_ratio**2 * w, True)
    yield from linear(aligner, "w2", d, d, True)
    for name in ("image_start", "image_end", "image_newline"):
        yield _Place("", None, (), "vision").plain(name, (d,))


def unbuilt_parts(config: ModelConfig) -> dict[str, int]:
    """Tensors accounted for that fill nothing yet: name pattern -> how many, empty for a text-only checkpoint."""
    counts: dict[str, int] = {}
    own = config.generation.own_pools
    layers = (
        spec for stage in range(config.num_nextn_predict_layers if own else 0) for spec in _next_layer(config, stage)
    )
    for spec in (*layers, *_vision(config)):
        head = spec.name.split(".")[0]
        pattern = "image_*" if head.startswith("image_") else f"{head}.*"
        counts[pattern] = counts.get(pattern, 0) + 1
    return counts


@dataclasses.dataclass(frozen=True, slots=True)
class PartTotal:
    """Sums over the tensors of one part."""

    part: str
    tensors: int
    parameters: int
    nbytes: int


def part_totals(config: ModelConfig) -> tuple[PartTotal, ...]:
    """Tensors, parameters and bytes by part, largest first."""
    sums: dict[str, list[int]] = {}
    for spec in release_tensors(config):
        row = sums.setdefault(spec.part, [0, 0, 0])
        row[0] += 1
        row[1] += spec.parameters
        row[2] += spec.nbytes
    return tuple(sorted((PartTotal(part, *row) for part, row in sums.items()), key=lambda t: -t.nbytes))


def pool_entry_bytes(config: ModelConfig, mode: Mode = Mode.FULL) -> float:
    """Packed bytes of one pool entry of a layer in that mode, its index key included.

    FULL  H/2 + H/16 + J/2 + J/32: e2m1 with a scale byte per 16, key with one per 32; 288 + 68 = 356 at H = 512, J = 128
    HCA   (H - R) e4m3 + 2 R bf16 + a scale byte per 64 in whole eights; 448 + 128 + 8 = 584
    CSA   the same and the key; 584 + 68 = 652
    """
    h, j, r, group = config.head_dim, config.index_head_dim, config.qk_rope_head_dim, config.generation.kv_group
    key = j / 2 + j / 32 if mode.selects else 0.0
    if group:
        return (h - r) + 2 * r + 8 * _ceil(_ceil(h - r, group), 8) + key
    return h / 2 + h / 16 + key


def cached_bytes_per_token(config: ModelConfig) -> float:
    """Packed bytes that every further token adds to a sequence's cache: sum over layers that make pools of entry bytes / ratio.

    890.0 at the released configuration, 3,514.25 at DeepSeek-V4-Flash's. Windows do not grow with the sequence, see
    `window_bytes_per_sequence`.
    """
    makers = [spec for spec in config.plan.layers if spec.mode.makes_pool]
    return sum(pool_entry_bytes(config, spec.mode) / spec.ratio for spec in makers)


def window_bytes_per_sequence(config: ModelConfig) -> float:
    """Packed bytes of all layers' windows for one sequence: entry bytes x W slots x layers; entries H e4m3 + H/32 scale bytes.

    2,703,360 (2.70 MB) at the released configuration; draft stages keep windows of the same size each, not counted
    here. V4's entries are those of its pools without keys.
    """
    entry = pool_entry_bytes(config, Mode.HCA) if config.generation.kv_group else config.head_dim * (1 + 1 / 32)
    return entry * config.sliding_window * config.num_hidden_layers
