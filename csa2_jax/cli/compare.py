"""`csa2 compare`: DeepSeek-V4.1, DeepSeek-V4 and their ancestors side by side, from formulas and from arrays."""

from __future__ import annotations

import json as json_module
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import tyro

from csa2_jax.config import ModelConfig
from csa2_jax.counts import WEIGHTS, flops, prefill_flops, weighted
from csa2_jax.lineage import RELEASED, Kept, kept, released_config

CONTEXTS: Final = tuple(4096 << i for i in range(9))  # 4k to 1M
_OURS: Final = "DeepSeek-V4.1-Flash"
_UNBOUNDED: Final = f"{_OURS}, searching all"


def main(
    plot: Annotated[Path | None, tyro.conf.arg(metavar="FILE", help_behavior_hint="")] = None,
    json: Annotated[bool, tyro.conf.arg(help_behavior_hint="")] = False,
) -> int:
    """Show what a token costs in every generation: bytes of cache, operations to decode it, operations to read a prompt.

    Every number comes with the formula that gives it; bytes of cache are also measured on arrays of the caches themselves.

    Args:
        plot: Also draw the comparison: FILE.png and FILE.svg (a suffix is left off).
        json: Print JSON instead of tables.
    """
    report = compare()
    if plot is not None:
        from csa2_jax.cli.compare_picture import draw

        stem = plot.with_suffix("") if plot.suffix.lower() in (".png", ".svg") else plot
        paths = [stem.with_name(f"{stem.name}{suffix}") for suffix in (".png", ".svg")]
        draw(report, paths)
    if json:
        print(json_module.dumps(report, indent=2))
        return 0
    _print(report)
    if plot is not None:
        print("pictures: " + ", ".join(map(str, paths)))
    return 0


def compare(contexts: Sequence[int] = CONTEXTS) -> dict[str, Any]:
    """Everything the tables show, as JSON-able values: cache, decode and prefill by model, and the formulas."""
    configs = {name: released_config(file) for name, file in RELEASED.items()}
    decode = {name: _decode(config, contexts) for name, config in configs.items()}
    decode[_UNBOUNDED] = _decode(configs[_OURS], contexts, bounded=False)
    prefill = {f"{name}, whole": _prefill(config, contexts, "full") for name, config in configs.items()}
    prefill[f"{_OURS}, decoder skipped"] = _prefill(configs[_OURS], contexts, "exact")
    return {
        "cache": [_row(one) for one in kept(_measured)],
        "contexts": list(contexts),
        "decode": decode,
        "prefill": prefill,
        "formulas": {
            "decode": "sum over parts of FLOPs x weight: "
            + ", ".join(f"{part} {w:g}" for part, w in WEIGHTS.items())
            + " (bf16 1, fp8 1/2, fp4 1/4)",
            "index scores": "2 I J per entry that is scored: (t + 1) / m per layer that selects; in V4.1 the layers that "
            "select again score at most 2,048 blocks of 8 candidates",
            "attention": "4 N H per entry that is read: the window, the K selected, in HCA layers all (t + 1) / 128",
            "prefill": "the same summed over all tokens; with the decoder skipped its layers run on the last D W tokens only, "
            "and of the others it takes the entries of its pool",
        },
    }


def _decode(config: ModelConfig, contexts: Sequence[int], bounded: bool = True) -> list[float]:
    return [weighted(flops(config, 1, n - 1, bounded=bounded)) for n in contexts]


def _prefill(config: ModelConfig, contexts: Sequence[int], decoder: Literal["full", "exact"]) -> list[float]:
    return [weighted(prefill_flops(config, n, decoder)) for n in contexts]


def _measured(config: ModelConfig) -> float:
    from csa2_jax.state import measure_cache

    return measure_cache(config, "packed").per_token


def _row(one: Kept) -> dict[str, Any]:
    return {
        "model": one.name,
        "attention": one.attention,
        "formula": one.formula,
        "bytes_per_token": one.bytes_per_token,
        "measured": one.measured,
    }


def _print(report: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    table = Table(title="cache bytes per token", title_justify="left")
    table.add_column("model", no_wrap=True)
    table.add_column("attention", no_wrap=True)
    table.add_column("formula")
    for name in ("bytes", "of arrays", "share"):
        table.add_column(name, justify="right", no_wrap=True)
    first = report["cache"][0]["bytes_per_token"]
    for row in report["cache"]:
        number = row["bytes_per_token"]
        cells = (_name(row["model"]), row["attention"], row["formula"], f"{number:,.0f}", f"{row['measured']:,.0f}")
        table.add_row(*cells, f"{number / first:.2%}")
    console.print(table)
    for name, unit, scale in (("decode", "GFLOPs a token", 1e9), ("prefill", "PFLOPs a prompt", 1e15)):
        table = Table(title=f"{name}: {unit}, weighted by number format", title_justify="left")
        table.add_column("context")
        for n in report["contexts"][::2]:
            table.add_column(_short(n), justify="right")
        table.add_column("last / first", justify="right")
        for model, values in report[name].items():
            growth = values[-1] / values[0]
            table.add_row(_name(model), *(f"{v / scale:,.2f}" for v in values[::2]), f"{growth:,.2f}")
        console.print(table)
    for name, text in report["formulas"].items():
        console.print(f"[bold]{name}[/]: {text}", soft_wrap=True)


def _name(model: str) -> str:
    return model.removeprefix("DeepSeek-").removeprefix("DeepSeek ")


def _short(tokens: int) -> str:
    return f"{tokens >> 20}M" if tokens >= 1 << 20 else f"{tokens >> 10}k"
