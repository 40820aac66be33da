"""Prefill routes: exact equals full with whatever follows, replay is what it says, and pieces cost what they should."""

from __future__ import annotations

import functools
from typing import Any, cast

import jax
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from csa2_jax import Cache, draft, forward, init_cache, prefill, prefilling
from csa2_jax import bound as doors
from csa2_jax.prefilling import pieces, skipped_tokens
from tests import small_models
from tests.small_models import MINI_KNOBS, Small, load_random, meaningful, quick_compilation, relative_error

FEW = settings(max_examples=6, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
LONG = 64
BATCH = 3


@functools.cache
def model(fake_quant: bool = False) -> Small:
    """Ratios 2 and 1, a decoder of two layers with W = 4, n-gram memory and drafts: the exact tail is 8 tokens."""
    loaded = load_random(MINI_KNOBS | {"draft_stages": 1}, fake_quant=fake_quant)
    return Small("mini", loaded, small_models.Bound.of(loaded), (1, 8, LONG))


def tokens(seed: int = 0) -> np.ndarray:
    return model().tokens(seed, BATCH)


def after(decoder: Any, lengths: Any, *, chunk: int = 8, stored: str = "f32", fake_quant: bool = False) -> tuple:
    """(last logits, logits of what follows, drafts, cache) of a prefill."""
    small = model(fake_quant)
    with quick_compilation():
        out, cache = prefill(small.bound, tokens(), small.cache(BATCH, stored), lengths, decoder=decoder, chunk=chunk)
        drafted = draft(small.bound, [1, 2, 3], cache)
        following, cache = forward(small.bound, tokens(1)[:, :8], cache, [1, 8, 3])
    rows = [np.asarray(following.logits)[b, :n] for b, n in enumerate((1, 8, 3))]
    return np.asarray(out.logits), np.concatenate(rows), np.asarray(drafted.logits), cache


@FEW
@given(lengths=st.lists(st.integers(1, LONG - 8), min_size=BATCH, max_size=BATCH))
@pytest.mark.parametrize("stored", ["f32", "packed"])
def test_exact_equals_full_with_all_that_follows(stored: str, lengths: list[int]) -> None:
    """Rows of any lengths: last logits, drafts, later logits, and everything that can still be read."""
    fake_quant = stored == "packed"
    full, exact = (after(d, lengths, stored=stored, fake_quant=fake_quant) for d in ("full", "exact"))
    for a, b in zip(exact[:3], full[:3], strict=True):
        assert relative_error(a, b) < 1e-4
    config = model().config
    for name, rows in meaningful(config, full[3]).items():
        for a, b in zip(meaningful(config, exact[3])[name], rows, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4, err_msg=name)


def test_exact_skips_the_decoder_of_all_but_the_tail() -> None:
    """The claim above is not empty: the first position with decoder rows is what the formula says."""
    cache = after("exact", [56, 30, 5])[3]
    np.testing.assert_array_equal(cache.decoder_from_B, [48, 22, 0])
    np.testing.assert_array_equal(after("full", [56, 30, 5])[3].decoder_from_B, [0, 0, 0])
    np.testing.assert_array_equal(after("replay", [56, 30, 5])[3].decoder_from_B, [52, 26, 1])


def test_a_shorter_tail_than_exact_takes_changes_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    """So D W is not only enough: with half of it the logits of the last token differ."""
    full = after("full", [56, 30, 13])
    monkeypatch.setattr(
        prefilling, "skipped_tokens", lambda config, lengths, decoder, chunk: np.maximum(lengths - 4, 0)
    )
    short = after("exact", [56, 30, 13])
    assert relative_error(short[0], full[0]) > 1e-3


def test_replay_reads_windows_from_its_start_on() -> None:
    """Its last logits are those of a decoder that has window rows of the last W tokens only, and the whole pool."""
    small, lengths = model(), np.array([56, 30, 13])
    with quick_compilation():
        expected = small.cache(BATCH)
        _, expected = prefill(small.bound, tokens(), expected, lengths - 4, decoder="full", chunk=8)
        blind = expected.decoder_from_B.at[:].set(lengths - 4)
        expected = Cache(**{n: getattr(expected, n) for n in CACHE} | {"decoder_from_B": blind}, max_length=LONG)
        piece = np.stack([tokens()[b, n - 4 : n] for b, n in enumerate(lengths)])
        out, _ = forward(small.bound, np.pad(piece, ((0, 0), (0, 4))), expected, [4, 4, 4], all_logits=False)
    assert relative_error(after("replay", lengths)[0], out.logits) < 1e-5
    assert relative_error(after("replay", lengths)[0], after("full", lengths)[0]) > 1e-4


CACHE = ("length_B", "decoder_from_B", "ngram_BE", "window_LBWH", "draft_window_LBWH", "pools")


def test_second_turn_equals_one_prompt() -> None:
    """A prefill onto a cache that holds a turn already: short and long second turns, from every residue of a group."""
    small, first, second = model(), np.array([17, 30, 9]), np.array([30, 3, 12])
    with quick_compilation():
        _, cache = prefill(small.bound, tokens(), small.cache(BATCH), first, chunk=8)
        rest = np.stack([np.roll(tokens()[b], -n) for b, n in enumerate(first)])
        out, cache = prefill(small.bound, rest, cache, second, chunk=8)
        whole, _ = prefill(small.bound, tokens(), small.cache(BATCH), first + second, decoder="full", chunk=8)
    assert relative_error(out.logits, whole.logits) < 1e-4
    np.testing.assert_array_equal(cache.lengths(), first + second)


def test_prefill_reports_progress_in_tokens() -> None:
    small, seen = model(), []
    with quick_compilation():
        prefill(small.bound, tokens(), small.cache(BATCH), [56, 30, 5], chunk=8, on_progress=lambda *p: seen.append(p))
    assert [total for _, total in seen] == [91] * len(seen)
    done = [count for count, _ in seen]
    assert done == sorted(done)
    assert done[-1] == 91


def _programs() -> tuple[int, int]:
    encoder, whole = cast("tuple[Any, Any]", (doors._jit_encoder, doors._jit_forward))
    return encoder._cache_size(), whole._cache_size()


def test_prompts_of_many_lengths_share_a_few_programs() -> None:
    small = model()
    with quick_compilation():
        for n in (40, 41, 47, 48, 53):
            prefill(small.bound, tokens()[:, :n], small.cache(BATCH), chunk=8)
        before = _programs()
        for n in range(24, 56, 5):
            prefill(small.bound, tokens()[:, :n], small.cache(BATCH), chunk=8)
    assert _programs() == before


@pytest.mark.parametrize(("total", "chunk"), [(0, 1024), (1, 1024), (1024, 1024), (7424, 1024), (2500, 1024), (90, 8)])
def test_pieces_cover_the_skipped_part_once(total: int, chunk: int) -> None:
    ends = [start for start, _ in pieces(total, chunk)] + [total]
    assert ends[0] == 0
    for (start, size), end in zip(pieces(total, chunk), ends[1:], strict=True):
        assert start < end <= start + size
        assert size <= chunk


def test_tail_of_the_released_model_is_twenty_windows() -> None:
    config = small_models.ModelConfig.from_hf(small_models.RELEASED)
    np.testing.assert_array_equal(
        skipped_tokens(config, np.array([100, 2560, 2561, 1 << 20]), "exact", 512), [0, 0, 1, (1 << 20) - 2560]
    )
    np.testing.assert_array_equal(skipped_tokens(config, np.array([100, 1 << 20]), "replay", 512), [0, (1 << 20) - 128])
    np.testing.assert_array_equal(skipped_tokens(config, np.array([100, 1 << 20]), "full", 512), [0, 0])


@pytest.mark.parametrize("decoder", ["Exact", None, 1])
def test_unknown_route_is_refused_by_name(decoder: Any) -> None:
    with pytest.raises(ValueError, match="'exact', 'replay', 'full'"):
        prefill(model().bound, tokens(), model().cache(BATCH), decoder=decoder)


def test_encoder_pass_consumes_its_cache() -> None:
    small = model()
    cache = small.cache(BATCH)
    with quick_compilation():
        prefill(small.bound, tokens(), cache, chunk=8)
    with pytest.raises(ValueError, match="consumed"):
        prefill(small.bound, tokens(), cache, chunk=8)


def test_prefill_memory_is_that_of_one_chunk() -> None:
    """Temporary bytes of the compiled pieces do not know how long the prompt is, beyond the row of index scores."""
    small, temp = model(), []
    encoder = cast("Any", doors._jit_encoder)
    for n in (128, 256):
        cache = jax.eval_shape(lambda n=n: init_cache(small.config, 1, n, "f32"))
        args = (small.bound.structure, small.bound.state, jax.ShapeDtypeStruct((1, 64), np.int32), cache)
        lowered = encoder.lower(*args, jax.ShapeDtypeStruct((1,), np.int32))
        analysis: Any = lowered.compile().memory_analysis()
        temp.append(analysis.temp_size_in_bytes)
    per_entry_and_query = 4 * 64
    assert temp[1] - temp[0] <= 3 * per_entry_and_query * (256 - 128)
