"""DeepSeek-V4 served: requests in company, slots used again, beginnings reused, packed caches; and what it cannot do, said."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from csa2_jax import Bound, Engine, Unsupported, forward, init_cache
from tests import small_models
from tests.small_models import load_v4, quick_compilation
from tests.test_packed_cache import BATCH, assert_equal, run

FEW = settings(max_examples=4, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))


@functools.cache
def bound(fake_quant: bool = False) -> Bound:
    return Bound.of(load_v4(fake_quant=fake_quant))


def tokens(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(3, 64, length).tolist()


def engine(storage: str = "f32", **options: Any) -> Engine:
    return Engine(
        bound(storage == "packed"), **({"slots": 2, "max_length": 96, "chunk": 16, "storage": storage} | options)
    )


@functools.cache
def alone(prompt: tuple[int, ...], count: int, storage: str) -> tuple[int, ...]:
    """Greedy tokens of forwards over the growing text, in the engine's own storage."""
    with quick_compilation():
        cache = init_cache(bound().config, 1, 96, storage)  # type: ignore[arg-type]
        width = 64
        padded = np.zeros((1, width), int)
        padded[0, : len(prompt)] = prompt
        out, cache = forward(bound(storage == "packed"), padded, cache, [len(prompt)])
        found = [int(np.asarray(out.logits)[0, len(prompt) - 1].argmax())]
        while len(found) < count:
            out, cache = forward(bound(storage == "packed"), [[found[-1]]], cache)
            found.append(int(np.asarray(out.logits)[0, 0].argmax()))
    return tuple(found)


@pytest.mark.parametrize("storage", ["f32", "packed"])
@FEW
@given(
    requests=st.lists(
        st.tuples(st.integers(0, 1), st.integers(1, 60), st.integers(1, 8), st.integers(0, 3)), min_size=2, max_size=6
    )
)
def test_a_request_does_not_depend_on_its_company(storage: str, requests: list[tuple[int, int, int, int]]) -> None:
    """Prompts that begin alike, more of them than slots: every slot is emptied and used again, and begins anew.

    What waits of the group before the first is part of a row's state, so that a slot that was not emptied would tell.
    """
    with quick_compilation():
        served, asked, events = engine(storage), {}, []
        for seed, length, count, wait in requests:
            prompt = tuple(tokens(seed, 60)[:length])
            asked[served.submit(prompt, max_new_tokens=count, stop_at_eos=False)] = (prompt, count)
            for _ in range(wait):
                events += served.step()
        events += list(served.run())
    for ticket, (prompt, count) in asked.items():
        found = tuple(e.token for e in events if e.ticket == ticket and e.token is not None)
        assert found == alone(prompt, 8, storage)[:count]


def test_beginnings_are_reused_and_change_nothing() -> None:
    with quick_compilation():
        served = engine()
        first = served.submit(tokens(5, 60), max_new_tokens=4, stop_at_eos=False)
        list(served.run())
        assert served.prefixes.reused_tokens == 0
        for cut in (60, 45, 33, 17):
            prompt = tuple(tokens(5, 60)[:cut])
            ticket = served.submit(prompt, max_new_tokens=6, stop_at_eos=False)
            found = tuple(e.token for e in served.run() if e.ticket == ticket and e.token is not None)
            assert found == alone(prompt, 8, "f32")[:6]
        assert served.prefixes.reused_tokens > 0
        assert first == 0


@pytest.mark.parametrize("compute_dtype", ["float32", "bfloat16"])
@FEW
@given(counts=st.lists(st.lists(st.integers(0, 9), min_size=BATCH, max_size=BATCH), min_size=1, max_size=5))
def test_packed_cache_equals_the_plain_ones_in_any_chunking(compute_dtype: str, counts: list[list[int]]) -> None:
    """Logits, windows, pools, index keys: every bit; weights are fp8 and fp4, entries fp8 with bf16 channels."""
    small = small_models.rounded_v4(compute_dtype)
    plain = run(small, "bf16", counts)
    assert_equal(run(small, "packed", counts), plain)


def test_unused_bytes_of_a_packed_cache_change_nothing() -> None:
    small, counts = small_models.rounded_v4(), [[9, 4, 1], [1, 0, 1], [3, 9, 8], [1, 1, 1]]
    assert_equal(run(small, "packed", counts, poison=True), run(small, "packed", counts))


def test_drafts_are_refused_with_a_reason() -> None:
    with pytest.raises((Unsupported, ValueError), match="draft"):
        engine(speculative=True)
