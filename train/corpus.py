"""The text that the shipped model is trained on: the sources of Python's library, and questions that their docstrings answer.

    python -m train.corpus

writes train.jsonl, held_out.jsonl and a folder `model` with tokenizer.json and config.json. Sources are those of the standard
library, without its tests; they are read and parsed, never imported. Every function, class and module with a docstring gives a
question and an answer in the released prompt format. One file and one question in twenty are held out.
"""

from __future__ import annotations

import ast
import dataclasses
import hashlib
import json
import os
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import tyro

from csa2_jax.config import ModelConfig
from csa2_jax.ngram import ngram_constants
from csa2_jax.prompt import encode_messages
from csa2_jax.prompt_format import ASSISTANT, BOS, EOS, REMINDER, SYSTEM, TASKS, THINK, THINK_END, USER
from csa2_jax.token_map import tokenizer_map

PAD: Final = "<｜▁pad▁｜>"
NOISE: Final = "<｜noise｜>"
SPECIAL: Final = (BOS, EOS, PAD, USER, ASSISTANT, SYSTEM, REMINDER, THINK, THINK_END, NOISE, *TASKS.values())
VOCABULARY: Final = 2048
_LEFT_OUT: Final = {
    "test",
    "tests",
    "site-packages",
    "dist-packages",
    "__pycache__",
    "idlelib",
    "turtledemo",
    "lib2to3",
    "encodings",
}
_EVERY: Final = 20
_LONGEST: Final = 600  # characters of an answer
_QUESTIONS: Final = (
    "What does {name} do?",
    "Explain {name}.",
    "What is {name} for?",
    "How do I call {name}?",
)


@dataclasses.dataclass(frozen=True)
class Answered:
    """A question about the library and what its docstring answers."""

    name: str
    question: str
    answer: str


def library_files(root: Path | None = None) -> list[Path]:
    """The standard library's sources, in order of name."""
    root = Path(sysconfig.get_path("stdlib")) if root is None else root
    found = (p for p in root.rglob("*.py") if not _LEFT_OUT & set(p.relative_to(root).parts[:-1]))
    return sorted(found)


def held_out(name: str) -> bool:
    """Whether a file or question is one in twenty that training does not see: decided by its name alone."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big") % _EVERY == 0


def answered_questions(source: str, module: str) -> Iterator[Answered]:
    """Questions that the docstrings of one file answer: about the module, its public functions, classes and their methods."""
    tree = ast.parse(source)
    yield from _answered(tree, module, module, f"import {module}")
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and not node.name.startswith("_"):
            name = f"{module}.{node.name}"
            yield from _answered(node, name, name, _call(node, name))
            if isinstance(node, ast.ClassDef):
                for inner in node.body:
                    if isinstance(inner, ast.FunctionDef) and not inner.name.startswith("_"):
                        whole = f"{name}.{inner.name}"
                        yield from _answered(inner, whole, whole, _call(inner, f"{node.name}.{inner.name}"))


def _answered(node: Any, name: str, shown: str, call: str) -> Iterator[Answered]:
    text = ast.get_docstring(node)
    if not text:
        return
    summary = " ".join(text.strip().split("\n\n")[0].split())
    if not 12 <= len(summary) <= _LONGEST:
        return
    which = int.from_bytes(hashlib.sha256(f"{name}?".encode()).digest()[:4], "big") % len(_QUESTIONS)
    question = _QUESTIONS[which].format(name=shown)
    answer = f"`{call}`\n\n{summary}" if which == 3 else summary
    yield Answered(name, question, answer)


def _call(node: Any, name: str) -> str:
    if isinstance(node, ast.ClassDef):
        start = next((n for n in node.body if isinstance(n, ast.FunctionDef) and n.name == "__init__"), None)
        arguments = "" if start is None else ast.unparse(start.args)
    else:
        arguments = ast.unparse(node.args)
    arguments = arguments.removeprefix("self, ").removeprefix("cls, ")
    return f"{name}({'' if arguments in ('self', 'cls') else arguments})"


def chat_prompt(question: str) -> str:
    """The prompt of a question, as `csa2 chat` writes it, without the beginning that every document gets."""
    return encode_messages([{"role": "user", "content": question}], thinking_mode="chat").text.removeprefix(BOS)


def documents(root: Path | None = None) -> Iterator[tuple[str, dict[str, str]]]:
    """(name, record of a JSONL file) of everything: a file's source as text, a question as prompt and completion."""
    root = Path(sysconfig.get_path("stdlib")) if root is None else root
    for path in library_files(root):
        name = path.relative_to(root).as_posix()
        try:
            source = path.read_text(encoding="utf-8")
            module = name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
            questions = list(answered_questions(source, module))
        except (UnicodeDecodeError, SyntaxError, ValueError):
            continue  # a few files of the library are made to be broken
        yield name, {"text": f"# {name}\n{source}"}
        if not any(part.startswith("_") for part in module.split(".")):
            for one in questions:
                yield one.name, {"prompt": chat_prompt(one.question), "completion": one.answer}


def train_tokenizer(texts: Sequence[str], size: int = VOCABULARY) -> Any:
    """Byte-level BPE of `size` tokens: the special ones of the prompt format first, then what is frequent."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=sys.stderr.isatty(),
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def fit_config(template: Path, tokenizer_file: Path) -> dict[str, Any]:
    """The configuration `template` for a tokenizer: vocabulary, special ids, compressed ids and rows of the n-gram tables."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(tokenizer_file))
    config = json.loads(template.read_text(encoding="utf-8"))
    text = config["text_config"]
    size = tokenizer.get_vocab_size(with_added_tokens=True)
    compressed = int(tokenizer_map(tokenizer_file, size).max()) + 1
    config.update(
        bos_token_id=tokenizer.token_to_id(BOS),
        eos_token_id=tokenizer.token_to_id(EOS),
        pad_token_id=tokenizer.token_to_id(PAD),
    )
    text.update(
        vocab_size=size, engram_compressed_vocab_size=compressed, engram_pad_token_id=tokenizer.token_to_id(PAD)
    )
    if text["num_nextn_predict_layers"]:
        text["dspark_noise_token_id"] = tokenizer.token_to_id(NOISE)
    constants = ngram_constants(
        tuple(text["engram_layer_ids"]),
        floor=text["engram_vocab_size"],
        heads=text["engram_n_heads"],
        max_ngram=text["engram_max_ngram_size"],
        compressed_vocab=compressed,
    )
    text["engram_num_embeddings"] = [int(c.primes.sum()) for c in constants]
    ModelConfig.from_hf(config)
    return config


@dataclasses.dataclass(frozen=True)
class Arguments:
    """Write the text, the tokenizer and the configuration that the shipped model is trained on."""

    out: Path = Path("build/default")
    """Folder of train.jsonl, held_out.jsonl and model."""
    template: Path = Path("configs/train_default.json")
    """The model's configuration; what depends on the tokenizer is filled in."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run `python -m train.corpus argv`; returns the exit code."""
    arguments = tyro.cli(Arguments, prog="python -m train.corpus", args=argv)
    model = arguments.out / "model"
    model.mkdir(parents=True, exist_ok=True)
    everything = list(documents())
    for name, wanted in (("train", False), ("held_out", True)):
        lines = [json.dumps(record, ensure_ascii=False) for key, record in everything if held_out(key) == wanted]
        part = arguments.out / f"{name}.part"
        part.write_text("\n".join(lines) + "\n", encoding="utf-8")
        os.replace(part, arguments.out / f"{name}.jsonl")
        print(f"{name}.jsonl: {len(lines):,} documents", file=sys.stderr)
    texts = [" ".join(record.values()) for key, record in everything if not held_out(key)]
    train_tokenizer(texts).save(str(model / "tokenizer.json"))
    config = fit_config(arguments.template, model / "tokenizer.json")
    (model / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    print(f"{model}: tokenizer.json of {config['text_config']['vocab_size']:,} tokens, config.json", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
