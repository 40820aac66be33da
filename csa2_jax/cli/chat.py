"""`csa2 chat`: a conversation in the terminal."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import itertools
import json
import sys
from collections.abc import Callable, Generator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

if TYPE_CHECKING:
    from rich.console import Console

    from csa2_jax.conversation import Conversation

_STYLES: Final = {"reasoning": "dim italic", "content": "", "tool_call": "cyan"}


def main(
    model: Path | None = None,
    system: str | None = None,
    thinking: bool = False,
    effort: str | None = None,
    temperature: float = 0.6,
    top_p: float = 0.95,
    top_k: int = 0,
    seed: int = 0,
    max_new_tokens: int = 1024,
    max_length: int | None = None,
    speculative: bool | None = None,
    storage: Literal["bf16", "f32", "packed"] | None = None,
    compute_dtype: Literal["bfloat16", "float32"] = "bfloat16",
    fake_quant: bool = True,
    weights: Literal["stored", "float32", "bfloat16"] = "stored",
    implementation: Literal["xla", "pallas_tpu", "pallas_gpu"] | None = None,
    load: Path | None = None,
) -> int:
    """Talk with a model. Answers stream as they are made; Ctrl-C ends an answer and keeps what came of it.

    Type /help in the conversation for its commands, such as /retry, /reset, /save, /load, /thinking and /stats.

    Args:
        model: directory with config.json, safetensors and tokenizer.json in the release layout; by default the small model that
            comes with the package, which has read Python's library and nothing else.
        system: a system message to begin with.
        thinking: let the model reason before it answers (shown dimmed).
        effort: of the reasoning: low, high, max, or 1 to 100.
        temperature: 0 always takes the likeliest token; higher is more varied.
        top_p: draw from the likeliest tokens that together have this probability; 1 for all.
        top_k: draw from the k likeliest tokens only; 0 for all.
        seed: equal seeds and equal messages give equal answers.
        max_new_tokens: the longest answer.
        max_length: tokens the whole conversation may have (by default 32,768, or what the model takes).
        speculative: draft and verify; by default where the model has a draft head.
        storage: what the cache stores; by default packed with roundings on, else bf16 (f32 on CPUs).
        compute_dtype: what activations are rounded to.
        fake_quant: apply the roundings to fp8 and fp4 the model was trained with.
        weights: keep them as stored (fp8, fp4), or dequantise to one dtype while loading.
        implementation: which kernels run (by default the best that is proven on this device).
        load: go on with a conversation that /save wrote.
    """
    from rich.console import Console

    from csa2_jax.config import ModelConfig
    from csa2_jax.embedded import default_model
    from csa2_jax.sampling import Sampling
    from csa2_jax.tokenizer import find_tokenizer

    console = Console(highlight=False)
    sampling = Sampling(temperature, top_k, top_p, seed)
    title = "the model that comes with the package: ask it what something in Python's library does"
    if model is None:
        model = default_model()
    else:
        title = model.resolve().name
    config = ModelConfig.from_hf(model)
    tokenizer = find_tokenizer(model, config)
    if tokenizer is None:
        raise ValueError(f"{model} has no tokenizer.json, and chat needs one: put the model's tokenizer.json there")
    if storage == "packed" and not fake_quant:
        raise ValueError("--storage packed keeps rounded numbers and needs --fake-quant")
    if load is not None and system is not None:
        raise ValueError("--load brings its own system message: give either --load or --system")
    drafts = bool(config.num_nextn_predict_layers) if speculative is None else speculative
    level: Any = int(effort) if effort is not None and effort.isdigit() else effort
    history = None if load is None else read_history(load)

    from csa2_jax.checkpoint import load_checkpoint
    from csa2_jax.cli.programs import keep_programs
    from csa2_jax.conversation import Conversation
    from csa2_jax.engine import Engine

    keep_programs()
    with console.status("reading the weights"):
        loaded = load_checkpoint(
            model, compute_dtype=compute_dtype, fake_quant=fake_quant, weights=weights, implementation=implementation
        )
    engine = Engine(
        loaded,
        slots=1,
        max_length=min(32768, config.max_position_embeddings) if max_length is None else max_length,
        storage=storage or ("packed" if fake_quant else None),
        speculative=drafts,
        tokenizer=tokenizer,
    )
    conversation = Conversation(
        engine,
        system=system,
        thinking_mode="thinking" if thinking else "chat",
        effort=level,
        sampling=sampling,
        max_new_tokens=max_new_tokens,
    )
    if history is not None:
        conversation.messages = history
    console.print(f"[bold]{title}[/]  [dim]/help tells the commands, Ctrl-C ends an answer, Ctrl-D leaves[/]")
    return Terminal(conversation, console).run()


class Terminal:
    """Reads lines, runs commands, prints answers."""

    def __init__(self, conversation: Conversation, console: Console, read: Callable[[], str] | None = None) -> None:
        self.conversation, self.console = conversation, console
        self._read = read or (lambda: input("> " if sys.stdin.isatty() else ""))
        self.commands: dict[str, tuple[str, Callable[[str], bool | None]]] = {
            "help": ("what can be typed", self._help),
            "retry": ("answer the last message again", lambda _: self._show(self.conversation.retry())),
            "reset": ("forget the conversation, keep the system message", lambda _: self.conversation.reset()),
            "system": ("TEXT  set the system message (of a conversation that starts anew)", self._system),
            "thinking": ("on|off  reason before answering", self._thinking),
            "temperature": ("NUMBER  0 always takes the likeliest token", self._temperature),
            "save": ("FILE  write the conversation as JSON", self._save),
            "load": ("FILE  go on with a conversation that /save wrote", self._load),
            "stats": ("tokens, speed and accepted drafts", self._stats),
            "exit": ("leave", lambda _: True),
        }

    def run(self) -> int:
        """Until /exit or the end of the input."""
        with contextlib.suppress(ImportError):  # arrow keys and history, where the platform has them
            importlib.import_module("readline")
        while True:
            try:
                line = self._read().strip()
            except EOFError:
                self.console.print()
                return 0
            except KeyboardInterrupt:
                self.console.print("\n[dim]Ctrl-D or /exit leaves[/]")
                continue
            try:
                if line and self._line(line):
                    return 0
            except KeyboardInterrupt:
                self.console.print("\n[dim]Ctrl-D or /exit leaves[/]")
            except Exception as error:  # whatever it was, the conversation goes on
                self._say(f"{type(error).__name__}: {error}", "red")

    def _line(self, line: str) -> bool | None:
        if not line.startswith("/"):
            return self._show(self.conversation.say(line))
        name, _, rest = line[1:].partition(" ")
        if name not in self.commands:
            raise ValueError(f"/{name} is no command; /help tells them (a message may not begin with a slash)")
        return self.commands[name][1](rest.strip())

    def _show(self, answer: Generator[tuple[str, str], None, None]) -> None:
        last = ""
        try:
            # The first answer waits for the programs to be compiled, others for no more than their prompt.
            with self.console.status("compiling, once" if not self.conversation.turn.tokens else "reading"):
                first = list(itertools.islice(answer, 1))
            for kind, text in itertools.chain(first, answer):
                if last and kind != last:
                    self.console.print("\n")
                last = kind
                self.console.print(text, style=_STYLES[kind], end="", markup=False, soft_wrap=True)
        except KeyboardInterrupt:
            answer.close()
            self.console.print("\n[yellow]ended here[/]", end="")
        self.console.print()
        turn = self.conversation.turn
        if turn.finished == "length":
            self.console.print("[yellow]the answer reached its length limit[/]")
        if turn.note:
            self._say(f"the answer does not follow the format: {turn.note}", "yellow")
        self._say(self._summary(), "dim")

    def _say(self, text: str, style: str) -> None:
        """A line that may hold anything."""
        self.console.print(text, style=style, markup=False)

    def _summary(self) -> str:
        turn, acceptance = self.conversation.turn, self.conversation.engine.acceptance
        parts = [f"{turn.tokens} tokens", f"first after {turn.first_token:.2f} s"]
        if turn.rate == turn.rate:
            parts.append(f"then {turn.rate:.1f} tokens/s")
        if acceptance.rounds:
            parts.append(f"{acceptance.tokens_per_round:.2f} tokens a round")
        parts.append(f"{turn.reused_tokens:,} of {turn.prompt_tokens:,} prompt tokens reused")
        return " · ".join(parts)

    def _help(self, _: str) -> None:
        for name, (text, _f) in self.commands.items():
            self.console.print(f"  /{name:12} {text}", markup=False)

    def _system(self, text: str) -> None:
        if any(m["role"] != "system" for m in self.conversation.messages):
            raise ValueError("the system message begins a conversation: /reset first")
        self.conversation.messages = [{"role": "system", "content": text}] if text else []

    def _thinking(self, text: str) -> None:
        if text not in ("on", "off"):
            raise ValueError(f"/thinking on or /thinking off, found {text!r}")
        self.conversation.thinking_mode = "thinking" if text == "on" else "chat"

    def _temperature(self, text: str) -> None:
        try:
            number = float(text)
        except ValueError:
            raise ValueError(f"/temperature takes a number, found {text!r}") from None
        self.conversation.sampling = dataclasses.replace(self.conversation.sampling, temperature=number)

    def _save(self, text: str) -> None:
        if not text:
            raise ValueError("/save takes the name of a file")
        path = Path(text)
        beside = path.with_name(path.name + ".part")
        beside.write_text(json.dumps(self.conversation.messages, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
        beside.replace(path)  # whole or not at all
        self._say(f"{len(self.conversation.messages)} messages in {path}", "dim")

    def _load(self, text: str) -> None:
        self.conversation.messages = read_history(Path(text))
        self.console.print(f"[dim]{len(self.conversation.messages)} messages[/]")

    def _stats(self, _: str) -> None:
        engine = self.conversation.engine
        self.console.print(self._summary())
        by_place = engine.acceptance.by_place
        if engine.acceptance.rounds:
            shares = ", ".join("-" if share != share else f"{share:.0%}" for share in by_place)
            self.console.print(f"drafts kept, by place: {shares}")
        store = engine.prefixes
        self.console.print(f"kept for reuse: {store.nbytes / 1e6:.1f} MB in {len(store)} blocks, {store.hits} hits")


def read_history(path: Path) -> list[dict[str, Any]]:
    """Messages that /save wrote, checked; ValueError names the file and what is wrong."""
    from csa2_jax.prompt import encode_messages

    try:
        messages = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is no JSON: {error}") from None
    if not isinstance(messages, list):
        raise ValueError(f"{path} must hold a list of messages, found {type(messages).__name__}")
    try:
        encode_messages(messages, thinking_mode="chat")
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    return messages
