"""Odd places, leftovers and files of other hands: nothing is mixed in, taken for whole, or written where it does not belong."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from csa2_jax import load_checkpoint
from csa2_jax.cli import main
from csa2_jax.config import ModelConfig
from csa2_jax.conversion import convert as convert_module
from csa2_jax.conversion import staging
from csa2_jax.conversion.convert import convert, pieces_of
from csa2_jax.conversion.export import export
from csa2_jax.conversion.stacks import stacks_of
from csa2_jax.conversion.verify import verify
from csa2_jax.manifest import release_tensors
from csa2_jax.safetensors_io import CheckpointError, TensorFiles
from tests import random_checkpoint as rc
from tests.conversion.test_round_trip import SMALL_PIECES, assert_same_tensors, digests, written
from tests.small_models import RELEASED
from tests.test_checkpoint import make


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return written("fp8", tmp_path / "source")


def stop_before_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging.Staging, "commit", lambda self: (_ for _ in ()).throw(KeyboardInterrupt))


# ---- files of other hands ----


def test_weight_files_that_lie_about_never_reach_an_export(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    convert(source, tmp_path / "orbax")
    for name in ("model.safetensors", "model.safetensors.index.json", "notes.bin"):
        (tmp_path / "orbax" / name).write_text("stray")
    with monkeypatch.context() as patch:
        stop_before_commit(patch)
        with pytest.raises(KeyboardInterrupt):
            export(tmp_path / "orbax", tmp_path / "back")
    export(tmp_path / "orbax", tmp_path / "back")
    assert_same_tensors(source, tmp_path / "back")
    assert not {"model.safetensors.index.json", "notes.bin"} & {p.name for p in (tmp_path / "back").iterdir()}


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (
            {"../../escaped.safetensors": {"metadata": None, "tensors": "all"}},
            "names ../../escaped.safetensors, a file outside",
        ),
        ({"/tmp/escaped.safetensors": {"metadata": None, "tensors": "all"}}, "a file outside"),
        ({"config.json": {"metadata": None, "tensors": "all"}}, "config.json must be a weight file"),
        ({"model.safetensors": {"tensors": 3}}, "model.safetensors must be a weight file"),
        ({"model.safetensors": {"metadata": [], "tensors": []}}, "model.safetensors must be a weight file"),
        ([], "must be a JSON object"),
        ("{", "not valid JSON"),
    ],
)
def test_release_json_is_read_as_data_from_a_stranger(content: Any, words: str, source: Path, tmp_path: Path) -> None:
    convert(source, tmp_path / "orbax")
    if isinstance(content, dict):
        for file in content.values():
            if file["tensors"] == "all":
                file["tensors"] = list(TensorFiles(source))
    text = content if isinstance(content, str) else json.dumps(content)
    (tmp_path / "orbax/release.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"release\.json") as error:
        export(tmp_path / "orbax", tmp_path / "back")
    assert words in str(error.value)
    assert not list(tmp_path.rglob("*escaped*"))


def test_shards_in_folders_come_back_in_their_folders(tmp_path: Path) -> None:
    source = written("fp8", tmp_path / "source", shards=2)
    index = json.loads((source / "model.safetensors.index.json").read_text())
    for number, name in enumerate(sorted(set(index["weight_map"].values()))):
        (source / f"d{number}").mkdir()
        (source / name).rename(source / f"d{number}/model.safetensors")
        index["weight_map"] = {
            k: f"d{number}/model.safetensors" if v == name else v for k, v in index["weight_map"].items()
        }
    (source / "model.safetensors.index.json").write_text(json.dumps(index))
    convert(source, tmp_path / "orbax")
    export(tmp_path / "orbax", tmp_path / "back")
    assert_same_tensors(source, tmp_path / "back")
    found = json.loads((tmp_path / "back/model.safetensors.index.json").read_text())
    assert found["weight_map"] == index["weight_map"]


@pytest.mark.parametrize("content", ["[]", "null", "", "{"])
def test_leftovers_that_are_no_json_are_named(content: str, source: Path, tmp_path: Path) -> None:
    (tmp_path / "out.partial").mkdir()
    (tmp_path / "out.partial/begun.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"out\.partial/begun\.json .*JSON"):
        convert(source, tmp_path / "out")
    convert(source, tmp_path / "orbax")
    export(tmp_path / "orbax", tmp_path / "back")
    (tmp_path / "back/exported_from.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"exported_from\.json .*JSON"):
        export(tmp_path / "orbax", tmp_path / "back")


def archive(path: Path) -> None:
    with path.open("wb") as file:
        np.savez(file, a=np.arange(3))


def huge_array(path: Path) -> None:
    header = {"descr": "<i4", "fortran_order": False, "shape": (1 << 50,)}
    with path.open("wb") as file:
        np.lib.format.write_array_header_1_0(file, header)


@pytest.mark.parametrize(
    "write",
    [
        lambda p: p.write_bytes(b"PK\3\4nonsense"),
        archive,
        huge_array,
        lambda p: p.touch(),
    ],
)
def test_a_token_map_that_is_no_array_is_refused(write: Any, source: Path, tmp_path: Path) -> None:
    write(source / "token_map.npy")
    with pytest.raises(CheckpointError, match=r"token_map\.npy is not a NumPy array of integers .*write it again"):
        convert(source, tmp_path / "out")


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("dtype", ["BF16"], "has dtype"),
        ("shape", [10**5000], "not valid JSON"),
        ("shape", [1 << 70], "not a list of sizes"),
        ("shape", [1] * 5000, "not a list of sizes"),
        ("data_offsets", [0, 1 << 80], "not [begin, end]"),
    ],
)
def test_headers_of_odd_values_are_refused_by_name(
    field: str, value: Any, words: str, source: Path, tmp_path: Path
) -> None:
    path = source / "model.safetensors"
    content = path.read_bytes()
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    header["embed.weight"][field] = "@"
    digits = "1" + "0" * 5000 if value == [10**5000] else None
    new = json.dumps(header).replace('"@"', f"[{digits}]" if digits else json.dumps(value)).encode()
    path.write_bytes(len(new).to_bytes(8, "little") + new + content[8 + size :])
    with pytest.raises(CheckpointError, match=r"model\.safetensors") as error:
        convert(source, tmp_path / "out")
    assert words in str(error.value)
    assert digits or "embed.weight" in str(error.value)


def test_metadata_of_another_kind_is_refused(source: Path, tmp_path: Path) -> None:
    path = source / "model.safetensors"
    content = path.read_bytes()
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size]) | {"__metadata__": ["a", "b"]}
    new = json.dumps(header).encode()
    path.write_bytes(len(new).to_bytes(8, "little") + new + content[8 + size :])
    with pytest.raises(CheckpointError, match="__metadata__ must map names to texts"):
        convert(source, tmp_path / "out")


# ---- other versions, other states ----


def test_a_version_that_cuts_pieces_otherwise_does_not_go_on(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        stop_before_commit(patch)
        with pytest.raises(KeyboardInterrupt):
            convert(source, tmp_path / "out", piece_bytes=SMALL_PIECES)
    real = convert_module.chunk_shape
    monkeypatch.setattr(convert_module, "chunk_shape", lambda stack, mesh, size: real(stack, mesh, size // 2))
    with pytest.raises(CheckpointError, match="begun with another layout"):
        convert(source, tmp_path / "out", piece_bytes=SMALL_PIECES)


def test_a_source_that_changes_while_it_is_exported_is_never_finished(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    convert(source, tmp_path / "orbax")
    victim = tmp_path / "orbax/params/embed.weight/0.0"
    real = staging.Staging.write

    def write(self: staging.Staging, name: str, pieces: Any) -> None:
        real(self, name, pieces)
        if name.endswith(".safetensors"):
            victim.write_bytes(victim.read_bytes()[::-1])

    monkeypatch.setattr(staging.Staging, "write", write)
    with pytest.raises(CheckpointError, match="changed while it was exported"):
        export(tmp_path / "orbax", tmp_path / "back")
    assert not (tmp_path / "back").exists()


@pytest.mark.parametrize("loss", ["array", "piece"])
def test_a_finished_conversion_that_was_damaged_is_not_done(loss: str, source: Path, tmp_path: Path) -> None:
    convert(source, tmp_path / "out", piece_bytes=SMALL_PIECES)
    array = tmp_path / "out/params/layers.attn.wkv.weight"
    if loss == "array":
        shutil.rmtree(array)
    else:
        next(p for p in array.iterdir() if p.name[0] != ".").write_bytes(b"")
    with pytest.raises(CheckpointError, match="was finished and has been damaged since"):
        convert(source, tmp_path / "out", piece_bytes=SMALL_PIECES)


def test_a_lost_piece_of_a_table_on_the_host_is_named(source: Path, tmp_path: Path) -> None:
    convert(source, tmp_path / "out", piece_bytes=SMALL_PIECES)
    (tmp_path / "out/params/engram_tables.0.weight/1.0").unlink()
    with pytest.raises(
        CheckpointError, match=r"engram_tables\.0\.weight/1\.0, rows of layers\.0\.engram\.embed\.weight, has 0"
    ):
        load_checkpoint(tmp_path / "out", engram="host")


# ---- places ----


def test_links_to_nothing_and_files_in_the_way_are_told_before_work(source: Path, tmp_path: Path) -> None:
    convert(source, tmp_path / "orbax")
    (tmp_path / "link").symlink_to(tmp_path / "gone")
    (tmp_path / "file.partial").write_text("in the way")
    for place, words in (("link", "is a link to nothing"), ("file", r"file\.partial is in the way")):
        for run in (lambda to: convert(source, to), lambda to: export(tmp_path / "orbax", to)):
            with pytest.raises(FileExistsError, match=words):
                run(tmp_path / place)
    assert not (tmp_path / "link.partial").exists()
    with pytest.raises(ValueError, match="is no place for a checkpoint"):
        convert(source, "/")
    with pytest.raises(ValueError, match="of hosts=0 processes from 1 up"):
        convert(source, tmp_path / "out", hosts=0)


def test_no_output_inside_its_own_input(source: Path, tmp_path: Path) -> None:
    before = digests(source)
    for name in ("params", "out"):
        with pytest.raises(ValueError, match=f"{name} lies inside .*source, which it is made from"):
            convert(source, source / name)
    convert(source, tmp_path / "orbax")
    with pytest.raises(ValueError, match="back lies inside"):
        export(tmp_path / "orbax", tmp_path / "orbax/back")
    assert digests(source) == before


def test_a_release_is_a_release_whatever_lies_beside_its_weights(source: Path, tmp_path: Path) -> None:
    (source / "params").mkdir()
    convert(source, tmp_path / "out")
    assert verify(source, tmp_path / "out").differences == ()


def test_an_unfinished_conversion_is_told_so(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        stop_before_commit(patch)
        with pytest.raises(KeyboardInterrupt):
            convert(source, tmp_path / "out")
    (tmp_path / "out.partial/content/csa2.json").unlink()
    for unfinished in (tmp_path / "out.partial", tmp_path / "out.partial/content"):
        for use in (load_checkpoint, lambda d: convert(d, tmp_path / "again"), lambda d: verify(d, source)):
            with pytest.raises(CheckpointError, match="is no finished conversion"):
                use(unfinished)


def test_verify_prints_before_it_writes_and_looks_for_the_place_first(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["verify", str(source), str(source), "--digests", str(tmp_path / "nowhere/d.json")]) == 2
    assert "nowhere does not exist" in capsys.readouterr().err
    assert main(["convert", "--plan", str(source / "config.json"), "--device-memory", "-1"]) == 2
    assert "must be a number of GB above 0" in capsys.readouterr().err


# ---- shares ----


@pytest.mark.parametrize(
    ("mesh", "hosts"),
    [({"data": 1, "model": 8}, 2), ({"model": 16}, 2), ({"data": 4, "model": 8}, 4), ({"data": 2, "model": 16}, 4)],
)
def test_hosts_have_shares_of_one_size(mesh: dict[str, int], hosts: int) -> None:
    config = ModelConfig.from_hf(RELEASED)
    specs = list(release_tensors(config))
    stacks = stacks_of(specs, {spec.name: spec for spec in specs})
    shares = [sum(p.nbytes for p in pieces_of(stacks.values(), mesh, 64 << 20, host, hosts)) for host in range(hosts)]
    assert max(shares) < 1.1 * min(shares)


def test_a_host_that_is_done_tells_its_own_share(tmp_path: Path) -> None:
    config, tensors = make("fp8")
    source = rc.write_checkpoint(tmp_path / "source", config, tensors)
    options: dict[str, Any] = {"mesh": {"model": 2}, "hosts": 2, "piece_bytes": SMALL_PIECES}
    first = [convert(source, tmp_path / "out", host=host, **options) for host in (0, 1)]
    again = [convert(source, tmp_path / "out", host=host, **options) for host in (0, 1)]
    assert [done.nbytes for done in again] == [done.nbytes for done in first]
    assert all(done.resumed_bytes == done.nbytes for done in again)
