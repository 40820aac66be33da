"""What has no prompt is refused with the place, what stands there and the remedy, and never with another error."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from csa2_jax.prompt import PromptError, encode_messages
from csa2_jax.prompt_format import IMAGE
from tests.conversations import CASES, OPTIONS, assistant, call, encode, result, system, tool, user

thorough = settings(max_examples=300, deadline=None, derandomize=True, database=None)

TOOL = "tools[0]"
CALL = "tool_calls[0]"
PART = "content[0]"
# A message, and what the error says of it behind "messages[0]".
BROKEN: list[tuple[Any, str, str]] = [
    ("x", " is 'x'", "dict"),
    ({"content": "x"}, ".role is missing", "required"),
    ({"role": None}, ".role is None", "required"),
    ({"role": "developer", "content": "x"}, ".role is 'developer'", "system"),
    ({"role": "bot", "content": "x"}, ".role is 'bot'", "assistant"),
    ({"role": ["user"], "content": "x"}, ".role is ['user']", "choose"),
    ({"role": "user"}, ".content is missing", "required"),
    (user(None), ".content is None", "required"),
    (user(5), ".content is 5", "or text"),
    (user({"type": "text"}), ".content is {'type': 'text'}", "list of text and image blocks"),
    (user(["x"]), f".{PART} is 'x'", "content block"),
    (user([{"text": "x"}]), f".{PART}.type is missing", "required"),
    (user([{"type": "text"}]), f".{PART}.text is missing", "required"),
    (user([{"type": "text", "text": 1}]), f".{PART}.text is 1", "give text"),
    (user([{"type": "audio"}]), f".{PART}.type is 'audio'", "image_url"),
    (user([{"type": []}]), f".{PART}.type is []", "image_url"),
    (user([{"type": "image"}]), f".{PART} is {{'type': 'image'}}", "url, a source or data"),
    (user([{"type": "image", "source": 5}]), f".{PART}.source is 5", "bytes"),
    (user([{"type": "image_url"}]), f".{PART}.image_url is missing", "required"),
    (user([{"type": "image_url", "image_url": ""}]), f".{PART}.image_url is ''", "empty"),
    (user([{"type": "image_url", "image_url": {}}]), f".{PART}.image_url.url is missing", "required"),
    (user([{"type": "image_url", "image_url": {"url": 1}}]), f".{PART}.image_url.url is 1", "give text"),
    (user([{"type": "text", "text": IMAGE}]), f".{PART}.text is '{IMAGE}'", "content blocks"),
    (user("\ud800"), ".content is '\\ud800'", "Unicode"),
    ({"role": "assistant"}, ".content is missing", "required"),
    (assistant(None), ".content is None", "required"),
    (assistant(reasoning_content=["x"]), ".reasoning_content is ['x']", "give text"),
    (assistant(reasoning_content=IMAGE), f".reasoning_content is '{IMAGE}'", "content blocks"),
    (assistant(wo_eos="yes"), ".wo_eos is 'yes'", "True"),
    (assistant(tool_calls={}), ".tool_calls is {}", "list of tool calls"),
    (assistant(tool_calls=["f"]), f".{CALL} is 'f'", "tool call"),
    (assistant(tool_calls=[{}]), f".{CALL}.function is missing", "required"),
    (assistant(tool_calls=[{"function": "f"}]), f".{CALL}.function is 'f'", "dict"),
    (assistant(tool_calls=[tool()]), f".{CALL}.function.arguments is missing", "required"),
    (assistant(tool_calls=[call("", {})]), f".{CALL}.function.name is ''", "empty"),
    (assistant(tool_calls=[call(None, {})]), f".{CALL}.function.name is None", "required"),
    (assistant(tool_calls=[call("f", [1])]), f".{CALL}.function.arguments is [1]", "JSON object"),
    (assistant(tool_calls=[call("f", "[1]")]), f".{CALL}.function.arguments is '[1]'", "JSON object"),
    (assistant(tool_calls=[call("f", {"k": {1}})]), f".{CALL}.function.arguments['k'] is {{1}}", "JSON"),
    (
        assistant(tool_calls=[call("f", {"k": 10**5000})]),
        f".{CALL}.function.arguments['k'] is something of type int",
        "JSON",
    ),
    (
        assistant(tool_calls=[call("f", {"k": IMAGE})]),
        f".{CALL}.function.arguments['k'] is '{IMAGE}'",
        "content blocks",
    ),
    (
        assistant(tool_calls=[call("f", {"k": [IMAGE]})]),
        f".{CALL}.function.arguments['k'] is '[\"{IMAGE}\"]'",
        "content blocks",
    ),
    (assistant(tool_calls=[call("f", {}, id=7)]), f".{CALL}.id is 7", "give text"),
    (assistant(tool_calls=[{**tool(), "type": "custom"}]), f".{CALL}.type is 'custom'", "function"),
    (assistant(tool_calls=[call("f", {}, namespace="")]), f".{CALL}.namespace is ''", "empty"),
    (assistant(tool_calls=[call("f", {}, namespace={})]), f".{CALL}.namespace.name is missing", "required"),
    (
        assistant(tool_calls=[call("a::f", {}, namespace="b")]),
        f".{CALL}.function.name is 'a::f'",
        "neither may contain it",
    ),
    (assistant(tool_calls=[call("f", {}, namespace="a::b")]), f".{CALL}.namespace is 'a::b'", "neither may contain it"),
    ({"role": "tool", "tool_call_id": 3, "content": "x"}, ".tool_call_id is 3", "give text"),
    ({"role": "tool", "tool_call_id": "c"}, ".content is missing", "required"),
    (result("c", {"rain": True}), ".content is {'rain': True}", "or text"),
    ({"role": "system"}, ".content is missing", "required"),
    (system(tools="t"), ".tools is 't'", "list of tools"),
    (system(tools=[{"type": "function", "name": "t"}]), f".{TOOL}.function is missing", "required"),
    (system(tools=[{"function": {}}]), f".{TOOL}.function.name is missing", "required"),
    (system(tools=[tool(IMAGE)]), f".{TOOL}.function.name is '{IMAGE}'", "content blocks"),
    (system(tools=[{"function": {"name": "t", "description": 1}}]), f".{TOOL}.function.description is 1", "give text"),
    (system(tools=[{"function": {"name": "t", "parameters": []}}]), f".{TOOL}.function.parameters is []", "schema"),
    (system(tools=[{"function": {"name": "t", "x": {1}}}]), f".{TOOL} is {{'name': 't', 'x': {{1}}}}", "JSON"),
    (system(tools=[tool(namespace=5)]), f".{TOOL}.namespace is 5", "give text"),
    (
        system(tools=[tool(namespace={"name": "n", "description": 1})]),
        f".{TOOL}.namespace.description is 1",
        "give text",
    ),
    (
        system(tools=[{"namespace": "a", "function": {"name": "t", "namespace": "b"}}]),
        f".{TOOL}.function.namespace is 'b'",
        "one of them",
    ),
    (system(response_format="json"), ".response_format is 'json'", "dict"),
    (user(tools=[tool()]), ".tools is [{", "only role system has it, and this message is of role user"),
    (user(tool_calls=[tool()]), ".tool_calls is [{", "only role assistant"),
    (user(reasoning_content="x"), ".reasoning_content is 'x'", "only role assistant"),
    (assistant(response_format={"a": 1}), ".response_format is {'a': 1}", "only role system"),
    (assistant(tool_call_id="c"), ".tool_call_id is 'c'", "only role tool"),
    (user(task="nope"), ".task is 'nope'", "read_url"),
    (user(task=["query"]), ".task is ['query']", "read_url"),
]


@pytest.mark.parametrize(("message", "place", "remedy"), BROKEN)
def test_broken_message_is_named_with_the_remedy(message, place, remedy):
    with pytest.raises(PromptError) as error:
        encode([message])
    assert str(error.value).startswith(f"messages[0]{place}")
    assert remedy in str(error.value)
    with pytest.raises(PromptError) as error:
        encode([], context=[user(), message])
    assert str(error.value).startswith(f"context[1]{place}")


@pytest.mark.parametrize(
    ("options", "place"),
    [
        ({"messages": "hello"}, "messages is 'hello': give a list of messages"),
        ({"messages": None}, "messages is None: give a list"),
        ({"context": "x"}, "context is 'x': give a list"),
        ({"thinking_mode": "think"}, "thinking_mode is 'think': choose from chat, thinking"),
        ({"thinking_mode": ["chat"]}, "thinking_mode is ['chat']: choose"),
        ({"drop_thinking": "no"}, "drop_thinking is 'no': give True or False"),
        *(
            ({"reasoning_effort": effort}, f"reasoning_effort is {effort!r}: give a whole number from 1 to 100 or")
            for effort in (0, 101, -1, True, 50.0, "50", "medium", "", [])
        ),
    ],
)
def test_broken_option_is_named_with_the_remedy(options, place):
    with pytest.raises(PromptError) as error:
        encode_messages(**{"messages": [user()], "thinking_mode": "chat", **options})
    assert str(error.value).startswith(place)


def test_key_of_arguments_that_is_no_text_is_refused():
    with pytest.raises(
        PromptError, match=r"^a key of messages\[0\].tool_calls\[0\].function.arguments is 1: give text"
    ):
        encode([assistant(tool_calls=[call("f", {1: 2})])])


def test_tools_that_are_nested_without_end_are_refused():
    deep: Any = {}
    for _ in range(100_000):
        deep = {"properties": deep}
    circle: dict[str, Any] = {}
    circle["properties"] = circle
    for parameters in (deep, circle):
        with pytest.raises(PromptError, match=r"messages\[0\].tools\[0\] is .* JSON"):
            encode([system(tools=[{"function": {"name": "t", "parameters": parameters}}])])


FIELDS = (
    "role",
    "content",
    "tools",
    "tool_calls",
    "tool_call_id",
    "type",
    "text",
    "function",
    "name",
    "arguments",
    "namespace",
    "task",
)
MORE_FIELDS = (
    "reasoning_content",
    "wo_eos",
    "response_format",
    "image_url",
    "url",
    "source",
    "id",
    "description",
    "parameters",
)
WORDS = (
    "system",
    "user",
    "assistant",
    "tool",
    "latest_reminder",
    "text",
    "image",
    "image_url",
    "function",
    "query",
    "{}",
    "",
    IMAGE,
)
leaves = st.none() | st.booleans() | st.integers() | st.floats() | st.sampled_from(WORDS) | st.text(max_size=3)
keys = st.sampled_from(FIELDS + MORE_FIELDS)
garbage = st.recursive(
    leaves, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=5), max_leaves=12
)


def survives(messages: Any, **options: Any) -> None:
    """Whatever is passed in, there is a prompt or a PromptError."""
    try:
        prompt = encode_messages(messages, **options)
    except PromptError:
        return
    assert prompt.text.count(IMAGE) == len(prompt.images)
    prompt.text.encode()


@given(garbage | st.lists(st.dictionaries(keys, garbage, max_size=6), max_size=3), garbage, garbage)
@thorough
def test_garbage_gives_a_prompt_or_a_prompt_error(messages, context, effort):
    survives(messages, thinking_mode="thinking")
    survives(messages, thinking_mode="chat", context=context)
    survives([], thinking_mode="chat", reasoning_effort=effort)


def places_in(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(place for key, item in inner for place in places_in(item, (*path, key)))]


@given(st.sampled_from(CASES["encode"]), st.integers(0), garbage, st.booleans())
@thorough
def test_recorded_cases_with_one_fault_give_a_prompt_or_a_prompt_error(case, number, fault, drop):
    """Unlike pure garbage, these get past the first checks."""
    messages = copy.deepcopy(case["messages"])
    *path, last = (places := places_in(messages))[1 + number % (len(places) - 1)]
    target = messages
    for key in path:
        target = target[key]
    if drop:
        del target[last]
    else:
        target[last] = fault
    survives(messages, **{name: case[name] for name in OPTIONS if name in case})
