"""Completions back to messages: the grammar, what is refused, pieces in any cut, and the way there and back."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from csa2_jax.prompt import CompletionStream, PromptError, parse_completion
from csa2_jax.prompt_format import BOS, DSML, EOS, IMAGE, PARAMETER_END, THINK, THINK_END
from tests.conversations import call, encode, user

SPECIAL = (BOS, EOS, THINK, THINK_END, DSML)
thorough = settings(max_examples=300, deadline=None, derandomize=True, database=None)


def written_call(body: str, end: str = EOS) -> str:
    return f"\n\n<{DSML} calls>\n{body}</{DSML} calls>{end}"


INVOKED = f'<{DSML} invoke name="f">\n</{DSML} invoke>\n'


def parameter(name: str, value: str, string: str = "false") -> str:
    return f'<{DSML} parameter name="{name}" string="{string}">{value}</{DSML} parameter>\n'


def invoke(*parameters: str, name: str = "f") -> str:
    return f'<{DSML} invoke name="{name}">\n{"".join(parameters)}</{DSML} invoke>\n'


def test_completion_values_stay_as_written():
    text = written_call(
        invoke(parameter("é", '{"a":1,  "b":1.50}'), parameter("n", " 1e3 "), parameter("s", "<x>é", "true"))
    )
    (found,) = parse_completion(text, thinking_mode="chat")["tool_calls"]
    assert found["function"]["arguments"] == '{"é": {"a":1,  "b":1.50}, "n":  1e3 , "s": "<x>é"}'


@pytest.mark.parametrize("body", [INVOKED, f'<{DSML} invoke name="f">\n\n</{DSML} invoke>\n'])
def test_completion_calls_without_parameters(body):
    assert parse_completion(written_call(body), thinking_mode="chat")["tool_calls"] == [call("f", "{}")]


@pytest.mark.parametrize("name", ["::f", "f::", "::", "f", "a::b::f"])
def test_completion_keeps_a_name_without_a_namespace(name):
    assert parse_completion(written_call(invoke(name=name)), thinking_mode="chat")["tool_calls"] == [call(name, "{}")]


def test_completion_keeps_newlines_before_calls():
    for content in ("", "x", "x\n", "\n", "x\n\n\n", "<", "\n\n<"):
        message = parse_completion(content + written_call(INVOKED), thinking_mode="chat")
        assert message["content"] == content
        assert message["tool_calls"]


@pytest.mark.parametrize(
    ("mode", "text", "words"),
    [
        ("chat", "", "ends without"),
        ("chat", "x", "ends without"),
        ("chat", EOS + "x", "after the end"),
        ("chat", EOS + EOS, "after the end"),
        ("chat", f"x{THINK_END}y{EOS}", "content"),
        ("chat", f"{THINK}x{THINK_END}y{EOS}", "content"),
        ("chat", f"x{BOS}{EOS}", "content"),
        ("chat", f"x {DSML} y{EOS}", "content"),
        ("thinking", f"{THINK}x{THINK_END}y{EOS}", "reasoning"),
        ("thinking", f"x{EOS}", "reasoning"),
        ("thinking", written_call(INVOKED), "reasoning"),
        ("thinking", f"x{THINK_END}y{THINK_END}{EOS}", "content"),
        ("thinking", "x", f"ends without {THINK_END}"),
        ("chat", f"x<{DSML} calls>\n{INVOKED}</{DSML} calls>{EOS}", "content"),
        ("chat", f"\n\n<{DSML}tool_calls>\n", "content"),
        ("chat", f"\n\n<{DSML} calls>{INVOKED}</{DSML} calls>", "content"),
        ("chat", f"\n\n<{DSML} calls>\n{INVOKED}", f"ends without </{DSML} calls>"),
        ("chat", written_call("x"), "expected"),
        ("chat", written_call(INVOKED.rstrip()), "expected"),
        ("chat", written_call(INVOKED, "\n") + EOS, "expected"),
        ("chat", written_call(INVOKED, EOS[:-1]), "ends without the rest"),
        ("chat", written_call(INVOKED) + "x", "after the end"),
        ("chat", written_call(invoke(name="")), "name of a called tool"),
        (
            "chat",
            written_call(f'<{DSML} invoke name="f\n{parameter("k", "1")}</{DSML} invoke>\n' + INVOKED),
            "name of a called tool",
        ),
        ("chat", written_call(invoke(parameter("", "1"))), "name of a parameter of f"),
        ("chat", written_call(invoke(parameter("k", "1", "maybe"))), "expected"),
        ("chat", written_call(invoke(parameter("k", "1").rstrip())), "expected"),
        ("chat", written_call(invoke(parameter("k", "x"))), "parameter 'k' of f is 'x'"),
        ("chat", written_call(invoke(parameter("k", ""))), "parameter 'k' of f is ''"),
        ("chat", written_call(invoke(parameter("k", "[" * 100_000))), "parameter 'k' of f"),
        ("chat", written_call(invoke(parameter("k", "1"), parameter("k", "x", "true"))), "given before"),
        ("chat", 5, "give text"),
        ("talk", EOS, "thinking_mode"),
    ],
)
def test_broken_completion_is_refused(mode, text, words):
    with pytest.raises(PromptError) as error:
        parse_completion(text, thinking_mode=mode)
    assert words in str(error.value)


def test_cut_off_completion_says_what_there_is():
    def cut(text: str) -> tuple[str, str, int]:
        message = parse_completion(text, thinking_mode="thinking", cut_off=True)
        return message["reasoning_content"], message["content"], len(message["tool_calls"])

    whole = f"R{THINK_END}C{written_call(INVOKED + invoke(parameter('k', '1')))}"
    assert cut(whole) == ("R", "C", 2)
    assert cut(whole[:-1]) == ("R", "C", 2)
    assert cut(whole[: whole.index("parameter")]) == ("R", "C", 1)
    assert cut(f"R{THINK_END}C\n\n<") == ("R", "C", 0)
    assert cut("R</thi") == ("R", "", 0)
    assert cut("") == ("", "", 0)
    with pytest.raises(PromptError):
        cut(f"R{EOS}")


# Completions in pieces.


def test_stream_speaks_as_soon_as_it_is_certain():
    stream = CompletionStream(thinking_mode="thinking")
    assert stream.feed("Let us") == [("reasoning", "Let us")]
    assert stream.feed(" see <") == [("reasoning", " see ")]
    assert stream.feed("3, </th") == [("reasoning", "<3, ")]
    assert stream.feed("ink>Y") == [("content", "Y")]
    assert stream.feed("") == []
    assert stream.feed("es.\n") == [("content", "es.")]
    assert stream.feed("Or") == [("content", "\nOr")]
    assert stream.feed(f"\n\n<{DSML} calls>") == []
    assert stream.feed(f'\n<{DSML} invoke name="n::f">\n{parameter("k", "v", "true")}</{DSML} invoke>') == []
    (event,) = stream.feed("\n")
    assert event[0] == "tool_call"
    assert json.loads(event[1]) == call("f", '{"k": "v"}', namespace="n")
    assert stream.feed(f"</{DSML} calls>{EOS[:3]}") == stream.feed(EOS[3:]) == []
    message = stream.finish()
    assert message["tool_calls"] == [json.loads(event[1])]
    assert (message["reasoning_content"], message["content"]) == ("Let us see <3, ", "Yes.\nOr")


def test_stream_shows_nothing_of_markup_out_of_place():
    for text, shown in (
        ("a<｜DSML｜ calls>", "a"),
        ("a</｜DSML｜ invoke>", "a"),
        ("a｜DSML｜", "a"),
        ("a\n\n<｜DSML｜ x", "a"),  # the newlines arrive with the fault
    ):
        said, message = outcome(list(text), "chat", cut_off=False)
        assert message is None
        assert [("content", shown)] == said


def test_stream_that_failed_stays_failed():
    stream = CompletionStream(thinking_mode="chat")
    for attempt in (
        lambda: stream.feed(THINK),
        lambda: stream.feed("x"),
        stream.finish,
        lambda: stream.finish(cut_off=True),
    ):
        with pytest.raises(PromptError, match="stands in the content"):
            attempt()


def test_stream_takes_time_in_proportion_to_the_text():
    """A long value that arrives letter by letter is not searched again with every letter."""
    text = written_call(invoke(parameter("k", "x" * 200_000, "true")))
    stream = CompletionStream(thinking_mode="chat")
    longest = 0
    for letter in text:
        stream.feed(letter)
        longest = max(longest, len(stream._text))
    assert len(stream.finish()["tool_calls"]) == 1
    assert longest < 100


# Properties.

# Letters, and pieces of markup that a careless parser would trip over.
fragments = st.sampled_from(
    [
        "<",
        ">",
        "\n",
        "\n\n",
        "｜",
        "DSML",
        "</",
        "think",
        "<thin",
        '"',
        "é",
        "日",
        " calls",
        "<｜end",
        "::",
        "a b",
        "{}",
    ]
)
speech = st.lists(fragments | st.text(st.characters(codec="utf-8"), max_size=3), max_size=8).map("".join)
plain = speech.filter(lambda text: not any(token in text for token in (*SPECIAL, IMAGE)))
values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False, allow_infinity=False) | plain,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(plain, inner, max_size=3),
    max_leaves=6,
).filter(lambda value: PARAMETER_END not in json.dumps(value, ensure_ascii=False))
names = st.text(st.sampled_from("abcXYZ_-.0189é"), min_size=1, max_size=8)
calls = st.builds(
    lambda name, arguments, space: call(
        name, json.dumps(arguments, ensure_ascii=False), **({"namespace": space} if space else {})
    ),
    names,
    st.dictionaries(names, values, max_size=4),
    st.none() | names,
)
answers = st.fixed_dictionaries(
    {
        "role": st.just("assistant"),
        "content": plain,
        "reasoning_content": plain,
        "tool_calls": st.lists(calls, max_size=3),
    }
)


def completion_of(message: dict[str, Any], mode: str) -> str:
    """The message as the model would write it: what its prompt has beyond that of the question."""
    question, whole = encode([user()], mode), encode([user(), message], mode)
    assert whole.startswith(question)
    return whole[len(question) :]


def cuts(text: str, places: list[int]) -> list[str]:
    edges = [0, *sorted(place % (len(text) + 1) for place in places), len(text)]
    return [text[start:end] for start, end in itertools.pairwise(edges)]


def outcome(pieces: list[str], mode: str, cut_off: bool) -> tuple[list[tuple[str, str]], Any]:
    """What a stream said, texts joined, and its message, or None for an error."""
    stream = CompletionStream(thinking_mode=mode)
    said: list[tuple[str, str]] = []
    try:
        for piece in pieces:
            for kind, text in stream.feed(piece):
                assert text
                if said and said[-1][0] == kind != "tool_call":
                    said[-1] = (kind, said[-1][1] + text)
                else:
                    said.append((kind, text))
        return said, stream.finish(cut_off=cut_off)
    except PromptError:
        return said, None


@given(answers, st.sampled_from(["chat", "thinking"]))
@thorough
def test_round_trip_gives_the_message_back(message, mode):
    expected = message if mode == "thinking" else {**message, "reasoning_content": ""}
    completion = completion_of(message, mode)
    assert parse_completion(completion, thinking_mode=mode) == expected
    assert completion_of(parse_completion(completion, thinking_mode=mode), mode) == completion


@given(
    answers,
    st.sampled_from(["chat", "thinking"]),
    st.lists(st.integers(0), max_size=12),
    st.integers(0),
    st.booleans(),
    st.text(max_size=2),
)
@thorough
def test_stream_does_not_depend_on_cuts(message, mode, places, length, cut_off, tail):
    completion = completion_of(message, mode)
    for text in (completion, completion[: length % (len(completion) + 1)], completion + tail):
        _, expected = outcome([text], mode, cut_off)
        for pieces in (cuts(text, places), list(text)):
            said, found = outcome(pieces, mode, cut_off)
            assert found == expected
            if found is not None:
                joined = {
                    kind: "".join(words for other, words in said if other == kind) for kind in ("reasoning", "content")
                }
                assert joined == {"reasoning": found["reasoning_content"], "content": found["content"]}
                assert [json.loads(words) for kind, words in said if kind == "tool_call"] == found["tool_calls"]


markup = st.sampled_from(
    [
        *SPECIAL,
        f"\n\n<{DSML} calls>\n",
        f"</{DSML} calls>",
        INVOKED,
        f'<{DSML} invoke name="',
        '">\n',
        '" string="true">',
    ]
)


@given(
    st.lists(markup | speech, max_size=8).map("".join),
    st.sampled_from(["chat", "thinking"]),
    st.lists(st.integers(0), max_size=8),
)
@thorough
@example(f"a\n\n<{DSML} calls>\n", "chat", [3])
def test_stream_of_any_text_ends_in_the_same_way_and_shows_no_markup(text, mode, places):
    for cut_off in (False, True):
        _, expected = outcome([text], mode, cut_off)
        for pieces in (cuts(text, places), list(text)):
            said, found = outcome(pieces, mode, cut_off)
            assert found == expected
            for kind, words in said:
                assert kind == "tool_call" or not any(token in words for token in SPECIAL)
