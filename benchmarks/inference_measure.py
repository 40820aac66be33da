"""Time and memory as this program takes them.

What is compared is run in turn, round by round, so that a slower minute of the machine meets all alike; a ratio says how it came
out in each round as well. A run during which anything was compiled is not counted but repeated.
"""

from __future__ import annotations

import dataclasses
import datetime
import functools
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np

Samples = dict[str, list[list[float]]]  # by what was run: rounds, and the seconds of each round
Note = Callable[[str], None]

_COMPILED: Final = "/jax/core/compile/backend_compile_duration"
_MOST_TRIES: Final = 4


@functools.cache
def _compilations() -> list[float]:
    """Seconds that XLA took for each program since the first call of this function; JAX reports them as they happen."""
    found: list[float] = []

    def listen(event: str, duration_secs: float, **kwargs: str | int) -> None:
        del kwargs
        if event == _COMPILED:
            found.append(duration_secs)

    jax.monitoring.register_event_duration_secs_listener(listen)
    return found


def compiled() -> tuple[int, float]:
    """(programs compiled, or read from the cache of compiled programs, so far; the seconds that took)."""
    return len(_compilations()), sum(_compilations())


def without_compiling(run: Callable[[], list[float]]) -> list[float]:
    """The seconds that `run` returns, repeated until nothing was compiled meanwhile; RuntimeError if that never happens."""
    for _ in range(_MOST_TRIES):
        before, _ = compiled()
        found = run()
        if compiled()[0] == before:
            return found
    raise RuntimeError(f"compiled something in each of {_MOST_TRIES} runs: this cannot be timed")


def seconds(run: Callable[..., Any], *args: Any) -> float:
    """Wall time of one call, until the device is done."""
    start = time.perf_counter()
    jax.block_until_ready(run(*args))
    return time.perf_counter() - start


def interleave(runs: Sequence[tuple[str, Callable[[], list[float]]]], rounds: int, note: Note) -> Samples:
    """Run everything in turn, `rounds` times. A name may come several times in a round; its seconds are joined."""
    samples: Samples = {name: [[] for _ in range(rounds)] for name, _ in runs}
    for i in range(rounds):
        for name, run in runs:
            note(f"round {i + 1} of {rounds}: {name}")
            samples[name][i] += without_compiling(run)
    return samples


Statistic = Callable[[Sequence[float]], float]


def over_rounds(rounds: Sequence[Sequence[float]], statistic: Statistic) -> float:
    """The statistic of all rounds' seconds together."""
    return statistic([second for found in rounds for second in found])


@dataclasses.dataclass(frozen=True)
class Ratio:
    """A ratio of two statistics over all rounds, and the least and largest of the single rounds' ratios."""

    value: float
    low: float
    high: float


def ratio(
    above: Sequence[Sequence[float]],
    below: Sequence[Sequence[float]],
    statistic: Statistic = statistics.median,
) -> Ratio:
    """`above` / `below`, both the same rounds of one run."""
    by_round = [statistic(a) / statistic(b) for a, b in zip(above, below, strict=True)]
    return Ratio(over_rounds(above, statistic) / over_rounds(below, statistic), min(by_round), max(by_round))


def scaled(rounds: Sequence[Sequence[float]], factor: float) -> list[list[float]]:
    """All seconds times `factor`."""
    return [[second * factor for second in found] for found in rounds]


def fit_line(points: Mapping[int, float]) -> tuple[float, float]:
    """(a, b) of y = a + b x with the least sum of squares; NaN with fewer than two points."""
    if len(points) < 2:
        return float("nan"), float("nan")
    slope, intercept = np.polyfit(list(points), list(points.values()), 1)
    return float(intercept), float(slope)


# ---- what the machine can do, measured beside what it does ----

# Large enough to fill every core, small enough to be run between all others.
PRODUCTS: Final = ((2048, 2048, 2048), (1024, 512, 1024), (1024, 4096, 1024), (4096, 1024, 4096))


def products(shapes: Sequence[tuple[int, int, int]] = PRODUCTS) -> Callable[[], list[float]]:
    """A run that multiplies f32 matrices [n, k] [k, m] in full f32; gives seconds per 1e12 FLOPs, one for each (n, k, m)."""
    multiply = jax.jit(functools.partial(jnp.matmul, precision=jax.lax.Precision.HIGHEST))
    pairs = [(jnp.ones((n, k)), jnp.ones((k, m)), 1e12 / (2 * n * k * m)) for n, k, m in shapes]

    def run() -> list[float]:
        return [seconds(multiply, a, b) * share for a, b, share in pairs for _ in range(2)]

    return run


def reading(size: int, times: int = 3) -> Callable[[], list[float]]:
    """A run that adds up f32 numbers of `size` bytes in all, `times` times over: seconds of each."""
    total, numbers = jax.jit(jnp.sum), jnp.ones(max(1, size // 4), jnp.float32)
    return lambda: [seconds(total, numbers) for _ in range(times)]


# ---- memory of this process ----

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def resident() -> tuple[int, int]:
    """(bytes of memory this process has now, the most it had), as Linux counts them.

    The kernel's ru_maxrss will not do: it keeps what the process had before it became this program, its parent's memory.
    """
    try:
        lines = dict(line.split(":", 1) for line in _STATUS.read_text(encoding="utf-8").splitlines() if ":" in line)
    except FileNotFoundError:
        raise RuntimeError(f"memory is read from {_STATUS}, which is not here: this is not Linux") from None
    now, most = (1024 * int(lines[name].split()[0]) for name in ("VmRSS", "VmHWM"))
    return now, most


def forget_peak() -> None:
    """From now on the most is counted anew."""
    _CLEAR.write_text("5", encoding="utf-8")


# ---- where this was measured ----


def machine() -> dict[str, str | int]:
    """Device, processor, date and versions, for records."""
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [line for line in cpuinfo.read_text(encoding="utf-8").splitlines() if line.startswith("model name")]
        model = names[0].partition(":")[2].strip() if names else model
    return {
        "device": jax.devices()[0].device_kind,
        "processor": model,
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 0),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "jax": jax.__version__,
    }
