"""Replay of a recorded run through our model: end to end, and module by module from recorded inputs."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from csa2_jax.attention import Role, Shared
from csa2_jax.bound import forward
from csa2_jax.config import ModelConfig
from csa2_jax.dspark import attend_draft
from csa2_jax.generation import draft
from csa2_jax.layers import take_layer
from csa2_jax.model import Model
from csa2_jax.numerics import Numerics
from csa2_jax.plan import LayerSpec, Mode
from csa2_jax.recording import (
    Comparison,
    Recording,
    as_f32,
    compare_caches,
    compare_draft,
    compare_layer,
    relative_errors,
)
from csa2_jax.state import Cache, Pool, Step, init_cache, pool_name, window_history
from kernels_pallas.storage import Entries

_CAPTURE = (
    *("attn_in", "attn_q", "attn_o", "attn_out", "latent", "selections", "candidates", "index_scores"),
    *("ffn_in", "ffn_out", "gate_idx", "gate_w", "hidden", "pre_mix", "engram_rows"),
)


def compare_end_to_end(recording: Recording, model: Model, *, storage: str = "f32") -> Iterator[Comparison]:
    """Prefill and every decode step (teacher forced), each quantity the trace holds, drafts and caches included."""
    config = recording.config
    has_draft = config.num_nextn_predict_layers > 0
    cache = init_cache(config, recording.tokens.shape[0], recording.tokens.shape[1], storage, draft=has_draft)  # type: ignore[arg-type]
    capture = (*_CAPTURE, *(("main_hidden",) if has_draft else ()))
    for step in recording.steps:
        out, cache = forward(model, recording.step_tokens(step), cache, capture=capture)
        logits = np.asarray(out.logits)
        if (whole := recording.get(step, "logits_all")) is not None:
            yield Comparison("logits", step, None, relative_errors(logits, whole))
        if (last := recording.get(step, "logits")) is not None:
            yield Comparison("logits", step, None, relative_errors(logits[:, -1], last))
            yield Comparison("argmax", step, None, equal=logits[:, -1].argmax(-1) == last.argmax(-1))
        if (main := recording.get(step, "main_hidden")) is not None and has_draft:
            yield Comparison("main_hidden", step, None, relative_errors(as_f32(out.captured["main_hidden"]), main))
        for spec in config.plan.layers:
            of_layer = {n: v[spec.layer] for n, v in out.captured.items() if n != "main_hidden" and spec.layer in v}
            yield from compare_layer(recording, step, spec, of_layer)
        yield from compare_caches(recording, step, cache)
        ids = recording.get(step, "ids")
        if has_draft and ids is not None and recording.get(step, "draft_ids") is not None:
            yield from compare_draft(recording, step, draft(model, ids, cache))


# ---- module by module ----


def compare_modules(recording: Recording, model: Model) -> Iterator[Comparison]:
    """Each module fed with its recorded input: attention, feed-forward, Engram, hyper-connections.

    A step is replayed where the caches before it are known: the prefill always, a decode step if the trace holds the caches
    of the step before. Selections are our own, made from the recorded inputs.
    """
    modules = _Modules(recording, model)
    for before, step in zip((None, *recording.steps), recording.steps, strict=False):
        if recording.layer(step, 0, "attn_in") is None:
            continue
        cache = modules.cache_after(before)
        if cache is not None:
            yield from modules.replay(step, cache)
    for step in recording.steps:
        yield from modules.replay_draft(step)


class _Modules:
    def __init__(self, recording: Recording, model: Model) -> None:
        self.recording, self.config, self.numerics = recording, recording.config, model.numerics
        self.graphdef, self.state = nnx.split(model)
        self.draft = None if model.draft is None else nnx.split(model.draft)

    def cache_after(self, step: str | None) -> Cache | None:
        """The recorded caches as ours; None if the trace lacks any of them."""
        config, recording = self.config, self.recording
        cache = init_cache(config, recording.tokens.shape[0], recording.tokens.shape[1], "f32")
        if step is None:
            return cache
        windows = [recording.layer(step, layer, "window_kv_cache") for layer in range(config.num_hidden_layers)]
        if any(w is None for w in windows):
            return None
        pools = {name: jax.tree.map(np.array, pool) for name, pool in cache.pools.items()}
        total = sum(recording.consumed(step))
        for spec in config.plan.layers:
            if spec.mode is not Mode.FULL:
                continue
            pool, held, open_rows = pools[pool_name(spec.ratio)], total // spec.ratio, total % spec.ratio
            for array, key, rows in (
                (pool.kv_GBPH.reshape(*pool.kv_GBPH.shape[:3], -1), "compress_kv_cache", held),
                (pool.key_GBPJ, "index_k_cache", held),
                (None if pool.half_YGBMH is None else pool.half_YGBMH[0], "kv_state", open_rows),
                (None if pool.half_YGBMH is None else pool.half_YGBMH[1], "score_state", open_rows),
            ):
                reference = recording.layer(step, spec.layer, key)
                if reference is None and rows:
                    return None
                if reference is not None and array is not None:
                    array[spec.pool_slot][:, :rows] = reference[:, :rows]
        history = config.engram_max_ngram_size - 1
        token_map = recording.get("engram", "token_map")
        ngram = cache.ngram_BE
        if history > 0 and token_map is not None:
            ids = np.concatenate(
                [np.full((len(recording.tokens), history), -1), token_map[recording.tokens[:, :total]]], axis=1
            )
            ngram = jnp.asarray(ids[:, -history:], jnp.int32)
        return dataclasses.replace(
            cache,
            length_B=jnp.full(len(recording.tokens), total, jnp.int32),
            window_LBWH=jnp.asarray(np.stack([w for w in windows if w is not None])),
            pools=jax.tree.map(jnp.asarray, pools),
            ngram_BE=ngram,
        )

    def replay(self, step: str, cache: Cache) -> Iterator[Comparison]:
        """All layers of one step, in order; pools, selections and candidates are handed on as in a forward."""
        recording, config = self.recording, self.config
        tokens = jnp.asarray(recording.step_tokens(step))
        pools: dict[str, Pool] = dict(cache.pools)
        batch, count = tokens.shape
        selection = jnp.full((batch, count, config.index_topk), -1, jnp.int32)
        agree = np.ones((batch, count), bool)
        candidates = jnp.full(
            (batch, count, config.candidate_topk_blocks if config.has_candidates else 0), -1, jnp.int32
        )
        for spec in config.plan.layers:
            layer = spec.layer
            # The residual streams this layer starts from: behind Engram if it has one, else behind the layer below.
            streams = recording.layer(step, layer, "engram_h") if spec.engram_slot >= 0 else None
            below = recording.layer(step, layer - 1, "h") if layer else None
            if spec.engram_slot >= 0 and streams is not None and below is not None:
                ours = self._run_engram(spec.engram_slot, tokens, cache, self._in(below))
                yield Comparison("engram_h", step, layer, relative_errors(as_f32(ours), streams))
            group = config.plan.layers[spec.pool_source].pool_slot if spec.pool_source is not None else 0
            name = pool_name(spec.ratio)
            inputs = (tokens, cache, pools.get(name), jnp.asarray(group), selection, candidates)
            places = {"layer": layer, "index": max(spec.index_slot, 0)}
            yield from self._residual(step, spec, streams if streams is not None else below)
            attn_in = recording.layer(step, layer, "attn_in")
            if attn_in is None:
                return  # later layers would miss what this one makes
            pool, selection, candidates, seen = self._run_attention(_kind(spec), places, *inputs, self._in(attn_in))
            if pool is not None:
                pools[name] = pool
            agree = np.ones((batch, count), bool) if spec.mode is Mode.SWA else agree
            made = {key: value for key, value in seen.items() if key != "attn_in"}  # that is the input
            for comparison in compare_layer(recording, step, spec, made):
                if comparison.quantity == "index_idx" and comparison.equal is not None:
                    agree = np.asarray(comparison.equal.all(axis=-1))
                yield comparison
            yield from self._where_selections_agree(step, layer, seen, agree)
            ffn_in = recording.layer(step, layer, "ffn_in")
            if ffn_in is not None:
                y, made = self._run_ffn(layer, self._in(ffn_in))
                yield from compare_layer(recording, step, spec, {"ffn_out": y} | made)

    def replay_draft(self, step: str) -> Iterator[Comparison]:
        """The draft stages of a step whose windows after it are recorded (they hold the step's own token)."""
        if self.draft is None:
            return
        length_B = jnp.full(len(self.recording.tokens), sum(self.recording.consumed(step)), jnp.int32)
        for stage in range(self.config.num_nextn_predict_layers):
            get = functools.partial(self.recording.get, step, f"M{stage}")
            inputs = [get(name) for name in ("attn_in", "ffn_in", "window_kv_cache")]
            if any(a is None for a in inputs):
                continue
            attn_in, ffn_in, window = (self._in(a) for a in inputs if a is not None)
            graphdef, state = self.draft
            arrays = (stage, attn_in, ffn_in, window[None], length_B)
            made = _draft_stage(graphdef, self.config, self.numerics, state, *arrays)
            for name in ("attn_q", "attn_o", "attn_out", "ffn_out"):
                if (reference := get(name)) is not None:
                    yield Comparison(f"draft {name}", step, stage, relative_errors(as_f32(made[name]), reference))
            if (reference := get("gate_idx")) is not None:
                equal = np.asarray(made["gate_idx"]).reshape(reference.shape) == reference
                yield Comparison("draft gate_idx", step, stage, equal=equal)

    def _residual(self, step: str, spec: LayerSpec, start: np.ndarray | None) -> Iterator[Comparison]:
        """The hyper-connections of a layer, with the recorded outputs of its sub-layers put in."""
        get = functools.partial(self.recording.layer, step)
        pre = get(spec.layer - 1, "pre_mix") if spec.layer else None
        outputs = [get(spec.layer, name) for name in ("attn_out", "ffn_out")]
        if start is None or pre is None or any(o is None for o in outputs):
            return
        attn_out, ffn_out = (self._in(o) for o in outputs if o is not None)
        made = _residual(self.graphdef, self.state, spec.layer, self._in(start), jnp.asarray(pre), attn_out, ffn_out)
        yield from compare_layer(self.recording, step, spec, made)

    def _where_selections_agree(
        self, step: str, layer: int, seen: dict[str, Any], agree: np.ndarray
    ) -> Iterator[Comparison]:
        """attn_out on tokens whose selection is the recorded one: elsewhere a different entry was read, not a number rounded."""
        reference = self.recording.layer(step, layer, "attn_out")
        if reference is not None and agree.any():
            errors = relative_errors(as_f32(seen["attn_out"])[agree], reference[agree])
            yield Comparison("attn_out, same selection", step, layer, errors)

    def _in(self, a: np.ndarray) -> jax.Array:
        return jnp.asarray(a).astype(self.numerics.dtype)

    def _run_engram(self, slot: int, tokens: jax.Array, cache: Cache, x_BTSD: jax.Array) -> jax.Array:
        return _engram(self.graphdef, self.state, slot, tokens, cache, x_BTSD)

    def _run_attention(self, kind: tuple, places: dict[str, int], *args: Any) -> Any:
        return _attention(self.graphdef, self.state, kind, places, *args)

    def _run_ffn(self, layer: int, x_BTD: jax.Array) -> Any:
        return _ffn(self.graphdef, self.state, layer, x_BTD)


def _kind(spec: LayerSpec) -> tuple:
    return spec.mode, spec.ratio, spec.makes_candidates, spec.candidate_source is not None


def _prepare(
    model: Model, kind: tuple, places: dict[str, Any], tokens: jax.Array, cache: Cache, group: jax.Array
) -> tuple[Step, Role, Entries]:
    """The step, the layer's role and its window history, as the stack would make them."""
    mode, ratio, makes, reads = kind
    step = model._step(tokens, cache, jnp.full(tokens.shape[0], tokens.shape[1], jnp.int32))
    role = Role(
        mode=mode,
        ratio=ratio,
        group=group,
        compressor=take_layer(model.compressors[pool_name(ratio)], group) if mode is Mode.FULL else None,
        indexer=take_layer(model.indexers, places["index"]) if mode in (Mode.FULL, Mode.REINDEX) else None,
        makes_candidates=makes,
        reads_candidates=reads,
    )
    return step, role, window_history(cache.window_LBWH, places["layer"], step.start_B)


@functools.partial(jax.jit, static_argnums=(0, 2))
def _attention(
    graphdef: Any,
    state: Any,
    kind: tuple,
    places: Any,
    tokens: Any,
    cache: Cache,
    pool: Any,
    group: Any,
    selection: Any,
    candidates: Any,
    x_BTD: Any,
) -> Any:
    model = nnx.merge(graphdef, state)
    step, role, history = _prepare(model, kind, places, tokens, cache, group)
    attn = take_layer(model.layers.attn, places["layer"])
    shared = Shared(pool, selection, candidates)
    _, _, shared, seen = attn(x_BTD, history, role, shared, step, model.config, model.numerics, frozenset(_CAPTURE))
    return shared.pool, shared.selection_BTK, shared.candidates_BTC, seen


@functools.partial(jax.jit, static_argnums=(0,))
def _residual(
    graphdef: Any, state: Any, layer: Any, x_BTSD: Any, pre_BTS: Any, attn_out: Any, ffn_out: Any
) -> dict[str, Any]:
    model = nnx.merge(graphdef, state)
    block = take_layer(model.layers, layer)
    config, numerics = model.config, model.numerics
    x_BTSD, pre_BTS, attn_in = block.around_attention(x_BTSD, pre_BTS, lambda h: (attn_out, h), config, numerics)
    x_BTSD, pre_BTS, ffn_in = block.around_feed_forward(x_BTSD, pre_BTS, lambda h: (ffn_out, h), config, numerics)
    return {"attn_in": attn_in, "ffn_in": ffn_in, "hidden": x_BTSD, "pre_mix": pre_BTS}


@functools.partial(jax.jit, static_argnums=(0,))
def _ffn(graphdef: Any, state: Any, layer: Any, x_BTD: Any) -> Any:
    model = nnx.merge(graphdef, state)
    return take_layer(model.layers.ffn, layer)(x_BTD, layer, None, model.config, model.numerics)


@functools.partial(jax.jit, static_argnums=(0, 2))
def _engram(graphdef: Any, state: Any, slot: int, tokens: Any, cache: Cache, x_BTSD: Any) -> Any:
    model = nnx.merge(graphdef, state)
    step = model._step(tokens, cache, jnp.full(tokens.shape[0], tokens.shape[1], jnp.int32))
    walk, _ = model._walk(tokens, cache, step, frozenset())
    module, table = take_layer(model.engram, slot), model.engram_tables[slot]
    return module(x_BTSD, walk.engram_rows[slot], table, step.image_BT, model.config, model.numerics)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _draft_stage(
    graphdef: Any,
    config: ModelConfig,
    numerics: Numerics,
    state: Any,
    stage: Any,
    attn_in: Any,
    ffn_in: Any,
    window_LBWH: Any,
    length_B: Any,
) -> dict[str, Any]:
    block = take_layer(nnx.merge(graphdef, state).stages, stage)
    history_BWH = window_history(window_LBWH, 0, length_B)
    attn_out, seen = attend_draft(block.attn, attn_in, history_BWH, length_B, config, numerics)
    ffn_out, made = block.ffn(ffn_in, stage, None, config, numerics)
    return seen | made | {"attn_out": attn_out, "ffn_out": ffn_out}
