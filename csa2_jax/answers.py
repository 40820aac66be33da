"""One answer as it grows: text that is certain, stop strings that may straddle tokens, and when it is over."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from csa2_jax.tokenizer import TextStream

if TYPE_CHECKING:
    from tokenizers import Tokenizer

Finish = Literal["eos", "length", "stop", "cancelled", "error"]


class Answer:
    """Takes tokens, gives text.

    A stop string ends the answer and is not part of it; text that may be the beginning of one is held back. The end-of-sequence
    token has no text.
    """

    def __init__(
        self, tokenizer: Tokenizer | None, prompt: Sequence[int], limit: int, stop: Sequence[str] | str, eos: int | None
    ) -> None:
        self.stop = (stop,) if isinstance(stop, str) else tuple(stop)
        if any(not isinstance(text, str) or not text for text in self.stop):
            raise ValueError(f"{stop=} must be strings that are not empty")
        if self.stop and tokenizer is None:
            raise ValueError(f"{stop=} needs a tokenizer: without one there is no text to find it in")
        self.limit, self.eos, self.made = limit, eos, 0
        self.finished: Finish | None = None
        self._stream = None if tokenizer is None else TextStream(tokenizer, prompt[-32:])
        self._held = ""

    @property
    def left(self) -> int:
        """Tokens that may still come."""
        return 0 if self.finished else self.limit - self.made

    def add(self, token: int) -> str | None:
        """The text that became certain with this token (None without a tokenizer); sets `finished` on the last one."""
        self.made += 1
        if token == self.eos:
            self.finished = "eos"
        elif self.made >= self.limit:
            self.finished = "length"
        if self._stream is None:
            return None
        text = self._held + ("" if self.finished == "eos" else self._stream.add(token))
        if self.finished:
            text += self._stream.finish()
        ends = [at for at in (text.find(s) for s in self.stop) if at >= 0]
        if ends:
            self.finished, self._held = "stop", ""
            return text[: min(ends)]
        kept = 0 if self.finished else self._beginning(text)
        self._held = text[len(text) - kept :]
        return text[: len(text) - kept]

    def _beginning(self, text: str) -> int:
        """How many characters at the end of `text` may begin a stop string."""
        longest = max((len(s) for s in self.stop), default=1) - 1
        for count in range(min(longest, len(text)), 0, -1):
            if any(s.startswith(text[-count:]) for s in self.stop):
                return count
        return 0
