"""Documents from text files, JSONL and Hugging Face datasets on disk, tokenised once into files that are mapped, not read.

A store is a folder of `tokens.bin` (int32), `predict.bin` (uint8, whether a token is to be predicted) and `offsets.npy` (where
documents begin and end), made in a folder of another name and renamed when complete. It is named after what it was made from:
files with their sizes and times, and the tokenizer. Changed data makes another store.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from csa2_jax import ModelConfig
from csa2_jax.tokenizer import read_tokenizer

BYTES: Final = "bytes"
_FIRST_BYTE: Final = 3  # ids below are bos, eos and pad
_SUFFIXES: Final = (".txt", ".md", ".rst", ".py")


class DataError(ValueError):
    """Training data that cannot be used: names the file, the line and the remedy."""


@dataclasses.dataclass(frozen=True)
class Document:
    """A document as text: `prompt` is read, `text` is predicted."""

    prompt: str
    text: str


Encode = Callable[[str], Sequence[int]]


def text_encoder(tokenizer: str, config: ModelConfig) -> Encode:
    """Text to ids: of a tokenizer.json (or the folder that holds one), or "bytes", where byte b is id 3 + b."""
    if tokenizer == BYTES:
        if config.vocab_size < _FIRST_BYTE + 256:
            raise DataError(
                f"tokenizer='bytes' needs vocab_size >= {_FIRST_BYTE + 256}, the model has {config.vocab_size}"
            )
        if {config.bos_token_id, config.eos_token_id} - {0, 1, 2}:
            raise DataError(
                f"tokenizer='bytes' keeps ids 0 to 2 for special tokens, but the model has bos_token_id={config.bos_token_id} "
                f"and eos_token_id={config.eos_token_id}: give the model's tokenizer.json"
            )
        return lambda text: [_FIRST_BYTE + b for b in text.encode("utf-8", "surrogatepass")]
    path = Path(tokenizer)
    path = path / "tokenizer.json" if path.is_dir() else path
    if not path.is_file():
        raise DataError(f"tokenizer={tokenizer!r} is neither 'bytes' nor a tokenizer.json nor a folder that holds one")
    loaded = read_tokenizer(path)
    if loaded.get_vocab_size(with_added_tokens=True) > config.vocab_size:
        raise DataError(
            f"{path} has {loaded.get_vocab_size(with_added_tokens=True)} tokens, the model vocab_size={config.vocab_size}: it "
            "belongs to another model"
        )
    return lambda text: loaded.encode(text, add_special_tokens=False).ids


def find_files(patterns: Sequence[str], base: Path) -> list[Path]:
    """Files and dataset folders that the patterns name, in order: a file, a folder (its text and JSONL files), or a glob."""
    found: list[Path] = []
    for pattern in patterns:
        path = Path(pattern) if os.path.isabs(pattern) else base / pattern
        if path.is_dir():
            here = [path] if _is_dataset(path) else _inside(path)
        elif path.exists():
            here = [path]
        else:
            here = sorted(base.glob(pattern)) if not os.path.isabs(pattern) else sorted(Path("/").glob(pattern[1:]))
            here = [p for p in here if p.is_file() or _is_dataset(p)]
        if not here:
            raise DataError(
                f"{pattern!r} names no data: give a text or .jsonl file, a folder of those ({', '.join(_SUFFIXES)}), a glob, "
                f"or a dataset saved with save_to_disk (relative names start at {base})"
            )
        found += here
    return found


def _inside(folder: Path) -> list[Path]:
    return sorted(p for p in folder.rglob("*") if p.is_file() and p.suffix in (*_SUFFIXES, ".jsonl"))


def _is_dataset(path: Path) -> bool:
    return path.is_dir() and ((path / "dataset_info.json").is_file() or (path / "dataset_dict.json").is_file())


def read_documents(path: Path, field: str) -> Iterator[Document]:
    """The documents of one file: a text file is one, of a .jsonl each line, of a dataset each row.

    A line is {field: text}, or {"prompt": ..., "completion": ...}, of which only the completion is predicted.
    """
    if path.is_dir():
        yield from _read_dataset(path, field)
    elif path.suffix == ".jsonl":
        with path.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    try:
                        record = json.loads(line)
                    except ValueError as error:
                        raise DataError(
                            f"{path}, line {number}, is not JSON ({error}): mend or remove the line"
                        ) from None
                    yield _document(record, field, f"{path}, line {number},")
    else:
        try:
            yield Document("", path.read_text(encoding="utf-8"))
        except UnicodeDecodeError as error:
            raise DataError(f"{path} is not UTF-8 text ({error}): convert it or leave it out") from None


def _read_dataset(path: Path, field: str) -> Iterator[Document]:
    try:
        import datasets
    except ImportError:
        raise DataError(
            f"{path} is a Hugging Face dataset, for which the package datasets is needed: pip install datasets"
        ) from None
    loaded = datasets.load_from_disk(str(path))
    if isinstance(loaded, datasets.DatasetDict):
        if "train" not in loaded:
            raise DataError(
                f"{path} has the splits {sorted(map(str, loaded))}: name one, such as {path / str(min(loaded))}"
            )
        loaded = loaded["train"]
    for number, record in enumerate(loaded):
        yield _document(record, field, f"{path}, row {number},")


def _document(record: Any, field: str, where: str) -> Document:
    if not isinstance(record, dict):
        raise DataError(f"{where} is {type(record).__name__}, no object with the field {field!r}")
    if isinstance(record.get(field), str):
        return Document("", record[field])
    if isinstance(record.get("prompt"), str) and isinstance(record.get("completion"), str):
        return Document(record["prompt"], record["completion"])
    raise DataError(
        f"{where} has the fields {sorted(map(str, record))}: a text is wanted in {field!r} (data.field), or "
        "'prompt' and 'completion'"
    )


@dataclasses.dataclass(frozen=True)
class Store:
    """Tokenised documents: document i is tokens[offsets[i] : offsets[i + 1]]."""

    tokens: np.ndarray
    predict: np.ndarray
    offsets: np.ndarray

    def __len__(self) -> int:
        """Documents."""
        return len(self.offsets) - 1

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each document."""
        return np.diff(self.offsets)


def open_store(
    folder: Path,
    files: Sequence[Path],
    field: str,
    tokenizer: str,
    config: ModelConfig,
    told: Callable[[int, int], None] = lambda done, files: None,
) -> Store:
    """The store of these files under `folder`, made if it is not there; `told(done, files)` is called after every file."""
    name = _fingerprint(files, field, tokenizer, config)
    place = folder / name
    if not (place / "offsets.npy").is_file():
        _make(place, files, field, text_encoder(tokenizer, config), config, told)
    offsets = np.load(place / "offsets.npy")
    if len(offsets) < 2 or offsets[-1] == 0:
        raise DataError(
            f"{', '.join(map(str, files[:3]))}{' ...' if len(files) > 3 else ''}: no text in {len(files)} files"
        )
    total = (int(offsets[-1]),)
    return Store(
        np.memmap(place / "tokens.bin", np.int32, "r", shape=total),
        np.memmap(place / "predict.bin", np.uint8, "r", shape=total),
        offsets,
    )


def _make(
    place: Path,
    files: Sequence[Path],
    field: str,
    encode: Encode,
    config: ModelConfig,
    told: Callable[[int, int], None],
) -> None:
    begun = place.with_name(f"{place.name}.{os.getpid()}.part")
    begun.mkdir(parents=True)
    try:
        offsets = [0]
        with (begun / "tokens.bin").open("wb") as tokens, (begun / "predict.bin").open("wb") as predict:
            for done, path in enumerate(files, 1):
                for document in read_documents(path, field):
                    prompt, text = encode(document.prompt) if document.prompt else [], encode(document.text)
                    if not len(text):
                        continue
                    ids = np.array([config.bos_token_id, *prompt, *text, config.eos_token_id], np.int32)
                    flags = np.ones(len(ids), np.uint8)
                    flags[: 1 + len(prompt)] = 0
                    tokens.write(ids.tobytes())
                    predict.write(flags.tobytes())
                    offsets.append(offsets[-1] + len(ids))
                told(done, len(files))
        np.save(begun / "offsets.npy", np.array(offsets, np.int64))
        try:
            begun.rename(place)
        except OSError:  # another process was faster, with the same content
            if not (place / "offsets.npy").is_file():
                raise
    except OSError as error:
        raise type(error)(error.errno, f"tokenised data could not be written to {begun}: {error.strerror}") from None
    finally:
        shutil.rmtree(begun, ignore_errors=True)


def _fingerprint(files: Sequence[Path], field: str, tokenizer: str, config: ModelConfig) -> str:
    digest = hashlib.sha256(f"{field} {config.bos_token_id} {config.eos_token_id} {config.vocab_size}".encode())
    path = Path(tokenizer)
    path = path / "tokenizer.json" if path.is_dir() else path
    digest.update(path.read_bytes() if tokenizer != BYTES and path.is_file() else tokenizer.encode())
    for file in files:
        parts = sorted(p for p in file.rglob("*") if p.is_file()) if file.is_dir() else [file]
        for part in parts:
            status = part.stat()
            digest.update(f"{part.resolve()} {status.st_size} {status.st_mtime_ns}\n".encode())
    return digest.hexdigest()[:16]
