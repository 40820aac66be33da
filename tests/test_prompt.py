"""Messages to prompt text: recorded cases byte for byte, and what they do not show."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest

from csa2_jax.prompt import Prompt, PromptError, encode_messages, parse_completion
from csa2_jax.prompt_format import ASSISTANT, BOS, DSML, EOS, IMAGE, SYSTEM, TASKS, THINK, THINK_END, USER
from tests.conversations import CASES, OPTIONS, assistant, call, encode, result, schemas, system, tool, user

EFFORT = f"{SYSTEM}Reasoning Effort: 75 (range 1-100, the higher the value, the more thorough the reasoning)\n\n"


def named(cases: list[dict[str, Any]]) -> list[Any]:
    return [pytest.param(case, id=case["name"]) for case in cases]


# The recorded cases.


def check_encode(case: dict[str, Any]) -> None:
    options = {name: case[name] for name in OPTIONS if name in case}
    before = copy.deepcopy(case)
    if "expected_error" in case:
        with pytest.raises(PromptError):
            encode_messages(case["messages"], **options)
    else:
        prompt = encode_messages(case["messages"], **options)
        assert prompt.text.encode() == case["expected_prompt"].encode()
        assert prompt.images == case["expected_images"]
    assert case == before, "what was passed in has changed"


def check_parse(case: dict[str, Any]) -> None:
    if "expected_error" in case:
        with pytest.raises(PromptError):
            parse_completion(case["completion"], thinking_mode=case["thinking_mode"])
    else:
        assert parse_completion(case["completion"], thinking_mode=case["thinking_mode"]) == case["expected_message"]


@pytest.mark.parametrize("case", named(CASES["encode"]))
def test_prompt_is_the_recorded_one(case):
    check_encode(case)


@pytest.mark.parametrize("case", named(CASES["parse"]))
def test_message_is_the_recorded_one(case):
    check_parse(case)


@pytest.mark.smoke
def test_recorded_cases_all_agree():
    assert (len(CASES["encode"]), len(CASES["parse"])) == (41, 10)
    for case in CASES["encode"]:
        check_encode(case)
    for case in CASES["parse"]:
        check_parse(case)


# What the recorded cases do not show.


def test_thinking_keeps_reasoning_from_the_last_question_on():
    """A result of a tool is a question too, and so is a system message that is not the first."""
    turns = [user(), assistant("A1", reasoning_content="R1"), result("c", "X"), assistant("A2", reasoning_content="R2")]
    assert encode(turns, "thinking") == (
        f"{BOS}{EFFORT}{USER}U{ASSISTANT}{THINK_END}A1{EOS}{USER}<tool_result>X</tool_result>{ASSISTANT}{THINK}R2{THINK_END}A2{EOS}"
    )
    turns[2] = system("M")
    assert encode(turns, "thinking") == (
        f"{BOS}{EFFORT}{USER}U{ASSISTANT}{THINK_END}A1{EOS}{SYSTEM}M{ASSISTANT}{THINK}R2{THINK_END}A2{EOS}"
    )


def test_thinking_is_kept_where_any_message_has_tools():
    turns = [user(), assistant("A1", reasoning_content="R1"), system("M", tools=[tool()]), user("V")]
    assert f"{ASSISTANT}{THINK}R1{THINK_END}A1" in encode(turns, "thinking")
    assert f"{ASSISTANT}{THINK_END}A1" in encode([*turns[:2], system("M", tools=[]), user("V")], "thinking")
    assert f"{ASSISTANT}{THINK}R{THINK_END}A" in encode(
        [user(), assistant(reasoning_content="R"), user()], "thinking", context=[system(tools=[tool()])]
    )


def test_thinking_without_reasoning_is_an_empty_thought():
    assert encode([user(), assistant()], "thinking").endswith(f"{ASSISTANT}{THINK}{THINK_END}A{EOS}")
    only = [user(), {"role": "assistant", "reasoning_content": "R", "wo_eos": True}]
    assert encode(only, "thinking").endswith(f"{ASSISTANT}{THINK}R{THINK_END}")


def test_effort_opens_the_conversation_whatever_comes_first():
    assert encode([assistant()], "thinking") == f"{BOS}{EFFORT}{THINK_END}A{EOS}"
    assert encode([{"role": "latest_reminder", "content": "D"}, user()], "thinking").startswith(
        f"{BOS}{EFFORT}<｜latest_reminder｜>D"
    )
    assert (
        encode([result("c", "X")], "thinking") == f"{BOS}{EFFORT}{USER}<tool_result>X</tool_result>{ASSISTANT}{THINK}"
    )


@pytest.mark.parametrize(
    ("effort", "number"), [("low", 50), ("high", 75), ("max", 100), (1, 1), (100, 100), (None, 75)]
)
def test_effort_levels_are_numbers(effort, number):
    assert f"Reasoning Effort: {number} (" in encode([user()], "thinking", reasoning_effort=effort)


def test_no_messages_are_the_beginning_of_a_text():
    assert encode_messages([], thinking_mode="thinking") == Prompt(BOS, [])
    assert encode([], context=[user()]) == ""


def test_context_decides_but_is_not_written():
    context = [
        system(tools=[tool()]),
        user("Q"),
        assistant("", tool_calls=[call("a", {}, id="1"), call("b", {}, id="2")]),
    ]
    turns = [result("2", "two"), result("1", "one")]
    assert encode(turns, "thinking", context=context) == (
        f"{USER}<tool_result>one</tool_result>\n\n<tool_result>two</tool_result>{ASSISTANT}{THINK}"
    )
    assert encode([system("M")], context=[user(), assistant()]) == f"{SYSTEM}M{ASSISTANT}{THINK_END}"
    assert encode([user()], context=[]) == encode([user()])
    assert encode([user()], context=[user("Q", task="query")]) == encode([user()], context=[assistant()])


def test_context_keeps_its_images():
    picture = [{"type": "image", "url": "a"}]
    assert encode_messages([user()], thinking_mode="chat", context=[user(picture)]).images == []


def test_system_message_after_the_first_asks():
    assert encode([system("1"), system("2")]) == f"{BOS}{SYSTEM}1{SYSTEM}2{ASSISTANT}{THINK_END}"
    assert encode([system("1"), system("2"), user()]) == f"{BOS}{SYSTEM}1{SYSTEM}2{USER}U{ASSISTANT}{THINK_END}"


def test_system_message_has_tools_before_the_response_format():
    text = encode([system("S", response_format={"type": "text"}, tools=[tool()])])
    assert text.startswith(f"{BOS}{SYSTEM}S\n\n## Tools\n\n")
    form = "## Response Format:\n\nYou MUST strictly adhere to the following schema to reply:\n"
    assert text.endswith(f'to invoke tool calls.\n\n\n{form}{{"type": "text"}}')
    bare = {"role": "system", "tools": [tool()]}
    assert encode([bare]) == encode([system("", tools=[tool()])]) == encode([system(None, tools=[tool()])])
    assert encode([system("S", tools=None, response_format={})]) == encode([system("S")])


def test_tool_schema_keeps_every_field_in_order():
    function = {"strict": True, "parameters": {"type": "object"}, "name": "t", "description": "d"}
    text = encode([system(tools=[{"function": function}])])
    assert f"\n{json.dumps(function)}\n" in text
    text = encode([system(tools=[{"function": function, "namespace": {"name": "n", "description": "D"}}])])
    assert f"\n{json.dumps({**function, 'name': 'n::t', 'description': 'D' + chr(10) + 'd'})}\n" in text


def test_neighbouring_user_messages_are_one_turn_up_to_a_task():
    assert encode([user("1"), user("2", task="query")]) == f"{BOS}{USER}1\n\n2<｜query｜>"
    assert encode([user("1", task="query"), user("2")]) == f"{BOS}{USER}1{USER}2{ASSISTANT}{THINK_END}"
    assert encode([user([]), user("")]) == f"{BOS}{USER}{ASSISTANT}{THINK_END}"
    assert encode([user(""), user("")]) == f"{BOS}{USER}\n\n{ASSISTANT}{THINK_END}"


@pytest.mark.parametrize("mode", ["chat", "thinking"])
def test_task_in_history_is_answered_without_reasoning(mode):
    opening = EFFORT if mode == "thinking" else ""
    turns = [user(task="query"), assistant("words", reasoning_content="R")]
    assert encode(turns, mode) == f"{BOS}{opening}{USER}U<｜query｜>words{EOS}"
    turns[0]["task"] = "action"
    thought = THINK if mode == "thinking" else THINK_END
    assert encode(turns, mode) == f"{BOS}{opening}{USER}U{ASSISTANT}{thought}<｜action｜>words{EOS}"
    titled = [user(), assistant(task="title"), assistant("Title", reasoning_content="R")]
    assert encode(titled, mode).endswith(f"A{EOS}<｜title｜>Title{EOS}")


@pytest.mark.parametrize("task", TASKS)
def test_task_token_stands_only_where_an_answer_follows(task):
    token = f"<｜{task}｜>"
    assert encode([user(task=task)]).endswith(f"{ASSISTANT}{THINK_END}{token}" if task == "action" else f"U{token}")
    assert token not in encode([user(task=task), system()])
    assert token not in encode([user(), assistant(task=task), user()])


def test_open_end_leaves_the_assistant_to_go_on():
    turns = [user(), assistant("The", reasoning_content="R", wo_eos=True)]
    assert encode(turns, "thinking").endswith(f"{ASSISTANT}{THINK}R{THINK_END}The")
    assert encode([user(), assistant(wo_eos=False)]).endswith(f"A{EOS}")


def test_reminder_stands_where_it_is_put():
    reminder = {"role": "latest_reminder", "content": "D"}
    mark = "<｜latest_reminder｜>D"
    assert encode([user(), assistant(), reminder, user()]) == (
        f"{BOS}{USER}U{ASSISTANT}{THINK_END}A{EOS}{mark}{USER}U{ASSISTANT}{THINK_END}"
    )
    assert encode([user(), reminder]) == f"{BOS}{USER}U{ASSISTANT}{THINK_END}{mark}"


def test_contents_may_be_blocks_in_every_role():
    blocks = [{"type": "text", "text": "1"}, {"type": "text", "text": "2"}]
    for role in ("system", "assistant", "user", "latest_reminder", "tool"):
        assert "1\n\n2" in encode([{"role": role, "content": blocks}])


@pytest.mark.parametrize(
    ("block", "record"),
    [
        ({"type": "image_url", "image_url": "a"}, {"url": "a"}),
        ({"type": "image_url", "image_url": {"url": "a", "detail": "low"}}, {"url": "a"}),
        ({"type": "image", "url": "a", "alt": "b"}, {"url": "a"}),
        ({"type": "image", "source": {"data": "x"}, "data": b"y", "url": ""}, {"source": {"data": "x"}, "data": b"y"}),
    ],
)
def test_image_blocks_become_records(block, record):
    prompt = encode_messages([user([block])], thinking_mode="chat")
    assert prompt == Prompt(f"{BOS}{USER}{IMAGE}{ASSISTANT}{THINK_END}", [{"type": "image", **record}])


def test_images_are_in_the_order_of_the_text():
    """The results change places, and their images with them."""
    picture = {name: [{"type": "image", "url": name}] for name in "abc"}
    turns = [
        user(picture["a"]),
        assistant("", tool_calls=[call("f", {}, id="1"), call("f", {}, id="2")]),
        result("2", picture["b"]),
        user("between"),
        result("1", picture["c"]),
    ]
    prompt = encode_messages(turns, thinking_mode="chat")
    assert [image["url"] for image in prompt.images] == ["a", "c", "b"]
    assert prompt.text.count(IMAGE) == 3
    assert f"{IMAGE}</tool_result>\n\nbetween\n\n<tool_result>" in prompt.text


def test_results_without_a_known_call_keep_their_order():
    calls = [call("f", {}, id="1"), call("f", {}, id="2")]
    turns = [
        user(),
        assistant("", tool_calls=calls),
        result("2", "two"),
        result("9", "nine"),
        {"role": "tool", "content": "none"},
    ]
    text = encode(turns)
    assert [text.index(word) for word in ("nine", "none", "two")] == sorted(
        text.index(word) for word in ("nine", "none", "two")
    )
    kept = "<tool_result>x</tool_result>\n\n<tool_result>y</tool_result>"
    assert kept in encode([result("b", "x"), result("a", "y")])
    calls = [call("f", {}, id="1"), call("f", {})]
    assert kept in encode([assistant("", tool_calls=calls), {"role": "tool", "content": "x"}, result("1", "y")])


def test_call_is_written_as_markup():
    arguments = {"s": 'a "b"\n', "n": 1.5, "o": {"é": [None, True]}, "empty": ""}
    text = encode([user(), assistant(None, tool_calls=[call("f", arguments)])])
    assert text == encode([user(), assistant("", tool_calls=[call("f", json.dumps(arguments))])])
    assert text.endswith(
        f"{ASSISTANT}{THINK_END}\n\n<{DSML} calls>\n"
        f'<{DSML} invoke name="f">\n'
        f'<{DSML} parameter name="s" string="true">a "b"\n</{DSML} parameter>\n'
        f'<{DSML} parameter name="n" string="false">1.5</{DSML} parameter>\n'
        f'<{DSML} parameter name="o" string="false">{{"é": [null, true]}}</{DSML} parameter>\n'
        f'<{DSML} parameter name="empty" string="true"></{DSML} parameter>\n'
        f"</{DSML} invoke>\n</{DSML} calls>{EOS}"
    )


def test_call_without_parameters_has_an_empty_line():
    text = encode([user(), assistant("", tool_calls=[call("f", "{}")])])
    assert text.endswith(f'<{DSML} invoke name="f">\n\n</{DSML} invoke>\n</{DSML} calls>{EOS}')


@pytest.mark.parametrize("written", ["", "{", "plain", "[" * 100_000])
def test_arguments_that_are_no_json_are_one_parameter(written):
    text = encode([user(), assistant("", tool_calls=[call("f", written)])])
    assert f'<{DSML} parameter name="arguments" string="true">{written}</{DSML} parameter>' in text


@pytest.mark.parametrize(
    ("namespace", "description", "expected"),
    [
        ("db", "Own", {"name": "db::t", "description": "Own"}),
        ({"name": "db"}, None, {"name": "db::t"}),
        ({"name": "db", "description": "All"}, "Own", {"name": "db::t", "description": "All\nOwn"}),
        ({"name": "db", "description": "All"}, None, {"name": "db::t", "description": "All\n"}),
        (None, "Own", {"name": "t", "description": "Own"}),
    ],
)
def test_namespace_is_part_of_the_name(namespace, description, expected):
    function = {"name": "t"} | ({} if description is None else {"description": description})
    outside = encode([system(tools=[{"namespace": namespace, "function": function}])])
    assert schemas(outside) == [expected]
    assert list(schemas(outside)[0]) == list(expected)
    assert encode([system(tools=[{"function": {**function, "namespace": namespace}}])]) == outside


def test_namespace_of_a_call_is_part_of_the_name():
    written = encode([user(), assistant("", tool_calls=[call("db::get", {})])])
    for space in ("db", {"name": "db", "description": "All"}):
        assert encode([user(), assistant("", tool_calls=[call("get", {}, namespace=space)])]) == written
    calls = parse_completion(written.partition(THINK_END)[2], thinking_mode="chat")["tool_calls"]
    assert calls == [call("get", "{}", namespace="db")]
