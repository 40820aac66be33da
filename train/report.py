"""What a run tells: a progress line, metrics.jsonl, TensorBoard, and a picture of its curves at the end."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

METRICS: Final = "metrics.jsonl"
PICTURE: Final = "curves.png"
_LINE_EVERY: Final = 10.0  # seconds, where nobody watches


class Metrics:
    """metrics.jsonl, one object per line, {"step", "kind", ...}; what a killed run had written beyond its checkpoint goes."""

    def __init__(self, folder: Path, start: int, tensorboard: bool) -> None:
        self.path = folder / METRICS
        self._keep_until(start)
        self._file = self.path.open("a", encoding="utf-8")
        self._writer: Any = None
        if tensorboard:
            from tensorboardX import SummaryWriter

            self._writer = SummaryWriter(str(folder / "tensorboard"), purge_step=start + 1)

    def _keep_until(self, step: int) -> None:
        if not self.path.exists():
            return
        records = read_metrics(self.path) if step else []  # a run from the start makes even those of step 0 again
        kept = [json.dumps(record) for record in records if record["step"] <= step]
        part = self.path.with_suffix(".part")
        part.write_text("".join(line + "\n" for line in kept), encoding="utf-8")
        os.replace(part, self.path)

    def write(self, step: int, kind: str, values: Mapping[str, float]) -> None:
        """Record `values` of a step; kind is "train" or "held out"."""
        self._file.write(json.dumps({"step": step, "kind": kind, **values}) + "\n")
        self._file.flush()
        if self._writer is not None:
            for name, value in values.items():
                self._writer.add_scalar(f"{kind}/{name}", value, step)

    def close(self) -> None:
        """Finish the files."""
        self._file.close()
        if self._writer is not None:
            self._writer.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The records of a metrics.jsonl; a last line that was cut off is left out."""
    records = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            records.append(json.loads(line))
        except ValueError:
            break
    return records


class Progress:
    """A line that says where the run is: a bar where somebody watches, else a line every ten seconds, both on stderr."""

    def __init__(self, first: int, steps: int) -> None:
        self._steps, self._told = steps, 0.0
        self._bar: Any = None
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
            from rich.progress import Progress as Bar

            columns = (
                BarColumn(bar_width=20),
                MofNCompleteColumn(),
                TextColumn("{task.description}"),
                TimeRemainingColumn(),
            )
            self._bar = Bar(*columns, console=Console(stderr=True))
            self._task = self._bar.add_task("compiling", total=steps, completed=first)
            self._bar.start()

    def tell(self, step: int, text: str, *, always: bool = False) -> None:
        """Show `text` for `step`."""
        if self._bar is not None:
            self._bar.update(self._task, completed=step, description=text)
        elif always or time.monotonic() - self._told > _LINE_EVERY:
            self._told = time.monotonic()
            print(f"step {step} of {self._steps}: {text}", file=sys.stderr, flush=True)

    def say(self, text: str) -> None:
        """A line that stays."""
        if self._bar is not None:
            self._bar.console.print(text, highlight=False)
        else:
            print(text, file=sys.stderr, flush=True)

    def stop(self) -> None:
        """Take the bar away."""
        if self._bar is not None:
            self._bar.stop()


def draw_curves(records: list[dict[str, Any]], path: Path) -> None:
    """Loss, indexer recall and rates against the step, as a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    def series(kind: str, name: str) -> tuple[list[int], list[float]]:
        rows = [r for r in records if r["kind"] == kind and name in r]
        return [r["step"] for r in rows], [r[name] for r in rows]

    panels: list[tuple[str, list[tuple[str, str, str]]]] = [
        ("cross-entropy, nats per token", [("train", "lm", "training"), ("held out", "lm", "held out")]),
        (
            "indexer",
            [
                ("train", "index", "divergence from attention, nats"),
                ("held out", "recall", "attention caught, held out"),
            ],
        ),
        ("gradient norm", [("train", "gradient_norm", "before clipping")]),
        ("tokens per second", [("train", "tokens_per_second", "measured")]),
    ]
    figure, axes = plt.subplots(2, 2, figsize=(10, 6.5), constrained_layout=True)
    for axis, (title, lines) in zip(axes.flat, panels, strict=True):
        for kind, name, label in lines:
            steps, values = series(kind, name)
            if steps:
                axis.plot(steps, values, label=label, marker="o" if kind == "held out" else None, markersize=3)
        axis.set_title(title, fontsize=10)
        axis.set_xlabel("step")
        axis.grid(alpha=0.3)
        if axis.lines:
            axis.legend(fontsize=8)
    part = path.with_suffix(".part.png")
    figure.savefig(part, dpi=110)
    plt.close(figure)
    os.replace(part, path)


def line(values: Mapping[str, float]) -> str:
    """The progress line's text."""
    shown: list[tuple[str, Callable[[float], str]]] = [
        ("lm", lambda v: f"loss {v:.3f}"),
        ("index", lambda v: f"index {v:.3f}"),
        ("rate", lambda v: f"rate {v:.2e}"),
        ("tokens_per_second", lambda v: f"{v:,.0f} tokens/s"),
        ("mfu", lambda v: f"MFU {v:.1%}"),
        ("recall", lambda v: f"recall {v:.1%}"),
    ]
    return " · ".join(text(values[name]) for name, text in shown if name in values)
