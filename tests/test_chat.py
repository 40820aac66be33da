"""Conversations and `csa2 chat`: the engine's tokens through the prompt format, history, commands, interrupts."""

from __future__ import annotations

import functools
import io
import json
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from tokenizers import AddedToken, Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split

from csa2_jax import Bound, Engine, Sampling
from csa2_jax.cli import main
from csa2_jax.cli.chat import Terminal, read_history
from csa2_jax.conversation import Conversation, encode
from csa2_jax.prompt import encode_messages
from csa2_jax.prompt_format import ASSISTANT, BOS, EOS, SYSTEM, THINK, THINK_END, USER
from tests.small_models import MINI_KNOBS, load_random, quick_compilation


@functools.cache
def bound() -> Bound:
    return Bound.of(load_random(MINI_KNOBS | {"draft_stages": 1}))


@functools.cache
def tokenizer() -> Tokenizer:
    """A character per token, the special tokens whole; ids without a character are letters of another script."""
    size, special = bound().config.vocab_size, [BOS, EOS, USER, ASSISTANT, SYSTEM, THINK, THINK_END]
    letters = [*" abcdefghijklmnopqrstuvwxyz", *(chr(0x4E00 + i) for i in range(size - len(special) - 27))]
    made = Tokenizer(WordLevel({text: i for i, text in enumerate(special + letters)}, unk_token="a"))
    made.pre_tokenizer = Split("", "isolated")
    made.decoder = Fuse()
    made.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special])
    return made


def conversation(**options: Any) -> Conversation:
    engine = Engine(bound(), slots=1, max_length=192, chunk=16, storage="f32", tokenizer=tokenizer(), speculative=0.0)
    return Conversation(engine, **({"max_new_tokens": 12, "sampling": Sampling(0.0)} | options))


@pytest.fixture(autouse=True)
def quickly() -> Iterator[None]:
    with quick_compilation():
        yield


def test_a_turn_is_the_prompt_format_around_the_engines_tokens() -> None:
    talk = conversation(system="be kind")
    shown = "".join(text for _, text in talk.say("hello"))
    assert [m["role"] for m in talk.messages] == ["system", "user", "assistant"]
    assert talk.messages[-1]["content"] == shown
    prompt = encode_messages(talk.messages[:2], thinking_mode="chat").text
    assert prompt == BOS + SYSTEM + "be kind" + USER + "hello" + ASSISTANT + THINK_END
    ids = encode(tokenizer(), prompt)
    ticket = talk.engine.submit(ids, max_new_tokens=12, sampling=Sampling(0.0))
    expected = "".join(e.text or "" for e in talk.engine.stream(ticket))
    assert shown == expected
    assert talk.turn.tokens <= 12
    assert talk.turn.prompt_tokens == len(ids)


def test_the_second_turn_reuses_the_first_and_equals_a_cold_one() -> None:
    talk = conversation()
    list(talk.say("hello"))
    second = list(talk.say("and you"))
    assert talk.turn.reused_tokens > 8
    cold = conversation()
    cold.messages = talk.messages[:2]
    assert list(cold.say("and you")) == second
    assert cold.turn.reused_tokens == 0


def test_an_answer_cut_short_is_kept_as_far_as_it_came() -> None:
    talk = conversation()
    answer = talk.say("hello")
    first = next(answer)[1]
    answer.close()
    assert [m["role"] for m in talk.messages] == ["user", "assistant"]
    assert talk.messages[-1]["content"] == first
    assert not talk.engine.busy
    assert list(talk.say("more"))


def test_a_message_that_does_not_fit_leaves_the_conversation_alone() -> None:
    talk = conversation()
    with pytest.raises(ValueError, match="--max-length"):
        list(talk.say("x" * 300))
    assert talk.messages == []
    talk.say("never asked for").close()
    assert talk.messages == []


def test_retry_answers_the_same_message_with_another_seed() -> None:
    talk = conversation(sampling=Sampling(1.5, seed=3))
    first = list(talk.say("hello"))
    again = list(talk.retry())
    assert [m["role"] for m in talk.messages] == ["user", "assistant"]
    assert first != again
    with pytest.raises(ValueError, match="no message"):
        list(conversation().retry())


def session(*lines: str, **options: Any) -> tuple[str, Conversation]:
    """What a terminal prints when these lines are typed."""
    talk, typed = conversation(**options), iter(lines)

    def read() -> str:
        try:
            return next(typed)
        except StopIteration:
            raise EOFError from None

    printed = io.StringIO()
    assert Terminal(talk, Console(file=printed, width=200), read).run() == 0
    return printed.getvalue(), talk


def test_terminal_streams_answers_and_tells_speed_and_acceptance() -> None:
    printed, talk = session("hello", "/stats", "", "/exit", "never read")
    assert talk.messages[-1]["content"] in printed
    assert "tokens/s" in printed
    assert "tokens a round" in printed
    assert "drafts kept, by place" in printed
    assert "kept for reuse" in printed
    assert len(talk.messages) == 2


def test_terminal_commands_do_what_help_says(tmp_path: Path) -> None:
    path = tmp_path / "talk.json"
    printed, talk = session(
        "/system be kind", "hello", f"/save {path}", "/temperature 0.5", "/thinking on", "/reset", f"/load {path}"
    )
    assert json.loads(path.read_text(encoding="utf-8")) == talk.messages
    assert [m["role"] for m in talk.messages] == ["system", "user", "assistant"]
    assert talk.sampling.temperature == 0.5
    assert talk.thinking_mode == "thinking"
    assert "3 messages" in printed
    helped, _ = session("/help")
    assert all(f"/{name}" in helped for name in ("help", "retry", "reset", "save", "load", "stats", "exit"))


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("/nothing", "/nothing is no command"),
        ("/thinking maybe", "/thinking on or /thinking off"),
        ("/temperature hot", "takes a number"),
        ("/temperature -1", "at least"),
        ("/save", "name of a file"),
        ("/load /no/such/file", "No such file"),
        ("/retry", "no message"),
        ("/[/x]", "/[/x] is no command"),
        ("/load [/b]", "No such file"),
    ],
)
def test_terminal_tells_what_is_wrong_and_goes_on(line: str, words: str) -> None:
    printed, _ = session(line, "/help")
    assert words in printed
    assert "/exit" in printed


def test_terminal_survives_an_interrupt() -> None:
    talk = conversation()
    answers = talk.say

    def interrupted(text: str) -> Generator[tuple[str, str], None, None]:
        stream = answers(text)
        yield next(stream)
        stream.close()
        raise KeyboardInterrupt

    talk.say = interrupted  # type: ignore[method-assign]
    typed = iter(["hello"])
    printed = io.StringIO()

    def read() -> str:
        for line in typed:
            return line
        raise EOFError

    assert Terminal(talk, Console(file=printed, width=200), read).run() == 0
    assert "ended here" in printed.getvalue()
    assert [m["role"] for m in talk.messages] == ["user", "assistant"]


def test_history_files_are_checked(tmp_path: Path) -> None:
    path = tmp_path / "talk.json"
    for text, words in (("{", "is no JSON"), ("{}", "list of messages"), ('[{"role": "king"}]', "king")):
        path.write_text(text, encoding="utf-8")
        with pytest.raises(ValueError, match=words):
            read_history(path)


def test_chat_without_a_tokenizer_says_what_to_put_there(capsys: pytest.CaptureFixture[str]) -> None:
    from tests.golden_sets import materialise

    assert main(["chat", "--model", str(materialise("tiny8_f32_noqat"))]) == 2
    assert "tokenizer.json" in capsys.readouterr().err
