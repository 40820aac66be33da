"""What every layer makes and reads, decided before anything is traced.

CSA2 layers differ only by which of two shared things they make: the pool (compressed KV with its index keys) and the
selection (the pool entries each query may read). The configuration names the makers by layer id; `build_plan` turns
those lists into one `LayerSpec` per layer and into `Segment`s, runs of equal groups that one scan can walk. In the generation
before, DeepSeek-V4, every layer with a pool makes its own; `build_own_pools` plans that.
Pure Python, no JAX: the plan can be printed, tested and drawn without a device. Source: arXiv 2609.19969; DeepSeek-V4.
"""

from __future__ import annotations

import dataclasses
import enum
import itertools
from collections.abc import Sequence
from typing import Final


class Mode(enum.StrEnum):
    """What a layer's attention makes and reads besides its own window."""

    SWA = "SWA"  # window only
    FULL = "FULL"  # makes pool, index keys and selection
    REINDEX = "REINDEX"  # inherits the pool, selects again
    REUSE = "REUSE"  # inherits pool and selection
    CSA = "CSA"  # V4: makes pool, index keys and selection for itself alone
    HCA = "HCA"  # V4: makes a pool for itself alone and reads all of it

    @property
    def makes_pool(self) -> bool:
        """Whether the layer compresses."""
        return self in (Mode.FULL, Mode.CSA, Mode.HCA)

    @property
    def selects(self) -> bool:
        """Whether the layer has an indexer."""
        return self in (Mode.FULL, Mode.REINDEX, Mode.CSA)


@dataclasses.dataclass(frozen=True)
class LayerSpec:
    """One layer's place in the plan; ids are layer numbers, slots are positions in the stacks of like things."""

    layer: int
    mode: Mode
    ratio: int  # tokens per pool entry; 0: no pool
    pool_source: int | None  # the FULL layer whose pool is read
    selection_source: int | None  # the FULL or REINDEX layer whose selection is used
    candidate_source: int | None  # on a REINDEX layer: whose candidate blocks bound its search
    makes_candidates: bool
    pool_slot: int  # among layers that make pools of the same ratio, -1 when it makes none
    index_slot: int  # among layers that select, -1 when it does not
    engram_slot: int  # among layers with an n-gram memory, -1 without
    draft_slot: int  # among the draft head's target layers, -1 otherwise

    @property
    def makes(self) -> tuple[str, ...]:
        """What later layers may read from this one, in words."""
        made = {
            Mode.FULL: ("pool", "index keys", "selection"),
            Mode.REINDEX: ("selection",),
            Mode.CSA: ("pool", "index keys", "selection"),
            Mode.HCA: ("pool",),
        }.get(self.mode, ())
        return made + (("candidates",) if self.makes_candidates else ())

    @property
    def reads(self) -> tuple[str, ...]:
        """What this layer takes from earlier ones, in words with the source layer."""
        if self.mode is Mode.SWA:
            return ()
        reads = [] if self.mode.makes_pool else [f"pool of {self.pool_source}"]
        if self.mode is Mode.REUSE:
            reads.append(f"selection of {self.selection_source}")
        if self.candidate_source is not None:
            reads.append(f"candidates of {self.candidate_source}")
        return tuple(reads)


@dataclasses.dataclass(frozen=True)
class Segment:
    """`len(heads)` equal groups in a row: a head layer in `mode`, then a tail: the REUSE layers that share what it made, or in
    V4 the HCA layer behind a CSA layer.

    One scan walks the groups, an inner scan the tail. `tails[i]` are the layer ids behind `heads[i]`, all of one length.
    """

    mode: Mode
    ratio: int
    heads: tuple[int, ...]
    tails: tuple[tuple[int, ...], ...]
    makes_candidates: bool
    reads_candidates: bool
    in_decoder: bool
    tail_mode: Mode = Mode.REUSE
    tail_ratio: int = 0  # of pools that tail layers make

    @property
    def tail_length(self) -> int:
        """Layers behind each head."""
        return len(self.tails[0])

    @property
    def layers(self) -> tuple[int, ...]:
        """All layer ids in walking order."""
        return tuple(i for head, tail in zip(self.heads, self.tails, strict=True) for i in (head, *tail))


@dataclasses.dataclass(frozen=True)
class Plan:
    """All layers, the segments to scan, and where the decoder starts (its head makes the one decoder pool)."""

    layers: tuple[LayerSpec, ...]
    segments: tuple[Segment, ...]
    decoder_start: int

    @property
    def ratios(self) -> tuple[int, ...]:
        """Distinct compression ratios that have pools, in order of first use."""
        return tuple(dict.fromkeys(s.ratio for s in self.layers if s.mode.makes_pool))

    def pool_layers(self, ratio: int) -> tuple[int, ...]:
        """Layers that make pools of one ratio, in pool-slot order."""
        return tuple(s.layer for s in self.layers if s.mode.makes_pool and s.ratio == ratio)

    def has_keys(self, ratio: int) -> bool:
        """Whether pools of this ratio have index keys: all but those of HCA layers."""
        return all(self.layers[i].mode.selects for i in self.pool_layers(ratio))

    @property
    def index_layers(self) -> tuple[int, ...]:
        """Layers that select, in index-slot order."""
        return tuple(s.layer for s in self.layers if s.index_slot >= 0)

    @property
    def encoder_segments(self) -> tuple[Segment, ...]:
        """Segments below the decoder."""
        return tuple(s for s in self.segments if not s.in_decoder)

    @property
    def decoder_segments(self) -> tuple[Segment, ...]:
        """Segments from the layer that makes the decoder pool upwards."""
        return tuple(s for s in self.segments if s.in_decoder)


def _check_ids(name: str, ids: Sequence[int], num_layers: int) -> None:
    if any(b <= a for a, b in itertools.pairwise(ids)):
        raise ValueError(f"{name}={list(ids)} must be strictly increasing layer ids")
    for i in ids:
        if not 0 <= i < num_layers:
            raise ValueError(f"{name}={list(ids)}: layer {i} does not exist, num_hidden_layers={num_layers}")


def build_plan(
    *,
    num_hidden_layers: int,
    compress_ratios: Sequence[int],
    kv_source_layer_ids: Sequence[int],
    index_source_layer_ids: Sequence[int],
    candidate_source_layer_id: int | None,
    engram_layer_ids: Sequence[int] = (),
    dspark_target_layer_ids: Sequence[int] = (),
) -> Plan:
    """Resolve the id lists of a configuration to a `Plan`; ValueError names the values of any list that contradicts another."""
    n = num_hidden_layers
    if len(compress_ratios) < n:
        raise ValueError(f"compress_ratios has {len(compress_ratios)} entries, num_hidden_layers={n} needs one each")
    ratios = list(compress_ratios[:n])
    for layer, ratio in enumerate(ratios):
        if ratio < 0:
            raise ValueError(f"compress_ratios[{layer}]={ratio} must be 0 (window only) or a positive number of tokens")
    for name, ids in (
        ("kv_source_layer_ids", kv_source_layer_ids),
        ("index_source_layer_ids", index_source_layer_ids),
        ("engram_layer_ids", engram_layer_ids),
        ("dspark_target_layer_ids", dspark_target_layer_ids),
    ):
        _check_ids(name, ids, n)
    if candidate_source_layer_id is not None and candidate_source_layer_id < 0:
        candidate_source_layer_id = None  # both spellings of "no candidates" occur
    kv_sources, index_sources = set(kv_source_layer_ids), set(index_source_layer_ids)
    if lost := sorted(kv_sources - index_sources):
        raise ValueError(
            f"layers {lost} are in kv_source_layer_ids={list(kv_source_layer_ids)} but not in "
            f"index_source_layer_ids={list(index_source_layer_ids)}: a selection addresses one pool, so a layer that makes a "
            "pool must also select from it"
        )
    if candidate_source_layer_id is not None and candidate_source_layer_id not in kv_sources:
        raise ValueError(
            f"candidate_source_layer_id={candidate_source_layer_id} must be one of kv_source_layer_ids="
            f"{list(kv_source_layer_ids)}: candidates are blocks of the pool that layer makes"
        )

    specs: list[LayerSpec] = []
    pool_source = selection_source = None
    slots_per_ratio: dict[int, int] = {}
    for layer, ratio in enumerate(ratios):
        makes_pool, selects = layer in kv_sources, layer in index_sources
        candidate_source = None
        if ratio == 0:
            if makes_pool or selects:
                raise ValueError(
                    f"layer {layer} has compress_ratios[{layer}]=0 (window only) but is listed in kv_source_layer_ids="
                    f"{list(kv_source_layer_ids)} or index_source_layer_ids={list(index_source_layer_ids)}"
                )
            mode = Mode.SWA
        elif makes_pool:
            mode, pool_source, selection_source = Mode.FULL, layer, layer
        else:
            mode = Mode.REINDEX if selects else Mode.REUSE
            if pool_source is None:
                raise ValueError(
                    f"layer {layer} has compress_ratios[{layer}]={ratio} but no layer at or below it is in "
                    f"kv_source_layer_ids={list(kv_source_layer_ids)}: there is no pool to read"
                )
            if ratio != ratios[pool_source]:
                raise ValueError(
                    f"compress_ratios[{layer}]={ratio} but the pool it reads is made by layer {pool_source} with "
                    f"compress_ratios[{pool_source}]={ratios[pool_source]}"
                )
            if selects:
                selection_source = layer
                if candidate_source_layer_id is not None and layer > candidate_source_layer_id:
                    if pool_source != candidate_source_layer_id:
                        raise ValueError(
                            f"layer {layer} selects from the pool of layer {pool_source}, but its candidates would come from "
                            f"candidate_source_layer_id={candidate_source_layer_id}, which numbers another pool"
                        )
                    candidate_source = candidate_source_layer_id
        swa = mode is Mode.SWA
        specs.append(
            LayerSpec(
                layer=layer,
                mode=mode,
                ratio=ratio,
                pool_source=None if swa else pool_source,
                selection_source=None if swa else selection_source,
                candidate_source=candidate_source,
                makes_candidates=layer == candidate_source_layer_id,
                pool_slot=slots_per_ratio.get(ratio, 0) if mode is Mode.FULL else -1,
                index_slot=sum(s.index_slot >= 0 for s in specs) if selects else -1,
                engram_slot=list(engram_layer_ids).index(layer) if layer in engram_layer_ids else -1,
                draft_slot=list(dspark_target_layer_ids).index(layer) if layer in dspark_target_layer_ids else -1,
            )
        )
        if mode is Mode.FULL:
            slots_per_ratio[ratio] = slots_per_ratio.get(ratio, 0) + 1
    decoder_start = kv_source_layer_ids[-1] if len(kv_source_layer_ids) else n
    return Plan(tuple(specs), _segments(specs, decoder_start), decoder_start)


OVERLAPPING: Final = 4
"""The ratio at which V4 pools over two groups and selects; at any other a layer is HCA."""


def build_own_pools(*, num_hidden_layers: int, compress_ratios: Sequence[int]) -> Plan:
    """The plan of a V4 model, by ratio: 0 window only, 4 CSA, others HCA. There is no decoder; ValueError for a bad list."""
    n = num_hidden_layers
    if len(compress_ratios) < n:
        raise ValueError(f"compress_ratios has {len(compress_ratios)} entries, num_hidden_layers={n} needs one each")
    specs: list[LayerSpec] = []
    for layer, ratio in enumerate(compress_ratios[:n]):
        if ratio < 0 or ratio == 1:
            raise ValueError(
                f"compress_ratios[{layer}]={ratio} must be 0 (window only), {OVERLAPPING} (CSA) or from 2 (HCA)"
            )
        mode = Mode.SWA if ratio == 0 else Mode.CSA if ratio == OVERLAPPING else Mode.HCA
        specs.append(
            LayerSpec(
                layer=layer,
                mode=mode,
                ratio=ratio,
                pool_source=layer if mode.makes_pool else None,
                selection_source=layer if mode.selects else None,
                candidate_source=None,
                makes_candidates=False,
                pool_slot=sum(s.ratio == ratio for s in specs) if mode.makes_pool else -1,
                index_slot=sum(s.mode.selects for s in specs) if mode.selects else -1,
                engram_slot=-1,
                draft_slot=-1,
            )
        )
    return Plan(tuple(specs), _segments(specs, n), n)


def _segments(specs: Sequence[LayerSpec], decoder_start: int) -> tuple[Segment, ...]:
    """Cut the layers into groups (a head and the layers behind it) and merge equal neighbours."""
    groups: list[tuple[LayerSpec, list[LayerSpec]]] = []
    for spec in specs:
        # A REUSE layer joins the head before it; after a window-only layer it heads a group of its own. So does an HCA layer,
        # except behind a CSA layer, with which it alternates.
        head, tail = groups[-1] if groups else (None, [])
        reuses = spec.mode is Mode.REUSE and head is not None and head.mode in (Mode.FULL, Mode.REINDEX)
        alternates = spec.mode is Mode.HCA and head is not None and head.mode is Mode.CSA
        alternates = alternates and all(behind.ratio == spec.ratio for behind in tail)
        if reuses or alternates:
            tail.append(spec)
        else:
            groups.append((spec, []))
    segments: list[Segment] = []
    for head, tail in groups:
        one = Segment(
            mode=head.mode,
            ratio=head.ratio,
            heads=(head.layer,),
            tails=(tuple(spec.layer for spec in tail),),
            tail_mode=tail[0].mode if tail else Mode.REUSE,
            tail_ratio=tail[0].ratio if tail and tail[0].mode.makes_pool else 0,
            makes_candidates=head.makes_candidates,
            reads_candidates=head.candidate_source is not None,
            in_decoder=head.layer >= decoder_start,
        )
        last = segments[-1] if segments else None
        if last is not None and _key(last) == _key(one):
            segments[-1] = dataclasses.replace(last, heads=last.heads + one.heads, tails=last.tails + one.tails)
        else:
            segments.append(one)
    return tuple(segments)


def _key(s: Segment) -> tuple:
    tail = (s.tail_mode, s.tail_ratio, s.tail_length)
    return (s.mode, s.ratio, *tail, s.makes_candidates, s.reads_candidates, s.in_decoder)
