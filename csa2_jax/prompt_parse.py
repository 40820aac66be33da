"""Completions back into messages, at once or as the text arrives.

    completion = [reasoning </think>] content [\\n\\n calls] end-of-sentence
    calls      = <｜DSML｜ calls>\\n  invoke*  </｜DSML｜ calls>
    invoke     = <｜DSML｜ invoke name="NAME">\\n  (parameter \\n)*  </｜DSML｜ invoke>\\n
    parameter  = <｜DSML｜ parameter name="KEY" string="true|false">VALUE</｜DSML｜ parameter>

The reasoning is there exactly in thinking mode: the prompt has opened it already. After calls the end-of-sentence may be missing,
because sampling often stops at them. Nothing is repaired: text of another form is a `PromptError`. Source: as `prompt_format`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Generator
from typing import Any, Literal

from csa2_jax.prompt_format import (
    BOS,
    CALLS,
    CALLS_END,
    DSML,
    EOS,
    INVOKE,
    INVOKE_END,
    PARAMETER,
    PARAMETER_END,
    SCOPE,
    THINK,
    THINK_END,
    PromptError,
    check_mode,
    refusal,
    to_json,
)

Kind = Literal["reasoning", "content", "tool_call"]
Event = tuple[Kind, str]

_CALLS_BEGIN = f"\n\n{CALLS}\n"
# What may stand in reasoning or content only where the grammar asks for it. With the beginnings of tags among them, nothing of a
# tag has been shown by the time its markup token is recognised.
_SPECIAL = (BOS, EOS, THINK, THINK_END, f"<{DSML}", f"</{DSML}", DSML)


def parse_completion(text: str, *, thinking_mode: str, cut_off: bool = False) -> dict[str, Any]:
    """The assistant message that a completion says: role, content, reasoning_content and tool_calls.

    Calls are in OpenAI's form, without ids: `arguments` is the JSON text of an object, with values as the model wrote them. A
    call of `ns::name` has its `namespace` beside the function. `cut_off` is for a completion that ran into its length limit: it
    may end anywhere, and an unfinished call is left out.

    Raises PromptError if the text is no completion of this mode.
    """
    stream = CompletionStream(thinking_mode=thinking_mode)
    stream.feed(text)
    return stream.finish(cut_off=cut_off)


class CompletionStream:
    """A completion that arrives in pieces. What `feed` gives, put together, is the message of `finish`, however the text is cut.

    Text comes out as soon as it is certain: the beginning of what may be a special token or a tag waits for the rest. A call
    comes out whole, as the JSON text of its entry in `tool_calls`.
    """

    def __init__(self, *, thinking_mode: str) -> None:
        self._thinks = check_mode(thinking_mode)
        self._text, self._at = "", 0  # what has arrived, and how much of it is done with
        self._events: list[Event] = []
        self._said: dict[str, list[str]] = {"reasoning": [], "content": []}
        self._calls: list[dict[str, Any]] = []
        self._missing = ""  # what a completion that ends here would lack
        self._failure: PromptError | None = None
        self._progress = self._completion()
        next(self._progress)

    def feed(self, piece: str) -> list[Event]:
        """What `piece` makes certain, in order: ("reasoning" or "content", text) or ("tool_call", JSON).

        Raises PromptError as soon as the text cannot become a completion, whatever `piece` said before that, and from then on.
        """
        if self._failure is not None:
            raise self._failure
        if not isinstance(piece, str):
            raise refusal("the completion", piece, "give text")
        self._text, self._at = self._text[self._at :] + piece, 0
        self._events = []
        try:
            next(self._progress)
        except PromptError as failure:
            self._failure = failure
            raise
        return self._events

    def finish(self, *, cut_off: bool = False) -> dict[str, Any]:
        """The message, as `parse_completion` gives it; PromptError if the completion is not over, unless it was `cut_off`."""
        if self._failure is not None:
            raise self._failure
        waiting = self._text[self._at :]
        if not cut_off and (self._missing or waiting):
            lacks = self._missing or f"the rest of {EOS}"
            raise PromptError(
                f"the completion ends without {lacks}: generate more tokens, or pass cut_off=True for what there is"
            )
        said = {kind: "".join(texts) for kind, texts in self._said.items()}
        return {
            "role": "assistant",
            "content": said["content"],
            "reasoning_content": said["reasoning"],
            "tool_calls": list(self._calls),
        }

    # The grammar. Each step is a generator that yields when it has to wait for more text.

    def _completion(self) -> Generator[None, None, None]:
        if self._thinks:
            yield from self._speech("reasoning", THINK_END)
        stop = yield from self._speech("content", EOS, _CALLS_BEGIN)
        if stop == _CALLS_BEGIN:
            yield from self._invocations()
            self._missing = ""
            yield from self._one_of(EOS)
        self._missing = ""
        while True:
            if self._at < len(self._text):
                raise refusal("the text after the end of the completion", self._text[self._at :], "cut it off")
            yield

    def _speech(self, kind: Literal["reasoning", "content"], *ends: str) -> Generator[None, None, str]:
        """Shows text up to one of `ends` and returns that; any other special token is out of place."""

        def show(text: str) -> None:
            self._said[kind].append(text)
            self._events.append((kind, text))

        self._missing = ends[0]
        stop = yield from self._until(show, *ends, *(token for token in _SPECIAL if token not in ends))
        if stop not in ends:
            raise PromptError(
                f"{stop!r} stands in the {kind} of the completion, which ends with {' or '.join(map(repr, ends))}"
            )
        return stop

    def _invocations(self) -> Generator[None, None, None]:
        self._missing = CALLS_END
        while (yield from self._one_of(INVOKE, CALLS_END)) == INVOKE:
            name = yield from self._attribute("the name of a called tool", '">\n')
            arguments = yield from self._arguments(name)
            space, _, bare = name.partition(SCOPE)
            call: dict[str, Any] = {"type": "function", "function": {"name": name, "arguments": arguments}}
            if space and bare and SCOPE not in bare:
                call["namespace"], call["function"]["name"] = space, bare
            self._calls.append(call)
            self._events.append(("tool_call", to_json(call)))

    def _arguments(self, tool: str) -> Generator[None, None, str]:
        """The parameters of one call as the text of a JSON object."""
        written: dict[str, str] = {}
        tag = yield from self._one_of(PARAMETER, f"{INVOKE_END}\n", f"\n{INVOKE_END}\n")  # without any, a line is empty
        while tag == PARAMETER:
            key = yield from self._attribute(f"the name of a parameter of {tool}", '" string="')
            where = f"parameter {key!r} of {tool}"
            is_string = (yield from self._one_of('true">', 'false">')) == 'true">'
            texts: list[str] = []
            yield from self._until(texts.append, PARAMETER_END)
            value = "".join(texts)
            if key in written:
                raise refusal(where, value, "it was given before in the same call")
            written[key] = to_json(value) if is_string else _checked_json(where, value)
            yield from self._one_of("\n")
            tag = yield from self._one_of(PARAMETER, f"{INVOKE_END}\n")
        return "{" + ", ".join(f"{to_json(key)}: {value}" for key, value in written.items()) + "}"

    # What the grammar is made of.

    def _until(self, take: Callable[[str], object], *stops: str) -> Generator[None, None, str]:
        """Hands text to `take` until the first of `stops`, which is skipped and returned."""
        while True:
            end, stop = _first_stop(self._text, self._at, stops)
            if end > self._at:
                take(self._text[self._at : end])
            self._at = end + len(stop)
            if stop:
                return stop
            yield

    def _one_of(self, *texts: str) -> Generator[None, None, str]:
        """Skips and returns the one of `texts` that comes next; PromptError if none does."""
        longest = max(map(len, texts))
        while True:
            here = self._text[self._at : self._at + longest]
            for text in texts:
                if here.startswith(text):
                    self._at += len(text)
                    return text
            if not any(text.startswith(here) for text in texts):
                raise refusal("the next text of the completion", here, f"expected {' or '.join(map(repr, texts))}")
            yield

    def _attribute(self, what: str, end: str) -> Generator[None, None, str]:
        """The text up to `end`, which must not run over into the next tag."""
        texts: list[str] = []
        yield from self._until(texts.append, end)
        value = "".join(texts)
        if not value or DSML in value:
            raise refusal(what, value, f"expected a name, then {end!r}")
        return value


def _first_stop(text: str, start: int, stops: tuple[str, ...]) -> tuple[int, str]:
    """Where the first of `stops` begins, and which it is; else where text begins that may become one of them, and ""."""
    found = min(((at, stop) for stop in stops if (at := text.find(stop, start)) >= 0), default=(len(text), ""))
    for stop in stops:
        for length in range(min(len(stop) - 1, len(text) - start), 0, -1):
            # An earlier stop that is still arriving wins over one that is complete.
            if text.endswith(stop[:length]):
                found = min(found, (len(text) - length, ""))
                break
    return found


def _checked_json(where: str, value: str) -> str:
    try:
        json.loads(value)
    except (ValueError, RecursionError) as error:
        raise refusal(where, value, f'string="false" announces JSON, and this is none ({error})') from None
    return value
