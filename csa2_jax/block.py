"""One layer: attention and feed-forward, each inside its hyper-connection.

streams -> mixes; collapse with the pre of the sub-layer before -> RMSNorm -> sub-layer -> update of the streams
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import jax
from flax import nnx

from csa2_jax.attention import Attention, Role, Shared
from csa2_jax.config import ModelConfig
from csa2_jax.layers import ParamFactory, RMSNorm
from csa2_jax.moe import MoE
from csa2_jax.numerics import Numerics
from csa2_jax.residual import HyperConnection, collapse, update
from csa2_jax.state import Step

R = TypeVar("R")


class Block(nnx.Module):
    """The parameters every layer has. A REUSE layer has no others; a draft stage has its own number of experts."""

    def __init__(self, config: ModelConfig, make: ParamFactory, *, stack: tuple[int, ...], draft: bool = False) -> None:
        self.attn_norm = RMSNorm(config.hidden_size, make, stack=stack)
        self.ffn_norm = RMSNorm(config.hidden_size, make, stack=stack)
        self.attn = Attention(config, make, stack=stack)
        self.ffn = MoE(config, make, stack=stack, draft=draft)
        self.hc_attn = HyperConnection(config, make, stack=stack)
        self.hc_ffn = HyperConnection(config, make, stack=stack)

    def __call__(
        self,
        x_BTSD: jax.Array,
        pre_BTS: jax.Array,
        layer: jax.Array | int,
        history_BWH: jax.Array,
        role: Role,
        shared: Shared,
        step: Step,
        config: ModelConfig,
        numerics: Numerics,
        capture: frozenset[str],
    ) -> tuple[jax.Array, jax.Array, jax.Array, Shared, dict[str, jax.Array]]:
        """(streams, pre for the next layer, new window rows, shared state, captures). `layer` indexes the expert stacks."""

        def attend(h_BTD: jax.Array) -> tuple[jax.Array, tuple[jax.Array, Shared, dict[str, jax.Array]]]:
            y_BTD, kv_BTH, made, seen = self.attn(h_BTD, history_BWH, role, shared, step, config, numerics, capture)
            return y_BTD, (kv_BTH, made, seen)

        x_BTSD, pre_BTS, (kv_BTH, shared, seen) = self.attention_part(x_BTSD, pre_BTS, attend, config, numerics)
        x_BTSD, pre_BTS, ffn_seen = self.feed_forward_part(x_BTSD, pre_BTS, layer, step.image_BT, config, numerics)
        seen |= {
            name: value
            for name, value in (ffn_seen | {"hidden": x_BTSD, "pre_mix": pre_BTS}).items()
            if name in capture
        }
        return x_BTSD, pre_BTS, kv_BTH, shared, seen

    def attention_part(
        self,
        x_BTSD: jax.Array,
        pre_BTS: jax.Array,
        attend: Callable[[jax.Array], tuple[jax.Array, R]],
        config: ModelConfig,
        numerics: Numerics,
    ) -> tuple[jax.Array, jax.Array, R]:
        """The attention sub-layer around `attend`, which maps its normalised input to (output, anything else)."""
        pre_next, post, comb = self.hc_attn(x_BTSD, config)
        h_BTD = self.attn_norm(collapse(x_BTSD, pre_BTS, numerics), config.rms_norm_eps, numerics)
        y_BTD, rest = attend(h_BTD)
        return update(x_BTSD, y_BTD, post, comb, numerics), pre_next, rest

    def feed_forward_part(
        self,
        x_BTSD: jax.Array,
        pre_BTS: jax.Array,
        layer: jax.Array | int,
        image_BT: jax.Array | None,
        config: ModelConfig,
        numerics: Numerics,
    ) -> tuple[jax.Array, jax.Array, dict[str, jax.Array]]:
        """The feed-forward sub-layer."""
        pre_next, post, comb = self.hc_ffn(x_BTSD, config)
        h_BTD = self.ffn_norm(collapse(x_BTSD, pre_BTS, numerics), config.rms_norm_eps, numerics)
        y_BTD, gate_idx, gate_w = self.ffn(h_BTD, layer, image_BT, config, numerics)
        seen = {"ffn_in": h_BTD, "ffn_out": y_BTD, "gate_idx": gate_idx, "gate_w": gate_w}
        return update(x_BTSD, y_BTD, post, comb, numerics), pre_next, seen
