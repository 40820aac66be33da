"""What a decode step has to read, and how many arrays a call has; what a forward has to multiply is in `csa2_jax.counts`."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from flax import nnx

from csa2_jax import Model


def active_bytes(model: Model) -> int:
    """Bytes of the parameters that one decoded token uses, as `model` (abstract or not) holds them.

    Of the routed experts the chosen ones, of the embedding and the n-gram tables the rows that are looked up, no draft head.
    """
    config, total = model.config, 0
    for path, leaf in jax.tree_util.tree_leaves_with_path(nnx.state(model, nnx.Param)):
        names = [str(getattr(key, "key", getattr(key, "name", ""))) for key in path]
        size = int(np.prod(leaf.shape)) * leaf.dtype.itemsize
        if names[0] == "draft":
            continue
        if "experts" in names:
            size = size * config.num_experts_per_tok // config.n_routed_experts
        elif names[0] == "embed":
            size //= config.vocab_size
        elif names[0] == "engram_tables":
            size = size // leaf.shape[0] * config.engram_columns
        total += size
    return total


def jit_leaves(*trees: Any) -> int:
    """Arrays among the arguments of a jitted call."""
    return len(jax.tree.leaves(trees))
