"""Sampling rules and the accept rule of speculative decoding: what comes out has the distribution it should have."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from csa2_jax import Sampling
from csa2_jax.sampling import Rules, accept_drafts, draw, log_distribution

VOCABULARY = 7


def probabilities(logits: Any, *samplings: Sampling) -> np.ndarray:
    return np.exp(np.asarray(log_distribution(jnp.asarray(logits, jnp.float32)[:, None], Rules.of(samplings))))[:, 0]


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max())
    return e / e.sum()


def test_distribution_of_each_rule_equals_its_definition() -> None:
    """Temperature, top-k, top-p (the smallest set that holds the mass), both, greedy: rows of one batch, each its own."""
    logits = np.array([0.1, 2.0, -1.0, 1.5, 0.0, 1.4, -3.0])
    rules = [
        Sampling(1.0),
        Sampling(0.5),
        Sampling(1.0, top_k=3),
        Sampling(1.0, top_p=0.7),
        Sampling(2.0, top_k=4, top_p=0.5),
        Sampling(0.0, top_k=2),
        Sampling(1.0, top_k=100, top_p=1.0),
    ]
    found = probabilities(np.tile(logits, (len(rules), 1)), *rules)
    for p, rule in zip(found, rules, strict=True):
        if rule.temperature == 0:
            expected = np.eye(VOCABULARY)[logits.argmax()]
        else:
            order = np.argsort(-logits, kind="stable")
            kept = order[: rule.top_k or VOCABULARY]
            mass = np.cumsum(softmax(logits[kept] / rule.temperature))
            kept = kept[: int(np.searchsorted(mass, rule.top_p - 1e-9)) + 1] if rule.top_p < 1 else kept
            expected = np.zeros(VOCABULARY)
            expected[kept] = softmax(logits[kept] / rule.temperature)
        np.testing.assert_allclose(p, expected, atol=1e-6, err_msg=str(rule))


def test_draws_have_the_distribution_and_depend_on_seed_and_index_alone() -> None:
    logits, rows = jnp.array([0.1, 2.0, -1.0, 1.5, 0.0, 1.4, -3.0]), 20_000
    rules = Rules.of([Sampling(0.8, seed=s) for s in range(rows)])
    log_p = log_distribution(jnp.broadcast_to(logits, (rows, 1, VOCABULARY)), rules)
    ids = np.asarray(jax.jit(draw)(log_p, rules, jnp.zeros((rows, 1), jnp.int32)))[:, 0]
    share = np.bincount(ids, minlength=VOCABULARY) / rows
    np.testing.assert_allclose(share, np.exp(np.asarray(log_p[0, 0])), atol=4 * 0.5 / np.sqrt(rows))
    some = [5, 17, 400]
    alone = draw(log_p[jnp.array(some)], Rules.of([Sampling(0.8, seed=s) for s in some]), jnp.zeros((3, 1), jnp.int32))
    np.testing.assert_array_equal(np.asarray(alone)[:, 0], ids[some])
    other = draw(log_p[:200], Rules.of([Sampling(0.8, seed=s) for s in range(200)]), jnp.ones((200, 1), jnp.int32))
    assert (np.asarray(other)[:, 0] != ids[:200]).mean() > 0.3


@pytest.mark.parametrize("temperature", [0.7, 1.5])
def test_speculative_tokens_have_the_models_distribution_whatever_the_drafts(temperature: float) -> None:
    """First two tokens of 20,000 rounds against the product of the model's own conditionals; drafts from other logits.

    The second place's logits depend on the first token, as a model's do: only rows that kept draft 1 look at it.
    """
    rows, rng = 20_000, np.random.default_rng(0)
    p_logits, q_logits = rng.standard_normal((2, VOCABULARY)) * 1.5
    p_next, q_next = rng.standard_normal((2, VOCABULARY, VOCABULARY)) * 1.5
    rules = Rules.of([Sampling(temperature, seed=s) for s in range(rows)])
    zero = jnp.zeros((rows, 1), jnp.int32)

    def log_p(logits: Any) -> jax.Array:
        return log_distribution(jnp.asarray(logits, jnp.float32), rules)

    q1 = log_p(np.tile(q_logits, (rows, 1, 1)))
    d1 = np.asarray(draw(q1, rules, zero, drafting=True))[:, 0]
    q2 = log_p(q_next[d1][:, None])
    d2 = np.asarray(draw(q2, rules, zero + 1, drafting=True))[:, 0]
    p = log_p(np.stack([np.tile(p_logits, (rows, 1)), p_next[d1], np.zeros((rows, VOCABULARY))], axis=1))
    drafts = jnp.stack([jnp.asarray(d1), jnp.asarray(d2)], axis=1)
    kept, following = (
        np.asarray(a)
        for a in jax.jit(accept_drafts)(
            p, drafts, jnp.concatenate([q1, q2], axis=1), jnp.full(rows, 2), rules, jnp.zeros(rows, jnp.int32)
        )
    )
    first = np.where(kept > 0, d1, following)
    expected = softmax(p_logits / temperature)
    np.testing.assert_allclose(np.bincount(first, minlength=VOCABULARY) / rows, expected, atol=4 * 0.5 / np.sqrt(rows))
    for token in range(VOCABULARY):
        seen = (kept > 0) & (d1 == token)
        second = np.where(kept > 1, d2, following)[seen]
        share = np.bincount(second, minlength=VOCABULARY) / max(seen.sum(), 1)
        bound = 4 * 0.5 / np.sqrt(max(seen.sum(), 1))
        np.testing.assert_allclose(share, softmax(p_next[token] / temperature), atol=bound)
    assert 0.02 < (kept == 2).mean() < 0.9
    # Keeping every draft would be wrong, so the comparison above can tell.
    assert np.abs(np.bincount(d1, minlength=VOCABULARY) / rows - expected).max() > 0.05


def test_greedy_rows_keep_drafts_up_to_the_first_that_is_not_the_argmax() -> None:
    logits = np.zeros((3, 3, VOCABULARY), np.float32)
    logits[:, [0, 1, 2], [4, 2, 6]] = 1
    drafts = jnp.array([[4, 2], [4, 3], [1, 2]])
    rules = Rules.of([Sampling()] * 3)
    one_hot = log_distribution(jax.nn.one_hot(drafts, VOCABULARY), rules)
    args = (log_distribution(jnp.asarray(logits), rules), drafts, one_hot)
    kept, following = accept_drafts(*args, jnp.array([2, 2, 2]), rules, jnp.zeros(3, jnp.int32))
    np.testing.assert_array_equal(kept, [2, 1, 0])
    np.testing.assert_array_equal(following, [6, 2, 4])
    kept, following = accept_drafts(*args, jnp.array([1, 0, 2]), rules, jnp.zeros(3, jnp.int32))
    np.testing.assert_array_equal(kept, [1, 0, 0])
    np.testing.assert_array_equal(following, [2, 4, 4])


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"temperature": -1.0}, "temperature=-1.0"),
        ({"temperature": 1e-6}, "at least 0.0001"),
        ({"temperature": float("nan")}, "temperature=nan"),
        ({"temperature": "hot"}, "temperature='hot'"),
        ({"top_k": -1}, "top_k=-1"),
        ({"top_k": 1.5}, "top_k=1.5"),
        ({"top_p": 0.0}, "top_p=0.0"),
        ({"top_p": 1.1}, "top_p=1.1"),
        ({"seed": 0.5}, "seed=0.5"),
        ({"seed": 2**63}, "64 bits"),
    ],
)
def test_rules_that_mean_nothing_are_refused_by_value(wrong: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Sampling(**wrong)
