"""Tables on the host: the same rows and logits, from release and converted files, with the rest of the engine on top."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx

from csa2_jax import Engine, forward, generate, init_cache, load_checkpoint, prefill
from csa2_jax.bound import Bound
from csa2_jax.conversion.convert import convert
from csa2_jax.engram import hash_rows, history_ids
from csa2_jax.engram_host import HostRows, _Runs
from csa2_jax.safetensors_io import CheckpointError
from tests import random_checkpoint as rc
from tests.golden_sets import materialise
from tests.small_models import MINI_KNOBS, quick_compilation

SET = "tiny8_f32_noqat"
ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three layers with two n-gram memories: quick to compile in the many shapes of an engine."""
    config = rc.random_config(0, quantisable=True, **MINI_KNOBS | {"engram_layers": (0, 1)})
    return rc.write_checkpoint(
        tmp_path_factory.mktemp("host") / "release", config, rc.random_tensors(config, 1, "bf16")
    )


@pytest.fixture(scope="module", params=["release", "converted"])
def directory(request: pytest.FixtureRequest, small: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    if request.param == "release":
        return small
    target = tmp_path_factory.mktemp("host") / "orbax"
    convert(small, target, piece_bytes=2048)  # several files per table
    return target


def models(directory: Path) -> tuple[Bound, Bound]:
    options: dict[str, Any] = {"compute_dtype": "float32", "fake_quant": False}
    device, host = (Bound.of(load_checkpoint(directory, engram=where, **options)) for where in ("device", "host"))
    return device, host


def tokens(bound: Bound, count: int = 40) -> np.ndarray:
    return np.random.default_rng(0).integers(0, bound.config.vocab_size, (2, count))


def test_tables_on_the_host_give_the_same_logits_to_the_bit(directory: Path) -> None:
    on_device, on_host = models(directory)
    assert len(on_host.host_tables) == 2
    held = [".".join(map(str, key)) for key, _ in nnx.to_flat_state(on_host.structure.state(on_host.state))]
    assert not [path for path in held if path.startswith("engram_tables")]
    with quick_compilation():
        ids = tokens(on_device)
        found, expected = (np.asarray(forward(bound, ids).logits) for bound in (on_host, on_device))
    np.testing.assert_array_equal(found, expected)


def test_a_prompt_in_chunks_and_a_step_behind_it_read_tables_of_the_host(small: Path) -> None:
    found = []
    for bound in models(small):
        with quick_compilation():
            out, cache = prefill(bound, tokens(bound), init_cache(bound.config, 2, 48, "f32"), chunk=16)
            step, _ = forward(bound, tokens(bound)[:, :1], cache)
        found.append((np.asarray(out.logits), np.asarray(step.logits)))
    for one, two in zip(*found, strict=True):
        np.testing.assert_array_equal(one, two)


@pytest.mark.exhaustive  # logits are equal to the bit, as the tests above show; this is what stands on them
def test_engine_and_generation_work_on_tables_of_the_host(small: Path) -> None:
    on_device, on_host = models(small)
    prompts = [tokens(on_device)[0, :19].tolist(), tokens(on_device)[1, :7].tolist()]
    with quick_compilation():
        texts: list[Any] = [
            [(e.row, e.token) for e in generate(bound, prompts, max_new_tokens=6, stop_at_eos=False)]
            for bound in (on_device, on_host)
        ]
        assert texts[0] == texts[1]
        served = []
        for bound in (on_device, on_host):
            engine = Engine(bound, slots=2, max_length=32, chunk=16, storage="f32")
            ids = [engine.submit(p, max_new_tokens=6, stop_at_eos=False) for p in prompts]
            events = list(engine.run())
            served.append([[e.token for e in events if e.ticket == i] for i in ids])
    assert served[0] == served[1]


def test_rows_found_on_the_host_are_those_hashed_on_the_device() -> None:
    _, bound = models(materialise(SET))
    config, ids = bound.config, tokens(bound, 12)
    model = bound.structure.merge(bound.state)
    for slot, table in enumerate(bound.host_tables):
        history = np.full((2, config.engram_max_ngram_size - 1), -1, np.int32)
        compressed = history_ids(jax.numpy.asarray(ids), history, model.token_map[...], None)
        pad = model.token_map[...][config.engram_pad_token_id]
        expected = hash_rows(compressed, model.ngram_products[slot], config.engram_constants[slot], pad, 12)
        np.testing.assert_array_equal(table.rows_of(ids, 12), expected)
        np.testing.assert_array_equal(table.rows_of(ids, 5), np.asarray(expected)[:, 7:])


def test_prefill_reads_ahead(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows of a chunk are asked for in the background while the chunk before is computed."""
    _, bound = models(small)
    ids, asked, done = tokens(bound, 40), [], threading.Event()
    table = bound.host_tables[0]
    real = HostRows._touch

    def touch(self: HostRows, ids: np.ndarray, count: int) -> None:
        real(self, ids, count)
        if self is table:
            asked.append((ids.shape[1], count))
            done.set()

    monkeypatch.setattr(HostRows, "_touch", touch)
    with quick_compilation():
        prefill(bound, ids, init_cache(bound.config, 2, 48, "f32"), chunk=16, decoder="full")
    assert done.wait(10)
    assert asked[0] == (16 + 3, 16)


def test_runs_of_rows_are_one_table() -> None:
    rows = np.random.default_rng(0).integers(0, 256, (50, 3)).astype(np.uint8)
    runs = _Runs([(0, rows[:7]), (7, rows[7:8]), (8, rows[8:])])
    wanted = np.array([0, 6, 7, 8, 30, 49])
    np.testing.assert_array_equal(runs.take(wanted), rows[wanted])
    with pytest.raises(ValueError, match="must follow each other"):
        _Runs([(0, rows[:7]), (8, rows[8:])])


def test_damaged_scale_is_refused_when_its_row_is_read() -> None:
    _, bound = models(materialise(SET))
    table = bound.host_tables[0]
    start, scales = table._parts[1].runs[0]
    broken = np.array(scales)
    broken[7, 0] = 255
    table._parts[1] = _Runs([(start, broken)])
    table.gather(np.array([[6, 8]]))
    with pytest.raises(ValueError, match=r"row 7 of an n-gram table .* scale byte 255"):
        table.gather(np.array([[6, 7]]))


def test_tables_that_cannot_be_mapped_are_refused(tmp_path: Path) -> None:
    convert(materialise(SET), tmp_path / "orbax", piece_bytes=2048)
    victim = tmp_path / "orbax/params/engram_tables.0.weight/1.0"
    victim.write_bytes(victim.read_bytes()[:-1])
    with pytest.raises(
        CheckpointError,
        match=r"1\.0, rows of layers\.\d+\.engram\.embed\.weight, has \d+ bytes, not \d+: convert again",
    ):
        load_checkpoint(tmp_path / "orbax", engram="host")
    with pytest.raises(ValueError, match="engram='disk' must be 'device' or 'host'"):
        load_checkpoint(materialise(SET), engram="disk")  # type: ignore[arg-type]


def test_a_table_of_more_files_than_a_process_may_open_is_read(tmp_path: Path) -> None:
    source, target = materialise(SET), tmp_path / "orbax"
    convert(source, target, piece_bytes=128)
    most = 120
    assert sum(1 for table in (target / "params").glob("engram_tables.*") for _ in table.glob("*.0")) > 1.5 * most
    program = f"""
import resource
resource.setrlimit(resource.RLIMIT_NOFILE, ({most}, {most}))
import numpy as np
from csa2_jax import load_checkpoint
from csa2_jax.safetensors_io import TensorFiles
model = load_checkpoint({str(target)!r}, engram="host")
for layer, table in zip(model.config.engram_layer_ids, model.engram_tables):
    rows = np.random.default_rng(0).permutation(table.rows.shape[0])
    expected = TensorFiles({str(source)!r}).read(f"layers.{{layer}}.engram.embed.weight").view(np.uint8)
    np.testing.assert_array_equal(table.rows.gather(rows)[0], expected[rows])
print("read", len(rows))
"""
    run = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False, timeout=600
    )
    assert run.returncode == 0, run.stderr[-3000:]
    assert run.stdout.startswith("read ")
