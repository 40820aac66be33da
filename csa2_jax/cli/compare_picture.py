"""The comparison of generations as a picture: cache by model, decode and prefill by context."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from csa2_jax.cli.picture import INK, QUIET, RULE

_COLOURS: Final = {
    "DeepSeek-V4-Flash": "#c2571a",
    "DeepSeek-V4-Pro": "#a16207",
    "DeepSeek-V4.1-Flash": "#1f3a5f",
}
_OLD: Final = "#b8c2cc"


def draw(report: dict[str, Any], paths: Sequence[Path]) -> None:
    """Write the picture to every path, by its suffix."""
    figure = Figure(figsize=(15, 5.6), facecolor="white")
    FigureCanvasAgg(figure)
    axes = [
        figure.add_axes((left, 0.13, width, 0.68)) for left, width in ((0.105, 0.225), (0.4, 0.235), (0.715, 0.235))
    ]
    figure.text(0.012, 0.93, "What a token costs, generation by generation", fontsize=17, color=INK, weight="bold")
    contexts = report["contexts"]
    shown = {name: values for name, values in report["decode"].items() if "Pro" not in name}  # another size of model
    _cache(axes[0], report["cache"])
    _curves(axes[1], contexts, shown, "Decode: GFLOPs a token", _growth)
    shown = {
        name: [v / n for v, n in zip(values, contexts, strict=True)]
        for name, values in report["prefill"].items()
        if "Pro" not in name
    }
    _curves(axes[2], contexts, shown, "Prefill: GFLOPs a token of the prompt", lambda values: "")
    note = "FLOPs weighted by number format: bf16 1, fp8 1/2, fp4 1/4"
    figure.text(0.988, 0.02, note, fontsize=9, color=QUIET, ha="right")
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=160, format=path.suffix[1:])


def _growth(values: list[float]) -> str:
    growth = values[-1] / values[0]
    return f"x {growth:.1f}" if growth > 1.5 else f"+{growth - 1:.0%}"


def _cache(ax: Axes, rows: list[dict[str, Any]]) -> None:
    names = [f"{row['model'].removeprefix('DeepSeek-').removeprefix('DeepSeek ')}\n{row['attention']}" for row in rows]
    values = [row["bytes_per_token"] for row in rows]
    places = list(range(len(rows)))[::-1]
    ax.barh(places, values, height=0.62, color=[_COLOURS.get(row["model"], _OLD) for row in rows])
    ax.set_xscale("log")
    ax.set_xlim(300, 4e6)
    ax.set_yticks(places, names, fontsize=10, color=INK)
    for place, value in zip(places, values, strict=True):
        ax.text(value * 1.15, place, f"{value:,.0f}", va="center", fontsize=10.5, color=INK)
    _plain(ax, "Cache: bytes a token, all layers")
    ax.tick_params(axis="y", length=0)


def _curves(
    ax: Axes, contexts: list[int], curves: dict[str, list[float]], title: str, growth: Callable[[list[float]], str]
) -> None:
    ends = []
    for name, values in curves.items():
        model = name.split(",")[0]
        main = ("searching" not in name and "whole" not in name) or model != "DeepSeek-V4.1-Flash"
        y = [v / 1e9 for v in values]
        ax.plot(contexts, y, color=_COLOURS[model], lw=2.4 if main else 1.6, ls="-" if main else (0, (4, 2)))
        label = name.replace("DeepSeek-", "").replace(
            ", whole", "" if model != "DeepSeek-V4.1-Flash" else ",\nwhole decoder"
        )
        label = label.replace(", searching all", ",\nno candidates").replace(", decoder skipped", ",\ndecoder skipped")
        ends.append((y[-1], f"{label} {growth(values)}".strip(), _COLOURS[model]))
    ax.set_xscale("log", base=2)
    ax.set_xlim(contexts[0], contexts[-1] * 2**3.4)
    ax.set_xticks(contexts[::2], [f"{n >> 20}M" if n >= 1 << 20 else f"{n >> 10}k" for n in contexts[::2]])
    ax.set_ylim(bottom=0)
    for y, label, colour in ends:
        ax.text(contexts[-1] * 1.12, y, label, color=colour, fontsize=9.5, va="center", linespacing=1.05)
    _plain(ax, title)
    ax.set_xlabel("context", color=QUIET, fontsize=10)
    ax.yaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:g}"))


def _plain(ax: Axes, title: str) -> None:
    ax.set_title(title, loc="left", fontsize=12, color=INK, pad=12)
    for side in ("top", "right"):
        ax.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        ax.spines[side].set_color(RULE)
    ax.tick_params(colors=QUIET, labelsize=10)
    ax.grid(axis="y" if title.startswith(("Decode", "Prefill")) else "x", color=RULE, lw=0.6)
    ax.set_axisbelow(True)
    ax.tick_params(axis="y", labelcolor=INK)
