"""Conversations in few words, for the tests of prompts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from csa2_jax.prompt import encode_messages

# What the released encoder made of conversations, and of completions.
CASES = json.loads((Path(__file__).parent / "golden" / "prompts.json").read_text(encoding="utf-8"))
OPTIONS = ("thinking_mode", "context", "drop_thinking", "reasoning_effort")


def encode(messages: Any, mode: str = "chat", **options: Any) -> str:
    return encode_messages(messages, thinking_mode=mode, **options).text


def user(content: Any = "U", **fields: Any) -> dict[str, Any]:
    return {"role": "user", "content": content, **fields}


def assistant(content: Any = "A", **fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **fields}


def system(content: Any = "S", **fields: Any) -> dict[str, Any]:
    return {"role": "system", "content": content, **fields}


def result(call: str, content: Any) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call, "content": content}


def call(name: Any, arguments: Any, **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": arguments}, **fields}


def tool(name: Any = "t", **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}, **fields}


def schemas(prompt: str) -> list[dict[str, Any]]:
    """What a prompt tells of its tools."""
    return [json.loads(line) for line in prompt.splitlines() if line.startswith('{"name"')]
