"""How long the kernels take on this device, after they have been shown to agree with XLA on it.

Time is that of one call inside a program that makes many of them, each waiting for the one before (`repeat_call`): what the
host adds to a single call is spread over all. A figure is the median of several runs, each ended by waiting for the device.
Ceilings, a copy and a matrix product, are measured in the same run.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.kernels_calls import Call
from kernels_pallas import Unsupported


@dataclasses.dataclass(frozen=True)
class Ceilings:
    """Bytes/s of a copy and bf16 flop/s of a matrix product, as measured here."""

    bytes_s: float
    flop_s: float


@dataclasses.dataclass
class Measurement:
    """One call of one implementation.

    error: of the worst output against XLA, relative to its largest number; of integers, the share that differs. refused: why
    there is nothing else here. fault: what went wrong instead of a result. others: seconds of what it was put beside.
    """

    call: str
    implementation: str
    seconds: float = 0.0
    error: float = 0.0
    agrees: bool = False
    refused: str = ""
    fault: str = ""
    others: dict[str, float] = dataclasses.field(default_factory=dict)

    @property
    def proven(self) -> bool:
        """Whether it ran and agreed."""
        return self.agrees and not self.wrong and not self.refused

    @property
    def wrong(self) -> bool:
        """Whether it failed or disagreed."""
        return bool(self.fault) or not (self.refused or self.agrees)


# Largest error, relative to the largest number of the same output: one rounding to bf16 apart, or f32 sums in another order.
TOLERANCE: Final = {"bfloat16": 2.0**-7, "float32": 2e-5}
# f32 results of bf16 arithmetic, such as a log-sum-exp or the sums behind a gradient.
MIXED_TOLERANCE: Final = 2.0**-7


def differences(ours: Any, reference: Any, *, exact_f32: bool) -> tuple[float, bool]:
    """(the largest relative error of any output, whether every output is within its tolerance).

    Whole numbers have to be equal; the error of those is the share that is not. NaN agrees with nothing.
    """
    worst, agrees = 0.0, True
    ours, reference = jax.tree.leaves(ours), jax.tree.leaves(reference)
    if [(a.shape, a.dtype) for a in ours] != [(a.shape, a.dtype) for a in reference]:
        return float("inf"), False
    for a, b in zip(ours, reference, strict=True):
        if jnp.issubdtype(a.dtype, jnp.integer):
            error, tolerance = float(jnp.mean(a != b)), 0.0
        else:
            x, y = a.astype(jnp.float32), b.astype(jnp.float32)
            error = float(jnp.max(jnp.abs(x - y)) / jnp.maximum(jnp.max(jnp.abs(y)), 1e-30))
            tolerance = TOLERANCE[a.dtype.name] if exact_f32 or a.dtype == jnp.bfloat16 else MIXED_TOLERANCE
        worst = max(worst, error) if error == error else float("nan")
        agrees = agrees and error <= tolerance
    return worst, agrees


def repeat_call(function: Callable[..., Any], times: int) -> Callable[..., Any]:
    """A jitted program that calls `function` `times` times, each call after the one before, and returns the last results.

    The barrier makes all arguments but the last (a pool, which should not be moved) depend on the results before, so that
    neither a call nor a part of one can be left out or done once for all.
    """

    def program(*args: Any) -> Any:
        *some, last = args

        def once(_: Any, results: Any) -> Any:
            held, _ = lax.optimization_barrier((some, results))
            return function(*held, last)

        nothing = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), jax.eval_shape(function, *args))
        return lax.fori_loop(0, times, once, nothing)

    return jax.jit(function if times == 1 else program)


def seconds_per_call(function: Callable[..., Any], args: Sequence[Any], *, repeat: int, span: float = 5e-3) -> float:
    """Median over `repeat` runs of one call's time; a run makes as many calls as take about `span` seconds."""
    single = repeat_call(function, 1)
    jax.block_until_ready(single(*args))
    times = min(1000, max(1, round(span / _seconds(single, args))))
    program = repeat_call(function, times)
    jax.block_until_ready(program(*args))
    return statistics.median(_seconds(program, args) for _ in range(repeat)) / times


def _seconds(program: Callable[..., Any], args: Sequence[Any]) -> float:
    start = time.perf_counter()
    jax.block_until_ready(program(*args))
    return time.perf_counter() - start


def ceilings(*, repeat: int, copied: int = 1 << 30, side: int = 8192) -> Ceilings:
    """Copy `copied` bytes (read and written), multiply two bf16 matrices of `side` squared."""
    x, scale = jnp.ones(copied // 4, jnp.float32), jnp.float32(1.5)
    seconds = seconds_per_call(lambda scale, x: x * scale, (scale, x), repeat=repeat)
    a = jnp.ones((side, side), jnp.bfloat16)
    multiplying = seconds_per_call(lambda a, b: a @ b, (a, a), repeat=repeat)
    return Ceilings(2 * copied / seconds, 2 * side**3 / multiplying)


def measure(
    call: Call, implementation: str, *, repeat: int, interpret: bool = False, others: Sequence[Other] = ()
) -> Measurement:
    """Compare a call with XLA, and if they agree, time both and the others."""
    args = call.inputs(0, in_rows=implementation == "pallas_tpu")
    found = Measurement(call.name, implementation)
    kernel = call.function(implementation, interpret=interpret)
    try:
        ours = jax.block_until_ready(jax.jit(kernel)(*args))
    except Unsupported as refusal:
        found.refused = str(refusal)
        return found
    except Exception as error:  # a compiler's or a device's; the other calls are worth knowing all the same
        found.fault = f"{type(error).__name__}: {error}"[:500]
        return found
    reference_args = args if implementation != "pallas_tpu" else call.inputs(0)
    reference = jax.jit(call.function("xla"))
    found.error, found.agrees = differences(ours, reference(*reference_args), exact_f32=call.storage == "f32")
    del ours
    if not found.agrees:
        return found
    found.seconds = seconds_per_call(kernel, args, repeat=repeat)
    del args
    found.others["xla"] = seconds_per_call(call.function("xla"), reference_args, repeat=repeat)
    for other in others:
        seconds = other.seconds(call, repeat)
        if seconds is not None:
            found.others[other.name] = seconds
    return found


# ---- what others offer: dense attention over rows that somebody has gathered already ----


@dataclasses.dataclass(frozen=True)
class Other:
    """Something to put beside attention. `run(q, rows, repeat)` gives seconds for q [Q, N, H] against rows [Q, K + W, H]."""

    name: str
    run: Callable[[np.ndarray, np.ndarray, int], float]

    def seconds(self, call: Call, repeat: int) -> float | None:
        """Seconds of the nearest thing to the call, or None where there is none. It is not given the gather to do, nor a sink."""
        queries = call.batch * call.tokens
        if call.door != "sparse_attention" or queries > 512:  # gathered rows of more would not fit beside the pool
            return None
        rng = np.random.default_rng(0)
        rows = min(call.sizes.topk, call.entries) + call.sizes.window
        q = rng.standard_normal((queries, call.sizes.heads, call.sizes.width), np.float32)
        return self.run(q, rng.standard_normal((queries, rows, call.sizes.width), np.float32), repeat)


def others() -> tuple[list[Other], list[str]]:
    """What can be imported here, and for the rest why not."""
    found, missing = [], []
    for name, load in (("torch sdpa", _torch), ("tokamax", _tokamax)):
        try:
            found.append(Other(name, load()))
        except (ImportError, AttributeError, RuntimeError) as error:
            missing.append(f"{name} skipped: {error}")
    return found, missing


def _torch() -> Callable[[np.ndarray, np.ndarray, int], float]:
    import torch  # type: ignore[import-not-found]

    if not torch.cuda.is_available():
        raise RuntimeError("torch sees no CUDA device")

    def run(q_QNH: np.ndarray, rows_QSH: np.ndarray, repeat: int) -> float:
        q = torch.tensor(q_QNH, dtype=torch.bfloat16, device="cuda")[:, None]  # the heads of one query share their rows
        rows = torch.tensor(rows_QSH, dtype=torch.bfloat16, device="cuda")[:, None]

        def runs(times: int) -> float:
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(times):
                torch.nn.functional.scaled_dot_product_attention(q, rows, rows)
            torch.cuda.synchronize()
            return (time.perf_counter() - start) / times

        runs(3)
        return statistics.median(runs(20) for _ in range(repeat))

    return run


def _tokamax() -> Callable[[np.ndarray, np.ndarray, int], float]:
    import tokamax  # type: ignore[import-not-found]

    attention = tokamax.dot_product_attention

    def run(q_QNH: np.ndarray, rows_QSH: np.ndarray, repeat: int) -> float:
        q, rows = jnp.asarray(q_QNH, jnp.bfloat16)[:, None], jnp.asarray(rows_QSH, jnp.bfloat16)[:, :, None]
        return seconds_per_call(lambda q, rows: attention(q, rows, rows), (q, rows), repeat=repeat)

    return run
