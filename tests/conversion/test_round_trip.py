"""Conversion: release -> Orbax -> release, bit for bit, on every recorded checkpoint; shared by hosts, on meshes, planned."""

from __future__ import annotations

import functools
import hashlib
import json
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from csa2_jax import load_checkpoint
from csa2_jax.config import ModelConfig
from csa2_jax.conversion.budget import budget
from csa2_jax.conversion.convert import chunk_shape, convert, pieces_of
from csa2_jax.conversion.converted import ConvertedFiles, layout
from csa2_jax.conversion.export import export
from csa2_jax.conversion.stacks import Stack, stacks_of
from csa2_jax.conversion.staging import Staging
from csa2_jax.conversion.verify import verify
from csa2_jax.conversion.views import Requantised, tile_exponents
from csa2_jax.manifest import release_tensors
from csa2_jax.safetensors_io import CheckpointError, TensorFiles
from tests import oracle_formats as formats
from tests import random_checkpoint as rc
from tests.golden_sets import SETS, materialise
from tests.small_models import RELEASED
from tests.test_checkpoint import make, parameters

SMALL_PIECES = 3000  # bytes: many pieces of every array, ragged ones too
# Each of the files that are recorded: "tiny8_f32_noqat" and "tiny8_f32" have the same kind of weights.
CHECKPOINTS = [name for name in SETS if name != "tiny8_f32"]


def written(storage: rc.Storage, where: Path, shards: int = 1, seed: int = 0) -> Path:
    config, tensors = make(storage, seed)
    return rc.write_checkpoint(where, config, tensors, shards=shards)


def digests(directory: Path) -> dict[str, str]:
    """Of every file, but for Orbax's two that hold the time."""
    return {
        str(path.relative_to(directory)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(directory.rglob("*"))
        if path.is_file() and path.name not in ("_CHECKPOINT_METADATA", "commit_success.txt")
    }


def data_blocks(directory: Path) -> dict[str, str]:
    """Digest of everything behind the header of every weight file."""
    found = {}
    for path in sorted(directory.glob("*.safetensors")):
        content = path.read_bytes()
        found[path.name] = hashlib.sha256(content[8 + int.from_bytes(content[:8], "little") :]).hexdigest()
    return found


def assert_same_tensors(a: Path, b: Path) -> None:
    assert data_blocks(a) == data_blocks(b)
    one, two = TensorFiles(a), TensorFiles(b)
    assert list(one) == list(two)
    for name, entry in one.items():
        assert (entry.dtype, entry.shape) == (two[name].dtype, two[name].shape)
        assert one.read(name).tobytes() == two.read(name).tobytes(), name


# ---- round trips ----


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_round_trip_of_a_recorded_checkpoint_is_exact(name: str, tmp_path: Path) -> None:
    """Every tensor, its place in the files, config.json; and the converted one says the same to `verify`."""
    source = materialise(name)
    convert(source, tmp_path / "orbax")
    export(tmp_path / "orbax", tmp_path / "back")
    assert_same_tensors(source, tmp_path / "back")
    assert json.loads((source / "config.json").read_text()) == json.loads((tmp_path / "back/config.json").read_text())
    for pair in ((source, tmp_path / "orbax"), (tmp_path / "orbax", tmp_path / "back")):
        found = verify(*pair)
        assert (found.differences, found.exact) == ((), found.tensors)
        assert found.tensors == len(TensorFiles(source))


@pytest.mark.smoke
@pytest.mark.parametrize("storage", ["bf16", "fp8", "f32"])
@pytest.mark.parametrize("shards", [1, 5])
def test_round_trip_keeps_files_and_their_bytes(storage: rc.Storage, shards: int, tmp_path: Path) -> None:
    source = written(storage, tmp_path / "source", shards)
    convert(source, tmp_path / "orbax", piece_bytes=SMALL_PIECES)
    export(tmp_path / "orbax", tmp_path / "back")
    assert_same_tensors(source, tmp_path / "back")
    assert len(data_blocks(source)) == shards
    if shards > 1:
        maps = [json.loads((d / "model.safetensors.index.json").read_text()) for d in (source, tmp_path / "back")]
        assert maps[0]["weight_map"] == maps[1]["weight_map"]


@pytest.mark.parametrize("storage", ["bf16", "fp8"])
def test_converted_checkpoint_loads_as_the_release_does(storage: rc.Storage, tmp_path: Path) -> None:
    source = written(storage, tmp_path / "source")
    convert(source, tmp_path / "orbax", piece_bytes=SMALL_PIECES)
    for options in ({"compute_dtype": "float32"}, {"weights": "bfloat16"}, {"weights": "float32"}):
        found, expected = (parameters(load_checkpoint(d, **options)) for d in (tmp_path / "orbax", source))  # type: ignore[arg-type]
        assert found.keys() == expected.keys()
        for path, value in expected.items():
            assert (found[path].dtype, found[path].tobytes()) == (value.dtype, value.tobytes()), path


@pytest.mark.parametrize("weights", ["bfloat16", "float32"])
def test_dequantised_conversion_holds_the_values_and_quantises_back(weights: Any, tmp_path: Path) -> None:
    source = written("fp8", tmp_path / "source")
    convert(source, tmp_path / "orbax", weights=weights, piece_bytes=SMALL_PIECES)
    found = parameters(load_checkpoint(tmp_path / "orbax"))
    expected = parameters(load_checkpoint(source, weights=weights))
    for path, value in expected.items():
        assert (found[path].dtype, found[path].tobytes()) == (value.dtype, value.tobytes()), path
    compared = verify(source, tmp_path / "orbax")
    assert compared.differences == ()
    assert compared.exact < compared.tensors  # the others by value
    # Quantised again: the same values, in scales that may be smaller; quantising that once more changes nothing.
    export(tmp_path / "orbax", tmp_path / "again")
    again = parameters(load_checkpoint(tmp_path / "again", weights="float32"))
    for path, value in parameters(load_checkpoint(source, weights="float32")).items():
        np.testing.assert_array_equal(again[path], value, err_msg=path)
    convert(tmp_path / "again", tmp_path / "orbax2", weights="float32")
    export(tmp_path / "orbax2", tmp_path / "third")
    assert_same_tensors(tmp_path / "again", tmp_path / "third")


def test_export_as_bf16_needs_no_scales_and_says_so(tmp_path: Path) -> None:
    source = written("fp8", tmp_path / "source")
    convert(source, tmp_path / "orbax")
    export(tmp_path / "orbax", tmp_path / "wide", weights="bfloat16", shard_bytes=200_000)
    config = ModelConfig.from_hf(tmp_path / "wide")
    assert not config.quantized
    assert not [n for n in TensorFiles(tmp_path / "wide") if n.endswith(".scale") and "engram" not in n]
    found, expected = (
        parameters(load_checkpoint(d, weights="bfloat16", compute_dtype="float32")) for d in (tmp_path / "wide", source)
    )
    for path, value in expected.items():
        np.testing.assert_array_equal(found[path].astype(np.float32), value.astype(np.float32), err_msg=path)
    files = list((tmp_path / "wide").glob("*.safetensors"))
    assert len(files) > 1
    assert max(path.stat().st_size for path in files) < 300_000


def test_trained_weights_are_quantised_by_the_rules(tmp_path: Path) -> None:
    """Random f32 weights, all of a model's: fp8 in tiles, fp4 in rows, as the oracle's NumPy does it."""
    config, tensors = make("fp8")
    rng = np.random.default_rng(0)
    wanted = {s.name: s for s in release_tensors(ModelConfig.from_hf(config))}
    for name in tensors:
        scale = wanted.get(name.removesuffix(".weight") + ".scale")
        if name.endswith(".weight") and scale is not None and "engram" not in name:
            values = (rng.standard_normal(wanted[name].logical_shape) * np.exp2(rng.integers(-9, 9))).astype(np.float32)
            values[0] = 0.0
            quantise = formats.quantise_expert_fp4 if wanted[name].dtype == "I8" else formats.quantise_weight_fp8
            tensors[name], tensors[scale.name] = quantise(values)
    source = rc.write_checkpoint(tmp_path / "source", config, tensors)
    convert(source, tmp_path / "orbax", weights="float32")
    export(tmp_path / "orbax", tmp_path / "back")
    # A scale may be a smaller power of two where the largest element was rounded down; values are the same.
    a, b = (parameters(load_checkpoint(d, weights="float32")) for d in (source, tmp_path / "back"))
    for path in a:
        np.testing.assert_array_equal(a[path], b[path], err_msg=path)


def fine_tuned(tmp_path: Path, weights: Any, change: Callable[[str, np.ndarray], np.ndarray]) -> tuple[Path, Path]:
    """(release, its conversion to plain weights, each array of which is what `change` makes of it)."""
    source = written("fp8", tmp_path / "source")
    convert(source, tmp_path / "orbax", weights=weights)
    dtype = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16}[weights]
    for path in sorted((tmp_path / "orbax/params").glob("*.weight")):
        stored = json.loads((path / ".zarray").read_text())
        if np.dtype(stored["dtype"]) == dtype and len(stored["shape"]) > 2 and stored["chunks"] == stored["shape"]:
            (file,) = (p for p in path.iterdir() if p.name[0] != ".")
            values = np.fromfile(file, dtype).reshape(stored["shape"])
            change(path.name, values).astype(dtype).tofile(file)
    return source, tmp_path / "orbax"


@pytest.mark.parametrize("weights", ["float32", "bfloat16"])
def test_weights_on_no_grid_are_quantised_as_the_oracle_does(weights: Any, tmp_path: Path) -> None:
    rng = np.random.default_rng(1)

    def change(_: str, values: np.ndarray) -> np.ndarray:
        new = rng.standard_normal(values.shape) * np.exp2(rng.integers(-12, 12, values.shape))
        new[..., :2, :] = 0
        return new

    source, converted = fine_tuned(tmp_path, weights, change)
    export(converted, tmp_path / "back")
    held, back = ConvertedFiles(converted), TensorFiles(tmp_path / "back")
    seen = {"F8_E4M3": 0, "I8": 0}
    for name, entry in back.items():
        scale = name.removesuffix(".weight") + ".scale"
        if entry.dtype in seen and held[name].dtype != entry.dtype:
            seen[entry.dtype] += 1
            quantise = formats.quantise_expert_fp4 if entry.dtype == "I8" else formats.quantise_weight_fp8
            codes, scales = quantise(held.read(name).astype(np.float32))
            assert back.read(name).tobytes() == codes.tobytes(), name
            assert back.read(scale).tobytes() == scales.tobytes(), scale
    assert min(seen.values()) > 10
    load_checkpoint(tmp_path / "back")
    # Pieces of any size and place are made alike.
    view = Requantised(held, tuple(release_tensors(ModelConfig.from_hf(source))))
    for name in ("layers.1.attn.wkv.weight", "layers.1.attn.wq_a.scale", "layers.2.ffn.experts.1.w2.weight"):
        for rows in (slice(0, 1), slice(1, 2), slice(3, 40), slice(17, None)):
            whole = back.read(name)[rows]
            assert view.part(name, (rows,)).tobytes() == np.ascontiguousarray(whole).tobytes(), (name, rows)


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_a_weight_that_is_not_finite_is_not_quantised(value: float, tmp_path: Path) -> None:
    def change(path: str, values: np.ndarray) -> np.ndarray:
        if path == "layers.attn.wkv.weight":
            values[2, 9, 5] = value
        return values

    _, converted = fine_tuned(tmp_path, "float32", change)
    told = rf"layers\.2\.attn\.wkv\.weight\[9, 5\] is {value}, which fp8 and fp4 cannot hold: export as bf16"
    with pytest.raises(CheckpointError, match=told):
        export(converted, tmp_path / "back")
    assert not (tmp_path / "back").exists()
    export(converted, tmp_path / "wide", weights="bfloat16")


@pytest.mark.parametrize(("tile", "largest"), [(32, 448.0), (1, 6.0)])
def test_scales_are_the_smallest_powers_of_two_that_hold_the_largest(tile: int, largest: float) -> None:
    powers = np.exp2(np.arange(-20, 20))
    just_below = np.nextafter(np.float32(largest), np.float32(0))
    for amax, expected in ((largest, 0), (just_below, 0), (largest * 1.001, 1), (largest / 2, -1)):
        values = np.zeros((tile, 32), np.float32)
        for i, power in enumerate(powers):
            values[0, 3] = -amax * power
            assert tile_exponents(values, (tile, 32), largest)[0, 0] == expected + i - 20
    assert tile_exponents(np.zeros((tile, 32), np.float32), (tile, 32), largest)[0, 0] == 0


# ---- pieces ----


@functools.cache
def random_stacks(weights: Any) -> dict[str, Stack]:
    config = ModelConfig.from_hf(make("fp8")[0])
    return stacks_of(list(release_tensors(config)), {s.name: s for s in layout(config, weights)})


@settings(max_examples=20, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
@given(
    piece_bytes=st.sampled_from([250, 1000, 5000, 1 << 20]),
    mesh=st.sampled_from([{}, {"model": 2}, {"data": 2, "model": 4}, {"expert": 2, "model": 2}]),
    hosts=st.sampled_from([1, 2, 3, 8]),
    weights=st.sampled_from(["stored", "bfloat16"]),
)
def test_pieces_cover_every_array_once_whatever_hosts_and_meshes(
    piece_bytes: int, mesh: dict[str, int], hosts: int, weights: Any
) -> None:
    stacks = random_stacks(weights)
    seen = {path: np.zeros(stack.shape, np.int8) for path, stack in stacks.items()}
    names = set()
    for host in range(hosts):
        for piece in pieces_of(stacks.values(), mesh, piece_bytes, host, hosts):
            seen[piece.stack.path][piece.region] += 1
            assert piece.name not in names
            names.add(piece.name)
    assert all((count == 1).all() for count in seen.values())


def test_pieces_are_of_the_size_asked_for_and_whole_within_a_device() -> None:
    config = ModelConfig.from_hf(RELEASED)
    specs = list(release_tensors(config))
    stacks = stacks_of(specs, {s.name: s for s in specs})
    mesh = {"data": 2, "model": 8}
    for path, stack in stacks.items():
        chunk = chunk_shape(stack, mesh, 64 << 20)
        nbytes = int(np.prod(chunk)) * stack.dtype.itemsize
        assert nbytes <= 64 << 20
        if stack.nbytes > 64 << 20:
            assert nbytes > 8 << 20, path
    experts = stacks["layers.ffn.experts.w1.weight"]
    assert experts.shape == (40, 384, 2304, 2560)
    assert (384 // 8) % chunk_shape(experts, mesh, 64 << 20)[1] == 0
    tables = stacks["engram_tables.0.weight"]
    assert (tables.shape[0] // 8) % chunk_shape(tables, {"model": 8}, 64 << 20)[0] == 0


def test_hosts_write_one_checkpoint_together(tmp_path: Path) -> None:
    source = written("fp8", tmp_path / "source")
    convert(source, tmp_path / "alone", mesh={"model": 4}, piece_bytes=SMALL_PIECES)
    complete = []
    for host in (2, 0, 3, 1):
        assert not (tmp_path / "shared").exists()
        done = convert(source, tmp_path / "shared", mesh={"model": 4}, host=host, hosts=4, piece_bytes=SMALL_PIECES)
        complete.append(done.complete)
    assert complete == [False, False, False, True]
    assert verify(tmp_path / "alone", tmp_path / "shared").differences == ()
    assert digests(tmp_path / "alone/params") == digests(tmp_path / "shared/params")
    experts = "params/layers.ffn.experts.w1.weight"
    assert len(list((tmp_path / "alone" / experts).iterdir())) > 4


def test_hosts_that_finish_at_the_same_moment_make_one_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = written("fp8", tmp_path / "source")
    together = threading.Barrier(3)
    real = Staging.finishing

    def finishing(self: Staging) -> Any:
        together.wait(60)  # all are done with their pieces, none has said so
        return real(self)

    monkeypatch.setattr(Staging, "finishing", finishing)
    with ThreadPoolExecutor(3) as pool:
        for attempt in range(4):
            target = tmp_path / f"shared{attempt}"
            jobs = [
                pool.submit(convert, source, target, mesh={"model": 3}, host=host, hosts=3, piece_bytes=50_000)
                for host in range(3)
            ]
            done = [job.result(120) for job in jobs]
            assert any(host.complete for host in done)
            assert sorted(p.name for p in tmp_path.glob(f"shared{attempt}*")) == [target.name]
            assert verify(source, target).differences == ()


# ---- plan ----


def test_plan_of_the_released_model_is_the_release() -> None:
    found = budget(ModelConfig.from_hf(RELEASED), mesh={"data": 1, "model": 8})
    assert (len(found.tensors), found.source_bytes, found.target_bytes) == (96_085, 510_286_023_000, 510_286_023_000)
    rows = found.rows()
    assert len(rows) == 96_085
    assert sum(row["bytes"] for row in rows) == 510_286_023_000
    assert len({(row["parameter"], *row["index"]) for row in rows}) == 96_085
    by_path = {p.stack.path: p for p in found.parameters}
    assert by_path["layers.ffn.experts.w1.weight"].partition == ((), ("model",), (), ())
    assert by_path["engram_tables.0.weight"].device_bytes == 384_006_168 * 256 // 8
    assert by_path["layers.attn.wkv.weight"].device_bytes == by_path["layers.attn.wkv.weight"].stack.nbytes
    assert found.device_bytes < found.source_bytes / 7
    alone = budget(ModelConfig.from_hf(RELEASED))
    carried = sum(p.stack.nbytes for p in alone.parameters if not p.built)
    assert alone.device_bytes == 510_286_023_000 - carried


def test_names_of_the_release_are_read_through_the_converted_one(tmp_path: Path) -> None:
    source = written("fp8", tmp_path / "source")
    convert(source, tmp_path / "orbax", piece_bytes=SMALL_PIECES)
    release, converted = TensorFiles(source), ConvertedFiles(tmp_path / "orbax")
    assert set(release) == set(converted)
    for name in release:
        rows = (slice(1, 3),)
        assert converted.part(name, rows).tobytes() == np.ascontiguousarray(release.read(name)[rows]).tobytes()
        assert release.part(name, rows).tobytes() == np.ascontiguousarray(release.read(name)[rows]).tobytes()
        assert converted.part(name).dtype == release.read(name).dtype
    assert converted.nbytes == release.nbytes
    assert release.part("layers.1.attn.wkv.weight", (slice(0, 4), slice(8, 24))).shape == (4, 16)


def test_bf16_weights_of_an_unquantised_release_stay_what_they_are(tmp_path: Path) -> None:
    source = written("bf16", tmp_path / "source")
    convert(source, tmp_path / "orbax", weights="bfloat16")
    assert verify(source, tmp_path / "orbax").exact == len(TensorFiles(source))
    assert ConvertedFiles(tmp_path / "orbax").specs == tuple(release_tensors(ModelConfig.from_hf(source)))
    with pytest.raises(CheckpointError, match="converted already"):
        convert(tmp_path / "orbax", tmp_path / "twice")
    assert ml_dtypes.bfloat16 in {v.dtype.type for v in parameters(load_checkpoint(tmp_path / "orbax")).values()}
