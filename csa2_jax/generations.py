"""What tells two generations of the model apart, beside the plan of their layers.

DeepSeek-V4.1 shares pools and selections between layers; DeepSeek-V4, the generation before, has CSA and HCA layers with pools of
their own. Both walk the same code: here is every number and choice in which that code has to differ. Pure Python, no JAX.
Sources: arXiv 2609.19969; the released DeepSeek-V4.
"""

from __future__ import annotations

import dataclasses
from typing import Final


@dataclasses.dataclass(frozen=True)
class Generation:
    """One generation.

    model_type: what config.json calls it.
    own_pools: every layer with a pool makes it for itself, by its ratio alone (`plan.build_own_pools`); there is no decoder.
    slot_bias: pooling logits get a learned bias by slot.
    own_key_compressor: index keys are compressed from the tokens by themselves, not projected from the latent.
    hadamard: index queries and keys are turned by a Hadamard matrix before they are rounded.
    query_norm: query heads are normalised, without a weight.
    deferred_pre: a sub-layer reads the streams as the sub-layer before said (single-pass mHC), else as it says itself.
    head_collapse: the streams are joined at the end by a projection of their own.
    kv_group: channels of window rows and pool entries that share an fp8 scale; 0: pools are fp4, windows fp8 by 32, whole.
        Where it is not 0, the rotated channels stay bf16.
    tile: rows and columns of an fp8 weight that share a scale. operand_group: channels of a quantised linear's operand that do.
    """

    model_type: str
    own_pools: bool
    slot_bias: bool
    own_key_compressor: bool
    hadamard: bool
    query_norm: bool
    deferred_pre: bool
    head_collapse: bool
    kv_group: int
    tile: int
    operand_group: int


V41: Final = Generation(
    model_type="deepseek_v41",
    own_pools=False,
    slot_bias=False,
    own_key_compressor=False,
    hadamard=False,
    query_norm=False,
    deferred_pre=True,
    head_collapse=False,
    kv_group=0,
    tile=32,
    operand_group=32,
)
V4: Final = Generation(
    model_type="deepseek_v4",
    own_pools=True,
    slot_bias=True,
    own_key_compressor=True,
    hadamard=True,
    query_norm=True,
    deferred_pre=False,
    head_collapse=True,
    kv_group=64,
    tile=128,
    operand_group=128,
)
GENERATIONS: Final = {g.model_type: g for g in (V41, V4)}
