"""The least time a device can take: computed from shapes and vendors' peak numbers, nothing measured.

    floor = max(bytes / bandwidth, flops / peak)

A floor is no forecast: it knows no latency, no sorting, no unpacking, and takes every byte to be moved once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from rich.table import Table

from benchmarks.kernels_calls import Call, Cost


@dataclasses.dataclass(frozen=True)
class Peak:
    """What a vendor says of one chip: memory bandwidth in GB/s, dense bf16 products in TFLOP/s."""

    gb_s: float
    tflop_s: float


# Vendors' pages and data sheets. A TPU v7x chip is two devices to JAX, each with half of it. GPUs: SXM modules, no sparsity.
PEAKS: Final = {
    "v5e": Peak(819, 197),
    "v5p": Peak(2765, 459),
    "v6e": Peak(1640, 918),
    "tpu7x": Peak(7380, 2307),
    "h100": Peak(3352, 989),
    "h200": Peak(4800, 989),
    "b200": Peak(8000, 2250),
}


@dataclasses.dataclass(frozen=True)
class Floor:
    """seconds: the least; gathered: the least if every query fetches its own rows; memory_bound: whether bytes decide."""

    seconds: float
    gathered: float
    memory_bound: bool


def floor(cost: Cost, peak: Peak) -> Floor:
    """The least time of a call on a chip."""
    moving, gathering = (count / (peak.gb_s * 1e9) for count in (cost.bytes, cost.gathered))
    multiplying = cost.flops / (peak.tflop_s * 1e12)
    return Floor(max(moving, multiplying), max(gathering, multiplying), moving > multiplying)


def table(calls: Sequence[Call], chips: Sequence[str]) -> Table:
    """Bytes, flops and floors of calls, a column per chip."""
    made = Table(
        title="Least times, computed from shapes and the vendors' peaks; nothing here was measured",
        caption="In brackets: where every query fetches its own rows from memory. m: bytes decide, c: products do.",
    )
    made.add_column("call")
    for heading in ("MB", "GFLOP", "FLOP/B", *(f"{chip}, us" for chip in chips)):
        made.add_column(heading, justify="right")
    for call in calls:
        cost = call.cost()
        cells = [short(count) for count in (cost.bytes / 1e6, cost.flops / 1e9, cost.flops / cost.bytes)]
        made.add_row(call.name, *cells, *(_cell(floor(cost, PEAKS[chip])) for chip in chips))
    return made


def _cell(found: Floor) -> str:
    bound = "m" if found.memory_bound else "c"
    more = f" ({short(found.gathered * 1e6)})" if found.gathered > 1.05 * found.seconds else ""
    return f"{short(found.seconds * 1e6)} {bound}{more}"


def short(value: float) -> str:
    """A positive number with about three digits."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def peaks_table(chips: Sequence[str]) -> Table:
    """The numbers that floors are computed from."""
    made = Table("chip", "memory, GB/s", "bf16, TFLOP/s", "balance, FLOP/B", title="Vendors' peaks per chip")
    for chip in chips:
        peak = PEAKS[chip]
        made.add_row(chip, f"{peak.gb_s:,.0f}", f"{peak.tflop_s:,.0f}", f"{peak.tflop_s * 1e3 / peak.gb_s:,.0f}")
    return made


def draw(calls: Sequence[Call], chips: Sequence[str], path: Path) -> None:
    """The roofline of every chip, and where the calls stand under it, as a picture."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    import numpy as np

    costs = {call.name: call.cost() for call in calls}
    intensity = {name: cost.flops / cost.bytes for name, cost in costs.items()}
    low, high = min(intensity.values()) / 3, max(3e3, 3 * max(intensity.values()))
    x = np.geomspace(low, high, 400)
    figure, axes = plt.subplots(figsize=(13, 7), layout="constrained")
    for chip in chips:
        peak = PEAKS[chip]
        line = axes.loglog(x, np.minimum(peak.gb_s * x / 1e3, peak.tflop_s), linewidth=1.8, label=chip)[0]
        for value in intensity.values():
            axes.plot(value, min(peak.gb_s * value / 1e3, peak.tflop_s), "o", color=line.get_color(), markersize=4)
    # Calls of nearly equal intensity share a mark and a number; the list beside the picture says which they are.
    groups: list[list[str]] = []
    for name in sorted(intensity, key=lambda name: intensity[name]):
        if groups and intensity[name] < 1.4 * intensity[groups[-1][0]]:
            groups[-1].append(name)
        else:
            groups.append([name])
    listing = []
    for i, names in enumerate(groups, 1):
        axes.axvline(intensity[names[0]], color="0.85", linewidth=0.8, zorder=0)
        axes.annotate(
            str(i), (intensity[names[0]], 1.0), xycoords=("data", "axes fraction"), ha="center", va="bottom", fontsize=9
        )
        listing += [f"{i:>2}  {names[0]}", *(f"      {name}" for name in names[1:])]
    axes.set_xlim(low, high)
    axes.set_xlabel("multiplications and additions per byte that has to be moved")
    axes.set_ylabel("the most that can be reached, TFLOP/s")
    axes.set_title("Rooflines from vendors' peaks, with the calls at released sizes: computed, not measured", pad=22)
    axes.grid(which="major", color="0.92")
    axes.legend(loc="lower right", title="chip")
    axes.text(1.02, 1.0, "\n".join(listing), transform=axes.transAxes, va="top", fontsize=7.5, family="monospace")
    figure.savefig(path, dpi=120)
    plt.close(figure)
