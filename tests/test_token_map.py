"""Where the n-gram memory's token map comes from when a checkpoint is loaded, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from csa2_jax.checkpoint import CheckpointError, load_checkpoint
from csa2_jax.config import ModelConfig
from csa2_jax.token_map import find_token_map
from tests import golden_sets
from tests import random_checkpoint as rc


def make(**knobs: Any) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """A small bf16 checkpoint with one n-gram memory, unless the knobs say otherwise."""
    config = rc.random_config(0, quantisable=True, **({"engram_layers": (0,), "draft_stages": 0} | knobs))
    return config, rc.random_tensors(config, 0)


def with_vocabulary(directory: Path, texts: list[str]) -> Path:
    """A tokenizer.json of whole-word tokens beside a config that declares 40 compressed ids."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    Tokenizer(WordLevel({text: i for i, text in enumerate(texts)}, unk_token=texts[0])).save(
        str(directory / "tokenizer.json")
    )
    return directory


@pytest.fixture
def with_memory(tmp_path: Path) -> tuple[Path, ModelConfig]:
    config, tensors = make(vocab_size=64)
    config["text_config"]["engram_compressed_vocab_size"] = 40
    return rc.write_checkpoint(tmp_path, config, tensors), ModelConfig.from_hf(config)


def test_token_map_comes_from_the_tokenizer(with_memory: tuple[Path, ModelConfig]) -> None:
    directory, config = with_memory
    texts = [f"w{i}" for i in range(40)] + [f"W{i}" for i in range(24)]
    found = find_token_map(with_vocabulary(directory, texts), config)
    assert found is not None
    assert found.tolist() == [*range(40), *range(24)]
    model = load_checkpoint(directory)
    np.testing.assert_array_equal(model.token_map[...], found)  # type: ignore[index]


def test_token_map_of_another_tokenizer_is_refused_with_both_numbers(with_memory: tuple[Path, ModelConfig]) -> None:
    directory, config = with_memory
    with_vocabulary(directory, [f"w{i}" for i in range(41)] + [f"W{i}" for i in range(23)])
    with pytest.raises(CheckpointError, match=r"tokenizer\.json gives 41 .*engram_compressed_vocab_size=40"):
        load_checkpoint(directory)
    with_vocabulary(directory, [f"w{i}" for i in range(63)])
    with pytest.raises(CheckpointError, match="has 63 tokens but vocab_size=64"):
        find_token_map(directory, config)


def test_token_map_may_lie_beside_the_model(with_memory: tuple[Path, ModelConfig]) -> None:
    directory, config = with_memory
    given = np.arange(64) % 40
    np.save(directory / "token_map.npy", given)
    found = find_token_map(directory, config)
    assert found is not None
    assert found.dtype == np.int32
    np.testing.assert_array_equal(found, given)
    for wrong, words in (
        (np.arange(64), "gives 64 compressed ids"),
        (np.arange(64) % 40 + 1, "gives 40 compressed ids from 1 to 40"),
        (given[:-1], r"integers \[64\] .*int64 \[63\]"),
        (given.astype(np.float32), "float32"),
    ):
        np.save(directory / "token_map.npy", wrong)
        with pytest.raises(CheckpointError, match=words):
            find_token_map(directory, config)
    np.save(directory / "token_map.npy", np.asarray([{}] * 64, dtype=object), allow_pickle=True)
    with pytest.raises(CheckpointError, match=r"token_map\.npy"):
        find_token_map(directory, config)


def test_token_map_that_cannot_be_found_says_what_to_put_there(with_memory: tuple[Path, ModelConfig]) -> None:
    directory, _ = with_memory
    with pytest.raises(CheckpointError, match=r"tokenizer\.json beside config\.json.*token_map\.npy \(int32 \[64\]\)"):
        load_checkpoint(directory)


def test_token_map_of_recorded_checkpoints_is_half_the_id() -> None:
    directory = golden_sets.materialise("tiny8_f32_noqat")
    found = find_token_map(directory, ModelConfig.from_hf(directory))
    np.testing.assert_array_equal(found, np.arange(256) // 2)


def test_token_map_is_not_needed_without_a_memory(tmp_path: Path) -> None:
    config, tensors = make(engram_layers=())
    directory = rc.write_checkpoint(tmp_path, config, tensors)
    assert find_token_map(directory, ModelConfig.from_hf(directory)) is None
    assert load_checkpoint(directory).token_map is None
