"""The model that comes with the package: a miniature of the released pattern that has learned, and what the commands take."""

from __future__ import annotations

import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import csa2_jax
from csa2_jax import ModelConfig, default_model, forward, load_checkpoint
from csa2_jax.cli import main
from csa2_jax.conversion.opening import open_checkpoint
from csa2_jax.plan import Mode
from csa2_jax.tokenizer import find_tokenizer
from tests.small_models import quick_compilation

ROOT = Path(__file__).resolve().parents[1]


@functools.cache
def config() -> ModelConfig:
    return ModelConfig.from_hf(default_model())


def test_it_is_small_whole_and_in_the_release_layout() -> None:
    directory = default_model()
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {p.name for p in directory.iterdir()}
    assert sum(p.stat().st_size for p in directory.iterdir() if p.is_file()) <= 20_000_000
    assert open_checkpoint(directory).config == config()
    assert csa2_jax.default_model() == directory


def test_it_has_every_part_of_the_released_model() -> None:
    plan = config().plan
    assert {spec.mode for spec in plan.layers} == {Mode.SWA, Mode.FULL, Mode.REINDEX, Mode.REUSE}
    assert plan.ratios == (2, 1)
    assert config().has_candidates
    assert config().engram_layer_ids
    assert config().num_nextn_predict_layers


def test_it_has_learned_python() -> None:
    """Bits per byte of a file that it has not seen (one of ours), with the roundings of serving: two thirds of an untrained
    model's at most, and two thirds of what compressing the same text takes."""
    import gzip

    text = (ROOT / "csa2_jax" / "sampling.py").read_text(encoding="utf-8")
    tokenizer = find_tokenizer(default_model(), config())
    assert tokenizer is not None
    ids = [config().bos_token_id, *tokenizer.encode(text, add_special_tokens=False).ids][:512]
    seen = len(tokenizer.decode(ids[1:]).encode())
    model = load_checkpoint(default_model())
    with quick_compilation():
        logits = forward(model, [ids]).logits[0, :-1]
    nats = -jnp.take_along_axis(jax.nn.log_softmax(logits), np.array(ids[1:])[:, None], axis=-1).sum()
    bits = float(nats) / np.log(2) / seen
    untrained = np.log2(config().vocab_size) * (len(ids) - 1) / seen
    assert bits < untrained * 2 / 3
    assert bits < 8 * len(gzip.compress(text.encode()[:seen], 9)) / seen * 2 / 3


def test_generate_takes_it_when_no_model_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "--prompt", "import os\n\n\ndef ", "--max-new-tokens", "8", "--quiet"]) == 0
    assert len(capsys.readouterr().out.strip()) > 3


def test_chat_takes_it_when_no_model_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = iter(["What does os.path.join do?", "/stats", "/exit"])
    monkeypatch.setattr("builtins.input", lambda prompt="": next(lines))
    with quick_compilation():
        assert main(["chat", "--max-new-tokens", "12", "--max-length", "128", "--temperature", "0"]) == 0
    text = capsys.readouterr().out
    assert "comes with the package" in text
    assert "tokens a round" in text
