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
from kernels_pallas.storage import Entries

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
        history_BWH: Entries,
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

        x_BTSD, pre_BTS, (kv_BTH, shared, seen) = self.around_attention(x_BTSD, pre_BTS, attend, config, numerics)
        x_BTSD, pre_BTS, made = self.feed_forward(
            x_BTSD, pre_BTS, layer, step.image_BT, config, numerics, step.tokens_BT
        )
        made |= {"hidden": x_BTSD, "pre_mix": pre_BTS}
        seen |= {name: value for name, value in made.items() if name in capture}
        return x_BTSD, pre_BTS, kv_BTH, shared, seen

    def around_attention(
        self,
        x_BTSD: jax.Array,
        pre_BTS: jax.Array,
        attend: Callable[[jax.Array], tuple[jax.Array, R]],
        config: ModelConfig,
        numerics: Numerics,
    ) -> tuple[jax.Array, jax.Array, R]:
        """The attention's hyper-connection around `attend`, which maps its normalised input to (output, anything else)."""
        return _around(self.hc_attn, self.attn_norm, x_BTSD, pre_BTS, attend, config, numerics)

    def around_feed_forward(
        self,
        x_BTSD: jax.Array,
        pre_BTS: jax.Array,
        feed: Callable[[jax.Array], tuple[jax.Array, R]],
        config: ModelConfig,
        numerics: Numerics,
    ) -> tuple[jax.Array, jax.Array, R]:
        """The same around the feed-forward."""
        return _around(self.hc_ffn, self.ffn_norm, x_BTSD, pre_BTS, feed, config, numerics)

    def feed_forward(
        self,
        x_BTSD: jax.Array,
        pre_BTS: jax.Array,
        layer: jax.Array | int,
        image_BT: jax.Array | None,
        config: ModelConfig,
        numerics: Numerics,
        tokens_BT: jax.Array | None = None,
    ) -> tuple[jax.Array, jax.Array, dict[str, jax.Array]]:
        """The feed-forward sub-layer: (streams, pre for the next layer, what can be captured)."""

        def feed(h_BTD: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
            y_BTD, made = self.ffn(h_BTD, layer, image_BT, config, numerics, tokens_BT)
            return y_BTD, {"ffn_in": h_BTD, "ffn_out": y_BTD} | made

        return self.around_feed_forward(x_BTSD, pre_BTS, feed, config, numerics)


def _around(
    hyper: HyperConnection,
    norm: RMSNorm,
    x_BTSD: jax.Array,
    pre_BTS: jax.Array,
    sublayer: Callable[[jax.Array], tuple[jax.Array, R]],
    config: ModelConfig,
    numerics: Numerics,
) -> tuple[jax.Array, jax.Array, R]:
    """Mixes, collapse, norm, sub-layer, update, in that order; `pre_BTS` comes from the sub-layer before, in V4 from its own."""
    pre_next, post, comb = hyper(x_BTSD, config)
    if not config.generation.deferred_pre:
        pre_BTS = pre_next
    h_BTD = norm(collapse(x_BTSD, pre_BTS, numerics), config.rms_norm_eps, numerics)
    y_BTD, rest = sublayer(h_BTD)
    return update(x_BTSD, y_BTD, post, comb, numerics), pre_next, rest
