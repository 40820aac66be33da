"""What the model that comes with the package is worth: its loss beside n-grams and gzip, its cache, its drafts, its words.

    python -m train.corpus                 once: the text that it was trained on, and what was held out
    python benchmarks/default_model.py     about ten minutes on two CPU cores

The text is what the running Python brings, so that figures differ a little between versions. n-grams are counted on the same
training tokens and measured on the same held-out ones; gzip sees the same bytes. Documents are read in pieces, each without what
came before it, and the first token of a piece is not predicted; the n-gram model reads them whole.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from csa2_jax import Engine, ModelConfig, Sampling, default_model, init_cache, load_checkpoint
from csa2_jax.conversation import Conversation
from csa2_jax.tokenizer import find_tokenizer
from train.baselines import NGrams, gzip_bits_per_byte
from train.documents import Store, open_store

ORDERS = (2, 3, 4, 5)
ROWS = 8
SHOWN = 4  # answers that are printed


@dataclasses.dataclass(frozen=True)
class Loss:
    """Of one kind of document."""

    nats: float  # per predicted token
    tokens: int


@dataclasses.dataclass(frozen=True)
class Piece:
    """Consecutive tokens of one document, which of them count, and whether they answer a question."""

    ids: np.ndarray
    predict: np.ndarray
    answers: bool


def pieces(store: Store, tokens: int) -> list[Piece]:
    """Documents cut every `tokens` tokens, short ones first so that little is padding."""
    found = []
    for start, end in zip(store.offsets[:-1], store.offsets[1:], strict=True):
        answers = not store.predict[start + 1]  # behind the first token stands a question
        for first in range(int(start), int(end), tokens):
            here = slice(first, min(first + tokens, int(end)))
            if here.stop - here.start > 1:
                found.append(Piece(np.asarray(store.tokens[here]), np.asarray(store.predict[here]), answers))
    return sorted(found, key=lambda piece: len(piece.ids))


def measure_loss(model: Any, store: Store, tokens: int) -> dict[str, Loss]:
    """Mean of -log P over predicted tokens: of sources, of answers to questions, and of both."""

    @jax.jit
    def nll(model: Any, ids_BT: jax.Array, lengths_B: jax.Array) -> jax.Array:
        out, _ = model(ids_BT, None, lengths_B)
        log_p = jax.nn.log_softmax(out.logits[:, :-1], axis=-1)
        return -jnp.take_along_axis(log_p, ids_BT[:, 1:, None], axis=-1)[..., 0]

    sums = {"sources": np.zeros(2), "answers": np.zeros(2)}
    cut = pieces(store, tokens)
    for start in range(0, len(cut), ROWS):
        some = cut[start : start + ROWS]
        width = min(tokens, 1 << (len(some[-1].ids) - 1).bit_length())
        ids_BT, lengths_B = np.zeros((ROWS, width), np.int32), np.zeros(ROWS, np.int32)
        for row, piece in enumerate(some):
            ids_BT[row, : len(piece.ids)], lengths_B[row] = piece.ids, len(piece.ids)
        found = np.asarray(nll(model, ids_BT, lengths_B), np.float64)
        for row, piece in enumerate(some):
            nats = found[row, : len(piece.ids) - 1] @ piece.predict[1:]
            sums["answers" if piece.answers else "sources"] += (nats, piece.predict[1:].sum())
        told(f"{min(start + ROWS, len(cut)):,} of {len(cut):,} pieces")
    sums["both"] = sums["sources"] + sums["answers"]
    return {kind: Loss(nats / max(count, 1), int(count)) for kind, (nats, count) in sums.items()}


def told(text: str, end: str = "\r") -> None:
    """A line of progress, where somebody watches."""
    if sys.stderr.isatty():
        print(f"\x1b[K{text}", end=end, file=sys.stderr, flush=True)


@dataclasses.dataclass(frozen=True)
class Text:
    """What is read and what it weighs."""

    train: Store
    held_out: Store
    held_out_bytes: int
    records: list[dict[str, str]]

    @property
    def bytes_per_token(self) -> float:
        """Of the held-out text."""
        return self.held_out_bytes / len(self.held_out.tokens)


def read_text(folder: Path, model: Path, config: ModelConfig) -> Text:
    """The corpus in `folder`, tokenised for the model."""
    files = [folder / "train.jsonl", folder / "held_out.jsonl"]
    if missing := [str(p) for p in files if not p.is_file()]:
        raise FileNotFoundError(f"{missing[0]} is not there: write the text with python -m train.corpus first")
    train, held_out = (open_store(folder / "tokens", [file], "text", str(model), config) for file in files)
    records = [json.loads(line) for line in files[1].read_text(encoding="utf-8").splitlines()]
    return Text(train, held_out, sum(len("".join(r.values()).encode()) for r in records), records)


def show_losses(model: Any, text: Text, lengths: tuple[int, ...], vocabulary: int) -> None:
    """Bits per byte of the model, of n-grams and of gzip on the held-out text."""
    per_byte = 1 / text.bytes_per_token
    total = len(text.held_out.tokens)
    print(f"held out: {text.held_out_bytes:,} bytes, {total:,} tokens, {text.bytes_per_token:.2f} bytes a token")
    for tokens in lengths:
        began = time.perf_counter()
        for kind, loss in measure_loss(model, text.held_out, tokens).items():
            bits = loss.nats / np.log(2)
            shown = f"{bits * per_byte:.3f} bits per byte" if kind == "both" else ""
            print(f"  model, pieces of {tokens:5,}, {kind:8} {loss.nats:.3f} nats a token ({loss.tokens:,})  {shown}")
        told(f"{time.perf_counter() - began:.0f} s", end="\n")
    for order in ORDERS:
        bits = NGrams(np.asarray(text.train.tokens), order, vocabulary).bits_per_token(np.asarray(text.held_out.tokens))
        print(
            f"  {order}-grams of tokens{'':19} {bits * np.log(2):.3f} nats a token  {bits * per_byte:.3f} bits per byte"
        )
    contents = ["".join(record.values()) for record in text.records]
    alone, together = (gzip_bits_per_byte(contents, together=whole) for whole in (False, True))
    print(f"  gzip -9, each document alone {alone:.3f}, all as one {together:.3f} bits per byte")


def show_cache(config: ModelConfig) -> None:
    """What a token of context takes, measured on the arrays of a cache."""
    short, long = (
        sum(a.nbytes for a in jax.tree.leaves(init_cache(config, 1, length, storage="packed")))
        for length in (2048, 4096)
    )
    heads = 2 * config.num_attention_heads * config.head_dim * 2 * config.num_hidden_layers
    print(f"cache: {(long - short) / 2048:.1f} bytes a token, packed; keys and values of every head in bf16: {heads:,}")


def show_answers(model: Any, tokenizer: Any, text: Text, questions: int) -> None:
    """Drafts kept over held-out questions and sources, and the first few answers."""
    engine = Engine(model, slots=1, max_length=1024, storage="packed", speculative=True, tokenizer=tokenizer)
    asked = [r for r in text.records if "prompt" in r]
    for number, record in enumerate(asked[:: max(1, len(asked) // questions)][:questions]):
        conversation = Conversation(engine, sampling=Sampling(0.0), max_new_tokens=128)
        question = record["prompt"].split("｜>")[1].split("<｜")[0]
        answer = "".join(part for _, part in conversation.say(question))
        if number < SHOWN:
            print(f"> {question}\n{answer}\n(its docstring: {record['completion']})\n")
    kept = ", ".join("-" if share != share else f"{share:.0%}" for share in engine.acceptance.by_place)
    print(f"drafts, greedy: {engine.acceptance.tokens_per_round:.2f} tokens a round; kept by place {kept}")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=default_model(), help="another model in the release's layout")
    parser.add_argument("--text", type=Path, default=Path("build/default"), help="what python -m train.corpus wrote")
    parser.add_argument("--lengths", type=int, nargs="*", default=[512], help="tokens of a piece; none for no losses")
    parser.add_argument("--questions", type=int, default=24, help="held-out questions that are answered")
    parser.add_argument("--plain", action="store_true", help="without roundings to fp8 and fp4, in float32")
    arguments = parser.parse_args()
    exact: dict[str, Any] = {"compute_dtype": "float32", "fake_quant": False} if arguments.plain else {}
    model = load_checkpoint(arguments.model, **exact)
    config: ModelConfig = model.config
    text = read_text(arguments.text, arguments.model, config)
    if arguments.lengths:
        show_losses(model, text, tuple(arguments.lengths), config.vocab_size)
    show_cache(config)
    if arguments.questions and not arguments.plain:
        show_answers(model, find_tokenizer(arguments.model, config), text, arguments.questions)


if __name__ == "__main__":
    main()
