"""How many operations a token of training takes, and how many a device could do: for the model FLOP utilisation (MFU)."""

from __future__ import annotations

import math
import time
from typing import Final

import jax
import jax.numpy as jnp

from csa2_jax import ModelConfig
from csa2_jax.plan import Mode
from train.parameters import Parts, matches

# Dense bf16 operations per second of one device, from the vendors' data sheets.
_PEAKS: Final = {
    "TPU v4": 275e12,
    "TPU v5 lite": 197e12,
    "TPU v5": 459e12,
    "TPU v6 lite": 918e12,
    "H100": 989e12,
    "H200": 989e12,
    "A100": 312e12,
    "B200": 2250e12,
}


def flops_per_token(config: ModelConfig, parts: Parts, tokens: int) -> float:
    """Forward and backward of one token: 6 per active weight, and 12 N H per window row or selected entry that a query reads.

    Frozen weights take no gradient of their own: 4. Scores of the index (forward only) count 2 I J per visible entry.
    """
    total = 0.0
    arrays = parts.all()
    for name, array in arrays.items():
        if array.ndim < 2 or matches(
            name, ("embed.*", "engram_tables.*", "draft.*", "token_map", "ngram_products", "*norm.weight")
        ):
            continue
        share = config.num_experts_per_tok / config.n_routed_experts if ".experts." in name else 1.0
        size = math.prod(array.shape) * (2 if array.dtype == jnp.uint8 and name.endswith(".weight") else 1)
        total += (6.0 if name in parts.trained else 4.0) * size * share
    width = config.num_attention_heads * config.head_dim
    for spec in config.plan.layers:
        entries = tokens // (2 * spec.ratio) if spec.ratio else 0  # visible to the middle query
        of_pool = {Mode.SWA: 0, Mode.HCA: entries}.get(spec.mode, min(config.index_topk, entries))
        total += 12.0 * width * (min(config.sliding_window, tokens) + of_pool)
        if spec.mode.selects:
            total += 2.0 * config.index_n_heads * config.index_head_dim * entries
    return total


def device_peak(compute_dtype: str) -> float:
    """Operations per second of this machine's devices: by name, or on a CPU as a large product of matrices measures it."""
    kind = jax.devices()[0].device_kind
    for name, peak in _PEAKS.items():
        if name in kind:
            return peak * jax.device_count() * (0.5 if compute_dtype == "float32" else 1.0)
    n = 1024
    a = jnp.ones((n, n), jnp.float32)
    product = jax.jit(lambda a: a @ a)
    product(a).block_until_ready()
    best = math.inf
    for _ in range(3):
        began = time.perf_counter()
        product(a).block_until_ready()
        best = min(best, time.perf_counter() - began)
    return 2 * n**3 / best
