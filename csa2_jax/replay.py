"""Replay of a recorded run through our model: end to end, and module by module from recorded inputs.

A recording is a release-layout model directory with two files more: `trace.npz`, the numbers a run of the released code left
behind, and `meta.json`, which says how it computed (mode, prompt length). What the keys mean is told in tests/golden/README.md.
Everything is compared against the trace; keys that a trimmed trace lacks are passed over.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from csa2_jax.attention import Role, Shared
from csa2_jax.config import ModelConfig
from csa2_jax.generate import draft
from csa2_jax.layers import take_layer
from csa2_jax.model import Model, forward
from csa2_jax.plan import LayerSpec, Mode
from csa2_jax.state import Cache, Pool, Step, init_cache, pool_name, window_history

MODES = {  # mode: (compute dtype, roundings)
    "f32_noqat": ("float32", False),
    "f32": ("float32", True),
    "fp8_f32": ("float32", True),
    "bf16": ("bfloat16", True),
    "fp8": ("bfloat16", True),
}
_CAPTURE = (
    *("attn_in", "attn_q", "attn_o", "attn_out", "latent", "selections", "candidates", "index_scores"),
    *("ffn_in", "ffn_out", "gate_idx", "gate_w", "hidden", "pre_mix", "engram_rows"),
)


class Recording:
    """A recorded run: its trace (arrays are read on demand), its mode and its steps."""

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self.directory = Path(directory)
        for name in ("config.json", "meta.json", "trace.npz"):
            if not (self.directory / name).is_file():
                raise FileNotFoundError(f"{self.directory / name} does not exist: a recording holds config.json, meta.json, trace.npz and the model")
        self.config = ModelConfig.from_hf(self.directory)
        self.meta = json.loads((self.directory / "meta.json").read_text(encoding="utf-8"))
        self.mode = self.meta.get("mode")
        if self.mode not in MODES:
            raise ValueError(f"{self.directory / 'meta.json'}: mode={self.mode!r} must be one of {sorted(MODES)}")
        self.compute_dtype, self.fake_quant = MODES[self.mode]
        self._trace = np.load(self.directory / "trace.npz")
        self._keys = set(self._trace.files)
        self.tokens: np.ndarray = self._trace["tokens"]
        self.prompt = int(self.meta["prefill"])
        self.steps = ("prefill", *(f"decode{k}" for k in range(self.tokens.shape[1] - self.prompt)))

    def get(self, *parts: str) -> np.ndarray | None:
        """The array `a/b/c`, None if the trace does not hold it."""
        key = "/".join(parts)
        return self._trace[key] if key in self._keys else None

    def layer(self, step: str, layer: int, name: str) -> np.ndarray | None:
        """`<step>/L<layer>/<name>`."""
        return self.get(step, f"L{layer}", name)

    def consumed(self, step: str) -> tuple[int, int]:
        """(tokens before the step, tokens of the step)."""
        return (0, self.prompt) if step == "prefill" else (self.prompt + int(step.removeprefix("decode")), 1)

    def step_tokens(self, step: str) -> np.ndarray:
        """The ids a step consumes."""
        before, count = self.consumed(step)
        return self.tokens[:, before : before + count]

    def tied(self, step: str, layer: int, kind: str) -> int:
        """Entries the recorder noted as ties (equal scores at the boundary) of `kind` index, blocks or gate."""
        return sum(count for s, at, what, count in self.meta.get("ties", []) if (s, at, what) == (step, f"L{layer}", kind))


@dataclasses.dataclass(frozen=True)
class Comparison:
    """One quantity of one step (and layer): relative errors of its vectors, or the share of equal integers."""

    quantity: str
    step: str
    layer: int | None
    errors: np.ndarray | None = None  # |d|_2 / |ref|_2 per vector of the last axis
    equal: np.ndarray | None = None  # bool per entry


def relative_errors(ours: np.ndarray, reference: np.ndarray) -> np.ndarray:
    """|ours - reference|_2 / |reference|_2 over the last axis; a zero reference counts absolutely."""
    ours, reference = np.asarray(ours, np.float64), np.asarray(reference, np.float64)
    if ours.shape != reference.shape:
        raise ValueError(f"shape {ours.shape} against the recorded {reference.shape}")
    size = np.linalg.norm(reference, axis=-1)
    return (np.linalg.norm(ours - reference, axis=-1) / np.where(size > 0, size, 1.0)).reshape(-1)


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
            yield Comparison("main_hidden", step, None, relative_errors(_f32(out.captured["main_hidden"]), main))
        for spec in config.plan.layers:
            yield from _compare_layer(recording, step, spec, out.captured)
        yield from _compare_caches(recording, step, cache)
        ids = recording.get(step, "ids")
        if has_draft and ids is not None and recording.get(step, "draft_ids") is not None:
            yield from _compare_draft(recording, step, draft(model, ids, cache))


def _compare_layer(recording: Recording, step: str, spec: LayerSpec, captured: dict[str, Any]) -> Iterator[Comparison]:
    layer, before = spec.layer, sum(recording.consumed(step))

    def ours(name: str) -> np.ndarray:
        return _f32(captured[name][layer])

    for name, key in (("hidden", "h"), *((n, n) for n in ("attn_in", "attn_q", "attn_o", "attn_out", "ffn_in", "ffn_out"))):
        if (reference := recording.layer(step, layer, key)) is not None:
            yield Comparison(key, step, layer, relative_errors(ours(name), reference))
    if (reference := recording.layer(step, layer, "pre_mix")) is not None:
        yield Comparison("pre_mix", step, layer, relative_errors(ours("pre_mix"), reference))
    if (reference := recording.layer(step, layer, "gate_idx")) is not None:
        yield Comparison("gate_idx", step, layer, equal=ours("gate_idx").reshape(reference.shape) == reference)
    if (reference := recording.layer(step, layer, "gate_w")) is not None:
        yield Comparison("gate_w", step, layer, relative_errors(ours("gate_w").reshape(reference.shape), reference))
    if spec.engram_slot >= 0 and (reference := recording.layer(step, layer, "engram_hash")) is not None:
        yield Comparison("engram_hash", step, layer, equal=np.asarray(captured["engram_rows"][layer]) == reference)
    if spec.mode is Mode.FULL and (reference := recording.layer(step, layer, "latent")) is not None:
        yield Comparison("latent", step, layer, relative_errors(ours("latent")[:, : reference.shape[1]], reference))
    if spec.index_slot < 0:
        return
    entries = before // spec.ratio
    for key in ("index_score_raw", "index_score"):
        reference = recording.layer(step, layer, key)
        if reference is not None and not (key == "index_score" and spec.candidate_source is not None):
            yield from _compare_scores(step, layer, ours("index_scores")[..., :entries], reference)
    if (reference := recording.layer(step, layer, "index_idx")) is not None:
        offset = recording.prompt if step == "prefill" else recording.config.sliding_window
        reference = np.where(reference < 0, -1, reference - offset)
        equal = as_sets(np.asarray(captured["selections"][layer]), entries) == as_sets(reference, entries)
        yield Comparison("index_idx", step, layer, equal=equal)
    if spec.makes_candidates and (reference := recording.layer(step, layer, "candidates")) is not None:
        made = _blocks_as_mask(np.asarray(captured["candidates"][layer]), recording.config.candidate_block_size, entries)
        # The trace marks whole blocks of positions; blocks of which nothing is visible are dropped by both.
        yield Comparison("candidates", step, layer, equal=made == _kept(reference, recording, step, spec))


def _kept(mask: np.ndarray, recording: Recording, step: str, spec: LayerSpec) -> np.ndarray:
    """The recorded candidate mask without blocks that no entry of the query's visible prefix falls into."""
    before, count = recording.consumed(step)
    visible = (before + np.arange(count) + 1) // spec.ratio
    block = recording.config.candidate_block_size
    first_of_block = np.arange(mask.shape[-1]) // block * block
    return mask & (first_of_block < visible[:, None])


def _compare_scores(step: str, layer: int, ours: np.ndarray, reference: np.ndarray) -> Iterator[Comparison]:
    seen = np.isfinite(reference)
    yield Comparison("index visibility", step, layer, equal=np.isfinite(ours) == seen)
    errors = np.where(seen, ours, 0) - np.where(seen, reference, 0)
    scale = max(float(np.abs(reference[seen]).max(initial=0.0)), 1e-30)
    yield Comparison("index_score", step, layer, (np.abs(errors) / scale).reshape(-1))


def _compare_caches(recording: Recording, step: str, cache: Cache) -> Iterator[Comparison]:
    before, count = recording.consumed(step)
    total, config = before + count, recording.config
    window = _f32(cache.window_LBWH)
    drafts = None if cache.draft_window_LBWH is None else _f32(cache.draft_window_LBWH)
    for layer in range(config.num_hidden_layers):
        if (reference := recording.layer(step, layer, "window_kv_cache")) is not None:
            yield Comparison("window cache", step, layer, relative_errors(window[layer], reference))
    for stage in range(config.num_nextn_predict_layers):
        reference = recording.get(step, f"M{stage}", "window_kv_cache")
        if reference is not None and drafts is not None:
            yield Comparison("draft window", step, stage, relative_errors(drafts[stage], reference))
    for spec in config.plan.layers:
        if spec.mode is not Mode.FULL:
            continue
        pool = cache.pools[pool_name(spec.ratio)]
        held, open_rows = total // spec.ratio, total % spec.ratio
        for name, key, array, rows in (
            ("pool", "compress_kv_cache", pool.kv_GBPH, held),
            ("index keys", "index_k_cache", pool.key_GBPJ, held),
            ("open group C", "kv_state", pool.c_half_GBMH, open_rows),
            ("open group Z", "score_state", pool.z_half_GBMH, open_rows),
        ):
            if rows and (reference := recording.layer(step, spec.layer, key)) is not None:
                yield Comparison(name, step, spec.layer, relative_errors(_f32(array[spec.pool_slot])[:, :rows], reference[:, :rows]))


def _compare_draft(recording: Recording, step: str, drafted: Any) -> Iterator[Comparison]:
    for name, key, ours in (("draft logits", "draft_logits", drafted.logits), ("draft confidence", "draft_conf", drafted.confidence)):
        if (reference := recording.get(step, key)) is not None:
            yield Comparison(name, step, None, relative_errors(np.asarray(ours), reference))
    yield Comparison("draft_ids", step, None, equal=np.asarray(drafted.ids) == recording.get(step, "draft_ids"))


def as_sets(selection: np.ndarray, entries: int) -> np.ndarray:
    """Selections [..., K] as membership [..., entries]."""
    member = np.zeros((*selection.shape[:-1], entries + 1), bool)
    np.put_along_axis(member, np.where(selection < 0, entries, selection), True, axis=-1)
    return member[..., :entries]


def _blocks_as_mask(blocks: np.ndarray, size: int, entries: int) -> np.ndarray:
    return np.repeat(as_sets(blocks, -(-entries // size)), size, axis=-1)[..., :entries]


def _f32(a: Any) -> np.ndarray:
    a = np.asarray(a)
    return a if np.issubdtype(a.dtype, np.integer) else a.astype(np.float32)


# ---- module by module ----


def compare_modules(recording: Recording, model: Model) -> Iterator[Comparison]:
    """Each module fed with its recorded input: attention, feed-forward, Engram, whole layers.

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


class _Modules:
    def __init__(self, recording: Recording, model: Model) -> None:
        self.recording, self.config, self.numerics = recording, recording.config, model.numerics
        self.graphdef, self.state = nnx.split(model)

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
                (pool.kv_GBPH, "compress_kv_cache", held),
                (pool.key_GBPJ, "index_k_cache", held),
                (pool.c_half_GBMH, "kv_state", open_rows),
                (pool.z_half_GBMH, "score_state", open_rows),
            ):
                reference = recording.layer(step, spec.layer, key)
                if reference is None and rows:
                    return None
                if reference is not None:
                    array[spec.pool_slot][:, :rows] = reference[:, :rows]
        history = config.engram_max_ngram_size - 1
        token_map = recording.get("engram", "token_map")
        ngram = cache.ngram_BE
        if history > 0 and token_map is not None:
            ids = np.concatenate([np.full((len(recording.tokens), history), -1), token_map[recording.tokens[:, :total]]], axis=1)
            ngram = jnp.asarray(ids[:, -history:], jnp.int32)
        return dataclasses.replace(
            cache,
            length_B=jnp.full(len(recording.tokens), total, jnp.int32),
            window_LBWH=jnp.asarray(np.stack([w for w in windows if w is not None])),
            pools=jax.tree.map(jnp.asarray, pools),
            ngram_BE=ngram,
            host_length=None,
        )

    def replay(self, step: str, cache: Cache) -> Iterator[Comparison]:
        """All layers of one step, in order; pools, selections and candidates are handed on as in a forward."""
        recording, config = self.recording, self.config
        tokens = jnp.asarray(recording.step_tokens(step))
        pools: dict[str, Pool] = dict(cache.pools)
        batch, count = tokens.shape
        selection = jnp.full((batch, count, config.index_topk), -1, jnp.int32)
        candidates = jnp.full((batch, count, config.candidate_topk_blocks if config.has_candidates else 0), -1, jnp.int32)
        for spec in config.plan.layers:
            layer = spec.layer
            # The residual streams this layer starts from: behind Engram if it has one, else behind the layer below.
            streams = recording.layer(step, layer, "engram_h") if spec.engram_slot >= 0 else None
            below = recording.layer(step, layer - 1, "h") if layer else None
            if spec.engram_slot >= 0 and streams is not None and below is not None:
                ours = self._run_engram(spec.engram_slot, tokens, cache, self._in(below))
                yield Comparison("engram_h", step, layer, relative_errors(_f32(ours), streams))
            group = config.plan.layers[spec.pool_source].pool_slot if spec.pool_source is not None else 0
            name = pool_name(spec.ratio)
            inputs = (tokens, cache, pools.get(name), jnp.asarray(group), selection, candidates)
            places = {"layer": layer, "index": max(spec.index_slot, 0)}
            pre = recording.layer(step, layer - 1, "pre_mix") if layer else None
            start = streams if streams is not None else below
            if start is not None and pre is not None:
                hidden, pre_mix = self._run_block(_kind(spec), places, *inputs, self._in(start), jnp.asarray(pre))
                if (reference := recording.layer(step, layer, "h")) is not None:
                    yield Comparison("h", step, layer, relative_errors(_f32(hidden), reference))
                if (reference := recording.layer(step, layer, "pre_mix")) is not None:
                    yield Comparison("pre_mix", step, layer, relative_errors(_f32(pre_mix), reference))
            attn_in = recording.layer(step, layer, "attn_in")
            if attn_in is None:
                return  # later layers would miss what this one makes
            pool, selection, candidates, seen = self._run_attention(_kind(spec), places, *inputs, self._in(attn_in))
            if pool is not None:
                pools[name] = pool
            captured = {key: {layer: value} for key, value in seen.items()}
            agree = None
            for comparison in _compare_layer(recording, step, spec, _only(captured, layer)):
                if comparison.quantity == "index_idx" and comparison.equal is not None:
                    agree = comparison.equal.all(axis=-1)
                yield comparison
            if agree is not None:
                self._agree = agree
            if spec.mode in (Mode.SWA,):
                self._agree = np.ones((batch, count), bool)
            yield from self._where_selections_agree(step, layer, seen)
            ffn_in = recording.layer(step, layer, "ffn_in")
            if ffn_in is not None:
                y, gate_idx, gate_w = self._run_ffn(layer, self._in(ffn_in))
                captured = {"ffn_out": {layer: y}, "gate_idx": {layer: gate_idx}, "gate_w": {layer: gate_w}}
                yield from _compare_layer(recording, step, spec, _only(captured, layer))

    def _where_selections_agree(self, step: str, layer: int, seen: dict[str, Any]) -> Iterator[Comparison]:
        """attn_out on tokens whose selection is the recorded one: elsewhere a different entry was read, not a number rounded."""
        reference = self.recording.layer(step, layer, "attn_out")
        if reference is not None and self._agree.any():
            yield Comparison(
                "attn_out, same selection", step, layer, relative_errors(_f32(seen["attn_out"])[self._agree], reference[self._agree])
            )

    def _in(self, a: np.ndarray) -> jax.Array:
        return jnp.asarray(a).astype(self.numerics.dtype)

    def _run_engram(self, slot: int, tokens: jax.Array, cache: Cache, x_BTSD: jax.Array) -> jax.Array:
        return _engram(self.graphdef, self.state, slot, tokens, cache, x_BTSD)

    def _run_block(self, kind: tuple, places: dict[str, int], *args: Any) -> Any:
        return _block(self.graphdef, self.state, kind, places, *args)

    def _run_attention(self, kind: tuple, places: dict[str, int], *args: Any) -> Any:
        return _attention(self.graphdef, self.state, kind, places, *args)

    def _run_ffn(self, layer: int, x_BTD: jax.Array) -> Any:
        return _ffn(self.graphdef, self.state, layer, x_BTD)


def _only(captured: dict[str, dict[int, Any]], layer: int) -> Any:
    """Captures that answer any name, so that `_compare_layer` compares what there is."""

    class Partial(dict):
        def __missing__(self, name: str) -> Any:
            raise KeyError(name)

    return Partial(captured)


def _kind(spec: LayerSpec) -> tuple:
    return spec.mode, spec.ratio, spec.makes_candidates, spec.candidate_source is not None


def _prepare(model: Model, kind: tuple, places: dict[str, Any], tokens: jax.Array, cache: Cache, group: jax.Array) -> tuple[Step, Role, jax.Array]:
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
def _attention(graphdef: Any, state: Any, kind: tuple, places: Any, tokens: Any, cache: Cache, pool: Any, group: Any, selection: Any, candidates: Any, x_BTD: Any) -> Any:
    model = nnx.merge(graphdef, state)
    step, role, history = _prepare(model, kind, places, tokens, cache, group)
    attn = take_layer(model.layers.attn, places["layer"])
    shared = Shared(pool, selection, candidates)
    _, _, shared, seen = attn(x_BTD, history, role, shared, step, model.config, model.numerics, frozenset(_CAPTURE))
    return shared.pool, shared.selection_BTK, shared.candidates_BTC, seen


@functools.partial(jax.jit, static_argnums=(0, 2))
def _block(graphdef: Any, state: Any, kind: tuple, places: Any, tokens: Any, cache: Cache, pool: Any, group: Any, selection: Any, candidates: Any, x_BTSD: Any, pre_BTS: Any) -> Any:
    model = nnx.merge(graphdef, state)
    step, role, history = _prepare(model, kind, places, tokens, cache, group)
    block = take_layer(model.layers, places["layer"])
    shared = Shared(pool, selection, candidates)
    return block(x_BTSD, pre_BTS, places["layer"], history, role, shared, step, model.config, model.numerics, frozenset())[:2]


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
