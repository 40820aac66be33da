"""Chat messages read into the turns that a prompt is written from. Everything is checked here, before a letter is written.

A message is a dict in OpenAI's form. Content is text, or a list of blocks: `text`, `image_url` (OpenAI) and `image` (with url,
source or data). Neighbouring user and tool messages are one user turn: the model hears of results from the user. Fields that are
not known are ignored. Every fault is a `PromptError` with the path of the place: `messages[2].tool_calls[0].function.name`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from csa2_jax.prompt_format import IMAGE, PARAMETER, PARAMETER_END, SCOPE, TASKS, PromptError, refusal, to_json

EFFORTS = {"low": 50, "high": 75, "max": 100}
DEFAULT_EFFORT = "high"
ROLES = ("system", "user", "assistant", "tool", "latest_reminder")
# Fields that say something in one role only; in another they would be lost without a word.
_OWNERS = {
    "tools": "system",
    "response_format": "system",
    "tool_calls": "assistant",
    "reasoning_content": "assistant",
    "tool_call_id": "tool",
}


@dataclass(frozen=True)
class Part:
    """A piece of a turn's content as it is written; `answers` is the id of the call whose result it is ("" if it names none)."""

    text: str
    images: tuple[dict[str, Any], ...] = ()
    answers: str | None = None


@dataclass(frozen=True)
class Call:
    """A tool call of the assistant: its name with the namespace, its parameters as they are written."""

    id: str
    name: str
    parameters: tuple[str, ...]


@dataclass
class Turn:
    """One message, or neighbouring user and tool messages in one (role "user")."""

    role: str
    parts: list[Part] = field(default_factory=list)
    task: str | None = None
    # of a system message, as JSON
    tools: list[str] = field(default_factory=list)
    response_format: str = ""
    # of an assistant message
    reasoning: str = ""
    calls: list[Call] = field(default_factory=list)
    open_end: bool = False

    @property
    def content(self) -> str:
        return "\n\n".join(part.text for part in self.parts)

    @property
    def images(self) -> list[dict[str, Any]]:
        return [image for part in self.parts for image in part.images]


def read_effort(value: Any) -> int:
    """A reasoning effort as a number from 1 to 100; None is the default."""
    effort = DEFAULT_EFFORT if value is None else value
    if isinstance(effort, str) and effort in EFFORTS:
        return EFFORTS[effort]
    if not isinstance(effort, int) or isinstance(effort, bool) or not 1 <= effort <= 100:
        raise refusal("reasoning_effort", value, f"give a whole number from 1 to 100 or one of {', '.join(EFFORTS)}")
    return effort


def read_turns(where: str, messages: Any) -> list[Turn]:
    """The turns of `messages`. A user turn with a task is complete; a task comes last in a turn of several messages."""
    turns: list[Turn] = []
    for i, message in enumerate(_list(where, messages, "messages")):
        turn = _turn(f"{where}[{i}]", message)
        last = turns[-1] if turns else None
        if last is not None and last.role == turn.role == "user" and last.task is None:
            last.parts += turn.parts
            last.task = turn.task
        else:
            turns.append(turn)
    return turns


def order_results(turns: Sequence[Turn]) -> None:
    """Puts the results in a turn in the order of the latest calls, within the places that results have there.

    A result that names none of those calls stands with the first.
    """
    order: dict[str | None, int] = {}
    for turn in turns:
        if turn.calls:
            order = {call.id: i for i, call in enumerate(turn.calls) if call.id}
        places = [i for i, part in enumerate(turn.parts) if part.answers is not None]
        results = sorted((turn.parts[i] for i in places), key=lambda part: order.get(part.answers, 0))
        for i, part in zip(places, results, strict=True):
            turn.parts[i] = part


def _turn(where: str, message: Any) -> Turn:
    role = _required(where, _object(where, message, "a message"), "role")
    if role == "developer":
        raise refusal(f"{where}.role", role, "this model has no developer; send the message as system")
    if role not in ROLES:
        raise refusal(f"{where}.role", role, f"choose from {', '.join(ROLES)}")
    for name, owner in _OWNERS.items():
        if role != owner and message.get(name):
            raise refusal(
                f"{where}.{name}", message[name], f"only role {owner} has it, and this message is of role {role}"
            )
    turn = _READERS[role](where, message)
    turn.task = message.get("task")
    if turn.task is not None and (not isinstance(turn.task, str) or turn.task not in TASKS):
        raise refusal(f"{where}.task", turn.task, f"choose from {', '.join(TASKS)}")
    return turn


def _system(where: str, message: Mapping[str, Any]) -> Turn:
    tools = _list(f"{where}.tools", message.get("tools"), "tools", optional=True)
    schemas = [_tool_schema(f"{where}.tools[{i}]", tool) for i, tool in enumerate(tools)]
    form = message.get("response_format")
    if form is not None:
        form = _object(f"{where}.response_format", form, "a response format")
    response_format = _json(f"{where}.response_format", form) if form else ""
    parts = _parts(where, message, optional=bool(schemas or response_format))
    return Turn("system", parts, tools=schemas, response_format=response_format)


def _user(where: str, message: Mapping[str, Any]) -> Turn:
    return Turn("user", _parts(where, message))


def _assistant(where: str, message: Mapping[str, Any]) -> Turn:
    reasoning = message.get("reasoning_content")
    reasoning = "" if reasoning is None else _plain(f"{where}.reasoning_content", reasoning)
    calls = _list(f"{where}.tool_calls", message.get("tool_calls"), "tool calls", optional=True)
    calls = [_call(f"{where}.tool_calls[{i}]", call) for i, call in enumerate(calls)]
    open_end = message.get("wo_eos")
    if open_end is not None and not isinstance(open_end, bool):
        raise refusal(f"{where}.wo_eos", open_end, "give True to leave the end of the message open, or False")
    parts = _parts(where, message, optional=bool(calls or reasoning))
    return Turn("assistant", parts, reasoning=reasoning, calls=calls, open_end=bool(open_end))


def _tool(where: str, message: Mapping[str, Any]) -> Turn:
    call = _optional_text(f"{where}.tool_call_id", message.get("tool_call_id"))
    result = Turn("user", _parts(where, message))
    return Turn("user", [Part(f"<tool_result>{result.content}</tool_result>", tuple(result.images), call)])


def _reminder(where: str, message: Mapping[str, Any]) -> Turn:
    return Turn("latest_reminder", _parts(where, message))


_READERS = {"system": _system, "user": _user, "assistant": _assistant, "tool": _tool, "latest_reminder": _reminder}


def _parts(where: str, message: Mapping[str, Any], optional: bool = False) -> list[Part]:
    """The content of a message; where it is optional, None and nothing at all are no content."""
    if optional and message.get("content") is None:
        return []
    where, content = f"{where}.content", _required(where, message, "content")
    if isinstance(content, str):
        return [Part(_plain(where, content))]
    blocks = _list(where, content, "text and image blocks, or text")
    return [_block(f"{where}[{i}]", block) for i, block in enumerate(blocks)]


def _block(where: str, block: Any) -> Part:
    kind = _required(where, _object(where, block, "a content block"), "type")
    if kind == "text":
        return Part(_plain(f"{where}.text", _required(where, block, "text")))
    if kind == "image_url":
        where, url = f"{where}.image_url", _required(where, block, "image_url")
        if isinstance(url, Mapping):
            where, url = f"{where}.url", _required(where, url, "url")
        return Part(IMAGE, ({"type": "image", "url": _name(where, url)},))
    if kind == "image":
        record = {key: block[key] for key in ("source", "url", "data") if block.get(key)}
        for key, value in record.items():
            if not isinstance(value, str | bytes | Mapping):
                raise refusal(f"{where}.{key}", value, "give text, bytes or a dict")
        if not record:
            raise refusal(where, block, "give the image a url, a source or data")
        return Part(IMAGE, ({"type": "image", **record},))
    raise refusal(f"{where}.type", kind, "choose from text, image_url, image")


def _tool_schema(where: str, tool: Any) -> str:
    """The JSON of a tool's function: its name behind the namespace, its description below that of the namespace."""
    function = _function(where, tool, "a tool")
    schema = {**function, "name": _qualified_name(where, tool, function)}
    schema.pop("namespace", None)
    own = schema.get("description")
    if own is not None and not isinstance(own, str):
        raise refusal(f"{where}.function.description", own, "give text")
    if schema.get("parameters") is not None:
        _object(f"{where}.function.parameters", schema["parameters"], "a JSON schema")
    space = _namespace(where, tool, function)
    about = space.get("description") if isinstance(space, Mapping) else None
    about = _optional_text(f"{where}.namespace.description", about)
    if about:
        if "description" not in schema:
            schema = {"name": schema["name"], "description": None} | schema
        schema["description"] = f"{about}\n{own or ''}"
    return _json(where, schema)


def _call(where: str, call: Any) -> Call:
    function = _function(where, call, "a tool call")
    identity = _optional_text(f"{where}.id", call.get("id"))
    name = _qualified_name(where, call, function)
    arguments = given = _required(f"{where}.function", function, "arguments")
    where = f"{where}.function.arguments"
    if isinstance(given, str):
        try:
            arguments = json.loads(given)
        except (ValueError, RecursionError):
            arguments = {"arguments": given}  # what a model got wrong stays in its history as it was
    if not isinstance(arguments, Mapping):
        raise refusal(where, given, "give a JSON object, one member per parameter")
    return Call(identity, name, tuple(_parameter(where, key, value) for key, value in arguments.items()))


def _parameter(where: str, key: Any, value: Any) -> str:
    key = _plain(f"a key of {where}", key)
    where = f"{where}[{key!r}]"
    is_string = isinstance(value, str)
    text = _plain(where, value) if is_string else _json(where, value)
    return f'{PARAMETER}{key}" string="{"true" if is_string else "false"}">{text}{PARAMETER_END}'


def _function(where: str, tool: Any, what: str) -> Mapping[str, Any]:
    kind = _object(where, tool, what).get("type", "function")
    if kind != "function":
        raise refusal(f"{where}.type", kind, "the only type is function")
    return _object(f"{where}.function", _required(where, tool, "function"), "a function")


def _namespace(where: str, tool: Mapping[str, Any], function: Mapping[str, Any]) -> Any:
    """The namespace of a tool or a call: text, or a dict with a name. It may stand beside the function or in it."""
    outer, inner = tool.get("namespace"), function.get("namespace")
    if outer is not None and inner is not None:
        raise refusal(f"{where}.function.namespace", inner, "there is one beside the function too; give one of them")
    return inner if outer is None else outer


def _qualified_name(where: str, tool: Mapping[str, Any], function: Mapping[str, Any]) -> str:
    name = _name(f"{where}.function.name", _required(f"{where}.function", function, "name"))
    space = _namespace(where, tool, function)
    if space is None:
        return name
    place = f"{where}.namespace"
    if isinstance(space, Mapping):
        place, space = f"{place}.name", _required(place, space, "name")
    for part, value in ((place, _name(place, space)), (f"{where}.function.name", name)):
        if SCOPE in value:
            raise refusal(part, value, f"{SCOPE} joins the namespace and the name, so neither may contain it")
    return f"{space}{SCOPE}{name}"


def _required(where: str, value: Mapping[str, Any], name: str) -> Any:
    if name not in value:
        raise PromptError(f"{where}.{name} is missing: it is required")
    if value[name] is None:
        raise refusal(f"{where}.{name}", None, "it is required")
    return value[name]


def _object(where: str, value: Any, what: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise refusal(where, value, f"give {what}, a dict")
    return value


def _list(where: str, value: Any, what: str, optional: bool = False) -> Sequence[Any]:
    if optional and value is None:
        return ()
    if not isinstance(value, list | tuple):
        raise refusal(where, value, f"give a list of {what}")
    return value


def _plain(where: str, value: Any) -> str:
    """Text that may be written into a prompt as it stands."""
    if not isinstance(value, str):
        raise refusal(where, value, "give text")
    if IMAGE in value:
        raise refusal(
            where, value, f"{IMAGE} is written where an image stands; take it out, and give images as content blocks"
        )
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise refusal(where, value, f"it is no Unicode text ({error})") from None
    return value


def _optional_text(where: str, value: Any) -> str:
    return "" if value is None else _plain(where, value)


def _name(where: str, value: Any) -> str:
    if not _plain(where, value):
        raise refusal(where, value, "it must not be empty")
    return value


def _json(where: str, value: Any) -> str:
    try:
        text = to_json(value)
    except (TypeError, ValueError, RecursionError) as error:
        raise refusal(where, value, f"it cannot be written as JSON ({error})") from None
    return _plain(where, text)
