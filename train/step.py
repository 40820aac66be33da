"""One update, compiled: micro-batches, losses, gradients, optimizer, router biases, and what is reported of it.

The step is one jit over (state, batch) with the state donated. A batch has a leading axis of micro-batches; their gradients are
summed in f32 and everything is divided by the tokens of the whole batch, so that cutting it differently changes only rounding.
Where a loss or gradient is not finite nothing is moved: the state stays that of the step before.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from csa2_jax import Model, ModelConfig
from csa2_jax.learning import IndexLoss, Learning, Remat
from train.draft_loss import DraftLossSettings, draft_sums
from train.losses import cross_entropy
from train.optimizer import OptimizerSettings, move_router_bias
from train.parameters import Parts

Arrays = dict[str, jax.Array]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Batch:
    """Rows of packed documents, each array [A, B, T] of A micro-batches (or [B, T] of one).

    tokens, targets: int32 ids; the target of a document's last token is nothing, its weight 0.
    weight: f32, of each token in the cross-entropy.
    origin: int32, where in its row the token's document begins. segment: its number within the row, -1 padding.
    """

    tokens: Any
    targets: Any
    weight: Any
    origin: Any
    segment: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """Everything that a step changes, and `frozen`, which it does not."""

    step: jax.Array
    trained: Arrays
    loads: Arrays  # router biases
    frozen: Arrays
    optimizer: Any

    @classmethod
    def start(cls, parts: Parts, optimizer: optax.GradientTransformation) -> TrainState:
        """The state before the first step."""
        return cls(jnp.zeros((), jnp.int32), parts.trained, parts.loads, parts.frozen, optimizer.init(parts.trained))

    def arrays(self) -> Arrays:
        """All parameters and constants by path."""
        return self.trained | self.loads | self.frozen


@dataclasses.dataclass(frozen=True)
class LossSettings:
    """What is minimised.

    lm, index, balance: weights of the terms; index and draft losses of weight 0 are not computed. Both train parameters that no
        other term reaches, so that their weights matter for sums and clipping more than for what is learned.
    index_teacher, index_domain: see `IndexLoss`.
    replay: share of documents, drawn anew every step, that are computed as serving replays them: from a random place on, the
        decoder's windows begin there, as if everything before had gone through the encoder alone.
    chunk: vocabulary entries whose logits exist at once, 0 for the default.
    remat: what the backward computes again instead of keeping: "none", "layer" or "group".
    draft: of the draft head, see `DraftLossSettings`.
    """

    lm: float = 1.0
    index: float = 1.0
    balance: float = 1e-4
    replay: float = 0.0
    index_teacher: str = "served"
    index_domain: str = "selected"
    chunk: int = 0
    remat: Remat = "layer"
    draft: DraftLossSettings = dataclasses.field(default_factory=DraftLossSettings)

    def __post_init__(self) -> None:
        for name in ("lm", "index", "balance"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}={getattr(self, name)} must not be negative")
        if not 0 <= self.replay <= 1:
            raise ValueError(f"replay={self.replay} must lie between 0 and 1")
        if self.remat not in ("none", "layer", "group"):
            raise ValueError(f"remat={self.remat!r} must be 'none', 'layer' or 'group'")
        self.index_loss()

    def index_loss(self) -> IndexLoss | None:
        """The index loss, if it has a weight."""
        loss = IndexLoss(self.index_teacher, self.index_domain)  # type: ignore[arg-type]
        return loss if self.index else None


Sums = dict[str, jax.Array]
_LAYER_SUMS: Final = ("index_loss", "index_recall", "index_tokens")


def losses(model: Model, batch: Batch, settings: LossSettings, segments: int, key: jax.Array) -> Sums:
    """Sums over the tokens of one micro-batch: of every loss term, and of what is reported.

    Keys: lm, correct, index, balance; per selecting layer [S] index_loss, index_recall, index_tokens; expert_load [L, X]; of the
    draft head those of `draft_sums`. key: draws the places where the draft head is asked.
    """
    batch_rows, tokens = batch.tokens.shape
    learning = Learning(batch.segment, segments, settings.index_loss(), settings.remat)
    drafts = settings.draft.weight > 0 and model.draft is not None
    h_BTD, seen = model.trunk(
        batch.tokens,
        jnp.full(batch_rows, tokens, jnp.int32),
        learning=learning,
        origin_BT=batch.origin,
        replay_BT=replay_starts(batch, settings.replay, segments, key) if settings.replay else None,
        capture=frozenset({"main_hidden"} if drafts else ()),
    )
    flat = (batch_rows * tokens,)
    ce = cross_entropy(
        h_BTD.reshape(*flat, -1),
        model.head["weight"][...],
        batch.targets.reshape(flat),
        batch.weight.reshape(flat),
        settings.chunk or None,
    )
    layers = range(model.config.num_hidden_layers)
    sums = {
        "lm": ce.loss,
        "correct": ce.correct,
        "balance": sum((seen["balance_loss"][layer] for layer in layers), jnp.zeros(())),
        "expert_load": jnp.stack([seen["expert_load"][layer] for layer in layers]),
    }
    if drafts:
        position = jnp.arange(tokens) - batch.origin
        sums |= draft_sums(
            model,
            settings.draft,
            batch.tokens,
            batch.segment,
            position,
            seen["main_hidden"],
            h_BTD,
            key,
            settings.chunk or None,
        )
    selecting = model.config.plan.index_layers
    if settings.index and selecting:
        for name in _LAYER_SUMS:
            sums[name] = jnp.stack([seen[name][layer] for layer in selecting])
        sums["index"] = jnp.sum(sums["index_loss"])
    return sums


def replay_starts(batch: Batch, share: float, segments: int, key: jax.Array) -> jax.Array:
    """Where in its row each token's document is replayed from, int32 [B, T]; the row's width where it is not."""
    rows, tokens = batch.tokens.shape
    numbers = jnp.arange(segments)
    length_BS = jnp.sum(batch.segment[..., None] == numbers, axis=1)
    chosen, place = jax.random.uniform(jax.random.fold_in(key, 1), (2, rows, segments))
    start_BS = jnp.where(chosen < share, (place * length_BS).astype(jnp.int32), tokens)
    start_BT = jnp.take_along_axis(start_BS, jnp.maximum(batch.segment, 0), axis=1)
    return jnp.minimum(start_BT + batch.origin, tokens)


def objective(sums: Sums, settings: LossSettings, predicted: jax.Array, tokens: jax.Array) -> jax.Array:
    """The weighted sum that is minimised, per predicted token and per token of the whole batch."""
    total = settings.lm * sums["lm"] / predicted + settings.balance * sums["balance"] / tokens
    if "index" in sums:
        total += settings.index * sums["index"] / tokens
    if "draft" in sums:  # per token too: how many are drafted in a micro-batch is not known before
        draft = sums["draft"] + settings.draft.confidence * sums["draft_confidence"]
        total += settings.draft.weight * draft / tokens
    return total


Step = Callable[[TrainState, Batch], tuple[TrainState, dict[str, jax.Array]]]


def make_step(
    together: Callable[[Arrays], Model],
    optimizer: optax.GradientTransformation,
    config: ModelConfig,
    losses_: LossSettings,
    optimizer_: OptimizerSettings,
    segments: int,
    *,
    shardings: Any = None,
) -> Step:
    """The compiled step: (state, batch [A, B, T]) -> (next state, metrics). Consumes the state.

    segments: documents that a row may hold at most. shardings: of the next state, a tree like it (by default the compiler's).
    """
    if (loss := losses_.index_loss()) is not None:
        loss.check(config.plan)

    def gradient(
        state: TrainState, batch: Batch, key: jax.Array, predicted: jax.Array, tokens: jax.Array
    ) -> tuple[Arrays, Sums]:
        def minimised(trained: Arrays) -> tuple[jax.Array, Sums]:
            sums = losses(together(trained | state.loads | state.frozen), batch, losses_, segments, key)
            return objective(sums, losses_, predicted, tokens), sums

        return jax.grad(minimised, has_aux=True)(state.trained)

    def step(state: TrainState, batch: Batch) -> tuple[TrainState, dict[str, jax.Array]]:
        predicted = jnp.maximum(jnp.sum(batch.weight), 1.0)
        tokens = jnp.maximum(jnp.sum((batch.segment >= 0).astype(jnp.float32)), 1.0)
        keys = jax.random.split(jax.random.fold_in(jax.random.key(0), state.step), batch.tokens.shape[0])

        def of_micro_batch(micro: tuple[Batch, jax.Array]) -> tuple[Arrays, Sums]:
            return gradient(state, *micro, predicted, tokens)

        one = jax.tree.map(lambda a: a[0], (batch, keys))
        if batch.tokens.shape[0] == 1:
            total = of_micro_batch(one)
        else:  # from zeros, so that the gradient is compiled once
            shapes = jax.eval_shape(of_micro_batch, one)
            total = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), shapes)

            def add(total: Any, micro: tuple[Batch, jax.Array]) -> tuple[Any, None]:
                return jax.tree.map(jnp.add, total, of_micro_batch(micro)), None

            total, _ = lax.scan(add, total, (batch, keys))
        grads, sums = total
        broken = jnp.stack([~jnp.all(jnp.isfinite(g)) for g in jax.tree.leaves(grads)])
        loss = objective(sums, losses_, predicted, tokens)
        finite = jnp.isfinite(loss) & ~jnp.any(broken)
        updates, moved = optimizer.update(grads, state.optimizer, state.trained)
        trained: Any = optax.apply_updates(state.trained, updates)
        loads = {name: _moved_bias(name, bias, sums, optimizer_.router_bias_rate) for name, bias in state.loads.items()}
        new = TrainState(state.step + 1, trained, loads, {}, moved)
        old = dataclasses.replace(state, frozen={})
        new = jax.tree.map(lambda a, b: jnp.where(finite, a, b), new, old)
        report = _report(sums, predicted, tokens) | {
            "loss": loss,
            "gradient_norm": optax.tree.norm(grads),
            "update_norm": optax.tree.norm(updates),
            "broken": broken,
            "finite": finite,
        }
        return dataclasses.replace(new, frozen=state.frozen), report

    return jax.jit(step, donate_argnums=0, out_shardings=None if shardings is None else (shardings, None))


def make_evaluation(
    together: Callable[[Arrays], Model], losses_: LossSettings, segments: int
) -> Callable[[Arrays, Batch], dict[str, jax.Array]]:
    """(arrays, batch [B, T]) -> metrics, with the attention that selections catch measured over all visible entries."""
    everything = dataclasses.replace(
        losses_, index_domain="visible", index=losses_.index or 1.0, remat="none", replay=0.0
    )

    def evaluate(arrays: Arrays, batch: Batch) -> dict[str, jax.Array]:
        sums = losses(together(arrays), batch, everything, segments, jax.random.key(0))
        predicted = jnp.maximum(jnp.sum(batch.weight), 1.0)
        return _report(sums, predicted, jnp.maximum(jnp.sum((batch.segment >= 0).astype(jnp.float32)), 1.0))

    return jax.jit(evaluate)


def _report(sums: Sums, predicted: jax.Array, tokens: jax.Array) -> dict[str, jax.Array]:
    load = sums["expert_load"]
    report = {
        "lm": sums["lm"] / predicted,
        "accuracy": sums["correct"] / predicted,
        "balance": sums["balance"] / tokens / load.shape[0],
        "busiest_expert": jnp.max(load / jnp.maximum(jnp.mean(load, axis=-1, keepdims=True), 1.0)),
        "predicted": predicted,
        "tokens": tokens,
    }
    if "draft" in sums:
        drafted = jnp.maximum(sums["draft_tokens"], 1.0)
        report |= {"draft": sums["draft"] / drafted, "draft_accuracy": sums["draft_correct"] / drafted}
    if "index" in sums:
        with_entries = jnp.maximum(sums["index_tokens"], 1.0)
        report["index"] = jnp.mean(sums["index_loss"] / with_entries)
        report["recall"] = jnp.mean(sums["index_recall"] / with_entries)
        report["recall_by_layer"] = sums["index_recall"] / with_entries
    return report


def _moved_bias(name: str, bias: jax.Array, sums: Sums, rate: float) -> jax.Array:
    load = sums.get("draft_load") if name.startswith("draft.") else sums["expert_load"]
    # No image token can occur without the image tower, so that `bias_vl` has no load to follow.
    return bias if name.endswith("_vl") or load is None or not rate else move_router_bias(bias, load, rate)


def broken_parameters(names: list[str], broken: Any) -> list[str]:
    """Paths whose gradient was not finite; `names` are the trained ones."""
    return [name for name, bad in zip(sorted(names), np.asarray(broken), strict=True) if bad]
