"""The command line: help that starts fast, errors in one line, and what `csa2 inspect` says about a model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from csa2_jax import cli
from csa2_jax.cli import inspect
from csa2_jax.config import ModelConfig
from csa2_jax.safetensors_io import CheckpointError
from tests import golden_sets
from tests import random_checkpoint as rc

ROOT = Path(__file__).resolve().parent.parent
FLASH = ROOT / "configs" / "v41_flash.json"


def csa2(*args: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own, as a user runs it."""
    code = "import sys; from csa2_jax.cli import main; sys.exit(main())"
    env = {**os.environ, "COLUMNS": "80", "PYTHONPATH": str(ROOT), **environment}
    return subprocess.run([sys.executable, "-c", code, *args], capture_output=True, text=True, env=env, cwd=ROOT)


# ---- the dispatcher ----


def test_help_lists_every_command_and_imports_nothing_heavy(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--help"]) == 0
    out = capsys.readouterr().out
    assert all(f"\n  {name}" in out for name in cli.COMMANDS)
    code = "import sys; from csa2_jax.cli import main; main(['--help']); print({'jax', 'tyro', 'numpy'} & set(sys.modules))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert found.stdout.splitlines()[-1] == "set()"


def test_no_command_shows_the_help_and_fails(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 2
    assert "usage: csa2 COMMAND" in capsys.readouterr().out


def test_inspect_help_imports_no_jax(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(["inspect", "--help"])
    assert stop.value.code == 0
    assert "--png FILE" in capsys.readouterr().out
    code = "import sys; import csa2_jax.cli.inspect; print({'jax', 'matplotlib'} & set(sys.modules))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert found.stdout.strip() == "set()"


@pytest.mark.parametrize(
    ("args", "words"),
    [
        pytest.param(["inspcet"], ["csa2: error", "'inspcet'", "did you mean inspect?"], id="misspelt_command"),
        pytest.param(["inspect"], ["csa2 inspect: error", "--config FILE"], id="nothing_named"),
        pytest.param(["inspect", "nowhere"], ["csa2 inspect: error", "nowhere", "config.json"], id="no_directory"),
        pytest.param(["inspect", "--config", "README.md"], ["README.md", "not valid JSON"], id="no_json"),
        pytest.param(["inspect", "--config", str(FLASH), "--png", "plan.pdf"], ["plan.pdf", "PNG"], id="no_png"),
        pytest.param(["inspect", "--config", str(FLASH), "--png", "no/where.png"], ["no/where.png"], id="no_folder"),
    ],
)
def test_errors_are_one_line_on_stderr_with_exit_code_2(
    args: list[str], words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(args) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert len(captured.err.splitlines()) == 1
    for word in words:
        assert word in captured.err


def test_interrupt_exits_130_without_a_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(_: list[str]) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "_dispatch", interrupted)
    assert cli.main(["inspect"]) == 130
    assert "Traceback" not in capsys.readouterr().err


def test_traceback_is_there_for_who_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CSA2_TRACEBACK", "1")
    with pytest.raises(ValueError, match="not a command"):
        cli.main(["nothing"])


def test_reader_that_leaves_early_is_no_error() -> None:
    code = "import sys; from csa2_jax.cli import main; sys.exit(main())"
    command = f"'{sys.executable}' -c '{code}' inspect --config '{FLASH}' --json | head -1; exit ${{PIPESTATUS[0]}}"
    found = subprocess.run(["bash", "-c", command], capture_output=True, text=True, cwd=ROOT)
    assert found.stdout == "{\n"
    assert found.stderr == ""


# ---- inspect ----


@pytest.mark.smoke
def test_inspect_of_the_released_config_prints_the_exact_totals() -> None:
    found = csa2("inspect", "--config", str(FLASH))
    assert (found.returncode, found.stderr) == (0, "")
    for words in (
        "96,085 tensors, 510,286,023,000 bytes",
        "890.0 bytes per token",
        "windows 2.70 MB per sequence",
        "encoder 0-19, decoder 20-39",
        "2 x SWA, 3 x (FULL m=2 + 5 REUSE), 1 x (FULL m=1 + 3 REUSE), 4 x (REINDEX m=1 + 3 REUSE)",
        "routed experts",
        "vision.* (259), aligner.* (4), image_* (3)",
    ):
        assert words in found.stdout
    table = found.stdout[: found.stdout.index("encoder 0-19")].splitlines()
    assert max(map(len, table)) <= 80
    rows = {line.split()[0]: line.split() for line in table[1:] if line.split() and line.split()[0].isdigit()}
    assert len(rows) == 40
    assert rows["2"] == ["2", "FULL", "2", "pool,", "selection", "own", "own"]
    assert rows["14"] == ["14", "FULL", "2", "pool,", "selection", "own", "own", "yes"]
    assert rows["24"] == ["24", "REINDEX", "1", "selection", "20", "own", "20"]
    assert rows["25"] == ["25", "REUSE", "1", "20", "24"]
    assert rows["39"] == ["39", "REUSE", "1", "20", "36", "yes"]


def test_inspect_json_is_complete(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["inspect", "--config", str(FLASH), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["totals"]["tensors"] == 96_085
    assert report["totals"]["bytes"] == 510_286_023_000
    assert report["cache"] == {
        "bytes_per_token": 890.0,
        "window_bytes_per_sequence": 2_703_360,
        "draft_window_bytes_per_sequence": 528 * 128 * 3,
        "measured": {
            "bytes_per_token": 890.0,
            "bytes_per_sequence": 528 * 128 * 43 + 3 * 2 * 512 * 4 + 5 * 4,  # windows, three open groups, small rows
            "draft_window_bytes_per_sequence": 528 * 128 * 3,
        },
    }
    assert [p["bytes_per_token"] for p in report["pools"]] == [178, 178, 178, 356]
    assert report["pools"][3]["readers"] == list(range(21, 40))
    assert sum(p["parameters"] for p in report["parts"]) == report["totals"]["parameters"]
    assert [layer["mode"] for layer in report["layers"]].count("REUSE") == 30
    assert "files" not in report


@pytest.mark.parametrize("name", ["tiny8_fp8", "tiny8_vl_f32_noqat"])
def test_inspect_of_a_directory_accounts_for_its_files(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    directory = golden_sets.materialise(name)
    assert cli.main(["inspect", str(directory), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["files"]["tensors"] == report["totals"]["tensors"]
    assert report["files"]["bytes"] == report["totals"]["bytes"]
    assert report["files"]["unbuilt"] == report["unbuilt"]
    assert cli.main(["inspect", str(directory)]) == 0
    assert "1 file on disk: every tensor there" in capsys.readouterr().out


def test_inspect_refuses_a_directory_that_does_not_match(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = rc.random_config(0)
    tensors = rc.random_tensors(config, 0)
    tensors["norm.weight"] = np.concatenate([tensors["norm.weight"]] * 2)
    rc.write_checkpoint(tmp_path, config, tensors)
    assert cli.main(["inspect", str(tmp_path)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("csa2 inspect: error:")
    assert "norm.weight" in captured.err
    with pytest.raises(CheckpointError, match=r"norm\.weight"):
        inspect.main(tmp_path)


@pytest.mark.parametrize("name", ["v41_flash", "v41_tiny"])
def test_inspect_draws_the_plan(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "plan.png"
    assert cli.main(["inspect", "--config", str(ROOT / "configs" / f"{name}.json"), "--png", str(path)]) == 0
    assert capsys.readouterr().out.rstrip().endswith(f"picture: {path}")
    raw = path.read_bytes()
    assert raw[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = (int.from_bytes(raw[i : i + 4], "big") for i in (16, 20))
    assert width > 1500
    assert height > 900


@pytest.mark.parametrize("seed", range(6))
def test_inspect_describes_and_draws_any_plan(seed: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = rc.random_config(seed)
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert cli.main(["inspect", "--config", str(tmp_path / "config.json"), "--png", str(tmp_path / "plan.png")]) == 0
    report = inspect.describe(ModelConfig.from_hf(config))
    assert json.loads(json.dumps(report)) == report
    assert len(report["layers"]) == config["text_config"]["num_hidden_layers"]
    assert (tmp_path / "plan.png").stat().st_size > 10_000
    assert "Traceback" not in capsys.readouterr().err


def test_ranges_and_units_read_well() -> None:
    assert inspect.ranges([0, 1, 2, 5, 7, 8]) == "0-2, 5, 7-8"
    assert inspect.ranges([]) == ""
    assert [inspect.human_bytes(n) for n in (890, 4224, 2_703_360, 510_286_023_000)] == [
        *("890 bytes", "4.22 kB", "2.70 MB", "510.29 GB")
    ]
