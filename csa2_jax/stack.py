"""The walk through the layers: the only scans, and the only place where pools, selections and candidates change hands.

A segment is a run of equal groups (see `plan`): an outer scan walks its groups, an inner scan the layers behind each head.
The scans go over layer ids and close over the stacked parameters, reading `stack[layer]`; pools ride in the carry of segments
that write them and are read in place elsewhere. With `unroll` the same bodies run layer by layer on the same stacks.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from csa2_jax.attention import Role, Shared
from csa2_jax.block import Block
from csa2_jax.compressor import Compressor
from csa2_jax.config import ModelConfig
from csa2_jax.engram import Engram, EngramTable
from csa2_jax.engram_host import FetchedRows
from csa2_jax.indexer import Indexer
from csa2_jax.layers import take_layer
from csa2_jax.learning import KEPT, Learning, Lesson
from csa2_jax.numerics import Numerics
from csa2_jax.plan import Mode, Segment
from csa2_jax.residual import collapse
from csa2_jax.state import Flow, Pool, Step, no_history, pool_name, window_history, window_tail
from kernels_pallas.storage import Entries

if TYPE_CHECKING:
    Captures = dict[str, dict[int, jax.Array]]


@dataclasses.dataclass(frozen=True)
class Weights:
    """The stacked modules a walk reads."""

    layers: Block
    compressors: dict[str, Compressor]
    indexers: Indexer | None
    engram: Engram | None
    engram_tables: Sequence[EngramTable | FetchedRows]


@dataclasses.dataclass(frozen=True)
class Walk:
    """Everything that is the same for all layers of a call."""

    config: ModelConfig
    numerics: Numerics
    weights: Weights
    step: Step
    window_LBWH: Entries | None  # None without a cache
    engram_rows: Sequence[jax.Array]  # [B, T, Y] per Engram layer
    pools_shared: bool  # pools hold one group each: every FULL layer of a ratio uses group 0
    capture: frozenset[str]
    unroll: bool
    learning: Learning | None = None  # what training wants to know of each layer
    undecided: bool = False  # how many tokens are real is known after the walk only: window tails are all their rows

    def segments(
        self, segments: Sequence[Segment], flow: Flow, pools: dict[str, Pool]
    ) -> tuple[Flow, dict[str, Pool], dict[int, jax.Array], Captures]:
        """Walk `segments` in order; returns the flow, the pools, each layer's window tail, and the captures by layer."""
        tails: dict[int, jax.Array] = {}
        captures: Captures = {}
        for segment in segments:
            flow, pools, outputs = self._segment(segment, flow, pools)
            for name, by_layer in _by_layer(segment, outputs).items():
                (tails if name == "tail" else captures.setdefault(name, {})).update(by_layer)
        return flow, pools, tails, captures

    def _segment(self, segment: Segment, flow: Flow, pools: dict[str, Pool]) -> tuple[Flow, dict[str, Pool], Any]:
        name, tail_name = pool_name(segment.ratio), pool_name(segment.tail_ratio)
        writes = {name} if segment.mode.makes_pool else set()
        tail_writes = segment.tail_length > 0 and segment.tail_mode.makes_pool
        if tail_writes:
            writes.add(tail_name)

        def group(carry: tuple[Flow, dict[str, Pool]], xs: dict[str, Any]) -> tuple[Any, Any]:
            flow, written = carry
            inside = pools | written
            flow, pool, head_out = self._layer_again(segment, segment.mode, xs["head"], flow, inside.get(name))
            if pool is not None and segment.mode.makes_pool:
                written = written | {name: pool}
            reads = written.get(name, pools.get(name))
            lesson = self._lesson(segment, xs["head"], flow, reads)
            mass_BTE = None if lesson is None else lesson.mass(head_out, xs["head"]["group"])
            tail_out = None
            if segment.tail_length:

                def behind(carry: Any, xs: dict[str, Any]) -> tuple[Any, Any]:
                    flow, mass_BTE, made = carry
                    flow, pool, out = self._layer_again(
                        segment, segment.tail_mode, xs, flow, made if tail_writes else reads
                    )
                    if lesson is not None and lesson.served and segment.tail_mode is Mode.REUSE:
                        mass_BTE = mass_BTE + lesson.mass(out, xs["group"])
                    return (flow, mass_BTE, pool if tail_writes else None), self._shown(out)

                carried = (flow, mass_BTE, written[tail_name] if tail_writes else None)
                (flow, mass_BTE, made), tail_out = self._scan(behind, carried, xs["tail"], segment.tail_length)
                if tail_writes:
                    written = written | {tail_name: made}
            if lesson is not None and mass_BTE is not None:
                head_out |= lesson.loss(head_out, mass_BTE)
            return (flow, written), (self._shown(head_out), tail_out)

        if self.learning is not None and self.learning.remat == "group":
            group = self._again(group)
        carry = (flow, {name: pools[name] for name in writes})
        (flow, written), outputs = self._scan(group, carry, self._ids(segment), len(segment.heads))
        return flow, pools | written, outputs

    def _scan(self, body: Any, carry: Any, xs: Any, length: int) -> tuple[Any, Any]:
        """lax.scan, or a plain loop when unrolling or when there is one step; outputs are stacked either way."""
        if length > 1 and not self.unroll:
            return lax.scan(body, carry, jax.tree.map(jnp.asarray, xs))
        outputs = []
        for i in range(length):
            carry, out = body(carry, jax.tree.map(operator.itemgetter(i), xs))
            outputs.append(out)
        return carry, jax.tree.map(lambda *leaves: jnp.stack(leaves), *outputs)

    def _ids(self, segment: Segment) -> dict[str, Any]:
        """What a scan walks over: layer ids and the slots of whatever its layers make or read (NumPy, so unrolling is static)."""

        def ids(layers: np.ndarray) -> dict[str, np.ndarray]:
            specs = self.config.plan.layers
            pool = [0 if self.pools_shared else max(self._group(layer), 0) for layer in layers.flat]
            table = {"layer": layers, "group": np.asarray(pool, np.int32).reshape(layers.shape)}
            for name in ("index_slot", "engram_slot", "draft_slot"):
                slots = [getattr(specs[layer], name) for layer in layers.flat]
                table[name] = np.asarray(slots, np.int32).reshape(layers.shape)
            return table

        xs: dict[str, Any] = {"head": ids(np.asarray(segment.heads, np.int32))}
        if segment.tail_length:
            xs["tail"] = ids(np.asarray(segment.tails, np.int32))
        return xs

    def _group(self, layer: int) -> int:
        source = self.config.plan.layers[layer].pool_source
        return -1 if source is None else self.config.plan.layers[source].pool_slot

    def _again(self, f: Any) -> Any:
        """`f`, computed again in the backward instead of kept; selections are kept, which cost more to find than to hold."""
        return jax.checkpoint(f, policy=jax.checkpoint_policies.save_only_these_names(*KEPT), prevent_cse=self.unroll)

    def _shown(self, out: dict[str, jax.Array]) -> dict[str, jax.Array]:
        """Without what a layer showed for training alone."""
        hidden = frozenset() if self.learning is None else self.learning.captures - self.capture
        return {name: a for name, a in out.items() if name not in hidden}

    def _lesson(self, segment: Segment, ids: dict[str, Any], flow: Flow, pool: Pool | None) -> Lesson | None:
        """What the selection of a group's head is taught, if it is."""
        learning = self.learning
        if learning is None or learning.index is None or pool is None or not segment.mode.selects:
            return None
        bound = segment.makes_candidates or segment.reads_candidates
        return Lesson(
            learning,
            pool,
            ids["group"],
            segment.ratio,
            flow.selection_BTK,
            flow.candidates_BTC if bound else None,
            self.step,
            self.config,
        )

    def _layer_again(
        self, segment: Segment, mode: Mode, ids: dict[str, Any], flow: Flow, pool: Pool | None
    ) -> tuple[Flow, Pool | None, dict[str, jax.Array]]:
        """`_layer`, computed again in the backward where training asks for that."""

        def run(flow: Flow, pool: Pool | None) -> tuple[Flow, Pool | None, dict[str, jax.Array]]:
            return self._layer(segment, mode, ids, flow, pool)

        remat = self.learning is not None and self.learning.remat == "layer"
        return (self._again(run) if remat else run)(flow, pool)

    def _layer(
        self, segment: Segment, mode: Mode, ids: dict[str, Any], flow: Flow, pool: Pool | None
    ) -> tuple[Flow, Pool | None, dict[str, jax.Array]]:
        """Engram and copy-mean, where the layer has them, then its block."""
        config, weights, step = self.config, self.weights, self.step
        x_BTSD = self._engram(segment, mode, ids["engram_slot"], flow.x_BTSD)
        main_BTQD = self._copy_mean(segment, mode, ids["draft_slot"], x_BTSD, flow.main_BTQD)
        in_tail = mode is segment.tail_mode and mode is not segment.mode
        ratio = segment.tail_ratio if in_tail and mode.makes_pool else segment.ratio
        makes = weights.compressors[pool_name(ratio)] if mode.makes_pool else None
        role = Role(
            mode=mode,
            ratio=ratio,
            group=ids["group"],
            compressor=None if makes is None else take_layer(makes, self._pool_slot(ids)),
            indexer=take_layer(weights.indexers, ids["index_slot"]) if mode.selects else None,
            makes_candidates=mode is Mode.FULL and segment.makes_candidates,
            reads_candidates=mode is Mode.REINDEX and segment.reads_candidates,
            in_decoder=segment.in_decoder,
        )
        if self.window_LBWH is None:
            history_BWH: Entries = no_history(x_BTSD.shape[0], config.head_dim, self.numerics.dtype)
        else:
            history_BWH = window_history(self.window_LBWH, ids["layer"], step.start_B)
        x_BTSD, pre_BTS, kv_BTH, shared, seen = take_layer(weights.layers, ids["layer"])(
            x_BTSD,
            flow.pre_BTS,
            ids["layer"],
            history_BWH,
            role,
            Shared(pool, flow.selection_BTK, flow.candidates_BTC),
            step,
            config,
            self.numerics,
            self.capture if self.learning is None else self.capture | self.learning.captures,
        )
        if self.learning is not None:
            seen |= self.learning.of_experts(seen, config.n_routed_experts)
        out = seen | (
            {} if self.window_LBWH is None else {"tail": kv_BTH if self.undecided else self._window_tail(kv_BTH)}
        )
        flow = Flow(x_BTSD, pre_BTS, main_BTQD, shared.selection_BTK, shared.candidates_BTC)
        return flow, shared.pool, out

    def _window_tail(self, kv_BTH: jax.Array) -> jax.Array:
        return window_tail(kv_BTH, self.step.count_B, self.config.sliding_window)

    def _pool_slot(self, ids: dict[str, Any]) -> Any:
        """The compressor's place in its stack: the pool group, except where all pools share group 0."""
        if not self.pools_shared:
            return ids["group"]
        slots = np.asarray([max(spec.pool_slot, 0) for spec in self.config.plan.layers], np.int32)
        return slots[ids["layer"]] if isinstance(ids["layer"], np.integer) else jnp.asarray(slots)[ids["layer"]]

    def pool_only(self, flow: Flow, pools: dict[str, Pool]) -> dict[str, Pool]:
        """What tokens leave in the decoder that no decoder query will read the windows of: their entries in its pool.

        Of the decoder's first layer this takes what stands before its pool: n-gram memory where it has one, the collapse (which
        gives H_20), the norm and the compressor.
        """
        config, weights, layer = self.config, self.weights, self.config.plan.decoder_start
        spec = config.plan.layers[layer]
        name, block = pool_name(spec.ratio), take_layer(weights.layers, layer)
        segment = config.plan.decoder_segments[0]
        x_BTSD = self._engram(segment, segment.mode, np.int32(spec.engram_slot), flow.x_BTSD)
        x_BTD = collapse(x_BTSD, flow.pre_BTS, self.numerics)
        x_BTD = block.attn_norm(x_BTD, config.rms_norm_eps, self.numerics)
        compressor = take_layer(weights.compressors[name], spec.pool_slot)
        pool, _ = compressor(x_BTD, pools[name], spec.pool_slot, self.step, config, self.numerics)
        return pools | {name: pool}

    def _has(self, segment: Segment, mode: Mode, slot: str) -> bool:
        """Whether any layer at this place of the segment has the feature, so that the others need not trace it."""
        tail = mode is segment.tail_mode and mode is not segment.mode
        layers = [i for t in segment.tails for i in t] if tail else segment.heads
        return any(getattr(self.config.plan.layers[i], slot) >= 0 for i in layers)

    def _engram(self, segment: Segment, mode: Mode, slot: Any, x_BTSD: jax.Array) -> jax.Array:
        if not self._has(segment, mode, "engram_slot"):
            return x_BTSD
        engram, step = self.weights.engram, self.step

        def apply(i: int) -> Any:
            module = take_layer(engram, i)
            table, rows = self.weights.engram_tables[i], self.engram_rows[i]
            return lambda x: module(x, rows, table, step.image_BT, self.config, self.numerics)

        if isinstance(slot, np.integer):
            return apply(int(slot))(x_BTSD) if slot >= 0 else x_BTSD
        branches = [lambda x: x, *(apply(i) for i in range(len(self.engram_rows)))]
        return lax.switch(slot + 1, branches, x_BTSD)

    def _copy_mean(
        self, segment: Segment, mode: Mode, slot: Any, x_BTSD: jax.Array, main_BTQD: jax.Array | None
    ) -> jax.Array | None:
        """Record the mean over streams in the target's place; other layers write out of range, which is dropped."""
        if main_BTQD is None or not self._has(segment, mode, "draft_slot"):
            return main_BTQD
        mean = self.numerics.cast(jnp.mean(x_BTSD.astype(jnp.float32), axis=2))
        slot = jnp.where(jnp.asarray(slot) < 0, main_BTQD.shape[2], slot)
        return main_BTQD.at[:, :, slot].set(mean, mode="drop")


def _by_layer(segment: Segment, outputs: Any) -> dict[str, dict[int, jax.Array]]:
    """Scan outputs (head [n, ...], tail [n, r, ...]) as name -> layer -> array."""
    head_out, tail_out = outputs
    found: dict[str, dict[int, jax.Array]] = {}
    for name, stacked in head_out.items():
        found.setdefault(name, {}).update({layer: stacked[i] for i, layer in enumerate(segment.heads)})
    for name, stacked in (tail_out or {}).items():
        for i, tail in enumerate(segment.tails):
            found.setdefault(name, {}).update({layer: stacked[i, j] for j, layer in enumerate(tail)})
    return found


def stack_tails(tails: dict[int, jax.Array]) -> jax.Array:
    """Window tails of the layers that ran, 0 to L - 1, as [L, B, R, H]."""
    return jnp.stack([tails[layer] for layer in range(len(tails))])
