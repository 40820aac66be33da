"""Low-rank adapters on frozen weights: y = W x + (alpha / rank) B A x, for any named set of linears.

`attach` adds them to a model (A normal, B zero: the model computes what it did), whether its weights are numbers or fp8 / fp4
codes; training moves A and B alone (`train`, recipe "adapters"). `save_adapters` and `load_adapters` keep them as safetensors
under the release's tensor names, `merge` adds them to the weights. Source: arXiv 2106.09685 (LoRA).
"""

from __future__ import annotations

import fnmatch
import json
import math
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import jax
import jax.numpy as jnp
import ml_dtypes  # noqa: F401  registers bfloat16 with NumPy
import numpy as np
from flax import nnx

from csa2_jax.layers import ExpertParam, Linear
from csa2_jax.manifest import TensorSpec, release_tensors
from csa2_jax.model import Model
from csa2_jax.safetensors_io import CheckpointError

WEIGHTS_FILE: Final = "adapter_model.safetensors"
CONFIG_FILE: Final = "adapter_config.json"


def linears(model: nnx.Module) -> Iterator[tuple[str, Linear]]:
    """(dotted path, linear) of every linear of a model, in order of path."""
    found = ((".".join(map(str, path)), node) for path, node in nnx.iter_graph(model) if isinstance(node, Linear))
    return iter(sorted(found, key=lambda pair: pair[0]))


def attach(model: Model, targets: Sequence[str], rank: int, alpha: float, seed: int = 0) -> list[str]:
    """Add adapters, in place, to the linears whose paths match one of `targets` (shell patterns); returns the paths.

    rank: of A [..., rank, in] and B [..., out, rank], per layer and per expert; float32. Raises ValueError where a pattern
    matches nothing (naming what there is), or where a linear has an adapter already.
    """
    if rank < 1:
        raise ValueError(f"rank={rank} must be at least 1")
    everything = dict(linears(model))
    chosen: set[str] = set()
    for pattern in targets:
        matched = {name for name in everything if fnmatch.fnmatchcase(name, pattern)}
        if not matched:
            raise ValueError(f"{pattern!r} matches no linear of this model; there are {', '.join(everything)}")
        chosen |= matched
    if taken := [name for name in chosen if everything[name].lora_a is not None]:
        raise ValueError(f"{min(taken)} has an adapter already; merge it first")
    key = jax.random.key(seed)
    for name in sorted(chosen):
        linear = everything[name]
        key, own = jax.random.split(key)
        stack, out, width = _shape(linear)
        kind = ExpertParam if isinstance(linear.weight, ExpertParam) else nnx.Param
        linear.lora_a = kind(jax.random.normal(own, (*stack, rank, width), jnp.float32) / math.sqrt(width))
        linear.lora_b = kind(jnp.zeros((*stack, out, rank), jnp.float32))
        linear.lora_scale = alpha / rank
    return sorted(chosen)


def merge(model: Model, dtype: Any = jnp.float32) -> Model:
    """A model whose weights contain its adapters, as plain numbers of `dtype` where there was one; the rest is shared."""
    merged = nnx.merge(*nnx.split(model))
    for _, linear in linears(merged):
        if linear.lora_a is not None:
            kind = type(linear.weight)
            linear.weight = kind(linear.plain(jnp.dtype(dtype)))
            linear.scale = nnx.data(None)
            linear.lora_a, linear.lora_b, linear.lora_scale = nnx.data(None), nnx.data(None), 0.0
    return merged


def save_adapters(model: Model, directory: str | os.PathLike[str]) -> Path:
    """Write the adapters of a model into `directory`, which is returned.

    adapter_model.safetensors holds "<tensor>.lora_A.weight" and "<tensor>.lora_B.weight" with the release's tensor names,
    adapter_config.json the rank, alpha and targets.
    """
    from safetensors.numpy import save_file

    directory = Path(directory)
    adapted = {name: linear for name, linear in linears(model) if linear.lora_a is not None}
    if not adapted:
        raise ValueError("this model has no adapters to save: `attach` makes them")
    scales = {linear.lora_scale * linear.lora_a.shape[-2] for linear in adapted.values() if linear.lora_a is not None}
    ranks = {linear.lora_a.shape[-2] for linear in adapted.values() if linear.lora_a is not None}
    if len(ranks) > 1 or len(scales) > 1:
        raise ValueError(
            f"adapters of ranks {sorted(ranks)} and alphas {sorted(scales)}: one file holds one rank and alpha"
        )
    tensors = {}
    for spec, path in _places(model):
        if path in adapted:
            a, b = adapted[path].lora_a, adapted[path].lora_b
            assert a is not None
            assert b is not None
            base = spec.name.removesuffix(".weight")
            tensors[f"{base}.lora_A.weight"] = np.ascontiguousarray(np.asarray(a[spec.index or ...]))
            tensors[f"{base}.lora_B.weight"] = np.ascontiguousarray(np.asarray(b[spec.index or ...]))
    directory.mkdir(parents=True, exist_ok=True)
    part = directory / f"{WEIGHTS_FILE}.part"
    save_file(tensors, part, metadata={"format": "csa2-jax adapters"})
    os.replace(part, directory / WEIGHTS_FILE)
    config = {
        "peft_type": "LORA",
        "r": ranks.pop(),
        "lora_alpha": scales.pop(),
        "target_modules": sorted(adapted),
        "bias": "none",
    }
    (directory / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    return directory


def load_adapters(model: Model, directory: str | os.PathLike[str]) -> list[str]:
    """Attach the adapters that `save_adapters` wrote, in place; returns the paths of the linears.

    Raises CheckpointError where a tensor is missing, left over or of another shape than the model's linear wants, before anything
    is attached.
    """
    from safetensors.numpy import load_file

    directory = Path(directory)
    try:
        config = json.loads((directory / CONFIG_FILE).read_text(encoding="utf-8"))
        rank, alpha, targets = int(config["r"]), float(config["lora_alpha"]), list(config["target_modules"])
        tensors = load_file(directory / WEIGHTS_FILE)
    except FileNotFoundError as error:
        raise FileNotFoundError(f"{directory} holds no adapters: {error.filename or error} is missing") from None
    except Exception as error:
        raise CheckpointError(f"the adapters in {directory} cannot be read ({error}): save them again") from None
    everything = dict(linears(model))
    if unknown := [name for name in targets if name not in everything]:
        raise CheckpointError(
            f"{directory} has an adapter for {unknown[0]}, which this model lacks: it belongs to another model"
        )
    arrays: dict[str, tuple[np.ndarray, np.ndarray]] = {}
    for name in targets:
        stack, out, width = _shape(everything[name])
        arrays[name] = np.zeros((*stack, rank, width), np.float32), np.zeros((*stack, out, rank), np.float32)
    for spec, path in _places(model):
        if path in arrays:
            for leaf, whole in zip(("lora_A", "lora_B"), arrays[path], strict=True):
                tensor = f"{spec.name.removesuffix('.weight')}.{leaf}.weight"
                found = tensors.pop(tensor, None)
                want = whole[spec.index or ...].shape
                if found is None or found.shape != want:
                    shape = "is missing" if found is None else f"has shape {list(found.shape)}"
                    raise CheckpointError(f"{directory / WEIGHTS_FILE}: {tensor} {shape}, the model wants {list(want)}")
                whole[spec.index or ...] = found
    if tensors:
        raise CheckpointError(
            f"{directory / WEIGHTS_FILE}: {min(tensors)} belongs to no adapter that {CONFIG_FILE} names"
        )
    attach(model, targets, rank, alpha)
    for name, (a, b) in arrays.items():
        everything[name].lora_a[...] = jnp.asarray(a)  # type: ignore[index]
        everything[name].lora_b[...] = jnp.asarray(b)  # type: ignore[index]
    return sorted(arrays)


def _shape(linear: Linear) -> tuple[tuple[int, ...], int, int]:
    """(stack axes, out, in) of a linear, whatever its codes are."""
    *stack, out, width = linear.weight.shape
    return tuple(stack), out, width * (2 if linear.weight.dtype == jnp.uint8 else 1)


def _places(model: Model) -> Iterator[tuple[TensorSpec, str]]:
    """(tensor of the release, path of the linear whose weight it is)."""
    for spec in release_tensors(model.config):
        if spec.path is not None and spec.path.endswith(".weight"):
            yield spec, spec.path.removesuffix(".weight")
