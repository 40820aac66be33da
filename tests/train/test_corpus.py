"""The text of the shipped model, and the baselines that its loss is held against."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

from csa2_jax import ModelConfig
from csa2_jax.prompt_format import ASSISTANT, USER
from train.baselines import NGrams, gzip_bits_per_byte
from train.corpus import SPECIAL, answered_questions, documents, fit_config, held_out, train_tokenizer

TEMPLATE = Path(__file__).parents[2] / "configs" / "train_default.json"
SOURCE = '''"""Tools for boxes, which hold things."""
class Box:
    """A box that holds one thing.

    More about it.
    """
    def __init__(self, thing, *, lid=True): ...
    def open(self, gently: bool = False):
        """Open the box, and return what is in it."""
    def _hidden(self):
        """Nobody asks about this one."""
def pack(*things): "Put things into boxes, one each."
def plain(): ...
'''


def test_docstrings_become_questions_and_answers() -> None:
    found = {one.name: one for one in answered_questions(SOURCE, "boxes")}
    assert set(found) == {"boxes", "boxes.Box", "boxes.Box.open", "boxes.pack"}
    assert found["boxes.Box"].answer.endswith("A box that holds one thing.")
    for one in found.values():
        assert one.name in one.question
        if one.question.startswith("How do I call"):
            assert one.answer.startswith("`")
    calls = {
        one.answer.split("`")[1] for n in range(40) for one in answered_questions(SOURCE, f"m{n}") if "`" in one.answer
    }
    assert "m1.Box(thing, *, lid=True)" in calls or any(c.endswith("Box(thing, *, lid=True)") for c in calls)
    assert any(c.endswith("Box.open(gently: bool=False)") for c in calls)


def test_documents_are_files_and_prompts_and_broken_files_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "boxes.py").write_text(SOURCE)
    (tmp_path / "broken.py").write_text("def (:\n")
    (tmp_path / "test").mkdir()
    (tmp_path / "test" / "test_boxes.py").write_text(SOURCE)
    found = dict(documents(tmp_path))
    assert set(found) == {"boxes.py", "boxes", "boxes.Box", "boxes.Box.open", "boxes.pack"}
    assert found["boxes.py"]["text"].startswith("# boxes.py\n")
    prompt = found["boxes.pack"]["prompt"]
    assert prompt.startswith(USER)
    assert ASSISTANT in prompt
    share = np.mean([held_out(f"name {i}") for i in range(2000)])
    assert 0.03 < share < 0.07


def test_a_tokenizer_knows_the_prompt_format_and_the_configuration_fits_it(tmp_path: Path) -> None:
    texts = [SOURCE, "other text: äöü " * 20]
    train_tokenizer(texts, 400).save(str(tmp_path / "tokenizer.json"))
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    for i, token in enumerate(SPECIAL):
        assert tokenizer.token_to_id(token) == i
    for text in (*texts, "日本 never seen"):
        assert tokenizer.decode(tokenizer.encode(text).ids) == text
    config = ModelConfig.from_hf(fit_config(TEMPLATE, tmp_path / "tokenizer.json"))
    assert config.vocab_size == tokenizer.get_vocab_size()
    assert config.engram_compressed_vocab_size <= config.vocab_size
    modes = {spec.mode.value for spec in config.plan.layers}
    assert modes == {"SWA", "FULL", "REINDEX", "REUSE"}
    assert set(config.plan.ratios) == {1, 2}
    assert json.loads(TEMPLATE.read_text())["text_config"]["vocab_size"] == 2048


def test_n_grams_are_those_of_the_formula() -> None:
    """Against plain dictionaries."""
    rng = np.random.default_rng(0)
    tokens, other = rng.integers(0, 5, 300), rng.integers(0, 5, 80)

    def probability(history: tuple[int, ...], word: int) -> float:
        seen: dict[int, int] = {}
        n = len(history)
        for i in range(n, len(tokens)):
            if tuple(tokens[i - n : i]) == history:
                seen[int(tokens[i])] = seen.get(int(tokens[i]), 0) + 1
        below = probability(history[1:], word) if n else 1 / 5
        total = sum(seen.values())
        return (seen.get(word, 0) + len(seen) * below) / (total + len(seen)) if total else below

    expected = [-math.log2(probability(tuple(other[i - 2 : i]), int(other[i]))) for i in range(2, 80)]
    assert NGrams(tokens, 3, 5).bits_per_token(other) == pytest.approx(np.mean(expected), rel=1e-12)
    with pytest.raises(ValueError, match=r"order=9 must be at most 5"):
        NGrams(tokens, 9, 2048)


def test_gzip_counts_bits_per_byte() -> None:
    assert gzip_bits_per_byte(["a" * 10000], False) < 0.1
    assert gzip_bits_per_byte(["ab", "cd"], False) > 8 > gzip_bits_per_byte(["abcd" * 500], True)
