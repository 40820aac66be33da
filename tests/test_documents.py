"""Documents that share a row are computed as if each were alone: logits, gradients, selections, n-grams, windows, groups."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from csa2_jax import Bound, Model, forward, init_cache, load_checkpoint
from csa2_jax.calls import document_origins
from kernels_pallas import Unsupported, index_scores, index_select
from tests.golden_sets import materialise
from tests.small_models import quick_compilation

WIDTH = 96  # of a row: one shape for all examples


@functools.cache
def models() -> tuple[Model, Bound]:
    """Recorded weights: two ratios, candidates, n-gram memories at two layers."""
    model = load_checkpoint(
        materialise("tiny8_f32_noqat"), compute_dtype="float32", fake_quant=False, weights="float32"
    )
    return model, Bound.of(model)


def pack(lengths: list[int], rows: list[int], align: int) -> tuple[np.ndarray, list[tuple[int, int, int]]]:
    """(document ids [B, WIDTH], (row, start, length) of each) of documents laid one behind the other in their rows."""
    ids, places, ends = np.full((2, WIDTH), -1), [], [0, 0]
    for number, (length, row) in enumerate(zip(lengths, rows, strict=True)):
        start = -(-ends[row] // align) * align
        length = min(length, WIDTH - start)
        if length > 0:
            ids[row, start : start + length] = number
            places.append((row, start, length))
            ends[row] = start + length
    return ids, places


@settings(max_examples=8, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
@given(
    lengths=st.lists(st.integers(1, 60), min_size=3, max_size=7),
    rows=st.lists(st.integers(0, 1), min_size=7, max_size=7),
    seed=st.integers(0, 9),
)
def test_packed_documents_give_the_logits_and_choices_of_each_alone(
    lengths: list[int], rows: list[int], seed: int
) -> None:
    _, bound = models()
    align = bound.config.document_alignment
    ids, places = pack(lengths, rows[: len(lengths)], align)
    tokens = np.random.default_rng(seed).integers(0, bound.config.vocab_size, (2, WIDTH))
    capture = ("selections", "candidates", "engram_rows")
    with quick_compilation():
        packed = forward(bound, tokens, documents_BT=ids, capture=capture)
        for row, start, length in places:
            alone = np.zeros((2, WIDTH), int)
            alone[0, :length] = tokens[row, start : start + length]
            out = forward(bound, alone, None, [length, 0], capture=capture)
            here = slice(start, start + length)
            np.testing.assert_allclose(packed.logits[row, here], out.logits[0, :length], rtol=0, atol=2e-5)
            for layer, expected in out.captured["engram_rows"].items():
                np.testing.assert_array_equal(packed.captured["engram_rows"][layer][row, here], expected[0, :length])
            for layer, spec in ((s.layer, s) for s in bound.config.plan.layers):
                for name, size in (("selections", 1), ("candidates", bound.config.candidate_block_size)):
                    if layer in out.captured[name]:
                        found = np.asarray(packed.captured[name][layer][row, here])
                        moved = np.where(found < 0, -1, found - start // (spec.ratio * size))
                        np.testing.assert_array_equal(moved, out.captured[name][layer][0, :length], err_msg=name)


def test_gradients_of_packed_documents_are_the_sum_of_each_alone() -> None:
    model, bound = models()
    align = bound.config.document_alignment
    ids, places = pack([23, 17, 38, 41], [0, 0, 0, 1], align)
    tokens = np.random.default_rng(3).integers(0, bound.config.vocab_size, (2, WIDTH))
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)

    def loss(params: Any, tokens: jax.Array, counts: jax.Array, weights: jax.Array, origins: Any) -> jax.Array:
        out, _ = nnx.merge(graphdef, params, rest)(tokens, None, counts, origin_BT=origins)
        return jnp.sum(jax.nn.log_softmax(out.logits)[..., 7] * weights)

    weights = np.where(ids >= 0, np.random.default_rng(4).standard_normal(ids.shape), 0).astype(np.float32)
    gradient = jax.jit(jax.grad(loss, allow_int=True))
    with quick_compilation():
        full = np.full(2, WIDTH, np.int32)
        found = gradient(params, tokens, full, weights, document_origins(bound.config, ids, tokens.shape))
        total: Any = None
        for row, start, length in places:
            alone, own = np.zeros((2, WIDTH), int), np.zeros((2, WIDTH), np.float32)
            alone[0, :length] = tokens[row, start : start + length]
            own[0, :length] = weights[row, start : start + length]
            origins = np.zeros((2, WIDTH), np.int32)  # one document per row, the same program
            one = gradient(params, alone, np.array([length, 0], np.int32), own, origins)
            one = {
                jax.tree_util.keystr(path): a for path, a in jax.tree.leaves_with_path(one) if a.dtype == jnp.float32
            }
            total = one if total is None else {path: total[path] + a for path, a in one.items()}
    seen = 0
    of = {jax.tree_util.keystr(path): a for path, a in jax.tree.leaves_with_path(found)}
    for path, b in total.items():
        a = of[path]
        scale = float(jnp.max(jnp.abs(b)))
        np.testing.assert_allclose(a, b, rtol=0, atol=2e-4 * scale + 1e-9, err_msg=path)
        seen += scale > 0
    assert seen > 15


def test_what_lies_before_a_document_cannot_reach_it() -> None:
    """NaN logits of nobody else: only the document whose token changed moves."""
    _, bound = models()
    ids, places = pack([30, 30, 20], [0, 0, 0], bound.config.document_alignment)
    tokens = np.random.default_rng(5).integers(0, bound.config.vocab_size, (2, WIDTH))
    changed = tokens.copy()
    (_, start, length) = places[1]
    changed[0, start : start + length] = (changed[0, start : start + length] + 1) % bound.config.vocab_size
    with quick_compilation():
        a, b = (np.asarray(forward(bound, t, documents_BT=ids).logits) for t in (tokens, changed))
    moved = (a != b).any(axis=-1)[0]
    assert moved[start : start + length].all()
    for row, other, n in (places[0], places[2]):
        assert row == 0
        assert not moved[other : other + n].any()


def test_documents_that_cannot_share_a_row_are_refused() -> None:
    _, bound = models()
    align, tokens = bound.config.document_alignment, np.zeros((1, WIDTH), int)
    ids = np.zeros((1, WIDTH), int)
    ids[0, align + 1 :] = 1
    with pytest.raises(
        ValueError, match=rf"document 1 begins at row 0, token {align + 1}, which is no multiple of {align}"
    ):
        forward(bound, tokens, documents_BT=ids)
    ids[0] = np.arange(WIDTH) // align % 2
    with pytest.raises(ValueError, match=r"document 0 of row 0 is interrupted"):
        forward(bound, tokens, documents_BT=ids)
    with pytest.raises(ValueError, match=r"documents_BT has shape \(1, 3\)"):
        forward(bound, tokens, documents_BT=ids[:, :3])
    with pytest.raises(ValueError, match="a cache holds one document per row"):
        forward(bound, tokens, init_cache(bound.config, 1, WIDTH), documents_BT=np.zeros((1, WIDTH), int))


@pytest.mark.parametrize("entries", [40, 5000])
@pytest.mark.parametrize("candidates", [0, 3])
def test_entries_before_the_first_are_never_chosen(entries: int, candidates: int) -> None:
    """index_select with `first` equals the same call on the pool from there on, ids moved; NaN lies before."""
    rng, size, tokens = np.random.default_rng(0), 8, 12
    q, w, keys = (
        rng.standard_normal(s).astype(np.float32) for s in ((1, tokens, 2, 16), (1, tokens, 2), (1, 1, entries, 16))
    )
    start = entries // 3 // size * size
    keys[0, 0, :start] = np.nan
    first = np.full((1, tokens), start, np.int32)
    visible = (start + rng.integers(0, entries - start + 1, (1, tokens))).astype(np.int32)
    visible[0, 0] = start  # a document that has no entry yet
    options: dict[str, Any] = {"topk": 6, "block_size": size, "make_candidates": candidates}
    found = index_select(q, w, keys, 0, visible, first_BT=first, **options)
    expected = index_select(q, w, keys[:, :, start:], 0, visible - start, **options)
    for a, b, unit in zip(found, expected, (1, size), strict=True):
        if b is not None:
            np.testing.assert_array_equal(np.where(np.asarray(a) < 0, -1, a - start // unit), b)
    if candidates:
        again = index_select(q, w, keys, 0, visible, first_BT=first, topk=6, block_size=size, candidates_BTC=found[1])
        alone = index_select(
            q, w, keys[:, :, start:], 0, visible - start, topk=6, block_size=size, candidates_BTC=expected[1]
        )
        np.testing.assert_array_equal(np.where(np.asarray(again[0]) < 0, -1, again[0] - start), alone[0])
    scores = np.asarray(index_scores(q, w, keys, 0, visible, first))
    assert (scores[..., :start] == -np.inf).all()
    np.testing.assert_array_equal(scores[..., start:], index_scores(q, w, keys[:, :, start:], 0, visible - start))
    with pytest.raises(Unsupported, match="first_BT"):
        index_select(q, w, keys, 0, visible, first_BT=first, topk=6, implementation="pallas_tpu", interpret=True)
    with pytest.raises(ValueError, match="first_BT"):
        index_select(q, w, keys, 0, visible, first_BT=first[:, 1:], topk=6)
