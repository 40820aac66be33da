"""Checkpoints on meshes of eight (fake) devices; `test_eight_devices` runs this file in a process that has them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from csa2_jax import Bound, forward, init_cache, load_checkpoint
from csa2_jax.config import ModelConfig
from csa2_jax.conversion.budget import budget
from csa2_jax.conversion.convert import convert
from csa2_jax.conversion.opening import open_checkpoint
from csa2_jax.conversion.stacks import stacks_of
from csa2_jax.placing import place
from tests.conversion.test_round_trip import SMALL_PIECES, written
from tests.test_checkpoint import parameters

MESHES: dict[str, tuple[tuple[int, ...], tuple[str, ...]]] = {
    "1": ((1,), ("model",)),
    "2": ((2,), ("model",)),
    "4x2": ((4, 2), ("data", "model")),
    "8": ((8,), ("model",)),
}


@pytest.mark.parametrize("name", MESHES)
@pytest.mark.parametrize("converted", [False, True])
def test_checkpoint_loads_onto_a_mesh_with_the_sharding_asked_for(name: str, converted: bool, tmp_path: Path) -> None:
    shape, axes = MESHES[name]
    source = written("fp8", tmp_path / "source")
    expected = parameters(load_checkpoint(source))
    if converted:
        convert(source, tmp_path / "orbax", mesh={"model": 8}, piece_bytes=SMALL_PIECES)
        source = tmp_path / "orbax"
    mesh = jax.make_mesh(shape, axes, devices=jax.devices()[: int(np.prod(shape))])
    model = load_checkpoint(source, mesh=mesh)
    split = 0
    for key, variable in nnx.to_flat_state(nnx.state(model)):
        array, path = variable[...], ".".join(map(str, key))
        assert np.asarray(array).tobytes() == expected[path].tobytes(), path
        assert array.sharding.mesh.shape == mesh.shape
        split += not array.sharding.is_fully_replicated
    assert split > 8 or shape == (1,)
    rules = {"heads": ("data", "model")}
    other = load_checkpoint(source, mesh=mesh, rules=rules)
    heads = other.layers.attn.wq_b.weight[...].sharding.spec
    first = next((a for a, n in zip(axes, shape, strict=True) if n > 1 and a in ("data", "model")), None)
    assert (heads[1] if first else None) in (first, (first,))


@pytest.mark.parametrize("name", MESHES)
def test_orbax_itself_restores_the_parameters_onto_a_mesh(name: str, tmp_path: Path) -> None:
    """No code of ours reads it: names, values and the sharding that is asked for, with a mesh active."""
    shape, axes = MESHES[name]
    source = written("fp8", tmp_path / "source")
    convert(source, tmp_path / "orbax", mesh={"model": 4}, piece_bytes=SMALL_PIECES)
    expected = parameters(load_checkpoint(source, compute_dtype="bfloat16"))
    mesh = jax.make_mesh(shape, axes, devices=jax.devices()[: int(np.prod(shape))])
    with jax.set_mesh(mesh), ocp.StandardCheckpointer() as checkpointer:
        metadata = checkpointer.metadata(tmp_path / "orbax/params").item_metadata

        def wanted(m: Any) -> jax.ShapeDtypeStruct:
            last = "model" if m.shape[-1] % 8 == 0 else None
            sharding = NamedSharding(mesh, PartitionSpec(*[None] * (len(m.shape) - 1), last))
            return jax.ShapeDtypeStruct(m.shape, m.dtype, sharding=sharding)

        target = jax.tree.map(wanted, metadata)
        tree = checkpointer.restore(tmp_path / "orbax/params", target)
    found = {".".join(str(k.key) for k in path): leaf for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]}
    for path, value in found.items():
        assert value.sharding.mesh.shape == mesh.shape
        values = np.asarray(value)
        if values.dtype == expected[path].dtype:
            assert values.tobytes() == expected[path].tobytes(), path
        else:  # what the model widens to compute in f32
            np.testing.assert_array_equal(values.astype(np.float32), expected[path])
    assert set(expected) - set(found) == {"token_map", "ngram_products"}


def test_plan_agrees_with_what_a_mesh_really_holds(tmp_path: Path) -> None:
    source = written("fp8", tmp_path / "source")
    sizes = {"data": 2, "model": 4}
    mesh = jax.make_mesh((2, 4), ("data", "model"))
    model = load_checkpoint(source, mesh=mesh)
    planned = {p.stack.path: p.device_bytes for p in budget(ModelConfig.from_hf(source), mesh=sizes).parameters}
    checked = 0
    for key, variable in nnx.to_flat_state(nnx.state(model)):
        array, path = variable[...], ".".join(map(str, key))
        widened = (
            array.dtype == np.float32
            and path in planned
            and planned[path] * 2 == array.addressable_shards[0].data.nbytes
        )
        if path in planned and not widened:
            assert array.addressable_shards[0].data.nbytes == planned[path], path
            checked += 1
    assert checked > 30


def test_a_model_that_lies_divided_answers_as_one_that_does_not(tmp_path: Path) -> None:
    """Small arrays travel together into a step where each lies whole on every device; divided ones travel alone."""
    source = written("fp8", tmp_path / "source")
    mesh = jax.make_mesh((8,), ("model",), axis_types=(jax.sharding.AxisType.Auto,))
    answers, joined = [], []
    for model in (load_checkpoint(source), load_checkpoint(source, mesh=mesh)):
        bound = Bound.of(model)
        joined.append(len(bound.state.joined))
        out, _ = forward(bound, np.arange(6)[None], init_cache(bound.config, 1, 16))
        answers.append(np.asarray(out.logits, np.float32))
    assert all(joined)
    np.testing.assert_allclose(*answers, rtol=0, atol=2e-2 * np.abs(answers[0]).max())


@pytest.mark.parametrize("converted", [False, True])
@pytest.mark.parametrize(("shape", "block"), [((8,), 100), ((8,), 1 << 20), ((2, 4), 100)])
def test_tables_whose_rows_do_not_divide_are_read_once(
    shape: tuple[int, ...], block: int, converted: bool, tmp_path: Path
) -> None:
    """Split by columns; a part that many devices hold counts once as well."""
    source = written("fp8", tmp_path / "source")
    if converted:
        convert(source, tmp_path / "orbax", piece_bytes=SMALL_PIECES)
    opened = open_checkpoint(tmp_path / "orbax" if converted else source)
    axes = ("data", "model")[-len(shape) :]
    mesh = jax.make_mesh(shape, axes)
    stacks = stacks_of(opened.specs, {spec.name: spec for spec in opened.specs})
    columns_split = 0
    for path in [path for path in stacks if path.startswith("engram_tables.")]:
        stack, told = stacks[path], []
        for spec in (PartitionSpec(None, "model"), PartitionSpec(None, None), PartitionSpec(None, axes)):
            sharding = NamedSharding(mesh, spec)
            try:
                sharding.shard_shape(stack.shape)
            except ValueError:
                continue  # so few columns do not divide
            told.clear()
            array = place(stack, opened.files, sharding, told.append, block_bytes=block)
            assert array.sharding == sharding
            assert np.asarray(array).tobytes() == stack.read(opened.files).tobytes()
            assert sum(told) == stack.nbytes
            columns_split += sharding.shard_shape(stack.shape)[1] < stack.shape[1]
    assert columns_split >= 2
