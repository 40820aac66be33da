"""A process of its own for what can be seen only once in a process: compiling from nothing, and the most memory.

Called by `inference_cold` with a job as JSON; prints what it found as one line of JSON. JAX keeps no compiled programs for it.
"""

from __future__ import annotations

import dataclasses
import gc
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.inference_measure import compiled, forget_peak, resident
from benchmarks.inference_models import Bench, Decoder, Sizes, at_length, filled_cache
from csa2_jax import ModelConfig, Unsupported, forward, init_cache


@dataclasses.dataclass(frozen=True)
class Job:
    """What to do: a prompt by one of the routes, or a decode step (decoder "")."""

    config: dict[str, Any]  # as config.json has it
    decoder: Decoder | str
    tokens: int  # of the prompt, or of the context
    chunk: int


def run(job: Job) -> dict[str, float]:
    """Seconds to compile, and for a prompt the bytes of memory around it. Unsupported: a route that is not built."""
    sizes = Sizes((job.tokens,), job.tokens, job.chunk, (), 0, 0, 0, (), 0, 0)
    config = ModelConfig.from_hf(job.config)
    bench = Bench(config, sizes, rounds=1, steps=1, note=lambda _: None)
    jax.block_until_ready(bench.plain.state)
    gc.collect()
    return _decode(bench, job) if not job.decoder else _prefill(bench, job)


def _decode(bench: Bench, job: Job) -> dict[str, float]:
    cache = filled_cache(bench.config, job.tokens, "f32")

    def step() -> None:
        nonlocal cache
        out, cache = forward(bench.plain, bench.tokens(1), at_length(cache, job.tokens - 1), all_logits=False)
        jax.block_until_ready((out, cache))

    return _first_and_second(step)


def _prefill(bench: Bench, job: Job) -> dict[str, float]:
    decoder: Any = job.decoder
    before, _ = resident()
    forget_peak()

    def prompt(tokens: int) -> None:
        cache = init_cache(bench.config, 1, job.tokens, "f32")
        jax.block_until_ready(bench.prefill(decoder, bench.tokens(tokens), cache))

    # Two chunks: as short as a prompt can be that has a first and a last one.
    found = _first_and_second(lambda: prompt(min(job.tokens, 2 * job.chunk)))
    prompt(job.tokens)
    _, most = resident()
    now, _ = resident()
    forget_peak()
    prompt(job.tokens)
    _, again = resident()
    return found | {
        "before_bytes": before,
        "most_bytes": most,
        "after_bytes": now,
        "most_when_compiled_bytes": again,
    }


def _first_and_second(call: Callable[[], None]) -> dict[str, float]:
    """The first call compiles, the second does not: seconds of both, and of the XLA compiler alone."""
    _, before = compiled()
    times = []
    for _ in range(2):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return {
        "first_s": times[0],
        "second_s": times[1],
        "compile_s": times[0] - times[1],
        "xla_s": compiled()[1] - before,
    }


if __name__ == "__main__":
    # A cache of compiled programs would make the first call a second one.
    jax.config.update("jax_enable_compilation_cache", False)
    try:
        print(json.dumps(run(Job(**json.loads(sys.argv[1])))))
    except Unsupported as error:
        print(json.dumps({"unsupported": str(error)}))
