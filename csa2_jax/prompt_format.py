"""What prompt text is made of: the special tokens, the markup of tool calls, and the one error for what cannot be said in it.

Source: the encoding of the DeepSeek-V4.1-Flash release, as its README describes it. `tests/golden/prompts.json` holds recorded
cases.
"""

from __future__ import annotations

import json
import reprlib
from typing import Any

BOS = "<｜begin▁of▁sentence｜>"
EOS = "<｜end▁of▁sentence｜>"
SYSTEM = "<｜System｜>"
USER = "<｜User｜>"
ASSISTANT = "<｜Assistant｜>"
REMINDER = "<｜latest_reminder｜>"
IMAGE = "<｜deepseek_image｜>"
THINK = "<think>"
THINK_END = "</think>"
# Short jobs beside the conversation: the token stands where the answer to the job begins.
TASKS = {name: f"<｜{name}｜>" for name in ("action", "query", "authority", "domain", "title", "read_url")}

# Tool calls. The space belongs to the tag's name.
DSML = "｜DSML｜"
CALLS = f"<{DSML} calls>"
CALLS_END = f"</{DSML} calls>"
INVOKE = f'<{DSML} invoke name="'
INVOKE_END = f"</{DSML} invoke>"
PARAMETER = f'<{DSML} parameter name="'
PARAMETER_END = f"</{DSML} parameter>"

# Between the namespace of a tool and its name.
SCOPE = "::"

THINKING_MODES = ("chat", "thinking")


class PromptError(ValueError):
    """A conversation that has no prompt, or a completion that is no message: which place, what stands there, what to do."""


def refusal(where: str, value: Any, remedy: str) -> PromptError:
    """The error for `value` at `where`, such as "messages[2].content"; the caller raises it."""
    try:
        shown = reprlib.repr(value)
    except ValueError:  # Python will not print integers of thousands of digits
        shown = f"something of type {type(value).__name__}"
    return PromptError(f"{where} is {shown}: {remedy}")


def check_mode(thinking_mode: Any) -> bool:
    """Whether the model thinks before it answers."""
    if thinking_mode not in THINKING_MODES:
        raise refusal("thinking_mode", thinking_mode, f"choose from {', '.join(THINKING_MODES)}")
    return thinking_mode == "thinking"


def to_json(value: Any) -> str:
    """JSON as the model knows it: on one line, a space after commas and colons, no escapes outside ASCII."""
    return json.dumps(value, ensure_ascii=False)
