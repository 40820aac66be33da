"""A recorded run and how ours is held against it.

A recording is a release-layout model directory with two files more: `trace.npz`, the numbers a run of the released code left
behind, and `meta.json`, which says how it computed (mode, prompt length). What the keys mean is told in tests/golden/README.md;
keys that a trimmed trace lacks are passed over.
"""

from __future__ import annotations

import dataclasses
import json
import os
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from csa2_jax.config import ModelConfig
from csa2_jax.dspark import Draft
from csa2_jax.plan import LayerSpec, Mode
from csa2_jax.state import Cache, pool_name
from kernels_pallas import storage

MODES = {  # mode: (compute dtype, roundings)
    "f32_noqat": ("float32", False),
    "f32": ("float32", True),
    "fp8_f32": ("float32", True),
    "bf16": ("bfloat16", True),
    "fp8": ("bfloat16", True),
}


def _read_meta(path: Path) -> dict[str, Any]:
    try:
        meta = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(meta, dict) or meta.get("mode") not in MODES:
        mode = meta.get("mode") if isinstance(meta, dict) else meta
        raise ValueError(f"{path}: mode={mode!r} must be one of {sorted(MODES)}")
    if not isinstance(meta.get("prefill"), int) or meta["prefill"] < 1:
        raise ValueError(f"{path}: prefill={meta.get('prefill')!r} must be the length of the prompt")
    return meta


class Recording:
    """A recorded run: its trace (arrays are read on demand), its mode and its steps."""

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self.directory = Path(directory)
        for name in ("config.json", "meta.json", "trace.npz"):
            if not (self.directory / name).is_file():
                raise FileNotFoundError(
                    f"{self.directory / name} does not exist: a recording holds config.json, meta.json, trace.npz and the model"
                )
        self.config = ModelConfig.from_hf(self.directory)
        self.meta = _read_meta(self.directory / "meta.json")
        self.mode = self.meta["mode"]
        self.compute_dtype, self.fake_quant = MODES[self.mode]
        try:
            self._trace = np.load(self.directory / "trace.npz", allow_pickle=False)
            self._keys = set(self._trace.files)
            self.tokens: np.ndarray = self._trace["tokens"]
        except (ValueError, EOFError, KeyError, zipfile.BadZipFile) as error:
            raise ValueError(
                f"{self.directory / 'trace.npz'} is not a whole trace with a `tokens` array: {error}"
            ) from None
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
        return sum(
            count for s, at, what, count in self.meta.get("ties", []) if (s, at, what) == (step, f"L{layer}", kind)
        )


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


def compare_layer(
    recording: Recording, step: str, spec: LayerSpec, captured: Mapping[str, Any]
) -> Iterator[Comparison]:
    """What `captured` (name -> array of this layer) holds of one layer, against the trace."""
    layer, before = spec.layer, sum(recording.consumed(step))

    def pair(name: str, key: str) -> tuple[np.ndarray, np.ndarray] | None:
        """(ours, recorded) if both exist."""
        reference = recording.layer(step, layer, key) if name in captured else None
        return None if reference is None else (as_f32(captured[name]), reference)

    for name, key in _VECTORS:
        if (both := pair(name, key)) is not None:
            yield Comparison(key, step, layer, relative_errors(*both))
    if (both := pair("gate_idx", "gate_idx")) is not None:
        yield Comparison("gate_idx", step, layer, equal=both[0].reshape(both[1].shape) == both[1])
    if (both := pair("gate_w", "gate_w")) is not None:
        yield Comparison("gate_w", step, layer, relative_errors(both[0].reshape(both[1].shape), both[1]))
    if (both := pair("engram_rows", "engram_hash")) is not None:
        yield Comparison("engram_hash", step, layer, equal=both[0] == both[1])
    if (both := pair("latent", "latent")) is not None:
        yield Comparison("latent", step, layer, relative_errors(both[0][:, : both[1].shape[1]], both[1]))
    if spec.index_slot < 0:
        return
    entries = before // spec.ratio
    for key in ("index_score_raw", "index_score"):
        if (both := pair("index_scores", key)) is not None:
            # Above the candidate source the trace masks its scores to the candidates; ours are the raw ones.
            masked = key == "index_score" and spec.candidate_source is not None
            yield from _compare_scores(step, layer, both[0][..., :entries], both[1], masked)
    if (both := pair("selections", "index_idx")) is not None:
        offset = recording.prompt if step == "prefill" else recording.config.sliding_window
        reference = np.where(both[1] < 0, -1, both[1] - offset)
        yield Comparison("index_idx", step, layer, equal=as_sets(both[0], entries) == as_sets(reference, entries))
    if (both := pair("candidates", "candidates")) is not None:
        made = _blocks_as_mask(both[0], recording.config.candidate_block_size, entries)
        # The trace marks whole blocks of positions; blocks of which nothing is visible are dropped by both.
        yield Comparison("candidates", step, layer, equal=made == _kept(both[1], recording, step, spec))


_VECTORS = (
    ("hidden", "h"),
    *((n, n) for n in ("attn_in", "attn_q", "attn_o", "attn_out", "ffn_in", "ffn_out", "pre_mix")),
)


def _kept(mask: np.ndarray, recording: Recording, step: str, spec: LayerSpec) -> np.ndarray:
    """The recorded candidate mask without blocks that no entry of the query's visible prefix falls into."""
    before, count = recording.consumed(step)
    visible = (before + np.arange(count) + 1) // spec.ratio
    block = recording.config.candidate_block_size
    first_of_block = np.arange(mask.shape[-1]) // block * block
    return mask & (first_of_block < visible[:, None])


def _compare_scores(
    step: str, layer: int, ours: np.ndarray, reference: np.ndarray, masked: bool
) -> Iterator[Comparison]:
    seen = np.isfinite(reference)
    if not masked:
        yield Comparison("index visibility", step, layer, equal=np.isfinite(ours) == seen)
    errors = np.where(seen, ours, 0) - np.where(seen, reference, 0)
    scale = max(float(np.abs(reference[seen]).max(initial=0.0)), 1e-30)
    yield Comparison("index_score", step, layer, (np.abs(errors) / scale).reshape(-1))


def compare_caches(recording: Recording, step: str, cache: Cache) -> Iterator[Comparison]:
    """Windows, pools, index keys and open groups after a step."""
    before, count = recording.consumed(step)
    total, config = before + count, recording.config
    window = as_f32(storage.unpack(cache.window_LBWH))
    drafts = None if cache.draft_window_LBWH is None else as_f32(storage.unpack(cache.draft_window_LBWH))
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
            ("pool", "compress_kv_cache", storage.unpack(pool.kv_GBPH), held),
            ("index keys", "index_k_cache", None if pool.key_GBPJ is None else storage.unpack(pool.key_GBPJ), held),
            ("open group C", "kv_state", None if pool.half_YGBMH is None else pool.half_YGBMH[0], open_rows),
            ("open group Z", "score_state", None if pool.half_YGBMH is None else pool.half_YGBMH[1], open_rows),
        ):
            if rows and array is not None and (reference := recording.layer(step, spec.layer, key)) is not None:
                yield Comparison(
                    name,
                    step,
                    spec.layer,
                    relative_errors(as_f32(array[spec.pool_slot])[:, :rows], reference[:, :rows]),
                )


def compare_draft(recording: Recording, step: str, drafted: Draft) -> Iterator[Comparison]:
    """Draft logits, confidences and ids of a step."""
    for name, key, ours in (
        ("draft logits", "draft_logits", drafted.logits),
        ("draft confidence", "draft_conf", drafted.confidence),
    ):
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


def as_f32(a: Any) -> np.ndarray:
    """NumPy f32 of any float array; integers stay."""
    a = np.asarray(a)
    return a if np.issubdtype(a.dtype, np.integer) else a.astype(np.float32)
