"""Conversion refuses what is damaged, by name and before work where headers tell; nothing half-written looks whole."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from csa2_jax import load_checkpoint
from csa2_jax.cli import main
from csa2_jax.conversion import staging
from csa2_jax.conversion.convert import convert
from csa2_jax.conversion.export import export
from csa2_jax.conversion.verify import verify
from csa2_jax.safetensors_io import CheckpointError
from tests import random_checkpoint as rc
from tests.conversion.test_round_trip import SMALL_PIECES, digests, written
from tests.test_checkpoint import DAMAGES, EXPERT, Tensors, W, make


def untouched(target: Path) -> bool:
    """Neither the output nor anything begun for it is there."""
    return not target.exists() and not target.with_name(target.name + ".partial").exists()


# ---- what headers tell ----


@pytest.mark.parametrize(("storage", "damage", "words"), DAMAGES)
def test_damaged_sources_are_refused_before_anything_is_written(
    tmp_path: Path, storage: rc.Storage, damage: Callable[[Tensors], Any], words: list[str]
) -> None:
    config, tensors = make(storage)
    damage(tensors)
    source = rc.write_checkpoint(tmp_path / "source", config, tensors)
    with pytest.raises(CheckpointError) as error:
        convert(source, tmp_path / "out")
    for word in [*words, str(source)]:
        assert word in str(error.value)
    assert untouched(tmp_path / "out")


def truncate(source: Path) -> None:
    path = sorted(source.glob("*.safetensors"))[-1]
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - 7)


def delete(source: Path) -> None:
    sorted(source.glob("*.safetensors"))[1].unlink()


def repeat(source: Path) -> None:
    """One tensor in two shards: the second shard's file holds all of the first's as well."""
    first, second = sorted(source.glob("*.safetensors"))[:2]
    shutil.copy(first, second)


def no_text(source: Path) -> None:
    (source / "model.safetensors.index.json").write_text("{")


def directory_for_file(source: Path) -> None:
    path = sorted(source.glob("*.safetensors"))[0]
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (truncate, r"truncated, or the header is damaged; fetch it again"),
        (delete, r"does not exist: fetch it"),
        (repeat, r"is in two shards"),
        (no_text, r"index\.json is not valid JSON"),
        (directory_for_file, r"does not exist: fetch it"),
    ],
)
def test_damaged_files_are_refused_before_anything_is_written(
    tmp_path: Path, damage: Callable[[Path], None], words: str
) -> None:
    source = written("fp8", tmp_path / "source", shards=3)
    damage(source)
    with pytest.raises(CheckpointError, match=words):
        convert(source, tmp_path / "out")
    assert untouched(tmp_path / "out")


def test_unreadable_file_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = written("fp8", tmp_path / "source", shards=3)
    victim = sorted(source.glob("*.safetensors"))[1]
    real = Path.open

    def refuse(self: Path, *args: Any, **kwargs: Any) -> Any:
        if self == victim:
            raise PermissionError(errno.EACCES, "Permission denied", str(self))
        return real(self, *args, **kwargs)

    monkeypatch.setattr(Path, "open", refuse)  # root reads everything, so that a mode of 0 would show nothing
    with pytest.raises(PermissionError, match=victim.name):
        convert(source, tmp_path / "out")
    assert untouched(tmp_path / "out")


def test_another_tokenizer_is_refused(tmp_path: Path) -> None:
    source = written("fp8", tmp_path / "source")
    size = json.loads((source / "config.json").read_text())["text_config"]["vocab_size"]
    np.save(source / "token_map.npy", np.arange(size, dtype=np.int32))  # nothing compressed at all
    with pytest.raises(
        CheckpointError, match=r"token_map\.npy gives .* engram_compressed_vocab_size=.*came with the weights"
    ):
        convert(source, tmp_path / "out")
    assert untouched(tmp_path / "out")


def test_places_that_cannot_be_are_refused(tmp_path: Path) -> None:
    source = written("fp8", tmp_path / "source")
    with pytest.raises(FileNotFoundError, match="nowhere does not exist: create it"):
        convert(source, tmp_path / "nowhere/out")
    (tmp_path / "taken").mkdir()
    with pytest.raises(FileExistsError, match="taken exists and was not made by this command"):
        convert(source, tmp_path / "taken")
    assert list((tmp_path / "taken").iterdir()) == []
    (tmp_path / "mine.partial").mkdir()
    (tmp_path / "mine.partial/notes").write_text("dear diary")
    with pytest.raises(CheckpointError, match="holds notes and is none of ours"):
        convert(source, tmp_path / "mine")
    for host, hosts in ((1, 1), (-1, 2)):
        with pytest.raises(ValueError, match=f"host={host} must be"):
            convert(source, tmp_path / "out", host=host, hosts=hosts)


# ---- what only values or time tell ----


@pytest.mark.parametrize("weights", ["stored", "bfloat16"])
@pytest.mark.parametrize(
    "name", ["layers.1.attn.wkv.scale", "layers.2.ffn.experts.1.w2.scale", "layers.0.engram.embed.scale"]
)
def test_nan_scale_is_found_by_name_and_place_in_any_piece(name: str, weights: Any, tmp_path: Path) -> None:
    config, tensors = make("fp8")
    tensors[name] = tensors[name].copy()
    tensors[name][-1, -1] = 255
    source = rc.write_checkpoint(tmp_path / "source", config, tensors)
    where = [n - 1 for n in tensors[name].shape]
    with pytest.raises(CheckpointError, match=rf"{name} holds byte 255 at \[{where[0]}, {where[1]}\]"):
        convert(source, tmp_path / "out", weights=weights, piece_bytes=64)
    assert not (tmp_path / "out").exists()
    with pytest.raises(CheckpointError, match="no finished conversion"):
        load_checkpoint(tmp_path / "out.partial")


def test_small_files_are_part_of_what_a_conversion_is_made_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = written("fp8", tmp_path / "source")
    (source / "chat_template.jinja").write_text("one")
    monkeypatch.setattr(staging.Staging, "commit", lambda self: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        convert(source, tmp_path / "out")
    monkeypatch.undo()
    (source / "chat_template.jinja").write_text("two")
    with pytest.raises(CheckpointError, match="begun with another source"):
        convert(source, tmp_path / "out")
    shutil.rmtree(tmp_path / "out.partial")
    convert(source, tmp_path / "out")
    assert (tmp_path / "out/chat_template.jinja").read_text() == "two"
    (source / "chat_template.jinja").unlink()
    with pytest.raises(FileExistsError, match="was not made by this command from this source"):
        convert(source, tmp_path / "out")


def test_another_source_or_other_options_never_mix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = written("fp8", tmp_path / "source")
    monkeypatch.setattr(staging.Staging, "commit", lambda self: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        convert(source, tmp_path / "out")
    monkeypatch.undo()
    with pytest.raises(CheckpointError, match=r'begun with another weights \("stored", now "bfloat16"\)'):
        convert(source, tmp_path / "out", weights="bfloat16")
    with pytest.raises(CheckpointError, match="begun with another source"):
        convert(written("fp8", tmp_path / "other", seed=1), tmp_path / "out")
    convert(source, tmp_path / "out")
    before = digests(tmp_path / "out")
    again = convert(source, tmp_path / "out")  # done already
    assert again.complete
    assert again.resumed_bytes == again.nbytes
    assert digests(tmp_path / "out") == before
    with pytest.raises(FileExistsError, match="was not made by this command from this source"):
        convert(source, tmp_path / "out", weights="bfloat16")


def test_hosts_that_disagree_or_did_not_finish_make_nothing(tmp_path: Path) -> None:
    source = written("fp8", tmp_path / "source")
    convert(source, tmp_path / "out", mesh={"data": 2, "model": 2}, host=0, hosts=2, piece_bytes=SMALL_PIECES)
    with pytest.raises(CheckpointError, match="begun with another mesh"):
        convert(source, tmp_path / "out", mesh={"model": 2, "data": 2}, host=1, hosts=2, piece_bytes=SMALL_PIECES)
    lost = next((tmp_path / "out.partial/content/params/layers.attn.wq_b.weight").glob("[0-9]*"))
    lost.unlink()
    options: dict[str, Any] = {"mesh": {"data": 2, "model": 2}, "hosts": 2, "piece_bytes": SMALL_PIECES}
    with pytest.raises(
        CheckpointError, match=r"lacks params/layers\.attn\.wq_b\.weight/.* run the command of every host again"
    ):
        convert(source, tmp_path / "out", host=1, **options)
    assert not (tmp_path / "out").exists()
    done = [convert(source, tmp_path / "out", host=host, **options).complete for host in (0, 1)]
    assert done[-1]
    assert verify(source, tmp_path / "out").differences == ()


def test_a_source_that_changes_meanwhile_is_never_finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = written("fp8", tmp_path / "source")
    real = staging.Staging.write

    def write(self: staging.Staging, name: str, pieces: Any) -> None:
        real(self, name, pieces)
        if name.endswith("embed.weight/0.0"):
            os.utime(source / "model.safetensors")

    monkeypatch.setattr(staging.Staging, "write", write)
    with pytest.raises(CheckpointError, match="changed while it was converted"):
        convert(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_export_of_another_state_of_a_directory_is_not_taken_for_done(tmp_path: Path) -> None:
    source = written("fp8", tmp_path / "source")
    convert(source, tmp_path / "out")
    export(tmp_path / "out", tmp_path / "back")
    export(tmp_path / "out", tmp_path / "back")  # done already
    os.utime(tmp_path / "out/params/norm.weight/0")
    with pytest.raises(FileExistsError, match="was not made by this command from this source"):
        export(tmp_path / "out", tmp_path / "back")


def test_two_at_once_are_refused(tmp_path: Path) -> None:
    source = written("fp8", tmp_path / "source")
    first, second = (staging.Staging(tmp_path / "out", {"x": 1}) for _ in range(2))
    with first.open(), pytest.raises(CheckpointError, match="another process is writing"), second.open():
        pass
    shutil.rmtree(tmp_path / "out.partial")
    convert(source, tmp_path / "out")


# ---- damaged conversions ----


@pytest.mark.parametrize("leaf", ["layers.ffn.experts.w2.scale", "layers.attn.wkv.scale"])
def test_nan_scale_in_a_conversion_is_told_by_the_name_of_its_tensor(leaf: str, tmp_path: Path) -> None:
    source = written("fp8", tmp_path / "source")
    convert(source, tmp_path / "out")
    stored = json.loads((tmp_path / "out/params" / leaf / ".zarray").read_text())
    (file,) = (p for p in (tmp_path / "out/params" / leaf).iterdir() if p.name[0] != ".")
    values = np.fromfile(file, np.uint8).reshape(stored["shape"])
    index = (2, 1, 5, 0) if "experts" in leaf else (2, 0, 1)
    values[index] = 255
    values.tofile(file)
    name = "layers.2.ffn.experts.1.w2.scale" if "experts" in leaf else "layers.2.attn.wkv.scale"
    told = rf"{name} holds byte 255 at \[{index[-2]}, {index[-1]}\].*convert again"
    with pytest.raises(CheckpointError, match=told):
        load_checkpoint(tmp_path / "out")
    with pytest.raises(CheckpointError, match=told):
        load_checkpoint(tmp_path / "out", weights="float32")


def lose(out: Path) -> None:
    sorted((out / "params/layers.ffn.experts.w1.weight").iterdir())[-1].unlink()


def cut(out: Path) -> None:
    path = sorted((out / "params/layers.ffn.experts.w1.weight").iterdir())[-1]
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - 1)


def unmark(out: Path) -> None:
    (out / "csa2.json").unlink()


def age(out: Path) -> None:
    (out / "csa2.json").write_text((out / "csa2.json").read_text().replace('"version": 1', '"version": 99'))


def other_config(out: Path) -> None:
    config = json.loads((out / "config.json").read_text())
    config["text_config"]["moe_intermediate_size"] *= 2
    (out / "config.json").write_text(json.dumps(config))


def no_array(out: Path) -> None:
    shutil.rmtree(out / "params/layers.attn.wkv.weight")


def no_metadata(out: Path) -> None:
    (out / "params/_METADATA").unlink()


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lose, r"layers\.ffn\.experts\.w1\.weight cannot be read"),
        (cut, r"layers\.ffn\.experts\.w1\.weight cannot be read"),
        (unmark, r"no csa2\.json: it is no finished conversion"),
        (age, r"'version': 99.*this version reads"),
        (other_config, r"config\.json describes .*do not belong together"),
        (no_array, r"parameter layers\.attn\.wkv\.weight .* cannot be opened"),
        (no_metadata, r"_METADATA is no description of an Orbax checkpoint"),
    ],
)
def test_damaged_conversions_are_refused_by_name(damage: Callable[[Path], None], words: str, tmp_path: Path) -> None:
    source = written("fp8", tmp_path / "source")
    convert(source, tmp_path / "out", piece_bytes=SMALL_PIECES)
    damage(tmp_path / "out")
    for use in (load_checkpoint, lambda d: export(d, tmp_path / "back"), lambda d: verify(source, d)):
        with pytest.raises(CheckpointError, match=words):
            use(tmp_path / "out")
    assert not (tmp_path / "back").exists()


# ---- verify and the commands ----


def test_verify_says_what_differs_and_by_how_much(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config, tensors = make("fp8")
    source = rc.write_checkpoint(tmp_path / "a", config, tensors)
    changed = dict(tensors)
    changed["embed.weight"] = tensors["embed.weight"].copy()
    changed["embed.weight"][3, 5] = 100
    changed[EXPERT] = tensors[EXPERT].copy()
    changed[EXPERT][2, 1] ^= 1
    config["text_config"]["rope_theta"] = 12345.0
    other = rc.write_checkpoint(tmp_path / "b", config, changed)
    assert main(["verify", str(source), str(other), "--digests", str(tmp_path / "digests.json")]) == 1
    said = capsys.readouterr().out
    assert "embed.weight 1 elements differ, by " in said
    assert "first at [3, 5]" in said
    assert f"{EXPERT} 1 elements differ, first at [2, 1]" in said
    assert "config.json rope_theta is 10000.0 and 12345.0" in said
    assert said.count("elements differ") == 2
    assert len(json.loads((tmp_path / "digests.json").read_text())) == len(tensors)
    assert main(["verify", str(source), str(source)]) == 0
    assert "hold the same" in capsys.readouterr().out


def test_verify_compares_values_with_a_dequantised_side(tmp_path: Path) -> None:
    config, tensors = make("fp8")
    source = rc.write_checkpoint(tmp_path / "a", config, tensors)
    convert(source, tmp_path / "wide", weights="float32")
    tensors[W] = tensors[W].copy()
    tensors[W].view(np.uint8)[1, 1] ^= 0x80  # one sign
    other = rc.write_checkpoint(tmp_path / "b", config, tensors)
    (difference,) = verify(other, tmp_path / "wide").differences
    assert difference.name == W
    assert difference.largest > 0


def test_nan_is_nan_on_both_sides_and_digests_are_of_what_is_stored(tmp_path: Path) -> None:
    config, tensors = make("fp8")
    tensors[W] = tensors[W].copy()
    tensors[W].view(np.uint8)[1, 1] = 0x7F  # NaN
    source = rc.write_checkpoint(tmp_path / "a", config, tensors)
    convert(source, tmp_path / "wide", weights="float32")
    found = verify(source, tmp_path / "wide", digests=True)
    assert found.differences == ()
    assert found.digests[W] == hashlib.blake2b(tensors[W].tobytes(), digest_size=16).hexdigest()
    assert len(found.digests) == found.tensors


def test_commands_convert_export_and_tell(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = written("fp8", tmp_path / "source")
    assert main(["convert", str(source), str(tmp_path / "out"), "--mesh", "model=2"]) == 0
    assert main(["convert", str(source), str(tmp_path / "out"), "--mesh", "model=2"]) == 0
    assert main(["export", str(tmp_path / "out"), str(tmp_path / "back")]) == 0
    assert main(["inspect", str(tmp_path / "out")]) == 0
    said = capsys.readouterr().out
    assert "of them there already" in said
    assert "in 1 file" in said
    plan = tmp_path / "plan.json"
    assert (
        main(["convert", "--plan", str(source / "config.json"), "--mesh", "data=2,model=4", "--json", str(plan)]) == 0
    )
    assert len(json.loads(plan.read_text())) == sum(1 for _ in rc.read_checkpoint(source)[1])
    assert "fits into 80 GB" in capsys.readouterr().out
    for wrong, words in (
        (["convert", str(source)], "name SRC and DST"),
        (["convert", "--plan", str(source / "config.json"), "--mesh", "model"], "axis=size"),
        (["convert", "--plan", str(source / "config.json"), "--mesh", "rows=2"], "no rule speaks of axis 'rows'"),
        (["convert", str(source), str(tmp_path / "x"), "--json", "y"], "belongs to --plan"),
        (["export", str(tmp_path / "out"), str(tmp_path / "y"), "--shard-gb", "0"], "must be more than 0"),
        (["export", str(source), str(tmp_path / "y")], "csa2.json"),
    ):
        assert main(wrong) == 2
        assert words in capsys.readouterr().err
