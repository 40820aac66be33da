"""From a checkpoint to a model: every tensor accounted for, each parameter filled exactly once, on one device or many.

Order of work: config.json, all headers, the accounting of every tensor, the token map; only then is anything large
allocated. The abstract model says which parameters exist, their stacked shapes and dtypes. On one device a stack at a time
is filled in NumPy, handed to JAX and freed, so the peak above the model itself is one stack; on a mesh every device's part
is read by itself, so that it is one part.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Literal

import jax
import numpy as np
from flax import nnx

from csa2_jax.config import ModelConfig
from csa2_jax.conversion.converted import ConvertedFiles
from csa2_jax.conversion.opening import open_checkpoint
from csa2_jax.conversion.stacks import Absent, Stack, group_by_path
from csa2_jax.engram_host import HostRows
from csa2_jax.manifest import TensorSpec, absent_slots
from csa2_jax.model import Model, ngram_arrays
from csa2_jax.numerics import ComputeDtype, Implementation, Numerics, WeightStorage
from csa2_jax.placing import place
from csa2_jax.progress import byte_progress
from csa2_jax.safetensors_io import CheckpointError, TensorFiles
from csa2_jax.sharding import Rules, named_sharding
from csa2_jax.token_map import find_token_map

__all__ = ["CheckpointError", "load_checkpoint"]

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
    mesh: jax.sharding.Mesh | None = None,
    rules: Rules | None = None,
    engram: Literal["device", "host"] = "device",
) -> Model:
    """The model in `directory`, ready to run: a release-layout one (config.json beside model.safetensors, or an index with
    shards) or one that `csa2 convert` wrote.

    compute_dtype, fake_quant, implementation, interpret: see `Numerics`. weights: "stored" keeps fp8 and fp4 weights
    quantised and dequantises per use; "float32" and "bfloat16" dequantise them exactly while loading. scan_layers=False
    unrolls the layers, for debugging. A directory that was converted with dequantised weights is loaded as if it had been
    asked for here. mesh: put the parameters there, split as `rules` say (`sharding.DEFAULT_RULES`).
    engram: "host" leaves the n-gram tables on disk, mapped, and reads the few rows that a call needs (`engram_host`): the same
    logits without their memory.

    Raises ValueError for a configuration that contradicts itself, CheckpointError (a ValueError) for files that do not
    match it, FileNotFoundError for absent ones; all before anything large is allocated, except a scale of byte 255
    (NaN), which is found while its values stream past. The image tower's tensors are accounted for and left on disk
    (`unbuilt_parts`).
    """
    directory = Path(directory)
    opened = open_checkpoint(directory)
    config, files = opened.config, opened.files
    if isinstance(files, ConvertedFiles) and files.weights != "stored" and weights == "stored":
        weights = files.weights
    token_map = find_token_map(directory, config)
    numerics = Numerics(compute_dtype, fake_quant, implementation, interpret)
    specs, host_tables = opened.specs, None
    if engram == "host":
        host_tables = host_rows(config, files, token_map)
        specs = tuple(spec for spec in specs if not (spec.path or "").startswith("engram_tables."))
    elif engram != "device":
        raise ValueError(f"{engram=} must be 'device' or 'host'")
    options: dict[str, Any] = {
        "weights": weights,
        "scan_layers": scan_layers,
        "token_map": token_map,
        "host_tables": host_tables,
    }
    abstract = nnx.eval_shape(lambda: Model(config, numerics=numerics, **options))
    graphdef, state = nnx.split(abstract)
    with jax.ensure_compile_time_eval():  # a first load inside somebody's jit gives arrays to keep, not tracers
        _fill(state, specs, absent_slots(config), files, ngram_arrays(config, token_map), mesh, rules)
    return nnx.merge(graphdef, state)


def host_rows(
    config: ModelConfig, files: TensorFiles | ConvertedFiles, token_map: np.ndarray | None
) -> list[HostRows] | None:
    """The n-gram tables of a checkpoint, mapped; None for a model without any."""
    if token_map is None:
        return None
    tables = []
    for slot, layer in enumerate(config.engram_layer_ids):
        codes, scales = (files.rows(f"layers.{layer}.engram.embed.{leaf}") for leaf in ("weight", "scale"))
        tables.append(HostRows(codes, scales, config.engram_constants[slot], token_map, config.engram_pad_token_id))
    return tables


def _check_experts(stack: Stack, files: TensorFiles | ConvertedFiles, experts: int) -> None:
    """A wrong id would route to another expert without a word: the tables are small enough to look at first."""
    for index, source in stack.sources.items():
        table = stack.read(
            files, tuple(slice(i, i + 1) for i in index) + (slice(None),) * (len(stack.shape) - len(index))
        )
        if table.size and not 0 <= table.min() <= table.max() < experts:
            raise CheckpointError(
                f"{files.directory}: {source.weight.name} holds the expert ids {table.min()} to {table.max()}, the model has "
                f"{experts} experts: the file is damaged, {files.remedy}"
            )


def _fill(
    state: nnx.State,
    specs: tuple[TensorSpec, ...],
    absent: Absent,
    files: TensorFiles | ConvertedFiles,
    derived: Mapping[str, np.ndarray],
    mesh: jax.sharding.Mesh | None,
    rules: Rules | None,
) -> None:
    """Set every variable of an abstract state: the derived arrays, then the stacks from the files."""
    targets = {".".join(map(str, key)): variable for key, variable in nnx.to_flat_state(state)}
    for path, values in derived.items():
        where = None if mesh is None else jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
        targets.pop(path).set_value(jax.device_put(values, where))  # derived, not stored
    stacks = [
        Stack(path, targets[path].shape, targets[path].dtype, sources, absent.get(path, frozenset()))
        for path, sources in group_by_path(specs, targets).items()
    ]
    total = sum(source.nbytes for stack in stacks for source in stack.sources.values())
    with byte_progress("loading weights", total, least=_PROGRESS_FROM) as advance:
        for stack in stacks:
            if stack.path == "layers.ffn.by_token":
                _check_experts(stack, files, targets["layers.ffn.gate.weight"].shape[1])
            if mesh is None:
                array = jax.device_put(stack.read(files, advance=advance), may_alias=False)
            else:
                sharding = named_sharding(stack.path, stack.shape, mesh, rules)
                array = place(stack, files, sharding, advance)
            targets[stack.path].set_value(array)
