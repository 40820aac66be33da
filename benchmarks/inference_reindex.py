"""What a REINDEX layer's search costs over pools of many sizes: it looks at its candidates alone, so the cost should be flat.

A call of `index_select` for one query among candidates, f32 keys. One program makes many calls after one another, each with other
candidates, and small pools are stacked until they hold as many keys as the largest, for the calls to take their turn with: a
small pool would else be read from a nearer memory than a large one. Best times, because the dearest pool is held against the
cheapest and any disturbance would be found.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.inference_measure import Ratio, interleave, over_rounds, scaled, seconds
from benchmarks.inference_models import RELEASED, Bench
from benchmarks.inference_report import Report, number, table, wanted
from csa2_jax import ModelConfig
from kernels_pallas import index_select

CALLS = 16  # in one program
PROGRAMS = 5  # in one round


def measure(bench: Bench) -> Report:
    """All pools, at this model's sizes and at the released ones."""
    models = {"this model": bench.config}
    if not bench.quick:
        models["released"] = ModelConfig.from_hf(RELEASED)
    report, rounds = Report(), 3 * bench.rounds  # they are short
    done = table(
        f"Search among candidates, microseconds: one query, f32, best of {PROGRAMS * rounds} x {CALLS} calls",
        "pool entries",
        *models,
    )
    report.lines.append("In brackets: pools that the candidates cover as a whole; such a call may have less to do.")
    cells: dict[int, list[str]] = {entries: [] for entries in bench.sizes.pools}
    for name, config in models.items():
        bench.note(f"compiling for pools of {name}")
        programs = {entries: _program(config, entries, max(bench.sizes.pools)) for entries in bench.sizes.pools}
        runs: list[tuple[str, Any]] = [(f"{name}, {entries:,}", programs[entries]) for entries in programs]
        samples = interleave(runs, rounds, bench.note)
        covered = config.candidate_topk_blocks * config.candidate_block_size
        by_pool = {n: scaled(samples[f"{name}, {n:,}"], 1 / CALLS) for n in programs}
        us = {n: 1e6 * over_rounds(found, min) for n, found in by_pool.items()}
        for n in us:
            cells[n].append(f"({number(us[n])})" if n <= covered else number(us[n]))
        larger = {n: found for n, found in by_pool.items() if n > covered}
        shape = f"{config.candidate_topk_blocks} blocks of {config.candidate_block_size}"
        found = spread(larger) if len(larger) > 1 else None
        text = f"search among candidates, {name} ({shape}): dearest / cheapest pool"
        report.targets.append(wanted(text, "<=", 1.2, found))
        report.figures[name] = {"microseconds": us, "candidate_entries": covered, "samples_s": samples}
    for entries, row in cells.items():
        done.add_row(f"{entries:,}", *row)
    report.tables.append(done)
    return report


def spread(by_pool: dict[int, list[list[float]]]) -> Ratio:
    """Largest / least of the pools' best times: of all rounds, and the extremes of single rounds."""
    rounds = len(next(iter(by_pool.values())))
    by_round = [[min(found[i]) for found in by_pool.values()] for i in range(rounds)]
    single = [max(row) / min(row) for row in by_round]
    whole = [over_rounds(found, min) for found in by_pool.values()]
    return Ratio(max(whole) / min(whole), min(single), max(single))


def _program(config: ModelConfig, entries: int, held: int) -> Any:
    """A run that makes CALLS calls PROGRAMS times over, compiled; gives the seconds of each program.

    As many pools are stacked as hold `held` keys in all.
    """
    rng = np.random.default_rng(entries)
    heads, width, size = config.index_n_heads, config.index_head_dim, config.candidate_block_size
    blocks = entries // size
    count, pools = min(config.candidate_topk_blocks, blocks), max(1, held // entries)
    chosen = [np.sort(rng.choice(blocks, count, replace=False)) for _ in range(CALLS)]
    arrays = (
        jnp.asarray(np.stack(chosen)[:, None, None], jnp.int32),
        jnp.asarray(rng.standard_normal((1, 1, heads, width), np.float32)),
        jnp.asarray(rng.standard_normal((1, 1, heads), np.float32)),
        jnp.asarray(rng.standard_normal((pools, 1, entries, width), np.float32)),
    )

    @jax.jit
    def program(chosen: jax.Array, q: jax.Array, w: jax.Array, keys: jax.Array) -> jax.Array:
        def once(i: jax.Array, found: jax.Array) -> jax.Array:
            # Behind the barrier a call depends on the one before, so that none can be left out or moved.
            (some, weights), _ = lax.optimization_barrier(((q, w), found))
            visible = jnp.full((1, 1), entries, jnp.int32)
            options: dict[str, Any] = {"topk": config.index_topk, "block_size": size, "candidates_BTC": chosen[i]}
            group = i * pools // CALLS if pools > CALLS else i % pools
            return index_select(some, weights, keys, group, visible, **options)[0]

        return lax.fori_loop(0, CALLS, once, jnp.zeros((1, 1, config.index_topk), jnp.int32))

    jax.block_until_ready(program(*arrays))
    return lambda: [seconds(program, *arrays) for _ in range(PROGRAMS)]
