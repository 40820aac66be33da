"""One forward for every call shape: however a sequence is cut into calls, padded and batched, the result is the same.

Everything is f32 without roundings, so that only the order of sums may differ. Two models: the recorded one (ratio 2 and
1) and a random one (ratios 3, 4 and 1); `small_models` says which shapes they are called in.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from csa2_jax import Cache, forward, init_cache
from csa2_jax import bound as door
from csa2_jax.state import pool_name
from tests import random_checkpoint as rc
from tests.oracle import OracleModel
from tests.small_models import (
    BATCH,
    EVERY,
    MINI_KNOBS,
    SMALL,
    Small,
    load_random,
    meaningful,
    mini,
    oracle_of,
    poisoned,
    quick_compilation,
    relative_error,
)

TOLERANCE = 1e-4
FEW = settings(
    max_examples=8,
    deadline=None,
    derandomize=True,
    database=None,
    phases=(Phase.explicit, Phase.generate),
    suppress_health_check=list(HealthCheck),
)
both = pytest.mark.parametrize("name", EVERY)


@functools.cache
def whole(name: str) -> np.ndarray:
    """Logits [B, total, V] of the forward without a cache: what every other way must give."""
    small = EVERY[name]()
    return np.asarray(small.whole(small.tokens()).logits)


@functools.cache
def one_shot(name: str) -> dict[str, list[np.ndarray]]:
    """What one call over the whole sequence leaves in the cache."""
    small = EVERY[name]()
    logits, cache = small.append(small.cache(), small.tokens())
    assert relative_error(logits, whole(name)) < TOLERANCE
    return meaningful(small.config, cache)


def assert_same(found: dict[str, list[np.ndarray]], expected: dict[str, list[np.ndarray]], tolerance: float) -> None:
    assert found.keys() == expected.keys()
    for key, rows in expected.items():
        for b, row in enumerate(rows):
            np.testing.assert_allclose(found[key][b], row, rtol=tolerance, atol=tolerance, err_msg=f"{key} of row {b}")


@dataclasses.dataclass
class Feed:
    """A cache being filled with the standard tokens, each row at its own place; checks every logit on the way."""

    small: Small
    cache: Cache
    done: np.ndarray
    rows: np.ndarray

    @classmethod
    def of(cls, small: Small, rows: Any = None) -> Feed:
        rows = np.arange(BATCH) if rows is None else np.asarray(rows)
        return cls(small, small.cache(len(rows)), np.zeros(len(rows), int), rows)

    def call(self, counts: Any, width: int | None = None) -> np.ndarray:
        """Append `counts[b]` further tokens of every row in one call; the logits as they come."""
        counts = np.minimum(counts, self.small.total - self.done)
        tokens, expected = self.small.tokens()[self.rows], whole(self.small.name)[self.rows]
        chunk = np.zeros((len(self.rows), max(int(counts.max()), width or 1)), int)
        for b, n in enumerate(counts):
            chunk[b, :n] = tokens[b, self.done[b] : self.done[b] + n]
        logits, self.cache = self.small.append(self.cache, chunk, counts)
        for b, n in enumerate(counts):
            real = logits[b, :n] if logits.ndim == 3 else logits[b : b + 1][:n]
            assert relative_error(real, expected[b, self.done[b] : self.done[b] + n]) < TOLERANCE
        self.done = self.done + counts
        return logits

    def check_cache(self) -> None:
        """The sequence is complete: the cache is that of one call."""
        assert (self.done == self.small.total).all()
        expected = {key: [rows[b] for b in self.rows] for key, rows in one_shot(self.small.name).items()}
        assert_same(meaningful(self.small.config, self.cache), expected, TOLERANCE)


# --- prompts around the borders of groups ---------------------------------------------------------------------------


def border_lengths(small: Small) -> list[int]:
    ratios = small.config.plan.ratios
    return sorted({n for m in ratios for n in (1, m - 1, m, m + 1, 2 * m - 1, 2 * m, 2 * m + 1)} - {0})


@both
def test_prompts_around_group_borders_equal_the_full_forward(name: str) -> None:
    """And a pool holds floor(p / m) entries: none while p < m, none before their group is complete."""
    small = EVERY[name]()
    lengths = border_lengths(small)
    for start in range(0, len(lengths), BATCH):
        counts = np.array((lengths[start : start + BATCH] + [0] * BATCH)[:BATCH])
        feed = Feed.of(small)
        feed.call(counts, width=2)
        for m in small.config.plan.ratios:
            pool = feed.cache.pools[pool_name(m)]
            for array in filter(lambda a: a is not None, (pool.kv_GBPH, pool.key_GBPJ)):
                written = np.abs(np.asarray(array)).max(axis=-1) > 0  # [G, B, P]
                expected = np.arange(written.shape[2]) < (counts // m)[:, None]
                np.testing.assert_array_equal(written, np.broadcast_to(expected, written.shape))


@both
def test_first_token_runs_the_program_of_all_later_steps(name: str) -> None:
    """An empty pool is nothing special: finite, the same structure, shapes and compiled program."""
    small = EVERY[name]()
    feed = Feed.of(small)
    start = jax.tree.map(lambda a: (a.shape, a.dtype, a.weak_type), feed.cache)
    assert np.isfinite(feed.call(np.ones(BATCH, int))).all()
    programs = door._jit_forward._cache_size()
    for _ in range(6):
        assert np.isfinite(feed.call(np.ones(BATCH, int))).all()
        assert jax.tree.map(lambda a: (a.shape, a.dtype, a.weak_type), feed.cache) == start
    assert door._jit_forward._cache_size() == programs


@both
def test_greedy_with_cache_equals_recomputing_everything(name: str) -> None:
    """3 W tokens from prompts of every length modulo 8, 4, 3 and 2."""
    small = EVERY[name]()
    lengths, tokens = np.arange(1, BATCH + 1), small.tokens(seed=1)
    logits, cache = small.append(small.cache(), tokens[:, :BATCH], lengths)
    logits = logits[np.arange(BATCH), lengths - 1]
    for _ in range(3 * small.window):
        tokens[np.arange(BATCH), lengths] = logits.argmax(axis=-1)
        lengths = lengths + 1
        logits, cache = small.append(cache, tokens[np.arange(BATCH), lengths - 1][:, None])
        again = np.asarray(small.whole(tokens, lengths).logits)[np.arange(BATCH), lengths - 1]
        assert relative_error(logits, again) < TOLERANCE
        np.testing.assert_array_equal(logits.argmax(axis=-1), again.argmax(axis=-1))
    np.testing.assert_array_equal(cache.length_B, lengths)


# --- what a query may see -------------------------------------------------------------------------------------------


@both
def test_entry_is_visible_from_the_token_that_completes_it(name: str) -> None:
    """(j + 1) m <= p + 1, in the raw scores and in what is selected."""
    small = EVERY[name]()
    out = small.whole(small.tokens())
    position = np.arange(small.total)[:, None]
    for layer, scores in out.captured["index_scores"].items():
        m = small.config.plan.layers[layer].ratio
        scores = np.asarray(scores)
        entry = np.arange(scores.shape[-1])
        visible = (entry + 1) * m <= position + 1
        np.testing.assert_array_equal(np.isfinite(scores), np.broadcast_to(visible, scores.shape))
        selection = np.asarray(out.selections[layer])
        assert ((selection + 1) * m <= position + 1).all()
        expected = np.minimum(small.config.index_topk, (position[:, 0] + 1) // m)
        np.testing.assert_array_equal((selection >= 0).sum(axis=-1), np.broadcast_to(expected, selection.shape[:2]))


@pytest.mark.parametrize("name", SMALL)
def test_positions_beyond_four_windows_equal_the_oracle(name: str) -> None:
    """Wrong rotary frequencies hide inside one window: every entry is then about as far away."""
    small = EVERY[name]()
    assert small.total > 4 * small.window
    expected = oracle_of(name).forward(small.tokens()[0]).logits
    assert relative_error(whole(name)[0, 4 * small.window :], expected[4 * small.window :]) < 5e-5


@both
def test_later_tokens_and_other_rows_change_nothing(name: str) -> None:
    """Row b is changed behind position t_b, row 0 not at all."""
    small = EVERY[name]()
    tokens, rng = small.tokens(), np.random.default_rng(2)
    last = np.linspace(small.total - 1, 0, BATCH).astype(int)
    for b, t in enumerate(last):
        tokens[b, t + 1 :] = rng.integers(0, small.config.vocab_size, small.total - t - 1)
    changed = np.asarray(small.whole(tokens).logits)
    for b, t in enumerate(last):
        np.testing.assert_allclose(changed[b, : t + 1], whole(name)[b, : t + 1], rtol=1e-5, atol=1e-5)
        if t < small.total - 1:
            assert np.abs(changed[b, t + 1 :] - whole(name)[b, t + 1 :]).max() > 0.1


def test_gradient_of_a_logit_by_a_later_embedding_is_exactly_zero() -> None:
    """Not merely small: d logits[t] / d embedding[u] for u > t, every token having an id of its own."""
    model, tokens = mini(), np.random.default_rng(4).permutation(60)[:12]
    graphdef, state = nnx.split(model)

    @jax.jit
    def pulled_back(table: jax.Array, weight_TV: jax.Array) -> jax.Array:
        def loss(table: jax.Array) -> jax.Array:
            merged = nnx.merge(graphdef, state)
            merged.embed["weight"] = nnx.Param(table)
            return jnp.sum(merged(tokens[None], None, jnp.full(1, 12))[0].logits[0] * weight_TV)

        return jax.grad(loss)(table)[tokens]

    table = model.embed["weight"][...]
    for t in range(12):
        weight = np.zeros((12, model.config.vocab_size), np.float32)
        weight[t] = np.random.default_rng(t).standard_normal(model.config.vocab_size)
        with quick_compilation():
            grad = np.abs(np.asarray(pulled_back(table, weight))).max(axis=1)
        assert np.isfinite(grad).all()
        assert (grad[t + 1 :] == 0).all()
        assert (grad[max(0, t - 1) : t + 1] > 1e-6).all()


# --- any cutting into calls -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [pytest.param("ratios", marks=pytest.mark.smoke), "tiny8", "v4"])
def test_whole_sequence_in_one_call_equals_the_forward_without_cache(name: str) -> None:
    assert len(one_shot(name)["length"]) == BATCH


def chunk_sizes(small: Small) -> list[int]:
    w = small.window
    return sorted({1, w - 1, w, w + 1, 2 * w + 1} | {m - 1 for m in small.config.plan.ratios if m > 1})


@both
def test_prefill_in_equal_chunks_equals_one_shot(name: str) -> None:
    """{1, m - 1, W - 1, W, W + 1, 2 W + 1} tokens a call and an uneven rest: a long chunk must not overwrite window rows
    that it still reads, a short one must carry the open group."""
    small = EVERY[name]()
    assert any(small.total % size for size in chunk_sizes(small))
    for size in chunk_sizes(small):
        feed = Feed.of(small)
        while (feed.done < small.total).any():
            feed.call(np.full(BATCH, size), width=1 if size == 1 else 2)
        feed.check_cache()


@both
def test_ragged_calls_equal_one_shot(name: str) -> None:
    """Any number of tokens per row and call, none included, while other rows run ahead."""
    small = EVERY[name]()

    @FEW
    @given(st.data())
    def ragged(data: st.DataObject) -> None:
        feed = Feed.of(small)
        for _ in range(4):
            width = data.draw(st.sampled_from(small.widths[:-1]), label="width")
            counts = data.draw(st.lists(st.integers(0, width), min_size=BATCH, max_size=BATCH), label="counts")
            feed.call(np.array(counts), width=width)
        while (feed.done < small.total).any():
            feed.call(np.full(BATCH, small.widths[-2]), width=2)
        feed.check_cache()

    ragged()


def test_rows_one_at_a_time_equal_rows_together() -> None:
    small = SMALL["tiny8"]()
    for row in (0, BATCH - 1):
        feed = Feed.of(small, rows=[row])
        for count in (17, 5, 17, 9):
            with quick_compilation():
                feed.call([count], width=17)
        feed.check_cache()


@both
def test_call_without_tokens_changes_nothing(name: str) -> None:
    """A row that sits a call out keeps its state, and so does every row if all do."""
    small = EVERY[name]()
    feed = Feed.of(small)
    feed.call(np.arange(BATCH), width=2)
    before = meaningful(small.config, feed.cache)
    feed.call(np.zeros(BATCH, int), width=2)
    assert_same(meaningful(small.config, feed.cache), before, 0)


def test_unrolled_layers_equal_scanned_ones() -> None:
    """Segments with several groups: two pools of one ratio, two REINDEX heads, Engram and draft targets inside a scan."""
    knobs = MINI_KNOBS | {
        "swa_layers": 1, "encoder_ratios": (2, 2), "encoder_extra": "U", "decoder_extra": "II",
        "engram_layers": (1, 3), "draft_stages": 1, "draft_targets": (5, 6, 7),
    }  # fmt: skip
    tokens = np.random.default_rng(6).integers(0, 64, (2, 14))
    outs = []
    for scan_layers in (True, False):
        model = load_random(knobs, seed=2, scan_layers=scan_layers)
        assert [len(segment.heads) for segment in model.config.plan.segments] == [1, 2, 1, 2]
        with quick_compilation():
            outs.append(
                forward(model, tokens % model.config.vocab_size, capture=("hidden", "selections", "main_hidden"))
            )
    scanned, unrolled = (jax.tree.map(np.asarray, out) for out in outs)
    assert relative_error(unrolled.logits, scanned.logits) < 1e-5
    assert relative_error(unrolled.captured["main_hidden"], scanned.captured["main_hidden"]) < 1e-5
    for layer, hidden in scanned.hidden.items():
        assert relative_error(unrolled.hidden[layer], hidden) < 1e-5, layer
    for layer, selection in scanned.selections.items():
        np.testing.assert_array_equal(unrolled.selections[layer], selection)
    # Without a cache both share one pool per ratio between the groups; the oracle knows nothing of that.
    config = rc.random_config(2, quantisable=True, **knobs)
    oracle = OracleModel(config, rc.random_tensors(config, 3))
    assert relative_error(scanned.logits[0], oracle.forward(tokens[0] % oracle.shape.vocab).logits) < TOLERANCE


def test_storage_in_bf16_equals_storage_in_f32_with_roundings_on() -> None:
    """Every rounded value is a bf16 number, so nothing is lost, to the last bit, over two calls."""
    model = load_random(MINI_KNOBS, seed=5, fake_quant=True)
    tokens = np.random.default_rng(7).integers(0, model.config.vocab_size, (2, 24))
    found = []
    for storage in ("f32", "bf16"):
        cache = init_cache(model.config, 2, 24, storage)
        for start in (0, 12):
            with quick_compilation():
                out, cache = forward(model, tokens[:, start : start + 12], cache)
        assert cache.window_LBWH.dtype == (jnp.float32 if storage == "f32" else jnp.bfloat16)
        found.append((np.asarray(out.logits), meaningful(model.config, cache)))
    np.testing.assert_array_equal(found[0][0], found[1][0])
    assert_same(found[1][1], found[0][1], 0)


def test_single_token_without_cache_has_an_empty_pool() -> None:
    """One token completes no group of two: that pool has no rows at all."""
    model, tokens = mini(), np.array([[7]])
    config = rc.random_config(0, quantisable=True, **MINI_KNOBS)
    oracle = OracleModel(config, rc.random_tensors(config, 1))
    with quick_compilation():
        out = forward(model, tokens, capture=("selections",))
    assert {layer: selection.tolist() for layer, selection in out.selections.items()} == {
        1: [[[-1, -1]]],
        2: [[[0, -1]]],
        3: [[[0, -1]]],
    }
    assert relative_error(out.logits[0], oracle.forward(tokens[0]).logits) < TOLERANCE


# --- what lies where nobody may look ----------------------------------------------------------------------------------


@both
def test_garbage_in_the_padding_reaches_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The door blanks padded tokens; here they are let through to the device, where they must not matter either."""
    small = EVERY[name]()
    feed, rng = Feed.of(small), np.random.default_rng(3)
    checked = door.check_call

    def with_garbage(config: Any, tokens: Any, *rest: Any) -> Any:
        clean, lengths, names = checked(config, tokens, *rest)
        garbage = rng.integers(0, config.vocab_size, clean.shape)
        return np.where(np.arange(clean.shape[1]) < lengths[:, None], clean, garbage).astype(np.int32), lengths, names

    monkeypatch.setattr(door, "check_call", with_garbage)
    counts = rng.integers(0, small.widths[-2] + 1, (4, BATCH))
    counts[1, :3] = 0, 1, 2
    for row in counts:
        feed.call(row, width=2)
    while (feed.done < small.total).any():
        feed.call(rng.integers(1, small.widths[-2], BATCH), width=2)
    feed.check_cache()


@both
def test_nan_in_unused_rows_of_the_cache_reaches_nothing(name: str) -> None:
    """Pool entries not written yet, window slots of short sequences, the free part of the open group."""
    small = EVERY[name]()
    feeds = [Feed.of(small), Feed.of(small)]
    for feed in feeds:
        feed.call(np.array([0, 1, 2, 3, 4, 5, 7, 8]), width=2)
    feeds[1].cache = poisoned(small.config, feeds[1].cache)
    assert np.isnan(np.asarray(feeds[1].cache.window_LBWH)).any()
    assert all(np.isnan(np.asarray(pool.kv_GBPH)).any() for pool in feeds[1].cache.pools.values())
    for counts in (np.ones(BATCH, int), np.array([0, 1, 2, 3, 4, 9, 10, 11]), np.ones(BATCH, int)):
        clean, poison = (feed.call(counts, width=1 if counts.max() == 1 else 2) for feed in feeds)
        for b, n in enumerate(counts):
            np.testing.assert_array_equal(poison[b, :n], clean[b, :n])
    clean, poison = (meaningful(small.config, feed.cache) for feed in feeds)
    assert_same(poison, clean, 0)


# --- decoding -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["tiny8"])
@pytest.mark.filterwarnings("error")
def test_decoding_reuses_the_memory_of_the_cache(name: str) -> None:
    """32 steps with warnings as errors; every array of the cache stays at its address, so donation really happens."""
    small = EVERY[name]()
    feed = Feed.of(small)
    feed.call(np.full(BATCH, 3), width=2)

    def addresses() -> list[int]:
        return [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(feed.cache) if leaf.nbytes > 1000]

    feed.call(np.ones(BATCH, int))
    start = addresses()
    assert len(start) >= 6
    for _ in range(32):
        consumed = feed.cache
        feed.call(np.ones(BATCH, int))
        assert all(leaf.is_deleted() for leaf in jax.tree.leaves(consumed))
        assert sorted(addresses()) == sorted(start)


# --- refusals -----------------------------------------------------------------------------------------------------


def test_positions_follow_from_the_cache_and_cannot_be_given() -> None:
    small = SMALL["tiny8"]()
    for name in ("positions", "position_ids", "start_pos"):
        with pytest.raises(TypeError, match=name):
            forward(small.bound, small.tokens()[:, :1], small.cache(), **{name: np.ones((BATCH, 1), int)})


@pytest.mark.smoke
def test_forward_refuses_nonsense_and_names_it() -> None:
    small = SMALL["tiny8"]()
    vocab, tokens = small.config.vocab_size, small.tokens()[:, :2].copy()
    for bad in (-1, vocab, vocab + 1000):
        wrong = tokens.copy()
        wrong[3, 1] = bad
        with pytest.raises(ValueError, match=rf"token id {bad} at row 3, position 1.*0\.\.{vocab - 1}"):
            forward(small.bound, wrong, small.cache())
        with pytest.raises(ValueError, match=f"token id {bad}"):
            forward(small.bound, wrong)
    with pytest.raises(ValueError, match=r"holds 3 rows, the tokens have 8"):
        forward(small.bound, tokens, init_cache(small.config, 3, 8, "f32"))
    for shape in ((0, 4), (4, 0), (4,)):
        with pytest.raises(ValueError, match="at least one row and one token"):
            forward(small.bound, np.zeros(shape, int))
    with pytest.raises(ValueError, match="must be integers"):
        forward(small.bound, tokens.astype(np.float32))
    for lengths in ([3] * BATCH, [-1] * BATCH):
        with pytest.raises(ValueError, match=r"must lie in 0\.\.2"):
            forward(small.bound, tokens, small.cache(), lengths)
    for lengths, reason in (
        ([1], "8 integers"),
        (np.ones((BATCH, 1), int), "8 integers"),
        (np.ones(BATCH), "integers"),
    ):
        with pytest.raises(ValueError, match=f"lengths_B must be {reason}"):
            forward(small.bound, tokens, small.cache(), lengths)
    with pytest.raises(ValueError, match=r"capture=\['attn_map'\]"):
        forward(small.bound, tokens, capture=("attn_map",))
    with pytest.raises(ValueError, match="capture="):
        _ = small.whole(small.tokens()).hidden  # not asked for


def test_forward_accepts_any_id_in_the_padding() -> None:
    """Padding is not read, so its ids need not be in the vocabulary."""
    small = SMALL["tiny8"]()
    tokens = small.tokens()[:, :8].copy()
    tokens[:, 5:] = -1
    logits, _ = small.append(small.cache(), tokens, np.full(BATCH, 5))
    assert relative_error(logits[:, :5], whole("tiny8")[:, :5]) < TOLERANCE


def test_cache_that_is_too_short_or_used_up_is_refused() -> None:
    small = SMALL["tiny8"]()
    feed = Feed.of(small)
    consumed = feed.cache
    feed.call(np.ones(BATCH, int))
    with pytest.raises(ValueError, match="consumed by an earlier call"):
        forward(small.bound, small.tokens()[:, :1], consumed)
    short = init_cache(small.config, BATCH, 5, "f32", draft=True)
    with pytest.raises(ValueError, match=r"row 2 holds 0 tokens and would get 6 more: 6 exceeds max_length=5"):
        forward(small.bound, small.tokens()[:, :8], short, [1, 1, 6, 1, 1, 1, 1, 1])
    while (feed.done < small.total).any():
        feed.call(np.full(BATCH, 17), width=17)
    with pytest.raises(ValueError, match=rf"holds {small.total} tokens and would get 1 more"):
        forward(small.bound, small.tokens()[:, :1], feed.cache)
    with pytest.raises(ValueError, match="max_position_embeddings=96"):
        init_cache(small.config, 1, 97)
