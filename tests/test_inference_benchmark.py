"""The inference benchmark: what it counts, how it compares, and that a toy run of it works from end to end."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from benchmarks import (
    inference,
    inference_child,
    inference_cold,
    inference_decode,
    inference_host,
    inference_measure,
    inference_prefill,
    inference_reindex,
)
from benchmarks.inference_counts import active_bytes
from benchmarks.inference_measure import (
    Ratio,
    fit_line,
    forget_peak,
    interleave,
    machine,
    over_rounds,
    products,
    ratio,
    reading,
    resident,
    scaled,
    without_compiling,
)
from benchmarks.inference_models import BENCH, QUICK, Bench, at_length, filled_cache, shrunk
from benchmarks.inference_report import Report, Target, wanted, write_json
from csa2_jax import Bound, Model, ModelConfig, Numerics, Unsupported, forward
from csa2_jax.counts import candidate_entries, flops, pool_reads
from kernels_pallas import index_select

ROOT = Path(__file__).resolve().parent.parent
CONFIG = ModelConfig.from_hf(BENCH)
TOY = shrunk(CONFIG)


@pytest.fixture(scope="module")
def toy():
    """A toy model, made once."""
    sizes = dataclasses.replace(QUICK, lengths=(80,), contexts=(128,))  # every further size is compiled for
    return Bench(TOY, sizes, rounds=1, steps=5, note=lambda _: None, quick=True)


def test_help_names_its_options_and_exits_well():
    done = subprocess.run(
        [sys.executable, "benchmarks/inference.py", "--help"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    for word in ("--parts", "--quick", "--strict", "--json", "--png", "prefill", "decode", "reindex", "host", "cold"):
        assert word in done.stdout


def test_bench_model_holds_128k_tokens_and_is_otherwise_the_timed_one():
    assert CONFIG.max_position_embeddings == 131072 + 1024
    modes = " ".join(spec.mode for spec in CONFIG.plan.layers)
    assert modes == "SWA SWA FULL REUSE REUSE REUSE FULL REUSE REINDEX REUSE REINDEX REUSE"
    leaves = jax.tree.leaves(nnx.state(_abstract(CONFIG), nnx.Param))
    assert sum(leaf.size for leaf in leaves) == pytest.approx(101.4e6, rel=1e-3)


# ---- counting ----


def test_candidates_hold_the_visible_entries_that_hand_counting_finds():
    """Two blocks of four: from the ninth entry on, one whole block and the newest one as far as it is filled."""
    found = candidate_entries(np.arange(14), blocks=2, size=4)
    assert list(found) == [0, 1, 2, 3, 4, 5, 6, 7, 8, 5, 6, 7, 8, 5]


def test_candidates_hold_as_many_visible_entries_as_a_search_makes_them_of():
    rng, entries, blocks, size = np.random.default_rng(0), 23, 3, 2
    q, w, keys = (
        jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in ((1, 24, 2, 8), (1, 24, 2), (1, 1, 23, 8))
    )
    visible = jnp.arange(entries + 1)[None]
    _, candidates = index_select(q, w, keys, 0, visible, topk=2, block_size=size, make_candidates=blocks)
    assert candidates is not None
    held = np.asarray(candidates)[0][..., None] * size + np.arange(size)
    inside = (np.asarray(candidates)[0][..., None] >= 0) & (held < np.arange(entries + 1)[:, None, None])
    assert list(inside.sum(axis=(1, 2))) == list(candidate_entries(np.arange(entries + 1), blocks, size))


def test_reads_of_six_tokens_equal_hand_count():
    """Layers: window, FULL at ratio 2, FULL at ratio 1, REINDEX among two blocks of two; two entries are selected."""
    config = dataclasses.replace(TOY, index_topk=2, candidate_topk_blocks=2, candidate_block_size=2)
    scored, selected = pool_reads(config, 6)
    assert scored == {1: 0 + 1 + 1 + 2 + 2 + 3, 2: 1 + 2 + 3 + 4 + 5 + 6, 3: 1 + 2 + 3 + 4 + 3 + 4}
    assert selected == {1: 0 + 1 + 1 + 2 + 2 + 2, 2: 1 + 2 + 2 + 2 + 2 + 2, 3: 1 + 2 + 2 + 2 + 2 + 2}


def test_reusing_layers_read_what_their_source_selected():
    _, selected = pool_reads(CONFIG, 700)
    full = sum(min(128, (t + 1) // 2) for t in range(700))
    assert [selected[layer] for layer in (2, 3, 4, 5)] == [full] * 4
    assert selected[6] == selected[7] == selected[8] == sum(min(128, t + 1) for t in range(700))


def test_searches_among_candidates_stop_growing():
    scored, _ = pool_reads(CONFIG, 1, start=32767)
    assert (scored[2], scored[6], scored[8], scored[10]) == (16384, 32768, 512, 512)
    assert pool_reads(CONFIG, 1, start=32768)[0][8] == 63 * 8 + 1  # the newest block holds one entry


def test_flops_of_the_first_three_tokens_equal_hand_count():
    """Written out for the bench model; 12 layers, 2 of which make a pool, 4 of which select."""
    found = flops(CONFIG, 3)
    per_layer = 512 * 256 + 256 * 8 * 128 + 512 * 128 + 8 * 128 * 128 + 4 * 128 * 512
    index = 4 * (256 * 8 * 64 + 512 * 8)
    assert found["projections"] == 2 * 3 * (12 * per_layer + index)
    assert found["experts"] == 2 * 3 * 12 * (2 + 1) * 3 * 512 * 512
    assert found["router"] == 2 * 3 * 12 * 8 * 512
    # Entries seen by the three queries: at ratio 2 none, one, one; at ratio 1 one, two, three, also among the candidates.
    assert found["index scores"] == 2 * (2 + 3 * 6) * 8 * 64
    assert found["score sums"] == 2 * (2 + 3 * 6) * 8
    # Window rows: one, two, three in all 12 layers; entries: four layers of the first group read 2, six of the decoder 6.
    assert found["attention"] == 2 * 2 * 8 * 128 * (12 * 6 + 4 * 2 + 6 * 6)
    # Ratio 2: values and gates of 3 tokens, their weighted sum, one key; ratio 1: values and keys of 3.
    assert found["compressor"] == 2 * (3 * 2 * 512 * 128 + 3 * 128 + 128 * 64 + 3 * 512 * 128 + 3 * 128 * 64)
    # Two sub-layers each: 24 mixes of 4 x 512, the collapse, 4 streams of the output and 4 streams.
    assert found["hyper-connections"] == 2 * 3 * 2 * 12 * (24 * 2048 + 2048 + 4 * 5 * 512)
    assert found["head"] == 2 * (4 * 512 + 512 * 4096)
    assert set(found) == {
        *("projections", "experts", "router", "index scores", "score sums", "attention", "compressor"),
        *("hyper-connections", "head"),
    }


@pytest.mark.parametrize("cut", [1, 64, 333])
def test_flops_of_two_halves_are_those_of_the_whole(cut):
    """But for the head, which runs once a call."""
    whole, first, second = flops(CONFIG, 700), flops(CONFIG, cut), flops(CONFIG, 700 - cut, start=cut)
    for part in whole:
        assert first[part] + second[part] == whole[part] * (2 if part == "head" else 1), part


def test_flops_of_the_released_model_count_its_memory():
    released = ModelConfig.from_hf(ROOT / "configs" / "v41_flash.json")
    assert flops(released, 5)["n-gram memory"] == 2 * 5 * 2 * (5 * 5120 * 24 * 256 + 2 * 4 * 5120)


def _abstract(config: ModelConfig) -> Model:
    return nnx.eval_shape(lambda: Model(config, numerics=Numerics("float32", False)))


def test_active_weights_of_the_bench_model_equal_hand_count():
    attention = 512 * 256 + 256 + 256 * 1024 + 512 * 128 + 128 + 8 + 512 * 256 * 4 // 4 + 512 * 512
    experts = 8 * 512 + 8 + (2 + 1) * 3 * 512 * 512  # router, its bias, two of the eight and the one for all
    streams = 2 * (24 * 2048 + 24 + 3)
    layers = 12 * (2 * 512 + attention + experts + streams)
    pools = 2 * 512 * 128 + 512 * 128 + 2 * (128 + 128 * 64 + 64)
    indexers = 4 * (8 * 64 * 256 + 8 * 512)
    ends = 512 + 512 + 4096 * 512  # a row of the embedding, the norm, the head
    assert active_bytes(_abstract(CONFIG)) == 4 * (layers + pools + indexers + ends)


def test_active_weights_leave_out_draft_head_and_unread_tables():
    twin = ModelConfig.from_hf(ROOT / "configs" / "v41_twin.json")
    ratios = twin.compress_ratios[: twin.num_hidden_layers]
    options = {"num_nextn_predict_layers": 0, "dspark_target_layer_ids": (), "dspark_block_size": 0}
    without = dataclasses.replace(twin, compress_ratios=ratios, **options)
    assert active_bytes(_abstract(twin)) == active_bytes(_abstract(without))
    model = _abstract(without)
    tables = sum(_bytes(table) * (1 - without.engram_columns / table.weight.shape[0]) for table in model.engram_tables)
    share = 1 - without.num_experts_per_tok / without.n_routed_experts
    unread = tables + _bytes(model.layers.ffn.experts) * share + _bytes(model.embed) * (1 - 1 / without.vocab_size)
    assert active_bytes(model) == pytest.approx(_bytes(model) - unread, abs=1)


def _bytes(module: nnx.Module) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(nnx.state(module, nnx.Param)))


# ---- comparing ----


def test_everything_takes_its_turn_in_every_round():
    ran = []

    def run(name):
        return lambda: [float(len(ran)), ran.append(name)][:1]

    samples = interleave([("a", run("a")), ("b", run("b")), ("a", run("a"))], 2, note=lambda _: None)
    assert ran == ["a", "b", "a"] * 2
    assert samples == {"a": [[0.0, 2.0], [3.0, 5.0]], "b": [[1.0], [4.0]]}


def test_ratio_is_of_all_rounds_and_tells_single_ones():
    above, below = [[4.0, 6.0], [9.0, 12.0]], [[2.0, 2.0], [3.0, 6.0]]
    assert ratio(above, below, min) == Ratio(2.0, 2.0, 3.0)
    assert ratio(above, below) == Ratio(7.5 / 2.5, 10.5 / 4.5, 5.0 / 2.0)
    assert over_rounds(scaled(above, 0.5), max) == 6.0


def test_line_through_points_on_a_line_is_that_line():
    assert fit_line({x: 3.0 + 0.5 * x for x in (1, 2, 4, 8)}) == pytest.approx((3.0, 0.5))
    assert np.isnan(fit_line({1: 2.0})).all()


def test_run_that_compiles_is_not_counted():
    tried = []

    def run():
        tried.append(1)
        if len(tried) < 3:
            jax.block_until_ready(jax.jit(lambda x: x + len(tried))(jnp.float32(1)))
        return [float(len(tried))]

    assert without_compiling(run) == [3.0]


def test_run_that_always_compiles_is_refused():
    with pytest.raises(RuntimeError, match="compiled something"):
        without_compiling(lambda: [float(jax.jit(lambda x: x + 1)(jnp.float32(1)))])


def test_ceilings_are_seconds_per_work_done():
    """The same product twice each, in seconds per 1e12 FLOPs, so that shapes can be compared."""
    with mock.patch.object(inference_measure.time, "perf_counter", side_effect=range(100)):  # a call takes a second
        assert products(((8, 8, 8), (16, 8, 4)))() == [1e12 / 1024] * 4
        assert reading(4096, times=3)() == [1.0] * 3


def test_peak_of_memory_can_be_forgotten():
    if sys.platform != "linux":
        pytest.skip("memory is read from /proc")
    block = np.ones(1 << 25)  # 256 MB
    assert resident()[1] >= block.nbytes
    del block
    forget_peak()
    now, most = resident()
    assert now <= most < now + (1 << 27)


def test_errors_are_relative_to_the_exact_row():
    exact, found = np.array([[3.0, 4.0], [0.0, 2.0]]), np.array([[3.0, 9.0], [0.0, 1.0]])
    assert list(inference_prefill.relative_errors(found, exact)) == [1.0, 0.5]


def test_flatness_holds_the_dearest_pool_against_the_cheapest():
    pools = {1: [[2.0, 9.0], [4.0]], 2: [[3.0], [3.0]], 3: [[5.0], [6.0]]}
    assert inference_reindex.spread(pools) == Ratio(5.0 / 2.0, 6.0 / 3.0, 5.0 / 2.0)


# ---- targets ----


def test_targets_say_what_became_of_them():
    found = Ratio(2.0, 1.5, 2.5)
    assert wanted("a", ">=", 2.0, found).verdict == "met"
    assert wanted("a", "<", 2.0, found).verdict == "missed"
    assert wanted("a", "<=", 2.0, None, "not built").verdict == "refused"
    assert wanted("a", "<=", 2.0, None).verdict == "not run"
    assert [wanted("a", "<", 2.0, f, r).failed for f, r in ((found, ""), (None, "no"), (None, ""))] == [
        True,
        True,
        False,
    ]


@pytest.mark.parametrize(("limit", "strict", "status"), [(1.0, True, 1), (1.0, False, 0), (3.0, True, 0)])
def test_missed_target_ends_a_strict_run_with_1(monkeypatch, capsys, limit, strict, status):
    report = Report(targets=[Target("of a test", "<=", limit, 2.0)])
    monkeypatch.setitem(inference.PARTS, "host", lambda bench: report)
    assert inference.main(parts=("host",), quick=True, strict=strict) == status
    assert ("missed" in capsys.readouterr().out) == (limit == 1.0)


def test_record_has_machine_figures_verdicts_and_no_nan(tmp_path):
    report = Report({"ms": {4096: 1.5, 8192: float("nan")}}, targets=[Target("t", "<", 1.0, None)])
    path = tmp_path / "new" / "record.json"
    write_json(path, machine(), {"decode": report})
    record = json.loads(path.read_text())
    assert record["parts"] == {"decode": {"ms": {"4096": 1.5, "8192": None}}}
    assert record["targets"][0]["verdict"] == "not run"
    assert {"device", "processor", "cores", "date", "jax"} <= set(record)
    assert record["released"]["released f32"]["prefill_s"]["8192"] == 35.6


# ---- toy runs ----


@pytest.mark.parametrize("stored", ["f32", "bf16", "packed"])
def test_filled_cache_is_full_of_numbers_and_at_the_length_asked_for(stored):
    cache = at_length(filled_cache(TOY, 64, stored), 50)
    assert list(cache.lengths()) == list(np.asarray(cache.length_B)) == [50]
    for leaf in jax.tree.leaves((cache.pools, cache.window_LBWH)):
        values = np.asarray(leaf).astype(np.float32)
        assert np.isfinite(values).all()
        assert (values != 0).mean() > 0.5


def test_empty_step_takes_and_gives_back_what_a_real_one_does(toy):
    cache = at_length(filled_cache(TOY, 32, "f32"), 30)
    empty = inference_host.nothing()
    with mock.patch.object(sys.modules[forward.__module__], "_jit_forward", empty):
        _, after = forward(toy.plain, toy.tokens(1), cache, all_logits=False)
    assert list(after.lengths()) == list(np.asarray(after.length_B)) == [31]
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(cache) if leaf.size)  # donated, as in a real step
    ids = (toy.tokens(1).astype(np.int32), after, np.ones(1, np.int32))
    lowered = empty.lower(toy.plain.structure, None, toy.plain.state, None, *ids, all_logits=False, capture=frozenset())
    weights = sum(leaf.nbytes for leaf in jax.tree.leaves(toy.plain.state))
    assert lowered.compile().memory_analysis().argument_size_in_bytes >= weights  # nothing was dropped as unread


def test_arguments_of_a_step_are_counted_for_every_storage():
    found = inference_host.leaves_by_cache(TOY, Numerics("float32", True))
    assert found["f32"] == found["bf16"] < found["packed"]
    cache = jax.eval_shape(lambda: filled_cache(TOY, 32, "f32"))
    assert found["f32"] == len(jax.tree.leaves((Bound.of(_abstract(TOY)).state, cache))) + 2
    assert found["f32"] < len(jax.tree.leaves((nnx.state(_abstract(TOY)), cache)))  # small arrays travel as one


def test_cold_part_tells_compile_times_memory_and_refusals(monkeypatch, toy):
    def process(job):
        if job.decoder == "replay":
            return {"unsupported": "not built"}
        found = {"first_s": 9.0, "second_s": 1.0, "compile_s": 8.0, "xla_s": 7.0}
        memory = {"before_bytes": 5e8, "most_bytes": 2.5e9 if job.decoder == "full" else 1e9}
        return found | ({**memory, "most_when_compiled_bytes": 9e8} if job.decoder else {})

    monkeypatch.setattr(inference_cold, "_process", process)
    report = inference_cold.measure(toy)
    assert [(t.measured, t.verdict) for t in report.targets] == [(2.5, "missed")]
    assert "prefill replay: not built" in report.lines
    assert report.figures["decode"]["compile_s"] == 8.0


def test_job_of_a_fresh_process_measures_its_first_step(monkeypatch, toy):
    monkeypatch.setattr(inference_child, "Bench", lambda *args, **options: toy)
    found = inference_child.run(
        inference_child.Job(TOY.to_hf(), "", 48, 32)
    )  # of a size that no other test compiles for
    assert found["first_s"] > found["second_s"]
    assert found["compile_s"] >= found["xla_s"] > 0


def test_refused_route_is_told_and_fails_its_target(monkeypatch, toy):
    original = Bench.prefill

    def prefill(self, decoder, tokens, cache):
        if decoder != "full":
            raise Unsupported(f"no {decoder} today")
        return original(self, decoder, tokens, cache)

    monkeypatch.setattr(Bench, "prefill", prefill)
    report = inference_prefill.measure(toy)
    assert [t.verdict for t in report.targets] == ["refused", "missed"]
    assert report.figures["refused"] == {"exact": "no exact today", "replay": "no replay today"}
    assert inference_prefill.measure_replay(toy).tables == []


def test_toy_run_measures_records_and_draws(tmp_path, capsys, monkeypatch, toy):
    monkeypatch.setattr(inference, "Bench", lambda *args, **options: toy)
    monkeypatch.setattr(inference_decode, "STORED", ("packed",))
    record, png = tmp_path / "record.json", tmp_path / "picture.png"
    assert inference.main(parts=("prefill", "decode", "reindex"), quick=True, json=record, png=png) == 0
    printed = capsys.readouterr().out
    for text in ("figures mean nothing", "prefill at 80: full / exact", "128, packed with roundings", "Search among"):
        assert text in printed
    found = json.loads(record.read_text())
    assert found["quick"] is True
    assert set(found["parts"]["prefill"]["tokens_s"]) == {"full", "exact", "replay"}
    assert set(found["parts"]["decode"]["all_ms"]) == {"128, f32", "128, packed with roundings", "weights"}
    assert all(ms > 0 for ms in found["parts"]["decode"]["all_ms"].values())
    verdicts = {target["name"]: target["verdict"] for target in found["targets"]}
    assert verdicts["decode: 64 tokens / reading the active weights once"] == "not run"
    assert png.read_bytes().startswith(b"\x89PNG")
