"""How long the 40-layer decode step takes to trace, lower and compile, scanned against unrolled, in one run.

    python benchmarks/compile_time.py [--config configs/v41_twin.json] [--repeat 3]

Prints both times and their ratio. The scan compiles one body per kind of group, the unrolled stack one per layer. JAX's
persistent compilation cache is off for the run.
"""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path

import jax
import numpy as np
import tyro
from flax import nnx
from rich.console import Console
from rich.table import Table

from csa2_jax import Bound, Model, ModelConfig, Numerics, init_cache
from csa2_jax.bound import _jit_forward


def measure(config: ModelConfig, scan_layers: bool) -> tuple[float, float, float]:
    """Seconds to trace, lower and compile one decode step over abstract weights."""
    model = nnx.eval_shape(lambda: Model(config, numerics=Numerics("float32", False), scan_layers=scan_layers))
    bound = Bound.of(model)
    cache = jax.eval_shape(lambda: init_cache(config, 1, config.max_position_embeddings, "f32"))
    ids = (jax.ShapeDtypeStruct((1, 1), np.int32), cache, jax.ShapeDtypeStruct((1,), np.int32))
    jax.clear_caches()
    start = time.perf_counter()
    traced = _jit_forward.trace(bound.structure, None, bound.state, None, *ids, all_logits=True, capture=frozenset())
    after_trace = time.perf_counter()
    lowered = traced.lower()
    after_lower = time.perf_counter()
    lowered.compile()
    return after_trace - start, after_lower - after_trace, time.perf_counter() - after_lower


def main(config: Path = Path("configs/v41_twin.json"), repeat: int = 3) -> None:
    """Compare compile times.

    Args:
        config: the layout; weights are abstract.
        repeat: runs of each, taken in turn; the median counts.
    """
    jax.config.update("jax_enable_compilation_cache", False)
    model = dataclasses.replace(ModelConfig.from_hf(config), quantized=False)
    runs: dict[bool, list[tuple[float, float, float]]] = {True: [], False: []}
    for _ in range(repeat):
        for scan in runs:
            runs[scan].append(measure(model, scan))
    table = Table(
        "layers", "trace s", "lower s", "compile s", "total s", title=f"{config}, {model.num_hidden_layers} layers"
    )
    totals = {}
    for scan, times in runs.items():
        trace, lower, compile_ = np.median(np.array(times), axis=0)
        totals[scan] = float(np.median([sum(t) for t in times]))
        name = "scanned" if scan else "unrolled"
        table.add_row(name, f"{trace:.1f}", f"{lower:.1f}", f"{compile_:.1f}", f"{totals[scan]:.1f}")
    Console().print(table)
    print(f"scanned / unrolled: {totals[True] / totals[False]:.2f} (target: at most 0.35)")


if __name__ == "__main__":
    tyro.cli(main)
