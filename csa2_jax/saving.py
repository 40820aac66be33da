"""A model back into files: the release's layout, plain or quantised, from weights that are numbers (trained ones, say).

What the release stores as fp8 and fp4 is rounded as `csa2 export` does (`conversion.views`). N-gram tables are e4m3 with a scale
per row and 32 columns in every checkpoint.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from flax import nnx

from csa2_jax.config import ModelConfig
from csa2_jax.conversion.views import quantise
from csa2_jax.manifest import TILE, release_tensors
from csa2_jax.model import Model


def save_checkpoint(
    model: Model,
    directory: str | os.PathLike[str],
    *,
    weights: Literal["bf16", "f32", "quantised"] = "bf16",
    beside: Sequence[str | os.PathLike[str]] = (),
) -> Path:
    """Write a model as config.json and model.safetensors in the release's layout; returns the directory, which must be new.

    weights: "bf16" or "f32" plain, or "quantised": fp8 and fp4 where the release has them. A model that holds codes already is
    refused: `csa2 export` writes those bit for bit. Adapters are refused too: merge them first. beside: files that go with it
    (tokenizer.json). The directory appears when it is complete.
    """
    from safetensors.numpy import save_file

    directory = Path(directory)
    if directory.exists():
        raise FileExistsError(f"{directory} exists already: name a new directory, or remove that one")
    if weights not in ("bf16", "f32", "quantised"):
        raise ValueError(f"{weights=} must be 'bf16', 'f32' or 'quantised'")
    arrays = {".".join(map(str, path)): variable[...] for path, variable in nnx.to_flat_state(nnx.state(model))}
    if lora := [name for name in arrays if name.endswith(".lora_a")]:
        raise ValueError(f"{lora[0]} is an adapter, for which the release has no place: merge the adapters first")
    if codes := [
        name for name in arrays if name.endswith(".scale") and arrays[name].dtype == jnp.uint8 and "tables" not in name
    ]:
        raise ValueError(
            f"{codes[0]} belongs to stored codes: load the model with weights='float32', or use csa2 export"
        )
    config = _stored_config(model.config, weights)
    tensors: dict[str, np.ndarray] = {}
    scales: dict[tuple[str, tuple[int, ...]], np.ndarray] = {}
    for spec in release_tensors(config):
        if spec.path is None:
            raise ValueError(f"{spec.name} belongs to a part that is not built, so that it cannot be written")
        place = (spec.path, spec.index)
        if place in scales:
            tensors[spec.name] = scales.pop(place)
            continue
        array = arrays[spec.path][spec.index or ...]
        if spec.dtype in ("F8_E4M3", "I8") and jnp.issubdtype(array.dtype, jnp.floating) and array.dtype.itemsize > 1:
            kind = "fp4" if spec.dtype == "I8" else "fp8"
            by_row = kind == "fp4" or spec.path.startswith("engram_tables.")
            tile = (1, TILE) if by_row else (config.generation.tile, config.generation.tile)
            values = np.asarray(array, np.float32)
            if not np.isfinite(values).all():
                raise ValueError(f"{spec.name} holds numbers that are not finite, which fp8 and fp4 cannot hold")
            tensors[spec.name], scale = quantise(values, tile, kind)
            scales[spec.path.removesuffix("weight") + "scale", spec.index] = scale.view(ml_dtypes.float8_e8m0fnu)
        else:
            tensors[spec.name] = _as_stored(array, spec.dtype)
    part = directory.with_name(f"{directory.name}.{os.getpid()}.part")
    try:
        part.mkdir(parents=True)
        (part / "config.json").write_text(json.dumps(config.to_hf(), indent=2) + "\n", encoding="utf-8")
        save_file(tensors, part / "model.safetensors", metadata={"format": "pt"})
        os.chmod(
            part / "model.safetensors", (part / "config.json").stat().st_mode & 0o666
        )  # safetensors writes for its owner alone
        for file in beside:
            shutil.copyfile(file, part / Path(file).name)
        part.rename(directory)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return directory


def _as_stored(array: jax.Array, dtype: str) -> np.ndarray:
    kinds: dict[str, Any] = {
        "BF16": ml_dtypes.bfloat16,
        "F32": np.float32,
        "F8_E4M3": ml_dtypes.float8_e4m3fn,
        "F8_E8M0": ml_dtypes.float8_e8m0fnu,
        "I64": np.int64,
    }
    found = np.asarray(array)
    if dtype == "F8_E8M0":
        return np.ascontiguousarray(found).view(kinds[dtype])
    return np.ascontiguousarray(found.astype(kinds[dtype]))


def _stored_config(config: ModelConfig, weights: str) -> ModelConfig:
    inert = {name: value for name, value in config.inert if name not in ("dtype", "torch_dtype")}
    inert["dtype"] = '"float32"' if weights == "f32" else '"bfloat16"'
    return dataclasses.replace(config, quantized=weights == "quantised", inert=tuple(inert.items()))
