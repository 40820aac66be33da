"""The TPU kernels of index selection, interpreted: small tiles, so that a test's sizes are several of them."""

from __future__ import annotations

import pytest

from kernels_pallas.index_select import pallas_tpu, tpu_gather
from kernels_pallas.index_select.tpu_dense import Tiles
from tests.kernels.index_select_suite import IndexSelectSuite


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three chunks of 128 keys in 300; candidates are gathered where they are less than half of the pool."""
    monkeypatch.setattr(pallas_tpu, "_ONE_QUERY", Tiles(1, 1024, 256))
    monkeypatch.setattr(pallas_tpu, "_EIGHT_QUERIES", Tiles(8, 128, 128))
    monkeypatch.setattr(pallas_tpu, "_GATHER_MANY", 2)
    monkeypatch.setattr(tpu_gather, "_UNROLL", 1)


class TestIndexSelectTpu(IndexSelectSuite):
    implementation = "pallas_tpu"
    interpret = True
