"""Regions read from the files themselves are those that TensorStore reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorstore as ts
from hypothesis import given, settings
from hypothesis import strategies as st

from csa2_jax.conversion.pieces import Pieces

SHAPE, PIECE = (3, 5, 8, 6), (1, 2, 4, 6)


def written(folder: Path, piece: tuple[int, ...] = PIECE, **metadata: Any) -> tuple[ts.TensorStore, np.ndarray]:
    values = np.arange(np.prod(SHAPE), dtype=np.int16).reshape(SHAPE)
    spec = {
        "driver": "zarr",
        "kvstore": {"driver": "file", "path": f"{folder}/"},
        "metadata": {"shape": SHAPE, "chunks": piece, "dtype": "<i2", "compressor": None} | metadata,
    }
    array = ts.open(spec, create=True).result()
    array.write(values).result()
    return array, values


def indices() -> st.SearchStrategy[Any]:
    def one(n: int) -> st.SearchStrategy[Any]:
        spans = st.tuples(st.integers(0, n - 1), st.integers(1, n)).filter(lambda ab: ab[0] < ab[1])
        return st.integers(0, n - 1) | spans.map(lambda ab: slice(*ab)) | st.just(slice(None))

    return st.integers(0, 4).flatmap(lambda k: st.tuples(*(one(n) for n in SHAPE[:k])))


def test_any_region_is_read_right_or_left_to_tensorstore(tmp_path: Path) -> None:
    array, values = written(tmp_path)
    pieces = Pieces(tmp_path, array)
    read = 0

    @settings(max_examples=300, deadline=None, derandomize=True, database=None)
    @given(index=indices())
    def check(index: Any) -> None:
        nonlocal read
        found = pieces.read(index)
        if found is not None:
            read += 1
            assert found.dtype == values.dtype
            np.testing.assert_array_equal(found, values[index])

    check()
    assert read > 100
    for index in ((1,), (2, 3), (0, slice(1, 5)), (1, 2, slice(3, 7)), (1, 2, 3)):
        assert pieces.read(index) is not None
    assert pieces.read((0, 0, slice(0, 2), slice(1, 3))) is None  # two runs of bytes
    assert pieces.read((0, slice(0, 4, 2))) is None


@pytest.mark.parametrize("metadata", [{"compressor": {"id": "zlib", "level": 1}}, {"order": "F"}])
def test_what_is_stored_otherwise_is_left_to_tensorstore(tmp_path: Path, metadata: dict[str, Any]) -> None:
    array, _ = written(tmp_path, **metadata)
    assert Pieces(tmp_path, array).read((0, 0)) is None


def test_a_piece_that_is_cut_off_or_gone_is_an_error(tmp_path: Path) -> None:
    array, _ = written(tmp_path)
    pieces, victim = Pieces(tmp_path, array), tmp_path / "1.0.0.0"
    victim.write_bytes(victim.read_bytes()[:-1])
    with pytest.raises(OSError, match=r"1\.0\.0\.0 is not whole"):
        pieces.read((1, 0, 0))
    victim.unlink()
    with pytest.raises(FileNotFoundError):
        pieces.read((1, 0, 0))
