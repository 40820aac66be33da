"""Mixture of experts: sqrt(softplus) router with a load-balancing bias, clamped SwiGLU experts, one shared expert.

    score = sqrt(softplus(x Wg^T));  chosen = top k of score + bias;  weight = score / (sum + 1e-20) * routed_scaling_factor
    expert(x) = w2 (silu(min(w1 x, c)) * clip(w3 x, -c, c) * weight),  summed over the chosen in ascending expert order in f32

Tokens inside an image span use `bias_vl`. In the first `num_hash_layers` layers a table says which experts a token id gets, and
the router only weighs them. Source: arXiv 2609.19969 (MoE), arXiv 2412.19437 (auxiliary-loss-free balancing); DeepSeek-V4.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

from csa2_jax.config import ModelConfig
from csa2_jax.expert_blocks import expert_blocks, sort_by_expert
from csa2_jax.layers import ExpertParam, Linear, ParamFactory, Unstacked, round_rows
from csa2_jax.numerics import Numerics, einsum


class TokenTable(Unstacked):
    """Experts of every token id: a table of the checkpoint that is not trained."""


class Gate(nnx.Module):
    """Router: f32 weight [X, D], selection bias [X], and with an image tower bias_vl [X]."""

    def __init__(self, config: ModelConfig, experts: int, make: ParamFactory, *, stack: tuple[int, ...] = ()) -> None:
        f32 = jnp.dtype(jnp.float32)
        self.weight = make.normal((*stack, experts, config.hidden_size), f32)
        self.bias = make.full((*stack, experts), 0.0, f32)
        self.bias_vl = make.full((*stack, experts), 0.0, f32) if config.has_vision else None

    def __call__(
        self, x_nD: jax.Array, image_n: jax.Array | None, topk: int, scaling: float, known_nk: jax.Array | None = None
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """(expert ids int32 [n, k] best first, weights f32 [n, k], scores f32 [n, X]); equal scores go to the lowest expert.

        known_nk: the experts, where something else than the scores chose them: those that are not negative.
        """
        score = jnp.sqrt(jax.nn.softplus(einsum("nd,xd->nx", x_nD.astype(jnp.float32), self.weight[...])))
        bias = self.bias[...]
        if self.bias_vl is not None and image_n is not None:
            bias = jnp.where(image_n[:, None], self.bias_vl[...], bias)
        _, index = lax.top_k(lax.stop_gradient(score) + bias, topk)
        if known_nk is not None:
            index = jnp.where(known_nk < 0, index, known_nk)
        weight = jnp.take_along_axis(score, index, axis=-1)
        if topk > 1:
            weight = weight / (jnp.sum(weight, axis=-1, keepdims=True) + 1e-20)
        return index.astype(jnp.int32), weight * scaling, score


class Experts(nnx.Module):
    """Routed experts of a whole stack of layers: w1, w3 [L, X, F, D], w2 [L, X, D, F]."""

    def __init__(self, config: ModelConfig, experts: int, make: ParamFactory, *, stack: tuple[int, ...]) -> None:
        d, f, stack = config.hidden_size, config.moe_intermediate_size, (*stack, experts)
        self.w1 = Linear(f, d, make, stack=stack, storage="fp4", kind=ExpertParam)
        self.w2 = Linear(d, f, make, stack=stack, storage="fp4", kind=ExpertParam)
        self.w3 = Linear(f, d, make, stack=stack, storage="fp4", kind=ExpertParam)


class MoE(nnx.Module):
    """One layer's router, shared expert and (stacked) routed experts."""

    def __init__(self, config: ModelConfig, make: ParamFactory, *, stack: tuple[int, ...], draft: bool = False) -> None:
        d, f = config.hidden_size, config.moe_intermediate_size
        experts = config.dspark_n_routed_experts if draft else config.n_routed_experts
        self.topk = config.dspark_num_experts_per_tok if draft else config.num_experts_per_tok
        self.num_experts = experts
        self.gate = Gate(config, experts, make, stack=stack)
        hashed = 0 if draft else config.num_hash_layers
        self.by_token = (
            TokenTable(jnp.zeros((hashed, config.vocab_size, self.topk), jnp.int32)) if hashed else nnx.data(None)
        )
        self.experts = Experts(config, experts, make, stack=stack)
        self.shared_experts = nnx.Dict(
            w1=Linear(f, d, make, stack=stack, storage="fp8"),
            w2=Linear(d, f, make, stack=stack, storage="fp8"),
            w3=Linear(f, d, make, stack=stack, storage="fp8"),
        )

    def __call__(
        self,
        x_BTD: jax.Array,
        layer: jax.Array | int,
        image_BT: jax.Array | None,
        config: ModelConfig,
        numerics: Numerics,
        tokens_BT: jax.Array | None = None,
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """(y_BTD, what can be captured: gate_idx and gate_w [B, T, k], gate_score [B, T, X]).

        tokens_BT: ids, for layers whose experts they choose.
        """
        batch, tokens, width = x_BTD.shape
        x_nD = x_BTD.reshape(-1, width)
        image_n = None if image_BT is None else image_BT.reshape(-1)
        known_nk = self._known(layer, tokens_BT)
        index_nk, weight_nk, score_nX = self.gate(x_nD, image_n, self.topk, config.routed_scaling_factor, known_nk)
        # Ascending expert order: the released code adds the experts' outputs in that order.
        order = jnp.argsort(index_nk, axis=-1)
        y_nkD = self._routed(
            x_nD,
            jnp.take_along_axis(index_nk, order, axis=-1),
            jnp.take_along_axis(weight_nk, order, axis=-1),
            layer,
            config,
            numerics,
        )
        shared = self.shared_experts
        g, u = shared["w1"](x_nD, numerics), shared["w3"](x_nD, numerics)
        y_nD = shared["w2"](swiglu(g, u, None, config.swiglu_limit, numerics), numerics).astype(jnp.float32)
        routed = y_nkD[:, 0].astype(jnp.float32)
        for k in range(1, self.topk):
            routed = routed + y_nkD[:, k].astype(jnp.float32)
        y = numerics.cast(routed + y_nD).reshape(batch, tokens, width)
        made = {"gate_idx": index_nk, "gate_w": weight_nk, "gate_score": score_nX}
        return y, {name: a.reshape(batch, tokens, -1) for name, a in made.items()}

    def _known(self, layer: jax.Array | int, tokens_BT: jax.Array | None) -> jax.Array | None:
        """The experts [n, k] that token ids choose in this layer, -1 where the router does; None where it does for sure."""
        if self.by_token is None or tokens_BT is None:
            return None
        table_LVk = self.by_token[...]
        hashed = table_LVk.shape[0]
        if isinstance(layer, int | np.integer) and layer >= hashed:
            return None
        known_nk = table_LVk[jnp.minimum(layer, hashed - 1), tokens_BT.reshape(-1)]
        return jnp.where(jnp.asarray(layer) < hashed, known_nk, -1)

    def _routed(
        self,
        x_nD: jax.Array,
        index_nk: jax.Array,
        weight_nk: jax.Array,
        layer: jax.Array | int,
        config: ModelConfig,
        numerics: Numerics,
    ) -> jax.Array:
        """Outputs of the chosen experts [n, k, D]: pairs sorted by expert, then one block of one expert's rows at a time."""
        pairs = index_nk.size
        plain = self.experts.w1.scale is None and all(
            w.lora_a is None for w in (self.experts.w1, self.experts.w2, self.experts.w3)
        )
        if pairs == self.topk and plain:
            return self._few(x_nD, index_nk, weight_nk, layer, config, numerics)

        # One token's experts are all different, so its blocks need no more than one row.
        size = 1 if x_nD.shape[0] == 1 else _block_size(pairs, self.num_experts)
        rows = sort_by_expert(index_nk.reshape(-1), self.num_experts, size)
        graph, state = nnx.split(self.experts)
        leaves, tree = jax.tree.flatten(state)

        def expert(leaves: list[jax.Array], x_nD: jax.Array, weight_n: jax.Array) -> jax.Array:
            one = nnx.merge(graph, jax.tree.unflatten(tree, leaves))
            g, u = one.w1(x_nD, numerics), one.w3(x_nD, numerics)
            return one.w2(swiglu(g, u, weight_n, config.swiglu_limit, numerics), numerics)

        return expert_blocks(expert, leaves, layer, self.num_experts, x_nD, weight_nk, rows)

    def _few(
        self,
        x_nD: jax.Array,
        index_nk: jax.Array,
        weight_nk: jax.Array,
        layer: jax.Array | int,
        config: ModelConfig,
        numerics: Numerics,
    ) -> jax.Array:
        """One token: its experts side by side as one batch (measured 0.43 ms against 0.8 for two of 512 x 512 on a CPU)."""

        def multiply(x_kD: jax.Array, w: Linear) -> jax.Array:
            chosen = w.weight[layer, index_nk[0]]
            x_kD = round_rows(x_kD, w.round_operand, numerics, w.operand_group)
            return numerics.cast(einsum("bmk,bnk->bmn", x_kD[:, None], chosen.astype(x_kD.dtype))[:, 0])

        w1, w2, w3 = self.experts.w1, self.experts.w2, self.experts.w3
        x_kD = jnp.broadcast_to(x_nD, (self.topk, x_nD.shape[1]))
        h = swiglu(multiply(x_kD, w1), multiply(x_kD, w3), weight_nk[0], config.swiglu_limit, numerics)
        return multiply(h, w2)[None]


def swiglu(g: jax.Array, u: jax.Array, weight: jax.Array | None, limit: float, numerics: Numerics) -> jax.Array:
    """silu(min(g, limit)) * clip(u, -limit, limit) [* routing weight], f32, cast."""
    g, u = g.astype(jnp.float32), u.astype(jnp.float32)
    h = jax.nn.silu(jnp.minimum(g, limit)) * jnp.clip(u, -limit, limit)
    return numerics.cast(h if weight is None else h * weight[:, None])


def _block_size(pairs: int, experts: int) -> int:
    """Rows per block: an eighth more than an expert's fair share, so that most experts need one block of mostly real rows."""
    share = -(-9 * pairs // (8 * experts))
    return 8 if share <= 8 else min(-(-share // 32) * 32, 512)
