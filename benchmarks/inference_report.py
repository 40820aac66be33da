"""What the parts hand back: figures, tables and targets; the record and picture made of them; and the released code's times."""

from __future__ import annotations

import dataclasses
import json
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal

from rich.table import Table

from benchmarks.inference_measure import Ratio

# ---- the released code, to put ours beside ----


@dataclasses.dataclass(frozen=True)
class Baseline:
    """Times of the released model.py in PyTorch: best prefill seconds and peak bytes by prompt; decode ms by context.

    The latter are medians of 20 steps, in the middle of two passes.
    """

    what: str
    prefill_s: Mapping[int, float]
    peak_bytes: Mapping[int, float]
    decode_ms: Mapping[int, float]

    def tokens_s(self, length: int) -> float | None:
        """Tokens per second of a prompt, if it was run."""
        return length / self.prefill_s[length] if length in self.prefill_s else None


RELEASED_ON: Final = (
    "Released code: its model.py as it is, quantisers and sparse attention as vectorised PyTorch of the same arithmetic; torch "
    "2.13.0 on two threads of a virtual machine with two AMD EPYC processors (AVX-512, 32 MB L3), batch 1. Not run again here."
)
RELEASED_F32: Final = Baseline(
    "released f32",
    prefill_s={512: 0.96, 2048: 3.70, 8192: 35.6},
    peak_bytes={512: 0.91e9, 2048: 1.2e9, 8192: 5.6e9},
    decode_ms={2048: 43.5, 8192: 46.0, 32768: 59.5},
)
RELEASED_BF16: Final = Baseline(
    "released bf16",  # with roundings: the fastest that the released code does there
    prefill_s={512: 0.65, 2048: 2.84, 8192: 18.4, 16384: 78.6},
    peak_bytes={512: 0.70e9, 2048: 1.0e9, 8192: 3.3e9, 16384: 10.2e9},
    decode_ms={2048: 41.0, 8192: 43.0, 32768: 56.0},
)

# ---- targets ----

Sense = Literal["<=", "<", ">="]
_MEETS: Final[dict[Sense, Callable[[float, float], bool]]] = {
    "<=": operator.le,
    "<": operator.lt,
    ">=": operator.ge,
}


@dataclasses.dataclass(frozen=True)
class Target:
    """A number that is wanted and what was found.

    measured: None where nothing was. refused: why not, where it was asked for; otherwise nobody asked.
    """

    name: str
    sense: Sense
    limit: float
    measured: float | None
    unit: str = ""
    rounds: tuple[float, float] | None = None  # least and largest of the single rounds
    refused: str = ""

    @property
    def verdict(self) -> Literal["met", "missed", "refused", "not run"]:
        """What the table says."""
        if self.measured is None:
            return "refused" if self.refused else "not run"
        return "met" if _MEETS[self.sense](self.measured, self.limit) else "missed"

    @property
    def failed(self) -> bool:
        """Whether it was asked for and does not hold."""
        return self.verdict in ("missed", "refused")


def wanted(name: str, sense: Sense, limit: float, found: Ratio | None, refused: str = "") -> Target:
    """A target for a ratio."""
    if found is None:
        return Target(name, sense, limit, None, refused=refused)
    return Target(name, sense, limit, found.value, rounds=(found.low, found.high))


def targets_table(targets: Sequence[Target]) -> Table:
    """Target, measured, met or not."""
    table = Table(title="Targets", caption="by round: the ratio as it came out in single rounds, least and largest")
    table.add_column("target")
    for heading in ("wanted", "measured", "by round"):
        table.add_column(heading, justify="right")
    table.add_column("")
    colours = {"met": "green", "missed": "red", "refused": "red", "not run": "yellow"}
    for t in targets:
        rounds = "" if t.rounds is None else f"{t.rounds[0]:.2f} to {t.rounds[1]:.2f}"
        measured = "-" if t.measured is None else f"{t.measured:.{0 if t.measured.is_integer() else 2}f}{t.unit}"
        verdict = f"[{colours[t.verdict]}]{t.verdict}"
        table.add_row(t.name, f"{t.sense} {t.limit:g}{t.unit}", measured, rounds, verdict)
    return table


@dataclasses.dataclass
class Report:
    """One part's results; figures are plain numbers, for the record; lines are printed below the tables."""

    figures: dict[str, Any] = dataclasses.field(default_factory=dict)
    tables: list[Table] = dataclasses.field(default_factory=list)
    targets: list[Target] = dataclasses.field(default_factory=list)
    lines: list[str] = dataclasses.field(default_factory=list)

    def refuse(self, refused: Mapping[Any, str]) -> None:
        """Note what could not be run, and why."""
        self.figures["refused"] = dict(refused)
        self.lines += [f"{name}: {reason}" for name, reason in refused.items()]


def table(title: str, first: str, *headings: str, caption: str | None = None) -> Table:
    """An empty table: one column of names, the rest numbers."""
    made = Table(title=title, caption=caption)
    made.add_column(first)
    for heading in headings:
        made.add_column(heading, justify="right")
    return made


def number(value: float | None, digits: int = 1) -> str:
    """A cell; "-" for what is not known."""
    return "-" if value is None or math.isnan(value) else f"{value:,.{digits}f}"


# ---- record and picture ----


def write_json(path: Path, where: Mapping[str, Any], parts: Mapping[str, Report]) -> None:
    """Everything measured, with machine, date and versions; a number that does not exist is null."""
    targets = [dataclasses.asdict(t) | {"verdict": t.verdict} for report in parts.values() for t in report.targets]
    record = {
        **where,
        "parts": {name: report.figures for name, report in parts.items()},
        "targets": targets,
        "released": {"on": RELEASED_ON, **{b.what: dataclasses.asdict(b) for b in (RELEASED_F32, RELEASED_BF16)}},
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(_finite(record), indent=1, allow_nan=False) + "\n", encoding="utf-8")


def _finite(value: Any) -> Any:
    """JSON has neither NaN nor keys that are numbers."""
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def draw(path: Path, title: str, parts: Mapping[str, Report]) -> None:
    """Prefill tokens per second over the prompt's length, decode ms over the context, beside the released code's."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(12, 4.5), layout="constrained")
    figure.suptitle(title)
    prefill, decode = (parts[name].figures if name in parts else {} for name in ("prefill", "decode"))
    for decoder, by_length in prefill.get("tokens_s", {}).items():
        left.plot(list(by_length), list(by_length.values()), "o-", label=decoder)
    own = decode.get("own_cache_ms", {})
    if own:
        (line,) = right.plot(list(own), list(own.values()), "o", label="f32, cache of its own size")
        a, b = decode["fit"]["a_ms"], decode["fit"]["b_ms_per_token"]
        right.plot([0, max(own)], [a, a + b * max(own)], "-", lw=1, color=line.get_color(), label="fit")
    for name, context, ms in decode.get("at_large_ms", []):
        right.plot([context], [ms], "x", label=name)
    for baseline, style in ((RELEASED_F32, "s--"), (RELEASED_BF16, "^--")):
        lengths = [length for length in baseline.prefill_s if prefill]
        left.plot(lengths, [baseline.tokens_s(n) for n in lengths], style, color="grey", label=baseline.what)
        contexts = [context for context in baseline.decode_ms if decode]
        right.plot(contexts, [baseline.decode_ms[n] for n in contexts], style, color="grey", label=baseline.what)
    # Growth that is proportional to the context would bend on a logarithmic axis.
    for axes, scale, x, y in (
        (left, "log", "tokens of the prompt", "tokens / s"),
        (right, "linear", "context", "ms per decoded token"),
    ):
        axes.set_xscale(scale, **({"base": 2} if scale == "log" else {}))
        axes.set_xlabel(x)
        axes.set_ylabel(y)
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    plt.close(figure)
