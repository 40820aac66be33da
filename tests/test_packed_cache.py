"""The packed cache: the same numbers as the plain ones, bit for bit, in 890 bytes a token."""

from __future__ import annotations

import functools

import jax
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from csa2_jax import ModelConfig, forward, init_cache, prefill
from csa2_jax.cli import main
from csa2_jax.state import pool_name
from kernels_pallas import storage
from tests import small_models
from tests.small_models import Small, meaningful, poisoned

BATCH = 3
FEW = settings(max_examples=6, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
dtypes = pytest.mark.parametrize("compute_dtype", ["float32", "bfloat16"])


def run(small: Small, stored: str, counts: list[list[int]], poison: bool = False) -> tuple[list[np.ndarray], dict]:
    """Real logits of every call and what the cache holds at the end."""
    cache, done, logits = small.cache(BATCH, stored), np.zeros(BATCH, int), []
    tokens = small.tokens(batch=BATCH)
    for call in counts:
        real = np.minimum(call, small.total - done)
        width = next(w for w in small.widths if w >= max(real.max(), 1))
        piece = np.zeros((BATCH, width), int)
        for b, n in enumerate(real):
            piece[b, :n] = tokens[b, done[b] : done[b] + n]
        cache = poisoned(small.config, cache) if poison else cache
        with small_models.quick_compilation():
            out, cache = forward(small.bound, piece, cache, real)
        logits += [np.asarray(out.logits)[b, :n] for b, n in enumerate(real)]
        done = done + real
    return logits, meaningful(small.config, cache)


def assert_equal(found: tuple, expected: tuple) -> None:
    for a, b in zip(found[0], expected[0], strict=True):
        np.testing.assert_array_equal(a, b)
    for name, rows in expected[1].items():
        for a, b in zip(found[1][name], rows, strict=True):
            np.testing.assert_array_equal(a, b, err_msg=name)


@dtypes
@FEW
@given(counts=st.lists(st.lists(st.integers(0, 9), min_size=BATCH, max_size=BATCH), min_size=1, max_size=5))
def test_packed_cache_equals_the_plain_ones_in_any_chunking(compute_dtype: str, counts: list[list[int]]) -> None:
    """Logits, windows, pools, index keys: every bit, ragged calls and empty rows included."""
    small = small_models.rounded(compute_dtype)
    plain = run(small, "bf16", counts)
    assert_equal(run(small, "packed", counts), plain)
    assert_equal(run(small, "f32", counts), plain)


@dtypes
def test_unused_bytes_of_a_packed_cache_change_nothing(compute_dtype: str) -> None:
    """0xFF is NaN both as e4m3 and as e8m0."""
    small, counts = small_models.rounded(compute_dtype), [[9, 4, 1], [1, 0, 1], [3, 9, 8], [1, 1, 1]]
    assert_equal(run(small, "packed", counts, poison=True), run(small, "packed", counts))


def test_drafts_from_a_packed_cache_are_those_of_the_plain_one() -> None:
    from csa2_jax import draft

    small = small_models.rounded()
    drafts = []
    for stored in ("f32", "packed"):
        _, cache = prefill(small.bound, small.tokens(batch=BATCH)[:, :9], small.cache(BATCH, stored))
        drafts.append(draft(small.bound, [1, 2, 3], cache))
    for name in ("ids", "logits", "confidence"):
        np.testing.assert_array_equal(getattr(drafts[0], name), getattr(drafts[1], name))


def test_packed_cache_without_roundings_is_refused() -> None:
    small = small_models.ratios()
    cache = init_cache(small.config, 1, 16, "packed")
    with pytest.raises(ValueError, match="fake_quant=False"):
        forward(small.bound, [[1, 2]], cache)
    with pytest.raises(ValueError, match="fake_quant=False"):
        prefill(small.bound, [[1, 2]], cache)


@functools.cache
def released() -> ModelConfig:
    return ModelConfig.from_hf(small_models.RELEASED)


def test_released_cache_takes_890_bytes_a_token() -> None:
    """Measured on the arrays: what a thousand tokens more cost, and nothing but pools grows with them."""
    small, large = (
        jax.eval_shape(lambda n=n: init_cache(released(), 1, n, "packed", draft=True)) for n in (1024, 2048)
    )
    assert (storage.nbytes(large) - storage.nbytes(small)) / 1024 == 890.0
    for name, pool in small.pools.items():
        grown = large.pools[name]
        per_entry = {"kv": 288, "key": 68}
        for what, a, b in (("kv", pool.kv_GBPH, grown.kv_GBPH), ("key", pool.key_GBPJ, grown.key_GBPJ)):
            groups, _, entries, _ = storage.shape(a)
            assert storage.nbytes(b) - storage.nbytes(a) == groups * entries * per_entry[what]
        assert jax.tree.map(lambda a: a.shape, pool.half_YGBMH) == jax.tree.map(lambda a: a.shape, grown.half_YGBMH)
    assert storage.nbytes(small.window_LBWH) == 40 * 128 * 528
    assert storage.nbytes(small.window_LBWH) == storage.nbytes(large.window_LBWH)
    assert pool_name(2) in small.pools


def test_inspect_reports_what_was_measured_on_the_arrays(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", "--config", str(small_models.RELEASED)]) == 0
    constant = (
        43 * 128 * 528 + 2 * 3 * 512 * 4 + 4 * (1 + 1 + 3)
    )  # windows with the draft head's, open groups, three small rows
    assert f"measured on the arrays of a packed cache: 890.0 bytes a token and {constant:,} bytes" in " ".join(
        capsys.readouterr().out.split()
    )
