"""Chat messages, tools and thinking levels to prompt text, and completions back to messages.

    prompt    = begin-of-sentence turn*
    system    = System text ["\\n\\n" tools] ["\\n\\n" response format]
    user      = User part ("\\n\\n" part)*                 texts, images and tool results of neighbouring user and tool messages
    reminder  = latest_reminder text
    assistant = [reasoning </think>] text ["\\n\\n" calls] end-of-sentence     (the form of completions, see `prompt_parse`)

A user turn, and a system turn that is not the first, *asks*: if an assistant or a reminder follows, or nothing, then
`Assistant <think>` is written behind it, or `Assistant </think>` where the answer has no reasoning. Answers have reasoning in
thinking mode; if thinking is dropped and the conversation has no tools, only behind the last turn that asks. In thinking mode the
conversation opens with System and the effort line, whatever its first turn is. Special tokens that stand in a message's text are
passed on, except the image placeholder.

Source: the encoding of the DeepSeek-V4.1-Flash release, as its README describes it; the namespaces of tools are those of its
later revision. `tests/golden/prompts.json` holds recorded cases.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from csa2_jax.prompt_format import (
    ASSISTANT,
    BOS,
    CALLS,
    CALLS_END,
    EOS,
    INVOKE,
    INVOKE_END,
    PARAMETER,
    PARAMETER_END,
    REMINDER,
    SYSTEM,
    TASKS,
    THINK,
    THINK_END,
    USER,
    PromptError,
    check_mode,
    refusal,
)
from csa2_jax.prompt_messages import Call, Turn, order_results, read_effort, read_turns
from csa2_jax.prompt_parse import CompletionStream, parse_completion

__all__ = ["CompletionStream", "Prompt", "PromptError", "encode_messages", "parse_completion"]

# The words are the model's, not ours: it was trained on them.
_EFFORT = "Reasoning Effort: {} (range 1-100, the higher the value, the more thorough the reasoning)\n\n"
_RESPONSE_FORMAT = "\n\n## Response Format:\n\nYou MUST strictly adhere to the following schema to reply:\n"
_TOOLS = f"""

## Tools

You have access to a set of tools to help answer the user's question. \
You can invoke tools by writing a "{CALLS}" block like the following:

{CALLS}
{INVOKE}$TOOL_NAME">
{PARAMETER}$PARAMETER_NAME" string="true|false">$PARAMETER_VALUE{PARAMETER_END}
...
{INVOKE_END}
{INVOKE}$TOOL_NAME2">
...
{INVOKE_END}
{CALLS_END}

String parameters should be specified as is and set `string="true"`. For all other types (numbers, booleans, arrays, objects), \
pass the value in JSON format and set `string="false"`.

If thinking_mode is enabled (triggered by {THINK}), you MUST output your complete reasoning inside {THINK}...{THINK_END} \
BEFORE any tool calls or final response.

Otherwise, output directly after {THINK_END} with tool calls or final response.

### Available Tool Schemas

"""
_TOOLS_END = "\n\nYou MUST strictly follow the above defined tool name and parameter schemas to invoke tool calls.\n"


@dataclass(frozen=True)
class Prompt:
    """Text for the tokenizer, and the images that its placeholders stand for, in the order of the text."""

    text: str
    images: list[dict[str, Any]]


def encode_messages(
    messages: Sequence[Mapping[str, Any]],
    *,
    thinking_mode: str,
    context: Sequence[Mapping[str, Any]] | None = None,
    drop_thinking: bool = True,
    reasoning_effort: str | int | None = None,
) -> Prompt:
    """The prompt of a conversation, up to where the model is to go on.

    Roles are system, user, assistant, tool and latest_reminder. A system message may have `tools` and a `response_format`, an
    assistant message `reasoning_content`, `tool_calls` and `wo_eos` (true leaves its end open, to be continued), a tool message
    a `tool_call_id`, and any message a `task`, whose token is written where the turn would hand over. `prompt_messages` tells
    what contents may be.

    Args:
        messages: what to write.
        thinking_mode: "thinking" or "chat".
        context: messages before these that the model has read already: they count as conversation, but are not written again.
        drop_thinking: leave out the reasoning of earlier answers, unless the conversation has tools.
        reasoning_effort: 1 to 100, or low (50), high (75, the default), max (100). Chat mode checks it and has no use for it.

    Raises PromptError, which names the place, what stands there and the remedy, for anything else.
    """
    thinking, effort = check_mode(thinking_mode), read_effort(reasoning_effort)
    if not isinstance(drop_thinking, bool):
        raise refusal("drop_thinking", drop_thinking, "give True or False")
    before = [] if context is None else read_turns("context", context)
    turns = read_turns("messages", messages)
    order_results(before + turns)
    writer = _Writer(before + turns, thinking, drop_thinking, effort)
    text = "".join(writer.turn(i) for i in range(len(before), len(before) + len(turns)))
    return Prompt(text if before else BOS + text, [image for turn in turns for image in turn.images])


@dataclass(frozen=True)
class _Writer:
    """Writes single turns of a conversation."""

    turns: Sequence[Turn]
    thinking: bool
    drop_thinking: bool
    effort: int

    def turn(self, i: int) -> str:
        return self._opening(i) + self._body(i) + self._handover(i)

    @cached_property
    def _last_asked(self) -> int:
        """The turn whose answer is the first to have reasoning in thinking mode; -1 if all have."""
        if not self.drop_thinking or any(turn.tools for turn in self.turns):
            return -1
        return max((i for i in range(len(self.turns)) if self._asks(i)), default=-1)

    def _asks(self, i: int) -> bool:
        return self.turns[i].role == "user" or (self.turns[i].role == "system" and i > 0)

    def _opening(self, i: int) -> str:
        effort = _EFFORT.format(self.effort) if self.thinking and i == 0 else ""
        return SYSTEM + effort if effort or self.turns[i].role == "system" else ""

    def _body(self, i: int) -> str:
        turn = self.turns[i]
        if turn.role == "system":
            tools = _TOOLS + "\n".join(turn.tools) + _TOOLS_END if turn.tools else ""
            return turn.content + tools + (_RESPONSE_FORMAT + turn.response_format if turn.response_format else "")
        if turn.role != "assistant":
            return (USER if turn.role == "user" else REMINDER) + turn.content
        # What a task asks for is short, and comes without reasoning.
        after_task = i > 0 and self.turns[i - 1].task is not None
        thought = turn.reasoning + THINK_END if self.thinking and i > self._last_asked and not after_task else ""
        return thought + turn.content + (_calls(turn.calls) if turn.calls else "") + ("" if turn.open_end else EOS)

    def _handover(self, i: int) -> str:
        turn = self.turns[i]
        if i + 1 < len(self.turns) and self.turns[i + 1].role not in ("assistant", "latest_reminder"):
            return ""
        if turn.task == "action":  # the one task that is answered from within the assistant's turn
            return ASSISTANT + (THINK if self.thinking else THINK_END) + TASKS["action"]
        if turn.task is not None:
            return TASKS[turn.task]
        if not self._asks(i):
            return ""
        return ASSISTANT + (THINK if self.thinking and i >= self._last_asked else THINK_END)


def _calls(calls: Sequence[Call]) -> str:
    # A call without parameters has an empty line in their place.
    lines = [f'{INVOKE}{call.name}">\n' + "\n".join(call.parameters) + f"\n{INVOKE_END}" for call in calls]
    return "\n\n" + "\n".join((CALLS, *lines, CALLS_END))
