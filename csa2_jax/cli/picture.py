"""The plan as a picture: layers left to right, a lane per shared thing from the layer that makes it to its readers.

Drawn in inches on one axes, so that 8 and 40 layers get the same type sizes. matplotlib's Agg backend: no display
needed.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch, Rectangle

from csa2_jax import manifest
from csa2_jax.config import ModelConfig
from csa2_jax.plan import LayerSpec, Mode

INK: Final = "#1f2933"
QUIET: Final = "#7b8794"
RULE: Final = "#d9dee4"
MODE_COLOURS: Final = {
    Mode.SWA: ("#ffffff", INK),
    Mode.FULL: ("#1f3a5f", "#ffffff"),
    Mode.REINDEX: ("#5b8db8", "#ffffff"),
    Mode.REUSE: ("#d6e4f0", INK),
    Mode.CSA: ("#1f3a5f", "#ffffff"),
    Mode.HCA: ("#5b8db8", "#ffffff"),
}
MODE_MEANINGS: Final = {
    Mode.FULL: "makes pool, selection",
    Mode.REINDEX: "selects again",
    Mode.REUSE: "reads pool, selection",
    Mode.CSA: "own pool, own selection",
    Mode.HCA: "own pool, read whole",
    Mode.SWA: "window only",
}
LANES: Final = {"pool": "#0f766e", "selection": "#c2571a", "candidates": "#7c3aed", "draft": "#52606d"}
PARTS: Final = (
    *("#1f3a5f", "#0f766e", "#c2571a", "#7c3aed", "#5b8db8", "#a16207", "#be185d", "#4d7c0f", "#64748b", "#0891b2"),
    *("#9f1239", "#6d28d9", "#15803d", "#92400e", "#334155"),
)

_LEFT, _RIGHT, _LANE = 1.95, 0.4, 0.62  # inches


def draw_plan(config: ModelConfig, path: Path) -> None:
    """Write the plan of `config` to `path`, a PNG; ValueError for another suffix, OSError when it cannot be written."""
    if path.suffix.lower() != ".png":
        raise ValueError(f"--png {path}: the picture is a PNG, name it *.png")
    _Picture(config).save(path)


def runs(layers: Sequence[int]) -> list[tuple[int, int]]:
    """Increasing layer ids as half-open runs [first, end)."""
    out: list[tuple[int, int]] = []
    for layer in layers:
        if out and out[-1][1] == layer:
            out[-1] = (out[-1][0], layer + 1)
        else:
            out.append((layer, layer + 1))
    return out


class _Picture:
    """One axes in inches, y growing downwards; each method draws one lane at `self.y` and moves it on."""

    def __init__(self, config: ModelConfig) -> None:
        self.config = config
        self.layers = config.plan.layers
        n = len(self.layers)
        self.cell = max(0.4, 9.0 / n)
        self.width = _LEFT + n * self.cell + _RIGHT
        lanes = 3 + any(s.makes_candidates for s in self.layers) + bool(config.dspark_target_layer_ids)
        self.height = 3.7 + lanes * _LANE
        figure = Figure(figsize=(self.width, self.height), facecolor="white")
        self.canvas = FigureCanvasAgg(figure)
        self.ax = figure.add_axes((0, 0, 1, 1))
        self.ax.set(xlim=(0, self.width), ylim=(self.height, 0))
        self.ax.axis("off")
        self.y = 0.0

    def save(self, path: Path) -> None:
        self.title()
        self.halves()
        self.layer_row()
        self.window_lane()
        self.pool_lane()
        self.selection_lane()
        if any(s.makes_candidates for s in self.layers):
            self.candidate_lane()
        if self.config.dspark_target_layer_ids:
            self.draft_lane()
        self.bytes_by_part()
        self.canvas.print_figure(path, dpi=160)

    # ---- small parts ----

    def x(self, layer: float) -> float:
        """Left edge of a layer's column."""
        return _LEFT + layer * self.cell

    def text(self, x: float, y: float, text: str, size: float = 9, colour: str = INK, **more: object) -> float:
        """Write at (x, y), by default from there to the right; returns where the text ends."""
        drawn = self.ax.text(x, y, text, fontsize=size, color=colour, **{"va": "center", "ha": "left", **more})  # type: ignore[arg-type]
        return x + drawn.get_window_extent(self.canvas.get_renderer()).width / self.canvas.figure.dpi

    def fits(self, text: str, size: float, room: float) -> bool:
        """Whether `text` is at most `room` inches wide."""
        trial = self.ax.text(0, 0, text, fontsize=size)
        width = trial.get_window_extent(self.canvas.get_renderer()).width / self.canvas.figure.dpi
        trial.remove()
        return width <= room

    def box(self, left: float, right: float, top: float, height: float, face: str, **more: object) -> None:
        """A rounded box over columns [left, right), with a small gap on each side."""
        gap = 0.025
        self.ax.add_patch(
            FancyBboxPatch(
                (self.x(left) + gap, top),
                (right - left) * self.cell - 2 * gap,
                height,
                boxstyle="round,pad=0,rounding_size=0.05",
                **{"facecolor": face, "edgecolor": "none", "linewidth": 0.9, **more},  # type: ignore[arg-type]
            )
        )

    def lane_name(self, name: str, detail: str, colour: str = INK) -> None:
        self.text(_LEFT - 0.15, self.y + 0.12, name, 10, colour, ha="right", weight="bold")
        self.text(_LEFT - 0.15, self.y + 0.31, detail, 7.5, QUIET, ha="right")

    # ---- the lanes, top to bottom ----

    def title(self) -> None:
        c = self.config
        self.text(0.3, 0.38, "What each layer makes and reads", 16, weight="bold")
        per_token = manifest.cached_bytes_per_token(c)
        window = manifest.window_bytes_per_sequence(c)
        size = f"{window / 1e6:,.2f} MB" if window >= 1e6 else f"{window / 1e3:,.2f} kB"
        self.text(
            0.3,
            0.68,
            f"{len(self.layers)} layers, {per_token:,.1f} cached bytes per token (packed), windows {size} per sequence",
            9.5,
            QUIET,
        )
        x = 0.3
        for mode, meaning in MODE_MEANINGS.items():
            if all(s.mode is not mode for s in self.layers):
                continue
            face, _ = MODE_COLOURS[mode]
            self.ax.add_patch(Rectangle((x, 0.95), 0.16, 0.16, facecolor=face, edgecolor=INK, linewidth=0.7))
            x = self.text(x + 0.24, 1.03, str(mode), 8.5, weight="bold")
            x = self.text(x + 0.08, 1.03, meaning, 8.5, QUIET) + 0.28
        if c.engram_layer_ids:
            self.diamond(x + 0.08, 1.03)
            self.text(x + 0.24, 1.03, "Engram, before the layer", 8.5, QUIET)
        self.y = 1.35

    def halves(self) -> None:
        start, n = self.config.plan.decoder_start, len(self.layers)
        for name, first, last in (("layers" if start == n else "encoder", 0, start), ("decoder", start, n)):
            if first == last:
                continue
            a, b, y = self.x(first) + 0.03, self.x(last) - 0.03, self.y + 0.2
            self.ax.plot([a, a, b, b], [y + 0.07, y, y, y + 0.07], color=QUIET, linewidth=1)
            label = f"{name}  {first}\u2013{last - 1}" if last - first > 1 else f"{name}  {first}"
            self.text((a + b) / 2, y, label, 9, QUIET, ha="center", backgroundcolor="white")
        self.y += 0.4

    def layer_row(self) -> None:
        self.lane_name("layer", "m: tokens per pool entry")
        for s in self.layers:
            face, ink = MODE_COLOURS[s.mode]
            self.box(s.layer, s.layer + 1, self.y, 0.42, face, edgecolor=INK if s.mode is Mode.SWA else face)
            middle = self.x(s.layer + 0.5)
            self.text(middle, self.y + 0.16, str(s.layer), 9.5, ink, ha="center", weight="bold")
            self.text(middle, self.y + 0.33, f"m={s.ratio}" if s.ratio else "\u2013", 6.5, ink, ha="center")
            if s.engram_slot >= 0:
                self.diamond(self.x(s.layer), self.y + 0.21)
        self.y += _LANE

    def diamond(self, x: float, y: float) -> None:
        """The mark of an n-gram memory."""
        self.ax.plot([x], [y], marker="D", markersize=7, color="#f2b705", markeredgecolor=INK, zorder=5)

    def window_lane(self) -> None:
        self.lane_name("window", f"own, last {self.config.sliding_window} tokens")
        for s in self.layers:
            self.box(s.layer, s.layer + 1, self.y + 0.08, 0.26, "#eef1f4")
        self.y += _LANE

    def shared(
        self,
        colour: str,
        makers: Sequence[LayerSpec],
        reads: Callable[[LayerSpec, LayerSpec], bool],
        label: Callable[[LayerSpec], str],
    ) -> None:
        """For each maker a line up to its last reader, and on it the maker's cell solid and its readers' tinted."""
        top, height = self.y + 0.03, 0.36
        for maker in makers:
            readers = [s.layer for s in self.layers if s.layer > maker.layer and reads(s, maker)]
            last = max(readers, default=maker.layer)
            middle = top + height / 2
            span = [self.x(maker.layer + 0.5), self.x(last + 0.5)]
            self.ax.plot(span, [middle] * 2, color=colour, linewidth=1.2, alpha=0.5, zorder=0.5)  # under the cells
            for first, end in runs(readers):
                self.box(first, end, top, height, "white")
                self.box(first, end, top, height, colour, alpha=0.22)
                for layer in range(first + 1, end):  # notches between layers, short enough to leave room for a label
                    for y in (top, top + height - 0.08):
                        self.ax.plot([self.x(layer)] * 2, [y, y + 0.08], color="white", linewidth=1.6, zorder=2)
            self.box(maker.layer, maker.layer + 1, top, height, colour)
            self.text(self.x(maker.layer + 0.5), middle, str(maker.layer), 9, "white", ha="center", weight="bold")
            text = label(maker)
            if text and self.fits(text, 8, (last - maker.layer) * self.cell - 0.2):
                self.text(self.x(maker.layer + 1) + 0.12, middle, text, 8, colour)
        self.y += _LANE

    def pool_lane(self) -> None:
        self.lane_name("pool", "solid: makes, tinted: reads", LANES["pool"])
        self.shared(
            LANES["pool"],
            [s for s in self.layers if s.mode.makes_pool],
            lambda s, maker: s.pool_source == maker.layer,
            lambda s: f"{manifest.pool_entry_bytes(self.config, s.mode) / s.ratio:,.1f} bytes per token",
        )

    def selection_lane(self) -> None:
        self.lane_name("selection", f"up to {self.config.index_topk:,} entries", LANES["selection"])
        self.shared(
            LANES["selection"],
            [s for s in self.layers if s.index_slot >= 0],
            lambda s, maker: s.selection_source == maker.layer,
            lambda s: "",
        )

    def candidate_lane(self) -> None:
        c = self.config
        self.lane_name(
            "candidates", f"{c.candidate_topk_blocks:,} blocks of {c.candidate_block_size}", LANES["candidates"]
        )
        self.shared(
            LANES["candidates"],
            [s for s in self.layers if s.makes_candidates],
            lambda s, maker: s.candidate_source == maker.layer,
            lambda s: "",
        )

    def draft_lane(self) -> None:
        c = self.config
        stages = c.num_nextn_predict_layers
        self.lane_name(
            "draft head", f"{stages} stage{'s' * (stages > 1)}, {c.dspark_block_size} tokens", LANES["draft"]
        )
        top, height = self.y + 0.03, 0.36
        for s in self.layers:
            if s.draft_slot >= 0:
                self.box(s.layer, s.layer + 1, top, height, LANES["draft"], alpha=0.22)
                self.text(self.x(s.layer + 0.5), top + height / 2, "\u2193", 11, LANES["draft"], ha="center")
        text = "the residual stream entering these layers feeds it"
        before, after = self.x(min(c.dspark_target_layer_ids)), self.x(max(c.dspark_target_layer_ids) + 1)
        if self.fits(text, 8, before - _LEFT - 0.1):
            self.text(before - 0.1, top + height / 2, text, 8, LANES["draft"], ha="right")
        elif self.fits(text, 8, self.width - _RIGHT - after - 0.1):
            self.text(after + 0.1, top + height / 2, text, 8, LANES["draft"])
        self.y += _LANE

    def bytes_by_part(self) -> None:
        """A bar of the checkpoint's bytes; parts too thin for a name inside go into the line below."""
        parts = manifest.part_totals(self.config)
        total = sum(p.nbytes for p in parts)
        tensors = sum(p.tensors for p in parts)
        width = self.width - _LEFT - _RIGHT
        self.y += 0.2
        self.ax.plot([0.3, self.width - _RIGHT], [self.y - 0.14] * 2, color=RULE, linewidth=1)
        size = f"{total / 1e9:,.1f} GB" if total >= 1e9 else f"{total / 1e6:,.2f} MB"
        self.text(_LEFT - 0.15, self.y + 0.2, "bytes by part", 10, ha="right", weight="bold")
        self.text(_LEFT - 0.15, self.y + 0.39, f"{size}, {tensors:,} tensors", 7.5, QUIET, ha="right")
        x, thin = float(_LEFT), []
        for part, colour in zip(parts, itertools.cycle(PARTS), strict=False):
            share = part.nbytes / total
            span = width * share
            bar = Rectangle((x, self.y + 0.08), span, 0.36, facecolor=colour, edgecolor="white", linewidth=0.6)
            self.ax.add_patch(bar)
            label = f"{part.part}  {100 * share:.1f} %"
            if self.fits(label, 8.5, span - 0.2):
                self.text(x + 0.1, self.y + 0.26, label, 8.5, "white")
            elif self.fits(part.part, 8, span - 0.16):
                self.text(x + span / 2, self.y + 0.19, part.part, 8, "white", ha="center")
                self.text(x + span / 2, self.y + 0.34, f"{100 * share:.1f} %", 7, "white", ha="center")
            else:
                thin.append((f"{part.part}  {100 * share:.2f} %", colour))
            x += span
        x, y = float(_LEFT), self.y + 0.62
        for label, colour in thin:
            if not self.fits(label, 7.5, self.width - _RIGHT - x - 0.15):
                x, y = float(_LEFT), y + 0.2
            self.ax.add_patch(Rectangle((x, y - 0.05), 0.1, 0.1, facecolor=colour))
            x = self.text(x + 0.15, y, label, 7.5, QUIET) + 0.25
