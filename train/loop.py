"""A run from its settings to its end: start or take up again, step, evaluate, save, tell.

Whatever stops it (a signal, a crash, a full disk, a loss that is no number), the newest checkpoint is whole, and the same command
goes on from there with the same losses to the bit on the same devices.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from csa2_jax import Model, ModelConfig, init_model, load_checkpoint
from csa2_jax.adapters import attach, save_adapters
from csa2_jax.saving import save_checkpoint
from csa2_jax.token_map import TOKEN_MAP_FILE, find_token_map
from train import data as data_
from train.checkpoints import Checkpoints
from train.documents import BYTES, Store, find_files, open_store
from train.flops import device_peak, flops_per_token
from train.optimizer import make_optimizer, schedule
from train.parameters import Parts, take_apart
from train.placement import Placement
from train.report import METRICS, PICTURE, Metrics, Progress, draw_curves, line, read_metrics
from train.settings import Settings
from train.step import Arrays, Batch, TrainState, broken_parameters, make_evaluation, make_step

SAVED_SETTINGS = "settings.json"
# What may change between the parts of a run without changing its numbers.
_FREE = {"run": ("out", "mesh", "log_every", "evaluate_every", "evaluate_batches", "tensorboard"), "checkpoints": None}


class TrainingError(RuntimeError):
    """A run that cannot go on: names the step, what broke and the checkpoint to go back to."""


@dataclasses.dataclass(frozen=True)
class Prepared:
    """A run that could start: the model in parts and the data, nothing compiled yet."""

    settings: Settings
    config: ModelConfig
    together: Callable[[Arrays], Model]
    parts: Parts
    batches: data_.Batches
    held_out: list[Batch]
    placement: Placement
    beside: tuple[Path, ...]  # files that go with the exported model


def prepare_model(settings: Settings) -> Model:
    """The model that a run starts from."""
    chosen = settings.model
    if chosen.checkpoint:
        model = load_checkpoint(
            settings.path(chosen.checkpoint),
            compute_dtype=chosen.compute_dtype,
            fake_quant=chosen.fake_quant,
            weights=chosen.weights,
        )
    else:
        path = settings.path(chosen.config)
        config = ModelConfig.from_hf(path)
        config = dataclasses.replace(config, quantized=False)
        # Master weights are f32 whatever the activations are.
        model = init_model(
            config,
            settings.run.seed,
            compute_dtype="float32",
            fake_quant=chosen.fake_quant,
            token_map=find_token_map(_model_folder(settings), config),
        )
        model.numerics = dataclasses.replace(model.numerics, compute_dtype=chosen.compute_dtype)
    if settings.lora.rank:
        attach(model, settings.lora.targets, settings.lora.rank, settings.lora.alpha, settings.run.seed)
    return model


def prepare(settings: Settings, told: Callable[[str], None] = lambda text: None) -> Prepared:
    """Model and data of a run; every error of the settings comes out here."""
    placement = Placement.parse(settings.run.mesh, settings.data.rows)
    model = prepare_model(settings)
    config = model.config
    if settings.data.tokens > config.max_position_embeddings:
        raise ValueError(
            f"data.tokens={settings.data.tokens} exceeds the model's max_position_embeddings={config.max_position_embeddings}"
        )
    together, parts = take_apart(model, settings.choice())
    if not parts.trained:
        raise ValueError(
            f"no parameter is left to train: run.recipe={settings.run.recipe!r}, run.train={list(settings.run.train)}, "
            f"run.freeze={list(settings.run.freeze)}"
        )
    store, held_out = _stores(settings, config, told)
    documents, (out_store, out_documents) = data_.split(store, held_out, settings.data.held_out_every)
    rows = data_.Rows(store, documents, config, settings.data.tokens)
    out_rows = data_.Rows(out_store, out_documents, config, settings.data.tokens)
    return Prepared(
        settings,
        config,
        together,
        placement.parts(parts),
        data_.Batches(rows, settings.data),
        [placement.batch(b) for b in data_.held_out_batches(out_rows, settings.data, settings.run.evaluate_batches)],
        placement,
        tuple(p for p in (_tokenizer_path(settings), _model_folder(settings) / TOKEN_MAP_FILE) if p is not None),
    )


def _model_folder(settings: Settings) -> Path:
    """Where the model's files are."""
    path = settings.path(settings.model.checkpoint or settings.model.config)
    return path if path.is_dir() else path.parent


def _tokenizer_path(settings: Settings) -> Path | None:
    """The tokenizer.json that is used, None for bytes."""
    chosen = settings.data.tokenizer
    if chosen == BYTES:
        return None
    path = settings.path(chosen) if chosen else _model_folder(settings) / "tokenizer.json"
    path = path / "tokenizer.json" if path.is_dir() else path
    return path if chosen or path.is_file() else None


def _stores(settings: Settings, config: ModelConfig, told: Callable[[str], None]) -> tuple[Store, Store | None]:
    chosen = settings.data
    path = _tokenizer_path(settings)
    tokenizer = BYTES if path is None else str(path)
    folder = settings.path(settings.run.out) / "data"

    def store(patterns: tuple[str, ...], what: str) -> Store:
        last = time.monotonic()

        def after(done: int, files: int) -> None:
            nonlocal last
            if time.monotonic() - last > 5.0 or (done == files and files > 1000):
                last = time.monotonic()
                told(f"tokenising {what}: {done:,} of {files:,} files")

        return open_store(folder, find_files(patterns, settings.base), chosen.field, tokenizer, config, after)

    return store(chosen.train, "training data"), store(chosen.held_out, "held-out data") if chosen.held_out else None


def run(settings: Settings) -> dict[str, float]:
    """Train; returns the last evaluation. Raises TrainingError, CheckpointsError, and ValueError for what was wrong before."""
    out = settings.path(settings.run.out)
    now = _same_settings(settings, out)
    progress = Progress(0, settings.run.steps)
    try:
        prepared = prepare(settings, progress.say)
        _write_settings(out, now)  # only now: what could not start leaves nothing to go on with
        with contextlib.closing(Checkpoints(out / "checkpoints", settings.checkpoints)) as checkpoints:
            return _Run(prepared, checkpoints, progress, out).go()
    finally:
        progress.stop()


def _same_settings(settings: Settings, out: Path) -> dict[str, Any]:
    """What makes the numbers of this run; refuses to go on with one that was begun otherwise."""
    content = {k: v for k, v in dataclasses.asdict(settings).items() if k != "base"}
    for section, names in _FREE.items():
        content[section] = {k: v for k, v in content[section].items() if names is not None and k not in names}
    now = json.loads(json.dumps(content))
    path = out / SAVED_SETTINGS
    if path.is_file():
        before = json.loads(path.read_text(encoding="utf-8"))
        changed = [
            f"{section}.{name}={now[section].get(name)!r} (was {before.get(section, {}).get(name)!r})"
            for section in now
            for name in now[section]
            if before.get(section, {}).get(name) != now[section][name]
        ]
        if changed:
            raise ValueError(
                f"{out} holds a run that was begun otherwise: {', '.join(changed)}. Take the settings back, choose another "
                "run.out, or remove that folder"
            )
    return now


def _write_settings(out: Path, now: dict[str, Any]) -> None:
    out.mkdir(parents=True, exist_ok=True)
    part = (out / SAVED_SETTINGS).with_suffix(".part")
    part.write_text(json.dumps(now, indent=1) + "\n", encoding="utf-8")
    os.replace(part, out / SAVED_SETTINGS)


class _Run:
    def __init__(self, prepared: Prepared, checkpoints: Checkpoints, progress: Progress, out: Path) -> None:
        self.prepared, self.settings, self.checkpoints = prepared, prepared.settings, checkpoints
        self.progress, self.out = progress, out
        settings, config, parts = self.settings, prepared.config, prepared.parts
        choice = settings.choice()
        optimizer = make_optimizer(parts.trained, choice, config, settings.optimizer, settings.run.steps)
        segments = data_.segments_of(config, settings.data.tokens)
        self.state = prepared.placement.state(TrainState.start(parts, optimizer))
        self.step = make_step(
            prepared.together,
            optimizer,
            config,
            settings.loss,
            settings.optimizer,
            segments,
            shardings=prepared.placement.shardings(self.state),
        )
        self.evaluation = make_evaluation(prepared.together, settings.loss, segments)
        self.rate = schedule(settings.optimizer, settings.run.steps)
        self.flops = flops_per_token(config, parts, settings.data.tokens)
        self.peak = device_peak(settings.model.compute_dtype)
        self.last: dict[str, float] = {}

    def go(self) -> dict[str, float]:
        steps, start = self.settings.run.steps, 0
        if self.checkpoints.latest is not None:
            self.state, place = self.checkpoints.restore(self.state)
            self.prepared.batches.restore(place)
            start = int(self.state.step)
            self.progress.say(f"going on behind step {start} of {steps}")
        metrics = Metrics(self.out, start, self.settings.run.tensorboard)
        try:
            with _stop_signals() as asked:
                if start < steps:
                    self.progress.say("compiling, which takes minutes on a CPU the first time")
                if start == 0 and self.settings.run.evaluate_every:
                    self._evaluate(0, metrics)
                for step in range(start + 1, steps + 1):
                    self._one(step, metrics)
                    if asked() or self.checkpoints.due(step, steps):
                        self.checkpoints.save(self.state, self.prepared.batches.state())
                    every = self.settings.run.evaluate_every
                    if step == steps or (every and step % every == 0):
                        self._evaluate(step, metrics)
                    if asked():
                        self.checkpoints.finish()
                        raise KeyboardInterrupt
            if start == steps:
                self._evaluate(steps, metrics)
            self.checkpoints.finish()
        finally:
            metrics.close()
        self._export()
        draw_curves(read_metrics(self.out / METRICS), self.out / PICTURE)
        return self.last

    def _export(self) -> None:
        """The result as files that others read: adapters, or a model in the release's layout."""
        settings = self.settings
        model = self.prepared.together(self.state.arrays())
        if settings.lora.rank:
            self.progress.say(f"adapters written to {save_adapters(model, self.out / 'adapters')}")
        elif settings.run.export and settings.model.weights == "float32":
            model_dir = self.out / "model"
            shutil.rmtree(model_dir, ignore_errors=True)
            beside = [Path(p) for p in self.prepared.beside if Path(p).is_file()]
            self.progress.say(
                f"model written to {save_checkpoint(model, model_dir, weights=settings.run.export, beside=beside)}"
            )

    def _one(self, step: int, metrics: Metrics) -> None:
        began = time.perf_counter()
        batch = self.prepared.placement.batch(next(self.prepared.batches))
        self.state, found = self.step(self.state, batch)
        if not bool(found["finite"]):
            raise self._broken(step, batch, found)
        seconds = time.perf_counter() - began
        if step % self.settings.run.log_every == 0 or step == self.settings.run.steps:
            tokens = float(found["tokens"])
            values = {name: float(a) for name, a in found.items() if jnp.ndim(a) == 0 and name != "finite"}
            values |= {
                "rate": float(np.asarray(self.rate(step - 1))),
                "seconds": seconds,
                "tokens_per_second": tokens / seconds,
            }
            values["mfu"] = self.flops * tokens / seconds / self.peak
            metrics.write(step, "train", {k: v for k, v in values.items() if k not in ("recall",)})
            recall = {k: v for k, v in self.last.items() if k == "recall"}
            self.progress.tell(step, line({k: v for k, v in values.items() if k != "recall"} | recall))

    def _evaluate(self, step: int, metrics: Metrics) -> None:
        self.last = evaluate(self.evaluation, self.state.arrays(), self.prepared.held_out)
        metrics.write(step, "held out", self.last)
        self.progress.say(
            f"step {step}, held out: loss {self.last['lm']:.4f}, {self.last['lm'] / np.log(2):.3f} bits per token, "
            f"accuracy {self.last['accuracy']:.1%}"
            + (f", indexer recall {self.last['recall']:.1%}" if "recall" in self.last else "")
        )

    def _broken(self, step: int, batch: Batch, found: dict[str, Any]) -> TrainingError:
        self.checkpoints.finish()
        whole = self.checkpoints.latest
        back = "there is no checkpoint yet" if whole is None else f"the newest good checkpoint is that of step {whole}"
        culprit = find_culprit(self.prepared.together, self.state, batch, found)
        return TrainingError(
            f"step {step}: the loss is {float(found['loss'])} and its gradient has the norm {float(found['gradient_norm'])}. "
            f"{culprit}. Nothing was changed by this step; {back} under {self.checkpoints.folder}. Lower optimizer.peak, raise "
            "optimizer.warmup, or look at the data of this step, then start the same command again"
        )


def evaluate(evaluation: Any, arrays: Arrays, batches: list[Batch]) -> dict[str, float]:
    """Means over held-out batches, weighted by the tokens that each predicts."""
    total: dict[str, float] = {}
    weight = 0.0
    for batch in batches:
        found = evaluation(arrays, batch)
        n = float(found["predicted"])
        weight += n
        for name in ("lm", "accuracy", "index", "recall"):
            if name in found:
                total[name] = total.get(name, 0.0) + n * float(found[name])
    return {name: value / max(weight, 1.0) for name, value in total.items()}


def find_culprit(together: Callable[[Arrays], Model], state: TrainState, batch: Batch, found: dict[str, Any]) -> str:
    """Which module makes a number that is none: a parameter, a layer's output, or the gradients alone."""
    arrays = state.arrays()
    for name, a in arrays.items():
        if jnp.issubdtype(a.dtype, jnp.floating) and not bool(jnp.all(jnp.isfinite(a.astype(jnp.float32)))):
            return f"The parameter {name} holds numbers that are not finite"
    layers = {"attn_in": "attn_norm", "attn_out": "attn", "ffn_out": "ffn"}

    @jax.jit
    def finite(arrays: Arrays, one: Batch) -> dict[str, dict[int, jax.Array]]:
        model = together(arrays)
        count = jnp.full(one.tokens.shape[0], one.tokens.shape[1], jnp.int32)
        _, seen = model.trunk(one.tokens, count, origin_BT=one.origin, capture=frozenset(layers))
        return jax.tree.map(lambda a: jnp.all(jnp.isfinite(a)), {name: seen[name] for name in layers})

    for micro in range(batch.tokens.shape[0]):
        good = jax.device_get(finite(arrays, jax.tree.map(lambda a, micro=micro: jnp.asarray(a[micro]), batch)))
        for layer in sorted(good["attn_in"]):
            for name, module in layers.items():
                if not good[name][layer]:
                    return f"The first output that is not finite is that of layers.{module} in layer {layer}"
    names = broken_parameters(list(state.trained), found["broken"])
    if names:
        return f"The forward is finite, the gradient of {names[0]} is not" + (
            f" (nor of {len(names) - 1} more)" if names[1:] else ""
        )
    return "Every layer is finite: the loss itself is not"


@contextlib.contextmanager
def _stop_signals() -> Iterator[Callable[[], bool]]:
    """Ctrl-C and SIGTERM finish the step and save; a second Ctrl-C stops at once."""
    asked = False

    def ask(number: int, _: Any) -> None:
        nonlocal asked
        if asked and number == signal.SIGINT:
            raise KeyboardInterrupt
        asked = True

    try:
        before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    except ValueError:  # not the main thread
        before = {}
    try:
        yield lambda: asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
