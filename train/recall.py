"""Does the index learn to find things? `python -m train.recall` trains small models from scratch and says so, with a picture.

Every model sees sequences whose answers lie beyond every window (`tasks`), so that only its pool and the index over it can give
them. Compared are the layer plans that CSA2 is made of, at equal width and depth, and training with the index loss and without:

    accuracy   of answers, on sequences never seen
    found      how often the selection of at least one layer holds the entry that the answer is in, per question
    bytes      of global cache per token that the plan needs
    overlap    of neighbouring selections (of the layers that select for themselves): |A and B| / |A or B|

Source of the questions: arXiv 2609.19969 shows neither an index loss nor an ablation of the sharing.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import tyro

from csa2_jax import Model, ModelConfig, init_model
from train.optimizer import OptimizerSettings, make_optimizer
from train.parameters import Choice, take_apart
from train.step import LossSettings, TrainState, make_evaluation, make_step
from train.tasks import Task

PLANS: dict[str, str] = {
    "all FULL": "W F2 F2 F1 F1 F1",
    "FULL + REUSE": "W F2 U F1 U U",
    "FULL + REINDEX + REUSE": "W F2 U F1 I U",
}
"""Layer by layer: W window only, F2 or F1 a FULL layer of that ratio, I REINDEX, U REUSE."""


def plan_config(plan: str, vocab_size: int, *, width: int = 64, window: int = 8, topk: int = 8) -> ModelConfig:
    """A small model of one of `PLANS`."""
    layers = plan.split()
    ratios, pools, selecting, ratio = [], [], [], 0
    for i, layer in enumerate(layers):
        if layer[0] == "F":
            ratio = int(layer[1:])
            pools.append(i)
        if layer[0] in "FI":
            selecting.append(i)
        ratios.append(0 if layer == "W" else ratio)
    bounded = "I" in layers[pools[-1] :]
    return ModelConfig(
        vocab_size=vocab_size,
        hidden_size=width,
        moe_intermediate_size=width,
        num_hidden_layers=len(layers),
        num_attention_heads=4,
        head_dim=32,
        qk_rope_head_dim=16,
        q_lora_rank=width,
        o_lora_rank=32,
        o_groups=2,
        max_position_embeddings=4096,
        n_routed_experts=2,
        num_experts_per_tok=1,
        sliding_window=window,
        compress_ratios=tuple(ratios),
        kv_source_layer_ids=tuple(pools),
        index_source_layer_ids=tuple(selecting),
        index_n_heads=4,
        index_head_dim=32,
        index_topk=topk,
        candidate_source_layer_id=pools[-1] if bounded else None,
        candidate_topk_blocks=8 if bounded else 0,
        candidate_block_size=4 if bounded else 0,
        hc_mult=2,
        hc_sinkhorn_iters=4,
    )


def cache_bytes(config: ModelConfig) -> float:
    """Bytes of global cache per token, as stored in bf16: 2 (H + J) / m for every pool."""
    ratios = [config.plan.layers[layer].ratio for layer in config.kv_source_layer_ids]
    return sum(2 * (config.head_dim + config.index_head_dim) / m for m in ratios)


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a model came to."""

    plan: str
    index_loss: bool
    task: str
    accuracy: float
    found: float
    found_by_layer: dict[int, float]
    overlap: dict[str, float]
    cache_bytes: float
    parameters: int
    steps: int
    seconds: float
    curve: list[tuple[int, float]]


def train_one(
    name: str,
    task: Task,
    *,
    index_loss: bool,
    steps: int,
    rows: int = 16,
    seed: int = 0,
    told: Callable[[str], None] = lambda text: None,
) -> Outcome:
    """Train a model of PLANS[name] on a task, from random weights."""
    config = plan_config(PLANS[name], task.vocab_size)
    model = init_model(config, seed, compute_dtype="float32", fake_quant=False)
    together, parts = take_apart(model, Choice())
    settings = OptimizerSettings(peak=3e-3, end=3e-4, warmup=50)
    optimizer = make_optimizer(parts.trained, Choice(), config, settings, steps)
    loss = LossSettings(index=1.0 if index_loss else 0.0, remat="none")
    step = make_step(together, optimizer, config, loss, settings, 1)
    evaluate = make_evaluation(together, loss, 1)
    state = TrainState.start(parts, optimizer)
    rng, test_rng = np.random.default_rng(seed + 1), np.random.default_rng(seed + 1_000_003)
    test, needles = task.draw(test_rng, 128)
    curve: list[tuple[int, float]] = []
    began = time.perf_counter()
    for number in range(1, steps + 1):
        batch, _ = task.draw(rng, rows)
        state, report = step(state, jax.tree.map(lambda a: a[None], batch))
        if not bool(report["finite"]):
            raise RuntimeError(f"{name}: the loss of step {number} is {float(report['loss'])}")
        if number % 50 == 0 or number == steps:
            accuracy = float(evaluate(state.arrays(), test)["accuracy"])
            curve.append((number, accuracy))
            told(
                f"{name}, {'with' if index_loss else 'without'} index loss: step {number} of {steps}, accuracy {accuracy:.1%}"
            )
    seconds = time.perf_counter() - began
    found, by_layer, overlap = look_inside(together(state.arrays()), test.tokens, needles)
    return Outcome(
        name,
        index_loss,
        task.kind,
        curve[-1][1],
        found,
        by_layer,
        overlap,
        cache_bytes(config),
        sum(a.size for a in parts.trained.values()),
        steps,
        seconds,
        curve,
    )


def look_inside(model: Model, tokens_BT: Any, needles: np.ndarray) -> tuple[float, dict[int, float], dict[str, float]]:
    """(share of questions whose needle some layer selected, the same by layer, overlap of neighbouring selections)."""
    run = jax.jit(lambda tokens, count: model.trunk(tokens, count, capture=frozenset({"selections"}))[1]["selections"])
    batch, width = needles.shape
    selections = run(jnp.asarray(tokens_BT), jnp.full(batch, width, jnp.int32))
    asked = needles >= 0
    hit = np.zeros(needles.shape, bool)
    by_layer, sets = {}, {}
    for layer in model.config.plan.index_layers:
        chosen = np.asarray(selections[layer])
        ratio = model.config.plan.layers[layer].ratio
        # A pair of two tokens may fall into two entries: the one of its value holds the answer.
        here = (chosen == ((needles + 1) // ratio)[..., None]).any(axis=-1)
        by_layer[layer] = float(here[asked].mean())
        hit |= here
        sets[layer] = chosen[asked]
    overlap = {}
    layers = sorted(sets)
    for a, b in itertools.pairwise(layers):
        if model.config.plan.layers[a].ratio == model.config.plan.layers[b].ratio:
            overlap[f"{a}-{b}"] = _overlap(sets[a], sets[b])
    return float(hit[asked].mean()), by_layer, overlap


def _overlap(a: np.ndarray, b: np.ndarray) -> float:
    shares = []
    for x, y in zip(a, b, strict=True):
        left, right = set(x[x >= 0].tolist()), set(y[y >= 0].tolist())
        if left | right:
            shares.append(len(left & right) / len(left | right))
    return float(np.mean(shares)) if shares else 0.0


def draw(outcomes: Sequence[Outcome], path: Path) -> None:
    """Accuracy against steps, and accuracy and needles found against bytes of cache."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.4), constrained_layout=True)
    colours = dict(zip(PLANS, ("C0", "C1", "C2"), strict=True))
    for number, o in enumerate(outcomes):
        style = "-" if o.index_loss else "--"
        label = o.plan + ("" if o.index_loss else ", without index loss")
        left.plot(*zip(*o.curve, strict=True), style, color=colours[o.plan], label=label)
        marker = "o" if o.index_loss else "x"
        right.plot(o.cache_bytes, o.accuracy, marker, color=colours[o.plan], markersize=9)
        right.annotate(
            f"{o.plan}{'' if o.index_loss else ', without'}\nfound {o.found:.0%}",
            (o.cache_bytes, o.accuracy),
            textcoords="offset points",
            xytext=(10, (8, 6, -26, -14)[number % 4]),  # plans of equal cache would write over one another
            fontsize=8,
        )
    left.set_xlabel("step")
    left.set_ylabel("accuracy of answers beyond every window")
    left.legend(fontsize=8, loc="center left")
    right.set_xlabel("bytes of global cache per token")
    right.set_xlim(0, 1.35 * max(o.cache_bytes for o in outcomes))
    for axis in (left, right):
        axis.set_ylim(-0.03, 1.08)
        axis.grid(alpha=0.3)
    figure.suptitle(
        f"{outcomes[0].task}: {outcomes[0].steps} steps, {outcomes[0].parameters:,} to "
        f"{max(o.parameters for o in outcomes):,} parameters",
        fontsize=10,
    )
    part = path.with_suffix(".part.png")
    figure.savefig(part, dpi=110)
    plt.close(figure)
    os.replace(part, path)


@dataclasses.dataclass(frozen=True)
class Arguments:
    """Train small models from scratch on a task that only an index can solve; print a table, write recall.json and recall.png."""

    out: Path = Path("build/recall")
    """Folder of the results."""
    task: Literal["recall", "needle"] = "recall"
    """Many pairs and many questions, or one of each."""
    steps: int = 400
    """Updates of each model."""
    seed: int = 0


def main(argv: Sequence[str] | None = None) -> int:
    """Run `python -m train.recall argv`; returns the exit code."""
    arguments = tyro.cli(Arguments, prog="python -m train.recall", args=argv)
    arguments.out.mkdir(parents=True, exist_ok=True)
    layers = len(PLANS["all FULL"].split())
    task = Task(arguments.task, tokens=128, reach=8 * layers)
    outcomes = []
    for name, index_loss in [
        ("FULL + REINDEX + REUSE", True),
        ("FULL + REINDEX + REUSE", False),
        ("FULL + REUSE", True),
        ("all FULL", True),
    ]:
        outcomes.append(
            train_one(
                name,
                task,
                index_loss=index_loss,
                steps=arguments.steps,
                seed=arguments.seed,
                told=lambda text: print(text, file=sys.stderr),
            )
        )
        text = json.dumps([dataclasses.asdict(o) for o in outcomes], indent=1)
        (arguments.out / "recall.json").write_text(text + "\n", encoding="utf-8")
    draw(outcomes, arguments.out / "recall.png")
    show(outcomes)
    return 0


def show(outcomes: Sequence[Outcome]) -> None:
    """The table."""
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, header_style="bold")
    for heading in ("plan", "index loss"):
        table.add_column(heading)
    for heading in ("accuracy", "needle found", "cache bytes", "overlap", "seconds"):
        table.add_column(heading, justify="right")
    for o in outcomes:
        overlap = ", ".join(f"{pair}: {share:.0%}" for pair, share in o.overlap.items())
        values = (f"{o.accuracy:.1%}", f"{o.found:.1%}", f"{o.cache_bytes:.0f}", overlap, f"{o.seconds:.0f}")
        table.add_row(o.plan, "yes" if o.index_loss else "no", *values)
    Console(width=110, highlight=False).print(table)


if __name__ == "__main__":
    sys.exit(main())
