"""Where the command line keeps compiled programs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import jax
import pytest

from csa2_jax.cli.programs import keep_programs


@pytest.fixture
def folder() -> Iterator[None]:
    before = jax.config.jax_compilation_cache_dir
    yield
    jax.config.update("jax_compilation_cache_dir", before)


@pytest.mark.usefixtures("folder")
def test_programs_are_kept_in_the_cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    keep_programs()
    assert jax.config.jax_compilation_cache_dir == str(tmp_path / "cache" / "csa2-jax")
    assert (tmp_path / "cache" / "csa2-jax").is_dir()


@pytest.mark.usefixtures("folder")
def test_a_place_that_is_set_or_cannot_be_written_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = jax.config.jax_compilation_cache_dir
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path / "mine"))
    keep_programs()
    assert not (tmp_path / "cache").exists()
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR")
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    keep_programs()
    assert jax.config.jax_compilation_cache_dir == before
