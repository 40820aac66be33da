"""Inference on the recorded checkpoints: packed caches, prefill routes, drafts and the engine against plain decoding.

What `test_packed_cache`, `test_prefilling`, `test_speculative` and `test_engine` show on small random models, here on eight
layers of all modes, with n-gram memory in front of the decoder's pool, and on the whole layout of forty, in float32 without
roundings and with what packed caches keep.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from csa2_jax import Bound, Engine, draft, forward, generate, load_checkpoint, prefill
from tests.golden_sets import materialise
from tests.small_models import Small, meaningful, quick_compilation, relative_error
from tests.test_packed_cache import assert_equal, run

BATCH, CHUNK = 3, 32
SETS = {  # by name: cache, widths of calls (the last is the longest sequence)
    "tiny8_f32_noqat": ("f32", (1, CHUNK, 96)),
    "tiny8_f32": ("packed", (1, CHUNK, 96)),
    "twin40_f32_noqat": ("f32", (1, CHUNK, 384)),
    "twin40_fp8": ("packed", (1, CHUNK, 384)),
}
# Each set wants programs of its own in many shapes, and forty layers are slow to compile: `make test` is content with what is
# served, eight layers of all modes with their roundings and a packed cache.
SERVED = "tiny8_f32"


def of(names: Iterable[str]) -> Any:
    return pytest.mark.parametrize(
        "name", [pytest.param(name, marks=() if name == SERVED else pytest.mark.exhaustive) for name in names]
    )


every_set = of(SETS)
small_sets = of(name for name in SETS if name.startswith("tiny8"))
rounded_sets = of(name for name, (storage, _) in SETS.items() if storage == "packed")


def few(examples: int) -> Any:
    return settings(
        max_examples=examples, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
    )


@functools.cache
def recorded(name: str) -> Small:
    storage, widths = SETS[name]
    model = load_checkpoint(materialise(name), compute_dtype="float32", fake_quant=storage == "packed")
    return Small(name, model, Bound.of(model), widths)


def tail(small: Small) -> int:
    """Tokens at the end of a prompt that an exact prefill sends through the decoder: D W, in whole chunks."""
    layers = small.config.num_hidden_layers - small.config.plan.decoder_start
    return -(-layers * small.config.sliding_window // CHUNK) * CHUNK


@every_set
@few(2)
@given(data=st.data())
def test_exact_prefill_equals_full_with_all_that_follows(name: str, data: st.DataObject) -> None:
    small = recorded(name)
    total = small.total - CHUNK
    lengths = data.draw(st.lists(st.integers(1, total), min_size=BATCH, max_size=BATCH))
    lengths[0] = data.draw(
        st.integers(min(tail(small) + 1, total), total)
    )  # one at least is long enough to skip something
    after = data.draw(st.lists(st.integers(1, CHUNK), min_size=BATCH, max_size=BATCH))
    found = {}
    for route in ("full", "exact"):
        with quick_compilation():
            cache = small.cache(BATCH, SETS[name][0])
            out, cache = prefill(small.bound, small.tokens(batch=BATCH), cache, lengths, decoder=route, chunk=CHUNK)
            drafted = draft(small.bound, [1, 2, 3], cache)
            following, cache = forward(small.bound, small.tokens(1, BATCH)[:, :CHUNK], cache, after)
        rows = [np.asarray(following.logits)[b, :n] for b, n in enumerate(after)]
        found[route] = [np.asarray(out.logits), np.asarray(drafted.logits), np.concatenate(rows)], cache
    assert np.asarray(found["exact"][1].decoder_from_B).max() > 0
    for exact, full in zip(found["exact"][0], found["full"][0], strict=True):
        assert relative_error(exact, full) < 1e-4
    kept = meaningful(small.config, found["exact"][1])
    for what, rows in meaningful(small.config, found["full"][1]).items():
        for exact, full in zip(kept[what], rows, strict=True):
            np.testing.assert_allclose(exact, full, rtol=1e-4, atol=1e-4, err_msg=what)


@rounded_sets
@few(2)
@given(counts=st.lists(st.lists(st.integers(0, CHUNK), min_size=BATCH, max_size=BATCH), min_size=1, max_size=5))
def test_packed_cache_equals_bf16_in_any_chunking(name: str, counts: list[list[int]]) -> None:
    small = recorded(name)
    assert_equal(run(small, "packed", counts), run(small, "bf16", counts))


@every_set
@few(1)
@given(lengths=st.lists(st.integers(1, CHUNK), min_size=BATCH, max_size=BATCH), threshold=st.sampled_from([0.0, 0.3]))
def test_greedy_generation_with_drafts_equals_generation_without(
    name: str, lengths: list[int], threshold: float
) -> None:
    """All tokens; with the roundings of forty layers, every token of a row up to the first rounding that fell the other way.

    Calls of other widths sum in another order, with drafts or without: the same tokens in calls of 1 and of 6 give twin40_fp8
    logits that agree to 1e-6 until one of them jumps by 1e-2 or more at once, and it stays in the cache.
    """
    small, storage = recorded(name), SETS[name][0]
    prompts = [small.tokens(batch=BATCH)[b, :n].tolist() for b, n in enumerate(lengths)]
    found = []
    for speculative in (False, threshold):
        with quick_compilation():
            events = generate(
                small.bound, prompts, max_new_tokens=16, stop_at_eos=False, speculative=speculative, storage=storage
            )
            found.append({(e.row, e.index): (e.token, e.logprob) for e in events})
    plain, drafted = found
    assert plain.keys() == drafted.keys()
    assert len(plain) == BATCH * 16
    compared = 0
    for row in range(BATCH):
        for index in range(16):
            (token, logprob), (other, its) = plain[row, index], drafted[row, index]
            assert logprob is not None
            assert its is not None
            if name == "twin40_fp8" and abs(logprob - its) > 1e-4:
                break
            assert other == token
            compared += 1
    assert compared == BATCH * 16 if name != "twin40_fp8" else compared > BATCH * 16 // 2


def served(name: str, prefix_bytes: int, requests: list[tuple[tuple[int, ...], int, int]]) -> list[list[int]]:
    """Tokens of every request of (prompt, tokens, steps before the next one) in an engine that skips what it can."""
    storage, _ = SETS[name]
    options: dict[str, Any] = {"slots": 2, "max_length": 96, "chunk": CHUNK, "storage": storage}
    with quick_compilation():
        engine = Engine(recorded(name).bound, prefix_bytes=prefix_bytes, **options)
        tickets, events = [], []
        for prompt, count, wait in requests:
            tickets.append(engine.submit(prompt, max_new_tokens=count, stop_at_eos=False))
            for _ in range(wait):
                events += engine.step()
        events += list(engine.run())
    return [[e.token for e in events if e.ticket == ticket and e.token is not None] for ticket in tickets]


@functools.cache
def alone(name: str, prompt: tuple[int, ...], count: int) -> list[int]:
    """Tokens of a request in an engine of its own, which keeps nothing."""
    return served(name, 0, [(prompt, count, 0)])[0]


@small_sets
@few(2)
@given(
    requests=st.lists(
        st.tuples(st.integers(0, 1), st.integers(1, 70), st.integers(1, 8), st.integers(0, 3)), min_size=3, max_size=5
    )
)
def test_engine_gives_every_request_the_tokens_it_gets_alone(
    name: str, requests: list[tuple[int, int, int, int]]
) -> None:
    """Prompts that begin alike, cut anywhere, arriving over time, reusing one another."""
    small = recorded(name)
    asked = [(tuple(small.tokens(seed, 1)[0, :length].tolist()), count, wait) for seed, length, count, wait in requests]
    for (prompt, count, _), found in zip(asked, served(name, 1 << 24, asked), strict=True):
        assert found == alone(name, prompt, 8)[:count]
