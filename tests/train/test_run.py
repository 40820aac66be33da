"""Whole runs: killed at any moment and taken up again, stopped by what is wrong, adapters on stored codes."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from csa2_jax import forward, load_checkpoint
from csa2_jax.adapters import attach, linears, load_adapters, merge, save_adapters
from tests.golden_sets import materialise
from tests.small_models import quick_compilation
from train.__main__ import main
from train.checkpoints import Checkpoints, CheckpointsError, KeepSettings
from train.report import read_metrics
from train.settings import Settings, read_settings
from train.step import TrainState

ROOT = Path(__file__).parents[2]

# Two layers and a pool: quick to compile. The bytes of a few files are its data.
MODEL: dict[str, Any] = {
    "vocab_size": 260,
    "hidden_size": 32,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "head_dim": 32,
    "qk_rope_head_dim": 16,
    "q_lora_rank": 32,
    "o_lora_rank": 16,
    "o_groups": 1,
    "max_position_embeddings": 256,
    "n_routed_experts": 2,
    "num_experts_per_tok": 1,
    "sliding_window": 8,
    "compress_ratios": [0, 2],
    "kv_source_layer_ids": [1],
    "index_source_layer_ids": [1],
    "index_n_heads": 2,
    "index_head_dim": 32,
    "index_topk": 4,
    "hc_mult": 2,
    "hc_sinkhorn_iters": 3,
}
SETTINGS = """
[model]
config = "model.json"
compute_dtype = "float32"
[data]
train = ["texts"]
tokenizer = "bytes"
held_out_every = 4
tokens = 64
rows = 4
micro_batches = 2
[run]
out = "out"
steps = 30
log_every = 1
evaluate_every = 10
evaluate_batches = 2
tensorboard = false
[optimizer]
peak = 1e-2
end = 1e-3
warmup = 4
[checkpoints]
save_every = 5
keep = 2
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    config = {
        "model_type": "deepseek_v41",
        "dtype": "float32",
        "text_config": {"model_type": "deepseek_v41_text", **MODEL},
    }
    (tmp_path / "model.json").write_text(json.dumps(config))
    (tmp_path / "texts").mkdir()
    for i in range(12):
        (tmp_path / "texts" / f"{i}.txt").write_text(
            f"{'abcdefgh'[i % 8]} says: the sum of {i} and {i} is {2 * i}. " * 12
        )
    (tmp_path / "run.toml").write_text(SETTINGS)
    return tmp_path


def command(folder: Path, *changes: str) -> list[str]:
    return [
        sys.executable,
        "-m",
        "train",
        "--config",
        str(folder / "run.toml"),
        *(["--set", *changes] if changes else []),
    ]


def start(folder: Path, *changes: str) -> subprocess.Popen[str]:
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}  # quick to compile
    return subprocess.Popen(command(folder, *changes), cwd=ROOT, stderr=subprocess.PIPE, text=True, env=environment)


def losses(folder: Path, out: str = "out") -> dict[tuple[int, str], float]:
    return {(r["step"], r["kind"]): r["lm"] for r in read_metrics(folder / out / "metrics.jsonl")}


@pytest.mark.slow
def test_a_run_that_is_killed_goes_on_with_the_same_losses_to_the_bit(folder: Path) -> None:
    """kill -9 at three moments, a polite stop at a fourth; the whole run beside it was never stopped."""
    whole = start(folder, "run.out=whole")
    _, text = whole.communicate(timeout=300)
    assert whole.returncode == 0, text
    expected = losses(folder, "whole")
    assert expected[30, "train"] < 0.8 * expected[1, "train"]  # it learns
    for step, how in ((3, signal.SIGKILL), (12, signal.SIGKILL), (17, signal.SIGTERM), (26, signal.SIGKILL)):
        process = start(folder)
        deadline = time.monotonic() + 200
        metrics = folder / "out" / "metrics.jsonl"
        while process.poll() is None and time.monotonic() < deadline:
            if metrics.is_file() and f'"step": {step},' in metrics.read_text():
                process.send_signal(how)
                break
            time.sleep(0.005)
        _, text = process.communicate(timeout=200)
        assert process.returncode in (-how, 130, 0), text
    process = start(folder)
    _, text = process.communicate(timeout=300)
    assert process.returncode == 0, text
    assert losses(folder) == expected
    assert sorted(int(p.name) for p in (folder / "out" / "checkpoints").iterdir()) == [25, 30]
    assert (folder / "out" / "curves.png").stat().st_size > 10_000
    model = load_checkpoint(folder / "out" / "model", compute_dtype="float32", fake_quant=False)
    assert forward(model, [[0, 50, 60]]).logits.shape == (1, 3, 260)


def test_a_run_that_was_begun_otherwise_is_not_gone_on_with(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--config", str(folder / "run.toml"), "--set", "run.steps=1", "run.export="]
    assert main(arguments) == 0
    assert main([*arguments, "data.rows=2"]) == 2
    message = capsys.readouterr().err
    assert "data.rows=2 (was 4)" in message
    assert "choose another run.out" in message


def test_a_loss_that_is_no_number_stops_the_run_and_names_the_module(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rates that blow the weights up: the step, the first layer that broke, the checkpoint that is still good."""
    code = main(
        [
            "--config",
            str(folder / "run.toml"),
            "--set",
            "optimizer.peak=1e30",
            "optimizer.end=0",
            "checkpoints.save_every=1",
        ]
    )
    message = " ".join(capsys.readouterr().err.split())
    assert code == 1
    assert (
        "the loss is nan" in message or "the loss is inf" in message or "norm nan" in message or "norm inf" in message
    )
    assert (
        "in layer" in message
        or "The gradient of" in message
        or "The parameter" in message
        or "the gradient of" in message
    )
    assert "the newest good checkpoint is that of step" in message
    whole = sorted(int(p.name) for p in (folder / "out" / "checkpoints").iterdir())
    assert whole


def test_a_dry_run_shows_where_every_parameter_goes(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--config", str(folder / "run.toml"), "--dry-run"]) == 0
    shown = capsys.readouterr().out
    for words in (
        "router bias",
        "expert loads",
        "embeddings and head",
        "sinkhorn",
        "query heads",
        "muon",
        "norms",
        "adamw",
    ):
        assert words in shown
    assert "2 x 4 rows of 64 tokens = 512 tokens" in shown
    assert not (folder / "out" / "checkpoints").exists()


def test_data_and_settings_that_are_wrong_end_with_one_line(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for changes, words in (
        (["data.train=nothing"], "'nothing' names no data"),
        (["model.config=none.json"], "none.json does not exist"),
        (["data.tokens=512"], "data.tokens=512 exceeds the model's max_position_embeddings=256"),
        (['run.train=["nothing"]'], "no parameter is left to train"),
        (["run.step=3"], "did you mean 'steps'"),
    ):
        assert main(["--config", str(folder / "run.toml"), "--set", "run.out=o2", *changes]) == 2
        message = capsys.readouterr().err
        assert words in message
        assert message.count("\n") == 1, message


def tiny_state(step: int = 0) -> TrainState:
    arrays = {"w": jnp.full((4, 4), float(step))}
    return TrainState(
        jnp.asarray(step),
        arrays,
        {"bias": jnp.zeros(3)},
        {"codes": jnp.zeros(2, jnp.uint8)},
        {"m": (arrays, jnp.ones(2))},
    )


def test_checkpoints_hold_what_moves_and_keep_the_newest(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path / "c", KeepSettings(save_every=2, keep=2, keep_every=4))
    for step in (2, 4, 6, 8, 10):
        checkpoints.save(tiny_state(step), f'{{"at": {step}}}')
    checkpoints.finish()
    checkpoints.close()
    assert sorted(int(p.name) for p in (tmp_path / "c").iterdir()) == [4, 8, 10]
    again = Checkpoints(tmp_path / "c", KeepSettings(save_every=2))
    state, place = again.restore(tiny_state())
    assert place == '{"at": 10}'
    assert int(state.step) == 10
    np.testing.assert_array_equal(state.trained["w"], np.full((4, 4), 10.0))
    np.testing.assert_array_equal(state.optimizer["m"][0]["w"], np.full((4, 4), 10.0))
    again.close()


def test_a_checkpoint_that_cannot_be_written_says_what_is_still_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints = Checkpoints(tmp_path / "c", KeepSettings(save_every=1))
    checkpoints.save(tiny_state(1), "{}")
    checkpoints.finish()

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoints._manager, "save", full)
    with pytest.raises(
        CheckpointsError, match=r"step 2 could not be written.*No space left.*whole ones: steps 1\. Free space"
    ):
        checkpoints.save(tiny_state(2), "{}")
    with pytest.raises(CheckpointsError, match="holds no checkpoint"):
        Checkpoints(tmp_path / "none", KeepSettings()).restore(tiny_state())


LORA = """
[model]
checkpoint = "model"
compute_dtype = "float32"
weights = "stored"
[lora]
rank = 4
alpha = 8
targets = ["layers.attn.*", "layers.ffn.experts.*", "compressors.*", "engram.wkv"]
[data]
train = ["lines.jsonl"]
held_out = ["held_out.jsonl"]
tokenizer = "model/tokenizer.json"
tokens = 32
rows = 4
[run]
out = "out"
steps = 30
evaluate_every = 30
tensorboard = false
[optimizer]
peak = 2e-2
end = 2e-3
warmup = 3
[loss]
index_domain = "visible"
remat = "none"
"""


def write_words(path: Path, vocabulary: int) -> None:
    """A tokenizer of the words "0", "1", ...: text that is ids."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({str(i): i for i in range(vocabulary)}, unk_token="0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(path))


@pytest.mark.slow
def test_adapters_on_the_recorded_fp8_checkpoint_lower_a_held_out_loss(tmp_path: Path) -> None:
    """Codes stay as they are, adapters alone are trained, saved, loaded, merged: the same logits each time."""
    source = materialise("tiny8_fp8")
    shutil.copytree(source, tmp_path / "model")
    model = load_checkpoint(source, compute_dtype="float32", fake_quant=False)
    write_words(tmp_path / "model" / "tokenizer.json", model.config.vocab_size)
    np.save(tmp_path / "model" / "token_map.npy", (np.arange(model.config.vocab_size) // 2).astype(np.int32))
    rng = np.random.default_rng(0)
    for name, count in (("lines", 40), ("held_out", 8)):  # ids that count up by 3, from anywhere
        texts = [" ".join(str((a + 3 * i) % 200 + 20) for i in range(28)) for a in rng.integers(0, 200, count)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(json.dumps({"text": t}) for t in texts))
    (tmp_path / "run.toml").write_text(LORA)
    settings: Settings = read_settings(tmp_path / "run.toml")
    from train.loop import prepare, run

    with quick_compilation():
        assert all(name.endswith((".lora_a", ".lora_b")) for name in prepare(settings).parts.trained)
        run(settings)
    before, after = (losses(tmp_path)[step, "held out"] for step in (0, 30))
    assert after < 0.7 * before, (before, after)
    adapted = load_checkpoint(source, compute_dtype="float32", fake_quant=False)
    assert len(load_adapters(adapted, tmp_path / "out" / "adapters")) == 14
    tokens = np.array([[30, 33, 36, 39]])
    with quick_compilation():
        logits = [np.asarray(forward(m, tokens).logits) for m in (model, adapted, merge(adapted))]
    assert np.abs(logits[1] - logits[0]).max() > 0.1
    np.testing.assert_allclose(logits[2], logits[1], rtol=0, atol=1e-3)


def test_adapters_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    from tests.small_models import load_random
    from tests.train.small import KNOBS

    model = load_random(KNOBS, weights="float32")
    with pytest.raises(
        ValueError, match=r"'layers.atn.\*' matches no linear of this model; there are compressors.m1.wk"
    ):
        attach(model, ["layers.atn.*"], 2, 4.0)
    with pytest.raises(ValueError, match="has no adapters to save"):
        save_adapters(model, tmp_path / "none")
    attach(model, ["layers.attn.wq_a", "layers.ffn.experts.w1"], 2, 4.0)
    with pytest.raises(ValueError, match=r"layers.attn.wq_a has an adapter already"):
        attach(model, ["layers.attn.wq_*"], 2, 4.0)
    save_adapters(model, tmp_path / "a")
    other = load_random(KNOBS | {"hidden_size": 64}, weights="float32")
    with pytest.raises(ValueError, match=r"lora_A.weight has shape \[2, 32\], the model wants \[2, 64\]"):
        load_adapters(other, tmp_path / "a")
    assert all(linear.lora_a is None for _, linear in linears(other))
    with pytest.raises(FileNotFoundError, match="holds no adapters"):
        load_adapters(other, tmp_path / "nothing")
    assert jax.tree.leaves(model.layers.attn.wq_a.lora_b[...])[0].shape[-1] == 2
