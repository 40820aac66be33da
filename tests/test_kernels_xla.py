"""The three doors and their exact XLA implementation against plain NumPy, on every path through them."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from kernels_pallas import Unsupported, compress, index_scores, index_select, sparse_attention
from kernels_pallas.index_select import xla as select_xla

ROOT = Path(__file__).resolve().parent.parent
BF16 = ml_dtypes.bfloat16


# --- references ---------------------------------------------------------------------------------------------------


def scores_of(q: np.ndarray, w: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """sum_i relu(q_i . key) w_i, one sequence: q [T, I, J], w [T, I], keys [P, J] -> float64 [T, P]."""
    dots = np.maximum(np.einsum("tij,pj->tip", q.astype(np.float64), keys.astype(np.float64)), 0)
    return (dots * w.astype(np.float64)[:, :, None]).sum(axis=1)


def best(score: np.ndarray, count: int) -> list[int]:
    """The `count` highest above -inf, lowest index first among equals, ascending."""
    order = np.argsort(-score, kind="stable")[:count]
    return sorted(int(i) for i in order if score[i] > -np.inf)


def padded(rows: list[int], width: int) -> list[int]:
    return rows + [-1] * (width - len(rows))


def select_reference(
    scores: np.ndarray, visible: np.ndarray, topk: int, block: int = 1, candidates: np.ndarray | None = None
) -> np.ndarray:
    """[T, topk] from scores [T, P]: visible entries of the candidate blocks."""
    out = []
    for t, row in enumerate(scores):
        allowed = np.arange(len(row)) < visible[t]
        if candidates is not None:
            allowed &= np.isin(np.arange(len(row)) // block, candidates[t])
        out.append(padded(best(np.where(allowed, row, -np.inf), topk), topk))
    return np.array(out)


def integers(rng: np.random.Generator, *shape: int, span: int = 3) -> np.ndarray:
    """Small whole numbers: products and sums are exact in f32 in any order, and ties are ordinary."""
    return rng.integers(-span, span + 1, shape).astype(np.float32)


def index_inputs(
    seed: int, batch: int, tokens: int, entries: int, heads: int = 2, width: int = 4
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """(q, w, keys [2, B, P, J], visible); keys that nobody may see would win by far, those of the other group too."""
    rng = np.random.default_rng(seed)
    q, w = integers(rng, batch, tokens, heads, width), integers(rng, batch, tokens, heads)
    keys = integers(rng, 2, batch, entries, width)
    visible = rng.integers(0, entries + 1, (batch, tokens))
    visible[:, -1], visible[:, 0] = entries, min(1, entries)
    return q, w, keys, visible.astype(np.int32)


select = jax.jit(index_select, static_argnames=("topk", "block_size", "make_candidates", "implementation"))


# --- index scores and selection -----------------------------------------------------------------------------------


@pytest.mark.smoke
def test_index_scores_weigh_the_rectified_dots() -> None:
    """The formula alone, by hand: relu before the signed weight, then the sum over heads."""
    q = jnp.array([[[[1.0, 2.0], [-1.0, 0.5]]]])
    keys = jnp.array([[[[3.0, -1.0], [-2.0, 4.0], [0.5, 0.25], [9.0, 9.0]]]])
    found = index_scores(q, jnp.array([[[2.0, -3.0]]]), keys, 0, jnp.array([[3]]))
    # heads: (1, -3.5), (6, 4), (1, -0.375); rectified and weighted: 2*1 - 0, 2*6 - 3*4, 2*1 - 0
    np.testing.assert_array_equal(found, [[[2.0, 0.0, 2.0, -np.inf]]])


@pytest.mark.parametrize(
    ("batch", "tokens", "entries"),
    [(2, 1, 1), (3, 1, 300), (2, 8, 9), (2, 9, 37), (1, 130, 65), (1, 259, 40), (2, 3, 4100), (1, 10, 6001)],
    ids=["one", "decode", "few", "loop", "2 blocks", "3 blocks", "key chunks", "key chunks and loop"],
)
def test_index_select_takes_the_highest_visible_scores(batch: int, tokens: int, entries: int) -> None:
    """Any number of queries and entries, ties to the lowest index, T = 1, last row and last token included."""
    q, w, keys, visible = index_inputs(tokens + entries, batch, tokens, entries)
    for topk in (5, entries + 2) if entries < 100 else (5,):
        found, made = select(q, w, keys, 1, visible, topk=topk)
        assert made is None
        assert found.dtype == jnp.int32
        for b in range(batch):
            expected = select_reference(scores_of(q[b], w[b], keys[1, b]), visible[b], topk)
            np.testing.assert_array_equal(found[b], expected)


@pytest.mark.parametrize("poison", [1e9, np.nan])
@pytest.mark.parametrize("tokens", [1, 12])
@pytest.mark.parametrize("path", ["dense", "key chunks", "masked candidates", "gathered candidates"])
def test_index_select_never_takes_what_is_not_visible(path: str, tokens: int, poison: float) -> None:
    """Scores of 1e9 or NaN behind a row's length lose against everything visible."""
    entries = {"dense": 30, "key chunks": 4100, "masked candidates": 24, "gathered candidates": 60}[path]
    q, w, keys, visible = index_inputs(7, 2, tokens, entries)
    q, w = np.abs(q) + 1, np.abs(w) + 1  # every huge key would score hugely
    held = np.array([entries // 2, entries // 3])
    visible = np.minimum(visible, held[:, None]).astype(np.int32)
    candidates = None
    if "candidates" in path:
        blocks = np.arange(2 if path.startswith("gathered") else 5) * 2
        candidates = np.broadcast_to(blocks, (2, tokens, len(blocks))).astype(np.int32)
    clean, _ = select(q, w, keys, 0, visible, topk=4, block_size=4, candidates_BTC=candidates)
    for b in range(2):
        keys[0, b, held[b] :] = poison
    found, _ = select(q, w, keys, 0, visible, topk=4, block_size=4, candidates_BTC=candidates)
    np.testing.assert_array_equal(found, clean)
    assert (np.asarray(found) < visible[:, :, None]).all()
    assert (np.asarray(found) >= 0).any()


def test_index_select_without_anything_visible_selects_nothing() -> None:
    q, w, keys, visible = index_inputs(3, 2, 3, 6)
    found, made = select(q, w, keys, 0, np.zeros_like(visible), topk=4, block_size=2, make_candidates=3)
    assert (np.asarray(found) == -1).all()
    assert (np.asarray(made) == -1).all()


def test_index_select_of_an_empty_pool_selects_nothing() -> None:
    q, w, keys, visible = index_inputs(3, 2, 3, 0)
    found, made = select(q, w, keys, 0, visible, topk=4, block_size=2, make_candidates=3)
    np.testing.assert_array_equal(found, np.full((2, 3, 4), -1))
    assert made is not None
    np.testing.assert_array_equal(made, np.full((2, 3, 3), -1))


def test_index_select_follows_a_lopsided_visibility_pattern() -> None:
    """Rows that see much, little and nothing, in no order: a mask with its sense turned round cannot pass."""
    visible = np.array([[5, 0, 2], [1, 7, 3]], np.int32)
    keys = np.ones((1, 2, 7, 1), np.float32)  # all scores equal: the lowest indices win
    found, _ = select(np.ones((2, 3, 1, 1), np.float32), np.ones((2, 3, 1), np.float32), keys, 0, visible, topk=4)
    expected = [[[0, 1, 2, 3], [-1] * 4, [0, 1, -1, -1]], [[0, -1, -1, -1], [0, 1, 2, 3], [0, 1, 2, -1]]]
    np.testing.assert_array_equal(found, expected)


def test_index_select_holds_minus_zero_and_zero_for_equal() -> None:
    """One head with a negative weight gives -0.0 where the dot is negative; the lower index still wins."""
    q, w = np.ones((1, 1, 1, 1), np.float32), np.full((1, 1, 1), -1.0, np.float32)
    keys = np.array([-2.0, 0.0, -1.0, 3.0], np.float32).reshape(1, 1, 4, 1)
    found, _ = select(q, w, keys, 0, np.array([[4]], np.int32), topk=2)
    np.testing.assert_array_equal(found, [[[0, 1]]])
    direct = select_xla._best(jnp.array([[[-0.0, 0.0, -0.0, -1.0]]]), 1, None)
    np.testing.assert_array_equal(direct, [[[0]]])


@pytest.mark.parametrize("tokens", [2, 11])
def test_index_scores_of_bf16_queries_round_three_times(tokens: int) -> None:
    """After the dot, after the weight and after the sum; summed heads are exact in f32 here, so the order is free."""
    rng = np.random.default_rng(5)
    shape = (1, tokens, 3, 8)
    q, w, keys = rng.standard_normal(shape), rng.standard_normal(shape[:3]), rng.standard_normal((1, 1, 30, 8))
    q, w, keys = q.astype(BF16), w.astype(BF16), keys.astype(BF16)
    dots = np.einsum("tij,pj->tip", q[0].astype(np.float32), keys[0, 0].astype(np.float32)).astype(BF16)
    terms = (np.maximum(dots.astype(np.float32), 0) * w[0].astype(np.float32)[:, :, None]).astype(BF16)
    expected = terms.astype(np.float32).sum(axis=1).astype(BF16).astype(np.float32)
    found = np.asarray(index_scores(q, w, keys, 0, np.full((1, tokens), 30, np.int32)))[0]
    step = np.ldexp(1.0, np.frexp(expected)[1] - 8)  # one bf16 place: a dot may land on the other side of a tie
    assert (found == expected).mean() > 0.98
    assert (np.abs(found - expected) <= 2 * step + 0.02).all()
    plain = scores_of(q[0], w[0], keys[0, 0])
    assert (found != plain.astype(np.float32)).mean() > 0.5  # it does round


def candidate_reference(scores: np.ndarray, visible: np.ndarray, block: int, count: int) -> np.ndarray:
    out = []
    for t, row in enumerate(scores):
        seen = np.where(np.arange(len(row)) < visible[t], row, -np.inf)
        score = np.array([seen[i : i + block].max() for i in range(0, len(row), block)])
        if visible[t]:
            score[(visible[t] - 1) // block] = np.inf
        out.append(padded(best(score, count), count))
    return np.array(out)


@pytest.mark.parametrize(("tokens", "entries", "block"), [(1, 13, 2), (21, 40, 3), (5, 2060, 8)])
def test_candidates_are_the_best_blocks_with_the_newest_forced_in(tokens: int, entries: int, block: int) -> None:
    q, w, keys, visible = index_inputs(tokens, 2, tokens, entries)
    found, made = select(q, w, keys, 1, visible, topk=3, block_size=block, make_candidates=4)
    assert made is not None
    for b in range(2):
        scores = scores_of(q[b], w[b], keys[1, b])
        np.testing.assert_array_equal(made[b], candidate_reference(scores, visible[b], block, 4))
        # The source itself selects from all its scores.
        np.testing.assert_array_equal(found[b], select_reference(scores, visible[b], 3))


def random_candidates(rng: np.random.Generator, batch: int, tokens: int, blocks: int, count: int) -> np.ndarray:
    """[B, T, count] ascending block ids, some rows shorter and -1 behind."""
    out = np.full((batch, tokens, count), -1)
    for b in range(batch):
        for t in range(tokens):
            n = rng.integers(0, count + 1)
            out[b, t, :n] = np.sort(rng.permutation(blocks)[:n])
    return out.astype(np.int32)


@pytest.mark.parametrize(("tokens", "entries"), [(1, 64), (14, 64), (14, 20)], ids=["decode", "gathered", "masked"])
def test_index_select_obeys_candidates_on_every_path(tokens: int, entries: int) -> None:
    q, w, keys, visible = index_inputs(tokens + 50, 2, tokens, entries)
    candidates = random_candidates(np.random.default_rng(1), 2, tokens, entries // 4, 3)
    found, _ = select(q, w, keys, 1, visible, topk=5, block_size=4, candidates_BTC=candidates)
    for b in range(2):
        scores = scores_of(q[b], w[b], keys[1, b])
        np.testing.assert_array_equal(found[b], select_reference(scores, visible[b], 5, 4, candidates[b]))


@pytest.mark.parametrize("tokens", [1, 14])
def test_gathered_candidates_equal_masked_ones(tokens: int) -> None:
    """Ordinary f32 scores: gathering the candidate blocks changes nothing against masking all scores."""
    rng = np.random.default_rng(2)
    q, w = (rng.standard_normal(shape).astype(np.float32) for shape in ((2, tokens, 4, 8), (2, tokens, 4)))
    keys = jnp.asarray(rng.standard_normal((2, 2, 64, 8)), jnp.float32)
    visible = rng.integers(0, 65, (2, tokens)).astype(np.int32)
    candidates = random_candidates(rng, 2, tokens, 16, 6)
    (gathered,) = jax.jit(functools.partial(select_xla._select_gathered, keys, 1, 7, 4))(q, w, candidates, visible)
    masked = jax.jit(functools.partial(select_xla._select_dense, keys, 1, 64, 7, 4, 0, True))(q, w, candidates, visible)
    np.testing.assert_array_equal(gathered, masked[0])
    assert (np.asarray(gathered) >= 0).mean() > 0.3


def test_index_select_in_blocks_equals_one_block(monkeypatch: pytest.MonkeyPatch) -> None:
    q, w, keys, visible = index_inputs(4, 1, 37, 48)
    candidates = random_candidates(np.random.default_rng(3), 1, 37, 12, 3)

    def both() -> tuple[Any, ...]:
        def f(q: Any, w: Any, keys: Any) -> tuple[Any, ...]:  # a function of its own each time: nothing is cached
            made = index_select(q, w, keys, 0, visible, topk=4, block_size=4, make_candidates=3)
            return *made, index_select(q, w, keys, 0, visible, topk=4, block_size=4, candidates_BTC=candidates)[0]

        return jax.jit(f)(q, w, keys)

    whole = both()
    monkeypatch.setattr(select_xla, "_SCORE_ELEMENTS", 48 * 5)  # five queries at a time
    monkeypatch.setattr(select_xla, "_GATHER_ELEMENTS", 3 * 4 * 4 * 7)
    monkeypatch.setattr(select_xla, "_KEY_CHUNK", 13)
    for found, expected in zip(both(), whole, strict=True):
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("tokens", [1, 3, 21])
@pytest.mark.parametrize("heads", [4, 16])
def test_index_select_on_a_prefix_equals_the_whole_pool(
    monkeypatch: pytest.MonkeyPatch, tokens: int, heads: int
) -> None:
    """Contexts that end in every prefix and on their borders, heads in one group and in several."""
    rng = np.random.default_rng(7)
    q, w = (rng.standard_normal(shape).astype(np.float32) for shape in ((2, tokens, heads, 8), (2, tokens, heads)))
    keys = rng.standard_normal((3, 2, 96, 8)).astype(np.float32)
    assert select_xla.prefixes(96, 2) == [96]
    cases = [
        (np.full((2, tokens), n) - rng.integers(0, n + 1, (2, tokens)) // 3).astype(np.int32)
        for n in (0, 7, 8, 9, 33, 96)
    ]

    def found() -> list[Any]:
        call = jax.jit(lambda v: index_select(q, w, keys, 1, v, topk=5, block_size=4, make_candidates=3))
        return [jax.tree.map(np.asarray, call(visible)) for visible in cases]

    whole = found()
    monkeypatch.setattr(select_xla, "_PREFIX", 8)
    monkeypatch.setattr(select_xla, "_KEY_CHUNK", 6)
    monkeypatch.setattr(select_xla, "_FEW_CHUNK", 7)
    assert select_xla.prefixes(96, 2) == [8, 16, 32, 96]
    for a, b in zip(found(), whole, strict=True):
        np.testing.assert_array_equal(a[0], b[0])
        np.testing.assert_array_equal(a[1], b[1])


# --- compression --------------------------------------------------------------------------------------------------


def compress_reference(c: np.ndarray, z: np.ndarray, ratio: int) -> np.ndarray:
    """[P, H] of one whole sequence."""
    rows = []
    for j in range(len(c) // ratio):
        group = slice(j * ratio, (j + 1) * ratio)
        p = np.exp(z[group] - z[group].max(axis=0))
        rows.append((p / p.sum(axis=0) * c[group]).sum(axis=0))
    return np.array(rows).reshape(-1, c.shape[1])


@pytest.mark.parametrize("ratio", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("width", [1, 2, 5])
def test_compress_in_any_chunks_equals_whole_groups(ratio: int, width: int) -> None:
    """Ragged rows, a half-filled group carried along, garbage wherever nothing is real."""
    rng = np.random.default_rng(ratio * 10 + width)
    lengths, batch = np.array([3 * ratio + 1, 2 * ratio, max(0, ratio - 1)]), 3
    c, z = rng.standard_normal((2, batch, lengths.max(), 6)).astype(np.float32)
    step = jax.jit(compress, static_argnames="ratio")
    half = [np.full((batch, ratio - 1, 6), np.nan, np.float32)] * 2
    done, entries = np.zeros(batch, int), [[] for _ in range(batch)]
    while (done < lengths).any():
        count = np.minimum(rng.integers(0, width + 1, batch), lengths - done)
        chunks = np.full((2, batch, width, 6), np.nan, np.float32)
        for b in range(batch):
            for out, full in zip(chunks, (c, z), strict=True):
                out[b, : count[b]] = full[b, done[b] : done[b] + count[b]]
        made, *half = step(*chunks, *half, done % ratio, count, ratio=ratio)
        assert made.shape == (batch, (width + ratio - 1) // ratio, 6)
        for b in range(batch):
            entries[b].extend(np.asarray(made)[b, : (done[b] % ratio + count[b]) // ratio])
        done = done + count
    for b in range(batch):
        expected = compress_reference(c[b, : lengths[b]], z[b, : lengths[b]], ratio)
        np.testing.assert_allclose(np.array(entries[b]).reshape(-1, 6), expected, rtol=1e-6, atol=1e-6)


# --- doors --------------------------------------------------------------------------------------------------------


def test_doors_refuse_shapes_that_do_not_match_and_name_them() -> None:
    q, w, keys, visible = index_inputs(1, 2, 3, 4)
    with pytest.raises(ValueError, match=r"w_BTI\.shape=\(2, 3\)"):
        index_select(q, w[..., 0], keys, 0, visible, topk=2)
    with pytest.raises(ValueError, match=r"keys_GBPJ\.shape=\(2, 1, 4, 4\)"):
        index_select(q, w, keys[:, :1], 0, visible, topk=2)
    with pytest.raises(ValueError, match=r"visible_BT\.shape=\(2, 2\)"):
        index_select(q, w, keys, 0, visible[:, :2], topk=2)
    with pytest.raises(ValueError, match="topk=0"):
        index_select(q, w, keys, 0, visible, topk=0)
    with pytest.raises(ValueError, match="block_size=0"):
        index_select(q, w, keys, 0, visible, topk=2, make_candidates=1)
    rows = np.zeros((2, 3, 4), np.float32)
    with pytest.raises(ValueError, match=r"ratio - 1.*\[2, 2, 4\]"):
        compress(rows, rows, rows, rows, np.zeros(2, int), np.ones(2, int), ratio=3)
    query, first = np.zeros((2, 3, 1, 4), np.float32), np.zeros((2, 3), np.int32)
    with pytest.raises(ValueError, match="come together"):
        sparse_attention(query, rows, first, np.zeros(1), np.zeros((1, 2, 3, 4)), window=3, scale=1.0)
    with pytest.raises(ValueError, match=r"window_BSH\.shape=\(2, 2, 4\)"):
        sparse_attention(query, rows[:, :2], first, np.zeros(1), window=3, scale=1.0)


def test_doors_raise_for_an_implementation_that_does_not_exist() -> None:
    q, w, keys, visible = index_inputs(1, 2, 3, 4)
    with pytest.raises(Unsupported, match=r"pallas_moon.*xla"):
        index_select(q, w, keys, 0, visible, topk=2, implementation="pallas_moon")
    named, _ = index_select(q, w, keys, 0, visible, topk=2, implementation="xla")
    np.testing.assert_array_equal(named, index_select(q, w, keys, 0, visible, topk=2)[0])


# --- temporary memory ---------------------------------------------------------------------------------------------


def temporary_bytes(tokens: int, entries: int, candidates: int = 0, **options: Any) -> int:
    """What a compiled call needs beside arguments and results."""
    shapes = [((1, tokens, 4, 32), "f4"), ((1, tokens, 4), "f4"), ((3, 1, entries, 32), "f4"), ((1, tokens), "i4")]
    if candidates:
        shapes.append(((1, tokens, candidates), "i4"))

    def f(q: Any, w: Any, keys: Any, visible: Any, blocks: Any = None) -> Any:
        return index_select(q, w, keys, 1, visible, topk=16, block_size=8, candidates_BTC=blocks, **options)

    compiled = jax.jit(f).lower(*(jax.ShapeDtypeStruct(*shape) for shape in shapes)).compile()
    return compiled.memory_analysis().temp_size_in_bytes


@pytest.mark.parametrize("options", [{"make_candidates": 8}, {"candidates": 8}], ids=["makes", "obeys candidates"])
def test_index_select_memory_is_linear_in_the_length(options: dict[str, int]) -> None:
    """As many entries as tokens: four times the length may take four times the memory, never sixteen times."""
    short, long = temporary_bytes(1024, 1024, **options), temporary_bytes(4096, 4096, **options)
    assert long < 4.5 * short
    assert long < 4096 * 4096 * 4  # a score for every pair


def test_index_select_memory_of_a_decode_step_does_not_follow_the_keys() -> None:
    """No group of keys is copied out of its stack: what grows is the row of scores, and with candidates nothing."""
    group_of_keys = 65_536 * 32 * 4
    assert temporary_bytes(1, 65_536) < group_of_keys / 3
    assert temporary_bytes(1, 65_536, candidates=8) == temporary_bytes(1, 4096, candidates=8)


# --- two devices --------------------------------------------------------------------------------------------------

_TWO_DEVICES = """
import jax, numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P
from kernels_pallas import index_select, sparse_attention
mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
rng = np.random.default_rng(0)
q, w = rng.standard_normal((4, 9, 2, 8)).astype("f"), rng.standard_normal((4, 9, 2)).astype("f")
keys, visible = rng.standard_normal((2, 4, 30, 8)).astype("f"), rng.integers(0, 31, (4, 9)).astype("i")
rows, first = rng.standard_normal((4, 14, 8)).astype("f"), rng.integers(0, 5, (4, 9)).astype("i")
def f(q, w, keys, visible, rows, first):
    chosen, made = index_select(q, w, keys, 1, visible, topk=4, block_size=3, make_candidates=2)
    again, _ = index_select(q, w, keys, 1, visible, topk=4, block_size=3, candidates_BTC=made)
    o, _ = sparse_attention(q, rows, first, np.ones(2, "f"), keys, 1, again, window=6, scale=0.3)
    return chosen, made, again, o
args = (q, w, keys, visible, rows, first)
alone = jax.jit(f)(*args)
specs = (P("data"), P("data"), P(None, "data"), P("data"), P("data"), P("data"))
put = [jax.device_put(a, NamedSharding(mesh, s)) for a, s in zip(args, specs)]
for both, one in zip(jax.jit(f)(*put), alone):
    assert len(both.sharding.device_set) == 2, both.sharding
    np.testing.assert_allclose(np.asarray(both), np.asarray(one), rtol=1e-6, atol=1e-6)
print("equal")
"""


def test_doors_give_the_same_on_two_devices() -> None:
    """Rows of the batch on different devices; in a process of its own, because the number of devices is fixed early."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=2"
    environment = {**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    result = subprocess.run(
        [sys.executable, "-c", _TWO_DEVICES], env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == "equal"
