"""A conversation with a model: messages in, the answer streamed as reasoning, content and tool calls, history kept.

Each turn is encoded whole and handed to an `Engine`, which computes only what is new: the turns before are in its prefix store.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Generator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from csa2_jax.engine import Engine
from csa2_jax.prompt import CompletionStream, PromptError, encode_messages
from csa2_jax.prompt_format import ASSISTANT, BOS, EOS, SYSTEM, THINK, THINK_END, USER
from csa2_jax.sampling import Sampling

if TYPE_CHECKING:
    from tokenizers import Tokenizer


SPECIAL = (BOS, EOS, SYSTEM, USER, ASSISTANT, THINK, THINK_END)


@dataclasses.dataclass
class Turn:
    """How the last answer came: times in seconds, tokens, and why it ended."""

    prompt_tokens: int = 0
    reused_tokens: int = 0
    tokens: int = 0
    first_token: float = 0.0
    rest: float = 0.0
    finished: str = ""
    note: str = ""

    @property
    def rate(self) -> float:
        """Tokens per second behind the first."""
        return (self.tokens - 1) / self.rest if self.tokens > 1 and self.rest > 0 else float("nan")


class Conversation:
    """Messages so far, and how to go on.

    thinking_mode: "thinking" or "chat". effort: see `encode_messages`. max_new_tokens: of an answer, also bounded by the engine.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        system: str | None = None,
        thinking_mode: str = "chat",
        effort: str | int | None = None,
        sampling: Sampling | None = None,
        max_new_tokens: int = 1024,
    ) -> None:
        if engine.tokenizer is None:
            raise ValueError("a conversation needs an engine with a tokenizer")
        self.engine, self.tokenizer = engine, engine.tokenizer
        split = [text for text in SPECIAL if len(encode(self.tokenizer, text)) != 1]
        if split:
            raise ValueError(f"the tokenizer has no single token for {split}: it belongs to another model")
        self.thinking_mode, self.effort = thinking_mode, effort
        self.sampling, self.max_new_tokens = sampling or Sampling(), max_new_tokens
        self.messages: list[dict[str, Any]] = []
        self.turn = Turn()
        if system:
            self.messages.append({"role": "system", "content": system})

    def ids(self) -> list[int]:
        """The prompt of the messages as they are."""
        prompt = encode_messages(self.messages, thinking_mode=self.thinking_mode, reasoning_effort=self.effort)
        return encode(self.tokenizer, prompt.text)

    def say(self, text: str) -> Generator[tuple[str, str], None, None]:
        """Send a user message and stream the answer as (kind, text); kinds: reasoning, content, tool_call.

        The answer joins the messages when it ends, or as far as it came if the iterator is closed early. If the message cannot
        be sent (too long, say), the error leaves the conversation as it was. Nothing is sent before the iterator is asked.
        """
        self.messages.append({"role": "user", "content": text})
        try:
            ids = self.ids()
            room = self.engine.max_length - len(ids) + 1
            if room < 1:
                raise ValueError(
                    f"the conversation has {len(ids)} tokens, this engine takes {self.engine.max_length}: forget it with /reset, "
                    "or start with a longer --max-length"
                )
            reused = self.engine.prefixes.reused_tokens
            limit = min(self.max_new_tokens, room)
            ticket = self.engine.submit(ids, max_new_tokens=limit, sampling=self.sampling)
        except BaseException:
            self.messages.pop()
            raise
        yield from self._answer(ticket, len(ids), reused)

    def retry(self) -> Generator[tuple[str, str], None, None]:
        """Answer the last user message again, with another seed; if that cannot be, everything stays as it is."""
        asked = [i for i, m in enumerate(self.messages) if m["role"] == "user"]
        if not asked:
            raise ValueError("there is no message to answer again")
        before, sampling = list(self.messages), self.sampling
        text = self.messages[asked[-1]]["content"]
        del self.messages[asked[-1] :]
        self.sampling = dataclasses.replace(sampling, seed=sampling.seed + 1 if sampling.seed < 2**63 - 1 else 0)
        try:
            yield from self.say(text)
        except Exception:
            self.messages, self.sampling = before, sampling
            raise

    def reset(self) -> None:
        """Forget all but the system message."""
        self.messages = [m for m in self.messages[:1] if m["role"] == "system"]

    def _answer(self, ticket: int, prompt_tokens: int, reused_before: int) -> Generator[tuple[str, str], None, None]:
        stream, shown = CompletionStream(thinking_mode=self.thinking_mode), {"reasoning": "", "content": ""}
        turn = self.turn = Turn(prompt_tokens)
        started = first = time.perf_counter()
        broken = False
        try:
            with self.engine.stream(ticket) as events:
                for event in events:
                    if event.token is not None:
                        turn.tokens += 1
                        now = time.perf_counter()
                        if turn.tokens == 1:
                            first, turn.first_token = now, now - started
                            turn.reused_tokens = self.engine.prefixes.reused_tokens - reused_before
                        turn.rest = now - first
                    turn.finished = event.finished or ""
                    text = (event.text or "") + (EOS if event.finished == "eos" else "")
                    pieces: Sequence[tuple[str, str]] = ()
                    if not broken:
                        try:
                            pieces = stream.feed(text)
                        except PromptError as error:
                            broken, turn.note = True, str(error)
                    if broken and text:
                        pieces = [("content", text.removesuffix(EOS))]
                    for kind, piece in pieces:
                        shown[kind] = shown.get(kind, "") + piece
                        yield kind, piece
        finally:
            self.messages.append(_message(stream, shown, turn, broken))


def _message(stream: CompletionStream, shown: Mapping[str, str], turn: Turn, broken: bool) -> dict[str, Any]:
    """The answer as a message; what does not follow the format stays as the text it is."""
    if not broken:
        try:
            return stream.finish(cut_off=turn.finished != "eos")
        except PromptError as error:
            turn.note = str(error)
    message: dict[str, Any] = {"role": "assistant", "content": shown["content"]}
    if shown["reasoning"]:
        message["reasoning_content"] = shown["reasoning"]
    return message


def encode(tokenizer: Tokenizer, text: str) -> list[int]:
    """Ids of prompt text, whose special tokens are written out."""
    return tokenizer.encode(text, add_special_tokens=False).ids
