"""Small models that several test files share, and the few shapes in which they are called.

Every new (batch, tokens) costs seconds of compilation, so a model has a handful of call widths, and shorter chunks are
padded to one of them with `lengths_B`; all but the decode step are compiled without most optimisations. A model is
loaded once per process.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

from csa2_jax import Bound, Cache, Model, ModelConfig, forward, init_cache, load_checkpoint
from csa2_jax.state import overlaps, pool_name
from kernels_pallas import storage
from tests import random_checkpoint as rc
from tests.golden_sets import materialise
from tests.oracle import OracleModel
from tests.v4 import checkpoints as v4_checkpoints

BATCH = 8
RELEASED = Path(__file__).resolve().parent.parent / "configs" / "v41_flash.json"
# Three compression ratios, a REUSE and a REINDEX layer with candidates, Engram below everything and in the decoder.
RATIOS_KNOBS: dict[str, Any] = {
    "swa_layers": 1,
    "encoder_ratios": (3, 4),
    "encoder_extra": "",
    "decoder_extra": "UI",
    "sliding_window": 5,
    "index_topk": 2,
    "index_n_heads": 4,
    "candidates": True,
    "candidate_block_size": 3,
    "candidate_spare_blocks": 0,
    "engram_layers": (0, 4),
    "draft_stages": 1,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "hc_mult": 4,
    "yarn": 32,
}
# As few different layers as a model with everything can have.
MINI_KNOBS: dict[str, Any] = {
    "swa_layers": 1,
    "encoder_ratios": (2,),
    "encoder_extra": "",
    "decoder_extra": "I",
    "sliding_window": 4,
    "index_topk": 2,
    "candidates": True,
    "candidate_block_size": 1,
    "candidate_spare_blocks": 0,
    "engram_layers": (1,),
    "draft_stages": 0,
    "hidden_size": 32,
    "num_experts_per_tok": 2,
    "hc_mult": 4,
    "yarn": 32,
}


@contextlib.contextmanager
def quick_compilation() -> Iterator[None]:
    """Compile without most optimisations: for programs that run once or twice."""
    jax.config.update("jax_disable_most_optimizations", True)
    try:
        yield
    finally:
        jax.config.update("jax_disable_most_optimizations", False)


@dataclasses.dataclass(frozen=True)
class Small:
    """A loaded model and its call widths: decode, up to the window, up to 2 W + 1, a whole sequence."""

    name: str
    model: Model
    bound: Bound
    widths: tuple[int, ...]

    @property
    def config(self) -> ModelConfig:
        return self.model.config

    @property
    def window(self) -> int:
        return self.config.sliding_window

    @property
    def total(self) -> int:
        """Tokens of a whole sequence."""
        return self.widths[-1]

    def tokens(self, seed: int = 0, batch: int = BATCH) -> np.ndarray:
        """Random ids [B, total]."""
        return np.random.default_rng(seed).integers(0, self.config.vocab_size, (batch, self.total))

    def cache(self, batch: int = BATCH, storage: Any = "f32") -> Cache:
        return init_cache(self.config, batch, self.total, storage, draft=self.config.num_nextn_predict_layers > 0)

    def append(self, cache: Cache, tokens: np.ndarray, lengths: Any = None) -> tuple[np.ndarray, Cache]:
        """One call, padded to the next width; logits [B, V] of one token a row, else [B, T, V]."""
        lengths = np.full(len(tokens), tokens.shape[1]) if lengths is None else np.asarray(lengths)
        width = next(w for w in self.widths if w >= tokens.shape[1])
        padded = np.zeros((len(tokens), width), np.int64)
        padded[:, : tokens.shape[1]] = tokens
        with quick_compilation() if width > 1 else contextlib.nullcontext():
            out, cache = forward(self.bound, padded, cache, lengths, all_logits=width > 1)
        return np.asarray(out.logits), cache

    def whole(self, tokens: np.ndarray, lengths: Any = None) -> Any:
        """The forward without a cache over [B, total], with selections, candidates and raw scores captured."""
        with quick_compilation():
            return forward(self.bound, tokens, lengths_B=lengths, capture=("selections", "candidates", "index_scores"))


def load_random(knobs: dict[str, Any], seed: int = 0, storage: rc.Storage = "bf16", **options: Any) -> Model:
    """A random checkpoint, written in the release layout and loaded (f32 without roundings unless told otherwise)."""
    config = rc.random_config(seed, quantisable=True, **knobs)
    tensors = rc.random_tensors(config, seed + 1, storage)
    with tempfile.TemporaryDirectory() as directory:
        rc.write_checkpoint(directory, rc.config_for_storage(config, storage), tensors)
        return load_checkpoint(directory, **({"compute_dtype": "float32", "fake_quant": False} | options))


@functools.cache
def tiny8() -> Small:
    """The recorded checkpoint: ratio 2 then 1, W = 8, K = 4, candidates of 3 blocks of 2."""
    model = load_checkpoint(materialise("tiny8_f32_noqat"), compute_dtype="float32", fake_quant=False)
    return Small("tiny8", model, Bound.of(model), (1, 8, 17, 48))


@functools.cache
def ratios() -> Small:
    """A random checkpoint: ratios 3, 4 and 1, W = 5, K = 2, candidates of 2 blocks of 3."""
    model = load_random(RATIOS_KNOBS)
    return Small("ratios", model, Bound.of(model), (1, 11, 40))


@functools.cache
def mini() -> Model:
    """The cheapest model to compile that has all four layer modes but REUSE."""
    return load_random(MINI_KNOBS)


@functools.cache
def rounded(compute_dtype: str = "float32") -> Small:
    """`mini` with roundings and the draft head: what a packed cache can hold."""
    model = load_random(MINI_KNOBS | {"draft_stages": 1}, fake_quant=True, compute_dtype=compute_dtype)
    return Small(f"rounded {compute_dtype}", model, Bound.of(model), (1, 9, 30))


def load_v4(seed: int = 0, storage: Any = "f32", knobs: dict[str, Any] | None = None, **options: Any) -> Model:
    """A random DeepSeek-V4 checkpoint, written in the release layout and loaded (f32 without roundings unless told otherwise)."""
    config = v4_checkpoints.config_of(storage, **(knobs or {}))
    with tempfile.TemporaryDirectory() as directory:
        v4_checkpoints.write(Path(directory), config, v4_checkpoints.tensors_of(config, seed))
        return load_checkpoint(directory, **({"compute_dtype": "float32", "fake_quant": False} | options))


@functools.cache
def v4() -> Small:
    """The generation before: window, CSA, HCA, CSA; groups of 4 and 8, W = 5, K = 2, the first layer routed by token id."""
    model = load_v4()
    return Small("v4", model, Bound.of(model), (1, 11, 40))


@functools.cache
def rounded_v4(compute_dtype: str = "float32") -> Small:
    """The same with the roundings, from quantised weights: what a packed cache can hold."""
    model = load_v4(storage="quantised", fake_quant=True, compute_dtype=compute_dtype)
    return Small(f"rounded v4 {compute_dtype}", model, Bound.of(model), (1, 9, 30))


SMALL = {"tiny8": tiny8, "ratios": ratios}
EVERY = SMALL | {"v4": v4}


def oracle_of(name: str, fault: str | None = None) -> OracleModel:
    """The oracle with the weights of one of SMALL."""
    if name == "tiny8":
        return OracleModel(*rc.read_checkpoint(materialise("tiny8_f32_noqat")), fault=fault)
    config = rc.random_config(0, quantisable=True, **RATIOS_KNOBS)
    return OracleModel(config, rc.random_tensors(config, 1), fault=fault)


def meaningful(config: ModelConfig, cache: Cache) -> dict[str, list[np.ndarray]]:
    """Everything of a cache that a later call may read, per row and as NumPy; the rest is unspecified."""
    length = np.asarray(cache.length_B)
    width = config.sliding_window
    held: dict[str, list[np.ndarray]] = {"length": list(length), "ngram": list(np.asarray(cache.ngram_BE))}

    def windows(ring: jax.Array) -> list[np.ndarray]:
        rows = np.asarray(storage.unpack(ring)).astype(np.float32)
        return [rows[:, b, np.arange(max(0, n - width), n) % width] for b, n in enumerate(length)]

    held["window"] = windows(cache.window_LBWH)
    if cache.draft_window_LBWH is not None:
        held["draft window"] = windows(cache.draft_window_LBWH)
    for ratio in config.plan.ratios:
        pool = cache.pools[pool_name(ratio)]
        waiting = _waiting(config, ratio, length)
        for name, array, count in (
            ("kv", storage.unpack(pool.kv_GBPH), length // ratio),
            ("key", None if pool.key_GBPJ is None else storage.unpack(pool.key_GBPJ), length // ratio),
            ("c half", None if pool.half_YGBMH is None else pool.half_YGBMH[0], waiting),
            ("z half", None if pool.half_YGBMH is None else pool.half_YGBMH[1], waiting),
            ("key c half", None if pool.key_half_YGBMJ is None else pool.key_half_YGBMJ[0], waiting),
            ("key z half", None if pool.key_half_YGBMJ is None else pool.key_half_YGBMJ[1], waiting),
        ):
            if array is not None:
                held[f"m{ratio} {name}"] = [np.asarray(array)[:, b, :n].astype(np.float32) for b, n in enumerate(count)]
    return held


def _waiting(config: ModelConfig, ratio: int, length: np.ndarray) -> np.ndarray:
    """How many of a row's waiting rows mean something: the open group's, where entries overlap those of the last group too."""
    return length % ratio + (ratio if overlaps(config, ratio) else 0)


def poisoned(config: ModelConfig, cache: Cache) -> Cache:
    """The cache with NaN in everything that no later call may read."""
    length, width = np.asarray(cache.length_B), config.sliding_window

    def fill(array: Any, used: np.ndarray) -> Any:
        """NaN from `used[b]` on along axis 2 of [G, B, P, ...]; bytes that mean NaN in packed storage."""
        if array is None:
            return None
        if isinstance(array, storage.Packed):
            return jax.tree.map(lambda a: fill(a, used), array)
        free = np.arange(array.shape[2]) >= used[:, None]
        nan = np.uint8(0xFF) if array.dtype == np.uint8 else np.float32(np.nan)
        return jax.numpy.asarray(
            np.where(free.reshape(1, *free.shape, *[1] * (array.ndim - 3)), nan, np.asarray(array))
        )

    def fill_halves(half: Any, used: np.ndarray) -> Any:
        return None if half is None else jax.numpy.stack([fill(one, used) for one in half])

    pools = {}
    for ratio in config.plan.ratios:
        pool = cache.pools[pool_name(ratio)]
        pools[pool_name(ratio)] = dataclasses.replace(
            pool,
            kv_GBPH=fill(pool.kv_GBPH, length // ratio),
            key_GBPJ=fill(pool.key_GBPJ, length // ratio),
            half_YGBMH=fill_halves(pool.half_YGBMH, _waiting(config, ratio, length)),
            key_half_YGBMJ=fill_halves(pool.key_half_YGBMJ, _waiting(config, ratio, length)),
        )
    # A window that is not full yet is filled from slot 0; the decoder's hold nothing of tokens that passed the encoder alone.
    window = fill(cache.window_LBWH, np.minimum(length, width))
    slot = np.arange(width)
    held_BW = length[:, None] - 1 - (length[:, None] - 1 - slot) % width  # the last position that went into each slot
    unseen_BW = held_BW < np.asarray(cache.decoder_from_B)[:, None]
    window = jax.tree.map(lambda a: _poison_decoder(a, unseen_BW, config.plan.decoder_start), window)
    return dataclasses.replace(
        cache,
        window_LBWH=window,
        draft_window_LBWH=fill(cache.draft_window_LBWH, np.minimum(length, width)),
        pools=pools,
    )


def _poison_decoder(a: Any, unseen_BW: np.ndarray, decoder_start: int) -> Any:
    layers = np.arange(a.shape[0]) >= decoder_start
    nan = np.uint8(0xFF) if a.dtype == np.uint8 else np.float32(np.nan)
    return jax.numpy.asarray(np.where((layers[:, None, None] & unseen_BW)[..., None], nan, np.asarray(a)))


def relative_error(found: np.ndarray, expected: np.ndarray) -> float:
    """Largest |found - expected| / |expected| over rows of the last axis."""
    found, expected = np.asarray(found, np.float64), np.asarray(expected, np.float64)
    error = np.linalg.norm(found - expected, axis=-1) / np.maximum(np.linalg.norm(expected, axis=-1), 1e-30)
    return float(np.max(error, initial=0.0))
