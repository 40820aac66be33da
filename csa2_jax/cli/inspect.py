"""`csa2 inspect`: what a model is, from config.json and file headers alone; no weights are read and no arrays made."""

from __future__ import annotations

import json as json_module
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from csa2_jax import manifest
from csa2_jax.config import ModelConfig
from csa2_jax.plan import Mode, Segment

if TYPE_CHECKING:
    from rich.console import Console


def main(
    directory: Annotated[
        Path | None, tyro.conf.Positional, tyro.conf.arg(metavar="[DIR]", help_behavior_hint="")
    ] = None,
    config: Annotated[Path | None, tyro.conf.arg(metavar="FILE", help_behavior_hint="")] = None,
    png: Annotated[Path | None, tyro.conf.arg(metavar="FILE", help_behavior_hint="")] = None,
    json: Annotated[bool, tyro.conf.arg(help_behavior_hint="")] = False,
) -> int:
    """Show what a model is: which layer makes and reads what, what a token costs, where the parameters are.

    With a model directory the files are checked too: every tensor must be the one that config.json describes. Only the
    headers are read, so this takes seconds at any size.

    Args:
        directory: Model directory: config.json beside model.safetensors, or an index with its shards.
        config: Look at a config.json alone, without weights.
        png: Also draw the plan into this PNG file.
        json: Print JSON instead of tables.
    """
    if (directory is None) == (config is None):
        raise ValueError("name either a model directory or --config FILE")
    if directory is not None:
        model, files = _accounted(directory)
        report = describe(model) | {"files": files}
    else:
        assert config is not None
        model = ModelConfig.from_hf(config)
        report = describe(model)
    if png is not None:
        from csa2_jax.cli.picture import draw_plan

        draw_plan(model, png)
    if json:
        print(json_module.dumps(report, indent=2))
        return 0
    _print_report(model, report)
    if png is not None:
        print(f"picture: {png}")
    return 0


def _accounted(directory: Path) -> tuple[ModelConfig, dict[str, Any]]:
    from csa2_jax.conversion.opening import open_checkpoint

    opened = open_checkpoint(directory)
    return opened.config, {
        "files": len(opened.files.files),
        "tensors": len(opened.specs),
        "bytes": opened.files.nbytes,
        "unbuilt": manifest.unbuilt_parts(opened.config),
    }


def describe(config: ModelConfig) -> dict[str, Any]:
    """Everything the tables show, as JSON-able values: layers, segments, pools, cache, parts, totals, unbuilt."""
    plan = config.plan
    parts = manifest.part_totals(config)
    window = manifest.window_bytes_per_sequence(config)
    return {
        "layers": [
            {
                "layer": s.layer,
                "mode": s.mode.value,
                "ratio": s.ratio,
                "makes": list(s.makes),
                "reads": list(s.reads),
                "pool_source": s.pool_source,
                "selection_source": s.selection_source,
                "candidate_source": s.candidate_source,
                "engram": s.engram_slot >= 0,
                "draft_target": s.draft_slot >= 0,
            }
            for s in plan.layers
        ],
        "segments": [describe_segment(s) for s in plan.segments],
        "decoder_start": plan.decoder_start,
        "pools": [
            {
                "layer": s.layer,
                "tokens_per_entry": s.ratio,
                "bytes_per_entry": manifest.pool_entry_bytes(config, s.mode),
                "bytes_per_token": manifest.pool_entry_bytes(config, s.mode) / s.ratio,
                "readers": [r.layer for r in plan.layers if r.pool_source == s.layer and r.layer != s.layer],
            }
            for s in plan.layers
            if s.mode.makes_pool
        ],
        "cache": {
            "bytes_per_token": manifest.cached_bytes_per_token(config),
            "window_bytes_per_sequence": window,
            "draft_window_bytes_per_sequence": window / config.num_hidden_layers * config.num_nextn_predict_layers,
            "measured": _measured(config),
        },
        "parts": [{"part": p.part, "tensors": p.tensors, "parameters": p.parameters, "bytes": p.nbytes} for p in parts],
        "totals": {
            "tensors": sum(p.tensors for p in parts),
            "parameters": sum(p.parameters for p in parts),
            "bytes": sum(p.nbytes for p in parts),
        },
        "unbuilt": manifest.unbuilt_parts(config),
    }


def describe_segment(segment: Segment) -> str:
    """One scan segment in words: `3 x (FULL m=2 + 5 REUSE)`."""
    head = f"{segment.mode} m={segment.ratio}" if segment.ratio else f"{segment.mode}"
    if not segment.tail_length:
        return f"{len(segment.heads)} x {head}"
    tail = f"{segment.tail_mode} m={segment.tail_ratio}" if segment.tail_ratio else f"{segment.tail_mode}"
    return f"{len(segment.heads)} x ({head} + {segment.tail_length} {tail})"


def ranges(ids: Sequence[int]) -> str:
    """Increasing ids as runs: 0-3, 7."""
    parts: list[list[int]] = []
    for i in ids:
        if parts and i == parts[-1][1] + 1:
            parts[-1][1] = i
        else:
            parts.append([i, i])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in parts)


def human_bytes(n: float) -> str:
    """Bytes in decimal units: 2.70 MB."""
    for unit in ("bytes", "kB", "MB", "GB", "TB"):
        if abs(n) < 1000 or unit == "TB":
            return f"{n:,.0f} {unit}" if unit == "bytes" else f"{n:,.2f} {unit}"
        n /= 1000
    raise AssertionError


def human_count(n: int) -> str:
    """A parameter count: 543.6 B."""
    for limit, unit in ((10**9, "B"), (10**6, "M"), (10**3, "k")):
        if n >= limit:
            return f"{n / limit:,.1f} {unit}"
    return str(n)


# ---- tables ----

_MODE_STYLE = {
    Mode.SWA: "dim",
    Mode.FULL: "bold red",
    Mode.REINDEX: "yellow",
    Mode.REUSE: "",
    Mode.CSA: "bold red",
    Mode.HCA: "blue",
}


def _print_report(config: ModelConfig, report: dict[str, Any]) -> None:
    from rich.console import Console

    console = Console(highlight=False)
    _print_plan(config, report, console)
    _print_pools(config, report, console)
    _print_parts(report, console)
    totals = report["totals"]
    _say(
        console,
        f"\n[bold]{totals['tensors']:,}[/] tensors, [bold]{totals['bytes']:,}[/] bytes, "
        f"[bold]{totals['parameters']:,}[/] parameters in the release layout",
    )
    if files := report.get("files"):
        n = files["files"]
        where = f"{n:,} file" + "s" * (n != 1)
        _say(console, f"{where} on disk: every tensor there with the name, shape and dtype that config.json implies")
    if unbuilt := report["unbuilt"]:
        listed = ", ".join(f"{name} ({n})" for name, n in unbuilt.items())
        _say(console, f"parts not built yet, accounted for and left on disk: {listed}")


def _say(console: Console, text: str) -> None:
    """One line of prose: wrapped by the terminal, not cut by us, so that a pipe sees it whole."""
    console.print(text, soft_wrap=True)


def _print_plan(config: ModelConfig, report: dict[str, Any], console: Console) -> None:
    from rich import box
    from rich.table import Table

    plan = config.plan
    table = Table(
        title=f"{len(plan.layers)} layers, each with a window of {config.sliding_window} tokens of its own",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
    )
    table.add_column("\nlayer", justify="right", no_wrap=True)
    table.add_column("\nmode", no_wrap=True)
    table.add_column("\nm", justify="right", no_wrap=True)
    table.add_column("\nmakes", min_width=16)
    for name in ("reads\npool of", "selec-\ntion of", "candi-\ndates of"):
        table.add_column(name, justify="right", no_wrap=True)
    for name in ("\nEngram", "draft\nhead"):
        table.add_column(name, justify="center", no_wrap=True)
    ends = {s.tails[i][-1] if s.tail_length else s.heads[i] for s in plan.segments for i in range(len(s.heads))}
    last_of_segment = {s.layers[-1] for s in plan.segments}

    def source(layer: int, of: int | None) -> str:
        return "" if of is None else "own" if of == layer else str(of)

    for s in plan.layers:
        table.add_row(
            str(s.layer),
            f"[{_MODE_STYLE[s.mode]}]{s.mode}[/]" if _MODE_STYLE[s.mode] else str(s.mode),
            str(s.ratio) if s.ratio else "",
            ", ".join(made for made in s.makes if made != "index keys"),  # they are part of the pool
            source(s.layer, s.pool_source),
            source(s.layer, s.selection_source),
            source(s.layer, s.candidate_source),
            "yes" if s.engram_slot >= 0 else "",
            "yes" if s.draft_slot >= 0 else "",
            end_section=s.layer in last_of_segment or (s.layer in ends and s.mode is not Mode.SWA),
        )
    console.print(table)
    n, start = len(plan.layers), plan.decoder_start
    halves = f"encoder {ranges(range(start))}, decoder {ranges(range(start, n))}"
    if start == n:
        halves = f"layers {ranges(range(n))}, no decoder"
    _say(console, f"{halves}; scanned as {', '.join(report['segments'])}")
    if targets := len(config.dspark_target_layer_ids):
        _say(
            console,
            f"draft head: {config.num_nextn_predict_layers} window-only stages, {config.dspark_block_size} tokens a "
            "block, "
            f"fed by what enters layer{'s' * (targets > 1)} {ranges(config.dspark_target_layer_ids)}",
        )


def _measured(config: ModelConfig) -> dict[str, Any] | None:
    """Bytes of a packed cache's arrays (abstract ones); None where the widths do not pack."""
    from csa2_jax.state import measure_cache

    try:
        found = measure_cache(config)
    except ValueError:
        return None
    return {
        "bytes_per_token": found.per_token,
        "bytes_per_sequence": found.per_sequence,
        "draft_window_bytes_per_sequence": found.draft_windows,
    }


def _print_pools(config: ModelConfig, report: dict[str, Any], console: Console) -> None:
    from rich import box
    from rich.table import Table

    cache = report["cache"]
    if report["pools"]:
        table = Table(title="\npools, packed: main KV and index keys, e2m1", box=box.SIMPLE_HEAD)
        for name in ("\npool of", "tokens\nper entry", "bytes\nper entry", "bytes\nper token"):
            table.add_column(name, justify="right", no_wrap=True)
        table.add_column("read by\nlayers")
        for pool in report["pools"]:
            table.add_row(
                str(pool["layer"]),
                str(pool["tokens_per_entry"]),
                f"{pool['bytes_per_entry']:,.1f}",
                f"{pool['bytes_per_token']:,.1f}",
                ranges(pool["readers"]),
            )
        console.print(table)
    draft = cache["draft_window_bytes_per_sequence"]
    measured = cache["measured"]
    per_token = measured["bytes_per_token"] if measured else cache["bytes_per_token"]
    at_most = per_token * config.max_position_embeddings
    _say(
        console,
        f"[bold]{per_token:,.1f} bytes per token[/], {human_bytes(at_most)} at "
        f"{config.max_position_embeddings:,} tokens; windows {human_bytes(cache['window_bytes_per_sequence'])} per "
        "sequence" + (f", {human_bytes(draft)} more for the draft head" if draft else ""),
    )
    if measured:
        _say(
            console,
            f"measured on the arrays of a packed cache: {per_token:,.1f} bytes a token and "
            f"{measured['bytes_per_sequence']:,} bytes a sequence",
        )


def _print_parts(report: dict[str, Any], console: Console) -> None:
    from rich import box
    from rich.table import Table

    totals = report["totals"]
    table = Table(title="\nwhere the parameters are", show_footer=True, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("part", footer="total", no_wrap=True)
    for name in ("tensors", "parameters", "bytes"):
        table.add_column(name, justify="right", footer=f"{totals[name]:,}", no_wrap=True)
    table.add_column("share", justify="right", footer="100.00 %", no_wrap=True)
    for p in report["parts"]:
        share = f"{100 * p['bytes'] / totals['bytes']:.2f} %"
        table.add_row(p["part"], f"{p['tensors']:,}", f"{p['parameters']:,}", f"{p['bytes']:,}", share)
    console.print(table)
