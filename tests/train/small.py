"""A model with everything that trains: all four modes, two ratios, candidates, n-gram memory with a plain table, a draft head."""

from __future__ import annotations

import functools
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx

from csa2_jax import Model
from csa2_jax.layers import dequantise
from tests.small_models import load_random
from train.step import Batch

KNOBS: dict[str, Any] = {
    "swa_layers": 1,
    "encoder_ratios": (2,),
    "encoder_extra": "U",
    "decoder_extra": "I",
    "sliding_window": 4,
    "index_topk": 3,
    "candidates": True,
    "candidate_block_size": 2,
    "candidate_spare_blocks": 0,
    "engram_layers": (1,),
    "draft_stages": 1,
    "hidden_size": 32,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "hc_mult": 2,
    "yarn": 32,
}


@functools.cache
def trainable() -> Model:
    """The model, its n-gram table as numbers, so that it is trained too. Nobody may change it in place."""
    model = load_random(KNOBS, weights="float32")
    for table in model.engram_tables:
        table.weight = nnx.Param(dequantise(table.weight[...], table.scale[...], jnp.dtype(jnp.float32)))
        table.scale = None
    return model


def rows(documents: list[list[np.ndarray]], width: int, align: int) -> Batch:
    """A batch [B, T] of rows of documents (token ids), each begun at a multiple of `align`; every next token is predicted."""
    shape = (len(documents), width)
    tokens, targets, origin = (np.zeros(shape, np.int32) for _ in range(3))
    weight, segment = np.zeros(shape, np.float32), np.full(shape, -1, np.int32)
    for b, row in enumerate(documents):
        at = 0
        for number, ids in enumerate(row):
            end = at + len(ids)
            tokens[b, at:end], segment[b, at:end], origin[b, at:] = ids, number, at
            targets[b, at : end - 1], weight[b, at : end - 1] = ids[1:], 1.0
            at = -(-end // align) * align
    return Batch(tokens, targets, weight, origin, segment)
