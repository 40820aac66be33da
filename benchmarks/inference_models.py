"""The models that are measured, how long the prompts and contexts are, and caches filled at random."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Any, Final, Literal

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.inference_measure import Note
from csa2_jax import Bound, Cache, ModelConfig, Unsupported, init_cache, init_model, prefill
from kernels_pallas import storage
from kernels_pallas.storage import Packed

Decoder = Literal["full", "exact", "replay"]
Stored = Literal["f32", "bf16", "packed"]
DECODERS: Final[tuple[Decoder, ...]] = ("full", "exact", "replay")
STORED: Final[tuple[Stored, ...]] = ("f32", "bf16", "packed")
ROOT: Final = Path(__file__).resolve().parents[1]
# 101 M parameters in 12 layers: two of window only, an encoder group at ratio 2, a decoder of three groups with candidates. It is
# the model whose released code was timed, except that it may hold 128k tokens and a little more (max_position_embeddings 132,096
# for 33,024): no number of the forward depends on that.
BENCH: Final = ROOT / "configs" / "bench.json"
RELEASED: Final = ROOT / "configs" / "v41_flash.json"
K: Final = 1024


@dataclasses.dataclass(frozen=True)
class Sizes:
    """What is run, in tokens. Targets speak about `at`, `small`, `large` and `read_at`."""

    lengths: tuple[int, ...]  # of prompts
    at: int
    chunk: int
    contexts: tuple[int, ...]  # of decode steps
    small: int
    large: int
    read_at: int
    pools: tuple[int, ...]  # entries that a search among candidates is run over
    replayed: int  # prompt whose replay is held against the exact route
    forced: int  # tokens after it
    products: tuple[tuple[int, int, int], ...] | None = None  # matrices whose product is the ceiling; None: large ones


FULL: Final = Sizes(
    lengths=(512, 2 * K, 8 * K, 16 * K, 32 * K),
    at=8 * K,
    chunk=K,
    contexts=(2 * K, 4 * K, 8 * K, 16 * K, 32 * K, 64 * K, 128 * K),
    small=4 * K,
    large=64 * K,
    read_at=8 * K,
    pools=(4 * K, 8 * K, 16 * K, 32 * K, 64 * K, 128 * K, 256 * K),
    replayed=2 * K,
    forced=16,
)
QUICK: Final = Sizes(
    lengths=(24, 80),
    at=80,
    chunk=32,
    contexts=(32, 64, 128),
    small=32,
    large=128,
    read_at=64,
    pools=(64, 128),
    replayed=78,
    forced=2,
    products=((64, 64, 64),),
)


def shrunk(config: ModelConfig) -> ModelConfig:
    """Four small layers that make and read everything there is: to try this program, not to measure."""
    return dataclasses.replace(
        config,
        vocab_size=64,
        hidden_size=32,
        moe_intermediate_size=32,
        num_hidden_layers=4,
        compress_ratios=(0, 2, 1, 1),
        kv_source_layer_ids=(1, 2),
        index_source_layer_ids=(1, 2, 3),
        candidate_source_layer_id=2,
        num_attention_heads=2,
        head_dim=32,
        qk_rope_head_dim=16,
        q_lora_rank=16,
        o_groups=2,
        o_lora_rank=16,
        n_routed_experts=4,
        sliding_window=8,
        index_n_heads=2,
        index_head_dim=32,
        index_topk=8,
        candidate_topk_blocks=4,
        candidate_block_size=4,
        hc_mult=2,
        hc_sinkhorn_iters=2,
    )


@dataclasses.dataclass(frozen=True)
class Bench:
    """One run of this program. Models are made when first asked for."""

    config: ModelConfig
    sizes: Sizes
    rounds: int
    steps: int  # decode steps of each context
    note: Note
    quick: bool = False

    @functools.cached_property
    def plain(self) -> Bound:
        """float32 without roundings: what the released code was timed with."""
        self.note("making the model, float32 without roundings")
        return Bound.of(init_model(self.config, compute_dtype="float32", fake_quant=False))

    @functools.cached_property
    def rounded(self) -> Bound:
        """float32 with roundings, as packed caches need them."""
        # CPUs have no bf16 products to speak of, and their compiler widens bf16 weights at every step.
        self.note("making the model, float32 with roundings")
        return Bound.of(init_model(self.config, compute_dtype="float32", fake_quant=True))

    def tokens(self, count: int, seed: int = 0) -> np.ndarray:
        """Random ids [1, count]."""
        return np.random.default_rng(seed).integers(0, self.config.vocab_size, (1, count))

    def prefill(self, decoder: Decoder, tokens: np.ndarray, cache: Cache) -> tuple[Any, Cache]:
        """`prefill` of the plain model by one of the three routes."""
        options: dict[str, Any] = {"decoder": decoder, "chunk": self.sizes.chunk}
        return prefill(self.plain, tokens, cache, **options)


def warm(bench: Bench, decoder: Decoder, capacity: int) -> str:
    """Why no prompt can take this route, or nothing. To know, a short one is run into a cache of `capacity` tokens.

    Most of what a long prompt needs is compiled on the way; what is not, the first timed run that compiles it leaves uncounted.
    """
    tokens = bench.tokens(min(capacity, 2 * bench.sizes.chunk))
    bench.note(f"compiling for {decoder}, a cache of {capacity:,}")
    try:
        jax.block_until_ready(bench.prefill(decoder, tokens, init_cache(bench.config, 1, capacity, "f32")))
    except Unsupported as refusal:
        return str(refusal)
    return ""


def filled_cache(config: ModelConfig, capacity: int, stored: Stored, seed: int = 0) -> Cache:
    """A cache for `capacity` tokens with normal numbers in every place and no token consumed yet (see `at_length`)."""
    rng = np.random.default_rng(seed)
    options: dict[str, Any] = {"storage": stored}
    empty = init_cache(config, 1, capacity, **options)

    def fill(a: Any) -> Any:
        if isinstance(a, Packed):
            numbers = jnp.asarray(rng.standard_normal(a.shape, np.float32))
            return jax.jit(functools.partial(storage.pack, fmt=a.fmt, units=a.in_units))(numbers)
        if not jnp.issubdtype(a.dtype, jnp.floating):
            return a
        return jnp.asarray(rng.standard_normal(a.shape, np.float32), a.dtype)

    cache = jax.tree.map(fill, empty, is_leaf=lambda a: isinstance(a, Packed))
    return at_length(cache, 0)


def at_length(cache: Cache, length: int) -> Cache:
    """The same cache as if `length` tokens had been consumed."""
    lengths = np.array([length])
    held = dataclasses.replace(cache, length_B=jnp.asarray(lengths, jnp.int32))
    return held.with_mirror(lengths.astype(np.int64))
