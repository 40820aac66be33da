"""The reader against damaged files: each damage refused from headers alone, by a message that names what to do."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from csa2_jax.safetensors_io import DTYPES, INDEX_FILE, SINGLE_FILE, CheckpointError, TensorFiles


def write(path: Path, header: dict[str, Any] | str | bytes, data: bytes = b"", length: int | None = None) -> Path:
    """A file with exactly this header and data; `length` lies about the header's length."""
    raw = json.dumps(header).encode() if isinstance(header, dict) else header
    raw = raw.encode() if isinstance(raw, str) else raw
    path.write_bytes((len(raw) if length is None else length).to_bytes(8, "little") + raw + data)
    return path


def entry(begin: int, end: int, dtype: str = "I8", shape: list[int] | None = None) -> dict[str, Any]:
    return {"dtype": dtype, "shape": [end - begin] if shape is None else shape, "data_offsets": [begin, end]}


def shards(directory: Path, weight_map: dict[str, str], files: dict[str, list[str]]) -> Path:
    """Shards of one-byte tensors and an index."""
    for file, names in files.items():
        write(directory / file, {name: entry(i, i + 1) for i, name in enumerate(names)}, bytes(len(names)))
    (directory / INDEX_FILE).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map}))
    return directory


@pytest.mark.smoke
@pytest.mark.parametrize("dtype", sorted(DTYPES))
def test_reader_gives_every_dtype_bit_for_bit(tmp_path: Path, dtype: str) -> None:
    bits = np.arange(256, dtype=np.uint8)
    if dtype == "BOOL":
        bits = bits & 1
    size = DTYPES[dtype].itemsize
    write(tmp_path / SINGLE_FILE, {"t": entry(0, 256, dtype, [4, 64 // size])}, bits.tobytes())
    found = TensorFiles(tmp_path).read("t")
    assert (found.dtype, found.shape) == (DTYPES[dtype], (4, 64 // size))
    assert found.tobytes() == bits.tobytes()
    assert not found.flags.writeable


def test_reader_decodes_bf16_and_e4m3_values(tmp_path: Path) -> None:
    bf16 = np.asarray([1.0, -2.5, 3e38], ml_dtypes.bfloat16)
    fp8 = np.asarray([0.5, -448, 2.0**-9], ml_dtypes.float8_e4m3fn)
    header = {"a": entry(0, 6, "BF16", [3]), "b": entry(6, 9, "F8_E4M3", [3]), "__metadata__": {"format": "pt"}}
    write(tmp_path / SINGLE_FILE, header, bf16.tobytes() + fp8.tobytes())
    files = TensorFiles(tmp_path)
    assert list(files) == ["a", "b"]
    assert files.nbytes == 9
    np.testing.assert_array_equal(files.read("a").astype(np.float32), bf16.astype(np.float32))
    np.testing.assert_array_equal(files.read("b").astype(np.float32), np.asarray([0.5, -448, 2.0**-9], np.float32))


def test_reader_needs_no_torch() -> None:
    code = (
        "import sys, csa2_jax.safetensors_io, csa2_jax.accounting; print('torch' in sys.modules, 'jax' in sys.modules)"
    )
    root = Path(__file__).resolve().parent.parent
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=root)
    assert found.stdout.split() == ["False", "False"]


def test_reader_accepts_an_unaligned_header_and_empty_tensors(tmp_path: Path) -> None:
    values = np.asarray([1.0, 2.0], np.float32)
    header = json.dumps({"e": entry(0, 0, "F32", [0, 4]), "t": entry(0, 8, "F32", [2])})
    header += " " * ((1 - len(header)) % 8)  # the data block begins at an odd byte
    write(tmp_path / SINGLE_FILE, header, values.tobytes())
    files = TensorFiles(tmp_path)
    np.testing.assert_array_equal(files.read("t"), values)
    assert files.read("e").shape == (0, 4)


GOOD = {"a": entry(0, 4), "b": entry(4, 8)}
SPLIT = {"a": "1.st", "b": "2.st"}


@pytest.mark.parametrize(
    ("content", "words"),
    [
        pytest.param((b"", b"", None), ["0 bytes", "truncated"], id="empty"),
        pytest.param((GOOD, b"1234567", None), ["b ends at byte", "truncated"], id="data_cut"),
        pytest.param((GOOD, b"123456789", None), ["1 bytes behind b", "no tensor"], id="data_left_over"),
        pytest.param((GOOD, b"", 10_000), ["header of 10000 bytes", "truncated"], id="header_cut"),
        pytest.param((GOOD, b"", 2**40), [f"header of {2**40} bytes", "100000000"], id="header_too_long"),
        pytest.param(({"a": entry(0, 4), "b": entry(3, 7)}, b"1234567", None), ["b begins", "inside a"], id="overlap"),
        pytest.param(({"a": entry(0, 4), "b": entry(5, 8)}, b"12345678", None), ["1 bytes between a and b"], id="hole"),
        pytest.param(({"a": entry(1, 4)}, b"1234", None), ["between the header and a"], id="hole_first"),
        pytest.param(({"a": entry(4, 0, shape=[4])}, b"1234", None), ["data_offsets [4, 0]"], id="backwards"),
        pytest.param(({"a": {**entry(0, 4), "data_offsets": [-4, 0]}}, b"1234", None), ["[-4, 0]"], id="negative"),
        pytest.param(
            ({"a": {**entry(0, 4), "data_offsets": [0, 4.0]}}, b"1234", None), ["[0, 4.0]"], id="float_offset"
        ),
        pytest.param(({"a": entry(0, 4, shape=[5])}, b"1234", None), ["a is I8 [5], 5 bytes", "[0, 4]"], id="size"),
        pytest.param(({"a": entry(0, 4, shape=[-4])}, b"1234", None), ["shape [-4]"], id="negative_shape"),
        pytest.param(({"a": entry(0, 4, "F4")}, b"1234", None), ["a has dtype 'F4'", "F8_E4M3"], id="unknown_dtype"),
        pytest.param(({"a": {"dtype": "I8"}}, b"", None), ["header of a", "shape"], id="entry_lacks"),
        pytest.param(({"a": 3}, b"", None), ["header of a", "3"], id="entry_no_object"),
        pytest.param(("[1]", b"", None), ["JSON object", "list"], id="no_object"),
        pytest.param(("{", b"", None), ["not valid JSON"], id="no_json"),
        pytest.param((b"\xff\xfe", b"", None), ["not valid JSON"], id="no_text"),
        pytest.param(
            (f'{{"a": {json.dumps(entry(0, 4))}, "a": {json.dumps(entry(4, 8))}}}', b"12345678", None),
            ["lists a twice"],
            id="twice_in_a_file",
        ),
    ],
)
def test_reader_refuses_a_damaged_file(
    tmp_path: Path, content: tuple[dict[str, Any] | str | bytes, bytes, int | None], words: list[str]
) -> None:
    header, data, length = content
    path = tmp_path / SINGLE_FILE
    if header == b"":
        path.write_bytes(b"")
    else:
        write(path, header, data, length)
    with pytest.raises(CheckpointError) as error:
        TensorFiles(tmp_path)
    for word in [*words, SINGLE_FILE]:
        assert word in str(error.value)


def test_reader_walks_shards_in_any_order(tmp_path: Path) -> None:
    files = TensorFiles(
        shards(tmp_path, {"b": "2.safetensors", "a": "1.safetensors"}, {"1.safetensors": ["a"], "2.safetensors": ["b"]})
    )
    assert sorted(files) == ["a", "b"]
    assert {f.name for f in files.files} == {"1.safetensors", "2.safetensors"}
    assert files["a"].file.name == "1.safetensors"


@pytest.mark.parametrize(
    ("weight_map", "files", "words"),
    [
        pytest.param(SPLIT, {"1.st": ["a"]}, ["2.st", "b", "does not exist"], id="shard_missing"),
        pytest.param({"a": "1.st", "b": "1.st"}, {"1.st": ["a"]}, ["promises b in 1.st"], id="tensor_missing"),
        pytest.param({"a": "1.st"}, {"1.st": ["a", "b"]}, ["holds b", "does not list"], id="tensor_unlisted"),
        pytest.param(SPLIT, {"1.st": ["a", "b"], "2.st": ["b"]}, ["b is in two shards", "1.st", "2.st"], id="twice"),
        pytest.param(SPLIT, {"1.st": ["b"], "2.st": ["a"]}, ["promises a in 1.st", "it is in 2.st"], id="swapped"),
        pytest.param({"a": "../1.st"}, {}, ["'../1.st'", "leaves the model directory"], id="parent"),
        pytest.param({"a": "x/../../1.st"}, {}, ["leaves the model directory"], id="parent_inside"),
        pytest.param({"a": "/etc/passwd"}, {}, ["'/etc/passwd'", "leaves the model directory"], id="absolute"),
        pytest.param({"a": "C:\\\\1.st"}, {}, ["leaves the model directory"], id="drive"),
        pytest.param({"a": "..\\\\1.st"}, {}, ["leaves the model directory"], id="backslash"),
        pytest.param({"a": ""}, {}, ["leaves the model directory"], id="nothing"),
        pytest.param({"a": 3}, {}, ["shard 3"], id="number"),
        pytest.param({}, {}, ["weight_map"], id="empty_map"),
    ],
)
def test_reader_refuses_a_damaged_index(
    tmp_path: Path, weight_map: dict[str, Any], files: dict[str, list[str]], words: list[str]
) -> None:
    with pytest.raises(CheckpointError) as error:
        TensorFiles(shards(tmp_path, weight_map, files))
    for word in words:
        assert word in str(error.value)


def test_reader_refuses_a_name_twice_in_the_index(tmp_path: Path) -> None:
    shards(tmp_path, {}, {"1.st": ["a"]})
    (tmp_path / INDEX_FILE).write_text('{"weight_map": {"a": "1.st", "a": "1.st"}}')
    with pytest.raises(CheckpointError, match="lists a twice"):
        TensorFiles(tmp_path)


def test_reader_follows_a_link_to_a_shard(tmp_path: Path) -> None:
    blobs, model = tmp_path / "blobs", tmp_path / "model"
    blobs.mkdir()
    model.mkdir()
    write(blobs / "0af3", {"a": entry(0, 1)}, b"1")
    (model / "1.st").symlink_to(blobs / "0af3")
    assert list(TensorFiles(shards(model, {"a": "1.st"}, {}))) == ["a"]


def test_reader_says_what_is_absent_or_ambiguous(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="not a directory"):
        TensorFiles(tmp_path / "nothing")
    with pytest.raises(FileNotFoundError, match="holds neither"):
        TensorFiles(tmp_path)
    shards(tmp_path, {"a": "1.st"}, {"1.st": ["a"]})
    write(tmp_path / SINGLE_FILE, {"a": entry(0, 1)}, b"1")
    with pytest.raises(CheckpointError, match="holds both"):
        TensorFiles(tmp_path)


def test_reader_notices_a_file_that_shrank_after_it_was_opened(tmp_path: Path) -> None:
    write(tmp_path / SINGLE_FILE, GOOD, b"12345678")
    files = TensorFiles(tmp_path)
    write(tmp_path / SINGLE_FILE, GOOD, b"1234")
    with pytest.raises(CheckpointError, match="shrank"):
        files.read("b")
