"""Which implementation runs: by name, by backend, and only where it has been proven."""

from __future__ import annotations

import json
import logging
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import pytest

from kernels_pallas import Unsupported, dispatch


def module(name: str, refusal: str | None = None) -> Any:
    def check(*args: Any, interpret: Any, **static: Any) -> None:
        if refusal:
            raise Unsupported(refusal)

    return types.SimpleNamespace(name=name, check=check)


@pytest.fixture
def on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Any]:
    """Pretend to be on a device, with or without a record of it."""

    def pretend(backend: str, kind: str, proven: bool) -> None:
        monkeypatch.setattr(jax, "default_backend", lambda: backend)
        monkeypatch.setattr(jax, "devices", lambda: [types.SimpleNamespace(device_kind=kind)])
        monkeypatch.setattr(dispatch, "TUNED", tmp_path)
        if proven:
            (tmp_path / "device.json").write_text(json.dumps({"device_kind": kind}))
        dispatch.records.cache_clear()
        dispatch._say_unproven.cache_clear()

    yield pretend
    dispatch.records.cache_clear()
    dispatch._say_unproven.cache_clear()


def test_a_cpu_takes_xla() -> None:
    assert dispatch.preferred() == ("xla",)


@pytest.mark.parametrize(("backend", "kernels"), [("tpu", "pallas_tpu"), ("gpu", "pallas_gpu")])
def test_kernels_come_first_where_a_record_proves_them(on: Any, backend: str, kernels: str) -> None:
    on(backend, "some chip", True)
    assert dispatch.preferred() == (kernels, "xla")
    choices = {"xla": module("xla"), kernels: module("kernel")}
    assert dispatch.choose("door", None, False, choices).name == "kernel"  # type: ignore[attr-defined]


def test_an_unproven_device_takes_xla_and_says_so_once(on: Any, caplog: pytest.LogCaptureFixture) -> None:
    on("gpu", "new chip", False)
    with caplog.at_level(logging.WARNING):
        assert [dispatch.preferred(), dispatch.preferred()] == [("xla",)] * 2
    (message,) = [r.getMessage() for r in caplog.records]
    assert "new chip" in message
    assert "implementation='pallas_gpu'" in message
    assert "--record" in message


def test_a_refusal_is_logged_and_the_next_one_taken(on: Any, caplog: pytest.LogCaptureFixture) -> None:
    on("tpu", "chip", True)
    choices = {"xla": module("xla"), "pallas_tpu": module("kernel", "width=60 is odd")}
    with caplog.at_level(logging.INFO):
        assert dispatch.choose("door", None, False, choices).name == "xla"  # type: ignore[attr-defined]
    assert "door: pallas_tpu refused: width=60 is odd" in caplog.text


def test_a_named_one_works_or_raises() -> None:
    choices = {"xla": module("xla"), "pallas_tpu": module("kernel", "width=60 is odd")}
    with pytest.raises(Unsupported, match="width=60"):
        dispatch.choose("door", "pallas_tpu", True, choices)
    with pytest.raises(Unsupported, match=r"'pallas_moon'.*'pallas_tpu', 'xla'"):
        dispatch.choose("door", "pallas_moon", False, choices)


def test_a_kernel_named_where_nothing_runs_it_says_what_does() -> None:
    choices = {"xla": module("xla"), "pallas_tpu": module("kernel")}
    with pytest.raises(Unsupported, match=r"'pallas_tpu'.*'cpu': interpret=True emulates"):
        dispatch.choose("door", "pallas_tpu", False, choices)


def test_constants_of_a_record_replace_the_defaults(on: Any, tmp_path: Path) -> None:
    on("gpu", "chip", True)
    assert dispatch.tuned("compress", "warps", 4) == 4
    (tmp_path / "device.json").write_text(json.dumps({"device_kind": "chip", "compress": {"constants": {"warps": 8}}}))
    dispatch.records.cache_clear()
    assert dispatch.tuned("compress", "warps", 4) == 8
    assert dispatch.tuned("index_select", "warps", 4) == 4


def test_all_refusals_are_told_together(on: Any) -> None:
    on("gpu", "chip", True)
    choices = {"xla": module("xla", "no xla"), "pallas_gpu": module("kernel", "no gpu")}
    with pytest.raises(ExceptionGroup, match="no implementation of door") as all_of_them:
        dispatch.choose("door", None, False, choices)
    assert [str(e) for e in all_of_them.value.exceptions] == ["no gpu", "no xla"]


@pytest.mark.parametrize("implementation", [None, "xla"])
def test_interpreting_needs_a_kernel_by_name(implementation: str | None) -> None:
    with pytest.raises(ValueError, match="needs a Pallas implementation"):
        dispatch.choose("door", implementation, True, {"xla": module("xla")})
