"""Speculative decoding: the same greedy tokens, a cache as if refused drafts had never been, and honest counts."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from csa2_jax import Bound, Unsupported, forward, generate, init_cache, prefill
from csa2_jax.decoding import Decoder
from csa2_jax.sampling import Sampling
from csa2_jax.speculative import Acceptance, advance, begin, widths
from tests import small_models
from tests.small_models import MINI_KNOBS, Small, load_random, meaningful, poisoned, quick_compilation

BATCH, LONG = 3, 48
FEW = settings(max_examples=8, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))


@functools.cache
def model(fake_quant: bool = False) -> Small:
    loaded = load_random(MINI_KNOBS | {"draft_stages": 1, "encoder_ratios": (3,)}, fake_quant=fake_quant)
    return Small("mini", loaded, Bound.of(loaded), (1, 8, LONG))


def prefilled(small: Small, lengths: Any, stored: str = "f32") -> tuple[Any, Any]:
    out, cache = prefill(small.bound, small.tokens(batch=BATCH), small.cache(BATCH, stored), lengths, chunk=8)
    return out.logits, cache


@pytest.mark.parametrize("stored", ["f32", "packed"])
@FEW
@given(
    lengths=st.lists(st.integers(1, 20), min_size=BATCH, max_size=BATCH),
    rounds=st.lists(st.lists(st.integers(0, 6), min_size=BATCH, max_size=BATCH), min_size=1, max_size=4),
    wrong=st.lists(st.integers(0, 5), min_size=BATCH, max_size=BATCH),
)
def test_any_pattern_of_acceptance_leaves_the_cache_of_plain_decoding(
    stored: str, lengths: list[int], rounds: list[list[int]], wrong: list[int]
) -> None:
    """Drafts that are right up to a place drawn at random; rows that rest; every residue of an open group.

    The oracle decodes token by token without drafts; tokens and everything a later call may read must agree.
    """
    small = model(stored == "packed")
    block = small.config.dspark_block_size
    with quick_compilation():
        logits, cache = prefilled(small, lengths, stored)
        _, plain = prefilled(small, lengths, stored)
        token = np.asarray(jnp.argmax(logits, axis=-1))
        rules = Decoder(small.bound, cache, speculative=True)._rules
        pending = begin(small.bound, cache, token.astype(np.int32), np.ones(BATCH, np.int32), rules, None, 0.0)
        for limit in rounds:
            limit = np.array(limit, np.int32)
            # What plain decoding makes of the next block + 1 tokens, on a copy of the cache.
            truth, told, ahead = [], token, copy(plain)
            for _ in range(block + 1):
                out, ahead = forward(small.bound, told[:, None], ahead, all_logits=False)
                told = np.asarray(jnp.argmax(out.logits, axis=-1))
                truth.append(told)
            truth_BT = np.stack(truth, axis=1)
            drafts = truth_BT[:, :block].copy()
            for row, place in enumerate(wrong):
                if place < block:
                    drafts[row, place] = (drafts[row, place] + 1) % small.config.vocab_size
            one_hot = jnp.asarray(np.eye(small.config.vocab_size, dtype=np.float32)[drafts])
            pending = dataclasses.replace(
                pending,
                draft_BT=jnp.asarray(drafts, jnp.int32),
                logits_BTV=one_hot,
                hopeful_B=jnp.full(BATCH, block, jnp.int32),
            )
            cache, pending, made = advance(
                small.bound, cache, pending, rules, limit, width=block + 1, banned=None, threshold=0.0
            )
            kept = np.asarray(made.kept_B)
            expected = np.where(limit > 0, np.minimum(np.minimum(wrong, block), limit - 1), kept)
            np.testing.assert_array_equal(kept[limit > 0], expected[limit > 0])
            for row in np.flatnonzero(limit):
                n = kept[row] + 1
                np.testing.assert_array_equal(np.asarray(made.token_BT)[row, :n], truth_BT[row, :n])
            # Plain decoding of the tokens that were consumed, one by one.
            fed = np.concatenate([token[:, None], truth_BT], axis=1)
            for step in range(block + 1):
                counts = ((limit > 0) & (step <= kept)).astype(np.int32)
                _, plain = forward(small.bound, fed[:, step : step + 1], plain, counts, all_logits=False)
            token = np.where(limit > 0, truth_BT[np.arange(BATCH), kept], token)
            found, whole = meaningful(small.config, cache), meaningful(small.config, plain)
            for name, rows in whole.items():
                for a, b in zip(found[name], rows, strict=True):
                    np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4, err_msg=name)
            np.testing.assert_array_equal(np.asarray(pending.token_B), token)


def copy(cache: Any) -> Any:
    return jax.tree.map(jnp.copy, cache).with_mirror(cache.lengths())


@pytest.mark.parametrize("threshold", [0.0, 0.3, 1.0])
def test_greedy_generation_with_drafts_equals_generation_without(threshold: float) -> None:
    """All tokens of a ragged batch; thresholds from whole blocks to no drafts at all."""
    small = model()
    prompts = [small.tokens()[b, :n].tolist() for b, n in enumerate((5, 1, 11))]
    with quick_compilation():
        plain = list(generate(small.bound, prompts, max_new_tokens=24, stop_at_eos=False))
        drafted = list(generate(small.bound, prompts, max_new_tokens=24, stop_at_eos=False, speculative=threshold))
    for row in range(3):
        a, b = ([e for e in events if e.row == row] for events in (plain, drafted))
        assert [e.token for e in a] == [e.token for e in b]
        assert [(e.index, e.finished) for e in a] == [(e.index, e.finished) for e in b]
        np.testing.assert_allclose([e.logprob for e in a], [e.logprob for e in b], atol=1e-3)


def test_sampled_generation_with_drafts_repeats_itself_and_ends_at_the_limit() -> None:
    small = model()
    prompts = [small.tokens()[b, :4].tolist() for b in range(3)]
    options: dict[str, Any] = {"max_new_tokens": 9, "temperature": 1.0, "seed": 5, "speculative": 0.0}
    with quick_compilation():
        runs = [[(e.row, e.index, e.token) for e in generate(small.bound, prompts, **options)] for _ in range(2)]
    assert sorted(runs[0]) == sorted(runs[1])
    for row in range(3):
        assert [i for r, i, _ in runs[0] if r == row] == list(range(len([1 for r, *_ in runs[0] if r == row])))


def test_poisoned_slots_change_nothing_in_a_round() -> None:
    """NaN in everything that nobody may read, before each of several rounds."""
    small, results = model(), []
    with quick_compilation():
        for poison in (False, True):
            logits, cache = prefilled(small, [5, 9, 2])
            steps = Decoder(small.bound, cache, speculative=True, threshold=0.0)
            steps.start(range(BATCH), [Sampling()] * BATCH, logits)
            tokens = []
            for _ in range(5):
                if poison:
                    steps.cache = poisoned(small.config, steps.cache).with_mirror(steps.cache.lengths())
                made = steps.step(np.full(BATCH, 6))
                tokens.append([made.tokens[b, :n].tolist() for b, n in enumerate(made.counts)])
            results.append(tokens)
    assert results[0] == results[1]


def test_acceptance_counts_judged_places_only() -> None:
    counts = Acceptance(4)
    counts.add(tried=4, kept=2)  # the third was refused, the fourth not judged
    counts.add(tried=2, kept=2)
    counts.add(tried=0, kept=0)
    np.testing.assert_array_equal(counts.tried, [2, 2, 1, 0])
    np.testing.assert_array_equal(counts.kept, [2, 2, 0, 0])
    np.testing.assert_array_equal(counts.by_place[:3], [1, 1, 0])
    assert np.isnan(counts.by_place[3])
    assert counts.tokens_per_round == pytest.approx(7 / 3)


def test_widths_are_few_and_reach_the_whole_block() -> None:
    found = widths(model().config)
    assert found[0] == 1
    assert found[-1] == model().config.dspark_block_size + 1
    assert len(found) <= 3


def test_speculation_without_a_draft_head_is_refused() -> None:
    small = small_models.mini()
    with pytest.raises(Unsupported, match="num_nextn_predict_layers=0"):
        next(iter(generate(small, [[1]], max_new_tokens=1, speculative=True)))
    with pytest.raises(ValueError, match="0 to 1"):
        generate(model().bound, [[1]], max_new_tokens=1, speculative=1.5)
    with pytest.raises(Unsupported, match="draft windows"):
        Decoder(model().bound, init_cache(model().config, 1, 16, "f32"), speculative=True)


def test_greedy_tokens_are_equal_over_two_hundred_and_fifty_steps() -> None:
    small = model()
    prompts = [small.tokens()[b, :1].tolist() for b in range(2)]
    with quick_compilation():
        plain, drafted = (
            [
                (e.row, e.index, e.token)
                for e in generate(small.bound, prompts, max_new_tokens=250, stop_at_eos=False, **how)
            ]
            for how in ({}, {"speculative": 0.0})
        )
    assert sorted(plain) == sorted(drafted)
    assert len(plain) == 500


def test_greedy_tokens_in_bf16_differ_only_where_two_logits_are_nearly_equal(record_property: Any) -> None:
    """A forward over six tokens rounds otherwise than six forwards over one. Where the answers part, the two tokens' logits are
    within 2 % of the logits' spread; the rate of parting is recorded."""
    loaded = load_random(
        MINI_KNOBS | {"draft_stages": 1, "encoder_ratios": (3,)}, fake_quant=True, compute_dtype="bfloat16"
    )
    bound, parted = Bound.of(loaded), 0
    prompts = [model().tokens(seed=s)[0, :5].tolist() for s in range(4)]
    with quick_compilation():
        plain, drafted = (
            list(generate(bound, prompts, max_new_tokens=40, stop_at_eos=False, storage="packed", **how))
            for how in ({}, {"speculative": 0.0})
        )
        for row, prompt in enumerate(prompts):
            a, b = ([e.token for e in events if e.row == row] for events in (plain, drafted))
            at = next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), None)
            if at is None:
                continue
            parted += 1
            before = np.array([prompt + a[:at] + [0] * (45 - len(prompt) - at)])
            logits = np.asarray(forward(bound, before, lengths_B=[len(prompt) + at], all_logits=False).logits)[0]
            assert abs(logits[a[at]] - logits[b[at]]) < 0.02 * (logits.max() - logits.min())
    record_property("answers that part", f"{parted} of {len(prompts)} in 40 tokens")
