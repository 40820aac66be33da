"""What the host does for a decode step, and how many arrays it hands over.

The host's time is the wall time of `forward` from the call until it returns, with everything a real step does on the host (the
checks, the same arguments flattened, donated and handed over, the cache put together again), around a program that computes
nothing. Beside it the same call around the real program, which returns before the device is done where a backend does not wait.
"""

from __future__ import annotations

import dataclasses
import functools
import statistics
import sys
import time
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from benchmarks.inference_counts import jit_leaves
from benchmarks.inference_models import RELEASED, STORED, Bench, Stored, at_length, filled_cache
from benchmarks.inference_report import Report, Target, number, table
from csa2_jax import Bound, Cache, ForwardOutput, Model, ModelConfig, Numerics, Unsupported, forward, init_cache

STEPS = 200


def measure(bench: Bench) -> Report:
    """Milliseconds of the host per step, and arguments of the jitted step here and of the released model."""
    context, count = bench.sizes.small, 20 if bench.quick else STEPS
    bench.note("compiling a step")
    cache = at_length(filled_cache(bench.config, context, "f32"), context - 1)
    bench.note("steps around the real program")
    real, done = _calls(bench, cache, context, max(10, count // 10))
    bench.note("steps around a program that does nothing")
    cache = filled_cache(bench.config, context, "f32")
    with mock.patch.object(sys.modules[forward.__module__], "_jit_forward", nothing()):
        empty, _ = _calls(bench, cache, context, count)

    ms = {name: 1e3 * statistics.median(found) for name, found in (("empty", empty), ("real", real), ("done", done))}
    leaves = {f"this model, {how}": n for how, n in leaves_by_cache(bench.config, Numerics("float32", True)).items()}
    released = ModelConfig.from_hf(RELEASED)
    bench.note("counting the released model's arguments")
    leaves |= {f"released, {how}": n for how, n in leaves_by_cache(released, Numerics("bfloat16", True)).items()}
    report = Report()
    report.figures = {"host_ms": ms, "jit_leaves": leaves, "samples_s": {"empty": empty, "real": real, "done": done}}
    times = table(
        f"Host time of a decode step, ms: median of {len(empty)} and of {len(real)} calls", "", "median", "least"
    )
    for what, found in (
        ("forward around a program that computes nothing", empty),
        ("forward around the real program, until it returns", real),
        ("the same, until the device is done", done),
    ):
        times.add_row(what, number(1e3 * statistics.median(found), 3), number(1e3 * min(found), 3))
    arguments = table(
        "Arrays among the arguments of the jitted step: weights, cache, tokens, lengths", "model, cache", "arrays"
    )
    for name, found in leaves.items():
        arguments.add_row(name, str(found))
    report.tables = [times, arguments]
    report.targets = [Target("host time of a decode step", "<", 0.8, ms["empty"], " ms")]
    for who in ("this model", "released"):
        most = max(n for name, n in leaves.items() if name.startswith(who))
        report.targets.append(Target(f"arguments of the jitted step, {who}, most of any cache", "<", 80, float(most)))
    return report


def _calls(bench: Bench, cache: Cache, context: int, count: int) -> tuple[list[float], list[float]]:
    """(seconds until `forward` returned, until its results were there) of `count` calls at one place, two before uncounted."""
    token, returned, done = bench.tokens(1), [], []
    for _ in range(count + 2):
        cache = jax.block_until_ready(at_length(cache, context - 1))
        start = time.perf_counter()
        out, cache = forward(bench.plain, token, cache, all_logits=False)
        returned.append(time.perf_counter() - start)
        jax.block_until_ready((out, cache))
        done.append(time.perf_counter() - start)
    return returned[2:], done[2:]


def nothing() -> Any:
    """The jitted step's signature, donations and results, and no work: the cache is handed back one token longer."""

    @functools.partial(
        jax.jit,
        static_argnames=("structure", "feed_structure", "all_logits", "capture"),
        donate_argnames=("cache",),
        keep_unused=True,  # a program drops arguments it does not read, and they are what costs
    )
    def step(
        structure: Any,
        feed_structure: Any,
        state: Any,
        feed_state: Any,
        tokens: jax.Array,
        cache: Cache,
        lengths: jax.Array,
        origins: jax.Array | None = None,
        *,
        all_logits: bool,
        capture: frozenset[str],
    ) -> tuple[ForwardOutput, Cache]:
        del structure, feed_structure, state, feed_state, origins, all_logits, capture
        logits = jnp.zeros((tokens.shape[0], 1), jnp.float32)
        return ForwardOutput(logits, {}), dataclasses.replace(cache, length_B=cache.length_B + lengths)

    return step


def leaves_by_cache(config: ModelConfig, numerics: Numerics) -> dict[str, int]:
    """Arrays of a decode step's arguments for every storage, with and without draft windows; nothing is allocated."""
    bound = Bound.of(nnx.eval_shape(lambda: Model(config, numerics=numerics)))
    found: dict[str, int] = {}
    for stored in STORED:
        for draft in (False, True) if config.num_nextn_predict_layers else (False,):
            try:
                cache = jax.eval_shape(lambda stored=stored, draft=draft: _cache(config, stored, draft))
            except Unsupported:
                continue
            feed_state = bound.feed[1] if draft and bound.feed is not None else None
            ids = (jax.ShapeDtypeStruct((1, 1), np.int32), jax.ShapeDtypeStruct((1,), np.int32))
            found[f"{stored}{' with draft windows' if draft else ''}"] = jit_leaves(
                bound.state, feed_state, cache, *ids
            )
    return found


def _cache(config: ModelConfig, stored: Stored, draft: bool) -> Cache:
    options: dict[str, Any] = {"storage": stored, "draft": draft}
    return init_cache(config, 1, config.max_position_embeddings, **options)
