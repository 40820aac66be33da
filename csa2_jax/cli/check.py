"""`csa2 check`: replay a recorded run through our model and say how close it comes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Literal

import tyro
from rich.console import Console
from rich.table import Table

from csa2_jax.gates import Pooled, Verdict, judge_end_to_end, judge_modules, pool
from csa2_jax.recording import Comparison, Recording

# Columns of the per-step table: what decides a replay.
_STEP_COLUMNS = (
    *("logits", "h", "window cache", "pool", "index keys", "index_score", "index_idx", "candidates"),
    *("gate_idx", "engram_hash", "draft_ids"),
)


def main(
    golden_dir: Annotated[Path, tyro.conf.Positional],
    /,
    part: Literal["both", "run", "modules"] = "both",
    storage: Literal["f32", "bf16"] = "f32",
    scan_layers: bool = True,
    implementation: Literal["xla", "pallas_tpu", "pallas_gpu"] | None = None,
    interpret: bool = False,
    verbose: bool = False,
) -> int:
    """Replay a recorded trace through our model: per quantity and step, the largest error and the share of equal choices.

    A recording is a model directory (config.json, model.safetensors) with trace.npz and meta.json beside it. Its mode decides
    compute dtype, roundings and tolerances. Exit code 1 if any tolerance is exceeded.

    Args:
        golden_dir: the recording.
        part: the whole run from its tokens ("run"), each module fed with its recorded input ("modules"), or both.
        storage: what the cache stores.
        scan_layers: scan the layer stack; unrolled (False) the numbers are the same.
        implementation: which kernels run (by default the best that is proven on this device).
        interpret: run the Pallas kernels of another device on a CPU, slowly.
        verbose: one line for every quantity of every step.
    """
    from csa2_jax.checkpoint import load_checkpoint
    from csa2_jax.replay import compare_end_to_end, compare_modules

    console = Console(width=None if Console().is_terminal else 150)
    recording = Recording(golden_dir)
    console.print(
        f"[bold]{golden_dir}[/bold]: mode {recording.mode} ({recording.compute_dtype} compute, roundings "
        f"{'on' if recording.fake_quant else 'off'}), {recording.config.num_hidden_layers} layers, batch "
        f"{len(recording.tokens)}, prompt {recording.prompt} + {len(recording.steps) - 1} decode steps"
    )
    model = load_checkpoint(
        recording.directory,
        compute_dtype=recording.compute_dtype,  # type: ignore[arg-type]
        fake_quant=recording.fake_quant,
        scan_layers=scan_layers,
        implementation=implementation,
        interpret=interpret,
    )
    verdicts: list[Verdict] = []
    if part in ("both", "run"):
        comparisons = _watch(console, "replaying the run", compare_end_to_end(recording, model, storage=storage))
        verdicts += _report(console, recording, "The run, from its tokens", comparisons, judge_end_to_end, verbose)
    if part in ("both", "modules"):
        comparisons = _watch(console, "replaying modules", compare_modules(recording, model))
        title = "Modules, from their recorded inputs"
        verdicts += _report(console, recording, title, comparisons, judge_modules, verbose)
    failed = [v for v in verdicts if not v.passed]
    for v in failed:
        sign = "below" if v.measure == "share equal" else "above"
        console.print(f"[red]beyond tolerance:[/red] {v.quantity}, {v.measure}: {v.value:.3g} is {sign} {v.bound:g}")
    console.print(f"{len(verdicts) - len(failed)} of {len(verdicts)} tolerances kept")
    return 1 if failed or not verdicts else 0


def _watch(console: Console, what: str, comparisons: Iterator[Comparison]) -> list[Comparison]:
    """All comparisons, with the step in progress shown on a terminal."""
    found: list[Comparison] = []
    with console.status(f"{what} (the first step compiles)") as status:
        for comparison in comparisons:
            if not found or found[-1].step != comparison.step:
                status.update(f"{what}: {comparison.step}")
            found.append(comparison)
    return found


def _report(
    console: Console,
    recording: Recording,
    title: str,
    comparisons: list[Comparison],
    judge: Callable[[Recording, dict[str, Pooled]], list[Verdict]],
    verbose: bool,
) -> list[Verdict]:
    """Print the tables and return the verdicts."""
    pooled = pool(comparisons)
    verdicts = judge(recording, pooled)
    console.print(_summary(title, pooled, verdicts))
    by_step = {
        step: pool(c for c in comparisons if c.step == step) for step in dict.fromkeys(c.step for c in comparisons)
    }
    if verbose:
        table = Table("step", "quantity", "largest error", "equal", title=f"{title}: every quantity and step")
        for step, of_step in by_step.items():
            for quantity, entry in of_step.items():
                table.add_row(step, quantity, _error(entry), _share(entry))
        console.print(table)
    elif len(by_step) > 1:
        columns = [q for q in _STEP_COLUMNS if q in pooled]
        table = Table("step", title=f"{title}: by step (largest relative error, or share equal)")
        for quantity in columns:
            table.add_column(quantity, justify="right")
        for step, of_step in by_step.items():
            table.add_row(step, *(_cell(of_step.get(quantity)) for quantity in columns))
        console.print(table)
    return verdicts


def _summary(title: str, pooled: dict[str, Pooled], verdicts: list[Verdict]) -> Table:
    table = Table("quantity", title=title)
    for column in ("compared", "p50", "p90", "largest", "equal"):
        table.add_column(column, justify="right")
    table.add_column("worst at")
    table.add_column("tolerance")
    for quantity, entry in pooled.items():
        sample = entry.errors if entry.errors is not None else entry.equal
        bounds = [v for v in verdicts if v.quantity == quantity]
        marks = ", ".join(
            f"[{'green' if v.passed else 'red'}]{v.measure} {'>=' if v.measure == 'share equal' else '<='} {v.bound:g}[/]"
            for v in bounds
        )
        step, layer = entry.worst
        place = step if layer is None else f"{step} L{layer}"
        exact = entry.share_equal == 1.0 or (entry.errors is not None and not entry.errors.any())
        table.add_row(
            quantity,
            str(0 if sample is None else sample.size),
            _number(entry.quantile(0.5)),
            _number(entry.quantile(0.9)),
            _error(entry),
            _share(entry),
            "" if exact else place,
            marks,
        )
    return table


def _cell(entry: Pooled | None) -> str:
    if entry is None:
        return ""
    return _share(entry) if entry.equal is not None else _error(entry)


def _error(entry: Pooled) -> str:
    return _number(entry.quantile(1.0))


def _number(value: float | None) -> str:
    return "" if value is None else "0" if value == 0 else f"{value:.1e}"


def _share(entry: Pooled) -> str:
    share = entry.share_equal
    if share is None:
        return ""
    return "100%" if share == 1 else f"{min(100 * share, 99.99):.2f}%"
