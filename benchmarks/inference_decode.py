"""How long one decoded token takes, by context and by how the cache is stored.

Caches are filled with normal numbers and told that they hold a context's tokens but for the last few; no prompt is run. A turn is
one step that is not counted, because it finds the processor's caches full of another model's or context's numbers, then five that
are; turns of all cases alternate, and each begins at the same length again. A step is one `forward` of one random token until its
logits and the cache are there, checks on the host included. Medians. Batch 1.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable
from typing import Any

from flax import nnx

from benchmarks.inference_counts import active_bytes
from benchmarks.inference_measure import Samples, fit_line, interleave, over_rounds, ratio, reading, seconds
from benchmarks.inference_models import STORED, Bench, Stored, at_length, filled_cache
from benchmarks.inference_report import RELEASED_BF16, RELEASED_F32, RELEASED_ON, Report, number, table, wanted
from csa2_jax import Model, Numerics, Unsupported, forward
from csa2_jax.counts import flops

TURN = 5  # steps that count


@dataclasses.dataclass(frozen=True)
class Case:
    """A model with a cache for `capacity` tokens, at the last steps of a context."""

    context: int
    capacity: int
    stored: Stored
    rounded: bool  # the model with roundings

    @property
    def name(self) -> str:
        """How tables call it."""
        place = "" if self.capacity == self.context else f" in a cache for {self.capacity:,}"
        return f"{self.context:,}{place}, {self.stored}{' with roundings' if self.rounded else ''}"


def cases(bench: Bench) -> list[Case]:
    """Every context in a cache of its own size, the small one also in the large one's, the large one in every storage."""
    sizes = bench.sizes
    found = [Case(c, c, "f32", False) for c in sizes.contexts]
    if sizes.small in sizes.contexts and sizes.large in sizes.contexts:
        found.append(Case(sizes.small, sizes.large, "f32", False))
    if sizes.large in sizes.contexts:
        found += [Case(sizes.large, sizes.large, stored, True) for stored in STORED]
    return found


def measure(bench: Bench) -> Report:
    """Steps of all cases, and the time to read the weights that a step needs."""
    sizes, refused = bench.sizes, {}
    runs: list[tuple[str, Callable[[], list[float]]]] = []
    for case in cases(bench):
        bench.note(f"compiling for {case.name}")
        try:
            runs.append((case.name, _turn(bench, case)))
        except Unsupported as refusal:
            refused[case.name] = str(refusal)
    weights = active_bytes(nnx.eval_shape(lambda: Model(bench.config, numerics=Numerics("float32", False))))
    samples = interleave([*runs, ("weights", reading(weights))], -(-bench.steps // TURN), bench.note)

    own = {c: Case(c, c, "f32", False).name for c in sizes.contexts}
    ms = {name: 1e3 * over_rounds(rounds, statistics.median) for name, rounds in samples.items()}
    a, b = fit_line({c: ms[name] for c, name in own.items()})
    at_large = [(name, sizes.large, ms[name]) for name, _ in runs if "roundings" in name]
    report = Report()
    report.figures = {
        "dtype": "float32",
        "own_cache_ms": {c: ms[name] for c, name in own.items()},
        "all_ms": ms,
        "at_large_ms": at_large,
        "fit": {"a_ms": a, "b_ms_per_token": b, "b_ms_per_64k": b * 65536},
        "active_weight_bytes": weights,
        "read_bytes_s": weights / over_rounds(samples["weights"], min),
        "samples_s": samples,
    }
    report.refuse(refused)
    best, middle = (
        weights / over_rounds(samples["weights"], statistic) / 1e9 for statistic in (min, statistics.median)
    )
    if len(own) > 1:
        report.lines.append(f"fit: {a:.2f} ms + {b * 65536:.2f} ms for every 64k of context.")
    report.lines += [
        f"weights: the {weights / 1e6:,.1f} MB one token needs, added up: {best:,.1f} GB/s at best, median {middle:,.1f}.",
        RELEASED_ON,
    ]
    report.tables = [_contexts_table(bench, own, samples, a, b), _storage_table([name for name, _ in runs], samples)]
    report.targets = _targets(bench, own, samples, refused)
    return report


def _turn(bench: Bench, case: Case) -> Callable[[], list[float]]:
    """A run of 1 + TURN steps that end where the context is full; its programs are compiled. Unsupported: no such cache yet."""
    start = case.context - 1 - TURN
    held = [filled_cache(bench.config, case.capacity, case.stored)]
    bound = bench.rounded if case.rounded else bench.plain
    tokens = bench.tokens(1 + TURN, seed=case.context)

    def step(token: Any) -> Any:
        out, held[0] = forward(bound, token, held[0], all_logits=False)
        return out, held[0]

    def run() -> list[float]:
        held[0] = at_length(held[0], start)
        return [seconds(step, tokens[:, i : i + 1]) for i in range(1 + TURN)][1:]

    run()
    return run


def _contexts_table(bench: Bench, own: dict[int, str], samples: Samples, a: float, b: float) -> Any:
    done = table(
        "Decode, ms per token: float32 without roundings, f32 cache of the context's own size",
        "context",
        "median",
        "least",
        "fit",
        "GFLOP",
        RELEASED_F32.what,
        RELEASED_BF16.what,
    )
    for context, name in own.items():
        ms = [1e3 * over_rounds(samples[name], statistic) for statistic in (statistics.median, min)]
        cells = [number(x, 2) for x in (*ms, a + b * context)]
        cells.append(number(sum(flops(bench.config, 1, context - 1).values()) / 1e9, 2))
        done.add_row(f"{context:,}", *cells, *(number(x.decode_ms.get(context)) for x in (RELEASED_F32, RELEASED_BF16)))
    return done


def _storage_table(names: list[str], samples: Samples) -> Any:
    done = table("Decode, ms per token, all in turn: float32", "case", "median", "least", "/ reading the weights")
    for name in (*names, "weights"):
        ms = [number(1e3 * over_rounds(samples[name], statistic), 2) for statistic in (statistics.median, min)]
        done.add_row(name, *ms, number(ratio(samples[name], samples["weights"]).value, 2))
    return done


def _targets(bench: Bench, own: dict[int, str], samples: Samples, refused: dict[str, str]) -> list[Any]:
    sizes = bench.sizes
    small, large = (Case(n, n, "f32", False).name for n in (sizes.small, sizes.large))
    in_large = Case(sizes.small, sizes.large, "f32", False).name
    packed, bf16 = (Case(sizes.large, sizes.large, stored, True).name for stored in ("packed", "bf16"))
    read_at = own.get(sizes.read_at, "")

    def over(name: str, limit: float, above: str, below: str) -> Any:
        known = above in samples and below in samples
        found = ratio(samples[above], samples[below]) if known else None
        return wanted(f"decode: {name}", "<=", limit, found, refused.get(above, refused.get(below, "")))

    return [
        over(f"{sizes.large:,} / {sizes.small:,} tokens", 1.2, large, small),
        over(f"{sizes.small:,} tokens in a cache for {sizes.large:,} / for its own", 1.1, in_large, small),
        over(f"{sizes.read_at:,} tokens / reading the active weights once", 2.0, read_at, "weights"),
        over(f"packed / bf16 at {sizes.large:,}, both float32 with roundings", 1.0, packed, bf16),
    ]
