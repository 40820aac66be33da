"""Does a directory hold exactly the tensors that its configuration describes? Headers only, no values.

Every tensor on disk must be one the manifest lists, with its shape and dtype, and every one listed must be there. A
refusal names the first offenders, what was found, what was expected and what to do; it recognises the damages that
happen in practice: another generation's tensors, a misspelt name, a lost scale, fp4 where fp8 belongs, other
tile sizes.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from csa2_jax.config import ModelConfig
from csa2_jax.generations import V4
from csa2_jax.manifest import TensorSpec, release_tensors
from csa2_jax.safetensors_io import CheckpointError, TensorEntry, TensorFiles

# Tensors that only one generation has, and what they are.
_V4_TENSORS: Final = (
    (re.compile(r"\.compressor\.ape$"), "the slot bias of V4's overlapping compressor"),
    (re.compile(r"\.indexer\.compressor\."), "the compressor that V4's indexer has of its own"),
    (re.compile(r"(^|\.)hc_head_(fn|base|scale)$"), "V4's head collapse"),
    (re.compile(r"\.gate\.tid2eid$"), "V4's routing by token id"),
    (re.compile(r"^mtp\.\d+\.(e_proj|h_proj|enorm|hnorm)\."), "V4's multi-token prediction"),
)
_V41_TENSORS: Final = (
    (re.compile(r"\.indexer\.(wk|k_norm)\."), "the index key that V4.1 makes from its latent"),
    (re.compile(r"\.engram\."), "V4.1's n-gram memory"),
    (re.compile(r"^mtp\.\d+\.(main_proj|main_norm|markov_head|confidence_head)\."), "V4.1's draft head"),
)
_QUANTISED: Final = {"F8_E4M3", "I8"}


def account(config: ModelConfig, files: TensorFiles) -> tuple[TensorSpec, ...]:
    """The manifest of `config`, matched with every tensor of `files`; CheckpointError names what does not match."""
    specs = tuple(release_tensors(config))
    where = files.directory
    _refuse_other_generation(where, config, files)
    wanted = {spec.name: spec for spec in specs}
    _refuse_other_storage(where, config, wanted, files)
    problems = _lost_scales(wanted, files) or _names(wanted, files) or _shapes_and_dtypes(wanted, files)
    if problems:
        raise CheckpointError(f"{where} does not match its config.json: {_first(problems)}")
    return specs


def _refuse_other_generation(where: Path, config: ModelConfig, files: Mapping[str, TensorEntry]) -> None:
    """Another generation's tensors: one clear sentence instead of thousands of misses."""
    ours, theirs, patterns = "DeepSeek-V4.1", "DeepSeek-V4", _V4_TENSORS
    if config.generation is V4:
        ours, theirs, patterns = theirs, ours, _V41_TENSORS
    for name in files:
        for pattern, what in patterns:
            if pattern.search(name):
                raise CheckpointError(
                    f"{where} holds {name}, {what}: this is a {theirs} tensor set, but config.json describes {ours}; use the "
                    "config.json that came with these weights"
                )


def _refuse_other_storage(
    where: Path, config: ModelConfig, wanted: Mapping[str, TensorSpec], files: Mapping[str, TensorEntry]
) -> None:
    """Quantised config with bf16 weights, or the reverse, when that is what most of the difference is."""
    if config.quantized:
        weights = [s.name for s in wanted.values() if s.dtype in _QUANTISED and s.part != "engram table"]
        other = [n for n in weights if n in files and files[n].dtype in ("BF16", "F16", "F32")]
        if other and 2 * len(other) > len(weights):
            raise CheckpointError(
                f"{where}: config.json has a quantization_config (fp8 and fp4 weights), but {other[0]} is stored as "
                f"{files[other[0]].dtype}, like {len(other)} of {len(weights)} such weights: delete "
                "quantization_config from config.json if these are bf16 weights, or fetch the quantised files"
            )
        return
    scales = [n for n in files if n.endswith(".scale") and n not in wanted]
    weights = [n for n in (scale.removesuffix(".scale") + ".weight" for scale in scales) if n in files]
    quantised = [n for n in weights if files[n].dtype in _QUANTISED]
    if quantised:
        name = quantised[0]
        raise CheckpointError(
            f"{where}: {name} is stored as {files[name].dtype} with a .scale beside it ({len(quantised)} such), but "
            "config.json has no quantization_config: restore the config.json that came with these weights"
        )


def _lost_scales(wanted: Mapping[str, TensorSpec], files: Mapping[str, TensorEntry]) -> list[str]:
    """A quantised weight without its scale means nothing: named together, never read as unscaled numbers."""
    problems = []
    for name, spec in wanted.items():
        if spec.dtype != "F8_E8M0" or name in files:
            continue
        weight = name.removesuffix(".scale") + ".weight"
        if weight in files and files[weight].dtype not in _QUANTISED:
            problems.append(
                f"{weight} is stored as {files[weight].dtype} and {name} is missing, but config.json has a "
                f"quantization_config, which asks for {wanted[weight].dtype} with scales: quantise this weight"
            )
        elif weight in files:
            other = [n for n in files if n not in wanted and n.startswith(name.removesuffix(".scale"))]
            remedy = f"rename {other[0]} if that is it" if other else f"fetch {name}"
            problems.append(
                f"{weight} ({files[weight].dtype}) has no {name} ({spec.dtype} {list(spec.shape)}) beside it, and "
                f"without its scales it cannot be read: {remedy}"
            )
    return problems


def _names(wanted: Mapping[str, TensorSpec], files: Mapping[str, TensorEntry]) -> list[str]:
    missing = [name for name in wanted if name not in files]
    extra = [name for name in files if name not in wanted]
    if missing and extra and len(missing) + len(extra) > max(16, len(wanted) // 20):
        text = (
            f"{len(missing)} of {len(wanted)} tensors are missing ({missing[0]} first) and {len(extra)} are no tensors of "
            f"this model ({extra[0]} first): config.json describes another model, use the one that came with the weights"
        )
        return [text]
    problems = []
    misspelt: set[str] = set()
    for name in extra[:3]:  # matching names is slow, and a reader needs only the first
        near = _nearest(name, missing)
        if near is None:
            near = _nearest(name, list(wanted))
            hint = f"the nearest known name, {near}, is there too" if near else "no known name is near it"
            problems.append(f"{name} is no tensor of this model ({hint}): remove it or correct config.json")
        else:
            misspelt.add(near)
            problems.append(f"{name} is no tensor of this model and {near} is missing: rename it if that is what it is")
    problems += [f"{name} is no tensor of this model" for name in extra[3:]]
    for name in missing:
        if name not in misspelt:
            spec = wanted[name]
            problems.append(
                f"{name} ({spec.part}, {spec.dtype} {list(spec.shape)}) is missing: fetch the file that holds it"
            )
    return problems


def _nearest(name: str, names: Sequence[str]) -> str | None:
    """The closest of `names`, sought where the first or last two parts agree: difflib is too slow for 96,000."""
    parts = name.split(".")
    close = [n for n in names if n.split(".")[:2] == parts[:2]] or [n for n in names if n.split(".")[-2:] == parts[-2:]]
    close = close or [n for n in names if abs(len(n) - len(name)) <= 4]
    return next(iter(difflib.get_close_matches(name, close[:4096], n=1, cutoff=0.75)), None)


def _shapes_and_dtypes(wanted: Mapping[str, TensorSpec], files: Mapping[str, TensorEntry]) -> list[str]:
    problems = []
    for name, spec in wanted.items():
        entry = files[name]
        if entry.dtype != spec.dtype:
            problems.append(_wrong_dtype(spec, entry))
        elif entry.shape != spec.shape:
            problems.append(_wrong_shape(spec, entry))
    return problems


def _wrong_dtype(spec: TensorSpec, entry: TensorEntry) -> str:
    found, expected = f"{entry.dtype} {list(entry.shape)}", f"{spec.dtype} {list(spec.shape)}"
    text = f"{spec.name} in {entry.file.name} is {found}, expected {expected}"
    if (entry.dtype, spec.dtype) == ("I8", "F8_E4M3"):
        return f"{text}: packed fp4 bytes read as fp8 would be other numbers; requantise this weight to fp8"
    if (entry.dtype, spec.dtype) == ("F8_E4M3", "I8"):
        return f"{text}: routed experts are packed fp4 here and fp8 bytes are not; requantise this weight to fp4"
    return f"{text}: convert it to {spec.dtype}"


def _wrong_shape(spec: TensorSpec, entry: TensorEntry) -> str:
    text = f"{spec.name} in {entry.file.name} has shape {list(entry.shape)}, expected {list(spec.shape)}"
    if len(spec.shape) == 2 and entry.shape == spec.shape[::-1]:
        return f"{text}: it is transposed, the release stores [out, in]"
    if spec.dtype == "F8_E8M0":
        return (
            f"{text}: there is one scale per 32x32 tile of an fp8 weight, and one per 32 along a row of fp4 or of an "
            "Engram table; requantise weights with other tiles"
        )
    if spec.dtype == "I8" and entry.shape == spec.logical_shape:
        return f"{text}: it is not packed, fp4 holds two values per byte along the last axis"
    return f"{text}: a number in config.json does not belong to these weights"


def _first(problems: Sequence[str], shown: int = 2) -> str:
    more = len(problems) - shown
    return "; ".join(problems[:shown]) + (f"; and {more} more" if more > 0 else "")
