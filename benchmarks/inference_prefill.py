"""How fast prompts are read, by the three routes through the decoder, and how far the shortest of them is from the exact one.

A run makes an empty cache for exactly the prompt's length, then times `prefill` alone until its logits and the cache are there.
Best of all rounds, on both sides of every ratio. Products of large f32 matrices are timed between the runs, and the best of them
is the rate at which the FLOPs of `inference_counts` could be done.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from benchmarks.inference_measure import PRODUCTS, interleave, over_rounds, products, ratio, scaled, seconds
from benchmarks.inference_models import DECODERS, Bench, Decoder, warm
from benchmarks.inference_report import RELEASED_BF16, RELEASED_F32, RELEASED_ON, Report, number, table, wanted
from csa2_jax import forward, init_cache
from csa2_jax.counts import flops


def measure(bench: Bench) -> Report:
    """Tokens per second for all lengths and routes."""
    sizes = bench.sizes
    refused: dict[Decoder, str] = {}
    for decoder in DECODERS:
        for length in sizes.lengths:
            if decoder not in refused and (reason := warm(bench, decoder, length)):
                refused[decoder] = reason
    decoders: list[Decoder] = [d for d in DECODERS if d not in refused]

    ceiling = products(sizes.products or PRODUCTS)
    runs: list[tuple[str, Any]] = [("products", ceiling)]
    for length in sizes.lengths:
        runs += [(_name(d, length), functools.partial(_run, bench, d, length)) for d in decoders]
        runs.append(("products", ceiling))
    samples = interleave(runs, bench.rounds, bench.note)

    rate = 1e12 / over_rounds(samples["products"], min)
    best = {d: {n: over_rounds(samples[_name(d, n)], min) for n in sizes.lengths} for d in decoders}
    counted = {n: flops(bench.config, n) for n in sizes.lengths}
    floor = {n: sum(counted[n].values()) / rate for n in sizes.lengths}

    report = Report()
    report.figures = {
        "dtype": "float32, no roundings",
        "chunk": sizes.chunk,
        "tokens_s": {d: {n: n / s for n, s in by.items()} for d, by in best.items()},
        "products_flop_s": rate,
        "flops": counted,
        "floor_s": floor,
        "samples_s": samples,
    }
    report.refuse(refused)
    report.lines += [
        f"floor: the FLOPs that full needs at {rate / 1e9:,.0f} GFLOP/s, the best product of f32 matrices in this run.",
        RELEASED_ON,
    ]
    done = table(
        f"Prefill, tokens/s: float32 without roundings, best of {bench.rounds}",
        "tokens",
        *decoders,
        *(f"full / {d}" for d in decoders if d != "full"),
        "floor, s",
        "full / floor",
        RELEASED_F32.what,
        RELEASED_BF16.what,
    )
    for n in sizes.lengths:
        cells = [number(n / best[d][n], 0) for d in decoders]
        cells += [number(best["full"][n] / best[d][n], 2) for d in decoders if d != "full"]
        cells += [number(floor[n], 2), number(best["full"][n] / floor[n], 2)]
        done.add_row(f"{n:,}", *cells, *(number(b.tokens_s(n), 0) for b in (RELEASED_F32, RELEASED_BF16)))
    report.tables.append(done)

    at = sizes.at
    over_exact = over_floor = None
    if at in counted:
        report.tables.append(_flops_table(counted[at], at, rate))
        full, needed = samples[_name("full", at)], sum(counted[at].values()) / 1e12
        over_floor = ratio(full, scaled(samples["products"], needed), min)
        if "exact" in decoders:
            over_exact = ratio(full, samples[_name("exact", at)], min)
    report.targets = [
        wanted(f"prefill at {at:,}: full / exact", ">=", 1.9, over_exact, refused.get("exact", "")),
        wanted(f"prefill at {at:,}: full / time its FLOPs need", "<=", 1.8, over_floor),
    ]
    return report


def _name(decoder: Decoder, length: int) -> str:
    return f"{decoder} {length:,}"


def _run(bench: Bench, decoder: Decoder, length: int) -> list[float]:
    tokens = bench.tokens(length, seed=length)
    cache = jax.block_until_ready(init_cache(bench.config, 1, length, "f32"))
    return [seconds(bench.prefill, decoder, tokens, cache)]


def _flops_table(counted: dict[str, int], length: int, rate: float) -> Any:
    done = table(f"FLOPs of {length:,} tokens by full", "part", "GFLOP", "share", "ms at the product's rate")
    whole = sum(counted.values())
    for part, count in (*counted.items(), ("all", whole)):
        done.add_row(part, number(count / 1e9), f"{count / whole:.1%}", number(1e3 * count / rate, 0))
    return done


# ---- the error of the shortest route ----


def measure_replay(bench: Bench) -> Report:
    """Relative error |a - b| / |b| of logits, b by the exact route: at a prompt's last token, and at tokens forced after it.

    One random prompt for every round. Also between full and exact, which may differ only by the order of f32 sums.
    """
    sizes = bench.sizes
    capacity = sizes.replayed + sizes.forced
    refused: dict[Decoder, str] = {d: reason for d in DECODERS if (reason := warm(bench, d, capacity))}
    decoders: list[Decoder] = [d for d in DECODERS if d not in refused]
    report = Report()
    report.figures = {"prompt": sizes.replayed, "forced": sizes.forced, "prompts": bench.rounds}
    report.refuse(refused)
    title = f"Error of logits behind prompts of {sizes.replayed:,} tokens, relative to the exact route"
    headings = ("last token, median", "largest", f"{sizes.forced} forced tokens, median", "largest")
    if "exact" not in decoders:
        return report
    done = table(title, "route", *headings)
    report.tables.append(done)
    errors: dict[Decoder, list[np.ndarray]] = {d: [] for d in decoders if d != "exact"}
    for prompt in range(bench.rounds):
        logits = {}
        for d in decoders:
            bench.note(f"prompt {prompt + 1} of {bench.rounds}: {d}")
            logits[d] = _logits(bench, d, prompt)
        for d in errors:
            errors[d].append(relative_errors(logits[d], logits["exact"]))
    for d, found in errors.items():
        last, forced = [float(e[0]) for e in found], [float(x) for e in found for x in e[1:]]
        report.figures[d] = {"last": last, "forced": forced}
        done.add_row(d, *(f"{x:.1e}" for x in (*_median_and_max(last), *_median_and_max(forced))))
    return report


def relative_errors(found: np.ndarray, expected: np.ndarray) -> np.ndarray:
    """|found - expected| / |expected| of each row, in float64."""
    a, b = found.astype(np.float64), expected.astype(np.float64)
    return np.linalg.norm(a - b, axis=-1) / np.linalg.norm(b, axis=-1)


def _median_and_max(values: Sequence[float]) -> tuple[float, float]:
    return statistics.median(values), max(values)


def _logits(bench: Bench, decoder: Decoder, prompt: int) -> np.ndarray:
    """[1 + forced, V]: of the prompt's last token and of each token that follows, all of them given."""
    sizes = bench.sizes
    tokens = bench.tokens(sizes.replayed + sizes.forced, seed=1000 + prompt)
    cache = init_cache(bench.config, 1, tokens.shape[1], "f32")
    out, cache = bench.prefill(decoder, tokens[:, : sizes.replayed], cache)
    rows = [np.asarray(out.logits)[0]]
    for i in range(sizes.replayed, tokens.shape[1]):
        out, cache = forward(bench.plain, tokens[:, i : i + 1], cache, all_logits=False)
        rows.append(np.asarray(out.logits)[0])
    return np.stack(rows)
