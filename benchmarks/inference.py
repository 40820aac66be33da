"""How fast does the model read prompts and write tokens, and does it meet what it is meant to?

python benchmarks/inference.py                           everything, on the model of configs/bench.json: half an hour on two cores
python benchmarks/inference.py --parts prefill decode    only these
python benchmarks/inference.py --quick                   a toy model and toy sizes: shows that the program works, no more
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Final, Literal

import jax
import tyro
from rich.console import Console

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import inference_cold, inference_decode, inference_host, inference_prefill, inference_reindex
from benchmarks.inference_measure import machine
from benchmarks.inference_models import BENCH, FULL, QUICK, Bench, shrunk
from benchmarks.inference_report import Report, draw, targets_table, write_json
from csa2_jax import ModelConfig

Part = Literal["prefill", "decode", "reindex", "host", "cold", "replay"]
PARTS: Final[dict[Part, Callable[[Bench], Report]]] = {
    "prefill": inference_prefill.measure,
    "decode": inference_decode.measure,
    "reindex": inference_reindex.measure,
    "host": inference_host.measure,
    "cold": inference_cold.measure,
    "replay": inference_prefill.measure_replay,
}


def main(
    parts: tuple[Part, ...] = tuple(PARTS),
    quick: bool = False,
    rounds: Annotated[int, tyro.conf.arg(help="rounds in which everything takes its turn; of replay, prompts")] = 3,
    steps: Annotated[int, tyro.conf.arg(help="decode steps of every case, five a round")] = 25,
    lengths: tuple[int, ...] = (),
    contexts: tuple[int, ...] = (),
    config: Path | None = None,
    json: Path | None = None,
    png: Path | None = None,
    strict: bool = False,
) -> int:
    """Measure inference, and hold it against targets: ratios between things that ran in turn, in this very run.

    Args:
        parts: what to measure. prefill: prompts by the three routes through the decoder, beside products of matrices and the
            released code's times. decode: tokens by context and by how the cache is stored, beside reading the weights. reindex:
            the search among candidates over growing pools. host: what Python and dispatch take of a decode step, and how many
            arrays are handed over. cold: compile times and memory, in fresh processes. replay: what the shortest route through
            the decoder changes in the logits.
        quick: a toy model and toy sizes; the figures mean nothing.
        lengths: tokens of prompts, instead of 512 to 32,768.
        contexts: tokens before a decode step, instead of 2,048 to 131,072.
        config: another model's config.json than configs/bench.json.
        json: write all figures into this file, with machine, date and versions.
        png: draw prefill and decode into this file.
        strict: exit with 1 if a target is missed, or what it speaks about was refused.
    """
    console = Console(width=None if Console().is_terminal else 200)
    if rounds < 1 or steps < 1:
        raise SystemExit(f"--rounds {rounds} and --steps {steps} must be at least 1")
    sizes = QUICK if quick else FULL
    sizes = dataclasses.replace(sizes, lengths=lengths or sizes.lengths, contexts=contexts or sizes.contexts)
    config = config or BENCH
    model = ModelConfig.from_hf(config)
    where = {"config": config.name, "quick": quick, "rounds": rounds, **machine()}
    title = f"{where['processor']}, {where['cores']} cores, jax {where['jax']}, {where['date']}"
    console.print(f"{config.name}{', shrunk to a toy: the figures mean nothing' if quick else ''}; {title}")
    reports: dict[str, Report] = {}
    if quick:  # compiling is all that takes time here
        jax.config.update("jax_disable_most_optimizations", True)
    with _notes(console) as note:
        bench = Bench(shrunk(model) if quick else model, sizes, rounds, steps, note, quick=quick)
        for part in dict.fromkeys(parts):
            reports[part] = PARTS[part](bench)
            for table in reports[part].tables:
                console.print(table)
            for line in reports[part].lines:
                console.print(line, markup=False)
    targets = [target for report in reports.values() for target in report.targets]
    if targets:
        console.print(targets_table(targets))
        for target in (target for target in targets if target.verdict == "refused"):
            console.print(f"{target.name}: {target.refused}", markup=False)
    if json is not None:
        write_json(json, where, reports)
        console.print(f"written into {json}")
    if png is not None:
        draw(png, f"{config.name} on {title}", reports)
        console.print(f"drawn into {png}")
    return 1 if strict and any(target.failed for target in targets) else 0


@contextlib.contextmanager
def _notes(console: Console) -> Iterator[Callable[[str], None]]:
    """Says what is being done and how long it has been: on a terminal in one line that changes, else line by line on stderr."""
    start = time.monotonic()
    if not console.is_terminal:
        yield lambda text: print(f"[{time.monotonic() - start:6.0f} s] {text}", file=sys.stderr, flush=True)
        return
    with console.status("starting") as status:
        yield lambda text: status.update(f"{time.monotonic() - start:,.0f} s: {text}")


if __name__ == "__main__":
    sys.exit(tyro.cli(main, config=(tyro.conf.FlagCreatePairsOff,)))
