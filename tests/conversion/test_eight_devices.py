"""Loading, Orbax's own restore and the plan, on one, two, four by two and eight devices: in a process that has eight."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_checkpoints_load_onto_meshes_as_asked() -> None:
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
    environment = {**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "tests/conversion/eight_devices.py"]
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=900)
    assert run.returncode == 0, run.stdout[-4000:]
    assert " passed" in run.stdout
    assert "skipped" not in run.stdout
