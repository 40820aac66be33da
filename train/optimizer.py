"""Optimizers: Muon for matrices, AdamW for vectors, Sinkhorn-balanced momentum for tables of embeddings.

    muon      m = b m + g;  u = NewtonSchulz(g + b m) per matrix, times 0.2 sqrt(max(out, in)): its root mean square is about 0.2
    sinkhorn  as Muon with, instead of NewtonSchulz, rows and columns scaled to a root mean square of 1, alternately, and a
              factor of 0.2; in steps without a gradient for a row, the row and its momentum stay
    adamw     as Adam, decoupled decay

so that one learning rate serves all three (the update of AdamW has a root mean square of 0.2 to 0.4). Gradients are clipped by
their global norm first. Source: arXiv 2609.19969; arXiv 2502.16982 (Muon at scale); arXiv 2502.06742 (Sinkhorn-balanced
gradients). The orthogonalisation is optax's.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Hashable, Mapping
from typing import Any, Final, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from optax.contrib import MuonDimensionNumbers, scale_by_muon

from csa2_jax import ModelConfig
from train.parameters import ROLES, Choice, Rule

_RMS: Final = 0.2


@dataclasses.dataclass(frozen=True)
class OptimizerSettings:
    """Numbers of the optimizers.

    peak, end: learning rate after `warmup` steps and at the last one. schedule: between them, "cosine", "linear", "constant" (no
        end) or "wsd" (constant until the last `decay_share` of the steps, then linear).
    weight_decay: decoupled, times the rate, where a rule has it. clip: global norm of the gradient, 0 for none.
    """

    peak: float = 2.6e-4
    end: float = 2.6e-5
    warmup: int = 100
    schedule: Literal["cosine", "linear", "constant", "wsd"] = "cosine"
    decay_share: float = 0.2
    weight_decay: float = 0.1
    clip: float = 1.0
    b1: float = 0.9
    b2: float = 0.95
    eps: float = 1e-20
    momentum: float = 0.95
    newton_schulz_steps: int = 5
    sinkhorn_iterations: int = 5
    router_bias_rate: float = 1e-3  # per step; 0 freezes the biases

    def __post_init__(self) -> None:
        if not 0 <= self.end <= self.peak:
            raise ValueError(f"end={self.end} must lie between 0 and peak={self.peak}")
        if self.schedule not in ("cosine", "linear", "constant", "wsd"):
            raise ValueError(f"schedule={self.schedule!r} must be 'cosine', 'linear', 'constant' or 'wsd'")
        for name in ("warmup", "weight_decay", "clip", "router_bias_rate", "eps"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}={getattr(self, name)} must not be negative")
        for name in ("b1", "b2", "momentum", "decay_share"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name}={getattr(self, name)} must lie between 0 and 1")


def schedule(settings: OptimizerSettings, steps: int) -> optax.Schedule:
    """Learning rate by step: linear from 0 over the warm-up, then as the settings say, down to `end` at `steps`."""
    after = max(steps - settings.warmup, 1)
    if settings.schedule == "cosine":
        rest = optax.cosine_decay_schedule(settings.peak, after, settings.end / settings.peak if settings.peak else 0.0)
    elif settings.schedule == "linear":
        rest = optax.linear_schedule(settings.peak, settings.end, after)
    elif settings.schedule == "wsd":
        falling = max(round(after * settings.decay_share), 1)
        rest = optax.linear_schedule(settings.peak, settings.end, falling, after - falling)
    else:
        rest = optax.constant_schedule(settings.peak)
    if not settings.warmup:
        return rest
    rise = optax.linear_schedule(0.0, settings.peak, settings.warmup)
    return optax.join_schedules([lambda step: rise(step + 1), rest], [settings.warmup])


def make_optimizer(
    trained: Mapping[str, Any], choice: Choice, config: ModelConfig, settings: OptimizerSettings, steps: int
) -> optax.GradientTransformation:
    """The optimizer of a {path: array} tree of trained parameters."""
    labels = {name: choice.rule(name, array).role for name, array in trained.items()}
    rate = schedule(settings, steps)
    rules: dict[Hashable, optax.GradientTransformation] = {
        role: _transform(ROLES[role], config, settings, rate)
        for role in dict.fromkeys(labels.values())  # in a fixed order, or every process compiles another program
    }
    optimizer = optax.partition(rules, labels)
    return optax.chain(optax.clip_by_global_norm(settings.clip), optimizer) if settings.clip else optimizer


def _transform(
    rule: Rule, config: ModelConfig, settings: OptimizerSettings, rate: optax.Schedule
) -> optax.GradientTransformation:
    if rule.method == "muon":
        parts = getattr(config, rule.split) if rule.split else 1
        direction = muon(settings.momentum, settings.newton_schulz_steps, parts)
    elif rule.method == "sinkhorn":
        direction = sinkhorn_momentum(settings.momentum, settings.sinkhorn_iterations)
    else:
        direction = optax.scale_by_adam(settings.b1, settings.b2, settings.eps)
    decay = [optax.add_decayed_weights(settings.weight_decay)] if rule.decay and settings.weight_decay else []
    return optax.chain(direction, *decay, optax.scale_by_learning_rate(lambda step: rate(step) * rule.rate))


def muon(momentum: float, steps: int, parts: int = 1) -> optax.GradientTransformation:
    """Orthogonalised momentum for weights [..., out, in]; leading axes are a batch of matrices, and rows fall into `parts`."""

    def numbers(tree: Any) -> Any:
        return jax.tree.map(lambda a: MuonDimensionNumbers(a.ndim - 1, a.ndim - 2), tree)

    inner = scale_by_muon(beta=momentum, ns_steps=steps, weight_dimension_numbers=numbers)

    def apart(a: jax.Array) -> jax.Array:
        return a.reshape(*a.shape[:-2], parts, a.shape[-2] // parts, a.shape[-1])

    def init(params: Any) -> Any:
        return inner.init(jax.tree.map(apart, params))

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        moved, state = inner.update(jax.tree.map(apart, updates), state)

        def together(u: jax.Array, like: jax.Array) -> jax.Array:
            return (u * (_RMS * math.sqrt(max(u.shape[-2:])))).reshape(like.shape)

        return jax.tree.map(together, moved, updates), state

    return optax.GradientTransformation(init, update)


class SinkhornState(NamedTuple):
    """The momentum."""

    momentum: Any


def sinkhorn_momentum(momentum: float, iterations: int) -> optax.GradientTransformation:
    """Momentum whose rows and columns are balanced; a row stays, and its momentum with it, in steps that it has no gradient in.

    Balancing would bring what is left of an old gradient to full length: an id seen once would move on for hundreds of steps.
    Where every row has a gradient, as in batches of the size that the release was trained with, this is plain momentum.
    """

    def init(params: Any) -> SinkhornState:
        return SinkhornState(jax.tree.map(jnp.zeros_like, params))

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, SinkhornState]:
        del params

        def hold(m: jax.Array, g: jax.Array) -> jax.Array:
            return jnp.where(touched(g), momentum * m + g, m)

        def move(m: jax.Array, g: jax.Array) -> jax.Array:
            return balance(jnp.where(touched(g), g + momentum * m, 0.0), iterations) * _RMS

        held = jax.tree.map(hold, state.momentum, updates)
        return jax.tree.map(move, held, updates), SinkhornState(held)

    return optax.GradientTransformation(init, update)


def touched(gradient: jax.Array) -> jax.Array:
    """Rows that are not all zero, bool [..., 1]."""
    return jnp.any(gradient != 0, axis=-1, keepdims=True)


def balance(matrix: jax.Array, iterations: int) -> jax.Array:
    """Divide columns, then rows, by their root mean square, `iterations` times. Rows of zeros stay, and do not count.

    A row's share of the columns' mean is that of the rows that are not zero, so that a batch that touches few ids moves those as
    far as one that touches all.
    """
    row_there = touched(matrix)
    rows = jnp.maximum(jnp.sum(row_there), 1)
    tiny = jnp.finfo(jnp.float32).tiny

    def both(_: int, m: jax.Array) -> jax.Array:
        m = m / jnp.maximum(jnp.sqrt(jnp.sum(jnp.square(m), axis=0, keepdims=True) / rows), tiny)
        return m / jnp.maximum(jnp.sqrt(jnp.mean(jnp.square(m), axis=1, keepdims=True)), tiny)

    # Scaled to 1 first: gradients may be so small that their squares vanish.
    matrix = matrix / jnp.maximum(jnp.max(jnp.abs(matrix)), tiny)
    return jnp.where(row_there, jax.lax.fori_loop(0, iterations, both, matrix), 0.0)


def move_router_bias(bias_LX: jax.Array, load_LX: jax.Array, rate: float) -> jax.Array:
    """bias + rate * sign(mean load - load), per layer, by what the accumulated batch sent to each expert."""
    return bias_LX + rate * jnp.sign(jnp.mean(load_LX, axis=-1, keepdims=True) - load_LX)
