"""`csa2 check` says what it compared, and fails when a recording differs by one number."""

import json
import shutil

import numpy as np
import pytest

from csa2_jax.cli import main
from tests.golden_sets import materialise


def _with_trace(tmp_path, change):
    """A copy of the tiny recording whose trace went through `change`."""
    source = materialise("tiny8_f32_noqat")
    target = tmp_path / "recording"
    target.mkdir()
    for name in ("config.json", "meta.json", "model.safetensors"):
        shutil.copy(source / name, target / name)
    with np.load(source / "trace.npz") as trace:
        arrays = {key: trace[key] for key in trace.files}
    change(arrays)
    np.savez(target / "trace.npz", **arrays)
    return target


def _two_steps(arrays):
    """Keep what the prefill and one decode step left: enough to fail."""
    for key in [k for k in arrays if k.startswith("decode") and not k.startswith("decode0/")]:
        del arrays[key]


@pytest.mark.smoke
def test_check_passes_on_the_recording_and_prints_every_step(tmp_path, capsys):
    assert main(["check", str(_with_trace(tmp_path, _two_steps)), "--part", "run"]) == 0
    printed = capsys.readouterr().out
    assert "f32_noqat" in printed
    for word in ("prefill", "decode0", "logits", "index_idx", "candidates", "gate_idx", "draft_ids", "100%"):
        assert word in printed
    assert "beyond tolerance" not in printed


@pytest.mark.parametrize(
    ("key", "quantity"),
    [("prefill/logits_all", "logits"), ("prefill/L7/index_idx", "index_idx"), ("decode0/L5/h", "h")],
)
def test_check_exits_1_on_one_wrong_number(tmp_path, capsys, key, quantity):
    def change(arrays):
        _two_steps(arrays)
        damaged = arrays[key].copy()
        flat = damaged.reshape(-1)
        # The last entry of the last query is a selected one; moving it to the row before changes the set.
        flat[-1] = flat[-1] * 1.5 + 1 if damaged.dtype.kind == "f" else damaged.reshape(-1)[-1] - 1
        if damaged.dtype.kind == "i":
            flat[-1] = next(i for i in range(37, 74) if i not in damaged[-1, -1])
        arrays[key] = damaged

    assert main(["check", str(_with_trace(tmp_path, change)), "--part", "run"]) == 1
    printed = capsys.readouterr().out
    assert "beyond tolerance: " + quantity in printed


def test_check_refuses_a_directory_that_is_no_recording(tmp_path, capsys):
    assert main(["check", str(tmp_path)]) == 2
    assert "config.json does not exist" in capsys.readouterr().err


def test_check_names_an_unknown_mode(tmp_path, capsys):
    target = _with_trace(tmp_path, _two_steps)
    meta = json.loads((target / "meta.json").read_text())
    (target / "meta.json").write_text(json.dumps(meta | {"mode": "f16"}))
    assert main(["check", str(target)]) == 2
    assert "mode='f16' must be one of" in capsys.readouterr().err
