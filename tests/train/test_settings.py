"""Settings of a run: what is wrong is said by name before anything starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from train.parameters import RECIPES
from train.settings import SettingsError, read_settings

CONFIGS = Path(__file__).parents[2] / "configs"
GOOD = '[model]\nconfig = "m.json"\n[data]\ntrain = ["x"]\n[run]\nout = "o"\n'


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("train_*.toml")), ids=lambda p: p.name)
def test_shipped_settings_are_good_and_say_their_command(path: Path) -> None:
    settings = read_settings(path)
    model = settings.path(settings.model.config or settings.model.checkpoint)
    assert model.exists() or (
        CONFIGS.parent / "build" in model.parents and "python -m train.corpus" in path.read_text()
    )
    assert f"python -m train --config configs/{path.name}" in path.read_text()


def test_changes_on_the_command_line_count(tmp_path: Path) -> None:
    path = tmp_path / "s.toml"
    path.write_text(GOOD)
    settings = read_settings(
        path, ["data.rows=4", "optimizer.peak=1e-3", "model.compute_dtype=float32", "loss.draft={weight = 1}"]
    )
    assert (settings.data.rows, settings.optimizer.peak, settings.model.compute_dtype) == (4, 1e-3, "float32")
    assert settings.loss.draft.weight == 1.0
    assert settings.path("a") == (tmp_path / "a").resolve()
    assert settings.choice() == RECIPES["everything"]
    assert read_settings(path, ["lora.rank=4"]).choice() == RECIPES["adapters"]
    assert read_settings(path, ["run.recipe=indexer only", 'run.freeze=["*.wk.*"]']).choice().freeze == ("*.wk.*",)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("data.row=4", r"'row' is no field of \[data\]; did you mean 'rows'\?"),
        ("dat.rows=4", r"'dat' is no table; did you mean 'data'\?"),
        ("data.rows=four", r"data.rows='four' must be a whole number"),
        ("data.rows=0", r"\[data\] data.rows=0 must be at least 1"),
        ("data.train=[]", r"data.train is empty"),
        ("model.compute_dtype=float16", r"model.compute_dtype='float16' must be one of 'float32', 'bfloat16'"),
        ("model.checkpoint=x", r"give either model.config .* or model.checkpoint"),
        ("run.recipe=some", r"run.recipe='some' is unknown"),
        ("loss.index_domain=all", r"domain='all' must be one of"),
        ("loss.draft={weigth = 1}", r"'weigth' is no field of \[loss.draft\]; did you mean 'weight'"),
        ("optimizer.end=1", r"end=1.0 must lie between 0 and peak"),
        ("rows", r"'rows' is no change of a setting: say it as section.field=value"),
        ("run.out=", r"run.out is missing"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, change: str, message: str) -> None:
    path = tmp_path / "s.toml"
    path.write_text(GOOD)
    with pytest.raises(SettingsError, match=message):
        read_settings(path, [change])


def test_a_file_that_is_no_settings_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        SettingsError, match=r"none.toml does not exist: give a configuration such as configs/train_tiny.toml"
    ):
        read_settings(tmp_path / "none.toml")
    (tmp_path / "s.toml").write_text("[model")
    with pytest.raises(SettingsError, match="is not TOML"):
        read_settings(tmp_path / "s.toml")
    (tmp_path / "s.toml").write_text("model = 3\n")
    with pytest.raises(SettingsError, match=r"model=3 must be a table, \[model\]"):
        read_settings(tmp_path / "s.toml")
